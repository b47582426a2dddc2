"""What bound propagation passes around."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Bounds:
    """Element-wise bounds of a batch: ``lower`` ≤ value ≤ ``upper``, both shaped (batch, *shape)."""

    lower: Tensor
    upper: Tensor

    def flat(self) -> Bounds:
        """The same bounds shaped (batch, neurons)."""
        return Bounds(self.lower.flatten(1), self.upper.flatten(1))


@dataclass(frozen=True)
class Lines:
    """A linear relaxation of an activation f on [l, u], neuron by neuron:

        lower_slope·x + lower_offset ≤ f(x) ≤ upper_slope·x + upper_offset  for all x in [l, u].

    All four are shaped like the bounds that they were made from.
    """

    lower_slope: Tensor
    lower_offset: Tensor
    upper_slope: Tensor
    upper_offset: Tensor

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All four, in this order."""
        return self.lower_slope, self.lower_offset, self.upper_slope, self.upper_offset
