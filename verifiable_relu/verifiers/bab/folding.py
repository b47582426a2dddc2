"""One query as a small dense system: the inputs that vary and the unstable neurons, everything else folded away.

Over the box most neurons of a ReLU network are stable, and so are smooth neurons that are lines but for a small error.
The network is affine in what is left: the inputs, scaled to e ∈ [−1, 1]ⁿ, and the values r of the m unstable neurons.
Rows of coefficients are pulled back from a node towards the input, through affine maps and stable neurons, and end at
unstable ones. The pull-back is done in float64, and every row comes with a bound of what rounding has changed in its
value, for any point of the box. The rows of unstable neurons are made when they are asked for (``folded``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds import Bounds, Relaxation
from verifiable_relu.bounds.forward import rough
from verifiable_relu.errors import OutOfTime, UnsupportedError
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Add, Affine, Bilinear, Input, Kinked, Permute, Reshape, Seen
from verifiable_relu.rounding import LEAST, OWN, TINY, above, gamma, unit_roundoff
from verifiable_relu.spec.property import Box
from verifiable_relu.verifiers.bab.curves import Straight, is_smooth
from verifiable_relu.verifiers.bab.folded import AffineForms, Folded, Lines, slopes_of

_WORKING = 1 << 27
"""Bytes of coefficients that are pulled back at once."""

_UNIT = unit_roundoff(torch.float64)

_LEAST = 4 * LEAST
"""What the few products that make a bound of an error may lose to underflow."""


def fold(
    relaxation: Relaxation, sample: int, box: Box, matrix: Tensor, stop: Callable[[], bool] = lambda: False
) -> tuple[Folded, AffineForms]:
    """The dense system of one box, and rows on the network's output as forms of it.

    Args:
        relaxation: bounds of every node in float64, rounding accounted for.
        sample: which box of the relaxation's batch.
        box: that box.
        matrix: (rows, outputs) coefficients of the network's flattened output.
        stop: asked between chunks of rows.

    Raises:
        UnsupportedError: if an activation is of a kind that is not split, or a bound is not finite.
        OutOfTime: once ``stop`` says so.
    """
    return _Folding(relaxation, sample, box, stop).folded(matrix)


class _Folding:
    """Rows of coefficients of one box, pulled back to its inputs and unstable neurons.

    Attributes:
        network, center, radius, free, blocks: as ``Folded`` has them.
        unstable: how many neurons are unstable.
        stop: asked now and then.
    """

    def __init__(self, relaxation: Relaxation, sample: int, box: Box, stop: Callable[[], bool]) -> None:
        self.network = relaxation.network
        self._relaxation, self._sample, self.stop = relaxation, sample, stop
        self._magnitudes: dict[int, Tensor] = {}
        self._units: dict[int, tuple[Tensor, float]] = {}
        low, high = torch.from_numpy(box.lower), torch.from_numpy(box.upper)
        self.center = torch.lerp(low, high, 0.5)
        reach = torch.maximum(high - self.center, self.center - low)
        # A difference is rounded, but zero only if it is.
        self.radius = torch.where(reach > 0, above(reach), reach)
        self.free = (self.radius > 0).nonzero().squeeze(1)
        self._unstable: dict[int, Tensor] = {}
        self._start: dict[int, int] = {}
        self._passing: dict[int, Tensor] = {}
        self._straight: dict[int, Straight] = {}
        self._functions: dict[int, Activation] = {}
        blocks: list[tuple[int, int]] = []
        none = torch.zeros(0, dtype=torch.float64)
        lower, upper, slope, places = [none], [none], [none], [torch.zeros(0, 2, dtype=torch.long)]
        self.unstable = 0
        for index in sorted(set(relaxation.pre).intersection(self.network.activations)):
            node = self.network.nodes[index]
            bounds = relaxation.pre[index]
            low, high = bounds.lower[sample].flatten(), bounds.upper[sample].flatten()
            assert isinstance(node, Activation)
            if is_smooth(node):
                self._functions[index] = node
                straight = self._straight[index] = Straight.of(node, Bounds(low, high))
                stable, passing, below = straight.chosen, straight.slope, torch.zeros_like(low)
            else:
                assert isinstance(node, Kinked)
                below = node.below.detach().double().expand(node.shape).flatten()
                active = low >= 0
                stable, passing = active | (high <= 0), slopes_of(active, below)
            chosen = (~stable).nonzero().squeeze(1)
            self._passing[index] = torch.where(stable, passing, 0.0)
            self._unstable[index], self._start[index] = chosen, self.unstable
            if len(chosen):
                blocks.append((self.unstable, self.unstable + len(chosen)))
                self.unstable += len(chosen)
            lower.append(low[chosen])
            upper.append(high[chosen])
            slope.append(below[chosen])
            places.append(torch.stack([torch.full_like(chosen, index), chosen], 1))
        self._lower, self._upper, self._slope = (torch.cat(parts) for parts in (lower, upper, slope))
        self._places, self.blocks = torch.cat(places), tuple(blocks)
        if not bool((self._lower.isfinite() & self._upper.isfinite()).all()):
            raise UnsupportedError("the bounds of a pre-activation are not finite")

    def folded(self, matrix: Tensor) -> tuple[Folded, AffineForms]:
        """Return the system, and the forms of matrix·y, for rows (rows, outputs) on the network's output y."""
        last, every = len(self.network.nodes) - 1, torch.arange(len(matrix))
        rows = self._parts(every, lambda part: self._walked({last: matrix[part].double()}))
        self.stop = lambda: False
        box, bounds = (self.center, self.radius, self.free), (self._lower, self._upper, self._slope)
        straight = {index: line.slope for index, line in self._straight.items()}
        return Folded(*box, *bounds, self._places, self.blocks, self, self._functions, straight), rows

    def of_neurons(self, chosen: Tensor, lines: Lines | None = None) -> AffineForms:
        """As ``Folded.of_neurons``."""

        def made(part: Tensor) -> AffineForms:
            given = {}
            for index in self._places[part, 0].unique().tolist():
                mine, node = (self._places[part, 0] == index).nonzero().squeeze(1), self.network.nodes[index]
                given[node.inputs[0]] = torch.zeros(len(part), node.size, dtype=torch.float64)
                given[node.inputs[0]][mine, self._places[part[mine], 1]] = 1
            return self._walked(given, lines)

        return self._parts(chosen, made)

    def substituted(self, rows: AffineForms, lines: Lines, rounded: bool = True) -> AffineForms:
        """As ``Folded.substituted``."""

        def made(part: Tensor | slice) -> AffineForms:
            mine = rows[part]
            given = {
                index: mine.inputs.new_zeros(len(mine), self.network.nodes[index].size)
                for index, chosen in self._unstable.items()
                if len(chosen)
            }
            return self._walked(given, lines, mine, rounded)

        # The lines of a search may be those of its rows.
        return self._parts(torch.arange(len(rows)), made) if rounded else made(slice(None))

    def _parts(self, every: Tensor, made: Callable[[Tensor], AffineForms]) -> AffineForms:
        chunk = max(1, _WORKING // (8 * 6 * max(node.size for node in self.network.nodes)))
        return AffineForms.cat([AffineForms.zeros(0, len(self.free), self.unstable), *map(made, every.split(chunk))])

    def _walked(
        self, given: Mapping[int, Tensor], lines: Lines | None = None, rows: AffineForms | None = None, *rounded: bool
    ) -> AffineForms:
        """Return the forms of rows (rows, size) of some nodes' values, by node, and of further rows of e and r."""
        count = len(next(iter(given.values()))) if given else 0
        rows = AffineForms.zeros(count, len(self.free), self.unstable) if rows is None else rows
        walk = _PullBack(self, rows, lines, *rounded)
        for index, a in given.items():
            walk.give(index, a.to(walk.dtype))
        return walk.end()

    @cached_property
    def rough(self) -> tuple[Network, torch.dtype]:
        """The network for searches that prove nothing, and its dtype."""
        return rough(self.network)

    @cached_property
    def reach(self) -> Tensor:
        """(m,) ≥ |value| of each unstable neuron over the box."""
        none = torch.zeros(0, dtype=torch.float64)
        return torch.cat([none, *(self.magnitude(index)[chosen] for index, chosen in self._unstable.items())])

    def phases(self, index: int) -> tuple[Tensor, int, Tensor]:
        """Return an activation's unstable neurons, the number of the first among all, and others' slopes (size,)."""
        return self._unstable[index], self._start[index], self._passing[index]

    def straight(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Return offset and error of the lines of a smooth activation's stable neurons, (size,); zero elsewhere."""
        found = self._straight.get(index)
        if found is None:
            return None
        return torch.where(found.chosen, found.offset, 0.0), torch.where(found.chosen, found.error, 0.0)

    def magnitude(self, index: int) -> Tensor:
        """(size,) ≥ |value of node ``index``| over the box."""
        if index not in self._magnitudes:
            bounds = self._relaxation.bounds(index)
            low, high = bounds.lower[self._sample].flatten(), bounds.upper[self._sample].flatten()
            self._magnitudes[index] = torch.maximum(low.abs(), high.abs())
        return self._magnitudes[index]

    def unit(self, index: int, node: Affine) -> tuple[Tensor, float]:
        """Return how much pulling one unit of a coefficient back through an affine node changes a form's value.

        For a row a of y = W·x + b, the new row is fl(a·W), off by γ·|a|·|W| for as many terms as the node has neurons,
        and the constant grows by fl(a·b). With |x| at most M, a·y changes by at most γ·|a|·(|W|·M + |b|). Additions
        of the constants, at most two for each node, and what W and b themselves are off by, are covered as well.

        Returns:
            For each neuron of the node, (size,), and what products too small for a float64 number amount to.
        """
        if index not in self._units:
            source = self.network.nodes[node.inputs[0]]
            most = self.magnitude(node.inputs[0])
            reach = node.absolute(most.reshape(1, *source.shape)) + node.offset_magnitude()
            relative = gamma(node.size + 2 * len(self.network.nodes) + 8, torch.float64) + 2 * node.weight_error
            # However large a coefficient is, what underflows here is not lost.
            unit = (relative * reach + _LEAST).expand(1, *node.shape).flatten()
            self._units[index] = unit, 8 * TINY * node.size * (1 + float(most.sum()))
        return self._units[index]


class _PullBack:
    """Rows on their way back to the input, and what has been collected of them.

    Args:
        folding: the box.
        rows: of e and r, which are taken along.
        lines: what takes the place of unstable neurons' values (``Folded.substituted``); None where rows end there.
        rounded: whether there is an account of rounding; without, coefficients are those of a search.

    Attributes:
        network: that of the folding, or one for searches.
        pending: by node, the rows (rows, size) that multiply its value and are still to be pulled back.
        inputs, neurons, constant, error: of the forms (``AffineForms``), so far as they are known.
    """

    def __init__(self, folding: _Folding, rows: AffineForms, lines: Lines | None, rounded: bool = True) -> None:
        self.folding, self.rounded, self._lines = folding, rounded, lines
        self.network, self.dtype = (folding.network, torch.float64) if rounded else folding.rough
        self.pending: dict[int, Tensor] = {}
        self.inputs, self.neurons, self.constant, self.error = rows.inputs, rows.neurons, rows.constant, rows.error
        if rounded:
            # Every sum of constants, at most two for each node, may change it.
            self.error = rows.error + gamma(2 * len(self.network.nodes) + 8, torch.float64) * rows.constant.abs() + TINY
        self._passed: dict[int, Tensor] = {}

    def end(self) -> AffineForms:
        """Return the forms, once nothing is pending."""
        while self.pending:
            if self.folding.stop():
                raise OutOfTime
            # What is given on the way goes to earlier nodes.
            index = max(self.pending)
            node = self.network.nodes[index]
            STEPS[node](self, index, node, self.pending.pop(index))
        parts = [self._passed.get(start, self.neurons[:, start:end]) for start, end in self.folding.blocks]
        neurons = torch.cat([self.neurons[:, :0], *parts], 1)
        return AffineForms(self.inputs, neurons, self.constant, OWN * self.error)

    def enter(self, a: Tensor) -> None:
        """Take rows (rows, inputs of the network) that have reached the input: x = center + radius·e."""
        folding, nodes = self.folding, self.network.nodes
        center, radius = folding.center.to(a), folding.radius.to(a)
        self.inputs = self.inputs + (a * radius)[:, folding.free].to(self.inputs)
        self.constant = self.constant + (a @ center).to(self.constant)
        if self.rounded:
            magnitude = gamma(nodes[0].size + 2 * len(nodes) + 8, torch.float64) * (center.abs() + radius)
            self.error = self.error + a.abs() @ (magnitude + _LEAST) + 4 * nodes[0].size * TINY
            self.error = self.error + _UNIT * self.inputs.abs().sum(1)

    def through(self, index: int, a: Tensor) -> Tensor:
        """Return what unstable neurons' pre-activations are multiplied by, given rows (rows, size) of an activation."""
        chosen, start, _ = self.folding.phases(index)
        end = start + len(chosen)
        mine = a[:, chosen].to(self.neurons) + self.neurons[:, start:end]
        if self.rounded:
            self.error = self.error + mine.abs() @ (_UNIT * self.folding.magnitude(index)[chosen])
        if len(chosen):
            self._passed[start] = mine
        if self._lines is None or not len(chosen):
            return torch.zeros_like(a[:, chosen])
        weight, more = self._lines(start, end, mine)
        self.inputs, self.constant = self.inputs + more.inputs, self.constant + more.constant
        self.neurons = torch.cat([self.neurons[:, :start] + more.neurons[:, :start], self.neurons[:, start:]], 1)
        if self.rounded:
            own = gamma(2 * len(self.network.nodes) + 8, torch.float64) * more.constant.abs()
            size = self.inputs.abs().sum(1) + self.neurons[:, :start].abs() @ self.folding.reach[:start]
            self.error = self.error + more.error + own + _UNIT * size
        return weight.to(a)

    def give(self, index: int, a: Tensor) -> None:
        """Add rows (rows, …) that multiply the value of a node."""
        a = a.reshape(len(a), self.folding.network.nodes[index].size)
        if index in self.pending:
            a = self.pending[index] + a
            if self.rounded:
                self.error = self.error + a.abs() @ (_UNIT * self.folding.magnitude(index) + _LEAST)
        self.pending[index] = a


def _input(walk: _PullBack, index: int, node: Input, a: Tensor) -> None:
    walk.enter(a)


def _activation(walk: _PullBack, index: int, node: Activation, a: Tensor) -> None:
    chosen, _, passing = walk.folding.phases(index)
    passed = (a * passing.to(a)).index_copy(1, chosen, walk.through(index, a))
    if walk.rounded:
        before = walk.folding.magnitude(node.inputs[0])
        walk.error = walk.error + a.abs() @ (_UNIT * passing.abs() * before + _LEAST) + TINY * before.sum()
    line = walk.folding.straight(index)
    if line is not None:
        offset, error = line
        walk.constant = walk.constant + (a @ offset.to(a)).to(walk.constant)
        if walk.rounded:
            rounding = gamma(node.size + 2 * len(walk.folding.network.nodes) + 8, torch.float64)
            walk.error = walk.error + a.abs() @ (error + rounding * offset.abs() + _LEAST) + 8 * TINY * node.size
    walk.give(node.inputs[0], passed)


def _unchanged(walk: _PullBack, index: int, node: Add | Reshape, a: Tensor) -> None:
    for source in node.inputs:
        walk.give(source, a)


def _seen(walk: _PullBack, index: int, node: Seen, a: Tensor) -> None:
    walk.give(node.inputs[-1], a)


def _permute(walk: _PullBack, index: int, node: Permute, a: Tensor) -> None:
    walk.give(node.inputs[0], node.adjoint(a.reshape(-1, *node.shape)))


def _affine(walk: _PullBack, index: int, node: Affine, a: Tensor) -> None:
    walk.constant = walk.constant + (a @ node.offset().expand(node.shape).flatten()).to(walk.constant)
    if walk.rounded:
        unit, lost = walk.folding.unit(index, node)
        walk.error = walk.error + a.abs() @ unit + lost
    before = walk.folding.network.nodes[node.inputs[0]].shape
    walk.give(node.inputs[0], node.adjoint(a.reshape(-1, *node.shape), before))


STEPS: Table[Callable[[_PullBack, int, Any, Tensor], None]] = Table(
    "branch and bound",
    {
        Input: _input,
        Activation: _activation,
        Add: _unchanged,
        Bilinear: Refusal("only piecewise-linear networks can be split into phases"),
        Seen: _seen,
        Reshape: _unchanged,
        Permute: _permute,
        Affine: _affine,
    },
)
"""How rows (rows, size) that multiply the value of a node, given by its index too, go on to the node's inputs."""
