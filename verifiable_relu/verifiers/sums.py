"""Sums of a conjunction's rows: where no single row is positive over a box, a sum of several may be.

A polytope of the unsafe set is where all of its rows g_k are at most 0; for weights w_k ≥ 0, so is Σ_k w_k·g_k there.
The best weights make the least value of that sum over the box as large as possible: this is the Lagrange dual (Boyd and
Vandenberghe, Convex Optimization, section 5.2) of the question by how much some row must be violated. Weights are
looked for with affine forms in the rows' place, by mirror ascent on the simplex (Beck and Teboulle, Mirror Descent and
Nonlinear Projected Subgradient Methods for Convex Optimization, Operations Research Letters 31, 2003). Any weights give
a valid row (``RowBatch.sums``), which is then bounded like every other one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from verifiable_relu.spec.row_batch import RowBatch

_STEPS = 12

_GAIN = 0.1
"""A sum is bounded if its form's least value is above that of every single row by this part of its size."""

_UNIT = 1024
"""Weights are multiples of 1/1024, so that sums of rows with small integers are exact."""


def sums(rows: RowBatch, values: Tensor, forms: Callable[[Tensor], tuple[Tensor, Tensor]]) -> RowBatch | None:
    """A sum of its rows for each polytope of several rows that no row proves, where that promises more than they do.

    Args:
        rows: those of the boxes' properties, as a batch.
        values: (rows,) lower bounds of the rows' values over the box.
        forms: of some rows (r,), by their numbers, affine forms c + Σ_k a_k·ε_k, ε_k ∈ [−1, 1], that are near their
            least values or below: c (r,) and a (r, symbols).

    Returns:
        One row for some of the polytopes, numbered as in ``rows``; None if there is no such polytope.
    """
    count = torch.bincount(rows.polytope, minlength=len(rows.owner))
    chosen = ((count > 1) & (rows.largest(values) <= 0)).nonzero().squeeze(1)
    if not len(chosen):
        return None
    place = torch.arange(int(count[chosen].max()), device=chosen.device).expand(len(chosen), -1)
    present = place < count[chosen, None]
    member = torch.where(present, (count.cumsum(0) - count)[chosen, None] + place, 0)
    flat, symbols = forms(member.flatten())
    center, reach = flat.unflatten(0, member.shape), symbols.unflatten(0, member.shape)
    reach = torch.where(present[..., None], reach, 0.0)
    least = torch.where(present, center - reach.abs().sum(2), -torch.inf)
    single, best = least.max(1)
    # Unless another row is larger at the point where the best one is least, no sum is better than that one.
    corner = reach.gather(1, best[:, None, None].expand(-1, 1, reach.shape[2])).sign()
    there = torch.where(present, center - (reach * corner).sum(2), -torch.inf).amax(1)
    promised = single + _GAIN * single.abs()
    mixed = there > promised
    chosen, member, promised = chosen[mixed], member[mixed], promised[mixed]
    weights, found = _ascend(center[mixed], reach[mixed], present[mixed])
    kept = found > promised
    return rows.sums(chosen[kept], member[kept], (weights[kept] * _UNIT).round()) if kept.any() else None


def _ascend(center: Tensor, reach: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the rows of each polytope, of sum 1, and the least value of the sum of their forms.

    Args:
        center: (polytopes, rows) of the rows' forms.
        reach: (polytopes, rows, symbols) their coefficients.
        present: (polytopes, rows) whether there is such a row.
    """
    weights = present.to(center) / present.sum(1, keepdim=True)
    best, found = weights, center.new_full((len(center),), -torch.inf)
    for step in range(_STEPS):
        mixed = torch.einsum("pr,pri->pi", weights, reach)
        value = (weights * center).sum(1) - mixed.abs().sum(1)
        better = value > found
        best, found = torch.where(better[:, None], weights, best), torch.where(better, value, found)
        slope = center - torch.einsum("pi,pri->pr", mixed.sign(), reach)
        slope = torch.where(present, slope - (weights * slope).sum(1, keepdim=True), 0.0)
        longest = slope.abs().amax(1, keepdim=True).clamp(min=torch.finfo(slope.dtype).tiny)
        weights = weights * torch.exp(2 / (step + 2) ** 0.5 * slope / longest)
        weights = weights / weights.sum(1, keepdim=True)
    return best, found
