"""Rows of properties' unsafe sets as float64 tensors of one shape, and weighted sums of a polytope's rows.

Coefficients are exact rationals, which float64 need not represent. ``PropertyRows`` describe a set that contains the
unsafe set: a proof that its polytopes are not reached is a proof for the property.

**Sums.** Where no single row of a conjunction is positive over a box, a sum of several may be. A polytope of the unsafe
set is where all of its rows g_k are at most 0; for weights w_k ≥ 0, so is Σ_k w_k·g_k there. The best weights make the
least value of that sum over the box as large as possible: this is the Lagrange dual (Boyd and Vandenberghe, Convex
Optimization, section 5.2) of the question by how much some row must be violated. Weights are looked for with affine
forms in the rows' place, by mirror ascent on the simplex (Beck and Teboulle, Mirror Descent and Nonlinear Projected
Subgradient Methods for Convex Optimization, Operations Research Letters 31, 2003). Any weights give a valid row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import InputError
from verifiable_relu.ir.interval import Interval
from verifiable_relu.rounding import LONG_ROW, above, below, divisor, epsilon, mean_of_rows, quotient_below
from verifiable_relu.search.records import TensorRecord
from verifiable_relu.spec.property import Polytope, Property, round_up

_STEPS = 12  # Of the ascent
_GAIN = 0.1  # A sum is bounded if its form's least value is above that of every single row by this part of its size
_WEIGHT_UNIT = 1024  # Weights are multiples of 1/1024, so that sums of rows with small integers are exact


def input_box(properties: Sequence[Property], dtype: torch.dtype, device: torch.device | str) -> Interval:
    """Return the properties' boxes as one batch, (properties, inputs), rounded outward to a dtype."""
    lower, upper = (torch.from_numpy(np.stack([getattr(p.box, end) for p in properties])) for end in ("lower", "upper"))
    low, high = lower.to(dtype), upper.to(dtype)
    low, high = torch.where(low > lower, below(low), low), torch.where(high < upper, above(high), high)
    return Interval(low.to(device), high.to(device))


_FloatRow = tuple[tuple[tuple[int, float], ...], float, float]
"""Coefficients, bound and scale: the exact row's slack is at least (Σ coefficient·y_i − bound) / scale."""


def _float_rows(polytope: Polytope) -> list[list[_FloatRow]]:
    """Return polytopes with float64 coefficients whose union contains ``polytope``: one unless coefficients are long.

    Each row is multiplied by its scale, which makes its coefficients integers. If float64 represents them, the row is
    kept, with its bound rounded up. Otherwise the row A·y ≤ b is written as a sum of float64 rows A = A₀ + A₁ + … +
    A_k: the nearest row, the nearest row to the rest, and so on. Where A₀·y > b + t and A_j·y > −t/k for every j > 0,
    A·y > b holds. The polytope therefore lies in the union of the polytope with A₀·y ≤ b + t in the row's place and of
    the half-spaces {A_j·y ≤ −t/k}. Since |A_j| is at most 2⁻⁵³·max|A|, a small t puts these half-spaces far away from
    outputs of ordinary size. The value A·y − b is at least k + 1 times the least of the k + 1 parts' values.

    A row beyond the range of float64 is left out, which makes the polytope larger.
    """
    kept: list[_FloatRow] = []
    far: list[list[_FloatRow]] = []
    for row in polytope:
        factor = Fraction(math.lcm(*(c.denominator for _, c in row.coefficients)))
        rest = [(i, c * factor) for i, c in row.coefficients]
        parts: list[tuple[tuple[int, float], ...]] = []
        try:
            while rest or not parts:
                parts.append(tuple((i, float(c)) for i, c in rest))
                rest = [(i, c - Fraction(f)) for (i, c), (_, f) in zip(rest, parts[-1], strict=True) if c != f]
            first, *others = parts
            scale, bound = round_up(factor / len(parts)), row.bound * factor
            if others:
                spare = LONG_ROW * max(abs(bound), *(abs(Fraction(c)) for _, c in first))
                far += [[(part, round_up(-spare / len(others)), scale)] for part in others]
                bound += spare
            kept.append((first, round_up(bound), scale))
        except (OverflowError, InputError):
            continue
    return [kept, *far]


