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
from verifiable_relu.verifiers.bab.folded import Folded, Rows
from verifiable_relu.verifiers.bab.slopes import Planes


@dataclass(frozen=True, eq=False)
class Forms:
    """Affine forms matrix·(e, q̃) + constant, one a row.

    Attributes:
        matrix: (rows, n + m).
        constant: (rows,).
        error: (rows,) how far the form is from what it stands for, at most, at any point of the box.
    """

    matrix: Tensor
    constant: Tensor
    error: Tensor

    def __getitem__(self, chosen: Tensor | slice) -> Forms:
        return Forms(self.matrix[chosen], self.constant[chosen], self.error[chosen])

    def __len__(self) -> int:
        return len(self.constant)

    @staticmethod
    def cat(parts: Sequence[Forms]) -> Forms:
        """All forms of several."""
        return Forms(*(torch.cat([getattr(part, name) for part in parts]) for name in ("matrix", "constant", "error")))


class Store:
    """Forms of some of many things, made when they are first asked for.

    Args:
        count: of how many.
        columns: of the forms.
        make: makes those of some, given by number in ascending order.

    Attributes:
        forms: those that are made.
    """

    def __init__(self, count: int, columns: int, make: Callable[[Tensor], Forms]) -> None:
        self._make, self._place = make, torch.full((count,), -1)
        shapes = ((0, columns), (0,), (0,))
        self.forms = Forms(*(torch.zeros(*shape, dtype=torch.float64) for shape in shapes))

    @property
    def made(self) -> Tensor:
        """(count,) bool, whose forms are made."""
        return self._place >= 0

    def places(self, chosen: Tensor) -> Tensor:
        """Where the forms of some are among those that are made, which they are then."""
        missing = chosen[self._place[chosen] < 0].unique()
        if len(missing):
            start = len(self.forms)
            self.forms = Forms.cat([self.forms, self._make(missing)])
            self._place[missing] = torch.arange(start, start + len(missing))
        return self._place[chosen]

    def of(self, chosen: Tensor) -> Forms:
        """The forms of some."""
        places = self.places(chosen)
        return self.forms[places]


