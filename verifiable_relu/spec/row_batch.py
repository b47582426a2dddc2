"""The rows of properties' unsafe sets in float64, as tensors, for bounds and searches.

Coefficients are exact rationals, which float64 need not represent. A ``RowBatch`` describes a set that contains the
unsafe set: a proof that its polytopes are not reached is a proof for the property.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from verifiable_relu.errors import InputError
from verifiable_relu.rounding import LONG_ROW, epsilon, mean_of_rows, quotient_below
from verifiable_relu.spec.property import Polytope, Property, round_up

if TYPE_CHECKING:  # The reading and writing of property files must not wait for torch.
    from torch import Tensor


def _members(group: Tensor, chosen: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return chosen groups' members (positions in ``group``, which ascends), and for each its choice.

    Also returns by how much the first member of each choice lies further on in ``group`` than in the result.
    """
    import torch

    counts = torch.bincount(group, minlength=groups)
    taken = counts[chosen]
    moved = (counts.cumsum(0) - counts)[chosen] - (taken.cumsum(0) - taken)
    choice = torch.repeat_interleave(torch.arange(len(chosen), device=chosen.device), taken)
    return torch.arange(len(choice), device=chosen.device) + moved[choice], choice, moved


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


@dataclass(frozen=True)
class RowBatch:
    """The rows of several properties' polytopes in float64, one after the other (``_float_rows``).

    Attributes:
        matrix: (rows, outputs), A of A·y ≤ b times ``scale``.
        bound: (rows,), b times ``scale``.
        scale: (rows,), positive: a row's value A·y − b divided by it counts for the margin.
        sample: (rows,), the property of each row.
        polytope: (rows,), the polytope of each row, numbered over all properties.
        owner: (polytopes,), the property of each polytope.
        origin: (polytopes,), the exact polytope, numbered over all properties, that each polytope equals or is part of.
        samples: the number of properties.
    """

    matrix: Tensor
    bound: Tensor
    scale: Tensor
    sample: Tensor
    polytope: Tensor
    owner: Tensor
    origin: Tensor
    samples: int

    @classmethod
    def from_properties(cls, properties: Sequence[Property], outputs: int) -> RowBatch:
        """Return the rows of properties of a network with ``outputs`` outputs."""
        import torch

        entries: list[tuple[int, int, float]] = []
        rows: list[tuple[float, float, int, int]] = []
        parts: list[tuple[int, int]] = []
        given = 0
        # Properties of one class share their unsafe set.
        known = {id(prop.unsafe): prop.unsafe for prop in properties}
        made = {key: [_float_rows(polytope) for polytope in unsafe] for key, unsafe in known.items()}
        for index, prop in enumerate(properties):
            for polytope in made[id(prop.unsafe)]:
                for part in polytope:
                    for coefficients, bound, scale in part:
                        entries += [(len(rows), column, value) for column, value in coefficients]
                        rows.append((bound, scale, index, len(parts)))
                    parts.append((index, given))
                given += 1
        matrix = torch.zeros(len(rows), outputs, dtype=torch.float64)
        if entries:
            at, columns, values = zip(*entries, strict=True)
            matrix[list(at), list(columns)] = torch.tensor(values, dtype=torch.float64)
        bounds, scales, sample, member = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4).unbind(1)
        owner, origin = torch.tensor(parts, dtype=torch.long).reshape(-1, 2).unbind(1)
        return cls(matrix, bounds, scales, sample.long(), member.long(), owner, origin, len(properties))

    def to(self, like: Tensor) -> RowBatch:
        """Return the rows on a tensor's device and in its dtype."""
        values: dict[str, Any] = {name: getattr(self, name).to(like) for name in ("matrix", "bound", "scale")}
        numbers = {name: getattr(self, name).to(like.device) for name in ("sample", "polytope", "owner", "origin")}
        return replace(self, **values, **numbers)

    def take(self, samples: Tensor) -> RowBatch:
        """Return the rows of the properties ``samples`` (n,), as n properties; repetitions are allowed."""
        row, row_of, _ = _members(self.sample, samples, self.samples)
        chosen, polytope_of, moved = _members(self.owner, samples, self.samples)
        polytope = self.polytope[row] - moved[row_of]
        values = self.matrix[row], self.bound[row], self.scale[row]
        return RowBatch(*values, row_of, polytope, polytope_of, self.origin[chosen], len(samples))

    def sums(self, polytopes: Tensor, members: Tensor, weights: Tensor) -> RowBatch:
        """Return a weighted sum of the rows of each of some polytopes, at most 0 where all of these are.

        Coefficients are integers, as are weights, so that sums below 2⁵³ (in float64) are exact; polytopes with larger
        ones are left out. Bounds are rounded up. A sum's value divided by its scale Σ w·scale is a mean of the rows'
        values, each divided by its own scale, and so at most the largest of them.

        Args:
            polytopes: (p,) their numbers.
            members: (p, r) rows of each.
            weights: (p, r) integers ≥ 0; 0 where there is no such row.
        """
        matrix = self.matrix[members]
        whole = 2 / epsilon(matrix.dtype)
        exact = ((weights[..., None] * matrix.abs()).sum(1).amax(1) < whole) & (weights.sum(1) > 0)
        polytopes, members, weights, matrix = polytopes[exact], members[exact], weights[exact], matrix[exact]
        bound, scale = mean_of_rows(weights * self.bound[members], weights * self.scale[members])
        owner = self.owner[polytopes]
        total = (weights[..., None] * matrix).sum(1)
        return RowBatch(total, bound, scale, owner, polytopes, self.owner, self.origin, self.samples)

    def and_sums(self, sums: RowBatch) -> RowBatch:
        """Return these rows, and behind them their ``sums``: a batch of which ``take`` takes none."""
        import torch

        names = ("matrix", "bound", "scale", "sample", "polytope")
        both: dict[str, Any] = {name: torch.cat([getattr(self, name), getattr(sums, name)]) for name in names}
        return replace(self, **both)

    def unscaled(self, row_values: Tensor) -> Tensor:
        """Return values (…, rows) of matrix·y − bound divided by ``scale``, rounded down: in the margin's units."""
        import torch

        scale = self.scale.to(row_values)
        return torch.where(scale == 1, row_values, quotient_below(row_values, scale))

    def margins(self, row_values: Tensor) -> Tensor:
        """Return margins (…, samples) of values (…, rows) of matrix·y − bound; lower bounds for lower bounds."""
        largest = self.largest(row_values)
        worst = largest.new_full((*largest.shape[:-1], self.samples), math.inf)
        return worst.scatter_reduce(-1, self.owner.expand_as(largest), largest, "amin")

    def largest(self, row_values: Tensor) -> Tensor:
        """Return the largest value of each polytope's rows, (…, polytopes): (…, rows) divided by ``scale``."""
        row_values = self.unscaled(row_values)
        kept = row_values.new_full((*row_values.shape[:-1], len(self.owner)), -math.inf)
        return kept.scatter_reduce(-1, self.polytope.expand_as(row_values), row_values, "amax")
