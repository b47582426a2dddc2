"""Piecewise-linear networks for solvers: what is stable is folded away, what is left is a system of affine forms.

Under bounds of the pre-activations most neurons are affine on the whole box. Rows are pulled back from a node to the
input, through affine nodes and stable neurons alike, and end at unstable neurons, each of which is two variables

    pre-activation = positive − negative,   value = positive − slope·negative,   positive, negative ≥ 0,

one of which is zero. A solver's problem then has one row per unstable neuron and one per output constraint, whatever
the size of the network. The arithmetic is float64, or exact: weights are dyadic rationals, so integers suffice.

Where float64 rounds, and where stored weights are not the operator's own (``Affine.weight_error``), a form is not what
it stands for. Pulling rows A back through y = W·x + b with relative errors of at most ε changes A·y by at most
ε·|A|·(|W|·|x| + |b|); every form carries the sum of these, over bounds of all values, and a problem whose rows are
loosened by it has every solution that the network has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds import Bounds
from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Affine,
    Bilinear,
    Conv2d,
    Input,
    Linear,
    Node,
    Permute,
    Reshape,
    Scale,
    Shape,
    Sparse,
)
from verifiable_relu.network.piecewise import SLOPES

_COEFFICIENTS = 1 << 22
"""Most float coefficients of one node pulled back at once."""

_PRODUCTS = 1 << 21
"""Most multiplications of integers in a row, so that the clock is looked at several times a second."""

_UNIT = 2.0**-53
"""The unit roundoff of float64."""

_LEAST = 2.0**-1074
"""The smallest float64 number."""

_GENEROUS = 1.01
"""By this factor sums of errors and sizes are larger than computed, for the rounding of their own."""


@dataclass(frozen=True, eq=False)
class Forms:
    """Affine forms Σ terms[node]·(variables of that node) + constant, one a row.

    Attributes:
        terms: by variable node (0: the input, otherwise an activation), (rows, node size), zero where the node's
            neuron is no variable. For an activation they multiply the neuron's *value*.
        constant: (rows,).
        error: (rows,) by how much a form may differ from what it stands for, at the network's own values.
    """

    terms: dict[int, Dyadic]
    constant: Dyadic
    error: Dyadic


@dataclass(frozen=True, eq=False)
class Sizes:
    """Upper bounds of what errors in pulling rows back are relative to, by node; arrays are (node size,).

    Attributes:
        value: ≥ |v|.
        summed: of an affine node y = W·x + b, ≥ |W|·|x| + |b|.
    """

    value: Mapping[int, np.ndarray] = field(default_factory=dict)
    summed: Mapping[int, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def of(network: Network, bounds: Sequence[Bounds], sample: int) -> Sizes:
        """From bounds of every node, in node order, of one sample of their batch."""
        value: dict[int, Tensor] = {}
        summed: dict[int, np.ndarray] = {}
        for index, (node, box) in enumerate(zip(network.nodes, bounds, strict=True)):
            value[index] = torch.maximum(-box.lower[sample], box.upper[sample])
            if isinstance(node, Affine):
                reached = node.absolute(value[node.inputs[0]][None])[0] + node.offset_magnitude()
                summed[index] = _above(reached.expand(node.shape))
        return Sizes({i: _above(v) for i, v in value.items()}, summed)


def _above(values: Tensor) -> np.ndarray:
    """Powers of two above values that are not negative, (size,): few digits suffice for errors. Others are infinite."""
    flat = values.flatten().numpy()
    with np.errstate(over="ignore"):
        above = np.ldexp(1.0, np.frexp(flat * _GENEROUS)[1])
    return np.where(np.isfinite(flat), above, np.inf)


class Folding:
    """A network's affine maps as arrays, and rows pulled back through them.

    Args:
        network: piecewise linear.
        exact: compute in integers with exponents instead of float64 (which is a Dyadic with exponent 0 throughout).

    Raises:
        UnsupportedError: if the network is not piecewise linear.
    """

    def __init__(self, network: Network, *, exact: bool) -> None:
        network.require_piecewise_linear()
        self.network = network
        self.exact = exact
        self._read: dict[tuple[int, str], Dyadic] = {}
        self._slopes: dict[int, Dyadic] = {}

    @cached_property
    def _chunk(self) -> int:
        """How many rows to pull back at once."""
        nodes = self.network.nodes
        if self.exact:
            return _PRODUCTS // max(1, sum(node.size * node.terms for node in self.network.affine))
        return _COEFFICIENTS // max(node.size for node in nodes)

    def number(self, array: np.ndarray) -> Dyadic:
        """A float array in this folding's arithmetic."""
        return Dyadic.of(array) if self.exact else Dyadic(np.asarray(array, np.float64), 0)

    def parameter(self, index: int, name: str) -> Dyadic:
        """A tensor of a node."""
        if (index, name) not in self._read:
            tensor: Tensor = getattr(self.network.nodes[index], name)
            self._read[index, name] = self.number(tensor.detach().cpu().numpy())
        return self._read[index, name]

    def slopes(self, index: int) -> Dyadic:
        """An activation's slopes below zero, (size,)."""
        if index not in self._slopes:
            node = self.network.nodes[index]
            slope = self.number(SLOPES[node](node).detach().cpu().numpy())
            self._slopes[index] = Dyadic(np.broadcast_to(slope.numbers, node.shape).reshape(-1), slope.exponent)
        return self._slopes[index]

    def relative(self, node: Affine) -> float:
        """The relative error of one product in pulling rows back through an affine node."""
        if self.exact:
            return 2 * node.weight_error
        # A product takes part in a sum along the node, and its offset in one along all nodes.
        terms = max(node.terms, node.size) + len(self.network.nodes) + 8
        return 2 * node.weight_error + 2 * terms * _UNIT

    def underflow(self, sizes: Sizes) -> float:
        """What products too small for float64 may amount to, on the whole way back."""
        if self.exact:
            return 0.0
        nodes = self.network.nodes
        products = sum(node.terms * nodes[node.inputs[0]].size for node in self.network.affine)
        return 4 * _LEAST * products * (1 + max(float(v.max(initial=0.0)) for v in sizes.value.values()))

    def pull_back(self, target: int, rows: Dyadic, phases: Mapping[int, Phases], sizes: Sizes) -> Forms:
        """rows·(value of node ``target``) as forms over the input and the unstable neurons.

        Args:
            target: the node.
            rows: (R, size of the target).
            phases: of every activation before the target.
            sizes: of the nodes before the target, and of itself; needed where something is rounded.

        Raises:
            UnsupportedError: if errors are unbounded, since the sizes are.
        """
        walk = _Walk(self, rows, phases, sizes)
        walk.give(target, rows)
        for index in range(target, -1, -1):
            if index in walk.pending:
                node = self.network.nodes[index]
                STEPS[node](walk, index, node, walk.pending.pop(index))
        return Forms(walk.terms, walk.constant, walk.error)

    def neurons(self, phases: Mapping[int, Phases], sizes: Sizes) -> Iterator[tuple[int, np.ndarray, Forms]]:
        """The pre-activations of all unstable neurons, in chunks: activation, neurons (R,), their forms."""
        size = max(1, self._chunk)
        for index, phase in phases.items():
            node = self.network.nodes[index]
            chosen = np.flatnonzero(phase.unstable)
            for start in range(0, len(chosen), size):
                part = chosen[start : start + size]
                unit = np.zeros((len(part), node.size), dtype=object if self.exact else np.float64)
                unit[np.arange(len(part)), part] = 1
                yield index, part, self.pull_back(node.inputs[0], Dyadic(unit, 0), phases, sizes)


