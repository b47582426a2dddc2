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

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.linear import Gather
from verifiable_relu.ir.network import Affine, Elementwise
from verifiable_relu.readers.builder import Builder, Value
from verifiable_relu.readers.onnx.arithmetic import added, difference, times
from verifiable_relu.readers.onnx.call import Call, Result, axis_of, converts
from verifiable_relu.readers.onnx.functions import bounded, stepped
from verifiable_relu.readers.onnx.moves import SINCE_21, moved

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
_COUNTS = _DECIDES | _MOVES | _WRAPS | _INTEGER | {
    "Cast", "Clip", "DequantizeLinear", "Max", "MaxPool", "Min", "OneHot", "QGemm", "QuantizeLinear", "ReduceMax",
    "ReduceMin", "Relu", "Sign", "Where",
}  # fmt: skip


def note_whole(node: onnx.NodeProto, inputs: Sequence[Result | None], whole: set[str], short: set[str]) -> None:
    """Note if a node's result is of whole numbers or truth values.

    Args:
        node: that is read.
        inputs: constants and values.
        whole: names of computed tensors of such numbers; the node's are added.
        short: those of few bits, sums of which wrap around.

    Raises:
        UnsupportedError: for an operator that may mean something else of such numbers, such as a division, or leave
            the range of short ones.
    """
    operator = node.op_type
    kinds = [isinstance(value, Value) and name in whole for name, value in zip(node.input, inputs, strict=True)]
    if any(kinds) and operator not in _COUNTS and not operator.startswith("QLinear"):
        raise UnsupportedError("of computed whole numbers is not supported")
    if operator == "Cast":
        is_whole = not any(attribute.name == "to" and attribute.i in FLOATS for attribute in node.attribute)
    elif operator in ("DequantizeLinear", "QuantizeLinear"):
        is_whole = operator[0] == "Q"
    elif operator == "QGemm":
        is_whole = len(inputs) > 7 and inputs[7] is not None
    elif operator in ("OneHot", "Where"):
        last = inputs[2]
        is_whole = last.dtype.kind in "iub" if isinstance(last, np.ndarray) else kinds[2]
    else:
        is_whole = operator in _DECIDES or any(kinds)
    if not is_whole:
        return
    whole.update(node.output)
    few = not short.isdisjoint(node.input)
    if few and operator in _WRAPS:
        raise UnsupportedError("of computed whole numbers of few bits, which wrap around")
    if operator not in _DECIDES | _INTEGER | {"Cast"} and (few or operator[0] == "Q"):
        short.update(node.output)


def _not(call: Call, x: Value) -> Value:
    """Return 1 − x."""
    return call.build.scale(x, -1.0, shift=1.0)


def _is_positive(call: Call, x: Value) -> Value:
    if call.build.is_whole(x):
        return bounded(call, bounded(call, x, 0.0, 1), 1.0, -1)
    return call.build.relu(call.build.function(x, "Sign"))


def is_zero(call: Call, x: Value) -> Value:
    """Return whether x = 0, element by element."""
    if call.build.is_whole(x):
        return call.build.relu(_not(call, call.build.size_of(x)))
    return _not(call, call.build.size_of(call.build.function(x, "Sign")))


def _compared(call: Call, of: Callable[[Call, Value], Value], turned: bool, inverted: bool) -> Value:
    left, right = call.inputs[::-1] if turned else call.inputs
    found = of(call, _difference(call, left, right))
    return _not(call, found) if inverted else found


def _difference(call: Call, left: Result | None, right: Result | None) -> Value:
    """Return left − right; whole numbers stay known as such."""
    if isinstance(left, Value) and isinstance(right, np.ndarray):
        return added(call, left, -right.astype(np.result_type(right, np.int8)))
    return difference(call, left, right)


for _operator, _versions, _of, _turned, _inverted in (
    ("Greater", (7, 9, 13), _is_positive, False, False),
    ("Less", (7, 9, 13), _is_positive, True, False),
    ("GreaterOrEqual", (12, 16), _is_positive, True, True),
    ("LessOrEqual", (12, 16), _is_positive, False, True),
    ("Equal", (7, 11, 13, 19), is_zero, False, False),
):
    converts(_operator, *_versions, group="steps")(
        functools.partial(_compared, of=_of, turned=_turned, inverted=_inverted)
    )


@converts("ThresholdedRelu", 10, 22, group="steps")
def _thresholded_relu(call: Call) -> Value:
    # x where x > α, else 0: relu(x − α) + α·[x > α].
    alpha = call.get("alpha", 1.0)
    beyond = call.build.scale(call.value(), shift=-alpha)
    above = call.build.relu(beyond)
    return call.build.sum(above, call.build.scale(_is_positive(call, beyond), alpha)) if alpha else above


@converts("Not", 1)
def _inverse(call: Call) -> Value:
    return _not(call, call.value())


@converts("And", 7, group="maxima")
def _and(call: Call) -> Value:
    # Of truth values: x + y > 1.
    return call.build.relu(added(call, added(call, *call.inputs), np.asarray(-1, np.float32)))


@converts("Or", 7, group="maxima")
def _or(call: Call) -> Value:
    return bounded(call, added(call, *call.inputs), 1.0, -1)


