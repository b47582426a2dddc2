"""Sums, means and products along axes, and extremes, which are written with ReLUs, exactly.

max(a, b) = a + relu(b − a) and min(a, b) = a − relu(a − b) hold in real arithmetic, and so does what follows from them:
every method that knows ReLU knows these operators too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.derived import share
from verifiable_relu.network.nodes import Extreme, LeakyRelu, Maximum, Relu
from verifiable_relu.network.onnx.call import Call, Result, Value, converts, tensor
from verifiable_relu.network.onnx.elementwise import broadcast, negative
from verifiable_relu.network.onnx.moves import GatheredRows, Numbered, axis_of
from verifiable_relu.rounding import largest

FAR = 2.0**12
"""Beyond it, an end is not added to and subtracted from values: rounding, relative to the end, would drown them.

The form for nearer ends has one use of the value instead of two, and so has tighter intervals.
"""


def maxima(call: Call, x: int, candidates: np.ndarray) -> int:
    """The largest of some elements of a node: a tournament, and of what it is the maximum.

    Args:
        call: the node that is read.
        x: the node whose elements they are.
        candidates: (candidates, results) the elements of each result, by their numbers in row-major order; −1 for none.
            Each result has one at least.

    Returns:
        A node of shape (results,).
    """
    # What is there comes before what is not: whoever has no opponent goes on.
    candidates = np.take_along_axis(candidates, np.argsort(candidates < 0, axis=0, kind="stable"), axis=0)
    source, windows = x, torch.from_numpy(candidates.astype(np.int64))
    while len(candidates) > 1:
        count, results = len(candidates) // 2, candidates.shape[1]
        first, second = candidates[0 : 2 * count : 2], candidates[1 : 2 * count : 2]
        pair = np.stack([second, first], -1).reshape(-1, 2)
        met = np.asarray((pair >= 0).all(1))
        weight = np.array([1, -1], np.float32) * met[:, None]
        # Where there is no opponent, the difference is a negative number, of which the ReLU makes 0.
        away = np.where(met, 0.0, -1.0).astype(np.float32)
        difference = call.sparse(x, np.maximum(pair, 0), weight, (count * results,), away)
        gained = call.build.activation(difference.index, Relu, call.name)
        left = np.concatenate([first, candidates[2 * count :]]).reshape(-1)
        gain = _select(call, gained, np.arange(len(left)), count * results)
        x = call.build.add(_select(call, x, left, call.build.size(x)), gain, call.name)
        rest = len(candidates) - count
        there = left.reshape(rest, results) >= 0
        candidates = np.where(there, np.arange(rest * results).reshape(rest, results), -1)
    made = _select(call, x, candidates[0], call.build.size(x))
    if len(windows) == 1:
        return made
    shape = call.build.shape(made)
    return call.build.append(Maximum(name=call.name, inputs=(source, made), shape=shape, candidates=windows))


def _select(call: Call, x: int, index: np.ndarray, size: int) -> int:
    """Elements of x by their numbers, and 0 for a number that is none of the first ``size``; x itself if that is all of
    it in order."""
    there = (index >= 0) & (index < size)
    if there.all() and np.array_equal(index, np.arange(call.build.size(x))):
        return call.build.reshape(x, (size,), call.name)
    weights = np.where(there, 1.0, 0.0).astype(np.float32)
    return call.sparse(x, np.where(there, index, 0), weights, (len(index),)).index


def larger(call: Call, left: Result, right: Result, sign: int) -> Value:
    """max(left, right), or min for ``sign`` −1, of two operands of which one is computed at least."""
    x, y = broadcast(call, left, right)
    if not isinstance(x, Value):
        x, y = y, x
    assert isinstance(x, Value)
    build, name = call.build, call.name
    if isinstance(y, Tensor):
        return Value(bounded(call, x.index, y, sign), x.leading)
    # x + s·relu(s·(y − x)).
    ahead, behind = (y, negative(call, x)) if sign > 0 else (x, negative(call, y))
    gained = build.activation(build.add(ahead.index, behind.index, name), Relu, name)
    if sign < 0:
        gained = build.scale(gained, name, scale=torch.tensor(-1.0))
    made = build.add(x.index, gained, name)
    three = (x.index, y.index, made)
    return Value(build.append(Extreme(name=name, inputs=three, shape=build.shape(made), sign=sign)), x.leading)


def bounded(call: Call, x: int, end: Tensor, sign: int) -> int:
    """max(x, end), or min(x, end) for ``sign`` −1, ``end`` being broadcastable to the shape of x.

    Ends that bound nothing are allowed for: −inf of a maximum, inf of a minimum.

    Raises:
        UnsupportedError: for other ends that are not finite.
    """
    if bool((end == -sign * torch.inf).all()):
        return x
    if not bool(torch.isfinite(end).all()):
        raise UnsupportedError("an end that is not finite")
    build, name, turn = call.build, call.name, torch.full_like(end, float(sign))
    if bool((end.abs() > FAR).any()):
        # x + s·relu(s·(end − x)).
        beyond = build.activation(build.scale(x, name, center=end, scale=-turn), Relu, name)
        return build.add(x, build.scale(beyond, name, scale=turn), name)
    # end + s·relu(s·(x − end)).
    above = build.activation(build.scale(x, name, center=end, scale=turn), Relu, name)
    return build.scale(above, name, scale=turn, shift=end)


def _largest(call: Call, sign: int) -> Result:
    values = sorted(call.given(), key=lambda given: not isinstance(given, Value))
    return functools.reduce(lambda x, y: larger(call, x, y, sign), values)


@converts("Clip", 6, 11, 12, 13, group="maxima")
def _clip(call: Call) -> Value:
    x = call.value()
    unbounded = np.float32(-np.inf), np.float32(np.inf)
    if call.version < 11:
        ends = [
            np.asarray(call.get(end, none), np.float32) for end, none in zip(("min", "max"), unbounded, strict=True)
        ]
    else:
        given = call.optional(1), call.optional(2)
        ends = [np.asarray(none if end is None else end) for end, none in zip(given, unbounded, strict=True)]
    return clipped(call, x, *(tensor(end.reshape(())) for end in ends))


def clipped(call: Call, x: Value, low: Tensor, high: Tensor) -> Value:
    """min(max(x, low), high) for numbers low ≤ high.

    The largest number of an end's type, which stands for infinity in many files, bounds nothing, nor does its negative.

    Raises:
        UnsupportedError: for low > high, of which the versions of the operator say different things.
    """
    if bool((low > high).any()):
        raise UnsupportedError(f"clips to nothing, [{float(low)}, {float(high)}]")
    low, high = (torch.where(end.abs() >= largest(end.dtype), end.sign() * torch.inf, end) for end in (low, high))
    return Value(bounded(call, bounded(call, x.index, low, 1), high, -1), x.leading)


@converts("Abs", 6, 13, group="maxima")
def _abs(call: Call) -> Value:
    # max(x, 0) + s·min(x, 0) with s = −1.
    x = call.value()
    return Value(call.build.activation(x.index, LeakyRelu, call.name, slope=torch.tensor(-1.0)), x.leading)


@converts("HardSigmoid", 6, 22, group="maxima")
def _hard_sigmoid(call: Call) -> Value:
    x = call.value()
    alpha, beta = (torch.tensor(call.get(name, value)) for name, value in (("alpha", 0.2), ("beta", 0.5)))
    line = Value(call.build.scale(x.index, call.name, scale=alpha, shift=beta), x.leading)
    return clipped(call, line, torch.tensor(0.0), torch.tensor(1.0))


def axes_of(call: Call) -> tuple[int, ...]:
    """The axes along which a node reduces: an attribute, or since opset 13 or 18 an input; all if none are named.

    Raises:
        InputError: if there is no such axis.
    """
    rank = len(call.shape(call.value()))
    given = call.get("axes", None)
    constant = call.optional(1)
    if constant is not None:
        given = constant.reshape(-1).tolist()
    if not given:
        return () if call.get("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({axis_of(int(axis), rank) for axis in given}))


def _shape(call: Call, axes: Sequence[int]) -> list[int]:
    """The ONNX shape of the result."""
    sizes = enumerate(call.shape(call.value()))
    keep = call.get("keepdims", 1)
    return [1 if axis in axes else size for axis, size in sizes if keep or axis not in axes]


def summed(call: Call, x: Value, mean: bool = False) -> Value:
    """The sum or the mean of x along the axes that a node names."""
    axes = axes_of(call)
    if not axes:
        return x
    rows = GatheredRows(call, x, axes)
    number, error = share(rows.length if mean else 1)
    total = call.build.linear(rows.index, number.repeat(1, rows.length), None, call.name, error=error)
    return call.reshaped(Value(total, False), _shape(call, axes))


@converts("ReduceSum", 1, 11, 13)
def _sum(call: Call) -> Value:
    return summed(call, call.value())


@converts("ReduceMean", 1, 11, 13, 18)
def _mean(call: Call) -> Value:
    return summed(call, call.value(), mean=True)


@converts("ReduceL1", 1, 11, 13, 18, group="maxima")
def _sum_of_sizes(call: Call) -> Value:
    x = call.value()
    size = call.build.activation(x.index, LeakyRelu, call.name, slope=torch.tensor(-1.0))
    return summed(call, Value(size, x.leading))


def _columns(call: Call, axes: Sequence[int]) -> np.ndarray:
    """The elements that each result of a node is made of, by their numbers: (elements, results)."""
    numbers = np.moveaxis(Numbered().add(call, call.value()) - 1, axes, range(len(axes)))
    return numbers.reshape(-1, math.prod(numbers.shape[len(axes) :]))


def _extreme(call: Call, sign: int) -> Value:
    x, axes = call.value(), axes_of(call)
    if not axes:
        return x
    x = x if sign > 0 else negative(call, x)
    candidates = _columns(call, axes)
    if not candidates.size:
        raise UnsupportedError("the extreme of no values")
    found = call.reshaped(Value(maxima(call, x.index, candidates), False), _shape(call, axes))
    return found if sign > 0 else negative(call, found)


@converts("ReduceProd", 1, 11, 13, 18, group="products")
def _product(call: Call) -> Value:
    x, axes = call.value(), axes_of(call)
    if not axes:
        return x
    rows = _columns(call, axes)
    factors = [call.sparse(x.index, row, np.ones(row.shape, np.float32), row.shape).index for row in rows]
    while len(factors) > 1:
        pairs = zip(factors[0::2], factors[1::2], strict=False)
        paired = [call.build.product(first, second, call.name) for first, second in pairs]
        factors = paired + factors[2 * len(paired) :]
    return call.reshaped(Value(factors[0], False), _shape(call, axes))


for _operator, _sign in (("Max", 1), ("Min", -1)):
    converts(_operator, 6, 8, 12, 13, group="maxima")(functools.partial(_largest, sign=_sign))
    converts(f"Reduce{_operator}", 1, 11, 12, 13, 18, 20, group="maxima")(functools.partial(_extreme, sign=_sign))
