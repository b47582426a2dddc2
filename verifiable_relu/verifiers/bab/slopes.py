"""Lines and cuts of unstable neurons that make a bound of the folded system as good as it gets.

Below a ReLU, and beside a smooth neuron, any line of a family will do; above a ReLU there is its chord, which bounds
the value r_j of a neuron by its pre-activation z_j alone. Over the box of the scaled inputs e and of the values r of
earlier neurons, of which z_j = w·y + b is an affine form, there are better bounds, with a coefficient of its own for
every term (Anderson et al., Strong mixed-integer programming formulations for trained neural networks, arXiv
1811.01988): with y ∈ [−1, 1]ᵏ the scaled variables, slope_j < 1 the activation's slope below zero, and any μ, ν in
[0, 1],

    r_j ≤ g·y + max(Σ|(1 − μ)·w − g| + (1 − μ)·b + μ·u_j,  Σ|(ν + slope_j)·w − g| + (ν + slope_j)·b − ν·l_j).

For where z_j ≥ 0, r_j = z_j ≤ (1 − μ)·z_j + μ·u_j, and where z_j ≤ 0, r_j = slope_j·z_j ≤ slope_j·z_j + ν·(z_j − l_j);
both are affine in y, and a sum of magnitudes is the most that they are above g·y. So *any* g, μ and ν are sound. The
chord is g = chord_j·w, μ = 1 − chord_j and ν = chord_j − slope_j.

There is one search for all of this: every line and cut is made of parameters in [0, 1], by which the bound is
differentiated, and Adam steps along.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from verifiable_relu.bounds.crown import Adam
from verifiable_relu.rounding import FEW, OWN, TINY, gamma, tiny
from verifiable_relu.verifiers.bab.curves import SlopeCandidates
from verifiable_relu.verifiers.bab.folded import AffineForms, Folded, short, short_smooth

_SHORT = 2.0**20
"""Coefficients of cuts are multiples of one part of so many of the pre-activation's."""

_FEW = 64
"""Where a system is too large to be held as a whole, cuts are over neurons whose pre-activations have so many terms
at most."""


_PART = 1 << 22
"""About how many coefficients of pre-activations are looked at at once."""


@dataclass(frozen=True)
class Slopes:
    """How the lines of a relaxation are searched for.

    Attributes:
        steps: at most; none where all neurons are piecewise linear, whose trees adapt their own lines: there the search
            took longer than what it saved.
        rate: of the first step, of parameters between 0 and 1.
        decay: what the rate is multiplied with after every step.
    """

    steps: int = 60
    rate: float = 0.3
    decay: float = 0.98

    def search(self, folded: Folded, rows: AffineForms, stop: Callable[[], bool]) -> tuple[Tensor, Tensor]:
        """Return the best slopes found for the lower bound of each row, (rows, m) in float64, and that bound.

        The search runs in float32, until all bounds are positive. Any slopes are sound, and no bound is proven.
        """
        bound = _LineBound(folded, rows)
        method = self if folded.functions else replace(self, steps=0)
        found, best = method.climb(lambda lines: bound(lines)[0], bound.start.repeat(len(rows), 1), stop)
        return short(folded, bound(found)[1].double()), best

    def relaxations(
        self, folded: Folded, objectives: AffineForms, slopes: Tensor, stop: Callable[[], bool]
    ) -> list[tuple[HullCuts | None, Tensor, float]]:
        """Return for each objective no cuts, the best slopes found for its lower bound, and that bound.

        The arguments are those of ``Above.relaxations``.
        """
        bound = _LineBound(folded, objectives)
        start = torch.stack([bound.parameters(mine) for mine in slopes])
        found, best = self.climb(lambda lines: bound(lines)[0], start, stop)
        chosen = short(folded, bound(found)[1].double())
        return [(None, mine, least) for mine, least in zip(chosen, best.tolist(), strict=True)]

    def climb(
        self, bound: Callable[[Tensor], Tensor], start: Tensor, stop: Callable[[], bool]
    ) -> tuple[Tensor, Tensor]:
        """Ascend from ``start``, (rows, parameters) in [0, 1], until all bounds are positive, or ``stop`` says so.

        Returns:
            The best parameters of every row, and their bounds (rows,).
        """
        adam, rate = Adam(start), self.rate
        found, best = start.clone(), torch.full((len(start),), -torch.inf)
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
                adam.step(torch.where(gradient.isfinite(), gradient, 0.0), rate, counts=False)
            rate *= self.decay
        return found, best