@converts("Xor", 7, group="maxima")
def _xor(call: Call) -> Value:
    return call.build.size_of(_difference(call, *call.inputs))


@converts("Cast", 6, 9, 13, 19, *SINCE_21, 28, group="steps")
def _cast(call: Call) -> Value:
    # A cast to float32 rounds what onnxruntime computes, as each of its operations does, and is no function of its own.
    to = call.get("to", None)
    if to in FLOATS:
        return call.value()
    if to in WHOLE:
        return stepped(call, "Truncate")
    if to == onnx.TensorProto.BOOL:
        return _not(call, is_zero(call, call.value()))
    known = ", ".join(onnx.TensorProto.DataType.Name(kind).lower() for kind in (*FLOATS, *WHOLE))
    raise UnsupportedError(f"casts a computed value to another type than {known} or bool")


@converts("Where", 9, 16, group="products")
def _where(call: Call) -> Result:
    condition, chosen, other = call.inputs
    if not isinstance(condition, Value):
        return moved(call, (1, 2))[0]
    return added(call, times(call, condition, chosen), times(call, _not(call, condition), other))


def _origin(build: Builder, x: Value) -> Value:
    """Return elements of an earlier op that compare with each other as those of x do.

    They are the same numbers in other places, or an increasing function makes those of x of them.
    """
    while (x.numbers >= 0).all():
        op = build.ops[x.op]
        if isinstance(op, Affine) and isinstance(op.map, Gather) and op.is_exact and op.bias is None:
            numbers = op.map.index.numpy()[x.numbers]
            if (numbers < 0).any():
                break
            x = Value(op.inputs[0], x.shape, numbers.reshape(-1))
        elif isinstance(op, Elementwise) and op.function.increasing:
            x = Value(op.inputs[0], x.shape, x.index)
        else:
            break
    return x


def _extreme_place(call: Call, sign: int) -> Result:
    """Read the place of the largest (``sign`` 1) or smallest number along an axis: the first or the last of several.

    It is the sum over places k of k·max(1 − how many beat the number there, 0). Of two numbers exactly one beats the
    other: the earlier one in a draw, or where the last of several is asked for the later one.
    """
    x, build = call.value(), call.build
    axis, last = axis_of(call.get("axis", 0), len(x.shape)), bool(call.get("select_last_index", 0))
    kept = [1 if i == axis else size for i, size in enumerate(x.shape) if i != axis or call.get("keepdims", 1)]
    numbers = np.moveaxis(np.arange(x.size).reshape(x.shape), axis, 0).reshape(x.shape[axis], -1)
    count, results = numbers.shape
    if count == 1:
        return np.zeros(kept, np.int64)
    if count > MOST_CANDIDATES:
        raise UnsupportedError(f"over {count} numbers, more than {MOST_CANDIDATES}")
    pairs = np.array(list(itertools.combinations(range(count), 2)))
    # The first of each pair, which a draw makes the loser, and the other one.
    weak, strong = pairs[:, ::-1].T if not last else pairs.T
    index = np.stack([numbers[weak], numbers[strong]], -1)
    signs = np.broadcast_to(np.array([sign, -sign], np.float32), index.shape)
    won = _is_positive(call, build.sparse(_origin(build, x), index, signs, (len(pairs) * results,)))
    # Who is weak is beaten by 1 − won, who is strong by won.
    pair = np.stack([np.flatnonzero((pairs == k).any(1)) for k in range(count)])
    beaten = np.where(weak[pair] == np.arange(count)[:, None], -1.0, 1.0)
    index = pair[:, None, :] * results + np.arange(results)[None, :, None]
    weight = np.broadcast_to(-beaten[:, None, :], index.shape).astype(np.float32)
    bias = np.repeat(1.0 - (beaten < 0).sum(1), results).astype(np.float32)
    best = build.relu(build.sparse(won, index, weight, (count * results,), bias))
    index = np.arange(count * results).reshape(count, results).T
    return build.sparse(best, index, np.tile(np.arange(count, dtype=np.float32), (results, 1)), kept)


for _operator, _sign in (("ArgMax", 1), ("ArgMin", -1)):
    converts(_operator, 1, 11, 12, 13, group="steps")(functools.partial(_extreme_place, sign=_sign))


@converts("OneHot", 9, 11, group="steps")
def _one_hot(call: Call) -> Value:
    x, depth = stepped(call, "Truncate"), int(call.constant(1).item())
    off, on = call.constant(2)
    axis = axis_of(call.get("axis", -1), len(x.shape) + 1)
    places = np.repeat(np.expand_dims(np.arange(x.size).reshape(x.shape), axis), depth, axis)
    number = np.moveaxis(np.broadcast_to(np.arange(depth), (*x.shape, depth)), -1, axis)
    # Numbers below 0 count from the end.
    ones, hits = np.ones(places.shape, np.float32), []
    for start in (0, depth):
        away = (start - number).reshape(-1).astype(np.float32)
        hits.append(is_zero(call, call.build.sparse(x, places, ones, places.shape, away)))
    hot = added(call, *hits)
    return added(call, times(call, hot, np.asarray(on)), times(call, _not(call, hot), np.asarray(off)))
