"""Sums, means and extremes along axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.derived import share
from verifiable_relu.network.nodes import LeakyRelu
from verifiable_relu.network.onnx.call import Call, Value, converts
from verifiable_relu.network.onnx.elementwise import negative
from verifiable_relu.network.onnx.extremes import maxima
from verifiable_relu.network.onnx.moves import Numbered, ordered
from verifiable_relu.network.onnx.shapes import axis_of


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
    shape = call.shape(x)
    order = [*(axis for axis in range(len(shape)) if axis not in axes), *axes]
    terms = math.prod(shape[axis] for axis in axes)
    moved = ordered(call, x, order) if order != list(range(len(shape))) else x
    rows = call.build.reshape(moved.index, (math.prod(shape) // terms, terms), call.name)
    number, error = share(terms if mean else 1)
    total = call.build.linear(rows, number.repeat(1, terms), None, call.name, error=error)
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


def _extreme(call: Call, sign: int) -> Value:
    x, axes = call.value(), axes_of(call)
    if not axes:
        return x
    x = x if sign > 0 else negative(call, x)
    numbers = np.moveaxis(Numbered().add(call, x) - 1, axes, range(len(axes)))
    kept = numbers.shape[len(axes) :]
    candidates = numbers.reshape(-1, math.prod(kept))
    if not candidates.size:
        raise UnsupportedError("the extreme of no values")
    found = call.reshaped(Value(maxima(call, x.index, candidates), False), _shape(call, axes))
    return found if sign > 0 else negative(call, found)


@converts("ReduceProd", 1, 11, 13, 18, group="products")
def _product(call: Call) -> Value:
    x, axes = call.value(), axes_of(call)
    if not axes:
        return x
    numbers = np.moveaxis(Numbered().add(call, x) - 1, axes, range(len(axes)))
    kept = numbers.shape[len(axes) :]
    rows = numbers.reshape(-1, math.prod(kept))
    factors = [call.sparse(x.index, row, np.ones(row.shape, np.float32), row.shape).index for row in rows]
    while len(factors) > 1:
        pairs = zip(factors[0::2], factors[1::2], strict=False)
        paired = [call.build.product(first, second, call.name) for first, second in pairs]
        factors = paired + factors[2 * len(paired) :]
    return call.reshaped(Value(factors[0], False), _shape(call, axes))


@converts("ReduceMax", 1, 11, 12, 13, 18, 20, group="maxima")
def _max(call: Call) -> Value:
    return _extreme(call, 1)


@converts("ReduceMin", 1, 11, 12, 13, 18, 20, group="maxima")
def _min(call: Call) -> Value:
    return _extreme(call, -1)
