"""Verifiers of other projects as methods; their verdicts are not verified here, and labelled ``float``."""
