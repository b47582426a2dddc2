"""Hull cuts: upper bounds of neurons with a coefficient for each term of the pre-activation.

Above a ReLU there is its chord, which bounds the value r_j of a neuron by its pre-activation z_j alone. Over the box of
the scaled inputs e and of the values r of earlier neurons, of which z_j = w·y + b is an affine form, there are better
bounds (Anderson et al., Strong mixed-integer programming formulations for trained neural networks, arXiv 1811.01988):
with y ∈ [−1, 1]ᵏ the scaled variables, s_j < 1 the activation's slope below zero, and any μ, ν in [0, 1],

    r_j ≤ g·y + max(Σ|(1 − μ)·w − g| + (1 − μ)·b + μ·u_j,  Σ|(ν + s_j)·w − g| + (ν + s_j)·b − ν·l_j).

For where z_j ≥ 0, r_j = z_j ≤ (1 − μ)·z_j + μ·u_j, and where z_j ≤ 0, r_j = s_j·z_j ≤ s_j·z_j + ν·(z_j − l_j); both are
affine in y, and a sum of magnitudes is the most that they are above g·y. So *any* g, μ and ν are sound. The chord is
g = chord_j·w, μ = 1 − chord_j and ν = chord_j − s_j.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from verifiable_relu.rounding import FEW, OWN, TINY, gamma
from verifiable_relu.search.bab.forms import AffineForms, Block
from verifiable_relu.search.bab.system import ReducedSystem

_SHORT = 2.0**20
"""Coefficients of cuts are multiples of one part of this many of the pre-activation's."""

_FEW = 64
"""Where a system is too large to be held as a whole, cuts are over neurons whose pre-activations have at most this
number of terms."""

_PART = 1 << 22
"""About how many coefficients of pre-activations are looked at at once."""


