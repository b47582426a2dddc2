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

import numpy as np
import torch

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.linear import Diagonal
from verifiable_relu.ir.network import Affine
from verifiable_relu.readers.builder import Builder, Value, tensor
from verifiable_relu.readers.derived import quotient, share
from verifiable_relu.readers.onnx.call import Call, axis_of, converts, float32
from verifiable_relu.readers.onnx.reductions import clipped, rows_along
from verifiable_relu.rounding import above

MAX_DIFFERENCES = 1 << 15
"""Most differences of the numbers of all rows of one softmax."""

MAX_ROW = 1 << 12
"""Most numbers that are normalised together: each is subtracted from each."""


class Rows:
    """A matrix ``values``, (count, length), whose rows are the numbers of x that are taken together."""

    def __init__(self, call: Call, x: Value, axes: Sequence[int]) -> None:
        self.values = rows_along(call, x, axes)
        self.count, self.length = self.values.shape
        self._build, self._shape = call.build, x.shape
        self._order = [*(axis for axis in range(len(x.shape)) if axis not in axes), *axes]

    def back(self, rows: Value) -> Value:
        """Return a matrix of the same shape as a value of the shape of x."""
        ordered = rows.reshaped([self._shape[axis] for axis in self._order])
        return self._build.transposed(ordered, np.argsort(self._order).tolist())

    def along(self, array: np.ndarray) -> np.ndarray:
        """Return an array of the shape of x as rows."""
        return array.transpose(self._order).reshape(self.values.shape)

    def repeated(self, numbers: Value) -> Value:
        """Return one number for each row, (count elements), as often as the row is long."""
        return self._build.moved(numbers, np.repeat(np.arange(self.count), self.length).reshape(self.values.shape))


def _softmax_axes(call: Call) -> tuple[int, ...]:
    rank = len(call.value().shape)
    if call.version >= 13:
        return (axis_of(call.get("axis", -1), rank),)
    # The shape is read as a matrix, whose rows lie along the axis and all after it.
    return tuple(range(axis_of(call.get("axis", 1), rank), rank))


def _differences(build: Builder, rows: Rows) -> Value:
    """Return x_j − x_i, (count, length, length), j being the last axis."""
    each = np.arange(rows.count * rows.length).reshape(rows.count, rows.length)
    pairs = np.stack(np.broadcast_arrays(each[:, None, :], each[:, :, None]), -1).reshape(-1, 2)
    weight = np.where(pairs[:, :1] == pairs[:, 1:], 0.0, [[1.0, -1.0]]).astype(np.float32)
    return build.sparse(rows.values, pairs, weight, (rows.count, rows.length, rows.length))


def _other_of_two(build: Builder, rows: Rows, sign: float) -> Value:
    """Return sign·(x_i − the other number) of rows of two."""
    return build.dense(rows.values, torch.tensor([[sign, -sign], [-sign, sign]]))


def _without_mean(build: Builder, rows: Rows) -> Value:
    """Return x without its rows' means: one matrix, so that intervals know what x and its mean have in common."""
    if rows.length > MAX_ROW:
        raise UnsupportedError(f"{rows.length} numbers are normalised together, where {MAX_ROW} are the most")
    number, error = share(rows.length)
    own, error_of_own = quotient(rows.length - 1.0, torch.tensor(float(rows.length), dtype=torch.float64))
    weight = torch.full((rows.length, rows.length), -float(number), dtype=torch.float64).fill_diagonal_(float(own))
    return build.dense(rows.values, weight, None, max(error, error_of_own))


def _masked(call: Call, x: Value) -> tuple[Value, np.ndarray | None]:
    """Return x with 0 in the place of the numbers to which −inf was added, and where these are; None for nowhere."""
    op = call.build.ops[x.op]
    if not (isinstance(op, Affine) and isinstance(op.map, Diagonal)) or op.bias is None:
        return x, None
    gone = op.bias == -torch.inf
    if not bool(gone.any()):
        return x, None
    weight, shift = torch.where(gone, 0.0, op.map.weight), torch.where(gone, 0.0, op.bias)
    before = Value(op.inputs[0], (op.size,))
    kept = call.build.affine(before, Diagonal(weight), shift, (op.size,), op.weight_error, 0.0)
    hidden = np.concatenate([gone.numpy(), [False]])
    return Value(kept.op, x.shape, x.index), hidden[x.numbers]


