"""The relaxation that a whole tree shares: every neuron's value is a line through the origin and a bounded remainder.

With a slope t_j between the slopes of the activation, the value of neuron j is

    r_j = t_j·z_j + q_j,   0 ≤ q_j ≤ Q_j = max((1 − t_j)·u_j, (slope_j − t_j)·l_j),

z_j ∈ [l_j, u_j] being its pre-activation. (Where the activation is concave, its slope below zero being above 1, the
remainder and its bound Q_j are negative. Of a smooth neuron, the line does not go through the origin: ``curves``.)
Put into the folded system block by block, this makes all pre-activations and
the objective affine in e ∈ [−1, 1]ⁿ and q̃ = q/Q ∈ [0, 1]ᵐ. The objective's least value over that box is the
α-CROWN bound with the lower slopes t_j where the objective's coefficient is positive, and with the upper slopes where
it is negative (Xu et al., arXiv 2011.13824); the slopes are optimised for that bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.rounding import FEW, LEAST_WIDTH, OWN, TINY, epsilon, gamma, unit_roundoff
from verifiable_relu.verifiers.bab.curves import Curves
from verifiable_relu.verifiers.bab.folded import AffineForms, Folded
from verifiable_relu.verifiers.bab.slopes import HullCuts


@dataclass(frozen=True, eq=False)
class RelaxedForms:
    """Affine forms matrix·(e, q̃) + constant, one a row.

    Attributes:
        matrix: (rows, n + m).
        constant: (rows,).
        error: (rows,) how far the form is from what it stands for, at most, at any point of the box.
    """

    matrix: Tensor
    constant: Tensor
    error: Tensor

    def __getitem__(self, chosen: Tensor | slice) -> RelaxedForms:
        return RelaxedForms(self.matrix[chosen], self.constant[chosen], self.error[chosen])

    def __len__(self) -> int:
        return len(self.constant)

    @staticmethod
    def cat(parts: Sequence[RelaxedForms]) -> RelaxedForms:
        """All forms of several."""
        return RelaxedForms(
            *(torch.cat([getattr(part, name) for part in parts]) for name in ("matrix", "constant", "error"))
        )


class FormStore:
    """RelaxedForms of some of many things, made when they are first asked for.

    Args:
        count: of how many.
        columns: of the forms.
        make: makes those of some, given by number in ascending order.

    Attributes:
        forms: those that are made.
    """

    def __init__(self, count: int, columns: int, make: Callable[[Tensor], RelaxedForms]) -> None:
        self._make, self._place = make, torch.full((count,), -1)
        shapes = ((0, columns), (0,), (0,))
        self.forms = RelaxedForms(*(torch.zeros(*shape, dtype=torch.float64) for shape in shapes))

    @property
    def made(self) -> Tensor:
        return self._place >= 0

    def places(self, chosen: Tensor) -> Tensor:
        """Return where the forms of some things are among those that are made, which they are then."""
        missing = chosen[self._place[chosen] < 0].unique()
        if len(missing):
            start = len(self.forms)
            self.forms = RelaxedForms.cat([self.forms, self._make(missing)])
            self._place[missing] = torch.arange(start, start + len(missing))
        return self._place[chosen]

    def of(self, chosen: Tensor) -> RelaxedForms:
        """Return the forms of some things."""
        places = self.places(chosen)
        return self.forms[places]


class TreeRelaxation:
    """The folded system of one query with slopes for one objective.

    Args:
        folded: the system.
        rows: the objective, and rows that are to be at most zero where it matters.
        slopes: (m,) t, each between the two slopes of its activation; any, of a smooth one.
        cuts: over some neurons, whose values are a cut and a remainder then; None for none.

    Attributes:
        slopes: t, zero of a neuron with a cut.
        cuts: likewise.
        over: (m,) bool, the neurons with cuts.
        width: (m,) Q, rounded away from zero.
        curves: the smooth neurons, if there are any.
        neurons: the pre-activations, m forms of which those are made that are asked for.
        base: likewise the values without their remainders Q·q̃ of the neurons with cuts, by the cuts' numbers.
        rows: forms of ``rows``.
    """

    def __init__(self, folded: Folded, rows: AffineForms, slopes: Tensor, cuts: HullCuts | None = None) -> None:
        self.folded = folded
        self.cuts = cuts
        self.over = torch.zeros(folded.size, dtype=torch.bool)
        if cuts is not None:
            self.over[cuts.neurons] = True
        self.slopes = slopes = torch.where(self.over, 0.0, slopes)
        lower, upper, slope = folded.lower, folded.upper, folded.slope
        magnitude = torch.maximum(-lower, upper)
        width = torch.maximum(((1 - slopes) * upper).abs(), ((slope - slopes) * lower).abs())
        self.width = folded.curvature * torch.maximum(width * FEW + TINY, LEAST_WIDTH * magnitude)
        if cuts is not None:
            most = torch.maximum(cuts.width * FEW + TINY, LEAST_WIDTH * magnitude[cuts.neurons])
            self.width[cuts.neurons] = most
        self._offset: Tensor | None = None
        self.curves = Curves(folded, slopes) if bool(folded.smooth.any()) else None
        if self.curves is not None:
            self.width[self.curves.neurons] = self.curves.width
            self._offset = torch.zeros_like(slopes)
            self._offset[self.curves.neurons] = self.curves.offset
        count = 0 if cuts is None else len(cuts.neurons)
        self.neurons = FormStore(folded.size, folded.inputs + folded.size, self._of_neurons)
        self.base = FormStore(count, folded.inputs + folded.size, self._of_cuts)
        self.rows = self._substituted(rows)

    def _of_neurons(self, chosen: Tensor) -> RelaxedForms:
        return self._forms(self.folded.of_neurons(chosen, self._lines))

    def _of_cuts(self, chosen: Tensor) -> RelaxedForms:
        assert self.cuts is not None
        rows = self.cuts.rows(chosen, self.folded.inputs, self.folded.size)
        width = self.width[self.cuts.neurons[chosen]]
        error = OWN * 2 * epsilon(torch.float64) * (rows.constant.abs() + width)
        return self._substituted(AffineForms(rows.inputs, rows.neurons, rows.constant - width, error))

    def _substituted(self, rows: AffineForms) -> RelaxedForms:
        """AffineForms of e and r as forms of e and q̃."""
        return self._forms(self.folded.substituted(rows, self._lines))

    def _lines(self, start: int, end: int, mine: Tensor) -> tuple[Tensor, AffineForms]:
        """Lines and cuts in the place of a block's values, with what the products lose (``Folded.substituted``)."""
        folded, part = self.folded, slice(start, end)
        weight, size = mine * self.slopes[part], torch.maximum(-folded.lower, folded.upper)[part]
        error = unit_roundoff(torch.float64) * (weight.abs() @ size) + TINY * (1 + size.sum())
        if self.cuts is not None:
            found = self.cuts.combined(mine, (start, end), folded, self.width)
            return weight, AffineForms(found.inputs, found.neurons, found.constant, found.error + error)
        more, constant = torch.zeros(1, folded.inputs + start, dtype=torch.float64), torch.zeros_like(error)
        if self._offset is not None:
            constant, terms = mine @ self._offset[part], mine.abs() @ self._offset[part].abs()
            error = error + gamma(end - start + 4, torch.float64) * terms + TINY * (end - start)
        return weight, AffineForms(more[:, : folded.inputs], more[:, folded.inputs :], constant, OWN * error)

    def _forms(self, rows: AffineForms) -> RelaxedForms:
        """RelaxedForms of e and of the remainders q, which the lines have left, as forms of e and q̃."""
        rest = rows.neurons * self.width
        rounding = unit_roundoff(torch.float64) * rest.abs().sum(1) + TINY * (1 + rest.shape[1])
        return RelaxedForms(torch.cat([rows.inputs, rest], 1), rows.constant, OWN * (rows.error + rounding))

    def over_of(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of some neurons have cuts, by their places among these, and the numbers of these cuts."""
        which = self.over[columns].nonzero().squeeze(1)
        if self.cuts is None:
            return which, which
        return which, torch.searchsorted(self.cuts.neurons, columns[which])

    def prefer(self) -> None:
        """Take the slopes for those that are best for the first row: neurons use their lines while they are open."""
        if self.curves is not None:
            self.curves.prefer(self.rows.matrix[0, self.folded.inputs :])

    def gaps(self, split: Tensor) -> Tensor:
        """(nodes, m) how far each open neuron's lines are from its activation, at most; −1 if it is not split further.

        ``split``: (nodes, m) int8, as ``Proofs.lower`` takes it.
        """
        found = torch.where(split == 0, self.folded.gap, -1.0)
        if self.curves is not None:
            found[:, self.curves.neurons] = self.curves.gaps(split)
        return found
