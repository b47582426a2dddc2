"""Clipping: the part of a box in which a row of each polytope is positive is cut off.

A row g of a polytope of the unsafe set has a lower bound g(x) ≥ v + Σ_i |A_i|·|x_i − m_i| over a box: A are the
coefficients of its linear bound, m is the corner where that is least, and v its value there. A counterexample in the
polytope has g(x) ≤ 0 for every row, so that |x_i − m_i| ≤ −v/|A_i| for every input i, since no other term of the sum is
negative. What is left of a box is the smallest box that holds what every polytope leaves of it that is not proved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.rounding import CUT, above, below, reach_of_cut
from verifiable_relu.search.property_rows import BoxRows


@dataclass(frozen=True, eq=False)
class Clipped:
    """The rest of a batch of boxes.

    Attributes:
        lower, upper: (batch, inputs) of the rest of each box.
        empty: (batch,) whether nothing is left: the box is proved.
        margin: (batch,) a positive lower bound of the property's margin in all that was cut off, else infinity.
        ends: (2, batch, rows, inputs) the lower and upper ends that each row leaves of its polytope.
    """

    lower: Tensor
    upper: Tensor
    empty: Tensor
    margin: Tensor
    ends: Tensor


def clip(lower: Tensor, upper: Tensor, rows: BoxRows, values: Tensor, coefficients: Tensor, error: float) -> Clipped:
    """Cut off boxes (batch, inputs) where a row of each polytope is positive.

    Rounding: computed coefficients and values are those of a valid bound, but that coefficients may be off by the part
    ``error`` of themselves. That moves g(x) by at most the same part of Σ_i |A_i|·width_i, which counts against what is
    cut off; ends move outward.

    Args:
        lower, upper: of the boxes.
        rows: of the boxes' properties.
        values: (batch, rows) lower bounds of the rows' values over the box.
        coefficients: (batch, rows, inputs) of their linear lower bounds.
        error: the relative error of the coefficients.
    """
    low, high = lower[:, None], upper[:, None]
    width = high - low
    # What is not cut off: |x_i − m_i| ≤ reach. NaN cuts nothing off.
    reach = reach_of_cut(values, coefficients.abs(), width, error)
    spare = rows.unscaled(CUT / 2 * -values)
    polytopes = rows.exists.shape[1]
    cut = (reach < width) & ((spare > 0) & (rows.polytope < polytopes))[..., None]
    rest_high = torch.where(cut & (coefficients > 0), torch.minimum(above(low + reach), high), high)
    rest_low = torch.where(cut & (coefficients < 0), torch.maximum(below(high - reach), low), low)
    place = rows.polytope[..., None].expand_as(rest_low)
    fill = (len(lower), polytopes + 1, lower.shape[1])
    low = low.expand(fill).scatter_reduce(1, place, rest_low, "amax")[:, :-1]
    high = high.expand(fill).scatter_reduce(1, place, rest_high, "amin")[:, :-1]
    largest = rows.largest(values)
    # Polytopes that do not exist are infinitely far.
    proved = largest > 0
    gone = (proved | (low > high).any(2))[..., None]
    new_low = torch.where(gone, torch.inf, low).amin(1)
    new_high = torch.where(gone, -torch.inf, high).amax(1)
    margin = torch.where(proved, largest, torch.inf).amin(1)
    margin = torch.minimum(margin, torch.where(cut.any(2), spare, torch.inf).amin(1))
    return Clipped(new_low, new_high, (new_low > new_high).any(1), margin, torch.stack([rest_low, rest_high]))


def clipping_rows(rows: BoxRows, clipped: Clipped) -> tuple[Tensor, Tensor]:
    """Return the rows that cut off most of a polytope at the lower and the upper end, and these ends.

    Returns:
        (2, batch, polytopes, inputs) each.
    """
    member = rows.polytope[:, None] == torch.arange(rows.exists.shape[1], device=rows.polytope.device)[:, None]
    low, high = (
        torch.where(member[..., None], end[:, None], worst)
        for end, worst in zip(clipped.ends, (-torch.inf, torch.inf), strict=True)
    )
    (least, at_least), (most, at_most) = low.max(2), high.min(2)
    return torch.stack([at_least, at_most]), torch.stack([least, most])
