"""Counterexamples as they are checked; shares no code with the verifiers that claim them."""
