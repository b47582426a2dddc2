"""The check of counterexamples, which shares no code with the verifiers that claim them."""
