"""The small dense system that a query is folded to: affine forms of the inputs that vary and of unstable neurons.

With e ∈ [−1, 1]ⁿ the scaled inputs, z_j ∈ [l_j, u_j] the pre-activation and r_j the value of unstable neuron j,

    z_j = inputs_j·e + neurons_j·r + constant_j,    r_j = z_j where z_j ≥ 0, slope_j·z_j elsewhere,

up to an error that every form comes with; of a smooth activation, r_j is its value at z_j, and all its neurons are
unstable that are not lines. A system whose bounds have been tightened is a smaller one: neurons that
have become stable are substituted (``Folded.tightened``). So is one that only a few rows depend on
(``Folded.restricted``).

The coefficients of all pre-activations are as many as the square of their number. Where that is too much, or nobody
asks for them, those of a few are made, by walks through the network itself (``Pull``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from verifiable_relu.bounds.rounding import interval_activation
from verifiable_relu.bounds.tuning import Bounds
from verifiable_relu.network.nodes import Activation
from verifiable_relu.rounding import FEW, OWN, TINY, divisor, gamma, unit_roundoff

_WHOLE = 3 << 23
"""The most coefficients of a system that is held as a whole, which takes a few copies of them."""

_SHORT, _SHORT_SMOOTH = 2.0**16, 2.0**24
"""Slopes are multiples of one part of so many, so that certificates need not write many digits.

The second is for smooth neurons, whose lines touch their curves at points of their own.
"""


@dataclass(frozen=True, eq=False)
class AffineForms:
    """Affine forms of inputs and unstable neurons, inputs·e + neurons·r + constant, one a row.

    Attributes:
        inputs: (rows, n) coefficients of the scaled inputs e.
        neurons: (rows, m) coefficients of the values of the unstable neurons.
        constant: (rows,).
        error: (rows,) how far the form is from what it stands for, at most, at any point of the box.
    """

    inputs: Tensor
    neurons: Tensor
    constant: Tensor
    error: Tensor

    def __getitem__(self, chosen: Tensor | slice) -> AffineForms:
        return AffineForms(self.inputs[chosen], self.neurons[chosen], self.constant[chosen], self.error[chosen])

    def __len__(self) -> int:
        return len(self.constant)

    def __neg__(self) -> AffineForms:
        return AffineForms(-self.inputs, -self.neurons, -self.constant, self.error)

    @staticmethod
    def cat(parts: Sequence[AffineForms]) -> AffineForms:
        """Return all rows of several."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return AffineForms(*(torch.cat(column) for column in columns))

    @staticmethod
    def zeros(rows: int, inputs: int, neurons: int) -> AffineForms:
        """Return forms that are zero."""
        shapes = ((rows, inputs), (rows, neurons), (rows,), (rows,))
        return AffineForms(*(torch.zeros(*shape, dtype=torch.float64) for shape in shapes))


def is_whole(inputs: int, neurons: int) -> bool:
    """Whether a system of so many inputs that vary and unstable neurons may be held as a whole."""
    return neurons * (inputs + neurons) <= _WHOLE


Lines = Callable[[int, int, Tensor], tuple[Tensor, "AffineForms"]]
"""What takes the place of the values r of a block's neurons.

Given the block's first neuron, its end, and coefficients (rows, neurons of the block) of r: what the pre-activations z
are multiplied by in their place, of the same shape, and further forms of e and of r before the block.
"""


class Pull(Protocol):
    """A system whose pre-activations are made when they are asked for; as the methods of ``Folded``."""

    def substituted(self, rows: AffineForms, lines: Lines, rounded: bool = True) -> AffineForms: ...
    def of_neurons(self, chosen: Tensor, lines: Lines | None = None) -> AffineForms: ...


