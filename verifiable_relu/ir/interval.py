"""Elementwise intervals of a batch: what bounds know of a vector."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Interval:
    """``lower`` ≤ value ≤ ``upper``, element by element; both (batch, n).

    An interval with NaN for an end says nothing; one whose ends cross is empty.
    """

    lower: Tensor
    upper: Tensor

    def pick(self, sample: Tensor | None) -> Interval:
        """Return the intervals of the samples with these numbers, (count,); of all, in order, for None."""
        return self if sample is None else Interval(self.lower[sample], self.upper[sample])

    def columns(self, index: Tensor) -> Interval:
        """Return the intervals of the elements with these numbers, (count,)."""
        return Interval(self.lower[:, index], self.upper[:, index])

    def intersect(self, other: Interval) -> Interval:
        """Return what both say."""
        return Interval(torch.maximum(self.lower, other.lower), torch.minimum(self.upper, other.upper))

    def to(self, device: torch.device | str) -> Interval:
        """Return the intervals on a device."""
        return Interval(self.lower.to(device), self.upper.to(device))
