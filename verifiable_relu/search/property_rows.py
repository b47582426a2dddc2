"""Rows of the unsafe sets of many boxes in tensors of one shape, and weighted sums of a polytope's rows.

**Sums.** Where no single row of a conjunction is positive over a box, a sum of several may be. A polytope of the unsafe
set is where all of its rows g_k are at most 0; for weights w_k ≥ 0, so is Σ_k w_k·g_k there. The best weights make the
least value of that sum over the box as large as possible: this is the Lagrange dual (Boyd and Vandenberghe, Convex
Optimization, section 5.2) of the question by how much some row must be violated. Weights are looked for with affine
forms in the rows' place, by mirror ascent on the simplex (Beck and Teboulle, Mirror Descent and Nonlinear Projected
Subgradient Methods for Convex Optimization, Operations Research Letters 31, 2003). Any weights give a valid row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.ir.interval import Interval
from verifiable_relu.rounding import above, below, divisor, epsilon, mean_of_rows, quotient_below
from verifiable_relu.search.records import TensorRecord
from verifiable_relu.spec.property import Property
from verifiable_relu.spec.row_batch import RowBatch

_STEPS = 12  # Of the ascent
_GAIN = 0.1  # A sum is bounded if its form's least value is above that of every single row by this part of its size
_WEIGHT_UNIT = 1024  # Weights are multiples of 1/1024, so that sums of rows with small integers are exact


def input_box(properties: Sequence[Property], dtype: torch.dtype, device: torch.device | str) -> Interval:
    """Return the properties' boxes as one batch, (properties, inputs), rounded outward to a dtype."""
    lower, upper = (torch.from_numpy(np.stack([getattr(p.box, end) for p in properties])) for end in ("lower", "upper"))
    low, high = lower.to(dtype), upper.to(dtype)
    low, high = torch.where(low > lower, below(low), low), torch.where(high < upper, above(high), high)
    return Interval(low.to(device), high.to(device))