@dataclass(frozen=True, eq=False)
class Folded:
    """The unstable neurons of one box, and their pre-activations as affine forms.

    Attributes:
        center, radius: of the box, (inputs of the network,).
        free: (n,) the inputs that e scales.
        lower, upper: (m,) of the pre-activations; negative and positive but for smooth neurons.
        slope: (m,) of the activation below zero; without a meaning for smooth neurons.
        places: (m, 2) the activation node of each, and its number there.
        blocks: for each activation with unstable neurons its first one and the end, in the order of evaluation: a
            neuron depends on neurons of earlier blocks alone.
        given: the pre-activations, m rows, or what makes them.
        functions: the smooth activations, by node.
        straight: for each of these the slopes (size,) of the lines that stand for its neurons that are not here.
    """

    center: Tensor
    radius: Tensor
    free: Tensor
    lower: Tensor
    upper: Tensor
    slope: Tensor
    places: Tensor
    blocks: tuple[tuple[int, int], ...]
    given: AffineForms | Pull
    functions: Mapping[int, Activation] = field(default_factory=dict)
    straight: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def inputs(self) -> int:
        return len(self.free)

    @property
    def size(self) -> int:
        return len(self.lower)

    @property
    def whole(self) -> bool:
        """True if the system may be held as a whole."""
        return is_whole(self.inputs, self.size)

    @cached_property
    def neurons(self) -> AffineForms:
        """All pre-activations, m rows."""
        if isinstance(self.given, AffineForms):
            return self.given
        return self.given.of_neurons(torch.arange(self.size))

    def of_neurons(self, chosen: Tensor, lines: Lines | None = None) -> AffineForms:
        """Return the pre-activations of some neurons; ``substituted`` if there are lines."""
        if not isinstance(self.given, AffineForms) and "neurons" not in vars(self):
            return self.given.of_neurons(chosen, lines)
        rows = self.neurons[chosen]
        return rows if lines is None else self.substituted(rows, lines)

    def substituted(self, rows: AffineForms, lines: Lines, rounded: bool = True) -> AffineForms:
        """Return forms of e and r with the values r of each block replaced, those of the last one first.

        Args:
            rows: the forms.
            lines: what takes the place of the values.
            rounded: whether to account for rounding. Without, all is in float32, for searches.

        Returns:
            Forms of e and of what the lines leave of each r, with the coefficient that r had.
        """
        if not isinstance(self.given, AffineForms) and "neurons" not in vars(self):
            return self.given.substituted(rows, lines, rounded)
        n, kept, constant, error = self.inputs, [rows.neurons[:, :0]], rows.constant, rows.error
        a = torch.cat([rows.inputs, rows.neurons], 1)
        for start, end in reversed(self.blocks):
            mine = a[:, n + start : n + end]
            weight, more = lines(start, end, mine)
            kept.insert(1, mine)
            a = a[:, : n + start]
            for part in (self._combined(start, end, weight, rounded), more):
                a = a + torch.cat([part.inputs, part.neurons[:, :start]], 1)
                constant = constant + part.constant
                if rounded:
                    size = a[:, :n].abs().sum(1) + a[:, n:].abs() @ self.reach[:start] + constant.abs()
                    error = error + part.error + unit_roundoff(torch.float64) * size
        return AffineForms(a[:, :n], torch.cat(kept, 1), constant, OWN * error)

    def _combined(self, start: int, end: int, weight: Tensor, rounded: bool) -> AffineForms:
        if not rounded:
            matrix, constant = self._single
            found = weight @ matrix[start:end]
            return AffineForms(
                found[:, : self.inputs], found[:, self.inputs :], weight @ constant[start:end], constant[:0]
            )
        mine, size = self.neurons[start:end], weight.abs()
        underflow = 8 * TINY * (end - start + 1) * (1 + self.inputs + self.size) * (1 + self.reach.sum())
        error = size @ mine.error + gamma(end - start + 8, torch.float64) * (size @ self._sizes[start:end]) + underflow
        return AffineForms(weight @ mine.inputs, weight @ mine.neurons, weight @ mine.constant, OWN * error)

    @cached_property
    def _single(self) -> tuple[Tensor, Tensor]:
        """Coefficients and constants of all pre-activations in float32."""
        return torch.cat([self.neurons.inputs, self.neurons.neurons], 1).float(), self.neurons.constant.float()

    @cached_property
    def _sizes(self) -> Tensor:
        """(m,) ≥ the sum of the magnitudes of each pre-activation's terms over the box."""
        return sizes(self.neurons, self.reach)

    @cached_property
    def smooth(self) -> Tensor:
        """(m,) bool, the neurons of smooth activations."""
        return torch.isin(self.places[:, 0], torch.tensor(sorted(self.functions), dtype=torch.long))

    @property
    def curvature(self) -> Tensor:
        """1 where the activation is convex, −1 where it is concave, its slope being above 1, (m,)."""
        return torch.where(self.slope > 1, -1.0, torch.ones_like(self.slope))

    def chords(self, dtype: torch.dtype) -> Tensor:
        """(m,) the slopes of the chords of ReLU-like activations; zero where both bounds are zero in ``dtype``."""
        lower, upper, slope = (t.to(dtype) for t in (self.lower, self.upper, self.slope))
        return (upper - slope * lower) / divisor(upper - lower)

    @property
    def gap(self) -> Tensor:
        """(m,) how far each neuron's chord is from its activation, at most."""
        return (self.slope - 1).abs() * -self.lower * self.upper / (self.upper - self.lower)

    @cached_property
    def reach(self) -> Tensor:
        """(m,) ≥ |value| of each neuron over the box."""
        found = torch.maximum(self.upper, -self.lower * self.slope.abs()) * FEW + TINY
        for start, end in self.blocks:
            node = self.functions.get(int(self.places[start, 0]))
            if node is not None:
                bounds = Bounds(self.lower[start:end], self.upper[start:end])
                values = interval_activation(node, bounds)
                found[start:end] = torch.maximum(values.lower.abs(), values.upper.abs())
        return found

    def point(self, e: Tensor) -> Tensor:
        """The input, (points, inputs of the network), at scaled inputs (points, n)."""
        x = self.center.repeat(len(e), 1)
        x[:, self.free] += self.radius[self.free] * e.double()
        return x

    def values(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """Pre-activations and values of the neurons, (points, m) each, at scaled inputs (points, n); not proven."""
        z = torch.addmm(self.neurons.constant, e.double(), self.neurons.inputs.T)
        r = torch.zeros_like(z)
        for start, end in self.blocks:
            z[:, start:end] += r[:, :start] @ self.neurons.neurons[start:end, :start].T
            mine, node = z[:, start:end], self.functions.get(int(self.places[start, 0]))
            phases = torch.where(mine > 0, mine, self.slope[start:end] * mine) if node is None else node.forward(mine)
            r[:, start:end] = phases
        return z, r

    def support(self, rows: AffineForms) -> Tensor:
        """(rows, m) bool, the neurons that each row depends on, through other neurons included."""
        mine = (rows.neurons != 0).float()
        return (mine + mine @ self._feeding) > 0

    @cached_property
    def _feeding(self) -> Tensor:
        """(m, m) 1 where a neuron depends on another one, through others included."""
        direct = (self.neurons.neurons != 0).float()
        every = torch.zeros(self.size, self.size)
        for start, end in self.blocks:
            mine = direct[start:end]
            every[start:end] = ((mine + mine @ every) > 0).float()
        return every

    def restricted(self, rows: AffineForms) -> tuple[Folded, AffineForms]:
        """The system of the inputs and neurons that some rows depend on, and these rows there.

        What is left out has the coefficient zero in every form.
        """
        kept = self.support(rows).any(0).nonzero().squeeze(1)
        mine = self.neurons[kept]
        read = (rows.inputs != 0).any(0) | (mine.inputs != 0).any(0)
        read = read.nonzero().squeeze(1)

        def cut(forms: AffineForms) -> AffineForms:
            return AffineForms(forms.inputs[:, read], forms.neurons[:, kept], forms.constant, forms.error)

        return self._of(kept, cut(mine), self.lower, self.upper, self.free[read]), cut(rows)

    def tightened(self, lower: Tensor, upper: Tensor, rows: AffineForms) -> tuple[Folded, AffineForms]:
        """Return the system with better bounds, and some rows there; neurons that these make stable are substituted.

        Args:
            lower, upper: (m,) bounds of the pre-activations over the box, rounding accounted for, lower ≤ upper.
            rows: to be expressed by the neurons that are left.
        """
        active = lower >= 0
        stable = (active | (upper <= 0)) & ~self.smooth
        gone, kept = stable.nonzero().squeeze(1), (~stable).nonzero().squeeze(1)
        if not len(gone):
            return replace(self, given=self.neurons, lower=lower, upper=upper), rows
        substitution = _Substitution(self, gone, kept, slopes_of(active, self.slope))
        forms = substitution.of(self.neurons[kept])
        return self._of(kept, forms, lower, upper, self.free), substitution.of(rows)

    def _of(self, kept: Tensor, neurons: AffineForms, lower: Tensor, upper: Tensor, free: Tensor) -> Folded:
        """The system of the neurons ``kept``, (count,) in ascending order."""
        ends = torch.searchsorted(kept, torch.tensor([end for _, end in self.blocks], dtype=torch.long)).tolist()
        blocks, start = [], 0
        for end in ends:
            if end > start:
                blocks.append((start, end))
            start = end
        places = (self.slope[kept], self.places[kept])
        bounds = (lower[kept], upper[kept])
        lines = (self.functions, self.straight)
        return Folded(self.center, self.radius, free, *bounds, *places, tuple(blocks), neurons, *lines)


def sizes(rows: AffineForms, reach: Tensor) -> Tensor:
    """Return the sum (rows,) of the magnitudes of each form's terms over the box, given |value| ≤ reach."""
    return rows.inputs.abs().sum(1) + rows.constant.abs() + rows.neurons.abs() @ reach


def slopes_of(active: Tensor, below: Tensor) -> Tensor:
    """Return (m,) the slopes of stable neurons: 1 where a neuron is active, else that of its activation below zero."""
    return torch.where(active, torch.ones_like(below), below)


def short(folded: Folded, slopes: Tensor) -> Tensor:
    """Slopes (…, m) with few digits; those of piecewise-linear activations are between their two slopes."""
    found = (slopes * _SHORT).round() / _SHORT
    found = torch.minimum(torch.maximum(found, folded.slope.clamp(max=1)), folded.slope.clamp(min=1))
    return torch.where(folded.smooth, short_smooth(slopes), found)


def short_smooth(slopes: Tensor) -> Tensor:
    """Slopes of lines beside curves, with few digits."""
    return (slopes * _SHORT_SMOOTH).round() / _SHORT_SMOOTH


class _Substitution:
    """Stable neurons of a system, each slope times its pre-activation, as forms of the neurons that are left.

    Args:
        folded: the system.
        gone: (g,) its stable neurons, in ascending order.
        kept: the others, likewise.
        slope: (m,) of each neuron on the side of zero on which it is.
    """

    def __init__(self, folded: Folded, gone: Tensor, kept: Tensor, slope: Tensor) -> None:
        self._gone, self._kept, self._slope = gone, kept, slope[gone]
        self._reach = folded.reach[kept]
        self._forms = AffineForms.zeros(0, folded.inputs, len(kept))
        self._sizes = torch.zeros(0, dtype=torch.float64)
        ends = torch.searchsorted(gone, torch.tensor([end for _, end in folded.blocks], dtype=torch.long)).tolist()
        start = 0
        for end in ends:
            if end > start:
                # A neuron depends on neurons of earlier blocks alone, whose forms are there.
                found = self.of(folded.neurons[gone[start:end]])
                self._forms = AffineForms.cat([self._forms, found])
                self._sizes = torch.cat([self._sizes, sizes(found, self._reach)])
            start = end

    def of(self, rows: AffineForms) -> AffineForms:
        """Return rows with the neurons that are gone, so far as their forms are known, substituted.

        Each coefficient is a sum of at most as many products of three factors as neurons are substituted, and one.
        """
        known = len(self._forms)
        direct = rows.neurons[:, self._gone[:known]] * self._slope[:known]
        forms = self._forms
        inputs = torch.addmm(rows.inputs, direct, forms.inputs)
        neurons = torch.addmm(rows.neurons[:, self._kept], direct, forms.neurons)
        constant = rows.constant + direct @ forms.constant
        kept = AffineForms(rows.inputs, rows.neurons[:, self._kept], rows.constant, rows.error)
        terms = sizes(kept, self._reach) + direct.abs() @ self._sizes
        underflow = 8 * TINY * (known + 1) * (inputs.shape[1] + neurons.shape[1] + 1) * (1 + self._reach.sum())
        error = rows.error + direct.abs() @ forms.error + gamma(known + 8, torch.float64) * terms + underflow
        return AffineForms(inputs, neurons, constant, OWN * error)
