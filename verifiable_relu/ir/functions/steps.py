"""Functions that never fall and are constant but where they jump: signs and whole numbers.

**Bounds.** A sign is at least f(l) and at most f(u), with the jump between. Where f jumps at every whole number or
half, max(f(l), x − below) ≤ f(x) ≤ min(f(u), x + above). Either is a lower function that is flat and then rises, and an
upper one that rises and then is flat: a line of any slope is extreme against them at l, at u or at the corner. f itself
is computed without rounding, corners and offsets with at most four roundings of numbers that |s|·max(|l|, |u|) and the
offset add up to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.functions.function import Function, SlopeRange
from verifiable_relu.ir.interval import Interval
from verifiable_relu.rounding import above, below, divisor, negligible, smooth_divisor, unit_roundoff


@dataclass(frozen=True)
class StepRule:
    """A row of ``STEPS``.

    Attributes:
        value: f in torch, which rounds nothing.
        numpy: f in numpy, written apart.
        whole: f(n/d) of arrays of integers n and an integer d > 0.
        band: numbers (below, above) with x − below ≤ f(x) ≤ x + above; None where f jumps at 0 alone.
        operator: the operator of ONNX that computes f and nothing else, if there is one.
        versions: the opsets in which definitions of the operator began that mean f.
    """

    value: Callable[[Tensor], Tensor]
    numpy: Callable[[np.ndarray], np.ndarray]
    whole: Callable[[np.ndarray, int], np.ndarray]
    band: tuple[float, float] | None
    operator: str = ""
    versions: tuple[int, ...] = ()


def _sign(n: np.ndarray, d: int) -> np.ndarray:
    return (n > 0).astype(object) - (n < 0).astype(object)


def _nearest(n: np.ndarray, d: int) -> np.ndarray:
    whole, rest = (2 * n + d) // (2 * d), (2 * n + d) % (2 * d)
    return whole - ((rest == 0) & (whole % 2 == 1)).astype(object)


STEPS: dict[str, StepRule] = {
    # torch takes the sign of what is no number for 0, from which something could be proved.
    "Sign": StepRule(lambda x: torch.where(x.isnan(), x, x.sign()), np.sign, _sign, None, "Sign", (9, 13)),
    "Floor": StepRule(torch.floor, np.floor, lambda n, d: n // d, (1.0, 0.0), "Floor", (6, 13)),
    "Ceil": StepRule(torch.ceil, np.ceil, lambda n, d: -(-n // d), (0.0, 1.0), "Ceil", (6, 13)),
    # Halves go to the even neighbour.
    "Round": StepRule(torch.round, np.rint, _nearest, (0.5, 0.5), "Round", (11, 22)),
    "Truncate": StepRule(torch.trunc, np.trunc, lambda n, d: _sign(n, d) * (abs(n) // d), (1.0, 1.0)),
}
"""By kind."""


@dataclass(frozen=True)
class StepFunction(Function):
    """A function of ``STEPS``."""

    kind: str

    @property
    def step(self) -> StepRule:
        """The function's row of ``STEPS``."""
        return STEPS[self.kind]

    def value(self, x: Tensor) -> Tensor:
        found = self.step.value(x.detach())
        if not x.requires_grad:
            return found
        # A search that follows slopes would stand still: it gets those of a function that rises where steps do.
        rising = x if self.step.band else x / divisor(x.abs() + x.detach().abs().mean())
        return found + (rising - rising.detach())

    def exact(self, x: Dyadic, denominator: int) -> Dyadic:
        up, down = max(x.exponent, 0), max(-x.exponent, 0)
        whole = self.step.whole(x.numbers << up, denominator << down)
        return Dyadic(np.asarray(whole, dtype=object) * denominator, 0)

    def enclose(self, x: np.ndarray, error: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
        at, certain = self.step.numpy, error == 0
        y = at(x)
        low, high = (at(np.where(certain, x, end)) for end in (below(x - error), above(x + error)))
        return y, np.maximum(high - y, y - low)

    def image(self, x: Interval) -> Interval:
        return Interval(self.step.value(x.lower.detach()), self.step.value(x.upper.detach()))

    def unstable(self, x: Interval) -> Tensor:
        image = self.image(x)
        return ~(image.lower >= image.upper)

    def derivative_range(self, x: Interval) -> Interval:
        raise UnsupportedError("the change is not bounded through a function that jumps")

    def slopes(self, x: Interval, chosen_by: Interval | None = None) -> tuple[Tensor, Tensor]:
        found, (first, last), middle = self.slope_range(x), self._corners(x), x.lower / 2 + x.upper / 2
        return found.lower_to.masked_fill(middle <= first, 0), found.upper_from.masked_fill(middle >= last, 0)

    def slope_range(self, x: Interval) -> SlopeRange:
        image, (first, last) = self.image(x), self._corners(x)
        gap = image.upper - image.lower
        if self.step.band is None:
            # Where the jump is at an end, its line is upright.
            low = (gap / smooth_divisor(x.upper.clamp(min=0))).masked_fill(x.upper <= 0, 0)
            high = (gap / smooth_divisor(-x.lower.clamp(max=0))).masked_fill(x.lower >= 0, 0)
        else:
            low = high = (gap > 0).to(gap)
        return SlopeRange(low.masked_fill(first > x.lower, 0), low, high, high.masked_fill(last < x.upper, 0))

    def floor(self, x: Interval, slope: Tensor) -> Tensor:
        return self._offset(x, slope, 1)

    def top(self, x: Interval, slope: Tensor) -> Tensor:
        return self._offset(x, slope, -1)

    def _offset(self, x: Interval, slope: Tensor, sign: int) -> Tensor:
        """Return ``floor`` for a sign of 1, and for −1 ``top``, which mirrors it."""
        image, corners = self.image(x), self._corners(x)
        near, far, flat, end = x.lower, x.upper, image.lower, image.upper
        if sign < 0:
            near, far, flat, end = far, near, end, flat
        if self.step.band is not None:
            end = sign * torch.maximum(sign * flat, sign * far - self.step.band[sign < 0])
        corner = torch.minimum(torch.maximum(corners[sign < 0], x.lower), x.upper)
        heights = (sign * (y - slope * at) for y, at in ((flat, near), (flat, corner), (end, far)))
        least = functools.reduce(torch.minimum, heights)
        reach = torch.maximum(x.lower.abs(), x.upper.abs())
        error = 16 * unit_roundoff(least.dtype) * (slope.abs() * reach + least.abs())
        return sign * (least - error - negligible(least.dtype) * (1 + reach))

    def _corners(self, x: Interval) -> tuple[Tensor, Tensor]:
        """Return where the lower function begins to rise, and where the upper one ends to."""
        image = self.image(x)
        if self.step.band is None:
            return 0 * image.lower, 0 * image.upper
        return image.lower + self.step.band[0], image.upper - self.step.band[1]
