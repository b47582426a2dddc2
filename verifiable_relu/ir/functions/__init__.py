"""The functions by name: of this package, of ONNX and of torch."""

from __future__ import annotations

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.functions.curves import CURVES
from verifiable_relu.ir.functions.function import Function, LinearRelaxation, OnnxSpelling, SlopeRange
from verifiable_relu.ir.functions.hardened import Hardened
from verifiable_relu.ir.functions.kinked import Kinked
from verifiable_relu.ir.functions.smooth import Smooth
from verifiable_relu.ir.functions.steps import STEPS, StepFunction

__all__ = [
    "ONNX",
    "TORCH",
    "Function",
    "Hardened",
    "Kinked",
    "LinearRelaxation",
    "OnnxSpelling",
    "SlopeRange",
    "Smooth",
    "StepFunction",
    "function",
]

ONNX = {row.operator: kind for rows in (CURVES, STEPS) for kind, row in rows.items() if row.operator}
"""Kinds by the operators of ONNX that mean them and nothing else; ``Function.spelling`` has opsets and attributes."""

TORCH = {curve.torch: kind for kind, curve in CURVES.items() if curve.torch}
"""Kinds by the names of torch's operators (aten) that compute them where their options have the defaults."""


def function(kind: str, parameter: float = 1.0) -> Function:
    """Return a function without parameters of single elements, by its kind.

    Raises:
        UnsupportedError: if there is none.
    """
    if kind == "Relu":
        return Kinked()
    if kind in STEPS:
        return StepFunction(kind)
    if kind not in CURVES:
        raise UnsupportedError(f"the function {kind} is not known")
    return Smooth(kind, parameter)
