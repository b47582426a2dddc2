"""The relaxation that a whole tree shares: every neuron's value is a line and a bounded remainder.

With any slope t_j, the value of neuron j is

    r_j = t_j·z_j + o_j + q_j,   o_j = min (f_j(z) − t_j·z),   0 ≤ q_j ≤ Q_j = max (f_j(z) − t_j·z) − o_j

over z ∈ [l_j, u_j]. Put into the reduced system block by block, this makes all pre-activations and the objective affine
in e ∈ [−1, 1]ⁿ and q̃ = q/Q ∈ [0, 1]ᵐ. The objective's least value over that box is the α-CROWN bound with the slopes
t_j (Xu et al., arXiv 2011.13824). Nodes of a tree change neither slopes nor forms: that makes them cheap.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.rounding import FEW, LEAST_WIDTH, OWN, TINY, gamma, unit_roundoff
from verifiable_relu.search.bab.cuts import HullCuts
from verifiable_relu.search.bab.forms import AffineForms, Block, Replacement
from verifiable_relu.search.bab.segments import Segments
from verifiable_relu.search.bab.system import ReducedSystem

_UNIT = unit_roundoff(torch.float64)


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

    @property
    def size(self) -> Tensor:
        """(rows,) the sum of the magnitudes of each form's terms over the box."""
        return self.matrix.abs().sum(1) + self.constant.abs()


class Stack:
    """A tensor that grows by rows at its end, in place but for now and then."""

    def __init__(self, rows: Tensor) -> None:
        self._rows, self._count = rows, len(rows)

    @property
    def rows(self) -> Tensor:
        return self._rows[: self._count]

    def push(self, rows: Tensor) -> None:
        count = self._count + len(rows)
        if count > len(self._rows):
            grown = self._rows.new_empty(max(count, 2 * self._count), *self._rows.shape[1:])
            grown[: self._count] = self.rows
            self._rows = grown
        self._rows[self._count : count] = rows
        self._count = count


class _Made:
    """Forms that grow in number."""

    def __init__(self, columns: int, like: Tensor) -> None:
        self._matrix, self._rest = Stack(like.new_zeros(0, columns)), Stack(like.new_zeros(0, 2))

    @property
    def rows(self) -> RelaxedForms:
        constant, error = self._rest.rows.unbind(1)
        return RelaxedForms(self._matrix.rows, constant, error)

    def push(self, forms: RelaxedForms) -> None:
        self._matrix.push(forms.matrix)
        self._rest.push(torch.stack([forms.constant, forms.error], 1))