class _Walk:
    """Rows on their way back to the input, and what has been collected of them.

    Attributes:
        pending: by node, the rows (R, node size) that multiply its value and are still to be pulled back.
        terms, constant, error: of the forms, as far as they are known.
    """

    def __init__(self, folding: Folding, rows: Dyadic, phases: Mapping[int, Phases], sizes: Sizes) -> None:
        self.folding = folding
        self.phases = phases
        self.sizes = sizes
        self.pending: dict[int, Dyadic] = {}
        self.terms: dict[int, Dyadic] = {}
        count = len(rows.numbers)
        self.constant = folding.number(np.zeros(count))
        self.error = folding.number(np.full(count, folding.underflow(sizes)))

    def charge(self, a: Dyadic, size: np.ndarray, relative: float) -> None:
        """Add the error of rows that are off by so much, relative to bounds ``size`` of what they multiply.

        Raises:
            UnsupportedError: if these bounds are not finite.
        """
        if not np.isfinite(size).all():
            raise UnsupportedError("the bounds of the network's values are not finite")
        # What underflows in the products is no more than is added, however large the rows are.
        share = self.folding.number(np.where(size > 0, _GENEROUS * relative * size + 2 * _LEAST, 0.0))
        self.error = self.error + Dyadic(np.abs(a.numbers) @ share.numbers, a.exponent + share.exponent)

    def give(self, index: int, a: Dyadic) -> None:
        """Add rows (R, …) that multiply the value of a node."""
        a = Dyadic(a.numbers.reshape(len(a.numbers), self.folding.network.nodes[index].size), a.exponent)
        if index in self.pending:
            a = self.pending[index] + a
            if not self.folding.exact:
                self.charge(a, self.sizes.value[index], _UNIT)
        self.pending[index] = a