def slopes_for_all(folded: Folded) -> Tensor:
    """Return slopes (m,) that serve objectives of all kinds."""
    slopes = torch.where(folded.upper > -folded.lower, torch.ones_like(folded.upper), folded.slope)
    if folded.functions:
        fan = SlopeCandidates.of(folded, torch.float64)
        slopes[fan.neurons] = short_smooth(fan.slopes[..., fan.slopes.shape[2] // 2].mean(0))
    return slopes


@dataclass(frozen=True)
class Above(Slopes):
    """How hull cuts over neurons are searched for, together with the lines below them."""

    rate: float = 0.1
    decay: float = 0.95

    def relaxations(
        self, folded: Folded, objectives: AffineForms, slopes: Tensor, stop: Callable[[], bool]
    ) -> list[tuple[HullCuts | None, Tensor, float]]:
        """Return for each objective the best cuts found for its lower bound, with slopes, and that bound.

        The searches run in float32, one after the other, until the bound is positive. Of a neuron with a cut, the
        slope has no meaning.

        Args:
            folded: the system, without smooth neurons.
            objectives: one a row.
            slopes: (objectives, m) of the lines below the activations to begin with.
            stop: asked after every step.
        """
        terms = [_Terms.of(folded, start, end, stop) for start, end in folded.blocks or ((0, 0),)]
        found: list[tuple[HullCuts | None, Tensor, float]] = []
        for number in range(len(objectives)):
            bound = _LineBound(folded, objectives[number : number + 1])
            lines = bound.parameters(slopes[number])
            over = _CutSearch(folded, terms, bound.far(lines) & (folded.slope < 1))
            size = folded.size

            def value(given: Tensor, bound: _LineBound = bound, over: _CutSearch = over, size: int = size) -> Tensor:
                return bound(given[:, :size], over.at(given[0, size:]))[0]

            best, least = self.climb(value, torch.cat([lines, over.start])[None], stop)
            _, chosen = bound(best[:, :size], over.at(best[0, size:]))
            found.append((over.rounded(best[0, size:]), short(folded, chosen[0].double()), float(least)))
        return found


class _LineBound:
    """Lower bounds of rows in float32, as a function of the lines that are taken.

    Attributes:
        start: (m,) parameters to begin with: steep lines below activations that are mostly active.
    """

    def __init__(self, folded: Folded, rows: AffineForms) -> None:
        single = torch.float32
        self._folded = folded
        self._rows = AffineForms(*(t.to(single) for t in vars(rows).values()))
        lower, upper, slope = folded.lower.to(single), folded.upper.to(single), folded.slope.to(single)
        self._curvature, self._chord = folded.curvature.to(single), folded.chords(single)
        self._offset = (slope - self._chord) * lower
        self._least, self._room = slope.clamp(max=1), (slope - 1).abs()
        self._fan = SlopeCandidates.of(folded, single) if folded.functions else None
        self.start = ((upper > -lower) ^ (slope > 1)).to(single)
        self.start[folded.smooth] = 0.5

    def parameters(self, slopes: Tensor) -> Tensor:
        """Return the parameters (m,) of lines below activations with these slopes (m,)."""
        room = self._room.clamp(min=tiny(torch.float32))
        return ((slopes.to(room) - self._least) / room).clamp(0, 1)

    def far(self, lines: Tensor) -> Tensor:
        """Return the neurons, (m,) bool, that the first row wants at their far side, that of the chord."""
        return self._walked(lines[None], ())[2][0]

    def __call__(self, lines: Tensor, cuts: Sequence[_BlockCuts] = ()) -> tuple[Tensor, Tensor]:
        """Return bounds (rows,), and the slopes (rows, m) of lines by their parameters (rows, m) in [0, 1].

        Cuts are in the place of some chords, block by block; for one row.
        """
        return self._walked(lines, cuts)[:2]

    def _walked(self, lines: Tensor, cuts: Sequence[_BlockCuts]) -> tuple[Tensor, Tensor, Tensor]:
        n, blocks, smooth = self._folded.inputs, self._folded.blocks, self._folded.smooth
        slopes, fars = {0: lines[:, :0]}, {0: lines[:, :0] > 0}

        def taken(start: int, end: int, mine: Tensor) -> tuple[Tensor, AffineForms]:
            given, part = lines[:, start:end], slice(start, end)
            # The chord is above a convex activation, and below a concave one.
            far = mine * self._curvature[part] < 0
            if self._fan is not None and bool(smooth[start]):
                slope, shift = self._fan.at(part, mine < 0, given)
            else:
                slope = torch.where(far, self._chord[part], self._least[part] + self._room[part] * given)
                shift = torch.where(far, self._offset[part], 0.0)
            slopes[start], fars[start] = slope, far
            weight, rest = mine * slope, mine * shift
            before, above = mine.new_zeros(1, n + start), mine.new_zeros(1)
            if cuts:
                over = cuts[blocks.index((start, end))]
                covered = far & over.covers
                weight, rest = torch.where(covered, 0.0, weight), torch.where(covered, 0.0, rest)
                amount = torch.where(covered, mine, 0.0)[0, over.covers]
                above = amount @ over.constant
                terms = (amount[:, None] * over.coefficients).flatten()[None]
                before = before.index_add(1, over.places.flatten(), terms)
            constant = rest.sum(1) + above
            return weight, AffineForms(before[:, :n], before[:, n:], constant, constant)

        first = AffineForms(*(t.expand(len(lines), *t.shape[1:]) for t in vars(self._rows).values()))
        found = self._folded.substituted(first, taken, rounded=False)
        every = [start for start, _ in blocks] or [0]
        slope, far = (torch.cat([found[start] for start in every], 1) for found in (slopes, fars))
        return found.constant - found.inputs.abs().sum(1), slope, far


@dataclass(frozen=True, eq=False)
class HullCuts:
    """Upper bounds of some neurons' values, affine in e and in the values r of earlier neurons (hull cuts).

    Attributes:
        neurons: (h,) which, in ascending order.
        entries: (2, count) the cut and the variable, among e and r, of every coefficient; cuts in ascending order.
        coefficients: (count,).
        parts: (count,) θ, what parts of the pre-activation's coefficients these are.
        bends: (h, 2) μ and ν.
        constant: (h,) of the bounds; it covers all rounding.
        width: (h,) by how much the bounds exceed the values at most.
    """

    neurons: Tensor
    entries: Tensor
    coefficients: Tensor
    parts: Tensor
    bends: Tensor
    constant: Tensor
    width: Tensor

    @staticmethod
    def cat(parts: Sequence[HullCuts]) -> HullCuts:
        """All cuts of several, whose neurons ascend from one to the next."""
        starts = itertools.accumulate((len(part.neurons) for part in parts[:-1]), initial=0)
        moved = [part.entries + torch.tensor([[s], [0]]) for part, s in zip(parts, starts, strict=True)]
        rest = ((p.coefficients, p.parts, p.bends, p.constant, p.width) for p in parts)
        fields = (torch.cat(field) for field in zip(*rest, strict=True))
        return HullCuts(torch.cat([p.neurons for p in parts]), torch.cat(moved, 1), *fields)

    def rows(self, chosen: Tensor, inputs: int, neurons: int) -> AffineForms:
        """Some of the bounds, in ascending order, as rows of e and r, by how many of either there are."""
        mine = torch.isin(self.entries[0], chosen)
        row, column = self.entries[:, mine]
        dense = torch.zeros(len(chosen), inputs + neurons, dtype=torch.float64)
        dense[torch.searchsorted(chosen, row), column] = self.coefficients[mine]
        constant = self.constant[chosen]
        return AffineForms(dense[:, :inputs], dense[:, inputs:], constant, torch.zeros_like(constant))

    def combined(self, amount: Tensor, block: tuple[int, int], folded: Folded, width: Tensor) -> AffineForms:
        """The sums Σ amount·(cut − width) over the cuts of a block's neurons, of e and of r before the block.

        Args:
            amount: (rows, neurons of the block).
            block: its first neuron, and its end.
            folded: the system.
            width: (m,).
        """
        n, start = folded.inputs, block[0]
        first, last = torch.searchsorted(self.neurons, torch.tensor(block)).tolist()
        terms = slice(*torch.searchsorted(self.entries[0], torch.tensor([first, last])).tolist())
        over, count = self.neurons[first:last], last - first
        entries, values = self.entries[:, terms] - torch.tensor([[first], [0]]), self.coefficients[terms]
        mine = amount[:, over - start]
        whole = torch.sparse_coo_tensor(entries.flip(0), values, (n + start, count), check_invariants=True)
        found, level = torch.sparse.mm(whole, mine.T).T, self.constant[first:last] - width[over]
        reach = torch.cat([torch.ones(n, dtype=torch.float64), folded.reach])
        size = self.constant[first:last].abs() + width[over]
        size = size.index_add(0, entries[0], values.abs() * reach[entries[1]])
        underflow = 8 * TINY * (count + 1) * (1 + n + start) * (1 + reach.sum())
        error = OWN * (gamma(count + 4, torch.float64) * (mine.abs() @ size) + underflow)
        return AffineForms(found[:, :n], found[:, n:], mine @ level, error)


@dataclass(frozen=True, eq=False)
class _BlockCuts:
    """The h cuts over those neurons of one block, (neurons,) bool, that have one while they are searched for.

    ``places`` are the variables of each cut's terms, among e and r, (h, k).
    """

    covers: Tensor
    places: Tensor
    coefficients: Tensor
    constant: Tensor


@dataclass(frozen=True, eq=False)
class _Terms:
    """The terms of some neurons' pre-activations, scaled to y ∈ [−1, 1], a neuron a row, padded with zeros.

    Attributes:
        neurons: (h,) their numbers.
        places, weight, size, middle: (h, k) each term's variable, among e and the neurons' values; its coefficient; the
            magnitude of that of the scaled variable; and the centre of its variable.
        constant: (h,) the pre-activations where y is zero.
        own, error: (h,) the constants of the pre-activations' forms, and their errors.
        lower, upper, below: (h,) the bounds of the pre-activations, and the activations' slopes below zero.
    """

    neurons: Tensor
    places: Tensor
    weight: Tensor
    size: Tensor
    middle: Tensor
    constant: Tensor
    own: Tensor
    error: Tensor
    lower: Tensor
    upper: Tensor
    below: Tensor

    @staticmethod
    def of(folded: Folded, start: int, end: int, stop: Callable[[], bool]) -> _Terms:
        """The terms, in float64, of those neurons of a block that have few enough; of none once ``stop`` says so."""
        most = folded.inputs + folded.size if folded.whole else _FEW
        found = [_Terms._of(folded, torch.arange(0), AffineForms.zeros(0, folded.inputs, folded.size))]
        for neurons in torch.arange(start, end).split(max(1, _PART // (1 + folded.inputs + folded.size))):
            forms = folded.of_neurons(neurons)
            few = ((forms.inputs != 0).sum(1) + (forms.neurons != 0).sum(1) <= most).nonzero().squeeze(1)
            # What neurons of one block read is alike.
            if not len(few) or stop():
                break
            found.append(_Terms._of(folded, neurons[few], forms[few]))
        wide = max(terms.places.shape[1] for terms in found)
        found = [terms._padded(wide) for terms in found]
        return _Terms(*(torch.cat([getattr(terms, name) for terms in found]) for name in vars(found[0])))

    @staticmethod
    def _of(folded: Folded, neurons: Tensor, forms: AffineForms) -> _Terms:
        whole = torch.cat([forms.inputs, forms.neurons], 1)
        row, column = whole.nonzero(as_tuple=True)
        count = torch.bincount(row, minlength=len(neurons))
        most = int(count.max()) if len(count) else 0
        place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
        # A row with fewer terms than others is filled with zeros.
        places = torch.zeros(len(neurons), most, dtype=torch.long)
        places[row, place] = column
        weight = torch.zeros(places.shape, dtype=torch.float64)
        weight[row, place] = whole[row, column]
        center, radius = variables(folded)
        middle = center[places]
        constant = forms.constant + (weight * middle).sum(1)
        ends = (folded.lower[neurons], folded.upper[neurons], folded.slope[neurons])
        own = (forms.constant, forms.error)
        return _Terms(neurons, places, weight, weight.abs() * radius[places], middle, constant, *own, *ends)

    def _padded(self, wide: int) -> _Terms:
        return self._each(lambda t: pad(t, (0, wide - t.shape[1])) if t.dim() > 1 else t)

    def _each(self, change: Callable[[Tensor], Tensor]) -> _Terms:
        return _Terms(*(change(t) for t in vars(self).values()))

    def __getitem__(self, chosen: Tensor) -> _Terms:
        return self._each(lambda t: t[chosen])

    def single(self) -> _Terms:
        return self._each(lambda t: t.float() if t.is_floating_point() else t)

    def tops(self, theta: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
        """Return the constants (h,), about the centre, of the cuts with the coefficients θ·w, on either side of 0."""
        active, inactive = 1 - mu, nu + self.below
        over = ((theta - active[:, None]).abs() * self.size).sum(1) + active * self.constant + mu * self.upper
        under = ((theta - inactive[:, None]).abs() * self.size).sum(1) + inactive * self.constant - nu * self.lower
        return torch.maximum(over, under)


def variables(folded: Folded) -> tuple[Tensor, Tensor]:
    """Centre and radius of what pre-activations are sums of: e, then the values of neurons; (n + m,) each."""
    relu = (folded.slope == 0) & ~folded.smooth
    reach = folded.reach
    lower, upper = torch.where(relu, 0.0, -reach), reach
    none = torch.zeros(folded.inputs, dtype=torch.float64)
    center = torch.cat([none, (lower + upper) / 2])
    radius = torch.cat([none + 1, (upper - lower) / 2 * FEW])
    return center, radius


class _CutSearch:
    """The cuts over some neurons as a function of θ (h, k), μ and ν (h,) of each block, all in one row.

    Args:
        folded: the system.
        terms: of the neurons of each block that may have cuts.
        chosen: (m,) bool, the neurons with cuts.

    Attributes:
        start: (parameters,) of chords.
    """

    def __init__(self, folded: Folded, terms: Sequence[_Terms], chosen: Tensor) -> None:
        self._folded = folded
        self._exact = [mine[chosen[mine.neurons]] for mine in terms]
        has = torch.zeros_like(chosen).index_fill(0, torch.cat([mine.neurons for mine in self._exact]), True)
        self._covers = has.split([end - start for start, end in folded.blocks or ((0, 0),)])
        self._single = [mine.single() for mine in self._exact]
        chord = folded.chords(torch.float32)
        starts = [torch.zeros(0)]
        for mine in self._single:
            own = chord[mine.neurons]
            starts += [own[:, None].expand(mine.weight.shape).flatten(), 1 - own, own - mine.below]
        self.start = torch.cat(starts)

    def _split(self, given: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """θ, μ and ν of each block."""
        sizes = [size for mine in self._single for size in (mine.weight.numel(), len(mine.neurons), len(mine.neurons))]
        parts = iter(given.split(sizes))
        return [(next(parts).reshape(mine.weight.shape), next(parts), next(parts)) for mine in self._single]

    def at(self, given: Tensor) -> list[_BlockCuts]:
        """The cuts of each block by their parameters."""
        found = []
        for covers, mine, (theta, mu, nu) in zip(self._covers, self._single, self._split(given), strict=True):
            coefficients = theta * mine.weight
            constant = mine.tops(theta, mu, nu) - (coefficients * mine.middle).sum(1)
            found.append(_BlockCuts(covers, mine.places, coefficients, constant))
        return found

    def rounded(self, given: Tensor) -> HullCuts:
        """The cuts in float64, with constants that make them bounds whatever rounding does."""
        parts = zip(self._exact, self._split((given.double() * _SHORT).round() / _SHORT), strict=True)
        return HullCuts.cat([self._rounded(mine, *parameters) for mine, parameters in parts])

    def _rounded(self, mine: _Terms, theta: Tensor, mu: Tensor, nu: Tensor) -> HullCuts:
        chord = self._folded.chords(torch.float64)[mine.neurons]
        # θ is one of 2²⁰ parts, so that its differences from μ, ν and 1 are exact; a product with a weight is not.
        coefficients, top = theta * mine.weight, mine.tops(theta, mu, nu)
        width = ((theta - chord[:, None]).abs() * mine.size).sum(1) + top - chord * mine.constant
        moved = (coefficients * mine.middle).sum(1)
        # Sums of at most so many terms, all of which together are at most ``size``; a slope may exceed 1 in magnitude.
        reach = (mine.weight.abs() * mine.middle.abs() + mine.size).sum(1)
        size = (4 + 2 * mine.below.abs()) * (reach + mine.own.abs() + mine.upper.abs() + mine.lower.abs())
        error = gamma(2 * mine.places.shape[1] + 32, torch.float64) * size + 64 * TINY * (1 + mine.places.shape[1])
        error = OWN * (error + (1 + mine.below.abs()) * mine.error)
        row, term = (mine.weight != 0).nonzero(as_tuple=True)
        entries = torch.stack([row, mine.places[row, term]])
        found = (coefficients[row, term], theta[row, term], torch.stack([mu, nu], 1))
        return HullCuts(mine.neurons, entries, *found, top - moved + error, width + 2 * error)
