"""Sub-boxes of queries as one record of tensors, the stack of those that are open, and what is known in them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from verifiable_relu.ir.interval import Interval

NO_BOUNDS = -1
"""``SubBoxes.within`` of boxes in which nothing is known of neurons."""


@dataclass(frozen=True, eq=False)
class SubBoxes:
    """Sub-boxes of the queries of one network.

    Attributes:
        lower, upper: (boxes, inputs) their ends, float64.
        owner: (boxes,) the query of each.
        number: (boxes,) by which events name it.
        within: (boxes,) the serial number of a larger box in which neurons are bounded (``KnownBounds``).
    """

    lower: Tensor
    upper: Tensor
    owner: Tensor
    number: Tensor
    within: Tensor

    def __len__(self) -> int:
        return len(self.owner)

    def __getitem__(self, chosen: Tensor | slice) -> SubBoxes:
        return SubBoxes(*(column[chosen] for column in self.columns))

    @property
    def columns(self) -> list[Tensor]:
        """The tensors, in the order of the fields."""
        return [getattr(self, each.name) for each in fields(self)]

    @property
    def interval(self) -> Interval:
        """The ends."""
        return Interval(self.lower, self.upper)

    def whole(self, counted: Tensor) -> SubBoxes:
        """Return the boxes with ends moved inward to whole numbers in the inputs that are ``counted``, (inputs,)."""
        lower = torch.where(counted, self.lower.ceil(), self.lower)
        return replace(self, lower=lower, upper=torch.where(counted, self.upper.floor(), self.upper))

    def halves(self, dimension: Tensor, counted: Tensor, first: int) -> SubBoxes:
        """Return twice as many boxes: each cut in the middle of one input (boxes,), the lower halves first.

        Of ``counted`` inputs (inputs,) whole numbers alone matter: halves have none in common. A box that is one point
        along the input is both of its halves.

        Args:
            first: the number of the first half.
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


class Frontier:
    """A stack of boxes in tensors that grow; what came last is taken first, so that searches go deep."""

    def __init__(self, boxes: SubBoxes) -> None:
        self._columns, self._count = boxes.columns, len(boxes)

    def __len__(self) -> int:
        return self._count

    def push(self, boxes: SubBoxes) -> None:
        """Put boxes on the stack."""
        end = self._count + len(boxes)
        if end > len(self._columns[0]):
            self._columns = [
                torch.cat([old[: self._count], new, old.new_empty(end, *old.shape[1:])])
                for old, new in zip(self._columns, boxes.columns, strict=True)
            ]
        else:
            for old, new in zip(self._columns, boxes.columns, strict=True):
                old[self._count : end] = new
        self._count = end

    def pop(self, most: int) -> SubBoxes:
        """Take the last boxes, ``most`` at most."""
        cut = max(0, self._count - most)
        # Copies, since what is pushed next takes their place.
        taken = SubBoxes(*(column[cut : self._count].clone() for column in self._columns))
        self._count = cut
        return taken

    def every(self) -> SubBoxes:
        """Return all boxes, in order."""
        return SubBoxes(*(column[: self._count] for column in self._columns))


class KnownBounds:
    """The latest intervals of neurons over boxes, by serial number: a ring in which new ones replace the oldest.

    Args:
        most: how many boxes' intervals are kept.
    """

    def __init__(self, most: int) -> None:
        self._most, self._next = most, 0
        self._kept: dict[int, Interval] = {}
        self._serial: Tensor | None = None

    def keep(self, inputs: dict[int, Interval]) -> Tensor:
        """Keep the intervals of a batch of boxes, (batch, size) by op, and return their serial numbers, (batch,)."""
        some = next(iter(inputs.values())).lower
        count = len(some)
        serial = torch.arange(self._next, self._next + count, device=some.device)
        if count > self._most:
            return torch.full_like(serial, NO_BOUNDS)
        if self._serial is None:
            self._serial = torch.full((self._most,), NO_BOUNDS, device=some.device)
            self._kept = {
                i: Interval(*(end.new_empty(self._most, end.shape[1]) for end in (x.lower, x.upper)))
                for i, x in inputs.items()
            }
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
        place = within.clamp(min=0) % self._most
        lost = ((self._serial[place] != within) | (within == NO_BOUNDS))[:, None]
        return {
            i: Interval(x.lower[place].masked_fill(lost, -torch.inf), x.upper[place].masked_fill(lost, torch.inf))
            for i, x in self._kept.items()
        }
