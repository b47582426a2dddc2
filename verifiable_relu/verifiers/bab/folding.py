"""One query as a small dense system: the inputs that vary and the unstable neurons, everything else folded away.

Over the box most neurons of a ReLU network are stable, and the network is affine in what is left: the inputs, scaled
to e ∈ [−1, 1]ⁿ, and the values r of the m unstable neurons. Rows of coefficients are pulled back from a node towards
the input, through affine maps and stable neurons, and end at unstable ones. The pull-back is done in float64, and
every row comes with a bound of what rounding has changed in its value, for any point of the box.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds import Relaxation
from verifiable_relu.bounds.rounding import gamma, unit_roundoff
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.nodes import Activation, Add, Affine, Input, Permute, Reshape
from verifiable_relu.network.piecewise import SLOPES
from verifiable_relu.spec.property import Box

_WORKING = 1 << 27
"""Bytes of coefficients that are pulled back at once."""

_UNIT = unit_roundoff(torch.float64)
_TINY = torch.finfo(torch.float64).tiny

OWN = 1.01
"""What an error bound is multiplied with to cover the rounding of its own computation, which is relative and small."""


@dataclass(frozen=True, eq=False)
class Rows:
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

    def __getitem__(self, chosen: Tensor | slice) -> Rows:
        return Rows(self.inputs[chosen], self.neurons[chosen], self.constant[chosen], self.error[chosen])

    @staticmethod
    def cat(parts: list[Rows]) -> Rows:
        """All rows of several."""
        return Rows(
            torch.cat([p.inputs for p in parts]),
            torch.cat([p.neurons for p in parts]),
            torch.cat([p.constant for p in parts]),
            torch.cat([p.error for p in parts]),
        )


class Folded:
    """The unstable neurons of one box, and rows of coefficients pulled back to them.

    Args:
        relaxation: bounds of every node in float64, rounding accounted for.
        sample: which box of the relaxation's batch.
        box: that box.

    Attributes:
        lower: (m,) of the pre-activations, negative.
        upper: (m,) likewise, positive.
        slope: (m,) of the activation below zero.
        places: (m, 2) the activation node of each, and its number there.
        curvature: (m,) 1 where the activation is convex, −1 where it is concave, its slope being above 1.
        blocks: for each activation with unstable neurons its first one and the end, in the order of evaluation: a
            neuron depends on neurons of earlier blocks alone.

    Raises:
        UnsupportedError: if an activation is not piecewise linear, or a bound is not finite.
    """

    def __init__(self, relaxation: Relaxation, sample: int, box: Box) -> None:
        self.network = relaxation.network
        self._relaxation = relaxation
        self._sample = sample
        self._magnitudes: dict[int, Tensor] = {}
        self._units: dict[int, tuple[Tensor, float]] = {}
        low, high = torch.from_numpy(box.lower), torch.from_numpy(box.upper)
        self.center = torch.lerp(low, high, 0.5)
        reach = torch.maximum(high - self.center, self.center - low)
        # A difference is rounded, but zero only if it is.
        self.radius = torch.where(reach > 0, torch.nextafter(reach, torch.tensor(torch.inf).double()), reach)
        self.free = (self.radius > 0).nonzero().squeeze(1)
        self._unstable: dict[int, Tensor] = {}
        self._start: dict[int, int] = {}
        self._passing: dict[int, Tensor] = {}
        self.blocks: list[tuple[int, int]] = []
        lower, upper, slope, places, at = [], [], [], [torch.zeros(0, 2, dtype=torch.long)], 0
        for index in sorted(relaxation.pre):
            node = self.network.nodes[index]
            below = SLOPES[node](node).detach().double().expand(node.shape).flatten()
            bounds = relaxation.pre[index]
            low, high = bounds.lower[sample].flatten(), bounds.upper[sample].flatten()
            active = low >= 0
            inactive = (high <= 0) & ~active
            chosen = (~(active | inactive)).nonzero().squeeze(1)
            self._passing[index] = torch.where(active, torch.ones_like(low), torch.where(inactive, below, 0.0))
            self._unstable[index], self._start[index] = chosen, at
            if len(chosen):
                self.blocks.append((at, at + len(chosen)))
                at += len(chosen)
            lower.append(low[chosen])
            upper.append(high[chosen])
            slope.append(below[chosen])
            places.append(torch.stack([torch.full_like(chosen, index), chosen], 1))
        none = torch.zeros(0, dtype=torch.float64)
        self.lower, self.upper, self.slope = (torch.cat([none, *parts]) for parts in (lower, upper, slope))
        self.places = torch.cat(places)
        self.curvature = torch.where(self.slope > 1, -1.0, torch.ones_like(self.slope))
        if not bool((self.lower.isfinite() & self.upper.isfinite()).all()):
            raise UnsupportedError("the bounds of a pre-activation are not finite")

    @property
    def inputs(self) -> int:
        """n, the number of inputs that vary."""
        return len(self.free)

    @property
    def size(self) -> int:
        """m, the number of unstable neurons."""
        return len(self.lower)

    def point(self, e: Tensor) -> Tensor:
        """The input, (points, inputs of the network), at scaled inputs (points, n)."""
        x = self.center.repeat(len(e), 1)
        x[:, self.free] += self.radius[self.free] * e.double()
        return x

    def neurons(self, stop: Callable[[], bool]) -> Rows:
        """The pre-activations of the unstable neurons, m rows; ends early, with fewer rows, once ``stop`` says so."""
        parts = [self._empty()]
        for index, chosen in self._unstable.items():
            node = self.network.nodes[index]
            for part in chosen.split(self._chunk()):
                if stop():
                    return Rows.cat(parts)
                unit = torch.zeros(len(part), node.size, dtype=torch.float64)
                unit[torch.arange(len(part)), part] = 1
                parts.append(self._pull_back(node.inputs[0], unit))
        return Rows.cat(parts)

    def outputs(self, matrix: Tensor) -> Rows:
        """The forms of matrix·y, for rows (rows, outputs) on the network's output y."""
        parts = [self._pull_back(len(self.network.nodes) - 1, part) for part in matrix.double().split(self._chunk())]
        return Rows.cat([self._empty(), *parts])

    def _empty(self) -> Rows:
        def none(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64)

        return Rows(none(0, self.inputs), none(0, self.size), none(0), none(0))

    def _chunk(self) -> int:
        return max(1, _WORKING // (8 * 6 * max(node.size for node in self.network.nodes)))

    def phases(self, index: int) -> tuple[Tensor, int, Tensor]:
        """Of an activation: its unstable neurons, the number of the first among all, and the others' slopes (size,)."""
        return self._unstable[index], self._start[index], self._passing[index]

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
            unit = (relative * reach).expand(1, *node.shape).flatten()
            self._units[index] = unit, 8 * _TINY * node.size * (1 + float(most.sum()))
        return self._units[index]

    def _pull_back(self, target: int, rows: Tensor) -> Rows:
        """The forms of rows·(value of node ``target``), for rows (rows, size of the node)."""
        nodes = self.network.nodes
        walk = _Walk(self, rows)
        walk.give(target, rows)
        while walk.pending:
            # What is given on the way goes to earlier nodes.
            index = max(walk.pending)
            STEPS[nodes[index]](walk, index, nodes[index], walk.pending.pop(index))
        # x = center + radius·e.
        magnitude = gamma(nodes[0].size + len(nodes) + 8, torch.float64) * (self.center.abs() + self.radius)
        error = walk.error + walk.entry.abs() @ magnitude + 4 * nodes[0].size * _TINY
        scaled = (walk.entry * self.radius)[:, self.free]
        return Rows(scaled, walk.neurons, walk.constant + walk.entry @ self.center, OWN * error)


class _Walk:
    """Rows on their way back to the input, and what has been collected of them.

    Attributes:
        pending: by node, the rows (rows, size) that multiply its value and are still to be pulled back.
        entry: (rows, inputs of the network) the coefficients of the input.
        neurons, constant, error: of the forms (``Rows``), as far as they are known.
    """

    def __init__(self, folded: Folded, rows: Tensor) -> None:
        self.folded = folded
        self.pending: dict[int, Tensor] = {}
        self.entry = rows.new_zeros(len(rows), folded.network.input_size)
        self.neurons = rows.new_zeros(len(rows), folded.size)
        self.constant = rows.new_zeros(len(rows))
        self.error = rows.new_full((len(rows),), _TINY)

    def give(self, index: int, a: Tensor) -> None:
        """Add rows (rows, …) that multiply the value of a node."""
        a = a.reshape(len(a), self.folded.network.nodes[index].size)
        if index in self.pending:
            a = self.pending[index] + a
            self.error = self.error + a.abs() @ (_UNIT * self.folded.magnitude(index))
        self.pending[index] = a


def _input(walk: _Walk, index: int, node: Input, a: Tensor) -> None:
    walk.entry = a


def _activation(walk: _Walk, index: int, node: Activation, a: Tensor) -> None:
    chosen, start, passing = walk.folded.phases(index)
    walk.neurons[:, start : start + len(chosen)] = a[:, chosen]
    before = walk.folded.magnitude(node.inputs[0])
    walk.error = walk.error + a.abs() @ (_UNIT * passing.abs() * before) + _TINY * before.sum()
    walk.give(node.inputs[0], a * passing)


def _unchanged(walk: _Walk, index: int, node: Add | Reshape, a: Tensor) -> None:
    for source in node.inputs:
        walk.give(source, a)


def _permute(walk: _Walk, index: int, node: Permute, a: Tensor) -> None:
    walk.give(node.inputs[0], node.adjoint(a.reshape(-1, *node.shape)))


def _affine(walk: _Walk, index: int, node: Affine, a: Tensor) -> None:
    walk.constant = walk.constant + a @ node.offset().expand(node.shape).flatten()
    unit, lost = walk.folded.unit(index, node)
    walk.error = walk.error + a.abs() @ unit + lost
    before = walk.folded.network.nodes[node.inputs[0]].shape
    walk.give(node.inputs[0], node.adjoint(a.reshape(-1, *node.shape), before))


STEPS: Table[Callable[[_Walk, int, Any, Tensor], None]] = Table(
    "branch and bound",
    {
        Input: _input,
        Activation: _activation,
        Add: _unchanged,
        Reshape: _unchanged,
        Permute: _permute,
        Affine: _affine,
    },
)
"""How rows (rows, size) that multiply the value of a node, given by its index too, go on to the node's inputs."""
