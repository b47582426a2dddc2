"""The independent checker of counterexamples: it knows networks and properties, no bound and no verifier."""

from verifiable_relu.trust.exact import evaluate_exact
from verifiable_relu.trust.replay import Confirmation, confirm

__all__ = ["Confirmation", "confirm", "evaluate_exact"]
