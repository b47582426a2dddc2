"""Branch and bound on a fixed root: one relaxation for a whole tree, and multipliers as the proof of every leaf."""

from verifiable_relu.verifiers.bab.verifier import Bab

__all__ = ["Bab"]
