"""Operators that only move numbers, or change the shape of a tensor and none of its numbers.

Each element of a result is an element of an input, or a constant. What moves numbers is read by running it, in the
standard's reference evaluator, on the numbers of its inputs' elements in place of the elements. What comes out says for
each element of the result where it comes from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import torch

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.onnx.call import Call, Result, Value, converts
from verifiable_relu.network.onnx.constants import evaluated

SINCE_21 = (21, 23, 24, 25)
"""Since opset 21 these versions of the operators below have added nothing but element types."""


def moves(operator: str, *versions: int, data: Sequence[int] = (0,)) -> None:
    """Register an operator as one that only moves numbers.

    Args:
        operator: of the standard domain.
        versions: of it that are read.
        data: the places of the inputs whose elements are moved; the others must be constants. −1: all of them.
    """
    converts(operator, *versions)(lambda call: move(call, data))


@dataclass(frozen=True)
class Numbered:
    """Inputs whose elements are numbered, one input after another, from 1 on."""

    inputs: list[Result] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])

    def add(self, call: Call, given: Result) -> np.ndarray:
        """The numbers of an input's elements, in its ONNX shape."""
        shape, start = call.shape(given), self.starts[-1]
        self.inputs.append(given)
        self.starts.append(start + math.prod(shape))
        return np.arange(start + 1, self.starts[-1] + 1).reshape(shape)


def move(call: Call, data: Sequence[int]) -> list[Result]:
    """The results of an operator that only moves numbers, by what it does to the numbers of its inputs' elements."""
    if call.get("reduction", b"none") != b"none":
        raise UnsupportedError(f"its attribute reduction = {call.get('reduction', None)}")
    numbered = Numbered()
    inputs: list[np.ndarray | None] = []
    for position, given in enumerate(call.inputs):
        if given is not None and (position in data or -1 in data):
            inputs.append(numbered.add(call, given))
        else:
            inputs.append(call.optional(position))
    node = _without_value(call.node)
    found = evaluated(node, inputs, call.opset)
    if call.op.startswith("Scatter") and not np.isin(np.asarray(inputs[2]), found[0]).all():
        raise UnsupportedError("writes one element twice")
    return [moved(call, numbered, numbers, call.get("value", 0.0)) for numbers in found]


