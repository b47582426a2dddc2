"""Planes over unstable ReLUs: linear upper bounds of a neuron's value by what its pre-activation is a sum of.

A chord bounds the value r_j of a neuron by its pre-activation z_j alone. Over the box of the scaled inputs e and of the
values r of earlier neurons, of which z_j = w·y + b is an affine form, there are better bounds, with a coefficient of
its own for every term (Anderson et al., Strong mixed-integer programming formulations for trained neural networks,
arXiv 1811.01988): with y ∈ [−1, 1]ᵏ the scaled variables, slope_j < 1 the activation's slope below zero, and any μ, ν
in [0, 1],

    r_j ≤ g·y + max(Σ|(1 − μ)·w − g| + (1 − μ)·b + μ·u_j,  Σ|(ν + slope_j)·w − g| + (ν + slope_j)·b − ν·l_j).

For where z_j ≥ 0, r_j = z_j ≤ (1 − μ)·z_j + μ·u_j, and where z_j ≤ 0, r_j = slope_j·z_j ≤ slope_j·z_j + ν·(z_j − l_j);
both are affine in y, and a sum of magnitudes is the most that they are above g·y. So *any* g, μ and ν are sound. The
chord is g = chord_j·w, μ = 1 − chord_j and ν = chord_j − slope_j.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.bounds.crown import Moments
from verifiable_relu.rounding import FEW, OWN, TINY, gamma
from verifiable_relu.verifiers.bab.folded import Folded, Rows, short

_LEAST = 1e-30
"""Heuristic: radii to divide by are at least this, where planes are searched for."""

_SHORT = 2.0**20
"""Coefficients are multiples of one part of so many of the pre-activation's."""