class Strip:
    """The folded system of one query with slopes for one objective.

    Args:
        folded: the system.
        rows: the objective, and rows that are to be at most zero where it matters.
        slopes: (m,) t, each between the two slopes of its activation; any, of a smooth one.
        planes: over some neurons, whose values are a plane and a remainder then; None for none.

    Attributes:
        slopes: t, zero of a neuron with a plane.
        planes: likewise.
        over: (m,) bool, the neurons with planes.
        width: (m,) Q, rounded away from zero.
        curves: the smooth neurons, if there are any.
        neurons: the pre-activations, m forms of which those are made that are asked for.
        base: likewise the values without their remainders Q·q̃ of the neurons with planes, by the planes' numbers.
        rows: forms of ``rows``.
    """

    def __init__(self, folded: Folded, rows: Rows, slopes: Tensor, planes: Planes | None = None) -> None:
        self.folded = folded
        self.planes = planes
        self.over = torch.zeros(folded.size, dtype=torch.bool)
        if planes is not None:
            self.over[planes.neurons] = True
        self.slopes = slopes = torch.where(self.over, 0.0, slopes)
        lower, upper, slope = folded.lower, folded.upper, folded.slope
        magnitude = torch.maximum(-lower, upper)
        width = torch.maximum(((1 - slopes) * upper).abs(), ((slope - slopes) * lower).abs())
        self.width = folded.curvature * torch.maximum(width * FEW + TINY, LEAST_WIDTH * magnitude)
        if planes is not None:
            most = torch.maximum(planes.width * FEW + TINY, LEAST_WIDTH * magnitude[planes.neurons])
            self.width[planes.neurons] = most
        self._offset: Tensor | None = None
        self.curves = Curves(folded, slopes) if bool(folded.smooth.any()) else None
        if self.curves is not None:
            self.width[self.curves.neurons] = self.curves.width
            self._offset = torch.zeros_like(slopes)
            self._offset[self.curves.neurons] = self.curves.offset
        count = 0 if planes is None else len(planes.neurons)
        self.neurons = Store(folded.size, folded.inputs + folded.size, self._of_neurons)
        self.base = Store(count, folded.inputs + folded.size, self._of_planes)
        self.rows = self._substituted(rows)

    def _of_neurons(self, chosen: Tensor) -> Forms:
        return self._forms(self.folded.of_neurons(chosen, self._lines))

    def _of_planes(self, chosen: Tensor) -> Forms:
        assert self.planes is not None
        rows = self.planes.rows(chosen, self.folded.inputs, self.folded.size)
        width = self.width[self.planes.neurons[chosen]]
        error = OWN * 2 * epsilon(torch.float64) * (rows.constant.abs() + width)
        return self._substituted(Rows(rows.inputs, rows.neurons, rows.constant - width, error))

    def _substituted(self, rows: Rows) -> Forms:
        """Rows of e and r as forms of e and q̃."""
        return self._forms(self.folded.substituted(rows, self._lines))

    def _lines(self, start: int, end: int, mine: Tensor) -> tuple[Tensor, Rows]:
        """Lines and planes in the place of a block's values, with what the products lose (``Folded.substituted``)."""
        folded, part = self.folded, slice(start, end)
        weight, size = mine * self.slopes[part], torch.maximum(-folded.lower, folded.upper)[part]
        error = unit_roundoff(torch.float64) * (weight.abs() @ size) + TINY * (1 + size.sum())
        if self.planes is not None:
            found = self.planes.combined(mine, (start, end), folded, self.width)
            return weight, Rows(found.inputs, found.neurons, found.constant, found.error + error)
        more, constant = torch.zeros(1, folded.inputs + start, dtype=torch.float64), torch.zeros_like(error)
        if self._offset is not None:
            constant, terms = mine @ self._offset[part], mine.abs() @ self._offset[part].abs()
            error = error + gamma(end - start + 4, torch.float64) * terms + TINY * (end - start)
        return weight, Rows(more[:, : folded.inputs], more[:, folded.inputs :], constant, OWN * error)

    def _forms(self, rows: Rows) -> Forms:
        """Forms of e and of the remainders q, which the lines have left, as forms of e and q̃."""
        rest = rows.neurons * self.width
        rounding = unit_roundoff(torch.float64) * rest.abs().sum(1) + TINY * (1 + rest.shape[1])
        return Forms(torch.cat([rows.inputs, rest], 1), rows.constant, OWN * (rows.error + rounding))

    def over_of(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Which of some neurons have planes, by their places among these, and the numbers of these planes."""
        which = self.over[columns].nonzero().squeeze(1)
        if self.planes is None:
            return which, which
        return which, torch.searchsorted(self.planes.neurons, columns[which])

    def prefer(self) -> None:
        """Take the slopes for those that are best for the first row: neurons use their lines while they are open."""
        if self.curves is not None:
            self.curves.prefer(self.rows.matrix[0, self.folded.inputs :])

    def without_planes(self, rows: Rows) -> Strip:
        """The relaxation, of the same rows, with lines in place of planes; this one if it has no planes."""
        if self.planes is None:
            return self
        return Strip(self.folded, rows, torch.where(self.over, self.folded.slope.clamp(max=1), self.slopes))

    def gaps(self, split: Tensor) -> Tensor:
        """(nodes, m) how far each open neuron's lines are from its activation, at most; −1 if it is not split further.

        ``split``: (nodes, m) int8, as ``Proofs.lower`` takes it.
        """
        found = torch.where(split == 0, self.folded.gap, -1.0)
        if self.curves is not None:
            found[:, self.curves.neurons] = self.curves.gaps(split)
        return found
