"""Elementwise functions: one object answers every question of the verifier about a function.

    relu = PiecewiseLinear()
    slopes = relu.slopes(interval)                # CROWN's slopes: a heuristic choice
    relaxation = relu.relaxation(interval, *slopes)   # linear bounds with these slopes: sound for every choice

A function has one subclass of ``Function``, or is one row of ``Smooth``: that is all that verdicts need. Certificates
also need one row of the checker (``check``), which reads networks by itself.

**Slopes are hints, offsets are proofs.** ``floor(interval, s)`` and ``top(interval, s)`` are sound for every slope s
that floating point can hold: rounding is accounted for in them. Whoever chooses slopes (CROWN's area rule, α-CROWN's
ascent, branch and bound) cannot make a bound wrong.

Tensors of intervals are (batch, n). Slopes and offsets have the interval's shape, or axes in front of it (one slope for
each row of α-CROWN). Everything runs on the device and in the dtype of its arguments: parameters follow them. In
float64 what is said here holds without reserve. In float32 it holds where the function's parameters are float32
numbers; else the caller must not prove with it. A relaxation for a backward pass in float32 is made in float64, of
slopes that are float32 numbers.

An interval with NaN for an end has NaN for an image, and linear bounds that are NaN or hold for every x; where a
function is not defined on all of an interval, both are NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.dyadic import Dyadic
from verifiable_relu.ir.interval import Interval


@dataclass(frozen=True, eq=False)
class LinearRelaxation:
    """lower_slope·x + lower_offset ≤ f(x) ≤ upper_slope·x + upper_offset for all x of an interval; same shapes."""

    lower_slope: Tensor
    lower_offset: Tensor
    upper_slope: Tensor
    upper_offset: Tensor


@dataclass(frozen=True, eq=False)
class SlopeRange:
    """Slopes among which α-CROWN chooses: from ``lower_from`` to ``lower_to``, and the same of the upper line."""

    lower_from: Tensor
    lower_to: Tensor
    upper_from: Tensor
    upper_to: Tensor


class Function(ABC):
    """A function of one real variable, applied to each element of a vector.

    Attributes, of the class or of an instance:
        kind: the name in digests, certificates and messages: "Relu", "GELU", "Sigmoid".
        piecewise_linear: whether f is continuous, and linear left and right of 0.
        increasing: whether f increases everywhere.
    """

    kind: str
    piecewise_linear: bool = False
    increasing: bool = False

    # What it computes

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """Return f(x), element by element, within the error that ``image`` accounts for; NaN where f is not defined."""

    def exact(self, x: Dyadic, denominator: int) -> Dyadic | None:
        """Return f(x/denominator)·denominator^degree for integers times powers of two; None where f is irrational."""
        return None

    degree: int = 1
    """The power of the denominator with which ``exact`` scales its result: 2 for a square."""

    wide: bool = True
    """Whether ``enclose`` computes in formats wider than float64 with their accuracy."""

    @abstractmethod
    def enclose(self, x: np.ndarray, error: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
        """Return y and its error: |f(t) − y| ≤ error for every t with |t − x| ≤ ``error``.

        y is computed by numpy in the dtype of x (float64 or wider), apart from ``value``, which it checks.

        Args:
            x: of any shape.
            error: of the same shape; inf or NaN where x is not known.
            unit: the unit roundoff of the arithmetic that computes f(x), here or elsewhere.
        """

    # What bounds need

    @abstractmethod
    def image(self, x: Interval) -> Interval:
        """Return an interval that holds f of every number of the interval, rounding included."""

    @abstractmethod
    def unstable(self, x: Interval) -> Tensor:
        """Return True where f is not one linear function on the interval: there tighter bounds of x help.

        True where an end is NaN.
        """

    @abstractmethod
    def slopes(self, x: Interval, chosen_by: Interval | None = None) -> tuple[Tensor, Tensor]:
        """Return slopes of a lower and an upper linear bound: CROWN's choice (arXiv 1811.00866, sections 3.3–3.4).

        Args:
            x: the interval.
            chosen_by: bounds of x that decide the choice, if ``x`` combines bounds of several sources.
        """

    @abstractmethod
    def slope_range(self, x: Interval) -> SlopeRange:
        """Return the range of slopes from which α-CROWN chooses."""

    @abstractmethod
    def floor(self, x: Interval, slope: Tensor) -> Tensor:
        """Return an offset t with s·x + t ≤ f(x) on the interval in real arithmetic, differentiable in s."""

    @abstractmethod
    def top(self, x: Interval, slope: Tensor) -> Tensor:
        """Return an offset t with s·x + t ≥ f(x) on the interval in real arithmetic, differentiable in s."""

    def relaxation(self, x: Interval, lower_slope: Tensor, upper_slope: Tensor) -> LinearRelaxation:
        """Return the linear relaxation with these slopes."""
        return LinearRelaxation(lower_slope, self.floor(x, lower_slope), upper_slope, self.top(x, upper_slope))

    # What branching needs

    def split_point(self, x: Interval) -> Tensor:
        """Return where branch and bound splits the interval of each neuron: a kink inside it, else its middle."""
        return x.lower / 2 + x.upper / 2

    @abstractmethod
    def derivative_range(self, x: Interval) -> Interval:
        """Return bounds of (f(s) − f(t))/(s − t) for s, t in the interval, rounding included: for differences."""

    flat_below: bool = False
    """Whether f is constant left of its only kink, so that the lower bound of an inactive neuron is of no use."""

    # What readers need

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Parameters by name (tensors, numbers or names) that, with ``kind``, define the function: for digests."""
        return {}

    def select(self, index: Tensor) -> Function:
        """Return the function of some elements: itself unless elements have parameters of their own."""
        return self

    def is_same(self, other: Function) -> bool:
        """Return True if both are one function, and the same for all elements."""
        mine, theirs = self.parameters, other.parameters
        alike = self.kind == other.kind and mine.keys() == theirs.keys()
        return alike and all(map(_equal, mine.values(), theirs.values()))

    # Families of networks (arXiv 2603.21991)

    @property
    def limit(self) -> Function:
        """Return the function itself, or ReLU for a family of functions that tends to it."""
        return self

    gated: bool = False
    """Whether f(x) = x·P(x) with a P that never falls, from 0 to 1, and 1 − P(x) ≤ P(−x) for x ≥ 0; then 0 ≤ ReLU(x) −
    f(x) ≤ −f(−|x|), and x·P(λx) never falls as λ > 0 grows."""


def _equal(first: Any, second: Any) -> bool:
    tensors = isinstance(first, Tensor), isinstance(second, Tensor)
    return torch.equal(first.cpu(), second.cpu()) if all(tensors) else not any(tensors) and bool(first == second)