@dataclass(frozen=True, eq=False)
class Planes:
    """Upper bounds of some neurons' values, affine in e and in the values r of earlier neurons.

    Attributes:
        neurons: (h,) which, in ascending order.
        entries: (2, count) the plane and the variable, among e and r, of every coefficient; planes in ascending order.
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
    def cat(parts: Sequence[Planes]) -> Planes:
        """All planes of several, whose neurons ascend from one to the next."""
        if not parts:
            none = torch.zeros(0, dtype=torch.float64)
            return Planes(none.long(), none.long().repeat(2, 1), none, none, none.repeat(2, 1).T, none, none)
        starts = itertools.accumulate((len(part.neurons) for part in parts[:-1]), initial=0)
        moved = [part.entries + torch.tensor([[s], [0]]) for part, s in zip(parts, starts, strict=True)]
        rest = ((p.coefficients, p.parts, p.bends, p.constant, p.width) for p in parts)
        fields = (torch.cat(field) for field in zip(*rest, strict=True))
        return Planes(torch.cat([p.neurons for p in parts]), torch.cat(moved, 1), *fields)

    def rows(self, part: slice, inputs: int, neurons: int) -> Rows:
        """Some of the bounds as rows of e and r, by how many of either there are."""
        first, end = torch.searchsorted(self.entries[0], torch.tensor([part.start, part.stop])).tolist()
        row, column = self.entries[:, first:end]
        dense = torch.zeros(part.stop - part.start, inputs + neurons, dtype=torch.float64)
        dense[row - part.start, column] = self.coefficients[first:end]
        constant = self.constant[part]
        return Rows(dense[:, :inputs], dense[:, inputs:], constant, torch.zeros_like(constant))


@dataclass(frozen=True, eq=False)
class _Terms:
    """The terms of some neurons' pre-activations, scaled to y ∈ [−1, 1], a neuron a row, padded with zeros.

    Attributes:
        neurons: (h,) their numbers.
        places: (h, k) of each term's variable, among e and the neurons' values; different in a row but for padding.
        weight: (h, k) its coefficient.
        size: (h, k) ≥ 0, likewise, of the scaled variable.
        middle: (h, k) the centre of its variable.
        constant: (h,) the pre-activations where y is zero.
    """

    neurons: Tensor
    places: Tensor
    weight: Tensor
    size: Tensor
    middle: Tensor
    constant: Tensor

    @staticmethod
    def of(folded: Folded, neurons: Tensor) -> _Terms:
        """The terms in float64."""
        whole = torch.cat([folded.neurons.inputs[neurons], folded.neurons.neurons[neurons]], 1)
        row, column = whole.nonzero(as_tuple=True)
        count = torch.bincount(row, minlength=len(neurons))
        most = int(count.max()) if len(count) else 0
        place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
        # A row with fewer terms than others is filled with a variable that it has no term of.
        places = (whole == 0).byte().argmax(1)[:, None].repeat(1, most)
        places[row, place] = column
        weight = torch.zeros(places.shape, dtype=torch.float64)
        weight[row, place] = whole[row, column]
        center, radius = variables(folded)
        middle = center[places]
        constant = folded.neurons.constant[neurons] + (weight * middle).sum(1)
        return _Terms(neurons, places, weight, weight.abs() * radius[places], middle, constant)

    def single(self) -> _Terms:
        """The terms in float32."""
        parts = (t.to(torch.float32) for t in (self.weight, self.size, self.middle, self.constant))
        return _Terms(self.neurons, self.places, *parts)

    def __getitem__(self, chosen: Tensor) -> _Terms:
        parts = (self.neurons, self.places, self.weight, self.size, self.middle, self.constant)
        return _Terms(*(t[chosen] for t in parts))


def variables(folded: Folded) -> tuple[Tensor, Tensor]:
    """Centre and radius of what pre-activations are sums of: e, then the values of neurons; (n + m,) each."""
    relu = (folded.slope == 0) & ~folded.smooth
    reach = folded.reach
    lower, upper = torch.where(relu, 0.0, -reach), reach
    none = torch.zeros(folded.inputs, dtype=torch.float64)
    center = torch.cat([none, (lower + upper) / 2])
    radius = torch.cat([none + 1, (upper - lower) / 2 * FEW])
    return center, radius


@dataclass(frozen=True)
class Above:
    """How planes are searched for: Adam on the bound of one objective, of planes and lower slopes together.

    Attributes:
        steps: at most.
        rate: of the first step; coefficients are parts of the pre-activation's, slopes between the activation's two.
        decay: what the rate is multiplied with after every step.
    """

    steps: int = 60
    rate: float = 0.1
    decay: float = 0.95

    def search(
        self, folded: Folded, objectives: Rows, slopes: Tensor, stop: Callable[[], bool]
    ) -> list[tuple[Planes, Tensor, float]]:
        """For each objective, the best planes found for its lower bound, with slopes, and that bound, not proven.

        The searches run in float32, one after the other, until the bound is positive.

        Args:
            folded: the system, without smooth neurons.
            objectives: one a row.
            slopes: (objectives, m) of the lines below the activations to begin with.
            stop: asked after every step.
        """
        system = _System(folded)
        found = zip(range(len(objectives)), slopes, strict=True)
        return [self._one(system, objectives[number : number + 1], mine, stop) for number, mine in found]

    def _one(
        self, system: _System, objective: Rows, slopes: Tensor, stop: Callable[[], bool]
    ) -> tuple[Planes, Tensor, float]:
        ascent = _Ascent(system, objective, slopes)
        rate = self.rate
        for step in range(1, self.steps + 2):
            ascent.evaluate()
            if ascent.best > 0 or step > self.steps or stop():
                break
            ascent.move(rate / (1 - 0.9**step))
            rate *= self.decay
        return ascent.planes(), ascent.slopes(), ascent.best


class _Block:
    """The planes over some neurons of a block while they are searched for.

    Attributes:
        neurons: (h,) their numbers.
        terms: of their pre-activations, in float32.
        parameters: θ (h, k), μ and ν (h,): the plane's coefficients are θ times those of the pre-activation.
        best: the parameters of the best bound.
    """

    def __init__(self, folded: Folded, terms: _Terms, chosen: Tensor, chord: Tensor) -> None:
        self._exact = terms[chosen]
        self.terms = self._exact.single()
        self.neurons = neurons = self.terms.neurons
        self._below = folded.slope[neurons].float()
        self._lower, self._upper = folded.lower[neurons].float(), folded.upper[neurons].float()
        chord = chord[neurons]
        theta = chord[:, None].repeat(1, self.terms.weight.shape[1])
        self.parameters = [theta, 1 - chord, chord - self._below]
        self._moments = [Moments(parameter) for parameter in self.parameters]
        self.best = self.parameters
        self._scaled = self.terms.size.copysign(self.terms.weight)

    def evaluate(self) -> tuple[Tensor, Tensor]:
        """The planes' coefficients of e and r, (h, k), and their constants (h,)."""
        theta, mu, nu = self.parameters
        terms = self.terms
        active, inactive = theta - (1 - mu)[:, None], theta - (nu + self._below)[:, None]
        above = (active.abs() * terms.size).sum(1) + (1 - mu) * terms.constant + mu * self._upper
        below = (inactive.abs() * terms.size).sum(1) + (nu + self._below) * terms.constant - nu * self._lower
        self._is_above = above >= below
        self._sign = torch.where(self._is_above[:, None], active, inactive).sign_()
        self._top = torch.maximum(above, below)
        self.coefficients = theta * terms.weight
        self.offset = self._top - (self.coefficients * terms.middle).sum(1)
        return self.coefficients, self.offset

    def values(self, v: Tensor) -> Tensor:
        """The planes at a point v of e and r."""
        return (self.coefficients * v[self.terms.places]).sum(1) + self.offset

    def move(self, weight: Tensor, y: Tensor, rate: float) -> None:
        """One of Adam's steps, by what the planes are multiplied with, (h,), at scaled variables y (n + m,)."""
        terms = self.terms
        signed = self._sign * terms.size
        total = signed.sum(1)
        none = torch.zeros_like(total)
        gradients = (
            weight[:, None] * torch.addcmul(signed, self._scaled, y[terms.places]),
            weight * torch.where(self._is_above, total - terms.constant + self._upper, none),
            weight * torch.where(self._is_above, none, terms.constant - total - self._lower),
        )
        moved = []
        for parameter, moments, gradient in zip(self.parameters, self._moments, gradients, strict=True):
            size = moments.take(gradient)
            moved.append(parameter + rate * (moments.first / size))
        self.parameters = [p.clamp_(0, 1) for p in moved]

    def rounded(self, folded: Folded) -> Planes:
        """The best planes in float64, with constants that make them bounds whatever rounding does."""
        terms = self._exact
        theta, mu, nu = ((p.double() * _SHORT).round() / _SHORT for p in self.best)
        below, lower, upper = folded.slope[self.neurons], folded.lower[self.neurons], folded.upper[self.neurons]
        chord = folded.chords(torch.float64)[self.neurons]
        coefficients = theta * terms.weight
        # θ is one of 2²⁰ parts, so that its differences from μ, ν and 1 are exact; a product with a weight is not.
        active, inactive = 1 - mu, nu + below
        scaled = terms.size
        over = ((theta - active[:, None]).abs() * scaled).sum(1) + active * terms.constant + mu * upper
        under = ((theta - inactive[:, None]).abs() * scaled).sum(1) + inactive * terms.constant - nu * lower
        top = higher(over, under)
        width = ((theta - chord[:, None]).abs() * scaled).sum(1) + top - chord * terms.constant
        moved = (coefficients * terms.middle).sum(1)
        # Sums of at most so many terms, all of which together are at most ``size``; a slope may exceed 1 in magnitude.
        reach = (terms.weight.abs() * terms.middle.abs() + terms.size).sum(1)
        own = folded.neurons.constant[self.neurons].abs()
        size = (4 + 2 * below.abs()) * (reach + own + upper.abs() + lower.abs())
        error = gamma(2 * terms.places.shape[1] + 32, torch.float64) * size + 64 * TINY * (1 + terms.places.shape[1])
        error = OWN * (error + (1 + below.abs()) * folded.neurons.error[self.neurons])
        row, term = (terms.weight != 0).nonzero(as_tuple=True)
        entries = torch.stack([row, terms.places[row, term]])
        found = (coefficients[row, term], theta[row, term], torch.stack([mu, nu], 1))
        return Planes(self.neurons, entries, *found, top - moved + error, width + 2 * error)


