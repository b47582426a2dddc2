"""Softmax and normalisations, written with functions of one variable and products of two computed values.

    softmax(x)_i              1/Σ_j exp(x_j − x_i); of two numbers σ(x_i − x_j)
    log softmax(x)_i          −log Σ_j exp(x_j − x_i); of two numbers −softplus(x_j − x_i)
    normalised(x)_i           d_i/√(ε + Σ_j d_j²/n), d = x or x without its mean

Differences of the numbers are bounded as such: what all of them have in common vanishes. Where there would be too many
differences, softmax(x)_i is exp(x_i − m)/Σ_j exp(x_j − m), m being the mean, though any m would do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.derived import quotient, share
from verifiable_relu.network.nodes import Scale, Sigmoid
from verifiable_relu.network.onnx.activations import smooth
from verifiable_relu.network.onnx.call import Call, Value, converts, tensor
from verifiable_relu.network.onnx.moves import GatheredRows, axis_of
from verifiable_relu.network.onnx.reduce import clipped
from verifiable_relu.rounding import above

MAX_DIFFERENCES = 1 << 15
"""Most differences of the numbers of all rows of one softmax."""

MAX_ROW = 1 << 12
"""Most numbers that are normalised together: each is subtracted from each."""


_ONE = torch.ones((), dtype=torch.float32, device="cpu")


def _added_up(call: Call, index: int, factor: Tensor = _ONE, error: float = 0.0) -> int:
    """The sums of a node's rows, (…, n), times a factor, as a node of shape (…, 1)."""
    return call.build.linear(index, factor.repeat(1, call.build.shape(index)[-1]), None, call.name, error)


def _softmax_axes(call: Call) -> tuple[int, ...]:
    rank = len(call.shape(call.value()))
    if call.version >= 13:
        return (axis_of(call.get("axis", -1), rank),)
    # The shape is read as a matrix, whose rows lie along the axis and all after it.
    return tuple(range(axis_of(call.get("axis", 1), rank), rank))


def _differences(call: Call, rows: GatheredRows) -> int:
    """x_j − x_i as a node of shape (count, length, length), j being the last axis."""
    each = np.arange(rows.count * rows.length).reshape(rows.count, rows.length)
    pairs = np.stack(np.broadcast_arrays(each[:, None, :], each[:, :, None]), -1).reshape(-1, 2)
    weight = np.where(pairs[:, :1] == pairs[:, 1:], 0.0, [[1.0, -1.0]]).astype(np.float32)
    shape = (rows.count, rows.length, rows.length)
    return call.build.sparse(rows.index, torch.from_numpy(pairs), torch.from_numpy(weight), None, shape, call.name)


def _other_of_two(call: Call, rows: GatheredRows, sign: float) -> int:
    """sign·(x_i − the other number) of rows of two, as a node of their shape."""
    weight = torch.tensor([[sign, -sign], [-sign, sign]])
    return call.build.linear(rows.index, weight, None, call.name)


def _without_mean(call: Call, rows: GatheredRows) -> int:
    """x without its rows' means: one matrix, so that intervals know what x and its mean have in common."""
    if rows.length > MAX_ROW:
        raise UnsupportedError(f"{rows.length} numbers are normalised together, where {MAX_ROW} are the most")
    number, error = share(rows.length)
    (own, error_of_own) = quotient(rows.length - 1.0, torch.tensor(float(rows.length), dtype=torch.float64))
    weight = torch.full((rows.length, rows.length), -float(number), dtype=torch.float64).fill_diagonal_(float(own))
    return call.build.linear(rows.index, weight, None, call.name, max(error, error_of_own))


def _within(call: Call, index: int, low: float, high: float) -> int:
    """The values of a node, which are known to lie in [low, high]: bounds of products do not know it."""
    ends = torch.tensor(low), torch.tensor(high)
    return clipped(call, Value(index, False), *ends).index


