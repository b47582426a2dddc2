"""Means and maxima over sliding windows."""

from __future__ import annotations

import math

import numpy as np
import torch

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.derived import quotient
from verifiable_relu.network.nodes import Shape
from verifiable_relu.network.onnx.call import Call, Value, converts
from verifiable_relu.network.onnx.extremes import maxima
from verifiable_relu.network.onnx.windows import windows


def _images(call: Call) -> tuple[Value, Shape]:
    """The input and its ONNX shape, (1, channels, …).

    Raises:
        InputError: if it has no axes to pool along.
    """
    x = call.value()
    shape = call.shape(x)
    if len(shape) < 3:
        raise InputError(f"pools an input of shape {shape}")
    return x, shape


@converts("AveragePool", 7, 10, 11, 19, 22)
def _average_pool(call: Call) -> Value:
    x, shape = _images(call)
    seen = windows(call, shape[2:], tuple(call.get("kernel_shape", ())))
    counted = bool(call.get("count_include_pad", 0))
    whole = not call.get("ceil_mode", 0) and (counted or not any(seen.pads))
    if whole and len(shape) == 4 and shape[0] == 1 and seen.dilations == (1, 1):
        kernel, stride = seen.kernel[:2], seen.strides[:2]
        (top, left), (bottom, right) = seen.begins, seen.ends
        pooled = call.build.average_pool(
            x.index, (kernel[0], kernel[1]), (stride[0], stride[1]), (top, left, bottom, right), call.name
        )
        return Value(pooled, True)
    cells = seen.cells(padded=True)
    counts = ((cells >= 0) | (counted & (cells == -2))).sum(1, keepdims=True)
    if not counts.all():
        raise UnsupportedError("the mean of no values")
    return _means(call, x, shape, seen.outputs, cells, counts)


def _means(call: Call, x: Value, shape: Shape, outputs: Shape, cells: np.ndarray, counts: np.ndarray) -> Value:
    """The sums of x over cells of every image, (windows, cells), divided by ``counts``, (windows, 1)."""
    shares, error = quotient(1.0, torch.from_numpy(np.asarray(counts)))
    weight = np.where(cells >= 0, shares.numpy(), 0.0).astype(np.float64 if error else np.float32)
    images, size = math.prod(shape[:2]), math.prod(shape[2:])
    index = (np.arange(images)[:, None, None] * size + np.maximum(cells, 0)).reshape(-1, cells.shape[1])
    return call.sparse(x.index, index, np.tile(weight, (images, 1)), (*shape[:2], *outputs), error=error)


@converts("GlobalAveragePool", 1, 22)
def _global_average_pool(call: Call) -> Value:
    x, shape = _images(call)
    if len(shape) == 4 and shape[0] == 1:
        return Value(call.build.average_pool(x.index, (shape[2], shape[3]), (1, 1), (0, 0, 0, 0), call.name), True)
    cells = np.arange(math.prod(shape[2:]))[None]
    return _means(call, x, shape, (1,) * (len(shape) - 2), cells, np.array([[cells.size]]))


@converts("MaxPool", 1, 8, 10, 11, 12, 22, group="maxima")
def _max_pool(call: Call) -> Value:
    x, shape = _images(call)
    seen = windows(call, shape[2:], tuple(call.get("kernel_shape", ())))
    return _maxima(call, x, shape, seen.outputs, seen.cells())


@converts("GlobalMaxPool", 1, 22, group="maxima")
def _global_max_pool(call: Call) -> Value:
    x, shape = _images(call)
    cells = np.arange(math.prod(shape[2:]))[None]
    return _maxima(call, x, shape, (1,) * (len(shape) - 2), cells)


def _maxima(call: Call, x: Value, shape: Shape, outputs: Shape, cells: np.ndarray) -> Value:
    """The maxima of x over cells of every image, (windows, cells); padding takes no part."""
    if not (cells >= 0).any(1).all():
        raise UnsupportedError("the maximum of no values")
    images, size = math.prod(shape[:2]), math.prod(shape[2:])
    each = np.where(cells >= 0, np.arange(images)[:, None, None] * size + cells, -1)
    candidates = each.reshape(-1, cells.shape[1]).T
    return call.reshaped(Value(maxima(call, x.index, candidates), False), (*shape[:2], *outputs))
