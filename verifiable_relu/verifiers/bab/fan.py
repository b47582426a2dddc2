"""Lines below and above smooth neurons, of which a search may choose any mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verifiable_relu.bounds.tuning import Bounds
from verifiable_relu.verifiers.bab.curves import curve, groups, lines_of_slopes

if TYPE_CHECKING:
    from verifiable_relu.verifiers.bab.folded import Folded

_FAN = 5
"""How many lines below a curve, and how many above it, others are mixed from."""


@dataclass(frozen=True, eq=False)
class Fan:
    """Lines below and above each smooth neuron of a system, from one end of its interval to the other.

    A mean of two lines that are below a curve is below it, so that every α in [0, 1] gives a line.

    Attributes:
        neurons: (s,) which neurons of the system these are.
        slopes, offsets: (2, s, lines), below and above.
    """

    neurons: Tensor
    slopes: Tensor
    offsets: Tensor

    @staticmethod
    def of(folded: Folded, dtype: torch.dtype) -> Fan:
        """The fan over a system's bounds."""
        neurons = folded.smooth.nonzero().squeeze(1)
        slopes, offsets = (torch.zeros(2, len(neurons), _FAN, dtype=torch.float64) for _ in range(2))
        for node, part in groups(folded, neurons):
            bounds = Bounds(folded.lower[neurons[part]], folded.upper[neurons[part]])
            slopes_of = curve(node).slopes
            middle, ends = slopes_of(node, bounds, False), slopes_of(node, bounds, True)
            for side in range(2):
                left, center, right = ends[side], middle[side], ends[2 + side]
                fan = torch.stack([left, (left + center) / 2, center, (center + right) / 2, right], 1)
                every = Bounds(*(end[:, None].expand_as(fan) for end in (bounds.lower, bounds.upper)))
                lines = lines_of_slopes(node, every, fan, fan).parts()
                slopes[side, part], offsets[side, part] = lines[2 * side], lines[2 * side + 1]
        return Fan(neurons, slopes.to(dtype), offsets.to(dtype))

    def at(self, chosen: slice, above: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slope and offset of lines, and their derivatives by α; each (rows, count).

        Args:
            chosen: which of the smooth neurons.
            above: (rows, count) bool, whether the line above is wanted, else that below.
            alpha: (rows, count) in [0, 1].
        """
        place = alpha * (_FAN - 1)
        piece = place.floor().clamp(0, _FAN - 2)
        weight, at = place - piece, piece.long()[..., None]
        found = []
        for table in (self.slopes, self.offsets):
            lines = torch.where(above[..., None], table[1, chosen], table[0, chosen])
            first, second = lines.gather(2, at)[..., 0], lines.gather(2, at + 1)[..., 0]
            found.append((torch.lerp(first, second, weight), (second - first) * (_FAN - 1)))
        (slope, turned), (offset, moved) = found
        return slope, offset, turned, moved