def _masked(call: Call, x: Value) -> tuple[Value, np.ndarray | None]:
    """x with 0 in the place of the numbers to which −inf was added, and where these are, in the ONNX shape of x."""
    node = call.build.nodes[x.index]
    if not isinstance(node, Scale) or bool(torch.isfinite(node.shift).all()):
        return x, None
    gone = (node.shift == -torch.inf).expand(node.shape)
    keep = torch.where(gone, 0.0, torch.ones_like(node.shift)) * node.scale
    shift = torch.where(gone, 0.0, node.shift.expand(node.shape))
    found = call.build.scale(
        node.inputs[0], call.name, center=node.center, scale=keep, shift=shift, error=node.weight_error
    )
    return Value(found, x.leading), gone.reshape(call.shape(x)).numpy()


@dataclass(frozen=True)
class _Exponentials:
    """What softmax is made of.

    Attributes:
        rows: of x.
        there: (count, length) 0 where −inf was added to x, else 1; None if it was added nowhere.
    """

    call: Call
    rows: GatheredRows
    there: Tensor | None

    @staticmethod
    def of(call: Call) -> _Exponentials:
        x, gone = _masked(call, call.value())
        rows = GatheredRows(call, x, _softmax_axes(call))
        if gone is None:
            return _Exponentials(call, rows, None)
        there = torch.from_numpy(1.0 - rows.along(gone).astype(np.float32))
        if not bool(there.any(1).all()):
            raise UnsupportedError("a softmax of nothing but −inf")
        return _Exponentials(call, rows, there)

    def sums(self) -> int | None:
        """Σ_j exp(x_j − x_i), of shape (count, length), without what is masked; None if that takes too many terms."""
        call, rows, build = self.call, self.rows, self.call.build
        if rows.count * rows.length**2 > MAX_DIFFERENCES:
            return None
        powers = smooth(build, _differences(call, rows), "Exp", call.name)
        if self.there is not None:
            powers = build.scale(powers, call.name, scale=self.there[:, None, :])
        return build.reshape(_added_up(call, powers), (rows.count, rows.length), call.name)

    def shifted(self) -> tuple[int, int, int]:
        """x_i − m, their exponentials, and the sums of these without what is masked; m is about the mean."""
        call, rows, build = self.call, self.rows, self.call.build
        mean = rows.repeated(_added_up(call, rows.index, -share(rows.length)[0].float()))
        shifted = build.add(rows.index, mean, call.name)
        powers = self.visible(smooth(build, shifted, "Exp", call.name))
        return shifted, powers, _added_up(call, powers)

    def visible(self, index: int) -> int:
        """A node of shape (count, length), 0 where x is masked."""
        return index if self.there is None else self.call.build.scale(index, self.call.name, scale=self.there)


@converts("Softmax", 1, 11, 13, group="smooth")
def _softmax(call: Call) -> Value:
    parts = _Exponentials.of(call)
    rows, build, name = parts.rows, call.build, call.name
    if rows.length == 2 and parts.there is None:
        return rows.back(build.activation(_other_of_two(call, rows, 1.0), Sigmoid, name))
    sums = parts.sums()
    if sums is not None:
        return rows.back(parts.visible(smooth(build, sums, "Reciprocal", name)))
    _, powers, total = parts.shifted()
    found = build.product(powers, rows.repeated(smooth(build, total, "Reciprocal", name)), name)
    return rows.back(_within(call, found, 0.0, 1.0))


@converts("LogSoftmax", 1, 11, 13, group="smooth")
def _log_softmax(call: Call) -> Value:
    parts, minus = _Exponentials.of(call), torch.tensor(-1.0)
    rows, build, name = parts.rows, call.build, call.name
    if parts.there is not None:
        raise UnsupportedError("the logarithm of what −inf was added to")
    if rows.length == 2:
        found = smooth(build, _other_of_two(call, rows, -1.0), "Softplus", name)
        return rows.back(build.scale(found, name, scale=minus))
    sums = parts.sums()
    if sums is not None:
        return rows.back(build.scale(smooth(build, sums, "Log", name), name, scale=minus))
    shifted, _, total = parts.shifted()
    logarithm = build.scale(smooth(build, total, "Log", name), name, scale=minus)
    return rows.back(build.add(shifted, rows.repeated(logarithm), name))


