"""Splits: for some neurons of piecewise-linear activations, on which side of zero their pre-activation is to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verifiable_relu.bounds.types import Bounds


@dataclass(frozen=True)
class Splits:
    """The phases of some neurons in each box of a batch.

    Attributes:
        phase: by activation node index, (batch, neurons): 1 for active, −1 for inactive, 0 for not split.
    """

    phase: Mapping[int, Tensor] = field(default_factory=dict)

    def clamp(self, index: int, pre: Bounds) -> Bounds:
        """Bounds of the input of activation ``index`` where the splits hold, (batch, *shape).

        A box in which no value is left has a lower bound above its upper one (``NodeBounds.empty``).
        """
        if index not in self.phase:
            return pre
        phase = self.phase[index].reshape(pre.lower.shape)
        return Bounds(
            torch.where(phase > 0, pre.lower.clamp(min=0), pre.lower),
            torch.where(phase < 0, pre.upper.clamp(max=0), pre.upper),
        )
