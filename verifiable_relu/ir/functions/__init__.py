"""The functions by name: of this package and of torch."""

from __future__ import annotations

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.functions.curves import CURVES
from verifiable_relu.ir.functions.function import Function, LinearRelaxation, SlopeRange
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.functions.smooth import Hardened, Smooth
from verifiable_relu.ir.functions.steps import STEPS, StepFunction

__all__ = [
    "TORCH",
    "Function",
    "Hardened",
    "LinearRelaxation",
    "PiecewiseLinear",
    "SlopeRange",
    "Smooth",
    "StepFunction",
    "function",
]

TORCH = {curve.torch: kind for kind, curve in CURVES.items() if curve.torch}
"""Kinds by the names of torch's operators (aten) that compute them where their options have the defaults."""


def function(kind: str, parameter: float = 1.0) -> Function:
    """Return a function without parameters of single elements, by its kind.

    Raises:
        UnsupportedError: if there is none.
    """
    if kind == "Relu":
        return PiecewiseLinear()
    if kind in STEPS:
        return StepFunction(kind)
    if kind not in CURVES:
        raise UnsupportedError(f"the function {kind} is not known")
    return Smooth(kind, parameter)
