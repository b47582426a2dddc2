"""Slopes of a tree's relaxation, and hull cuts over neurons, that make the bound of an objective as good as it gets.

Beside a function any slope between two will do (``Function.slope_range``), as in α-CROWN (Xu et al., arXiv 2011.13824).
Above a ReLU there is its chord, which bounds the value r_j of a neuron by its pre-activation z_j alone. Over the box of
the scaled inputs e and of the values r of earlier neurons, of which z_j = w·y + b is an affine form, there are better
bounds (Anderson et al., Strong mixed-integer programming formulations for trained neural networks, arXiv 1811.01988):
with y ∈ [−1, 1]ᵏ the scaled variables, s_j < 1 the activation's slope below zero, and any μ, ν in [0, 1],

    r_j ≤ g·y + max(Σ|(1 − μ)·w − g| + (1 − μ)·b + μ·u_j,  Σ|(ν + s_j)·w − g| + (ν + s_j)·b − ν·l_j).

For where z_j ≥ 0, r_j = z_j ≤ (1 − μ)·z_j + μ·u_j, and where z_j ≤ 0, r_j = s_j·z_j ≤ s_j·z_j + ν·(z_j − l_j); both are
affine in y, and a sum of magnitudes is the most that they are above g·y. So *any* g, μ and ν are sound. The chord is
g = chord_j·w, μ = 1 − chord_j and ν = chord_j − s_j.

Slopes and cuts are made of parameters in [0, 1], by which the bound is differentiated, and Adam steps along. Nothing of
that search is proven: every slope is sound, and cuts are rounded at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.bounds.alpha import Adam
from verifiable_relu.ir.interval import Interval
from verifiable_relu.rounding import FEW, OWN, TINY, gamma
from verifiable_relu.search.bab.system import AffineForms, Block, ReducedSystem, Replacement

_POINTS = 9  # Slopes of which the offsets of smooth functions are computed; between them offsets are interpolated
_SHORT = 2.0**20  # Coefficients of cuts are multiples of one part of this many of the pre-activation's


@dataclass(frozen=True)
class SlopeSearch:
    """How the slopes of a relaxation are searched for."""

    steps: int = 60  # At most
    rate: float = 0.3  # Of the first step, of parameters between 0 and 1
    decay: float = 0.98  # The factor of the rate after every step

    def search(
        self, system: ReducedSystem, rows: AffineForms, stop: Callable[[], bool], start: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each row the best parameters found, the slopes that they give (rows, m), and the bounds (rows,).

        The search runs in float32, until all bounds are positive.

        Args:
            system: the system.
            rows: the objectives.
            stop: asked after every step.
            start: (rows, m) parameters to begin with; those of CROWN's slopes by default.
        """
        bound = _SlopeBound(system, rows)
        start = bound.start.repeat(len(rows), 1) if start is None else start
        found, best = self.climb(lambda alpha: bound(alpha)[0], start, stop)
        return found, bound(found)[1].double(), best

    def climb(
        self, bound: Callable[[Tensor], Tensor], start: Tensor, stop: Callable[[], bool]
    ) -> tuple[Tensor, Tensor]:
        """Ascend from ``start``, (rows, parameters) in [0, 1], until all bounds are positive, or ``stop`` says so.

        Returns:
            The best parameters of every row, and their bounds (rows,).
        """
        adam, rate = Adam(start), self.rate
        found, best = start.clone(), start.new_full((len(start),), -torch.inf)
        for step in range(self.steps + 1):
            with torch.enable_grad():
                value = adam.value.detach().requires_grad_()
                bounds = bound(value)
                total = bounds.sum()
            better = bounds.detach() > best
            best = torch.where(better, bounds.detach(), best)
            found = torch.where(better[:, None], adam.value, found)
            if step == self.steps or bool((best > 0).all()) or stop():
                break
            if total.requires_grad:
                (gradient,) = torch.autograd.grad(total, value)
                # Where float32 overflows, nothing is known of where to go.
                adam.step(torch.where(gradient.isfinite(), gradient, 0.0), rate)
            rate *= self.decay
        return found, best


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

    def rows(self, numbers: Tensor, system: ReducedSystem) -> AffineForms:
        """Return some of the bounds as rows of e and r."""
        place = torch.full_like(self.neurons, -1).index_copy(0, numbers, torch.arange(len(numbers)).to(numbers))
        row, n = place[self.entries[0]], system.inputs
        mine = row >= 0
        dense = self.constant.new_zeros(len(numbers), n + system.size)
        dense[row[mine], self.entries[1, mine]] = self.coefficients[mine]
        constant = self.constant[numbers]
        return AffineForms(dense, constant, torch.zeros_like(constant), n)

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
class BetterRelaxation:
    """Slopes (m,) of a relaxation, and hull cuts if there are any."""

    slopes: Tensor
    cuts: HullCuts | None = None


