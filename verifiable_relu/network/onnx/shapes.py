"""Operators that change the shape of a tensor and none of its numbers."""

from __future__ import annotations

import math

import numpy as np
import onnx

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.onnx.call import Call, Value, converts
from verifiable_relu.network.onnx.moves import SINCE_21, ordered


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front.

    Raises:
        InputError: if there is no such axis.
    """
    if not -rank <= axis < rank:
        raise InputError(f"the axis {axis} of {rank} axes")
    return axis % rank


@converts("Identity", 1, 13, 14, 16, 19, *SINCE_21)
def _identity(call: Call) -> Value:
    return call.value()


@converts("Dropout", 7, 10, 12, 13, 22)
def _dropout(call: Call) -> Value:
    given = call.optional(1)
    ratio = call.get("ratio", 0.5) if given is None else given
    if not np.all((np.asarray(ratio) >= 0) & (np.asarray(ratio) < 1)):
        raise InputError(f"a ratio of {ratio}")
    training = call.optional(2)
    if training is not None and bool(training.any()):
        raise UnsupportedError("in training mode")
    return call.value()


@converts("Cast", 6, 9, 13, 19, *SINCE_21, 28)
def _cast(call: Call) -> Value:
    # A cast to float32 rounds what onnxruntime computes, as each of its operations does, and is no function of its own.
    if call.get("to", None) not in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
        raise UnsupportedError("casts a computed value to another kind of number than float32 or float64")
    return call.value()


@converts("Flatten", 1, 9, 11, 13, *SINCE_21)
def _flatten(call: Call) -> Value:
    shape = call.shape(call.value())
    axis, rank = call.get("axis", 1), len(shape)
    if not -rank <= axis <= rank or (axis < 0 and call.version < 11):
        raise InputError(f"the axis {axis} of {rank} axes")
    axis += rank if axis < 0 else 0
    return call.reshaped(call.value(), (math.prod(shape[:axis]), math.prod(shape[axis:])))


@converts("Reshape", 1, 5, 13, 14, 19, *SINCE_21)
def _reshape(call: Call) -> Value:
    shape = call.shape(call.value())
    target = call.get("shape", ()) if call.version < 5 else call.constant(1).reshape(-1).tolist()
    sizes = [shape[i] if size == 0 and not call.get("allowzero", 0) else int(size) for i, size in enumerate(target)]
    if sizes.count(-1) > 1 or min(sizes, default=1) < -1:
        raise InputError(f"the target shape {sizes}")
    if -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(shape) // max(1, -math.prod(sizes))
    return call.reshaped(call.value(), sizes)


@converts("Squeeze", 1, 11, 13, *SINCE_21)
def _squeeze(call: Call) -> Value:
    shape = call.shape(call.value())
    given = _axes(call)
    axes = (
        {i for i, size in enumerate(shape) if size == 1} if given is None else {axis_of(a, len(shape)) for a in given}
    )
    if any(shape[axis] != 1 for axis in axes):
        raise InputError(f"squeezes axes {sorted(axes)} of shape {shape}")
    return call.reshaped(call.value(), [size for i, size in enumerate(shape) if i not in axes])


@converts("Unsqueeze", 1, 11, 13, *SINCE_21)
def _unsqueeze(call: Call) -> Value:
    given = _axes(call)
    if given is None:
        raise InputError("its axes are missing")
    rank = len(call.shape(call.value())) + len(given)
    axes = {axis_of(axis, rank) for axis in given}
    if len(axes) < len(given):
        raise InputError(f"the axes {given} name one axis twice")
    rest = iter(call.shape(call.value()))
    return call.reshaped(call.value(), [1 if i in axes else next(rest) for i in range(rank)])


def _axes(call: Call) -> list[int] | None:
    """The axes of Squeeze or Unsqueeze: an attribute before version 13, an input since then."""
    if call.version < 13:
        found = call.get("axes", None)
        return None if found is None else list(found)
    constant = call.optional(1)
    return None if constant is None else [int(axis) for axis in constant.reshape(-1).tolist()]


@converts("Transpose", 1, 13, *SINCE_21)
def _transpose(call: Call) -> Value:
    x = call.value()
    shape = call.shape(x)
    axes = tuple(call.get("perm", None) or reversed(range(len(shape))))
    return ordered(call, x, axes)
