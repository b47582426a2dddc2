"""Searches that decide queries: attacks, and branch and bound."""