class _Exponentials:
    """The parts of a softmax: the ``rows`` of x, and where they are ``there``: 0 where −inf was added to x, else 1.

    ``there``, (count, length), is None if −inf was added nowhere.
    """

    def __init__(self, call: Call) -> None:
        x, gone = _masked(call, call.value())
        self.build, self.rows, self.there = call.build, Rows(call, x, _softmax_axes(call)), None
        if gone is not None:
            self.there = torch.from_numpy(1.0 - self.rows.along(gone).astype(np.float32))
            if not bool(self.there.any(1).all()):
                raise UnsupportedError("a softmax of nothing but −inf")

    def sums(self) -> Value | None:
        """Return Σ_j exp(x_j − x_i), (count, length), without what is masked; None if that takes too many terms."""
        rows = self.rows
        if rows.count * rows.length**2 > MAX_DIFFERENCES:
            return None
        powers = self.build.function(_differences(self.build, rows), "Exp")
        if self.there is not None:
            powers = self.build.scale(powers, self.there[:, None, :])
        return self.build.added_up(powers)

    def shifted(self) -> tuple[Value, Value, Value]:
        """Return x_i − m, their exponentials, and the sums of these without what is masked; m is about the mean."""
        rows, build = self.rows, self.build
        mean = rows.repeated(build.added_up(rows.values, -share(rows.length)[0].float()))
        shifted = build.sum(rows.values, mean)
        powers = self.visible(build.function(shifted, "Exp"))
        return shifted, powers, build.added_up(powers)

    def visible(self, x: Value) -> Value:
        """Return a matrix with 0 where x is masked."""
        return x if self.there is None else self.build.scale(x, self.there)


@converts("Softmax", 1, 11, 13, group="smooth")
def _softmax(call: Call) -> Value:
    parts, build = _Exponentials(call), call.build
    rows = parts.rows
    if rows.length == 2 and parts.there is None:
        return rows.back(build.function(_other_of_two(build, rows, 1.0), "Sigmoid"))
    sums = parts.sums()
    if sums is not None:
        return rows.back(parts.visible(build.function(sums, "Reciprocal")))
    _, powers, total = parts.shifted()
    found = build.product(powers, rows.repeated(build.function(total, "Reciprocal")))
    # Bounds of products do not know it.
    return rows.back(clipped(call, found, float32(0.0), float32(1.0)))


@converts("LogSoftmax", 1, 11, 13, group="smooth")
def _log_softmax(call: Call) -> Value:
    parts, build = _Exponentials(call), call.build
    rows = parts.rows
    if parts.there is not None:
        raise UnsupportedError("the logarithm of what −inf was added to")
    if rows.length == 2:
        found = build.function(_other_of_two(build, rows, -1.0), "Softplus")
        return rows.back(build.scale(found, -1.0))
    sums = parts.sums()
    if sums is not None:
        return rows.back(build.scale(build.function(sums, "Log"), -1.0))
    shifted, _, total = parts.shifted()
    logarithm = build.scale(build.function(total, "Log"), -1.0)
    return rows.back(build.sum(shifted, rows.repeated(logarithm)))


def _normalised(call: Call, x: Value, axes: Sequence[int], centred: bool) -> Value:
    """Return x, perhaps without its mean, divided by the root of ε + the mean of its squares along some axes."""
    # An attribute is a float32 number, its default too.
    epsilon = call.get("epsilon", 1e-5)
    if not epsilon >= 0:
        raise UnsupportedError(f"its attribute epsilon = {epsilon}")
    build, rows = call.build, Rows(call, x, axes)
    values = _without_mean(build, rows) if centred else rows.values
    mean = build.added_up(build.function(values, "Square"), *share(rows.length))
    root = build.function(build.scale(mean, shift=epsilon), "InverseRoot")
    found = build.product(values, rows.repeated(root))
    # d_i² is at most n times the mean of all squares, and n − 1 times where the numbers add up to 0.
    most = float(above(np.float32(math.sqrt(rows.length - centred))))
    return rows.back(clipped(call, found, float32(-most), float32(most)))


def _stretched(call: Call, x: Value, *positions: int) -> Value:
    """Return x times the first of some optional inputs, plus the second."""
    scale, shift, *_ = (*(None if (v := call.optional(i)) is None else tensor(v) for i in positions), None, None)
    return x if scale is None and shift is None else call.build.scale(x, scale, shift=shift)


def _last_axes(call: Call) -> range:
    rank = len(call.value().shape)
    return range(axis_of(call.get("axis", -1), rank), rank)


@converts("LayerNormalization", 17, group="products")
def _layer_normalisation(call: Call) -> Value:
    found = _normalised(call, call.value(), _last_axes(call), centred=True)
    return _stretched(call, found, 1, 2)


@converts("RMSNormalization", 23, group="products")
def _root_mean_square_normalisation(call: Call) -> Value:
    found = _normalised(call, call.value(), _last_axes(call), centred=False)
    return _stretched(call, found, 1)


def _by_channel(call: Call, x: Value) -> Value:
    channels = (-1, *(1,) * (len(x.shape) - 2))
    scale, shift = (tensor(call.constant(i)).reshape(channels) for i in (1, 2))
    return call.build.scale(x, scale, shift=shift)


@converts("InstanceNormalization", 1, 6, 22, group="products")
def _instance_normalisation(call: Call) -> Value:
    x = call.value()
    return _by_channel(call, _normalised(call, x, range(2, len(x.shape)), centred=True))


@converts("GroupNormalization", 21, group="products")
def _group_normalisation(call: Call) -> Value:
    x, groups = call.value(), call.get("num_groups", 1)
    if len(x.shape) < 2 or x.shape[1] % groups:
        raise UnsupportedError(f"{groups} groups of shape {x.shape}")
    parted = x.reshaped((x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    found = _normalised(call, parted, range(2, len(parted.shape)), centred=True)
    return _by_channel(call, found.reshaped(x.shape))
