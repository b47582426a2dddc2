"""One query as a small dense system: the inputs that vary and the unstable neurons, everything else folded away.

Over the box most neurons of a ReLU network are stable, and so are smooth neurons that are lines but for a small error.
The network is affine in what is left: the inputs, scaled
to e ∈ [−1, 1]ⁿ, and the values r of the m unstable neurons. Rows of coefficients are pulled back from a node towards
the input, through affine maps and stable neurons, and end at unstable ones. The pull-back is done in float64, and
every row comes with a bound of what rounding has changed in its value, for any point of the box. The rows of unstable
neurons are made when they are asked for (``folded``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds import Bounds, Relaxation
from verifiable_relu.bounds.forward import rough
from verifiable_relu.errors import OutOfTime, UnsupportedError
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.nodes import Activation, Add, Affine, Bilinear, Input, Kinked, Maximum, Permute, Reshape
from verifiable_relu.rounding import LEAST, OWN, TINY, above, gamma, unit_roundoff
from verifiable_relu.spec.property import Box
from verifiable_relu.verifiers.bab.curves import Straight, is_smooth
from verifiable_relu.verifiers.bab.folded import Folded, Rows, slopes_of

_WORKING = 1 << 27
"""Bytes of coefficients that are pulled back at once."""

_UNIT = unit_roundoff(torch.float64)

_LEAST = 4 * LEAST
"""What the few products that make a bound of an error may lose to underflow."""


def fold(
    relaxation: Relaxation, sample: int, box: Box, matrix: Tensor, stop: Callable[[], bool] = lambda: False
) -> tuple[Folded, Rows]:
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
        network: the network.
        center, radius: of the box, (inputs of the network,); the radius is rounded up.
        free: the inputs that vary.
        unstable: how many neurons are unstable.
    """

    def __init__(self, relaxation: Relaxation, sample: int, box: Box, stop: Callable[[], bool]) -> None:
        self.network = relaxation.network
        self._relaxation, self._sample, self._stop = relaxation, sample, stop
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
        self._blocks: list[tuple[int, int]] = []
        none = torch.zeros(0, dtype=torch.float64)
        lower, upper, slope, places = [none], [none], [none], [torch.zeros(0, 2, dtype=torch.long)]
        self.unstable = 0
        for index in sorted(relaxation.pre):
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
                self._blocks.append((self.unstable, self.unstable + len(chosen)))
                self.unstable += len(chosen)
            lower.append(low[chosen])
            upper.append(high[chosen])
            slope.append(below[chosen])
            places.append(torch.stack([torch.full_like(chosen, index), chosen], 1))
        self._lower, self._upper, self._slope = (torch.cat(parts) for parts in (lower, upper, slope))
        self._places = torch.cat(places)
        if not bool((self._lower.isfinite() & self._upper.isfinite()).all()):
            raise UnsupportedError("the bounds of a pre-activation are not finite")

    def folded(self, matrix: Tensor) -> tuple[Folded, Rows]:
        """The system, and the forms of matrix·y, for rows (rows, outputs) on the network's output y."""
        rows = self._pull_back(len(self.network.nodes) - 1, matrix.double())
        self._stop = lambda: False
        folded = Folded(
            self.center,
            self.radius,
            self.free,
            self._lower,
            self._upper,
            self._slope,
            self._places,
            tuple(self._blocks),
            self,
            self._functions,
            {index: line.slope for index, line in self._straight.items()},
        )
        return folded, rows

    def __call__(self, start: int, end: int, weight: Tensor) -> Rows:
        """As ``Pull``."""
        return self._pull_back(*self._given(start, end, weight))

    def loosely(self, start: int, end: int, weight: Tensor) -> tuple[Tensor, Tensor]:
        """As ``Pull``."""
        walk = self._walked(*self._given(start, end, weight), rounded=False)
        radius, center = self.radius.to(walk.entry), self.center.to(walk.entry)
        matrix = torch.cat([(walk.entry * radius)[:, self.free], walk.neurons], 1)
        return matrix.to(weight), (walk.constant + walk.entry @ center).to(weight)

    def _given(self, start: int, end: int, weight: Tensor) -> tuple[int, Tensor]:
        """Weights of a block's pre-activations, as rows of the node that these are of."""
        index, number = self._places[start:end].T
        node = self.network.nodes[int(index[0])]
        return node.inputs[0], weight.new_zeros(len(weight), node.size).index_add(1, number, weight)

    def phases(self, index: int) -> tuple[Tensor, int, Tensor]:
        """Of an activation: its unstable neurons, the number of the first among all, and the others' slopes (size,)."""
        return self._unstable[index], self._start[index], self._passing[index]

    def straight(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Of a smooth activation's stable neurons, the offset and the error of their lines, (size,); zero elsewhere."""
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
        """By how much pulling one unit of a coefficient back through the affine node ``index`` changes a form's value.

        For a row a of y = W·x + b, the new row is fl(a·W), off by γ·|a|·|W| for as many terms as the node has neurons,
        and the constant grows by fl(a·b). With |x| at most M, a·y changes by at most γ·|a|·(|W|·M + |b|). Additions
        of the constants, at most one for each node, and what W and b themselves are off by, are covered as well.

        Returns:
            For each neuron of the node, (size,), and what products too small for a float64 number amount to.
        """
        if index not in self._units:
            source = self.network.nodes[node.inputs[0]]
            most = self.magnitude(node.inputs[0])
            reach = node.absolute(most.reshape(1, *source.shape)) + node.offset_magnitude()
            relative = gamma(node.size + len(self.network.nodes) + 8, torch.float64) + 2 * node.weight_error
            # However large a coefficient is, what underflows here is not lost.
            unit = (relative * reach + _LEAST).expand(1, *node.shape).flatten()
            self._units[index] = unit, 8 * TINY * node.size * (1 + float(most.sum()))
        return self._units[index]

    def _pull_back(self, target: int, rows: Tensor) -> Rows:
        """The forms of rows·(value of node ``target``), for rows (rows, size of the node)."""
        chunk = max(1, _WORKING // (8 * 6 * max(node.size for node in self.network.nodes)))
        return Rows.cat([self._form(target, part) for part in rows.split(chunk)])

    @cached_property
    def _rough(self) -> tuple[Network, torch.dtype]:
        """The network for searches that prove nothing."""
        return rough(self.network)

    def _walked(self, target: int, rows: Tensor, rounded: bool = True) -> _Walk:
        if self._stop():
            raise OutOfTime
        network, dtype = (self.network, torch.float64) if rounded else self._rough
        walk = _Walk(self, rows.to(dtype), rounded)
        walk.give(target, rows.to(dtype))
        while walk.pending:
            # What is given on the way goes to earlier nodes.
            index = max(walk.pending)
            node = network.nodes[index]
            STEPS[node](walk, index, node, walk.pending.pop(index))
        return walk

    def _form(self, target: int, rows: Tensor) -> Rows:
        nodes, walk = self.network.nodes, self._walked(target, rows)
        # x = center + radius·e.
        magnitude = gamma(nodes[0].size + len(nodes) + 8, torch.float64) * (self.center.abs() + self.radius)
        error = walk.error + walk.entry.abs() @ (magnitude + _LEAST) + 4 * nodes[0].size * TINY
        scaled = (walk.entry * self.radius)[:, self.free]
        return Rows(scaled, walk.neurons, walk.constant + walk.entry @ self.center, OWN * error)


class _Walk:
    """Rows on their way back to the input, and what has been collected of them.

    Attributes:
        pending: by node, the rows (rows, size) that multiply its value and are still to be pulled back.
        entry: (rows, inputs of the network) the coefficients of the input.
        neurons, constant, error: of the forms (``Rows``), as far as they are known; no error of rows that are not
            ``rounded``.
    """

    def __init__(self, folding: _Folding, rows: Tensor, rounded: bool) -> None:
        self.folding, self.rounded = folding, rounded
        self.pending: dict[int, Tensor] = {}
        self.entry = rows.new_zeros(len(rows), folding.network.input_size)
        self.neurons = rows.new_zeros(len(rows), folding.unstable)
        self.constant = rows.new_zeros(len(rows))
        self.error = rows.new_full((len(rows),), TINY)

    def give(self, index: int, a: Tensor) -> None:
        """Add rows (rows, …) that multiply the value of a node."""
        a = a.reshape(len(a), self.folding.network.nodes[index].size)
        if index in self.pending:
            a = self.pending[index] + a
            if self.rounded:
                self.error = self.error + a.abs() @ (_UNIT * self.folding.magnitude(index) + _LEAST)
        self.pending[index] = a


def _input(walk: _Walk, index: int, node: Input, a: Tensor) -> None:
    walk.entry = a


def _activation(walk: _Walk, index: int, node: Activation, a: Tensor) -> None:
    chosen, start, passing = walk.folding.phases(index)
    walk.neurons[:, start : start + len(chosen)] = a[:, chosen]
    if walk.rounded:
        before = walk.folding.magnitude(node.inputs[0])
        walk.error = walk.error + a.abs() @ (_UNIT * passing.abs() * before + _LEAST) + TINY * before.sum()
    line = walk.folding.straight(index)
    if line is not None:
        offset, error = line
        walk.constant = walk.constant + a @ offset.to(a)
        if walk.rounded:
            rounding = gamma(node.size + len(walk.folding.network.nodes) + 8, torch.float64)
            walk.error = walk.error + a.abs() @ (error + rounding * offset.abs() + _LEAST) + 8 * TINY * node.size
    walk.give(node.inputs[0], a * passing.to(a))


def _unchanged(walk: _Walk, index: int, node: Add | Reshape, a: Tensor) -> None:
    for source in node.inputs:
        walk.give(source, a)


def _maximum(walk: _Walk, index: int, node: Maximum, a: Tensor) -> None:
    walk.give(node.inputs[1], a)


def _permute(walk: _Walk, index: int, node: Permute, a: Tensor) -> None:
    walk.give(node.inputs[0], node.adjoint(a.reshape(-1, *node.shape)))


def _affine(walk: _Walk, index: int, node: Affine, a: Tensor) -> None:
    walk.constant = walk.constant + a @ node.offset().expand(node.shape).flatten()
    if walk.rounded:
        unit, lost = walk.folding.unit(index, node)
        walk.error = walk.error + a.abs() @ unit + lost
    before = walk.folding.network.nodes[node.inputs[0]].shape
    walk.give(node.inputs[0], node.adjoint(a.reshape(-1, *node.shape), before))


STEPS: Table[Callable[[_Walk, int, Any, Tensor], None]] = Table(
    "branch and bound",
    {
        Input: _input,
        Activation: _activation,
        Add: _unchanged,
        Bilinear: Refusal("only piecewise-linear networks can be split into phases"),
        Maximum: _maximum,
        Reshape: _unchanged,
        Permute: _permute,
        Affine: _affine,
    },
)
"""How rows (rows, size) that multiply the value of a node, given by its index too, go on to the node's inputs."""
