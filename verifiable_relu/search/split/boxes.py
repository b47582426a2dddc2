"""Sub-boxes of queries as one record of tensors, what is known in them, and what is proven.

The search hands events, which are batches of tensors, to an observer, for writers of certificates: all that it proves,
at the moment it proves it. Multipliers are hints: whoever chose them, the inequality that they stand for holds, so that
they may be rounded to few bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verifiable_relu.ir.interval import Interval
from verifiable_relu.search.property_rows import BoxRows
from verifiable_relu.search.records import TensorRecord

NO_BOUNDS = -1  # ``SubBoxes.within`` of boxes in which nothing is known of neurons


@dataclass(frozen=True, eq=False)
class SubBoxes(TensorRecord):
    """Sub-boxes of the queries of one network."""

    lower: Tensor  # (boxes, inputs), float64, as ``upper``
    upper: Tensor
    owner: Tensor  # (boxes,) the query of each
    number: Tensor  # (boxes,) by which events name it
    within: Tensor  # (boxes,) the serial number of a larger box in which neurons are bounded (``KnownBounds``)

    def whole(self, counted: Tensor) -> SubBoxes:
        """Return the boxes with ends moved inward to whole numbers in the inputs that are ``counted``, (inputs,)."""
        lower = torch.where(counted, self.lower.ceil(), self.lower)
        return replace(self, lower=lower, upper=torch.where(counted, self.upper.floor(), self.upper))

    def halves(self, dimension: Tensor, counted: Tensor, first: int) -> SubBoxes:
        """Return twice as many boxes: each cut in the middle of one input (boxes,), the lower halves first.

        Of ``counted`` inputs (inputs,) whole numbers alone matter: halves have none in common. A box that is one point
        along the input is both of its halves. The first half has the number ``first``.
        """
        dimension = dimension[:, None]
        low, high = self.lower.gather(1, dimension), self.upper.gather(1, dimension)
        middle, whole = low + (high - low) / 2, counted[dimension]
        middle = torch.where(whole, middle.floor(), middle)
        beyond = torch.minimum(middle + whole.to(middle), high)
        lower = torch.cat([self.lower, self.lower.scatter(1, dimension, beyond)])
        upper = torch.cat([self.upper.scatter(1, dimension, middle), self.upper])
        number = torch.arange(first, first + 2 * len(self), device=lower.device)
        return SubBoxes(lower, upper, self.owner.repeat(2), number, self.within.repeat(2))


class KnownBounds:
    """The intervals of neurons over the latest ``most`` boxes, by serial number: new ones replace the oldest."""

    def __init__(self, most: int) -> None:
        self._most, self._next = most, 0
        self._kept: dict[int, Interval] = {}
        self._serial: Tensor | None = None

    def keep(self, inputs: Mapping[int, Interval]) -> Tensor:
        """Keep the intervals of a batch of boxes, (batch, size) by op, and return their serial numbers, (batch,)."""
        some = next(iter(inputs.values())).lower
        count = len(some)
        serial = torch.arange(self._next, self._next + count, device=some.device)
        if count > self._most:
            return torch.full_like(serial, NO_BOUNDS)
        if self._serial is None:
            self._serial = torch.full((self._most,), NO_BOUNDS, device=some.device)
            for i, x in inputs.items():
                self._kept[i] = Interval(*(end.new_empty(self._most, end.shape[1]) for end in (x.lower, x.upper)))
        place = serial % self._most
        self._serial[place] = serial
        for i, x in inputs.items():
            self._kept[i].lower[place], self._kept[i].upper[place] = x.lower, x.upper
        self._next += count
        return serial

    def over(self, within: Tensor) -> dict[int, Interval]:
        """Return the intervals of boxes by their serial numbers, (boxes,): infinite where nothing is known any more."""
        if self._serial is None:
            return {}
        place, found = within.clamp(min=0) % self._most, {}
        lost = ((self._serial[place] != within) | (within == NO_BOUNDS))[:, None]
        for i, x in self._kept.items():
            lower, upper = x.lower[place].masked_fill(lost, -torch.inf), x.upper[place].masked_fill(lost, torch.inf)
            found[i] = Interval(lower, upper)
        return found


@dataclass(frozen=True, eq=False)
class BoxesBounded:
    """Rows of the boxes' properties are bounded from below; a box with a positive margin is proved."""

    boxes: SubBoxes
    intervals: Mapping[int, Interval]  # Of the ops that feed nonlinear ops, over each box, by number
    # λ_j/K_j of elementwise ops on which the intervals rest, (boxes, size) by number; none where these rest on CROWN's
    # own (``Function.slopes``)
    slopes: Mapping[int, Tensor]
    rows: BoxRows  # Sums of rows among them
    values: Tensor  # (boxes, rows) their lower bounds
    coefficients: Tensor  # (boxes, rows, inputs) of the linear bounds that have these least values
    by_slopes: Tensor  # (boxes, rows) whether a row's bound rests on ``slopes``, else on CROWN's over the intervals


@dataclass(frozen=True, eq=False)
class BoxesClipped:
    """Nothing beyond the ends of ``rest``, by the same numbers, is unsafe: by rows of the latest ``BoxesBounded``."""

    rest: SubBoxes  # Ends cross where nothing is left
    row: Tensor  # (2, boxes, polytopes, inputs) that cuts most of a polytope off at the lower and the upper end
    ends: Tensor  # Likewise, these ends: what the rows leave of each polytope


@dataclass(frozen=True, eq=False)
class BoxesHalved:
    """Boxes are the union of ``children``: the lower halves, then the upper ones, of what clipping left of each."""

    parent: Tensor
    children: SubBoxes


Event = BoxesBounded | BoxesClipped | BoxesHalved
Observer = Callable[[Event], None]
