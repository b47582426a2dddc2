"""Piecewise-linear networks for z3, exactly: what is stable is folded away, what is left is a system of affine forms.

Under bounds of the pre-activations most neurons are affine on the whole box. Rows are pulled back from a node to the
input, through affine nodes and stable neurons alike, and end at unstable neurons, each of which is two variables

    pre-activation = positive − negative,   value = positive − slope·negative,   positive, negative ≥ 0,

one of which is zero. A formula then has one equation per unstable neuron and one row per output constraint, whatever
the size of the network. Weights are dyadic rationals, so that integers with an exponent suffice.

Where stored weights are not the operator's own (``Affine.weight_error``), a form is not what it stands for. Pulling
rows A back through y = W·x + b with relative errors of at most ε changes A·y by at most ε·|A|·(|W|·|x| + |b|); every
form carries the sum of these, over bounds of all values, and a formula whose rows are loosened by it has every solution
that the network has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    Kinked,
    Linear,
    Node,
    Permute,
    Reshape,
    Scale,
    Seen,
    Shape,
    Sparse,
)
from verifiable_relu.rounding import LEAST, OWN

_PRODUCTS = 1 << 21
"""Most multiplications of integers in a row, so that the clock is looked at several times a second."""


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


Sizes = Mapping[int, np.ndarray]
"""By affine node y = W·x + b, (node size,) upper bounds of |W|·|x| + |b|, which errors of pulled-back rows are relative
to; nothing where the weights are the operators' own."""


def sizes_of(network: Network, bounds: Sequence[Bounds], sample: int) -> Sizes:
    """The sizes from bounds of every node, in node order, of one sample of their batch."""
    found = {}
    for index in (index for index, node in enumerate(network.nodes) if isinstance(node, Affine)):
        node = network.nodes[index]
        assert isinstance(node, Affine)
        before = bounds[node.inputs[0]]
        most = torch.maximum(-before.lower[sample], before.upper[sample])
        found[index] = _above((node.absolute(most[None])[0] + node.offset_magnitude()).expand(node.shape))
    return found


def _above(values: Tensor) -> np.ndarray:
    """Powers of two above values that are not negative, (size,): few digits suffice for errors. Others are infinite."""
    flat = values.flatten().numpy()
    with np.errstate(over="ignore"):
        above = np.ldexp(1.0, np.frexp(flat * OWN)[1])
    return np.where(np.isfinite(flat), above, np.inf)


class Folding:
    """A network's affine maps as arrays of integers, and rows pulled back through them.

    Args:
        network: piecewise linear.

    Raises:
        UnsupportedError: if the network is not piecewise linear.
    """

    def __init__(self, network: Network) -> None:
        network.require_piecewise_linear()
        self.network = network
        self._read: dict[tuple[int, str], Dyadic] = {}
        self._slopes: dict[int, Dyadic] = {}

    def parameter(self, index: int, name: str) -> Dyadic:
        """A tensor of a node."""
        if (index, name) not in self._read:
            tensor: Tensor = getattr(self.network.nodes[index], name)
            self._read[index, name] = Dyadic.of(tensor.detach().cpu().numpy())
        return self._read[index, name]

    def slopes(self, index: int) -> Dyadic:
        """An activation's slopes below zero, (size,)."""
        if index not in self._slopes:
            node = self.network.nodes[index]
            assert isinstance(node, Kinked)
            slope = Dyadic.of(node.below.detach().cpu().numpy())
            self._slopes[index] = Dyadic(np.broadcast_to(slope.numbers, node.shape).reshape(-1), slope.exponent)
        return self._slopes[index]

    def relative(self, node: Affine) -> float:
        """The relative error of one product in pulling rows back through an affine node."""
        return 2 * node.weight_error

    def pull_back(self, target: int, rows: Dyadic, phases: Mapping[int, Phases], sizes: Sizes) -> Forms:
        """rows·(value of node ``target``) as forms over the input and the unstable neurons.

        Args:
            target: the node.
            rows: (R, size of the target).
            phases: of every activation before the target.
            sizes: of the nodes before the target, and of itself; needed where weights are known up to an error.

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
        nodes = self.network.nodes
        size = max(1, _PRODUCTS // max(1, sum(node.size * node.terms for node in self.network.affine)))
        for index, phase in phases.items():
            node = nodes[index]
            chosen = np.flatnonzero(phase.unstable)
            for start in range(0, len(chosen), size):
                part = chosen[start : start + size]
                unit = np.zeros((len(part), node.size), dtype=object)
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
        self.constant = self.error = Dyadic.of(np.zeros(count))

    def charge(self, a: Dyadic, size: np.ndarray, relative: float) -> None:
        """Add the error of rows that are off by so much, relative to bounds ``size`` of what they multiply.

        Raises:
            UnsupportedError: if these bounds are not finite.
        """
        if not np.isfinite(size).all():
            raise UnsupportedError("the bounds of the network's values are not finite")
        # What underflows in the products is no more than is added, however large the rows are.
        share = Dyadic.of(np.where(size > 0, OWN * relative * size + 2 * LEAST, 0.0))
        self.error = self.error + Dyadic(np.abs(a.numbers) @ share.numbers, a.exponent + share.exponent)

    def give(self, index: int, a: Dyadic) -> None:
        """Add rows (R, …) that multiply the value of a node."""
        a = Dyadic(a.numbers.reshape(len(a.numbers), self.folding.network.nodes[index].size), a.exponent)
        if index in self.pending:
            a = self.pending[index] + a
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
    walk.give(node.inputs[0], active + inactive * walk.folding.slopes(index))


def _unchanged(walk: _Walk, index: int, node: Add | Reshape, a: Dyadic) -> None:
    for source in node.inputs:
        walk.give(source, a)


def _seen(walk: _Walk, index: int, node: Seen, a: Dyadic) -> None:
    walk.give(node.inputs[-1], a)


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
        walk.charge(a, walk.sizes[index], relative)
    flat = np.broadcast_to(offset.numbers, node.shape).reshape(-1)
    walk.constant = walk.constant + Dyadic(a.numbers @ flat, a.exponent + offset.exponent)
    walk.give(node.inputs[0], pulled)


STEPS: Table[Callable[[_Walk, int, Any, Dyadic], None]] = Table(
    "the encoding for z3",
    {
        Input: _input,
        Activation: _activation,
        Add: _unchanged,
        Bilinear: Refusal("only piecewise-linear networks can be split into phases"),
        Seen: _seen,
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
    """The adjoint of a convolution on rows (R, *node shape) of integers; returns (R, *input_shape)."""
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
