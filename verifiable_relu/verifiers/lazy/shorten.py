"""From a proven sub-problem to a short clause: splits of little influence are dropped, and the rest is proven again.

With the multipliers w of a proof fixed, the bound of ``proof`` is a sum over neurons, and dropping the split of neuron
j changes one summand alone: the least value over the phase that the sub-problem allows becomes the least value over
both. So what each split is worth to the proof is known exactly, and the cheapest ones are dropped for as long as the
bound stays above zero. (BICCOS drops literals for the same end, Zhou et al., arXiv 2501.00200, by influences that it
has to estimate.) Multipliers that are searched for anew in between made clauses shorter by half a percent, and are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verifiable_relu.verifiers.bab.proof import Proofs
from verifiable_relu.verifiers.bab.strip import Strip

_KEPT = 1e-3
"""The part of a proof's bound that dropping splits leaves, so that rounding does not undo it."""


class Shortening:
    """Drops splits from the proven sub-problems of one relaxation.

    Args:
        strip: the relaxation.
        proofs: that prove its sub-problems.
    """

    def __init__(self, strip: Strip, proofs: Proofs) -> None:
        folded = strip.folded
        self._strip, self._proofs = strip, proofs
        self._lower, self._upper = folded.lower, folded.upper
        # The remainder q̃ at the ends of the phases.
        self._at_upper = (1 - strip.slopes) * folded.upper / strip.width
        self._at_lower = (folded.slope - strip.slopes) * folded.lower / strip.width

    def shorten(self, split: Tensor, columns: Tensor, w: Tensor, mu: Tensor, lower: Tensor) -> Tensor:
        """Splits (nodes, m) that suffice for a proof: of each proven sub-problem some of its own.

        Args:
            split: (nodes, m) int8.
            columns: (k,) the neurons with multipliers.
            w: (nodes, k) their multipliers.
            mu: (nodes, rows − 1) multipliers of the rows behind the objective.
            lower: (nodes,) what the multipliers prove of the objective (``Proofs.lower``), above zero.
        """
        neurons, rows, n = self._strip.neurons.matrix, self._strip.rows.matrix, self._strip.folded.inputs
        every = torch.zeros(split.shape, dtype=torch.float64)
        every[:, columns] = w.double()
        q = torch.addmm(rows[0, n:] + mu.double().clamp(min=0) @ rows[1:, n:], w.double(), neurons[columns, n:])
        above = (q * self._at_upper - every * self._upper).clamp(max=0)
        below = (q * self._at_lower - every * self._lower).clamp(max=0)
        cost = torch.where(split > 0, above, below) - torch.minimum(above, below)
        value, order = torch.where(split == 0, torch.inf, cost).sort(1)
        affordable = value.cumsum(1) < (1 - _KEPT) * lower[:, None]
        fewer = torch.where(torch.zeros_like(affordable).scatter(1, order, affordable), 0, split)
        proven = self._proofs.lower(fewer, columns, w, mu) > 0
        return torch.where(proven[:, None], fewer, split)
