"""Families of functions between a gated function and ReLU: bounds that hold for all members at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.functions.function import Function, SlopeRange
from verifiable_relu.ir.functions.kinked import Kinked
from verifiable_relu.ir.functions.smooth import Smooth
from verifiable_relu.ir.interval import Interval

_RELU = Kinked()


@dataclass(frozen=True, eq=False)
class Hardened(Function):
    """ReLU and every x·P(λx) with λ ≥ 1, x·P(x) being a gated function: ``value`` is ReLU's.

    x·P(λx) never falls as λ grows, so that all members lie between that of λ = 1 and ReLU (arXiv 2603.21991). Of
    λ-GELU, ``least`` has the least λ. A counterexample speaks of the limit, ReLU.
    """

    least: Smooth
    kind = "Hardened"
    gated = True

    @property
    def parameters(self) -> Mapping[str, Any]:
        return {"function": self.least.kind, **self.least.parameters}

    @property
    def limit(self) -> Function:
        return _RELU

    def value(self, x: Tensor) -> Tensor:
        return x.relu()

    def enclose(self, x: np.ndarray, error: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
        raise UnsupportedError("stands for a set of activations, not for one value")

    def image(self, x: Interval) -> Interval:
        return Interval(self.least.image(x).lower, x.upper.relu())

    def unstable(self, x: Interval) -> Tensor:
        return self.least.unstable(x)

    def derivative_range(self, x: Interval) -> Interval:
        raise UnsupportedError("the change is not bounded through a set of activations")

    def slopes(self, x: Interval, chosen_by: Interval | None = None) -> tuple[Tensor, Tensor]:
        return self.least.slopes(x)[0], _RELU.slopes(x)[1]

    def slope_range(self, x: Interval) -> SlopeRange:
        smooth, chord = self.least.slope_range(x), _RELU.slopes(x)[1]
        return SlopeRange(smooth.lower_from, smooth.lower_to, chord, chord)

    def floor(self, x: Interval, slope: Tensor) -> Tensor:
        return self.least.floor(x, slope)

    def top(self, x: Interval, slope: Tensor) -> Tensor:
        return _RELU.top(x, slope)

    def split_point(self, x: Interval) -> Tensor:
        return _RELU.split_point(x)