def _without_value(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node without the attribute by which old versions of Pad name a number."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    del made.attribute[:]
    made.attribute.extend(attribute for attribute in node.attribute if attribute.name != "value")
    return made


def moved(call: Call, numbered: Numbered, numbers: np.ndarray, value: float = 0.0) -> Result:
    """The tensor whose elements are those of some inputs, by their numbers, or ``value`` where the number is 0.

    Args:
        call: the node that is read.
        numbered: the inputs.
        numbers: in the ONNX shape of the result.
        value: a float32 number.

    Raises:
        UnsupportedError: if the numbers are not those of elements.
    """
    if not np.issubdtype(numbers.dtype, np.integer) or (
        numbers.size and not 0 <= numbers.min() <= numbers.max() < (numbered.starts[-1] + 1)
    ):
        raise UnsupportedError("combines numbers where it is expected to move them")
    flat = numbers.reshape(-1).astype(np.int64)
    rest = np.where(flat == 0, np.float32(value), np.float32(0))
    parts: list[tuple[int, np.ndarray, np.ndarray]] = []
    for given, start, end in zip(numbered.inputs, numbered.starts, numbered.starts[1:], strict=False):
        mine = (flat > start) & (flat <= end)
        index = np.where(mine, flat - start - 1, 0)
        if isinstance(given, Value):
            if mine.any():
                parts.append((given.index, mine, index))
        elif mine.any():
            rest = np.where(mine, given.reshape(-1)[index], rest)
    if not parts:
        return rest.reshape(numbers.shape)
    source, mine, index = parts[0]
    if len(parts) == 1 and mine.all() and np.array_equal(index, np.arange(call.build.size(source))):
        return call.reshaped(Value(source, False), numbers.shape)
    total = call.sparse(source, index, mine.astype(np.float32), numbers.shape, rest)
    for source, mine, index in parts[1:]:
        part = call.sparse(source, index, mine.astype(np.float32), numbers.shape)
        total = Value(call.build.add(total.index, part.index, call.name), total.leading)
    return total


def expanded(call: Call, x: Value, shape: Sequence[int]) -> Value:
    """x broadcast to an ONNX shape.

    Raises:
        UnsupportedError: if it does not broadcast.
    """
    if call.shape(x) == tuple(shape):
        return x
    numbered = Numbered()
    try:
        numbers = np.broadcast_to(numbered.add(call, x), shape)
    except ValueError:
        raise UnsupportedError(f"broadcasts a value of shape {call.shape(x)} to {tuple(shape)}") from None
    found = moved(call, numbered, numbers)
    assert isinstance(found, Value)
    return found


def ordered(call: Call, x: Value, axes: Sequence[int]) -> Value:
    """x with its ONNX axes in another order; result axis i is axis ``axes[i]`` of x.

    Raises:
        InputError: if ``axes`` is no order of the axes of x.
    """
    shape = call.shape(x)
    if sorted(axes) != list(range(len(shape))):
        raise InputError(f"the axes {tuple(axes)} of shape {shape}")
    if list(axes) == sorted(axes):
        return x
    if x.leading and axes[0] == 0:
        return Value(call.build.permute(x.index, tuple(a - 1 for a in axes[1:]), call.name), True)
    whole = call.build.reshape(x.index, shape, call.name)
    found = Value(call.build.permute(whole, tuple(axes), call.name), False)
    return call.reshaped(found, [shape[a] for a in axes])


class GatheredRows:
    """x as rows of numbers that are taken together.

    Args:
        call: the node that is read.
        x: the value.
        axes: of its ONNX shape, along which a row's numbers lie.

    Attributes:
        count: the number of rows.
        length: of each.
        index: the node of the rows, of shape (count, length).
    """

    def __init__(self, call: Call, x: Value, axes: Sequence[int]) -> None:
        self._call, self._shape = call, call.shape(x)
        self._order = [*(axis for axis in range(len(self._shape)) if axis not in axes), *axes]
        moved = ordered(call, x, self._order)
        self.length = math.prod(self._shape[axis] for axis in axes)
        self.count = math.prod(self._shape) // self.length
        self.index = call.build.reshape(moved.index, (self.count, self.length), call.name)

    def back(self, index: int) -> Value:
        """A node of shape (count, length) as a value of the shape of x."""
        call = self._call
        moved = call.reshaped(Value(index, False), [self._shape[axis] for axis in self._order])
        return ordered(call, moved, sorted(range(len(self._order)), key=self._order.__getitem__))

    def along(self, array: np.ndarray) -> np.ndarray:
        """An array of the shape of x as rows, (count, length)."""
        return array.transpose(self._order).reshape(self.count, self.length)

    def repeated(self, index: int) -> int:
        """A node of one number for each row, as often as the row is long."""
        places = np.repeat(np.arange(self.count), self.length)
        build, ones = self._call.build, torch.ones(len(places), 1)
        shape = (self.count, self.length)
        return build.sparse(index, torch.from_numpy(places)[:, None], ones, None, shape, self._call.name)


moves("Concat", 1, 4, 11, 13, data=(-1,))
moves("Slice", 1, 10, 11, 13)
moves("Split", 2, 11, 13, 18)
moves("Gather", 1, 11, 13)
moves("GatherElements", 11, 13)
moves("GatherND", 11, 12, 13)
moves("Expand", 8, 13)
moves("Tile", 6, 13)
moves("Pad", 2, 11, 13, 18, 19, *SINCE_21, data=(0, 2))
moves("DepthToSpace", 1, 11, 13, 28)
moves("SpaceToDepth", 1, 13, 28)
moves("Trilu", 14)
moves("Compress", 9, 11, 28)
moves("ReverseSequence", 10, 28)
moves("CenterCropPad", 18)
moves("ScatterElements", 11, 13, 16, 18, data=(0, 2))
moves("ScatterND", 11, 13, 16, 18, data=(0, 2))


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