class TreeRelaxation:
    """The reduced system of one query with slopes for one objective.

    Args:
        system: the system.
        rows: the objectives, and rows behind them that are at most zero where it matters.
        slopes: (m,) t.
        objectives: the number of objectives.
        cuts: upper bounds of some neurons, whose values are a cut and a remainder in all forms; None for none.

    Attributes:
        slopes: as above.
        offset, width: (m,) o, rounded down, and Q, rounded up.
        segments: of the neurons.
        cuts: as above.
        over: (m,) bool, the neurons with cuts.
        span: (m,) ``width``, or that of the remainder that a cut leaves: a unit of q̃ in all forms.
        columns: (k,) the neurons whose pre-activations have been made, in the order in which they were asked for.
    """

    def __init__(
        self,
        system: ReducedSystem,
        rows: AffineForms,
        slopes: Tensor,
        objectives: int = 1,
        cuts: HullCuts | None = None,
    ) -> None:
        self.system, self.slopes, self.objectives, self.cuts = system, slopes, objectives, cuts
        self.offset, top = torch.zeros_like(slopes), torch.zeros_like(slopes)
        size = torch.maximum(-system.lower, system.upper)
        for block in system.blocks:
            x, t = system.interval(block), slopes[None, block.part]
            self.offset[block.part] = block.function.floor(x, t)[0]
            top[block.part] = block.function.top(x, t)[0]
        terms = slopes.abs() * size + self.offset.abs() + top.abs()
        self.width = torch.maximum((top - self.offset) * FEW, LEAST_WIDTH * torch.maximum(terms, size)) + TINY
        self.segments = Segments(system, slopes, self.offset, self.width)
        self.over, self.span = torch.zeros_like(slopes, dtype=torch.bool), self.width.clone()
        if cuts is not None:
            self.over[cuts.neurons] = True
            least = LEAST_WIDTH * size[cuts.neurons]
            self.span[cuts.neurons] = torch.maximum(cuts.width * FEW + TINY, least)
        self.rows = self._relaxed(system.substituted(rows, self._lines))
        self._place = torch.full((system.size,), -1, device=slopes.device)
        self._columns = Stack(self._place[:0])
        self._forms, self._base = (_Made(system.inputs + system.size, slopes) for _ in range(2))

    @property
    def columns(self) -> Tensor:
        return self._columns.rows

    @property
    def made(self) -> Tensor:
        """(m,) bool, the neurons among ``columns``."""
        return self._place >= 0

    def places(self, neurons: Tensor) -> Tensor:
        """Return where the forms of some neurons' pre-activations are in ``forms``, making them where they are not."""
        missing = neurons[self._place[neurons] < 0].unique()
        if len(missing):
            self._place[missing] = len(self.columns) + torch.arange(len(missing), device=missing.device)
            found = self._relaxed(self.system.of_neurons(missing, self._lines))
            self._forms.push(found)
            self._columns.push(missing)
            if self.cuts is not None:
                self._base.push(self._differences(missing, found))
        return self._place[neurons]

    @property
    def forms(self) -> RelaxedForms:
        """The pre-activations of the neurons ``columns``."""
        return self._forms.rows

    @property
    def base(self) -> RelaxedForms:
        """Differences of two forms of a neuron's value, by its cut and by its slope, of the neurons ``columns``.

        At the network's values that of a neuron with a cut is ``width`` times the remainder that its slope leaves.
        """
        return self._base.rows

    def _lines(self, block: Block, mine: Tensor) -> Replacement:
        """Take t·z + o in the place of each value; what the products lose is charged here."""
        part, count, before = block.part, block.end - block.start, None
        size = torch.maximum(-self.system.lower[part], self.system.upper[part])
        slope, offset = (t[part].masked_fill(self.over[part], 0.0) for t in (self.slopes, self.offset))
        weight, constant = mine * slope, mine @ offset
        error = _UNIT * (weight.abs() @ size) + gamma(count + 4, torch.float64) * (mine.abs() @ offset.abs())
        error = OWN * (error + TINY * (1 + count + size.sum()))
        if self.cuts is not None:
            before, more, lost = self.cuts.combined(mine, block, self.system, self.span)
            constant, error = constant + more, error + lost + _UNIT * (constant.abs() + more.abs())
        return Replacement(weight, constant, error, before)

    def _differences(self, neurons: Tensor, forms: RelaxedForms) -> RelaxedForms:
        """Return cut − span + span·q̃ − slope·z − offset of neurons (count,), given their z; 0 of those without cuts."""
        assert self.cuts is not None
        has = self.over[neurons].nonzero().squeeze(1)
        mine, n = neurons[has], self.system.inputs
        found = RelaxedForms(*(torch.zeros_like(t) for t in vars(forms).values()))
        rows = self.cuts.rows(torch.searchsorted(self.cuts.neurons, mine), self.system)
        cut, z = self._relaxed(self.system.substituted(rows, self._lines)), forms[has]
        t, o, span = self.slopes[mine], self.offset[mine], self.span[mine]
        matrix = cut.matrix - t[:, None] * z.matrix
        matrix[torch.arange(len(has), device=has.device), n + mine] += span
        size = cut.size + t.abs() * z.size + o.abs() + 2 * span
        error = OWN * (cut.error + t.abs() * z.error + 8 * _UNIT * size + TINY * (8 + matrix.shape[1]))
        found.constant[has] = cut.constant - t * z.constant - o - span
        found.matrix[has], found.error[has] = matrix, error
        return found

    def _relaxed(self, rows: AffineForms) -> RelaxedForms:
        """Return forms of e and of the remainders q as forms of e and q̃."""
        rest = rows.neurons * self.span
        rounding = _UNIT * rest.abs().sum(1) + TINY * (1 + rest.shape[1])
        return RelaxedForms(torch.cat([rows.inputs, rest], 1), rows.constant, OWN * (rows.error + rounding))
