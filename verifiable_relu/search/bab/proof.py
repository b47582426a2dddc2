"""The proof of a node: weak duality, evaluated in float64 with its rounding accounted for.

A node is a set of segments, one of each neuron's pre-activation. For any real multipliers w of the neurons'
pre-activations z, and any μ ≥ 0 of the rows that are at most zero in the unsafe set, with z_j(e, q̃) the form that
equals z_j,

    objective ≥ objective + Σ μ_i·row_i + Σ w_j·(z_j(e, q̃) − z_j) = constant + c·(e, q̃) − Σ w_j·z_j.

The right side is least where every e_i = −sign(c_i). Of neuron j an expression of z_j alone is left, since q̃_j is a
function of z_j, whose graph lies in a polygon on the node's segment (``relaxation.Segments``). So

    objective ≥ constant − Σ|c_i| + Σ_j min over the polygon's vertices of (c_j·q̃ − w_j·z),

and min(c_j, 0) for a neuron without a multiplier. Of a neuron with a hull cut q̃ is no function of z: it counts as
min(c_j, 0), and a difference of two forms of the neuron's value, times any v_j, is added, which at the network's values
is v_j·width_j times the remainder that the neuron's slope leaves (``TreeRelaxation.base``).

The bound holds for any w and v, however they were found. Where it is positive, the node holds no
point of the unsafe set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verifiable_relu.rounding import OWN, TINY, gamma
from verifiable_relu.search.bab.loop import Bounded
from verifiable_relu.search.bab.relaxation import TreeRelaxation


def lower_bounds(relaxation: TreeRelaxation, found: Bounded) -> Tensor:
    """Return lower bounds of nodes' objectives where the rows behind the objectives are at most zero.

    Args:
        relaxation: that of the tree.
        found: the nodes, their segments, and multipliers w, v and μ; a negative μ is taken for 0.

    Returns:
        (nodes,) in float64, rounding accounted for; NaN or −inf where arithmetic broke down.
    """
    rows, segments, n, m = relaxation.rows, relaxation.segments, relaxation.system.inputs, relaxation.system.size
    forms, w, weight = relaxation.forms[found.columns], found.w.double(), row_weights(relaxation, found)
    c = torch.addmm(weight @ rows.matrix, w, forms.matrix)
    constant = weight @ rows.constant + w @ forms.constant
    # Each sum has at most this number of terms, whose sizes together are at most ``size``, but for rounding.
    terms = n + m + 2 * len(found.columns) + len(rows) + 16
    unit = gamma(terms, torch.float64)
    reach = torch.maximum(-relaxation.system.lower, relaxation.system.upper)[found.neurons]
    size = weight @ rows.size() + w.abs() @ (forms.size() + 2 * reach)
    error = weight @ rows.error + w.abs() @ forms.error + 3 * unit * size + 16 * terms * (n + m + 1) * TINY
    over = None
    if relaxation.cuts is not None:
        over = relaxation.over[found.neurons].nonzero().squeeze(1)
        v, base, width = found.v.double(), relaxation.base[found.columns[over]], relaxation.width[found.neurons[over]]
        c, constant = c + v @ base.matrix, constant + v @ base.constant
        size, error = size + v.abs() @ (base.size() + width), error + v.abs() @ base.error
    mine = c[:, n + found.neurons]
    held = mine if over is None else mine.index_fill(1, over, 0.0)
    free = c[:, n:].clamp(max=0).sum(1) - held.clamp(max=0).sum(1)
    if over is not None:
        mine[:, over] = -v * width
    least, lost = segments.least(found.neurons, found.segment, mine, -w, 16 * unit)
    # The remainders of the view were added and taken off: each of both sums is off by a part of ``size``.
    return constant - c[:, :n].abs().sum(1) + free + least.sum(1) - OWN * (error + unit * size + lost.sum(1))


def row_weights(relaxation: TreeRelaxation, found: Bounded) -> Tensor:
    """Return the factors (nodes, rows) of the relaxation's rows: 1 for a node's objective, μ for the rows behind."""
    objective = torch.nn.functional.one_hot(found.nodes.objective, relaxation.objectives).double()
    return torch.cat([objective, found.nodes.mu.double().clamp(min=0)], 1)
