"""Comparisons, choices and whole numbers: what decides or counts, written with functions that jump, and with ReLUs.

A truth value is 0 or 1, and numbers of an integer type are numbers. With the sign s of a difference d, d > 0 is
max(s, 0) and d = 0 is 1 − |s|. Where d is a whole number whatever the input is, nothing needs to jump: d > 0 is
min(max(d, 0), 1), and d = 0 is max(1 − |d|, 0), which rounding errors of d hardly change.

A number beyond the range of its integer type has no meaning in the standard; here it is the number.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import torch

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import whole
from verifiable_relu.network.nodes import (
    STEPS,
    Curve,
    LeakyRelu,
    Permute,
    Relu,
    Reshape,
    Sparse,
    Step,
)
from verifiable_relu.network.onnx.call import Call, Result, Value, converts
from verifiable_relu.network.onnx.elementwise import added, broadcast, negative, times
from verifiable_relu.network.onnx.moves import SINCE_21, Numbered, axis_of, move
from verifiable_relu.network.onnx.reduce import bounded

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
WHOLE = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)

MOST_CANDIDATES = 64
"""Among so many numbers the place of the largest is looked for: each is compared with each."""

_DECIDES = {"And", "ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "Xor"}
_MOVES = {
    "CenterCropPad", "Compress", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND",
    "Identity", "Pad", "Reshape", "ReverseSequence", "ScatterElements", "ScatterND", "Slice", "SpaceToDepth", "Split",
    "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze",
}  # fmt: skip
_WRAPS = {"Abs", "Add", "Gemm", "MatMul", "Mul", "Neg", "ReduceSum", "Sub", "Sum"}
_INTEGER = {"ConvInteger", "MatMulInteger"}
_QUANTISED = _INTEGER | {"DequantizeLinear", "MaxPool", "QGemm", "QuantizeLinear"}
_COUNTS = _DECIDES | _MOVES | _WRAPS | _QUANTISED | {
    "Cast", "Clip", "Max", "Min", "OneHot", "ReduceMax", "ReduceMin", "Relu", "Sign", "Where",
}  # fmt: skip

ONE, MINUS = torch.tensor(1.0), torch.tensor(-1.0)


def _step(call: Call, x: int, function: str) -> int:
    return call.build.append(Step(name=call.name, inputs=(x,), shape=call.build.shape(x), function=function))


def _stepped(call: Call, function: str) -> Value:
    x = call.value()
    if function != "Sign" and is_whole(call.build, x.index):
        return x
    return Value(_step(call, x.index, function), x.leading)


for _name, _known in STEPS.items():
    converts(_known.operator, *_known.versions, group="steps")(functools.partial(_stepped, function=_name))


def counts(operator: str) -> bool:
    """Whether an operator means the same of numbers of an integer type, or of truth values, as of others."""
    return operator in _COUNTS or operator.startswith("QLinear")


def is_short(operator: str, given: bool) -> bool:
    """Whether a result of whole numbers is of few bits, so that sums of them wrap around.

    Args:
        operator: of the node.
        given: whether an input is.

    Raises:
        UnsupportedError: for an operator that may compute with them beyond their range.
    """
    if given and operator in _WRAPS:
        raise UnsupportedError("of computed whole numbers of few bits, which wrap around")
    return operator not in _DECIDES | _INTEGER | {"Cast"} and (given or operator[0] == "Q")


def is_counted(node: onnx.NodeProto, inputs: Sequence[Result | None], kinds: Sequence[bool]) -> bool:
    """Whether a node's result is of an integer type or of truth values.

    Args:
        node: that is read.
        inputs: constants and values.
        kinds: which of these are computed, and of such a type themselves.
    """
    if node.op_type == "Cast":
        (to,) = (attribute.i for attribute in node.attribute if attribute.name == "to")
        return to not in FLOATS
    if node.op_type in ("DequantizeLinear", "QuantizeLinear"):
        return node.op_type[0] == "Q"
    if node.op_type == "QGemm":
        return len(inputs) > 7 and inputs[7] is not None
    if node.op_type in ("OneHot", "Where"):
        last = inputs[2]
        return kinds[2] if isinstance(last, Value) or last is None else last.dtype.kind in "iub"
    return node.op_type in _DECIDES or any(kinds)


def is_whole(build: Builder, index: int) -> bool:
    """Whether the values of a node are whole numbers whatever the input is, as far as is known."""
    return index in whole(build.nodes)


def _not(call: Call, x: Value) -> Value:
    """1 − x."""
    return Value(call.build.scale(x.index, call.name, scale=MINUS, shift=ONE), x.leading)


def _size(call: Call, x: int) -> int:
    """|x|."""
    return call.build.activation(x, LeakyRelu, call.name, slope=MINUS)


def _positive(call: Call, x: Value) -> Value:
    """Whether x > 0."""
    if is_whole(call.build, x.index):
        return Value(bounded(call, bounded(call, x.index, 0 * ONE, 1), ONE, -1), x.leading)
    return Value(call.build.activation(_step(call, x.index, "Sign"), Relu, call.name), x.leading)


def zero(call: Call, x: Value) -> Value:
    """Whether x = 0."""
    if is_whole(call.build, x.index):
        near = _not(call, Value(_size(call, x.index), x.leading))
        return Value(call.build.activation(near.index, Relu, call.name), x.leading)
    return _not(call, Value(_size(call, _step(call, x.index, "Sign")), x.leading))


def _difference(call: Call, left: Result | None, right: Result | None) -> Value:
    """left − right."""
    x, y = broadcast(call, left, right)
    first = x if isinstance(x, Value) else x.numpy()
    return added(call, first, negative(call, y) if isinstance(y, Value) else -y.numpy())


def _compared(call: Call, of: Callable[[Call, Value], Value], turned: bool, inverted: bool) -> Value:
    left, right = call.inputs[::-1] if turned else call.inputs
    found = of(call, _difference(call, left, right))
    return _not(call, found) if inverted else found


for _operator, _versions, _of, _turned, _inverted in (
    ("Greater", (7, 9, 13), _positive, False, False),
    ("Less", (7, 9, 13), _positive, True, False),
    ("GreaterOrEqual", (12, 16), _positive, True, True),
    ("LessOrEqual", (12, 16), _positive, False, True),
    ("Equal", (7, 11, 13, 19), zero, False, False),
):
    converts(_operator, *_versions, group="steps")(
        functools.partial(_compared, of=_of, turned=_turned, inverted=_inverted)
    )


@converts("ThresholdedRelu", 10, 22, group="steps")
def _thresholded_relu(call: Call) -> Value:
    # x where x > α, else 0: relu(x − α) + α·[x > α].
    x, alpha = call.value(), torch.tensor(call.get("alpha", 1.0))
    beyond = Value(call.build.scale(x.index, call.name, scale=ONE, shift=-alpha), x.leading)
    above = Value(call.build.activation(beyond.index, Relu, call.name), x.leading)
    if not alpha:
        return above
    step = _positive(call, beyond)
    return added(call, above, Value(call.build.scale(step.index, call.name, scale=alpha, shift=0 * ONE), x.leading))


@converts("Not", 1)
def _inverse(call: Call) -> Value:
    return _not(call, call.value())


@converts("And", 7, group="maxima")
def _and(call: Call) -> Value:
    # Of truth values: x + y > 1.
    both = added(call, added(call, *call.inputs), np.asarray(-1, np.float32))
    return Value(call.build.activation(both.index, Relu, call.name), both.leading)


@converts("Or", 7, group="maxima")
def _or(call: Call) -> Value:
    total = added(call, *call.inputs)
    return Value(bounded(call, total.index, ONE, -1), total.leading)


@converts("Xor", 7, group="maxima")
def _xor(call: Call) -> Value:
    difference = _difference(call, *call.inputs)
    return Value(_size(call, difference.index), difference.leading)


@converts("Cast", 6, 9, 13, 19, *SINCE_21, 28, group="steps")
def _cast(call: Call) -> Value:
    return cast(call, call.get("to", None))


def cast(call: Call, to: int | None) -> Value:
    """The node's first input in a type.

    Raises:
        UnsupportedError: for a type of which the values are not known to be these numbers.
    """
    # A cast to float32 rounds what onnxruntime computes, as each of its operations does, and is no function of its own.
    if to in FLOATS:
        return call.value()
    if to in WHOLE:
        return _stepped(call, "Truncate")
    if to == onnx.TensorProto.BOOL:
        return _not(call, zero(call, call.value()))
    known = ", ".join(onnx.TensorProto.DataType.Name(kind).lower() for kind in (*FLOATS, *WHOLE))
    raise UnsupportedError(f"casts a computed value to another type than {known} or bool")


@converts("Where", 9, 16, group="products")
def _where(call: Call) -> Result:
    condition, chosen, other = call.inputs
    if not isinstance(condition, Value):
        return move(call, (1, 2))[0]
    return added(call, times(call, condition, chosen), times(call, _not(call, condition), other))


def origin(build: Builder, index: int, places: np.ndarray) -> tuple[int, np.ndarray]:
    """An earlier node, and those of its elements that compare as some elements of a node do.

    They are the same numbers in other places, or those of which an increasing function makes these.
    """
    while True:
        node = build.nodes[index]
        if isinstance(node, Permute):
            before = np.arange(node.size).reshape(build.shape(node.inputs[0]))
            places = before.transpose(node.axes).reshape(-1)[places]
        elif isinstance(node, Sparse) and node.moves and bool(node.weight.all()):
            places = node.index.numpy()[:, 0][places]
        elif not (isinstance(node, Reshape) or (isinstance(node, Curve) and node.known.increasing)):
            return index, places
        index = node.inputs[0]


def _extreme_place(call: Call, sign: int) -> Result:
    """The place of the largest (``sign`` 1) or smallest number along an axis: the first or the last of several.

    It is the sum over places k of k·max(1 − how many beat the number there, 0). Of two numbers exactly one beats the
    other: the earlier one in a draw, or where the last of several is asked for the later one.
    """
    x = call.value()
    shape = call.shape(x)
    axis, last = axis_of(call.get("axis", 0), len(shape)), bool(call.get("select_last_index", 0))
    kept = [1 if i == axis else size for i, size in enumerate(shape) if i != axis or call.get("keepdims", 1)]
    numbers = np.moveaxis(Numbered().add(call, x) - 1, axis, 0).reshape(shape[axis], -1)
    count, results = numbers.shape
    if count == 1:
        return np.zeros(kept, np.int64)
    if count > MOST_CANDIDATES:
        raise UnsupportedError(f"over {count} numbers, more than {MOST_CANDIDATES}")
    start, numbers = origin(call.build, x.index, numbers)
    pairs = np.array(list(itertools.combinations(range(count), 2)))
    # The first of each pair, which a draw makes the loser, and the other one.
    weak, strong = pairs[:, ::-1].T if not last else pairs.T
    index = np.stack([numbers[weak], numbers[strong]], -1)
    signs = np.broadcast_to(np.array([sign, -sign], np.float32), index.shape)
    won = _positive(call, call.sparse(start, index, signs, (len(pairs) * results,)))
    # Who is weak is beaten by 1 − won, who is strong by won.
    pair = np.stack([np.flatnonzero((pairs == k).any(1)) for k in range(count)])
    beaten = np.where(weak[pair] == np.arange(count)[:, None], -1.0, 1.0)
    index = pair[:, None, :] * results + np.arange(results)[None, :, None]
    weight = np.broadcast_to(-beaten[:, None, :], index.shape).astype(np.float32)
    bias = np.repeat(1.0 - (beaten < 0).sum(1), results).astype(np.float32)
    unbeaten = call.sparse(won.index, index, weight, (count * results,), bias)
    best = call.build.activation(unbeaten.index, Relu, call.name)
    index = np.arange(count * results).reshape(count, results).T
    return call.sparse(best, index, np.tile(np.arange(count, dtype=np.float32), (results, 1)), kept)


for _operator, _sign in (("ArgMax", 1), ("ArgMin", -1)):
    converts(_operator, 1, 11, 12, 13, group="steps")(functools.partial(_extreme_place, sign=_sign))


@converts("OneHot", 9, 11, group="steps")
def _one_hot(call: Call) -> Value:
    x, depth = _stepped(call, "Truncate"), int(call.constant(1).item())
    off, on = call.constant(2)
    shape = list(call.shape(x))
    axis = axis_of(call.get("axis", -1), len(shape) + 1)
    places = np.repeat(np.expand_dims(np.arange(call.build.size(x.index)).reshape(shape), axis), depth, axis)
    number = np.moveaxis(np.broadcast_to(np.arange(depth), (*shape, depth)), -1, axis)
    # Numbers below 0 count from the end.
    hits = []
    for start in (0, depth):
        away = (start - number).reshape(-1).astype(np.float32)
        hits.append(zero(call, call.sparse(x.index, places, np.ones(places.shape, np.float32), places.shape, away)))
    hot = added(call, *hits)
    return added(call, times(call, hot, np.asarray(on)), times(call, _not(call, hot), np.asarray(off)))
