"""Sums, means, products and extremes along axes, and of several values; ends of an interval."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.readers.builder import Value, tensor
from verifiable_relu.readers.derived import share
from verifiable_relu.readers.onnx.arithmetic import constant_last, negative
from verifiable_relu.readers.onnx.call import Call, Result, axis_of, converts, float32
from verifiable_relu.readers.onnx.functions import bounded
from verifiable_relu.rounding import largest


def _larger(call: Call, left: Result, right: Result, sign: int) -> Value:
    """Return max(left, right), or min for ``sign`` −1, of two operands of which one is computed at least."""
    x, y = constant_last(call, left, right)
    if isinstance(y, Tensor):
        return bounded(call, x, y, sign)
    if sign > 0:
        return call.build.larger(x, y)
    return negative(call, call.build.larger(negative(call, x), negative(call, y)))


def _extreme_of_values(call: Call, sign: int) -> Result:
    values = sorted(call.given(), key=lambda given: not isinstance(given, Value))
    return functools.reduce(lambda x, y: _larger(call, x, y, sign), values)


@converts("Clip", 6, 11, 12, 13, group="maxima")
def _clip(call: Call) -> Value:
    ends = [call.get("min", None), call.get("max", None)] if call.version < 11 else [call.optional(1), call.optional(2)]
    low, high = (
        tensor(np.asarray(end, end.dtype if isinstance(end, np.ndarray) else np.float32).reshape(()))
        for end in (none if end is None else end for end, none in zip(ends, (-np.inf, np.inf), strict=True))
    )
    return clipped(call, call.value(), low, high)


def clipped(call: Call, x: Value, low: Tensor, high: Tensor) -> Value:
    """Return min(max(x, low), high) for numbers low ≤ high; others mean different things in versions of the operator.

    The largest number of an end's type, which stands for infinity in many files, bounds nothing, nor does its negative.
    """
    if bool((low > high).any()):
        raise UnsupportedError(f"clips to nothing, [{float(low)}, {float(high)}]")
    low, high = (torch.where(end.abs() >= largest(end.dtype), end.sign() * torch.inf, end) for end in (low, high))
    return bounded(call, bounded(call, x, low, 1), high, -1)


@converts("HardSigmoid", 6, 22, group="maxima")
def _hard_sigmoid(call: Call) -> Value:
    line = call.build.scale(call.value(), call.get("alpha", 0.2), shift=call.get("beta", 0.5))
    return clipped(call, line, float32(0.0), float32(1.0))


def axes_of(call: Call) -> tuple[int, ...]:
    """Return the axes along which a node reduces, by an attribute or an input; all if none is named."""
    rank, given, constant = len(call.value().shape), call.get("axes", None), call.optional(1)
    if constant is not None:
        given = constant.reshape(-1).tolist()
    if not given:
        return () if call.get("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({axis_of(int(axis), rank) for axis in given}))


def _shape(call: Call, axes: Sequence[int]) -> list[int]:
    """Return the ONNX shape of the result."""
    keep = call.get("keepdims", 1)
    return [1 if i in axes else n for i, n in enumerate(call.value().shape) if keep or i not in axes]


def rows_along(call: Call, x: Value, axes: Sequence[int]) -> Value:
    """Return x as a matrix whose rows lie along some axes."""
    order = [*(axis for axis in range(len(x.shape)) if axis not in axes), *axes]
    length = int(np.prod([x.shape[axis] for axis in axes]))
    return call.build.transposed(x, order).reshaped((x.size // max(1, length), length))


def summed(call: Call, x: Value, mean: bool = False) -> Value:
    """Return the sum or the mean of x along the axes that a node names."""
    axes = axes_of(call)
    if not axes:
        return x
    rows = rows_along(call, x, axes)
    number, error = share(rows.shape[1] if mean else 1)
    return call.build.added_up(rows, number, error).reshaped(_shape(call, axes))


@converts("ReduceSum", 1, 11, 13)
def _sum(call: Call) -> Value:
    return summed(call, call.value())


@converts("ReduceMean", 1, 11, 13, 18)
def _mean(call: Call) -> Value:
    return summed(call, call.value(), mean=True)


@converts("ReduceL1", 1, 11, 13, 18, group="maxima")
def _sum_of_sizes(call: Call) -> Value:
    return summed(call, call.build.size_of(call.value()))


def _sum_of_function(call: Call, before: str | None, after: str | None) -> Value:
    """Return a function of the sum along axes of a function."""
    if not axes_of(call):
        raise UnsupportedError("along no axes")
    total = summed(call, call.build.function(call.value(), before) if before else call.value())
    return call.build.function(total, after) if after else total


for _operator, _later, _before, _after in (
    ("ReduceSumSquare", (), "Square", None),
    ("ReduceL2", (), "Square", "Sqrt"),
    ("ReduceLogSum", (28,), None, "Log"),
    ("ReduceLogSumExp", (28,), "Exp", "Log"),
):
    converts(_operator, 1, 11, 13, 18, *_later, group="smooth")(
        functools.partial(_sum_of_function, before=_before, after=_after)
    )


def _extreme(call: Call, sign: int) -> Value:
    x, axes = call.value(), axes_of(call)
    if not axes:
        return x
    rows = rows_along(call, x if sign > 0 else negative(call, x), axes)
    if not rows.size:
        raise UnsupportedError("the extreme of no values")
    candidates = np.arange(rows.size).reshape(rows.shape).T
    found = call.build.maximum(rows, candidates, _shape(call, axes))
    return found if sign > 0 else negative(call, found)


@converts("ReduceProd", 1, 11, 13, 18, group="products")
def _product(call: Call) -> Value:
    x, axes, build = call.value(), axes_of(call), call.build
    if not axes:
        return x
    rows = rows_along(call, x, axes)
    factors = [build.moved(rows, column) for column in np.arange(rows.size).reshape(rows.shape).T]
    while len(factors) > 1:
        paired = [build.product(*pair) for pair in zip(factors[0::2], factors[1::2], strict=False)]
        factors = paired + factors[2 * len(paired) :]
    return factors[0].reshaped(_shape(call, axes))


for _operator, _sign in (("Max", 1), ("Min", -1)):
    converts(_operator, 6, 8, 12, 13, group="maxima")(functools.partial(_extreme_of_values, sign=_sign))
    converts(f"Reduce{_operator}", 1, 11, 12, 13, 18, 20, group="maxima")(functools.partial(_extreme, sign=_sign))
