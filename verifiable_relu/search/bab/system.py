"""The reduced system of one query: the inputs that vary, the unstable neurons, and the affine forms between them.

With e ∈ [−1, 1]ⁿ the scaled inputs, z_j ∈ [l_j, u_j] the pre-activation and r_j = f_j(z_j) the value of unstable
neuron j,

    z_j = inputs_j·e + neurons_j·r + constant_j,

up to an error that every form comes with. Stable neurons are eliminated (``elimination``). The coefficients of all
pre-activations are as many as the square of their number. Where that is too much, or nobody asks for them, those of a
few neurons are made by passes through the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Network
from verifiable_relu.rounding import FEW, OWN, TINY, gamma, unit_roundoff
from verifiable_relu.search.bab.elimination import Elimination
from verifiable_relu.search.bab.forms import AffineForms, Block, Lines

_WHOLE = 3 << 23
"""The most coefficients of a system that is held as a whole, which takes a few copies of them."""


def is_whole(inputs: int, neurons: int) -> bool:
    """Return True if a system with these numbers of varying inputs and unstable neurons may be held as a whole."""
    return neurons * (inputs + neurons) <= _WHOLE


def eliminate_stable_neurons(
    network: Network,
    box: Interval,
    intervals: Mapping[int, Interval],
    stop: Callable[[], bool] | None = None,
    until: int | None = None,
) -> ReducedSystem:
    """Return the reduced system of one box; the arguments are those of ``Elimination``."""
    found = Elimination(network, box, intervals, stop, until)
    return ReducedSystem(
        found.center, found.radius, found.free, found.lower, found.upper, found.places, found.blocks, found
    )


@dataclass(frozen=True, eq=False)
class ReducedSystem:
    """The unstable neurons of one box, and their pre-activations as affine forms.

    Attributes:
        center, radius: of the box, (inputs of the network,).
        free: (n,) the inputs that e scales.
        lower, upper: (m,) of the pre-activations.
        places: (m, 2) the elementwise op of each, and its number there.
        blocks: the neurons of each op, in the order of evaluation: a neuron depends on those of earlier blocks alone.
        given: the pre-activations, m rows, or what makes them.
    """

    center: Tensor
    radius: Tensor
    free: Tensor
    lower: Tensor
    upper: Tensor
    places: Tensor
    blocks: tuple[Block, ...]
    given: AffineForms | Elimination

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

    @property
    def piecewise_linear(self) -> bool:
        return all(block.function.piecewise_linear for block in self.blocks)

    @cached_property
    def neurons(self) -> AffineForms:
        """All pre-activations, m rows."""
        if isinstance(self.given, AffineForms):
            return self.given
        return self.given.of_neurons(torch.arange(self.size, device=self.lower.device))

    @property
    def _is_held(self) -> bool:
        return isinstance(self.given, AffineForms) or "neurons" in vars(self)

    def outputs(self, matrix: Tensor, op: int | None = None) -> AffineForms:
        """As ``Elimination.outputs``, of a system that was made from a network."""
        assert isinstance(self.given, Elimination)
        return self.given.outputs(matrix, op)

    def of_neurons(self, chosen: Tensor, lines: Lines | None = None) -> AffineForms:
        """Return the pre-activations of some neurons; with ``lines``, ``substituted``."""
        if not self._is_held:
            assert isinstance(self.given, Elimination)
            return self.given.of_neurons(chosen, lines)
        rows = self.neurons[chosen]
        return rows if lines is None else self.substituted(rows, lines)

    def substituted(self, rows: AffineForms, lines: Lines, rounded: bool = True) -> AffineForms:
        """Return forms of e and of remainders: linear bounds take the place of all values r, of the last block first.

        Args:
            rows: the forms of e and r.
            lines: the bounds.
            rounded: whether to account for rounding. Without, all is in float32, for searches.

        Returns:
            Forms of e and of what the bounds leave of each r, with the coefficient that r had.
        """
        if not self._is_held:
            assert isinstance(self.given, Elimination)
            return self.given.substituted(rows, lines, rounded)
        n, kept, constant, error = self.inputs, [rows.neurons[:, :0]], rows.constant, rows.error
        a = torch.cat([rows.inputs, rows.neurons], 1)
        matrix, constants = self._double if rounded else self._single
        for block in reversed(self.blocks):
            mine, a = a[:, n + block.start : n + block.end], a[:, : n + block.start]
            kept.insert(1, mine)
            by = lines(block, mine)
            if rounded:
                assert by.error is not None
                error = error + by.error + self._lost(a, constant, by.weight, by.constant, block)
            a = torch.addmm(a, by.weight, matrix[block.part, : n + block.start])
            constant = constant + by.weight @ constants[block.part] + by.constant
            if by.before is not None:
                a = a + by.before
                if rounded:
                    size = a[:, :n].abs().sum(1) + a[:, n:].abs() @ self.reach[: block.start]
                    error = error + unit_roundoff(torch.float64) * size
        return AffineForms(a[:, :n], torch.cat(kept, 1), constant, OWN * error)

    def _lost(self, a: Tensor, constant: Tensor, weight: Tensor, more: Tensor, block: Block) -> Tensor:
        """Return what forms lose where pre-activations take the place of a block's values, (rows,).

        Every coefficient becomes a sum of as many products as the block has neurons, and one more number.
        """
        count, size, n = block.end - block.start, weight.abs(), self.inputs
        terms = a[:, :n].abs().sum(1) + a[:, n:].abs() @ self.reach[: block.start] + constant.abs() + more.abs()
        lost = size @ self.neurons.error[block.part]
        lost = lost + gamma(count + 8, torch.float64) * (terms + size @ self._sizes[block.part])
        return lost + 8 * TINY * (count + 1) * (1 + n + self.size) * (1 + self.reach.sum())

    @cached_property
    def _double(self) -> tuple[Tensor, Tensor]:
        """Coefficients and constants of all pre-activations."""
        return torch.cat([self.neurons.inputs, self.neurons.neurons], 1), self.neurons.constant

    @cached_property
    def _single(self) -> tuple[Tensor, Tensor]:
        return self._double[0].float(), self._double[1].float()

    @cached_property
    def _sizes(self) -> Tensor:
        """(m,) ≥ the sum of the magnitudes of each pre-activation's terms over the box."""
        return self.neurons.size(self.reach)

    @cached_property
    def values_range(self) -> Interval:
        """Intervals of the values r, (1, m)."""
        images = [block.function.image(self.interval(block)) for block in self.blocks]
        none = self.lower[None, :0]
        ends = zip((none, none), *((image.lower, image.upper) for image in images), strict=True)
        return Interval(*(torch.cat(end, 1) for end in ends))

    @cached_property
    def reach(self) -> Tensor:
        """(m,) ≥ |value| of each neuron over the box."""
        found = self.values_range
        return torch.maximum(found.lower.abs(), found.upper.abs())[0] * FEW + TINY

    def interval(self, block: Block) -> Interval:
        """Return the intervals of a block's pre-activations, (1, count)."""
        return Interval(self.lower[None, block.part], self.upper[None, block.part])

    def point(self, e: Tensor) -> Tensor:
        """Return the inputs, (points, inputs of the network), at scaled inputs (points, n)."""
        x = self.center.repeat(len(e), 1)
        x[:, self.free] += self.radius[self.free] * e.double()
        return x

    def values(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """Return pre-activations and values of the neurons, (points, m) each, at scaled inputs; not proven."""
        z = torch.addmm(self.neurons.constant, e.double(), self.neurons.inputs.T)
        r = torch.zeros_like(z)
        for block in self.blocks:
            z[:, block.part] += r[:, : block.start] @ self.neurons.neurons[block.part, : block.start].T
            r[:, block.part] = block.function.value(z[:, block.part])
        return z, r

    def support(self, rows: AffineForms) -> Tensor:
        """Return the neurons that each row depends on, through other neurons included, (rows, m) bool."""
        mine = (rows.neurons != 0).float()
        return (mine + mine @ self._feeding) > 0

    @cached_property
    def _feeding(self) -> Tensor:
        """(m, m) 1 where a neuron depends on another one, through others included."""
        direct = (self.neurons.neurons != 0).float()
        every = torch.zeros_like(direct)
        for block in self.blocks:
            mine = direct[block.part]
            every[block.part] = ((mine + mine @ every) > 0).float()
        return every

    def restricted(self, rows: AffineForms) -> tuple[ReducedSystem, AffineForms]:
        """Return the system of the inputs and neurons that some rows depend on, and these rows there.

        What is left out has the coefficient zero in every form.
        """
        kept = self.support(rows).any(0).nonzero().squeeze(1)
        mine = self.neurons[kept]
        read = ((rows.inputs != 0).any(0) | (mine.inputs != 0).any(0)).nonzero().squeeze(1)
        blocks, start = [], 0
        for block in self.blocks:
            chosen = kept[(kept >= block.start) & (kept < block.end)]
            if len(chosen):
                blocks.append(Block(block.op, start, start + len(chosen), block.select(chosen)))
                start += len(chosen)
        parts = (self.free[read], self.lower[kept], self.upper[kept], self.places[kept], tuple(blocks))
        system = ReducedSystem(self.center, self.radius, *parts, mine.columns(read, kept))
        return system, rows.columns(read, kept)