@dataclass(frozen=True, eq=False)
class HullCuts:
    """Upper bounds of some neurons' values, affine in e and in the values r of earlier neurons.

    Attributes:
        neurons: (h,) which, in ascending order.
        entries: (2, count) the cut and the variable, among e and r, of every coefficient; cuts in ascending order.
        coefficients: (count,).
        parts: (count,) θ, the parts that these are of the pre-activation's coefficients.
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

    def rows(self, numbers: Tensor, system: ReducedSystem) -> AffineForms:
        """Return some of the bounds as rows of e and r."""
        n = system.inputs
        place = torch.full_like(self.neurons, -1).index_copy(0, numbers, torch.arange(len(numbers)).to(numbers))
        row = place[self.entries[0]]
        mine = row >= 0
        dense = self.constant.new_zeros(len(numbers), n + system.size)
        dense[row[mine], self.entries[1, mine]] = self.coefficients[mine]
        constant = self.constant[numbers]
        return AffineForms(dense[:, :n], dense[:, n:], constant, torch.zeros_like(constant))

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
        entries, values = self.entries[:, terms], self.coefficients[terms]
        mine = amount[:, over - block.start]
        place = torch.stack([entries[1], entries[0] - first])
        whole = torch.sparse_coo_tensor(place, values, (columns, count), check_invariants=True)
        level = self.constant[first:last] - span[over]
        reach = torch.cat([torch.ones_like(span[:1]).expand(system.inputs), system.reach])
        size = self.constant[first:last].abs() + span[over]
        size = size.index_add(0, entries[0] - first, values.abs() * reach[entries[1]])
        underflow = 8 * TINY * (count + 1) * (1 + columns) * (1 + reach.sum())
        error = OWN * (gamma(count + 4, torch.float64) * (mine.abs() @ size) + underflow)
        return torch.sparse.mm(whole, mine.T).T, mine @ level, error


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
    def of(system: ReducedSystem, block: Block, below: Tensor, stop: Callable[[], bool]) -> _Terms:
        """Return the terms of those neurons of a block that have few enough; of none once ``stop`` says so."""
        none = torch.arange(0, device=below.device)
        found = [_Terms._of(system, none, AffineForms.zeros(0, system.inputs, system.size, below), below)]
        most = system.inputs + system.size if system.whole else _FEW
        every = torch.arange(block.start, block.end, device=below.device)
        for neurons in every.split(max(1, _PART // (1 + system.inputs + system.size))):
            forms = system.of_neurons(neurons)
            few = ((forms.inputs != 0).sum(1) + (forms.neurons != 0).sum(1) <= most).nonzero().squeeze(1)
            # Neurons of one block read alike.
            if not len(few) or stop():
                break
            found.append(_Terms._of(system, neurons[few], forms[few], below))
        wide = max(terms.places.shape[1] for terms in found)
        found = [terms.each(lambda t: pad(t, (0, wide - t.shape[1])) if t.dim() > 1 else t) for terms in found]
        return _Terms(*(torch.cat([getattr(terms, name) for terms in found]) for name in vars(found[0])))

    @staticmethod
    def _of(system: ReducedSystem, neurons: Tensor, forms: AffineForms, below: Tensor) -> _Terms:
        whole = torch.cat([forms.inputs, forms.neurons], 1)
        row, column = whole.nonzero(as_tuple=True)
        count = torch.bincount(row, minlength=len(neurons))
        place = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
        # A row with fewer terms than others is filled with zeros.
        places = row.new_zeros(len(neurons), int(count.max()) if len(count) else 0)
        places[row, place] = column
        weight = whole.new_zeros(places.shape)
        weight[row, place] = whole[row, column]
        values, n = system.values_range, system.inputs
        center = torch.cat([whole.new_zeros(n), (values.lower[0] + values.upper[0]) / 2])
        radius = torch.cat([whole.new_ones(n), (values.upper[0] - values.lower[0]) / 2 * FEW])
        middle = center[places]
        constant = forms.constant + (weight * middle).sum(1)
        ends = (system.lower[neurons], system.upper[neurons], below[neurons])
        size = weight.abs() * radius[places]
        return _Terms(neurons, places, weight, size, middle, constant, forms.constant, forms.error, *ends)

    def each(self, change: Callable[[Tensor], Tensor]) -> _Terms:
        return _Terms(*(change(t) for t in vars(self).values()))

    def __getitem__(self, chosen: Tensor) -> _Terms:
        return self.each(lambda t: t[chosen])

    def tops(self, theta: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
        """Return the constants (h,), about the centre, of the cuts with the coefficients θ·w, on either side of 0."""
        active, inactive = 1 - mu, nu + self.below
        over = ((theta - active[:, None]).abs() * self.size).sum(1) + active * self.constant + mu * self.upper
        under = ((theta - inactive[:, None]).abs() * self.size).sum(1) + inactive * self.constant - nu * self.lower
        return torch.maximum(over, under)


@dataclass(frozen=True, eq=False)
class BlockCuts:
    """The cuts over the neurons of one block that are ``covered``, (neurons of the block,) bool, while one searches.

    ``places`` are the variables of each cut's terms, among e and r, (h, k), and ``coefficients`` theirs.
    """

    covered: Tensor
    places: Tensor
    coefficients: Tensor
    constant: Tensor


class CutSearch:
    """The cuts over some neurons as a function of θ (h, k), μ and ν (h,) of each block, all in one row.

    Args:
        system: the system, without smooth neurons.
        stop: asked now and then; some neurons have no cuts then.
    """

    def __init__(self, system: ReducedSystem, stop: Callable[[], bool]) -> None:
        below = torch.zeros_like(system.lower)
        for block in system.blocks:
            below[block.part] = -block.function.value(-torch.ones_like(below[None, block.part]))[0]
        chord = (system.upper - below * system.lower) / (system.upper - system.lower)
        self._system, self._chord, self.below = system, chord, below
        self._terms = [_Terms.of(system, block, below, stop) for block in system.blocks]

    def choose(self, chosen: Tensor) -> None:
        """Take cuts over some neurons, (m,) bool, whose slopes below zero are less than 1."""
        chosen = chosen & (self.below < 1)
        self._exact = [mine[chosen[mine.neurons]] for mine in self._terms]
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

    def at(self, given: Tensor) -> list[BlockCuts]:
        """Return the cuts of each block by their parameters."""
        found = []
        for covered, mine, (theta, mu, nu) in zip(self._covered, self._single, self._split(given), strict=True):
            coefficients = theta * mine.weight
            constant = mine.tops(theta, mu, nu) - (coefficients * mine.middle).sum(1)
            found.append(BlockCuts(covered, mine.places, coefficients, constant))
        return found

    def rounded(self, given: Tensor) -> HullCuts:
        """Return the cuts in float64, with constants that make them bounds whatever rounding does."""
        every = zip(self._exact, self._split((given.double() * _SHORT).round() / _SHORT), strict=True)
        parts = [self._rounded(mine, *parameters) for mine, parameters in every]
        return _joined(parts, [mine.neurons for mine in self._exact])

    def _rounded(self, mine: _Terms, theta: Tensor, mu: Tensor, nu: Tensor) -> Sequence[Tensor]:
        """Return entries, coefficients, parts, bends, constants and widths of one block's cuts."""
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
        bends = torch.stack([mu, nu], 1)
        return entries, coefficients[row, term], theta[row, term], bends, top - moved + error, width + 2 * error


def _joined(parts: Sequence[Sequence[Tensor]], neurons: Sequence[Tensor]) -> HullCuts:
    """Return the cuts of all blocks, whose neurons ascend from one to the next."""
    start, entries = 0, []
    for part, mine in zip(parts, neurons, strict=True):
        entries.append(part[0] + torch.tensor([[start], [0]]).to(part[0]))
        start += len(mine)
    rest = (torch.cat(column) for column in list(zip(*parts, strict=True))[1:])
    return HullCuts(torch.cat(list(neurons)), torch.cat(entries, 1), *rest)