def _shaped(node: Node, a: Dyadic) -> Dyadic:
    """Rows (R, node size) as (R, *node shape)."""
    return Dyadic(a.numbers.reshape(len(a.numbers), *node.shape), a.exponent)


def _input(walk: _Walk, index: int, node: Input, a: Dyadic) -> None:
    walk.terms[index] = a


def _activation(walk: _Walk, index: int, node: Activation, a: Dyadic) -> None:
    phase = walk.phases[index]
    walk.terms[index] = Dyadic(np.where(phase.unstable, a.numbers, 0), a.exponent)
    active = Dyadic(np.where(phase.active, a.numbers, 0), a.exponent)
    inactive = Dyadic(np.where(phase.inactive, a.numbers, 0), a.exponent)
    folded = active + inactive * walk.folding.slopes(index)
    if not walk.folding.exact:
        walk.charge(folded, walk.sizes.value[node.inputs[0]], _UNIT)
    walk.give(node.inputs[0], folded)


def _unchanged(walk: _Walk, index: int, node: Add | Reshape, a: Dyadic) -> None:
    for source in node.inputs:
        walk.give(source, a)


def _permute(walk: _Walk, index: int, node: Permute, a: Dyadic) -> None:
    moved = _shaped(node, a).numbers.transpose(0, *(axis + 1 for axis in np.argsort(node.axes)))
    walk.give(node.inputs[0], Dyadic(moved, a.exponent))


def _scale(walk: _Walk, index: int, node: Scale, a: Dyadic) -> None:
    center, scale, shift = (walk.folding.parameter(index, name) for name in ("center", "scale", "shift"))
    _affine(walk, index, node, a, shift - scale * center, _shaped(node, a) * scale)


def _linear(walk: _Walk, index: int, node: Linear, a: Dyadic) -> None:
    weight, bias = (walk.folding.parameter(index, name) for name in ("weight", "bias"))
    pulled = _shaped(node, a).numbers @ weight.numbers
    _affine(walk, index, node, a, bias, Dyadic(pulled, weight.exponent + a.exponent))


def _conv2d(walk: _Walk, index: int, node: Conv2d, a: Dyadic) -> None:
    weight, bias = (walk.folding.parameter(index, name) for name in ("weight", "bias"))
    before = walk.folding.network.nodes[node.inputs[0]].shape
    pulled = _convolve_back(node, weight.numbers, _shaped(node, a).numbers, before)
    offset = Dyadic(bias.numbers[:, None, None], bias.exponent)
    _affine(walk, index, node, a, offset, Dyadic(pulled, weight.exponent + a.exponent))


