"""Adversarial tests: no verifier and no bound may ever say more than exact arithmetic does."""
