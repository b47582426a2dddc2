"""Piecewise-linear functions with one kink, at 0: ReLU, LeakyReLU and PReLU.

On [l, u] with l < 0 < u one linear bound goes through the kink, with any slope between the two of f, and the other is
the chord. CROWN's choice for the former is the slope that leaves less area: that of the larger part of the interval
(arXiv 1811.00866, section 3.4).

**Offsets.** f(x) − s·x is linear on both sides of 0 and 0 at 0, so that its extremes on [min(l, 0), max(u, 0)] are 0
and the values at both ends, (1 − s)·u and (a − s)·l. Each is a product of one difference: off by two units of roundoff
of itself, and by underflow. Where s lies between a and 1, the extreme on one side is 0 without rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.dyadic import Dyadic
from verifiable_relu.ir.functions.function import Function, SlopeRange
from verifiable_relu.ir.interval import Interval
from verifiable_relu.rounding import (
    ENCLOSE_OWN,
    ENCLOSE_TINY,
    ULPS,
    negligible,
    smooth_divisor,
    unit_roundoff,
)


@dataclass(frozen=True, eq=False)
class PiecewiseLinear(Function):
    """f(x) = max(x, 0) + slope_below·min(x, 0).

    Attributes:
        slope_below: one slope for all elements, (), or one for each, (n,), of any size and sign. 0 makes it ReLU.
    """

    slope_below: Tensor = field(default_factory=lambda: torch.zeros((), device="cpu"))
    kind: str = field(init=False)
    flat_below: bool = field(init=False)
    piecewise_linear = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "flat_below", not bool(self.slope_below.any()))
        object.__setattr__(self, "kind", "Relu" if self.flat_below else "LeakyRelu")
        object.__setattr__(self, "_slopes", {})

    @property
    def parameters(self) -> Mapping[str, Any]:
        return {} if self.flat_below else {"slope_below": self.slope_below}

    def select(self, index: Tensor) -> Function:
        return PiecewiseLinear(self.slope_below[index.to(self.slope_below.device)]) if self.slope_below.ndim else self

    def _below(self, like: Tensor) -> Tensor:
        """Return the slope in the dtype and on the device of a tensor."""
        cache: dict[tuple[torch.dtype, torch.device], Tensor] = vars(self)["_slopes"]
        key = (like.dtype, like.device)
        if key not in cache:
            cache[key] = self.slope_below.to(like)
        return cache[key]

    # What it computes

    def value(self, x: Tensor) -> Tensor:
        return x.relu() if self.flat_below else torch.where(x >= 0, x, self._below(x) * x)

    def exact(self, x: Dyadic, denominator: int) -> Dyadic:
        positive, negative = (Dyadic(part(x.numbers, 0), x.exponent) for part in (np.maximum, np.minimum))
        return positive + Dyadic.from_floats(self.slope_below.detach().cpu().numpy()) * negative

    def enclose(self, x: np.ndarray, error: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
        below = self.slope_below.detach().cpu().numpy().astype(x.dtype)
        y = np.where(x >= 0, x, below * x)
        rounded = ULPS * unit * np.abs(y)
        most = (np.maximum(np.abs(below), 1) * error + rounded) * ENCLOSE_OWN + ENCLOSE_TINY
        # Nothing is rounded in x, in −x, and in 0·x.
        moved = (error == 0) & ((x >= 0) | (np.abs(below) == 1))
        return y, np.where(moved | ((below == 0) & (x + error <= 0)), 0, most)

    # What bounds need

    def image(self, x: Interval) -> Interval:
        if self.flat_below:
            return Interval(x.lower.relu(), x.upper.relu())
        below, unit = self._below(x.lower), unit_roundoff(x.lower.dtype)
        ends = torch.stack([x.lower, x.upper])
        products = below * ends
        error = (2 * unit * products.abs()).add_(negligible(ends.dtype))
        low, high = (torch.where(ends >= 0, ends, products + sign * error) for sign in (-1, 1))
        lower, upper = low.amin(0), high.amax(0)
        # The sign of a product is never lost: f(x) ≥ 0 where x ≥ 0 or the slope is not positive.
        straddles = (x.lower < 0) & (x.upper > 0)
        falls = below <= 0
        lower = torch.where((x.lower >= 0) | falls, lower.relu(), lower)
        lower = torch.where(straddles & falls, lower.clamp(max=0), lower)
        return Interval(lower, torch.where((x.upper <= 0) & ~falls, upper.clamp(max=0), upper))

    def unstable(self, x: Interval) -> Tensor:
        # Of an interval that is not known (NaN) nothing is stable.
        return ~((x.lower >= 0) | (x.upper <= 0))

    def derivative_range(self, x: Interval) -> Interval:
        slopes = torch.stack([(x.lower >= 0).to(x.lower), (x.upper > 0).to(x.lower)])
        slopes = self._at_kink(slopes).masked_fill(x.lower.isnan() | x.upper.isnan(), torch.nan)
        return Interval(slopes.amin(0), slopes.amax(0))

    def slopes(self, x: Interval, chosen_by: Interval | None = None) -> tuple[Tensor, Tensor]:
        """Return slopes of both bounds: ``chosen_by`` decides between the slopes at the kink, ``x`` gives the chord."""
        lo, hi, chord = self._chord(x)
        by = x if chosen_by is None else chosen_by
        steep = (hi > 0) & ((by.upper > -by.lower) | (lo >= 0))
        return self._sorted(lo, self._at_kink(steep.to(lo)), chord)

    def slope_range(self, x: Interval) -> SlopeRange:
        lo, hi, chord = self._chord(x)
        low, high = ((lo >= 0) & (hi > 0)).to(lo), (hi > 0).to(lo)
        lower_from, upper_from = self._sorted(lo, self._at_kink(low), chord)
        lower_to, upper_to = self._sorted(lo, self._at_kink(high), chord)
        return SlopeRange(lower_from, lower_to, upper_from, upper_to)

    def _chord(self, x: Interval) -> tuple[Tensor, Tensor, Tensor]:
        """Return min(l, 0), max(u, 0) and the slope of f's chord between them: f's own slope where l or u is 0."""
        lo, hi = x.lower.clamp(max=0), x.upper.clamp(min=0)
        rise = hi if self.flat_below else hi - self._below(lo) * lo
        return lo, hi, rise / smooth_divisor(hi - lo)

    def _at_kink(self, steep: Tensor) -> Tensor:
        """Return 1 where ``steep`` is 1, and the slope below where it is 0."""
        return steep if self.flat_below else torch.where(steep > 0, steep, self._below(steep))

    def _sorted(self, like: Tensor, kink: Tensor, chord: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slopes of the lower and the upper bound: where f is convex, the chord is above f."""
        if self.flat_below:
            return kink, chord
        convex = self._below(like) <= 1
        return torch.where(convex, kink, chord), torch.where(convex, chord, kink)

    def floor(self, x: Interval, slope: Tensor) -> Tensor:
        below = self._below(slope)
        through_kink = (slope >= below) & (slope <= 1)
        left = slope if self.flat_below else slope - below
        return self._beyond(x, left, slope - 1, -1).masked_fill(through_kink, 0)

    def top(self, x: Interval, slope: Tensor) -> Tensor:
        if self.flat_below:
            return self._beyond(x, -slope, 1 - slope, 1)
        below = self._below(slope)
        through_kink = (slope <= below) & (slope >= 1)
        return self._beyond(x, below - slope, 1 - slope, 1).masked_fill(through_kink, 0)

    def _beyond(self, x: Interval, left: Tensor, right: Tensor, sign: int) -> Tensor:
        """Return ± the largest of left·l, right·u and 0, moved outward: the most by which s·x violates the bound.

        The derivative by the slope is that at an end, and 0 where no end is beyond the line.
        """
        most = torch.maximum(left * x.lower.clamp(max=0), right * x.upper.clamp(min=0)).relu()
        return most * (sign * (1 + 8 * unit_roundoff(most.dtype))) + sign * negligible(most.dtype)

    # What branching needs

    def split_point(self, x: Interval) -> Tensor:
        return (x.lower / 2 + x.upper / 2).masked_fill(self.unstable(x), 0)
