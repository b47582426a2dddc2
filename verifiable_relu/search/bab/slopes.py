"""Slopes of a tree's relaxation, and hull cuts over neurons, optimised for the bound of one objective.

Slopes are those of CROWN or α-CROWN (``bounds.alpha``), on the side of a function that the objective's coefficient asks
for. Above a ReLU there is its chord, which bounds the value r_j of a neuron by its pre-activation z_j alone. Over the
box of the scaled inputs e and of the values r of earlier neurons, z_j = w·y + b is an affine form of these. There are
better bounds (Anderson et al., Strong mixed-integer programming formulations for trained neural networks, arXiv
1811.01988): with y ∈ [−1, 1]ᵏ the scaled variables, s_j < 1 the activation's slope below zero, and any μ, ν in [0, 1],

    r_j ≤ g·y + max(Σ|(1 − μ)·w − g| + (1 − μ)·b + μ·u_j,  Σ|(ν + s_j)·w − g| + (ν + s_j)·b − ν·l_j).

For where z_j ≥ 0, r_j = z_j ≤ (1 − μ)·z_j + μ·u_j, and where z_j ≤ 0, r_j = s_j·z_j ≤ s_j·z_j + ν·(z_j − l_j); both are
affine in y, and a sum of magnitudes is the most that they are above g·y. So *any* g, μ and ν are sound. The chord is
g = chord_j·w, μ = 1 − chord_j and ν = chord_j − s_j.

Parameters of cuts, and slopes below ReLUs, are numbers in [0, 1], by which the bound is differentiated, and Adam steps
along. The search itself proves nothing: every slope is sound, and cuts are rounded outward at the end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from verifiable_relu.bounds.alpha import Adam, Ascent, ascend, slopes_of
from verifiable_relu.bounds.neuron_bounds import BASE
from verifiable_relu.rounding import FEW, OWN, TINY, gamma
from verifiable_relu.search.bab.system import AffineForms, Block, ReducedSystem
from verifiable_relu.search.records import TensorRecord

_SHORT = 2.0**20  # Coefficients of cuts are multiples of one part of this many of the pre-activation's
_FEW_TERMS = 64  # The most terms of a neuron's form in a system that is too large to be held densely
_PART = 1 << 22  # Coefficients of forms that are made at once
_CUTS = Ascent(steps=60, rate=0.1, decay=0.95)  # The search for cuts


def row_slopes(system: ReducedSystem, matrix: Tensor, ascent: Ascent | None) -> tuple[Tensor, Tensor]:
    """Return for each row of the output, (rows, outputs), slopes (rows, m) and its lower bound (rows,) with them.

    Without an ``ascent`` the slopes are CROWN's. Each is that of the line on the side that the row's coefficient asks
    for.
    """
    relaxation, last = system.relaxation, len(system.network.ops) - 1
    slopes, lower = [matrix.new_zeros(0, system.size)], [matrix.new_zeros(0)]
    for part in matrix.split(relaxation.rows_at_once(BASE, relaxation.structure.widest)):
        sample = torch.zeros(len(part), dtype=torch.long, device=part.device)
        choices = {} if ascent is None else ascend(relaxation, last, part, sample, ascent).choices
        own = {i: slopes_of(relaxation, i, choice.to(BASE), sample) for i, choice in choices.items()}
        record: dict[int, Tensor] = {}
        lower.append(relaxation.lower(last, part[:, None], sample, slopes=own, record=record).value[:, 0])
        found = part.new_zeros(len(part), system.size)
        for block in (block for block in system.blocks if block.op in record):
            low, high = block.function.slopes(system.interval(block))
            if (mine := own.get(block.op)) is not None:
                low, high = mine.lower[:, block.chosen], mine.upper[:, block.chosen]
            found[:, block.part] = torch.where(record[block.op][:, 0, block.chosen] < 0, high, low)
        slopes.append(found)
    return torch.cat(slopes), torch.cat(lower)


def slopes_for_all(system: ReducedSystem) -> Tensor:
    """Return slopes (m,) that serve objectives of all kinds."""
    found = torch.zeros_like(system.lower)
    for block in system.blocks:
        x = system.interval(block)
        (low, high), choice = block.function.slopes(x), block.function.slope_range(x)
        if block.function.piecewise_linear:
            # The chord is on the side on which there is no choice.
            found[block.part] = torch.where(choice.lower_from != choice.lower_to, low, high)[0]
        else:
            found[block.part] = (low + high)[0] / 2
    return found


@dataclass(frozen=True, eq=False)
class HullCuts:
    """Upper bounds of some neurons' values, affine in e and in the values r of earlier neurons."""

    neurons: Tensor  # (h,) which, in ascending order
    entries: Tensor  # (2, count) the cut and the variable, among e and r, of every coefficient; cuts in ascending order
    coefficients: Tensor  # (count,)
    bends: Tensor  # (h, 2) μ and ν
    constant: Tensor  # (h,) of the bounds; it covers all rounding
    width: Tensor  # (h,) by how much the bounds exceed the values at most

    def combined(
        self, amount: Tensor, block: Block, system: ReducedSystem, span: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums Σ amount·(cut − span) over the cuts of a block's neurons: coefficients, constants, errors.

        Args:
            amount: (rows, neurons of the block).
            block: the block.
            system: the system.
            span: (m,).
        """
        columns = system.inputs + block.start
        first, last = torch.searchsorted(self.neurons, torch.tensor([block.start, block.end]).to(self.neurons)).tolist()
        terms = slice(*torch.searchsorted(self.entries[0], torch.tensor([first, last]).to(self.entries)).tolist())
        over, count = self.neurons[first:last], last - first
        cut, variable = self.entries[0, terms] - first, self.entries[1, terms]
        mine, values = amount[:, over - block.start], self.coefficients[terms]
        whole = torch.sparse_coo_tensor(torch.stack([variable, cut]), values, (columns, count), check_invariants=True)
        level = self.constant[first:last] - span[over]
        reach = torch.cat([torch.ones_like(span[:1]).expand(system.inputs), system.reach])
        size = self.constant[first:last].abs() + span[over]
        size = size.index_add(0, cut, values.abs() * reach[variable])
        underflow = 8 * TINY * (count + 1) * (1 + columns) * (1 + reach.sum())
        error = OWN * (gamma(count + 4, torch.float64) * (mine.abs() @ size) + underflow)
        return torch.sparse.mm(whole, mine.T).T, mine @ level, error


@dataclass(frozen=True, eq=False)
class OpenPolytope:
    """One polytope of the unsafe set that bounds do not exclude."""

    rows: AffineForms  # Its rows, A·y − b as forms of e and r, the one with the largest lower bound first
    scale: Tensor  # (rows,) the factor of each row that made its coefficients integers
    order: Tensor  # (rows,) which row of the polytope each is
    objective: Tensor  # (outputs,) A of the first row
    slopes: Tensor  # (m,) of the relaxation that is best for it
    cuts: HullCuts | None = None  # Hull cuts over neurons for the first row; None for none
    improved: bool = False  # Whether a better relaxation has been searched for


Improve = Callable[[ReducedSystem, Sequence[OpenPolytope], Callable[[], bool]], list[OpenPolytope]]
"""Returns polytopes with better relaxations, given those of a system, and whom to ask whether to stop."""


def better_slopes(system: ReducedSystem, parts: Sequence[OpenPolytope], stop: Callable[[], bool]) -> list[OpenPolytope]:
    """Return polytopes with the best slopes found (``Improve``)."""
    slopes, _ = row_slopes(system, torch.stack([part.objective for part in parts]), Ascent())
    return [replace(part, slopes=mine) for part, mine in zip(parts, slopes, strict=True)]


def hull_cuts(system: ReducedSystem, parts: Sequence[OpenPolytope], stop: Callable[[], bool]) -> list[OpenPolytope]:
    """Return polytopes with the best hull cuts found, and slopes of the lines below them (``Improve``).

    The searches run one after the other, over neurons whose upper bounds the objective uses. A system that is
    too large to be held, as neurons have many terms, gets better slopes alone.
    """
    if system.whole:
        neurons: AffineForms | None = system.neurons
    elif (neurons := _SPARSE.get(system)) is None and (neurons := _sparse_neurons(system, stop)) is not None:
        # One tree is improved first, then all others of the same system.
        _SPARSE[system] = neurons
    if neurons is None:
        return better_slopes(system, parts, stop)
    search = _CutSearch(system, neurons)
    return [search.improved(part, stop) for part in parts]


_SPARSE: WeakKeyDictionary[ReducedSystem, AffineForms] = WeakKeyDictionary()


def _sparse_neurons(system: ReducedSystem, stop: Callable[[], bool]) -> AffineForms | None:
    """Return all pre-activations with a sparse matrix; None where some have more than ``_FEW_TERMS``, or time is up."""
    every, width, found = torch.arange(system.size, device=system.lower.device), system.inputs + system.size, []
    for chosen in every.split(max(1, _PART // width)):
        forms = system.of_neurons(chosen)
        if stop() or int((forms.matrix != 0).sum(1).max()) > _FEW_TERMS:
            return None
        found.append(replace(forms, matrix=forms.matrix.to_sparse()))
    matrix = torch.cat([forms.matrix for forms in found]).coalesce()
    constant, error = (torch.cat([getattr(forms, name) for forms in found]) for name in ("constant", "error"))
    return AffineForms(matrix, constant, error, system.inputs)


def _rows_of(matrix: Tensor, part: slice, columns: int) -> Tensor:
    """Return the first ``columns`` columns of some rows in float32; of a sparse matrix in compressed columns."""
    if not matrix.is_sparse:
        return matrix[part, :columns].float()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CS[CR] tensor support", category=UserWarning)
        rows = matrix.narrow_copy(0, part.start, part.stop - part.start).narrow_copy(1, 0, columns)
        return rows.float().to_sparse_csc()


@dataclass(frozen=True, eq=False)
class _Terms(TensorRecord):
    """The terms of some neurons' pre-activations, scaled to y ∈ [−1, 1], one after the other."""

    neurons: Tensor  # (h,) their numbers
    count: Tensor  # (h,) the number of terms of each
    # row, column: (terms,) the neuron of each term, among these, and its variable, among e and the neurons' values
    row: Tensor
    column: Tensor
    # weight, size, middle: (terms,) its coefficient, the magnitude of that of y, and its value where y is zero
    weight: Tensor
    size: Tensor
    middle: Tensor
    constant: Tensor  # (h,) the pre-activations where y is zero
    # own, error: (h,) the constants of the pre-activations' forms, and their errors
    own: Tensor
    error: Tensor
    # lower, upper, below: (h,) the bounds of the pre-activations, and the activations' slopes below zero
    lower: Tensor
    upper: Tensor
    below: Tensor

    @staticmethod
    def of_neurons(system: ReducedSystem, forms: AffineForms, neurons: Tensor, below: Tensor) -> _Terms:
        """Return the terms of some neurons, (h,) in ascending order, given all ``forms`` and slopes ``below`` zero."""
        n, values = system.inputs, system.values_range
        chosen = forms.matrix.index_select(0, neurons).to_sparse().coalesce()
        (row, column), weight = chosen.indices(), chosen.values()
        own, error = forms.constant[neurons], forms.error[neurons]
        center = torch.cat([weight.new_zeros(n), (values.lower[0] + values.upper[0]) / 2])
        radius = torch.cat([weight.new_ones(n), (values.upper[0] - values.lower[0]) / 2 * FEW])
        middle = weight * center[column]
        constant = own.index_add(0, row, middle)
        parts = (row, column, weight, weight.abs() * radius[column], middle, constant, own, error)
        count = torch.bincount(row, minlength=len(neurons))
        return _Terms(neurons, count, *parts, system.lower[neurons], system.upper[neurons], below[neurons])

    def sums(self, of_terms: Tensor) -> Tensor:
        """Return the sum over each neuron's terms, (h,)."""
        found: Tensor = torch.segment_reduce(of_terms, "sum", lengths=self.count, unsafe=True)
        return found

    def tops(self, theta: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
        """Return the constants (h,), about the centre, of the cuts with the coefficients θ·w, on either side of 0."""
        active, inactive = 1 - mu, nu + self.below
        over, under = (self.sums((theta - side[self.row]).abs() * self.size) for side in (active, inactive))
        over = over + active * self.constant + mu * self.upper
        return torch.maximum(over, under + inactive * self.constant - nu * self.lower)


class _CutSearch:
    """The search for cuts over some neurons of a system, whose parameters are θ (terms,), μ and ν (h,)."""

    def __init__(self, system: ReducedSystem, neurons: AffineForms) -> None:
        self._system, self._below, lines = system, system.slopes_below, [system.lower.new_zeros(6, 0)]
        self._forms, self._constant = neurons, neurons.constant.float()
        # By block the rows of its neurons, as far as earlier neurons
        self._rows = [_rows_of(neurons.matrix, block.part, system.inputs + block.start) for block in system.blocks]
        for block in system.blocks:
            x, function = system.interval(block), block.function
            found = function.slope_range(x)
            offsets = function.floor(x, found.lower_from), function.top(x, found.upper_from)
            lines.append(torch.cat([found.lower_from, found.lower_to, found.upper_from, found.upper_to, *offsets]))
        # Ends of the slopes below and above, and the offsets of all lines between
        self._lines = torch.cat(lines, 1).float()
        self._chord = (system.upper - self._below * system.lower) / (system.upper - system.lower)

    def improved(self, part: OpenPolytope, stop: Callable[[], bool]) -> OpenPolytope:
        """Return a polytope with the best cuts found for its first row."""
        row, system = part.rows[:1].each(Tensor.float), self._system
        alpha = (system.upper > -system.lower).float()
        chosen = (self._bound(row, alpha)[1] < 0) & (self._below < 1)
        exact = _Terms.of_neurons(system, self._forms, chosen.nonzero().squeeze(1), self._below)
        terms = exact.each(lambda t: t.float() if t.is_floating_point() else t)
        chord = self._chord[exact.neurons].float()
        start = alpha, chord[exact.row], 1 - chord, chord - terms.below
        best, sizes = torch.cat(start), [len(part) for part in start]

        def bounded(given: Tensor) -> tuple[Tensor, Tensor]:
            own, *parameters = given.split(sizes)
            return self._bound(row, own, terms, *parameters)

        adam, rate, most = Adam(best.clone()), _CUTS.rate, -torch.inf
        for step in range(_CUTS.steps + 1):
            with torch.enable_grad():
                value = adam.value.detach().requires_grad_()
                bound, _ = bounded(value)
            if (found := float(bound.detach())) > most:
                best, most = adam.value.clone(), found
            if step == _CUTS.steps or most > 0 or stop():
                break
            if bound.requires_grad:
                (gradient,) = torch.autograd.grad(bound, value)
                # Where float32 overflows, nothing is known of where to go.
                adam.step(torch.where(gradient.isfinite(), gradient, 0.0), rate)
            rate *= _CUTS.decay
        low, high = self._slopes(best[: system.size])
        slopes = torch.where(bounded(best)[1] < 0, high, low).double()
        _, *parameters = ((best.double() * _SHORT).round() / _SHORT).split(sizes)
        return replace(part, slopes=slopes, cuts=self._rounded(exact, *parameters))

    def _slopes(self, alpha: Tensor) -> tuple[Tensor, Tensor]:
        low_from, low_to, high_from, high_to = self._lines[:4]
        return torch.lerp(low_from, low_to, alpha), torch.lerp(high_from, high_to, alpha)

    def _bound(
        self, row: AffineForms, alpha: Tensor, terms: _Terms | None = None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the bound of a row, and its coefficients (m,), by alpha (m,), and by cuts with θ, μ and ν."""
        n, a, constant, found = self._system.inputs, row.matrix[0], row.constant[0], list[Tensor]()
        (low, high), (floor, top) = self._slopes(alpha), self._lines[4:]
        if terms is not None:
            theta, mu, nu = parameters
            entries = theta * terms.weight
            level = terms.tops(theta, mu, nu) - terms.sums(theta * terms.middle)
        for block, rows in zip(reversed(self._system.blocks), reversed(self._rows), strict=True):
            part = block.part
            mine, a = a[n + block.start :], a[: n + block.start]
            found.insert(0, mine.detach())
            weight = mine * torch.where(mine < 0, high[part], low[part])
            rest = mine * torch.where(mine < 0, top[part], floor[part])
            if terms is not None:
                first, last = torch.searchsorted(terms.neurons, terms.neurons.new_tensor([part.start, part.stop]))
                cuts, over = slice(int(first), int(last)), terms.neurons[first:last] - block.start
                amount = mine[over].clamp(max=0)
                ends = torch.searchsorted(terms.row, terms.row.new_tensor([cuts.start, cuts.stop]))
                mine_terms = slice(int(ends[0]), int(ends[1]))
                given = amount[terms.row[mine_terms] - cuts.start] * entries[mine_terms]
                a = a.index_add(0, terms.column[mine_terms], given)
                constant = constant + amount @ level[cuts]
                covered = torch.zeros_like(mine, dtype=torch.bool).index_fill(0, over, True) & (mine < 0)
                weight, rest = weight.masked_fill(covered, 0), rest.masked_fill(covered, 0)
            a = a + (weight[None] @ rows)[0]
            constant = constant + rest.sum() + weight @ self._constant[part]
        return constant - a.abs().sum(), torch.cat([self._constant[:0], *found])

    def _rounded(self, mine: _Terms, theta: Tensor, mu: Tensor, nu: Tensor) -> HullCuts:
        """Return the cuts in float64, with constants that make them bounds whatever rounding does."""
        # θ is one of 2²⁰ parts, so that its differences from μ, ν and 1 are exact; a product with a weight is not.
        coefficients, top = theta * mine.weight, mine.tops(theta, mu, nu)
        chord = self._chord[mine.neurons]
        # The activation is above the line through zero with the chord's slope.
        width = mine.sums((theta - chord[mine.row]).abs() * mine.size) + top - chord * mine.constant
        moved = mine.sums(theta * mine.middle)
        # Sums have at most ``2·most`` terms, whose sizes sum to at most ``size``; a slope may exceed 1 in magnitude.
        reach = mine.sums(mine.middle.abs() + mine.size)
        size = (4 + 2 * mine.below.abs()) * (reach + mine.own.abs() + mine.upper.abs() + mine.lower.abs())
        most = self._system.inputs + self._system.size
        error = gamma(2 * most + 32, torch.float64) * size + 64 * TINY * (1 + most)
        error = OWN * (error + (1 + mine.below.abs()) * mine.error)
        entries, bends = torch.stack([mine.row, mine.column]), torch.stack([mu, nu], 1)
        return HullCuts(mine.neurons, entries, coefficients, bends, top - moved + error, width + 2 * error)