@dataclass(frozen=True, eq=False)
class BoxRows(TensorRecord):
    """The rows of the unsafe set of each box of a batch, or of each of some properties.

    All have as many rows and polytopes as the largest: others are filled with rows of a polytope that does not count.
    """

    matrix: Tensor  # (batch, rows, outputs), A of A·y ≤ b times ``scale``
    bound: Tensor  # (batch, rows), b times ``scale``
    scale: Tensor  # (batch, rows), positive: a row's value A·y − b divided by it counts for the margin
    polytope: Tensor  # (batch, rows) the number of each row's polytope; that of rows that fill is ``polytopes``
    exists: Tensor  # (batch, polytopes) bool
    members: Tensor  # (batch, polytopes, most) numbers of each polytope's rows; ``rows`` where it has fewer
    is_scaled: bool  # A scale may be other than 1
    weights: Tensor | None = None  # Of sums of rows, (batch, polytopes, most) whole numbers: those of ``members``

    @classmethod
    def from_properties(cls, properties: Sequence[Property], outputs: int, like: Tensor) -> BoxRows:
        """Return the rows of properties, on the device of a tensor."""
        flat, count = RowBatch.from_properties(properties, outputs), len(properties)
        (row, rows), (place, polytopes) = _places(flat.sample, count), _places(flat.owner, count)
        member, most = _places(flat.polytope, len(flat.owner))
        where, part = (flat.sample, row), place[flat.polytope]
        matrix, bound, scale = (t.new_zeros(count, rows, *t.shape[1:]) for t in (flat.matrix, flat.bound, flat.scale))
        matrix[where], bound[where], scale[where] = flat.matrix, flat.bound, flat.scale
        polytope = torch.full((count, rows), polytopes).index_put(where, part)
        exists = torch.zeros(count, polytopes, dtype=torch.bool).index_put((flat.owner, place), torch.tensor(True))
        members = torch.full((count, polytopes, most), rows).index_put((flat.sample, part, member), row)
        scale = torch.where(polytope < polytopes, scale, 1.0)
        found = cls(matrix, bound, scale, polytope, exists, members, bool((scale != 1).any()))
        return found.each(lambda t: t.to(like.device))

    def take(self, chosen: Tensor) -> BoxRows:
        """Return the rows of some of these, (count,) by number."""
        if len(self.bound) == 1:
            return self.each(lambda t: t.expand(len(chosen), *t.shape[1:]))
        return self.each(lambda t: t[chosen])

    def to(self, dtype: torch.dtype) -> BoxRows:
        """Return the rows with numbers of another dtype."""
        return replace(self, **{name: getattr(self, name).to(dtype) for name in ("matrix", "bound", "scale")})

    def values(self, y: Tensor) -> Tensor:
        """Return matrix·y − bound, (…, batch, rows), of outputs y, (…, batch, outputs)."""
        return (self.matrix @ y[..., None])[..., 0] - self.bound

    def unscaled(self, values: Tensor) -> Tensor:
        """Return values (…, batch, rows) of matrix·y − bound divided by ``scale``, rounded down."""
        return torch.where(self.scale == 1, values, quotient_below(values, self.scale)) if self.is_scaled else values

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of each polytope's rows, (…, batch, polytopes), in the margin's units.

        Lower bounds (…, batch, rows) of matrix·y − bound give lower bounds.
        """
        values = self.unscaled(values)
        kept = values.new_full((*values.shape[:-1], self.exists.shape[1] + 1), -torch.inf)
        found = kept.scatter_reduce(-1, self.polytope.expand_as(values), values, "amax")[..., :-1]
        return torch.where(self.exists, found, torch.inf)

    def margins(self, values: Tensor) -> Tensor:
        """Return the margins (…, batch) of values (…, batch, rows): the least of ``largest``."""
        return self.largest(values).amin(-1)

    def sums(self, values: Tensor, center: Tensor, along: Tensor) -> BoxRows:
        """Return a weighted sum of the rows of each polytope; no row where that promises no more than single rows do.

        The batch has as many rows as there are polytopes.

        Args:
            values: (batch, rows) lower bounds of the rows' values.
            center, along: (batch, rows) c and (batch, symbols, rows) a of affine forms c + Σ_k a_k·ε_k, ε_k ∈ [−1, 1],
                whose least values are near the rows' or below.
        """
        (batch, polytopes, most), rows = self.members.shape, self.bound.shape[1]
        present = self.members < rows
        index = torch.where(present, self.members, 0).flatten(1)
        bound, scale, c = (part.gather(1, index).view_as(present) for part in (self.bound, self.scale, center))
        a = along.gather(2, index[:, None].expand(-1, along.shape[1], -1)).view(batch, -1, polytopes, most)
        a = torch.where(present[:, :, None], a.transpose(1, 2), 0.0)
        matrix = self.matrix.gather(1, index[..., None].expand(-1, -1, self.matrix.shape[2])).view(*present.shape, -1)
        single = torch.where(present, c - a.abs().sum(2), -torch.inf).amax(2)
        weights, found = _ascend(torch.where(present, c, 0.0), a, present)
        weights = (weights * _WEIGHT_UNIT).round()[..., None]
        # Coefficients are integers, and sums of them below 2⁵³ exact.
        exact = (weights * matrix.abs()).sum(2).amax(2) < 2 / epsilon(weights.dtype)
        promising = (found > single + _GAIN * single.abs()) & (self.largest(values) <= 0)
        kept = promising & exact & (present.sum(2) > 1) & (weights.sum((2, 3)) > 0)
        weights = torch.where(kept[..., None, None], weights, 0.0)
        both = mean_of_rows((weights[..., 0] * bound).flatten(0, 1), (weights[..., 0] * scale).flatten(0, 1))
        bound, scale = (part.view_as(kept) for part in both)
        polytope = torch.where(kept, torch.arange(polytopes, device=kept.device), polytopes)
        bound, scale = torch.where(kept, bound, 0.0), torch.where(kept, scale, 1.0)
        return BoxRows(
            (weights * matrix).sum(2), bound, scale, polytope, self.exists, self.members, True, weights[..., 0]
        )

    def and_sums(self, sums: BoxRows) -> BoxRows:
        """Return these rows, and behind them sums of them."""
        names = ("matrix", "bound", "scale", "polytope")
        both = {name: torch.cat([getattr(self, name), getattr(sums, name)], 1) for name in names}
        return replace(self, **both, is_scaled=True, weights=sums.weights)


def _places(group: Tensor, groups: int) -> tuple[Tensor, int]:
    """Return the place of each element among those of its group, (n,) of ascending ``group``, and the largest count."""
    counts = torch.bincount(group, minlength=groups)
    place = torch.arange(len(group)) - (counts.cumsum(0) - counts)[group]
    return place, max(1, int(counts.max())) if groups else 1


def _ascend(center: Tensor, along: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights of the rows of each polytope, of sum 1, and the least value of the sum of their forms.

    ``center`` (batch, polytopes, rows) and ``along`` (batch, polytopes, symbols, rows) are of the forms; ``present``
    (batch, polytopes, rows) says where there is a row.
    """
    weights = present.to(center) / present.sum(2, keepdim=True).clamp(min=1)
    best, found = weights, torch.full_like(center[..., 0], -torch.inf)
    for step in range(_STEPS):
        mixed = (along @ weights[..., None])[..., 0]
        value = (weights * center).sum(2) - mixed.abs().sum(2)
        better = value > found
        best, found = torch.where(better[..., None], weights, best), torch.where(better, value, found)
        slope = center - (mixed.sign()[..., None, :] @ along)[..., 0, :]
        slope = torch.where(present, slope - (weights * slope).sum(2, keepdim=True), 0.0)
        longest = divisor(slope.abs().amax(2, keepdim=True))
        weights = weights * torch.exp(2 / (step + 2) ** 0.5 * slope / longest)
        weights = weights / divisor(weights.sum(2, keepdim=True))
    return best, found
