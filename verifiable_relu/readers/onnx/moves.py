"""Operators that only move numbers: each element of a result is an element of an input, or a constant.

Most are read by running them, in the standard's reference evaluator, on the numbers of their inputs' elements in place
of the elements. What comes out says for each element of the result where it comes from.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import onnx

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.readers.builder import Value
from verifiable_relu.readers.onnx.call import Call, Result, axis_of, converts
from verifiable_relu.readers.onnx.constants import numbered_places

SINCE_21 = (21, 23, 24, 25)
"""Since opset 21 these versions of the operators below have added nothing but element types."""


def moved(call: Call, data: Sequence[int]) -> list[Result]:
    """Return the results of an operator that moves elements, by what it does to the elements' numbers, from 1 on.

    ``data`` are the places of the inputs whose elements are moved, −1 for all; the others must be constants.
    """
    if call.get("reduction", b"none") != b"none":
        raise UnsupportedError(f"its attribute reduction = {call.get('reduction', None)}")
    is_moved = [given is not None and (i in data or -1 in data) for i, given in enumerate(call.inputs)]
    inputs = [given if is_moved[i] else call.optional(i) for i, given in enumerate(call.inputs)]
    sources = [given for given, moves in zip(inputs, is_moved, strict=True) if given is not None and moves]
    node = onnx.NodeProto()
    node.CopyFrom(call.node)
    # Old versions of Pad name a number in an attribute.
    del node.attribute[:]
    node.attribute.extend(attribute for attribute in call.node.attribute if attribute.name != "value")
    found = numbered_places(node, inputs, is_moved, call.opset)
    if call.op.startswith("Scatter"):
        first, last = math.prod(sources[0].shape) + 1, sum(math.prod(given.shape) for given in sources)
        if not np.isin(np.arange(first, last + 1), found[0]).all():
            raise UnsupportedError("writes one element twice")
    return [_placed(call, sources, numbers) for numbers in found]


def _placed(call: Call, sources: Sequence[Result], numbers: np.ndarray) -> Result:
    """Return the tensor of the elements with these numbers, 0 standing for the node's own number."""
    source = sources[0]
    if isinstance(source, Value) and np.array_equal(numbers.reshape(-1), np.arange(1, source.size + 1)):
        return source.reshaped(numbers.shape)
    starts = list(itertools.accumulate((math.prod(given.shape) for given in sources), initial=0))
    if numbers.dtype.kind not in "iu" or (numbers.size and not 0 <= numbers.min() <= numbers.max() <= starts[-1]):
        raise UnsupportedError("combines numbers where it is expected to move them")
    flat = numbers.reshape(-1).astype(np.int64)
    rest = np.where(flat == 0, np.float32(call.get("value", 0.0)), np.float32(0))
    parts: list[tuple[Value, np.ndarray]] = []
    for start, given in zip(starts, sources, strict=False):
        mine = (flat > start) & (flat <= start + math.prod(given.shape))
        if mine.any() and isinstance(given, Value):
            parts.append((given, np.where(mine, flat - start - 1, -1)))
        elif mine.any():
            assert isinstance(given, np.ndarray)
            rest = np.where(mine, given.reshape(-1)[np.where(mine, flat - start - 1, 0)], rest)
    return call.build.joined(parts, rest, numbers.shape) if parts else rest.reshape(numbers.shape)


def _moves(operator: str, *versions: int, data: Sequence[int] = (0,)) -> None:
    converts(operator, *versions)(lambda call: moved(call, data))


_moves("Concat", 1, 4, 11, 13, data=(-1,))
_moves("Slice", 1, 10, 11, 13)
_moves("Flatten", 1, 9, 11, 13, *SINCE_21)
_moves("Transpose", 1, 13, *SINCE_21)
_moves("Split", 2, 11, 13, 18)
_moves("Gather", 1, 11, 13)
_moves("GatherElements", 11, 13)
_moves("GatherND", 11, 12, 13)
_moves("Expand", 8, 13)
_moves("Tile", 6, 13)
_moves("Pad", 2, 11, 13, 18, 19, *SINCE_21, data=(0, 2))
_moves("DepthToSpace", 1, 11, 13, 28)
_moves("SpaceToDepth", 1, 13, 28)
_moves("Trilu", 14)
_moves("Compress", 9, 11, 28)
_moves("ReverseSequence", 10, 28)
_moves("CenterCropPad", 18)
_moves("ScatterElements", 11, 13, 16, 18, data=(0, 2))
_moves("ScatterND", 11, 13, 16, 18, data=(0, 2))


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


@converts("Reshape", 1, 5, 13, 14, 19, *SINCE_21)
def _reshape(call: Call) -> Value:
    shape = call.value().shape
    target = call.get("shape", ()) if call.version < 5 else call.constant(1).reshape(-1).tolist()
    sizes = [shape[i] if size == 0 and not call.get("allowzero", 0) else int(size) for i, size in enumerate(target)]
    if sizes.count(-1) > 1 or min(sizes, default=1) < -1:
        raise InputError(f"the target shape {sizes}")
    if -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(shape) // max(1, -math.prod(sizes))
    return call.value().reshaped(sizes)


# The evaluator takes axes that are not sorted for others.


def _axes(call: Call) -> list[int] | None:
    """Return the axes of Squeeze or Unsqueeze: an attribute before version 13, an input since then."""
    given = call.get("axes", None) if call.version < 13 else call.optional(1)
    return None if given is None else [int(axis) for axis in np.asarray(given).reshape(-1)]


@converts("Squeeze", 1, 11, 13, *SINCE_21)
def _squeeze(call: Call) -> Value:
    shape, given = call.value().shape, _axes(call)
    axes = {i for i, n in enumerate(shape) if n == 1} if given is None else {axis_of(a, len(shape)) for a in given}
    if any(shape[axis] != 1 for axis in axes):
        raise InputError(f"squeezes axes {sorted(axes)} of shape {shape}")
    return call.value().reshaped([size for i, size in enumerate(shape) if i not in axes])


@converts("Unsqueeze", 1, 11, 13, *SINCE_21)
def _unsqueeze(call: Call) -> Value:
    given = _axes(call)
    if given is None:
        raise InputError("its axes are missing")
    rank = len(call.value().shape) + len(given)
    axes = {axis_of(axis, rank) for axis in given}
    if len(axes) < len(given):
        raise InputError(f"the axes {given} name one axis twice")
    rest = iter(call.value().shape)
    return call.value().reshaped([1 if i in axes else next(rest) for i in range(rank)])