def _sparse(walk: _Walk, index: int, node: Sparse, a: Dyadic) -> None:
    weight, bias = (walk.folding.parameter(index, name) for name in ("weight", "bias"))
    places = node.index.numpy()
    pulled = np.zeros((len(a.numbers), walk.folding.network.nodes[node.inputs[0]].size), dtype=a.numbers.dtype)
    for place, numbers in zip(places.T, weight.numbers.T, strict=True):
        np.add.at(pulled.T, place, (a.numbers * numbers).T)
    offset = Dyadic(bias.numbers.reshape(node.shape), bias.exponent)
    _affine(walk, index, node, a, offset, Dyadic(pulled, weight.exponent + a.exponent))


def _affine(walk: _Walk, index: int, node: Affine, a: Dyadic, offset: Dyadic, pulled: Dyadic) -> None:
    """Pull rows back through y = W·x + b, ``offset`` being b and ``pulled`` the rows times W."""
    if relative := walk.folding.relative(node):
        walk.charge(a, walk.sizes.summed[index], relative)
    flat = np.broadcast_to(offset.numbers, node.shape).reshape(-1)
    walk.constant = walk.constant + Dyadic(a.numbers @ flat, a.exponent + offset.exponent)
    walk.give(node.inputs[0], pulled)


STEPS: Table[Callable[[_Walk, int, Any, Dyadic], None]] = Table(
    "the encoding for solvers",
    {
        Input: _input,
        Activation: _activation,
        Add: _unchanged,
        Bilinear: Refusal("only piecewise-linear networks can be split into phases"),
        Reshape: _unchanged,
        Permute: _permute,
        Scale: _scale,
        Linear: _linear,
        Conv2d: _conv2d,
        Sparse: _sparse,
    },
)
"""How rows (R, node size) that multiply the value of a node, given by its index too, go on to the node's inputs."""


def _convolve_back(node: Conv2d, weight: np.ndarray, rows: np.ndarray, input_shape: Shape) -> np.ndarray:
    """The adjoint of a convolution on rows (R, *node shape), in any numbers; returns (R, *input_shape)."""
    count, out, height, width = rows.shape
    top, left, bottom, right = node.padding
    channels, full_height, full_width = input_shape[0], input_shape[1] + top + bottom, input_shape[2] + left + right
    full = np.zeros((count, channels, full_height, full_width), dtype=rows.dtype)
    per_out, per_in = out // node.groups, channels // node.groups
    for group in range(node.groups):
        kernel = weight[group * per_out : (group + 1) * per_out]
        part = rows[:, group * per_out : (group + 1) * per_out]
        into = full[:, group * per_in : (group + 1) * per_in]
        for u, v in np.ndindex(*weight.shape[2:]):
            first_row, first_column = u * node.dilation[0], v * node.dilation[1]
            into[
                :,
                :,
                first_row : first_row + node.stride[0] * (height - 1) + 1 : node.stride[0],
                first_column : first_column + node.stride[1] * (width - 1) + 1 : node.stride[1],
            ] += np.moveaxis(np.tensordot(part, kernel[:, :, u, v], axes=(1, 0)), -1, 1)
    return full[:, :, top : top + input_shape[1], left : left + input_shape[2]]


@dataclass(frozen=True, eq=False)
class Phases:
    """What bounds say of the neurons of one piecewise-linear activation; arrays are (size,).

    Attributes:
        lower: of the pre-activation.
        upper: likewise.
    """

    lower: np.ndarray
    upper: np.ndarray
    active: np.ndarray = field(init=False)
    inactive: np.ndarray = field(init=False)
    unstable: np.ndarray = field(init=False)

    @staticmethod
    def of(pre: Bounds, sample: int) -> Phases:
        """From bounds of the pre-activation, (batch, *shape), of one sample of their batch."""
        return Phases(pre.lower[sample].flatten().numpy(), pre.upper[sample].flatten().numpy())

    def __post_init__(self) -> None:
        active = self.lower >= 0
        inactive = (self.upper <= 0) & ~active
        object.__setattr__(self, "active", active)
        object.__setattr__(self, "inactive", inactive)
        # NaN bounds prove nothing.
        object.__setattr__(self, "unstable", ~(active | inactive))