Improve = Callable[[ReducedSystem, AffineForms, Tensor, Callable[[], bool]], list[BetterRelaxation]]
"""Returns better relaxations of objectives, one a row, given a system, and parameters (rows, m) to begin with."""


def better_slopes(
    system: ReducedSystem, objectives: AffineForms, start: Tensor, stop: Callable[[], bool]
) -> list[BetterRelaxation]:
    """Return the best slopes found for each objective (``Improve``)."""
    return [BetterRelaxation(mine) for mine in SlopeSearch().search(system, objectives, stop, start)[1]]


def hull_cuts(
    system: ReducedSystem,
    objectives: AffineForms,
    start: Tensor,
    stop: Callable[[], bool],
    search: SlopeSearch = SlopeSearch(rate=0.1, decay=0.95),
) -> list[BetterRelaxation]:
    """Return the best hull cuts found for each objective, and slopes of the lines below them (``Improve``).

    The searches run one after the other, over the neurons of which the objective wants large values. A system that is
    too large to be held as a whole gets better slopes alone.
    """
    if not system.whole:
        return better_slopes(system, objectives, start, stop)
    over, size, found = _CutSearch(system), system.size, []
    for number, alpha in enumerate(start):
        bound = _SlopeBound(system, objectives[number : number + 1])
        over.choose(bound(alpha[None])[2][0] < 0)

        def value(given: Tensor, bound: _SlopeBound = bound) -> Tensor:
            return bound(given[:, :size], over.at(given[0, size:]))[0]

        best, _ = search.climb(value, torch.cat([alpha, over.start])[None], stop)
        _, slopes, _ = bound(best[:, :size], over.at(best[0, size:]))
        found.append(BetterRelaxation(slopes[0].double(), over.rounded(best[0, size:])))
    return found


@dataclass(frozen=True, eq=False)
class _BlockCuts:
    """The cuts over the neurons of one block that are ``covered``, and the places of their terms among e and r."""

    covered: Tensor
    places: Tensor
    coefficients: Tensor
    constant: Tensor


class _SlopeBound:
    """Lower bounds of rows in float32, as a function of the slopes that are taken.

    Attributes:
        start: (m,) parameters of CROWN's slopes.
    """

    def __init__(self, system: ReducedSystem, rows: AffineForms) -> None:
        self._system, self._rows = system, rows.each(Tensor.float)
        self._tables: dict[int, Tensor] = {}
        self.start = torch.full_like(system.lower, 0.5, dtype=torch.float32)
        for block in system.blocks:
            self._tables[block.start] = _table(block, system.interval(block)).float()
            if block.function.piecewise_linear:
                self.start[block.part] = (system.upper[block.part] > -system.lower[block.part]).float()

    def __call__(self, alpha: Tensor, cuts: Sequence[_BlockCuts] = ()) -> tuple[Tensor, Tensor, Tensor]:
        """Return bounds (rows,), and slopes and coefficients (rows, m), by parameters (rows, m) in [0, 1].

        Cuts take the place of the upper bounds of some neurons, block by block; for one row.
        """
        system, n = self._system, self._system.inputs
        slopes, over = torch.zeros_like(alpha), dict(zip(self._tables, cuts, strict=False))

        def taken(block: Block, mine: Tensor) -> Replacement:
            table, above = self._tables[block.start], mine < 0
            count = table.shape[2]
            place = alpha[:, block.part] * (count - 1)
            piece = place.detach().floor().clamp(0, count - 2)
            at = ((above * count + piece) * mine.shape[1]).long() + torch.arange(mine.shape[1], device=mine.device)
            first, second = (
                table.flatten(1)[:, at.flatten() + k * mine.shape[1]].unflatten(1, at.shape) for k in range(2)
            )
            slope, offset = torch.lerp(first, second, place - piece)
            slopes[:, block.part] = slope.detach()
            if block.start not in over:
                return Replacement(mine * slope, (mine * offset).sum(1))
            by = over[block.start]
            covered = above & by.covered
            amount = torch.where(covered, mine, 0.0)[0, by.covered]
            terms = (amount[:, None] * by.coefficients).flatten()[None]
            before = mine.new_zeros(1, n + block.start).index_add(1, by.places.flatten(), terms)
            weight, rest = (torch.where(covered, 0.0, mine * t) for t in (slope, offset))
            return Replacement(weight, rest.sum(1) + amount @ by.constant, before=before)

        first = self._rows.each(lambda t: t.expand(len(alpha), *t.shape[1:]))
        found = system.substituted(first, taken, rounded=False)
        return found.constant - found.inputs.abs().sum(1), slopes, found.neurons.detach()


