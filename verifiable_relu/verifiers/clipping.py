"""Parts of input boxes that linear lower bounds prove, cut off.

A row g of a polytope of the unsafe set has a lower bound g(x) ≥ v + Σ_i |A_i|·|x_i − m_i| over a box: A are the
coefficients of its linear bound, m is the corner where that is least, and v its value there. A counterexample in the
polytope has g(x) ≤ 0 for every row, so that |x_i − m_i| ≤ −v/|A_i| for every input i, since no other term of the sum is
negative. What is left of a box is the smallest box that holds what every polytope leaves of it that is not proved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.bounds import Bounds
from verifiable_relu.bounds.rounding import unit_roundoff
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Scale
from verifiable_relu.spec.row_batch import RowBatch

_SPARE = 2.0**-20
"""By this part of −v a row is positive, at least, in what is cut off; rounding takes some of it."""


_UNITS = 4
"""Units of roundoff by which one node, at most, changes the coefficients of inputs, if its weights are exact."""


@dataclass(frozen=True)
class Clipped:
    """What is left of a batch of boxes.

    Attributes:
        box: the rest of each box; (batch, inputs).
        empty: (batch,) whether nothing is left: the box is proved.
        margin: (batch,) a positive lower bound of the property's margin in all that was cut off; infinite where nothing
            was.
    """

    box: Bounds
    empty: Tensor
    margin: Tensor


def input_error(network: Network, dtype: torch.dtype) -> float:
    """By what part of themselves computed coefficients of the inputs may be off: nodes scale and move the inputs."""
    unknown = sum(node.weight_error for node in network.affine if isinstance(node, Scale))
    return _UNITS * (len(network.nodes) + 8) * unit_roundoff(dtype) + 2 * unknown


def clip(box: Bounds, rows: RowBatch, values: Tensor, coefficients: Tensor, share: float) -> Clipped:
    """Cut off boxes where a row of each polytope is positive.

    Rounding: computed coefficients and values are those of a valid bound (``Relaxation.lower``), but that the
    coefficients of the inputs may be off by some units of roundoff for every node that scales or moves the inputs. That
    moves g(x) by at most the same part of Σ_i |A_i|·width_i, which counts against what is cut off; ends move outward.

    Args:
        box: (batch, inputs).
        rows: those of the boxes' properties, as a batch.
        values: (rows,) lower bounds of the rows' values over the box.
        coefficients: (rows, inputs) of their linear lower bounds.
        share: ``input_error`` of the network.
    """
    unit, info = unit_roundoff(values.dtype), torch.finfo(values.dtype)
    lower, upper = box.lower[rows.sample], box.upper[rows.sample]
    slope = coefficients.abs()
    width = upper - lower
    rounded = share * (slope * width).sum(1) + info.tiny
    # What is not cut off: |x_i − m_i| ≤ reach. NaN cuts nothing off.
    reach = ((1 + _SPARE) * -values.clamp(max=0) + rounded)[:, None] / slope
    reach = torch.nextafter(reach * (1 + 8 * unit), reach.new_full((), torch.inf))
    spare = rows.unscaled(_SPARE / 2 * -values)
    cut = (reach < width) & (spare > 0)[:, None]
    high = torch.nextafter(lower + reach, reach.new_full((), torch.inf))
    low = torch.nextafter(upper - reach, reach.new_full((), -torch.inf))
    high = torch.where(cut & (coefficients > 0), torch.minimum(high, upper), upper)
    low = torch.where(cut & (coefficients < 0), torch.maximum(low, lower), lower)

    polytopes, inputs = len(rows.owner), lower.shape[1]
    place = rows.polytope[:, None].expand(-1, inputs)
    rest_low = box.lower[rows.owner].scatter_reduce(0, place, low, "amax")
    rest_high = box.upper[rows.owner].scatter_reduce(0, place, high, "amin")
    largest = rows.largest(values)
    proved = largest > 0
    gone = proved | (rest_low > rest_high).any(1)
    owner = rows.owner[:, None].expand(polytopes, inputs)
    outside = lower.new_full((), torch.inf)
    new_low = torch.full_like(box.lower, torch.inf)
    new_high = torch.full_like(box.upper, -torch.inf)
    new_low.scatter_reduce_(0, owner, torch.where(gone[:, None], outside, rest_low), "amin")
    new_high.scatter_reduce_(0, owner, torch.where(gone[:, None], -outside, rest_high), "amax")
    empty = (new_low > new_high).any(1)

    margin = rows.least(torch.where(proved, largest, torch.inf))
    margin.scatter_reduce_(0, rows.sample, torch.where(cut.any(1), spare, torch.inf), "amin")
    return Clipped(Bounds(new_low, new_high), empty, margin)
