"""What proves a node: weak duality, evaluated in float64 with its rounding accounted for.

A node is a set of splits: neurons whose pre-activation is at least zero (*active*, +1) or at most zero (*inactive*,
−1). For any real multipliers w of the neurons' pre-activations z, and any μ ≥ 0 of the rows that are at most zero in
the unsafe set, with z_j(e, q̃) the form that equals z_j,

    objective ≥ objective + Σ μ_i·row_i + Σ w_j·(z_j(e, q̃) − z_j) = constant + c·(e, q̃) − Σ w_j·z_j.

The right side is least where every e_i = −sign(c_i) and where every neuron is at an end of one of its phases: of
neuron j an expression of z_j alone is left, since q̃_j is a function of z_j, linear on either side of 0. So

    objective ≥ constant − Σ|c_i| + Σ_j min over the ends z of the phases that the node allows of (c_j·q̃_j(z) − w_j·z).

Of a smooth neuron that is c_j·q̃_j(z) − w_j·z on the segment of its pre-activation that the node leaves; a line below
q̃_j, or above it if c_j is negative, bounds it (``curves``).

The value r_j of a neuron with a cut (``slopes``) is a form r_j(e, q̃) = base_j(e, q̃) + Q_j·q̃_j, whose remainder q̃_j is
between 0 and 1, but no function of z_j. It has a multiplier of its own, v_j: then Σ v_j·(r_j(e, q̃) − r_j) is added as
well, q̃_j takes the better end of [0, 1], and of neuron j itself −w_j·z_j − v_j·r_j is left, linear on either side of 0.

Nothing is asked of w and v: who found them, and how, does not matter. Where the bound is positive, the
node holds no point of the unsafe set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verifiable_relu.rounding import OWN, TINY, gamma
from verifiable_relu.verifiers.bab.strip import TreeRelaxation


class Proofs:
    """Lower bounds of objectives, which are the first rows of a relaxation, over nodes."""

    def __init__(self, strip: TreeRelaxation, objectives: int = 1) -> None:
        folded = strip.folded
        self._strip, self.objectives = strip, objectives
        # q̃ at the ends of the phases. What rounding makes of them is a few units of their own size, at most 1.
        self._at_upper = (1 - strip.slopes) * folded.upper / strip.width
        self._at_lower = (folded.slope - strip.slopes) * folded.lower / strip.width
        rows, self._reach = strip.rows, torch.maximum(-folded.lower, folded.upper)
        # Of a neuron with a cut, r at the ends: its remainder is no function of z.
        self._at_upper = torch.where(strip.over, folded.upper, self._at_upper)
        self._at_lower = torch.where(strip.over, folded.slope * folded.lower, self._at_lower)
        self._of_rows = rows.matrix.abs().sum(1) + rows.constant.abs()

    def lower(
        self,
        split: Tensor,
        columns: Tensor,
        w: Tensor,
        mu: Tensor,
        objective: Tensor | None = None,
        v: Tensor | None = None,
    ) -> Tensor:
        """Lower bounds of each node's objective where the rows behind the objectives are at most zero.

        Args:
            split: (nodes, m) int8, +1 active, −1 inactive, 0 not split; of a smooth neuron, the number of its segment.
            columns: (k,) the neurons with multipliers; those of the others are zero.
            w: (nodes, k) their multipliers.
            mu: (nodes, rows behind the objectives) their multipliers; negative ones are taken as zero.
            objective: (nodes,) which row is the objective of each node; by default the first.
            v: (nodes, h) those of the values of the neurons in ``columns`` that have cuts; None for zeros.

        Returns:
            (nodes,) in float64, rounding accounted for; NaN or −inf where arithmetic broke down.
        """
        strip = self._strip
        n, m = strip.folded.inputs, strip.folded.size
        w, weight = w.double(), of_rows(mu, objective, self.objectives)
        neurons = strip.neurons.of(columns)
        c = torch.addmm(weight @ strip.rows.matrix, w, neurons.matrix)
        constant = weight @ strip.rows.constant + w @ neurons.constant
        q, pull = c[:, n:], -_scattered(w, columns, m)
        free = torch.zeros(len(w), dtype=torch.float64)
        # By how much one unit of a multiplier makes all numbers together larger.
        of_neurons_ = neurons.matrix.abs().sum(1) + neurons.constant.abs() + 2 * self._reach[columns]
        size = weight @ self._of_rows + w.abs() @ of_neurons_
        error = weight @ strip.rows.error + w.abs() @ neurons.error
        if strip.cuts is not None:
            which, place = strip.over_of(columns)
            over, base = columns[which], strip.base.of(place)
            v = w.new_zeros(len(w), len(which)) if v is None else v.double()
            c += v @ base.matrix
            constant = constant + v @ base.constant
            of_base = base.matrix.abs().sum(1) + base.constant.abs() + strip.width[over]
            size = size + v.abs() @ (of_base + 2 * (1 + strip.folded.slope[over].abs()) * self._reach[over])
            error = error + v.abs() @ base.error
            q[:, over] += v * strip.width[over]
            free = q[:, strip.over].clamp(max=0).sum(1)
            q = torch.where(strip.over, -_scattered(v, over, m), q)
        ends, at_ends = (strip.folded.lower, strip.folded.upper), (self._at_lower, self._at_upper)
        least, curved = least_over_phases(q, pull, ends, at_ends, split), torch.zeros(len(w), dtype=torch.float64)
        if strip.curves is not None:
            smooth = strip.curves.neurons
            least[:, smooth] = q[:, smooth].clamp(max=0)
            segments = strip.curves.of(columns, split, torch.float64)
            if segments is not None:
                which = columns[segments.which]
                least[:, which], changed = segments.least(q[:, which], pull[:, which])
                curved = changed.sum(1)
        found = constant - c[:, :n].abs().sum(1) + least.sum(1) + free
        # All sums have at most so many terms, and all terms together are at most ``size``, but for rounding.
        terms = n + m + 2 * len(columns) + strip.rows.matrix.shape[0] + 16
        error = error + 3 * gamma(terms, torch.float64) * size + 16 * terms * (n + m + 1) * TINY
        return found - OWN * (error + curved)


def of_rows(mu: Tensor, objective: Tensor | None, objectives: int) -> Tensor:
    """Return the factors (nodes, rows) of rows: 1 of a node's objective, μ of the rows behind if that is positive.

    The first of the ``objectives`` rows is the objective of each node where its number, (nodes,), is None.
    """
    chosen = torch.zeros(len(mu), dtype=torch.long) if objective is None else objective
    which = torch.nn.functional.one_hot(chosen, objectives).double()
    return torch.cat([which, mu.double().clamp(min=0)], 1)


def _scattered(values: Tensor, columns: Tensor, count: int) -> Tensor:
    """Return values (nodes, k) of some columns among all, (nodes, count), zero elsewhere."""
    return values.new_zeros(len(values), count).index_copy_(1, columns, values)


def least_over_phases(
    q: Tensor, pull: Tensor, ends: tuple[Tensor, Tensor], at_ends: tuple[Tensor, Tensor], split: Tensor
) -> Tensor:
    """Return the least value of c·q̃(z) − w·z over the phases of z that nodes allow, (nodes, m).

    It is linear in each phase, and 0 at z = 0.

    Args:
        q: (nodes, m) c, what q̃ is multiplied by.
        pull: (nodes, m) −w, what z is multiplied by.
        ends: (m,) each, the least and the greatest z.
        at_ends: (m,) each, the values of q̃ there.
        split: (nodes, m) +1 for the phase above zero alone, −1 for that below, 0 for both.
    """
    below, above = ((q * at).addcmul_(pull, end).clamp_(max=0) for end, at in zip(ends, at_ends, strict=True))
    return torch.minimum(above.masked_fill_(split < 0, 0), below.masked_fill_(split > 0, 0))