def _normalised(call: Call, x: Value, axes: Sequence[int], epsilon: float, centred: bool) -> Value:
    """x, without its mean if that is wanted, divided by the root of ε + the mean of its squares along some axes."""
    if not epsilon >= 0:
        raise UnsupportedError(f"its attribute epsilon = {epsilon}")
    rows = GatheredRows(call, x, axes)
    build, name = call.build, call.name
    values = _without_mean(call, rows) if centred else rows.index
    squares = smooth(build, values, "Square", name)
    mean = _added_up(call, squares, *share(rows.length))
    # An attribute is a float32 number, its default too.
    shifted = build.scale(mean, name, shift=torch.tensor(np.float32(epsilon)))
    found = build.product(values, rows.repeated(smooth(build, shifted, "InverseRoot", name)), name)
    # d_i² is at most n times the mean of all squares, and n − 1 times where the numbers add up to 0.
    most = float(above(np.float32(math.sqrt(rows.length - centred))))
    return rows.back(_within(call, found, -most, most))


def _stretched(call: Call, x: Value, scale: Tensor | None, shift: Tensor | None) -> Value:
    """scale·x + shift."""
    if scale is None and shift is None:
        return x
    return Value(call.build.scale(x.index, call.name, scale=scale, shift=shift), x.leading)


def _beside(call: Call, position: int, x: Value) -> Tensor | None:
    given = call.optional(position)
    return None if given is None else call.beside(given, x)


@converts("LayerNormalization", 17, group="products")
def _layer_normalisation(call: Call) -> Value:
    x = call.value()
    rank = len(call.shape(x))
    axes = range(axis_of(call.get("axis", -1), rank), rank)
    found = _normalised(call, x, axes, call.get("epsilon", 1e-5), centred=True)
    return _stretched(call, found, _beside(call, 1, x), _beside(call, 2, x))


@converts("RMSNormalization", 23, group="products")
def _root_mean_square_normalisation(call: Call) -> Value:
    x = call.value()
    rank = len(call.shape(x))
    axes = range(axis_of(call.get("axis", -1), rank), rank)
    found = _normalised(call, x, axes, call.get("epsilon", 1e-5), centred=False)
    return _stretched(call, found, _beside(call, 1, x), None)


@converts("InstanceNormalization", 1, 6, 22, group="products")
def _instance_normalisation(call: Call) -> Value:
    x = call.value()
    rank = len(call.shape(x))
    found = _normalised(call, x, range(2, rank), call.get("epsilon", 1e-5), centred=True)
    channels = (-1, *(1,) * (rank - 2))
    return _stretched(call, found, *(tensor(call.constant(i)).reshape(channels) for i in (1, 2)))


@converts("GroupNormalization", 21, group="products")
def _group_normalisation(call: Call) -> Value:
    x = call.value()
    shape, groups = call.shape(x), call.get("num_groups", 1)
    if len(shape) < 2 or shape[1] % groups:
        raise UnsupportedError(f"{groups} groups of shape {shape}")
    parted = call.reshaped(x, (shape[0], groups, shape[1] // groups, *shape[2:]))
    axes = range(2, len(shape) + 1)
    found = call.reshaped(_normalised(call, parted, axes, call.get("epsilon", 1e-5), centred=True), shape)
    parameters = (tensor(call.constant(i)) for i in (1, 2))
    return _stretched(call, found, *(part.reshape(-1, *(1,) * (len(shape) - 2)) for part in parameters))