@dataclass(frozen=True, eq=False)
class PropertyRows(TensorRecord):
    """The rows of the unsafe set of each property of a batch (``_float_rows``).

    All have the shape of the largest property: others are padded with rows of a polytope that does not count.
    """

    matrix: Tensor  # (batch, rows, outputs), A of A·y ≤ b times ``scale``
    bound: Tensor  # (batch, rows), b times ``scale``
    scale: Tensor  # (batch, rows), positive: a row's value A·y − b divided by it counts for the margin
    polytope: Tensor  # (batch, rows) the number of each row's polytope; that of rows that fill is ``polytopes``
    exists: Tensor  # (batch, polytopes) bool
    origin: Tensor  # (batch, polytopes) the exact polytope of the property that each polytope equals or is part of
    members: Tensor  # (batch, polytopes, most) numbers of each polytope's rows; ``rows`` where it has fewer
    is_scaled: bool = False  # A scale may be other than 1
    weights: Tensor | None = None  # Of sums of rows, (batch, polytopes, most) whole numbers: those of ``members``

    @classmethod
    def from_properties(
        cls, properties: Sequence[Property], outputs: int, device: torch.device | str = "cpu"
    ) -> PropertyRows:
        """Return the rows of properties of a network with ``outputs`` outputs."""
        # Properties of one class share their unsafe set.
        unsafe = {id(prop.unsafe): prop.unsafe for prop in properties}
        made = [
            [(number, part) for number, polytope in enumerate(each) for part in _float_rows(polytope)]
            for each in unsafe.values()
        ]
        count, rows = len(made), max([1, *(sum(len(part) for _, part in parts) for parts in made)])
        polytopes = max([1, *map(len, made)])
        most = max([1, *(len(part) for parts in made for _, part in parts)])
        matrix, bound, scale = np.zeros((count, rows, outputs)), np.zeros((count, rows)), np.ones((count, rows))
        polytope, members = np.full((count, rows), polytopes), np.full((count, polytopes, most), rows)
        exists, origin = np.zeros((count, polytopes), bool), np.zeros((count, polytopes), int)
        for at, parts in enumerate(made):
            row = 0
            for number, (given, part) in enumerate(parts):
                mine = slice(row, row + len(part))
                exists[at, number], origin[at, number], polytope[at, mine] = True, given, number
                members[at, number, : len(part)] = range(row, mine.stop)
                for coefficients, level, factor in part:
                    bound[at, row], scale[at, row] = level, factor
                    for column, value in coefficients:
                        matrix[at, row, column] = value
                    row += 1
        tensors: Any = (torch.from_numpy(part) for part in (matrix, bound, scale, polytope, exists, origin, members))
        place = {key: number for number, key in enumerate(unsafe)}
        found = replace(cls(*tensors), is_scaled=bool((scale != 1).any())).each(lambda t: t.to(device))
        return found.take(
            torch.tensor([place[id(prop.unsafe)] for prop in properties], dtype=torch.long, device=device)
        )

    def take(self, chosen: Tensor) -> PropertyRows:
        """Return the rows of some of these, (count,) by number."""
        if len(self.bound) == 1:
            return self.each(lambda t: t.expand(len(chosen), *t.shape[1:]))
        return self.each(lambda t: t[chosen])

    def to(self, dtype: torch.dtype) -> PropertyRows:
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

    def sums(self, values: Tensor, center: Tensor, along: Tensor) -> PropertyRows:
        """Return a weighted sum of each polytope's rows; no row where it promises no more than a single row.

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
        made = {"matrix": (weights * matrix).sum(2), "bound": bound, "scale": scale, "polytope": polytope}
        return replace(self, **made, is_scaled=True, weights=weights[..., 0])

    def and_sums(self, sums: PropertyRows) -> PropertyRows:
        """Return these rows, followed by sums of them."""
        names = ("matrix", "bound", "scale", "polytope")
        both = {name: torch.cat([getattr(self, name), getattr(sums, name)], 1) for name in names}
        return replace(self, **both, is_scaled=True, weights=sums.weights)


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
