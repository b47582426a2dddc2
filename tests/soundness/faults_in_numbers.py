"""Faults in the numbers that are derived from a network's own, and in what they are said to be off by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from verifiable_relu.readers.onnx.constants import evaluated

from .fault import Fault, instead

Right = Callable[..., Any]


def _in_floats(right: Right, gamma: Tensor, variance: Tensor, epsilon: float) -> tuple[Tensor, float]:
    return gamma.double() / (variance.double() + epsilon).sqrt(), 2.0**-51


def _in_its_own_type(right: Right, node: onnx.NodeProto, inputs: Sequence[np.ndarray], opset: int) -> list[np.ndarray]:
    return evaluated(node, inputs, opset)


def _underflowing(right: Right, factor: Fraction, error: Fraction) -> tuple[Tensor, float] | None:
    if abs(factor) >= 1:
        found: tuple[Tensor, float] | None = right(factor, error)
        return found
    nearest = float(factor)
    return torch.tensor(nearest, dtype=torch.float64), float(error) + 2.0**-53


def _exactly(right: Right, *args: Any) -> tuple[Tensor, float]:
    return right(*args)[0], 0.0


IN_NUMBERS = (
    Fault(
        "constants computed in the file's own number type",
        "magnitudes",
        instead("readers.onnx.constants:folded", _in_its_own_type),
    ),
    Fault(
        "the factor of a batch normalisation that underflows taken for zero",
        "factors",
        instead("readers.derived:deviations", _in_floats),
    ),
    Fault(
        "the factor outside of a spelled GELU that underflows taken for zero",
        "factors",
        instead("readers.derived:multiple", _underflowing),
    ),
    Fault(
        "a rounded quotient taken for exact",
        "magnitudes",
        instead("readers.derived:quotient", _exactly),
    ),
    Fault(
        "rounded constants taken for exact",
        "magnitudes",
        instead("readers.derived:rounded", _exactly),
    ),
    Fault(
        "1/n of a mean taken for exact",
        "magnitudes",
        instead("readers.derived:share", _exactly),
    ),
)
