"""Lazy SMT: z3 searches the phases of neurons, and bounds with rounding accounted for say what they mean."""

from verifiable_relu.verifiers.lazy.verifier import LazySmt

__all__ = ["LazySmt"]