def _table(block: Block, x: Interval) -> Tensor:
    """Return slopes and offsets, below and above, from one end of the slopes' range to the other.

    A mean of two linear bounds is a linear bound. The shape is (2, 2, points, neurons of the block).
    """
    count, range_ = 2 if block.function.piecewise_linear else _POINTS, block.function.slope_range(x)
    share = torch.linspace(0, 1, count, dtype=x.lower.dtype, device=x.lower.device)[:, None]
    low = torch.lerp(range_.lower_from, range_.lower_to, share)
    high = torch.lerp(range_.upper_from, range_.upper_to, share)
    offsets = (block.function.floor(x, low[:, None])[:, 0], block.function.top(x, high[:, None])[:, 0])
    return torch.stack([torch.stack([low, high]), torch.stack(offsets)])


@dataclass(frozen=True, eq=False)
class _Terms:
    """The terms of some neurons' pre-activations, scaled to y ∈ [−1, 1], a neuron a row, padded with zeros."""

    neurons: Tensor  # (h,) their numbers
    # places, weight, size, middle: (h, k) each term's variable, among e and the neurons' values; its coefficient; the
    # magnitude of that of the scaled variable; and the centre of its variable
    places: Tensor
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
    def of_block(system: ReducedSystem, block: Block, below: Tensor) -> _Terms:
        """Return the terms of a block's neurons."""
        forms, n, values = system.neurons[block.part], system.inputs, system.values_range
        whole = forms.matrix
        row, column = whole.nonzero(as_tuple=True)
        count = torch.bincount(row, minlength=len(block))
        place = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
        # A row with fewer terms than others is filled with zeros.
        places = row.new_zeros(len(block), int(count.max()))
        places[row, place] = column
        weight = whole.new_zeros(places.shape)
        weight[row, place] = whole[row, column]
        center = torch.cat([whole.new_zeros(n), (values.lower[0] + values.upper[0]) / 2])
        radius = torch.cat([whole.new_ones(n), (values.upper[0] - values.lower[0]) / 2 * FEW])
        size, middle = weight.abs() * radius[places], center[places]
        constant = forms.constant + (weight * middle).sum(1)
        ends = (system.lower[block.part], system.upper[block.part], below[block.part])
        neurons = torch.arange(block.start, block.end, device=row.device)
        return _Terms(neurons, places, weight, size, middle, constant, forms.constant, forms.error, *ends)

    def each(self, change: Callable[[Tensor], Tensor]) -> _Terms:
        return _Terms(*(change(t) for t in vars(self).values()))

    def tops(self, theta: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
        """Return the constants (h,), about the centre, of the cuts with the coefficients θ·w, on either side of 0."""
        active, inactive = 1 - mu, nu + self.below
        over = ((theta - active[:, None]).abs() * self.size).sum(1) + active * self.constant + mu * self.upper
        under = ((theta - inactive[:, None]).abs() * self.size).sum(1) + inactive * self.constant - nu * self.lower
        return torch.maximum(over, under)


class _CutSearch:
    """The cuts over some neurons as a function of θ (h, k), μ and ν (h,) of each block, all in one row."""

    def __init__(self, system: ReducedSystem) -> None:
        below = torch.zeros_like(system.lower)
        for block in system.blocks:
            below[block.part] = -block.function.value(-torch.ones_like(below[None, block.part]))[0]
        self._chord = (system.upper - below * system.lower) / (system.upper - system.lower)
        self._system, self._below = system, below
        self._terms = [_Terms.of_block(system, block, below) for block in system.blocks]

    def choose(self, chosen: Tensor) -> None:
        """Take cuts over some neurons, (m,) bool, whose slopes below zero are less than 1."""
        chosen = chosen & (self._below < 1)
        self._exact = [mine.each(lambda t, has=chosen[mine.neurons]: t[has]) for mine in self._terms]  # type: ignore[misc]
        has = torch.zeros_like(chosen)
        for mine in self._exact:
            has[mine.neurons] = True
        self._covered = [has[block.part] for block in self._system.blocks]
        self._single = [mine.each(lambda t: t.float() if t.is_floating_point() else t) for mine in self._exact]

    @property
    def start(self) -> Tensor:
        """(parameters,) of chords."""
        starts = [self._chord[:0].float()]
        for mine in self._single:
            own = self._chord[mine.neurons].float()
            starts += [own[:, None].expand(mine.weight.shape).flatten(), 1 - own, own - mine.below]
        return torch.cat(starts)

    def _split(self, given: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return θ, μ and ν of each block."""
        sizes = [size for mine in self._single for size in (mine.weight.numel(), len(mine.neurons), len(mine.neurons))]
        parts = iter(given.split(sizes))
        return [(next(parts).reshape(mine.weight.shape), next(parts), next(parts)) for mine in self._single]

    def at(self, given: Tensor) -> list[_BlockCuts]:
        """Return the cuts of each block by their parameters."""
        found = []
        for covered, mine, (theta, mu, nu) in zip(self._covered, self._single, self._split(given), strict=True):
            coefficients = theta * mine.weight
            constant = mine.tops(theta, mu, nu) - (coefficients * mine.middle).sum(1)
            found.append(_BlockCuts(covered, mine.places, coefficients, constant))
        return found

    def rounded(self, given: Tensor) -> HullCuts:
        """Return the cuts in float64, with constants that make them bounds whatever rounding does."""
        every = zip(self._exact, self._split((given.double() * _SHORT).round() / _SHORT), strict=True)
        parts = [self._rounded(mine, *parameters) for mine, parameters in every]
        start, entries = 0, []
        for part, mine in zip(parts, self._exact, strict=True):
            entries.append(part[0] + torch.tensor([[start], [0]]).to(part[0]))
            start += len(mine.neurons)
        rest = (torch.cat(column) for column in list(zip(*parts, strict=True))[1:])
        return HullCuts(torch.cat([mine.neurons for mine in self._exact]), torch.cat(entries, 1), *rest)

    def _rounded(self, mine: _Terms, theta: Tensor, mu: Tensor, nu: Tensor) -> Sequence[Tensor]:
        """Return entries, coefficients, bends, constants and widths of one block's cuts."""
        # θ is one of 2²⁰ parts, so that its differences from μ, ν and 1 are exact; a product with a weight is not.
        coefficients, top = theta * mine.weight, mine.tops(theta, mu, nu)
        chord = self._chord[mine.neurons]
        # The activation is above the line through zero with the chord's slope.
        width = ((theta - chord[:, None]).abs() * mine.size).sum(1) + top - chord * mine.constant
        moved = (coefficients * mine.middle).sum(1)
        # Sums of at most so many terms, all of which together are at most ``size``; a slope may exceed 1 in magnitude.
        reach = (mine.weight.abs() * mine.middle.abs() + mine.size).sum(1)
        size = (4 + 2 * mine.below.abs()) * (reach + mine.own.abs() + mine.upper.abs() + mine.lower.abs())
        error = gamma(2 * mine.places.shape[1] + 32, torch.float64) * size + 64 * TINY * (1 + mine.places.shape[1])
        error = OWN * (error + (1 + mine.below.abs()) * mine.error)
        row, term = (mine.weight != 0).nonzero(as_tuple=True)
        entries = torch.stack([row, mine.places[row, term]])
        return entries, coefficients[row, term], torch.stack([mu, nu], 1), top - moved + error, width + 2 * error