def higher(active: Tensor, inactive: Tensor) -> Tensor:
    """The constants that bound a neuron on both sides of zero, by those that bound it on either side."""
    return torch.maximum(active, inactive)


class _System:
    """What the searches for all objectives share.

    Attributes:
        folded: the system.
        terms: of each block's neurons.
        matrix, constant: the pre-activations as forms of e and r, in float32.
        center, radius: of e and r, likewise.
    """

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        neurons = folded.neurons
        self.terms = [_Terms.of(folded, torch.arange(start, end)) for start, end in folded.blocks]
        self.matrix = torch.cat([neurons.inputs.float(), neurons.neurons.float()], 1)
        self.constant = neurons.constant.float()
        center, radius = variables(folded)
        self.center, self.radius = center.float(), radius.float().clamp(min=_LEAST)


class _Ascent:
    """The search for planes and slopes for one objective.

    Attributes:
        best: the best bound so far.
    """

    def __init__(self, system: _System, objective: Rows, slopes: Tensor) -> None:
        single = torch.float32
        self._folded = folded = system.folded
        self._system = system
        self._matrix, self._constant = system.matrix, system.constant
        self._first = torch.cat([objective.inputs[0], objective.neurons[0]]).to(single)
        self._first_constant = objective.constant[0].to(single)
        lower, slope = folded.lower.to(single), folded.slope.to(single)
        self._curvature = folded.curvature.to(single)
        self._chord = folded.chords(single)
        self._offset = (slope - self._chord) * lower
        self._least, self._most = slope.clamp(max=1), slope.clamp(min=1)
        self._alpha = slopes.to(single).clone()
        self._moments = Moments(self._alpha)
        self._blocks: list[_Block | None] = [None] * len(folded.blocks)
        self._backward()
        for number, (start, end) in enumerate(folded.blocks):
            chosen = (self._far & (slope < 1))[start:end].nonzero().squeeze(1)
            if len(chosen):
                self._blocks[number] = _Block(folded, system.terms[number], chosen, self._chord)
        self.best = -torch.inf
        self._kept = self._alpha

    def _backward(self) -> Tensor:
        """The bound; takes note of every neuron's coefficient, and of the lines that it stands for."""
        n = self._folded.inputs
        a, constant = self._first.clone(), self._first_constant
        self._weight, self._far = torch.zeros_like(self._alpha), torch.zeros_like(self._alpha, dtype=torch.bool)
        self._line = self._alpha.clone()
        for (start, end), block in zip(reversed(self._folded.blocks), reversed(self._blocks), strict=True):
            mine = a[n + start : n + end].clone()
            far = mine * self._curvature[start:end] < 0
            self._weight[start:end], self._far[start:end] = mine, far
            line = torch.where(far, self._chord[start:end], self._alpha[start:end])
            self._line[start:end] = line
            lines = mine * line
            shift = mine * far * self._offset[start:end]
            if block is not None:
                at = block.neurons - start
                weight = torch.where(far[at], mine[at], 0)
                lines[at], shift[at] = torch.where(far[at], 0, lines[at]), torch.where(far[at], 0, shift[at])
                coefficients, offset = block.evaluate()
                constant = constant + weight @ offset
                a.index_add_(0, block.terms.places.flatten(), (weight[:, None] * coefficients).flatten())
            constant = constant + shift.sum() + lines @ self._constant[start:end]
            a[: n + start] += lines @ self._matrix[start:end, : n + start]
        self._inputs = a[:n]
        return constant - self._inputs.abs().sum()

    def evaluate(self) -> None:
        """Bound the objective, and keep what is better than before."""
        bound = float(self._backward())
        if bound > self.best:
            self.best = bound
            self._kept = self._line
            for block in self._blocks:
                if block is not None:
                    block.best = block.parameters

    def move(self, rate: float) -> None:
        """One of Adam's steps."""
        n = self._folded.inputs
        v = torch.zeros_like(self._first)
        v[:n] = -self._inputs.sign()
        z = torch.zeros_like(self._alpha)
        for (start, end), block in zip(self._folded.blocks, self._blocks, strict=True):
            z[start:end] = self._matrix[start:end, : n + start] @ v[: n + start] + self._constant[start:end]
            values = self._line[start:end] * z[start:end] + self._far[start:end] * self._offset[start:end]
            if block is not None:
                at = block.neurons - start
                values[at] = torch.where(self._far[block.neurons], block.values(v), values[at])
            v[n + start : n + end] = values
        y = (v - self._system.center) / self._system.radius
        for block in self._blocks:
            if block is not None:
                weight = torch.where(self._far[block.neurons], self._weight[block.neurons], 0)
                block.move(weight, y, rate)
        gradient = torch.where(self._far, 0, self._weight * z)
        size = self._moments.take(gradient)
        moved = self._alpha + rate * (self._moments.first / size)
        self._alpha = torch.maximum(torch.minimum(moved, self._most), self._least)

    def slopes(self) -> Tensor:
        """(m,) of the best bound's lines: of a neuron with a plane, without a meaning."""
        return short(self._folded, self._kept.double())

    def planes(self) -> Planes:
        """The planes of the best bound, rounding accounted for."""
        return Planes.cat([block.rounded(self._folded) for block in self._blocks if block is not None])
