"""Maxima between two of their candidates: each relaxed at once, over bounds of the candidates alone.

With l ≤ x ≤ u, y = max x, and t no less than l_j and every u_i but u_j,

    x_i ≤ y ≤ t + s·(x_j − l_j)   for any i, and s = (u_j − t)/(u_j − l_j),

because the right side is t where x_j = l_j, u_j where x_j = u_j, and never below t. Here i is the candidate with the
largest l, and j that with the largest u, with t as small as it may be; where l_j is no less than the other upper
bounds, s = 1 and y = x_j. The constant max u, which others take elsewhere, is nowhere lower. Source: Xiao et al.,
Towards General Robustness Verification of MaxPool-based Convolutional Neural Networks via Tightening Linear
Approximation, CVPR 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding, sums
from verifiable_relu.bounds.forward import NodeBounds
from verifiable_relu.bounds.kinds import of_samples
from verifiable_relu.bounds.tuning import Bounds
from verifiable_relu.network.nodes import Maximum
from verifiable_relu.rounding import divisor


@dataclass(frozen=True)
class Between:
    """x[low] + floor ≤ y ≤ slope·x[high] + top, maximum by maximum: (batch, size) each.

    Of the candidates' value x, or of its and the maxima's distance from their points.
    """

    low: Tensor
    high: Tensor
    slope: Tensor
    floor: Tensor
    top: Tensor

    @staticmethod
    def of(node: Maximum, box: Bounds) -> Between:
        """Over the box of the candidates, (batch, *shape), but for its own rounding."""
        lower, upper = node.seen(box.lower, -torch.inf), node.seen(box.upper, -torch.inf)
        least, (most, high) = lower.amax(1, keepdim=True), upper.max(1, keepdim=True)
        low = upper.masked_fill(lower != least, -torch.inf).argmax(1, keepdim=True)
        end, others = lower.gather(1, high), upper.scatter(1, high, -torch.inf).amax(1, keepdim=True)
        level = torch.maximum(others, end)
        slope = (most - level) / divisor(most - end)
        top = torch.maximum(level - slope * end, most - slope * most)
        numbers = node.candidates.to(low.device).expand(lower.shape)
        found = numbers.gather(1, low), numbers.gather(1, high), slope, torch.zeros_like(top), top
        return Between(*(part.squeeze(1) for part in found))

    def about(self, bounds: NodeBounds, index: int, sums: int) -> Between:
        """The same of the distances from the nodes' points, moved outward by what rounding may change."""
        node = bounds.network.maxima[index]
        source = node.inputs[0]
        x, y = bounds.point(source).flatten(1), bounds.point(index).flatten(1)
        seen = node.seen(bounds.size(source), -torch.inf).amax(1)
        error = rounding.maxima(torch.maximum(seen, bounds.size(index).flatten(1)), sums)
        floor = x.gather(1, self.low) + self.floor - y - error
        top = self.slope * x.gather(1, self.high) + self.top - y + error
        return Between(self.low, self.high, self.slope, floor, top)

    def to(self, dtype: torch.dtype) -> Between:
        """The same with slopes and constants in another dtype."""
        return Between(self.low, self.high, *(part.to(dtype) for part in (self.slope, self.floor, self.top)))

    def of_samples(self, sample: Tensor | None) -> Between:
        """Those of the samples named, one after another; by default of every sample."""
        return Between(*(of_samples(part, sample) for part in vars(self).values()))

    def at(self, x: Tensor, a: Tensor) -> Tensor:
        """(rows, size) the values at x, (rows, …), of the lines that rows a, (rows, size), take."""
        x = x.flatten(1)
        low, high = x.gather(1, self.low) + self.floor, self.slope * x.gather(1, self.high) + self.top
        return torch.where(a < 0, high, low)

    def back(self, a: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Coefficients of the candidates' value of those of maxima, (groups, each, size), and their constants."""
        negative = a.clamp(max=0)
        positive = a - negative
        before = a.new_zeros(*a.shape[:2], size)
        before.scatter_add_(2, self.low[:, None].expand_as(a), positive)
        before.scatter_add_(2, self.high[:, None].expand_as(a), negative * self.slope[:, None])
        return before, sums.dot(negative, self.top, (positive, self.floor))
