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

from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.rounding import FEW, LEAST_WIDTH, OWN, TINY, epsilon, gamma
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

    @staticmethod
    def none(rows: int, columns: int) -> Forms:
        """Forms that are zero, to be filled."""
        return Forms(*(torch.zeros(*shape, dtype=torch.float64) for shape in ((rows, columns), (rows,), (rows,))))

    def put(self, rows: slice | Tensor, forms: tuple[Tensor, Tensor, Tensor]) -> None:
        """Fill some rows with matrix, constant and error."""
        for mine, given in zip((self.matrix, self.constant, self.error), forms, strict=True):
            mine[rows] = given


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
        neurons: the pre-activations, m forms.
        base: the values without their remainders Q·q̃ of the neurons with planes, a form for each plane.
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
        n, m = folded.inputs, folded.size
        self.neurons = Forms.none(m, n + m)
        self.base = Forms.none(0 if planes is None else len(planes.neurons), n + m)
        self._size = torch.zeros(m, dtype=torch.float64)
        for start, end in folded.blocks:
            mine = slice(start, end)
            self.neurons.put(mine, self._substituted(folded.neurons[mine], start))
            self._size[mine] = self.neurons.matrix[mine].abs().sum(1) + self.neurons.constant[mine].abs()
            if planes is not None:
                self._take(planes, start, end)
        self.rows = Forms(*self._substituted(rows, m))

    def _take(self, planes: Planes, start: int, end: int) -> None:
        """The planes over neurons of a block."""
        part = slice(*torch.searchsorted(planes.neurons, torch.tensor([start, end])).tolist())
        matrix, constant, error = self._substituted(planes.rows(part, self.folded.inputs, self.folded.size), start)
        width = self.width[planes.neurons[part]]
        error = OWN * (error + 2 * epsilon(torch.float64) * (constant.abs() + width))
        self.base.put(part, (matrix, constant - width, error))

    def over_of(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Which of some neurons have planes, by their places among these, and the rows of these in ``base``."""
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

    def _substituted(self, rows: Rows, before: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of e and r as forms of e and q̃: matrix, constant, error; r of the first ``before`` neurons alone.

        Each coefficient is a sum of at most ``before`` + 2 products, and the constant of at most twice as many; e and
        q̃ are at most 1.
        """
        n = self.folded.inputs
        direct = rows.neurons[:, :before]
        weight = direct * self.slopes[:before]
        matrix = weight @ self.neurons.matrix[:before]
        matrix[:, :n] += rows.inputs
        matrix[:, n : n + before] += direct * self.width[:before]
        constant = rows.constant + weight @ self.neurons.constant[:before]
        terms = rows.inputs.abs().sum(1) + rows.constant.abs() + direct.abs() @ self.width[:before].abs()
        terms = terms + weight.abs() @ self._size[:before]
        error = rows.error + weight.abs() @ self.neurons.error[:before]
        if self._offset is not None:
            constant = constant + direct @ self._offset[:before]
            terms = terms + direct.abs() @ self._offset[:before].abs()
        if self.planes is not None:
            count = int(torch.searchsorted(self.planes.neurons, before))
            over, base = direct[:, self.planes.neurons[:count]], self.base
            matrix += over @ base.matrix[:count]
            constant = constant + over @ base.constant[:count]
            terms = terms + over.abs() @ (base.matrix[:count].abs().sum(1) + base.constant[:count].abs())
            error = error + over.abs() @ base.error[:count]
        rounding = gamma(3 * before + 8, torch.float64) * terms + 8 * TINY * (before + 1) * matrix.shape[1]
        return matrix, constant, OWN * (error + rounding)
