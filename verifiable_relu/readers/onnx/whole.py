"""Whole numbers: the computed tensors that hold them, their use as indices, and quantised operators.

A tensor of the file is known to hold whole numbers by the operator that makes it, since a division of such numbers, or
a sum of those of few bits, means something else than that of real ones.

The elements that a Slice with a computed start takes are one of finitely many choices, since ends beyond an axis count
as the axis' own; a Gather beyond an axis has no result. So what such operators make of constants is a table, with an
axis for each computed number; what comes after is computed choice by choice, once for each that differs. Where a table
meets a computed tensor it becomes the sum, over what it can be, of that times whether the numbers say so.

A quantised number is a whole one of few bits, less a zero point, times a scale.
QuantizeLinear is the whole number next to x/s (halves go to the even one) plus the zero point, kept within its type's
range: a division, a function that jumps, and two ReLUs. What computes with such numbers does so exactly, by its
definition in the standard: a product of matrices is one of whole numbers, its result is rescaled, rounded and clipped.
The forms of com.microsoft compute with the numbers that theirs stand for, and quantise the result, which is how
onnxruntime defines them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.linear import Diagonal, Gather
from verifiable_relu.ir.network import Affine, Elementwise
from verifiable_relu.readers.builder import OpBuilder, Value, places, require_few, tensor
from verifiable_relu.readers.derived import exact_product, exact_sum
from verifiable_relu.readers.onnx.call import RUNTIME, NodeCall, Result, axis_of, converts
from verifiable_relu.readers.onnx.constants import MOVING, Constant, along, limits
from verifiable_relu.readers.onnx.elementwise import (
    FLOATS,
    SINCE_21,
    added,
    bounded,
    inverse,
    is_positive,
    is_zero,
    stepped,
    times,
)

MOST_CANDIDATES = 64
"""Most numbers in an ArgMax or ArgMin: each is compared with each."""

_DECIDES = {"And", "ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "Xor"}
_WRAPS = {"Abs", "Add", "Gemm", "MatMul", "Mul", "Neg", "ReduceSum", "Sub", "Sum"}
_INTEGER = {"ConvInteger", "MatMulInteger"}
_COUNTS = MOVING | _DECIDES | _WRAPS | _INTEGER | {
    "Cast", "CenterCropPad", "Clip", "DequantizeLinear", "Identity", "Max", "MaxPool", "Min", "QGemm", "QuantizeLinear",
    "ReduceMax", "ReduceMin", "Relu", "Sign", "Where",
}  # fmt: skip
"""Operators that mean the same of whole numbers as of real ones, where these do not leave their type's range."""

INDEXED = {"Gather": (1,), "GatherND": (1,), "ScatterND": (1,), "Slice": (1, 2)}
"""The inputs that say where, by operator."""

KEEPS = {"Cast", "Concat", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
"""Operators whose whole numbers are those of their inputs."""

_CHOICES = 1 << 16
"""Most choices of the computed numbers together."""


def note_whole(node: onnx.NodeProto, inputs: Sequence[Result | None], whole: set[str], short: set[str]) -> None:
    """Record whether a node's result consists of whole numbers or truth values.

    To ``whole``, the names of computed tensors of such numbers, the node's are added, and to ``short`` those of few
    bits, whose sums wrap around.

    Raises:
        UnsupportedError: for an operator that may mean something else of such numbers, such as a division, or leave
            the range of short ones.
    """
    operator = node.op_type
    kinds = [isinstance(value, Value) and name in whole for name, value in zip(node.input, inputs, strict=True)]
    if any(kinds) and operator not in _COUNTS and not operator.startswith("QLinear"):
        raise UnsupportedError("this operator on computed whole numbers")
    match operator:
        case "Cast":
            is_whole = not any(attribute.name == "to" and attribute.i in FLOATS for attribute in node.attribute)
        case "DequantizeLinear" | "QuantizeLinear":
            is_whole = operator[0] == "Q"
        case "QGemm":
            is_whole = len(inputs) > 7 and inputs[7] is not None
        case "OneHot" | "Where":
            is_whole = inputs[2].dtype.kind in "iub" if isinstance(inputs[2], np.ndarray) else kinds[2]
        case _:
            is_whole = operator in _DECIDES or any(kinds)
    if not is_whole:
        return
    whole.update(node.output)
    few = not short.isdisjoint(node.input)
    if few and operator in _WRAPS:
        raise UnsupportedError("this operator on computed whole numbers of few bits, which wrap around")
    if operator not in _DECIDES | _INTEGER | {"Cast"} and (few or operator[0] == "Q"):
        short.update(node.output)


# Operators that give or take places


def _origin(build: OpBuilder, x: Value) -> Value:
    """Return elements of an earlier op that compare with each other as those of x do.

    They are the same numbers in other places, or an increasing function makes those of x of them.
    """
    while (x.numbers >= 0).all():
        op, numbers = build.ops[x.op], x.numbers
        if isinstance(op, Affine) and isinstance(op.map, Gather) and op.is_exact and op.bias is None:
            numbers = op.map.index.numpy()[numbers]
        elif not (isinstance(op, Elementwise) and op.function.increasing):
            break
        if (numbers < 0).any():
            break
        x = Value(op.inputs[0], x.shape, numbers.reshape(-1))
    return x


def _extreme_place(call: NodeCall, sign: int) -> Result:
    """Read the place of the largest (``sign`` 1) or smallest number along an axis: the first or the last of several.

    It is the sum over places k of k·max(1 − how many beat the number there, 0). Of two numbers exactly one beats the
    other: the earlier one in a draw, or where the last of several is asked for the later one.
    """
    x, build = call.value(), call.build
    axis, last = axis_of(call.get("axis", 0), len(x.shape)), bool(call.get("select_last_index", 0))
    kept = [1 if i == axis else size for i, size in enumerate(x.shape) if i != axis or call.get("keepdims", 1)]
    numbers = np.moveaxis(places(x), axis, 0).reshape(x.shape[axis], -1)
    count, results = numbers.shape
    if count == 1:
        return np.zeros(kept, np.int64)
    if count > MOST_CANDIDATES:
        raise UnsupportedError(f"a maximum over {count} numbers, more than {MOST_CANDIDATES}")
    pairs = np.array(list(itertools.combinations(range(count), 2)))
    # The first of each pair, which a draw makes the loser, and the other one.
    weak, strong = pairs[:, ::-1].T if not last else pairs.T
    index = np.stack([numbers[weak], numbers[strong]], -1)
    signs = np.broadcast_to(np.array([sign, -sign], np.float32), index.shape)
    won = is_positive(call, build.sparse(_origin(build, x), index, signs, (len(pairs) * results,)))
    # Who is weak is beaten by 1 − won, who is strong by won.
    pair = np.stack([np.flatnonzero((pairs == k).any(1)) for k in range(count)])
    beaten = np.where(weak[pair] == np.arange(count)[:, None], -1.0, 1.0)
    index = pair[:, None, :] * results + np.arange(results)[None, :, None]
    weight = np.broadcast_to(-beaten[:, None, :], index.shape).astype(np.float32)
    bias = np.repeat(1.0 - (beaten < 0).sum(1), results).astype(np.float32)
    best = build.relu(build.sparse(won, index, weight, (count * results,), bias))
    index = np.arange(count * results).reshape(count, results).T
    return build.sparse(best, index, np.tile(np.arange(count, dtype=np.float32), (results, 1)), kept)


converts("ArgMax", 1, 11, 12, 13, group="steps")(functools.partial(_extreme_place, sign=1))
converts("ArgMin", 1, 11, 12, 13, group="steps")(functools.partial(_extreme_place, sign=-1))


@converts("OneHot", 9, 11, group="steps")
def _one_hot(call: NodeCall) -> Value:
    x, depth = stepped(call, "Truncate"), int(call.constant(1).item())
    off, on = call.constant(2)
    axis = axis_of(call.get("axis", -1), len(x.shape) + 1)
    index = np.repeat(np.expand_dims(places(x), axis), depth, axis)
    number = np.moveaxis(np.broadcast_to(np.arange(depth), (*x.shape, depth)), -1, axis)
    # Numbers below 0 count from the end.
    ones, hits = np.ones(index.shape, np.float32), []
    for start in (0, depth):
        away = (start - number).reshape(-1).astype(np.float32)
        hits.append(is_zero(call, call.build.sparse(x, index, ones, index.shape, away)))
    hot = added(call, *hits)
    return added(call, times(call, hot, np.asarray(on)), times(call, inverse(call, hot), np.asarray(off)))


# Computed numbers in the place of constant ones


@dataclass(frozen=True, eq=False)
class ValueTable:
    """A tensor that depends on a few computed whole numbers alone.

    Attributes:
        keys: the ops of these numbers, each with the least and the largest number that the table distinguishes: beyond
            these the table is constant.
        arrays: the possible values of the tensor.
        which: of all choices of the numbers the array, by its place; an axis for each number.
    """

    keys: dict[int, tuple[int, int]]
    arrays: list[np.ndarray]
    which: np.ndarray

    @staticmethod
    def of_input(call: NodeCall, inputs: Sequence[Any], offset: np.ndarray, parts: dict[int, np.ndarray]) -> ValueTable:
        """Return index numbers into the first of a node's inputs.

        They are an ``offset``, to which each op of one element adds its number at some places: ``parts`` are 1 there.
        """
        shapes = [a.shape for a in getattr(inputs[0], "arrays", [inputs[0]])]
        if any(len(shape) != len(shapes[0]) for shape in shapes):
            raise UnsupportedError("an index whose rank depends on computed numbers")
        sizes = np.array(shapes).max(0)
        if call.op == "Gather":
            sizes = sizes[call.get("axis", 0)]
        elif call.op != "Slice":
            sizes = sizes[: offset.shape[-1]]
        else:
            axes = inputs[3] if len(inputs) > 3 else np.arange(offset.size)
            if not isinstance(axes, np.ndarray):
                raise UnsupportedError("axes that are computed")
            sizes = sizes[axes.reshape(-1)].max()
        reach = int(sizes.max()) + int(np.abs(offset).max(initial=0)) + 1
        keys = dict.fromkeys(sorted(parts), (-reach, reach))
        domain, arrays = _domain(keys), []
        for values in itertools.product(range(-reach, reach + 1), repeat=len(keys)):
            array = offset + sum(value * parts[key] for key, value in zip(keys, values, strict=True))
            # Beyond an axis a slice ends with it. All others have no result there: any will do.
            arrays.append(array if call.op == "Slice" else array.clip(-sizes, sizes - 1))
        return ValueTable(keys, arrays, np.arange(len(arrays)).reshape(domain))

    def along(self, keys: dict[int, tuple[int, int]]) -> np.ndarray:
        """Return ``which`` for choices of these numbers, its own among them, of ranges that are no smaller."""
        found = self.which
        for axis, (key, (low, high)) in enumerate(self.keys.items()):
            least, most = keys[key]
            found = found.take((np.arange(least, most + 1).clip(low, high) - low), axis)
        order = [list(self.keys).index(key) for key in keys if key in self.keys]
        missing = [axis for axis, key in enumerate(keys) if key not in self.keys]
        return np.broadcast_to(np.expand_dims(found.transpose(order), missing), _domain(keys))


def _domain(keys: dict[int, tuple[int, int]]) -> tuple[int, ...]:
    """Return the number of possible values of each key."""
    domain = tuple(high - low + 1 for low, high in keys.values())
    if math.prod(domain) > _CHOICES:
        raise UnsupportedError(f"a result that depends on whole numbers in more than {_CHOICES:,} ways")
    return domain


def _choices(inputs: Sequence[Any]) -> tuple[dict[int, tuple[int, int]], list[list[Any]], np.ndarray]:
    """Return the numbers on which some inputs depend, with ranges; the inputs as they can be; and which when."""
    tables = [each for each in inputs if isinstance(each, ValueTable)]
    keys: dict[int, tuple[int, int]] = {}
    for key, (low, high) in itertools.chain.from_iterable(table.keys.items() for table in tables):
        least, most = keys.get(key, (low, high))
        keys[key] = min(low, least), max(high, most)
    every = np.stack([table.along(keys).reshape(-1) for table in tables])
    different, which = np.unique(every, axis=1, return_inverse=True)
    found = []
    for chosen in different.T:
        arrays = iter([table.arrays[k] for table, k in zip(tables, chosen, strict=True)])
        found.append([next(arrays) if isinstance(each, ValueTable) else each for each in inputs])
    return keys, found, which.reshape(_domain(keys))


def computed(
    inputs: Sequence[Any], compute: Callable[[list[Any]], Sequence[Constant]]
) -> list[ValueTable | np.ndarray]:
    """Return the results of a function of constants and tables: tables, or constants where all are alike."""
    keys, cases, which = _choices(inputs)
    made: list[ValueTable | np.ndarray] = []
    for mine in zip(*[list(compute(case)) for case in cases], strict=True):
        arrays = [array for array in mine if isinstance(array, np.ndarray)]
        if len(arrays) < len(mine):
            raise UnsupportedError("numbers computed from whole numbers that float64 cannot hold")
        contents = [(str(array.dtype), array.shape, array.tobytes()) for array in arrays]
        different = dict(zip(contents, arrays, strict=True))
        numbers = {content: number for number, content in enumerate(different)}
        places = np.array([numbers[content] for content in contents])
        made.append(arrays[0] if len(different) == 1 else ValueTable(keys, [*different.values()], places[which]))
    return made


def selected(call: NodeCall, table: ValueTable) -> Value:
    """Return a table as a computed tensor: its most frequent array, and the difference for every other choice made.

    Where float64 rounds a difference, it is the sum over all choices of what it is, if that is made.
    """
    shape = table.arrays[0].shape
    if any(array.shape != shape for array in table.arrays):
        raise UnsupportedError("a shape that depends on computed numbers")
    wide = [array.reshape(-1).astype(np.float64) for array in table.arrays]
    if any((many.astype(a.dtype) != a.reshape(-1)).any() for many, a in zip(wide, table.arrays, strict=True)):
        raise UnsupportedError("a table of whole numbers that float64 does not hold")
    usual = int(np.bincount(table.which.reshape(-1)).argmax())
    parts, base = [exact_sum(array, -wide[usual]) for array in wide], wide[usual]
    if any(part is None for part in parts):
        usual, parts, base = -1, [*wide], np.zeros_like(base)
    # Numbers that never make a difference are one choice.
    small, hits = table.which, []
    for axis, (key, (low, high)) in enumerate(table.keys.items()):
        rows = np.moveaxis(small, axis, 0).reshape(small.shape[axis], -1)
        _, first, same = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        small = small.take(first, axis)
        hits.append(_hits(call, key, low, high, same.reshape(-1), len(first)))
    cells = np.argwhere(small != usual)
    total = call.build.sum(*(call.build.moved(hit, cells[:, axis]) for axis, hit in enumerate(hits)))
    if len(hits) > 1:
        total = call.build.relu(added(call, total, np.asarray(1 - len(hits), np.float32)))
    arrays = np.stack([part for k in small[tuple(cells.T)] if (part := parts[k]) is not None], 1)
    place, weight = _nonzero(arrays)
    return call.build.sparse(total, place, weight, shape, base)


def _hits(call: NodeCall, key: int, low: int, high: int, same: np.ndarray, count: int) -> Value:
    """Return for each of some sets whether it has a computed whole number, (count,).

    The numbers from ``low`` to ``high``, whose ends count for what is beyond, are in the sets ``same``, (range,).
    """
    within = bounded(call, bounded(call, Value(key, (1,)), float(low), 1), float(high), -1)
    each = call.build.moved(within, np.zeros(len(same), np.int64))
    equal = is_zero(call, added(call, each, -np.arange(low, high + 1).astype(np.float32)))
    place, weight = _nonzero((same == np.arange(count)[:, None]).astype(np.float32))
    return call.build.sparse(equal, np.where(weight, place, 0), weight, (count,))


def _nonzero(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns and the numbers of what is not 0 in each row, as many as the fullest row has."""
    terms = int((matrix != 0).sum(1).max())
    require_few(terms * len(matrix))
    place = np.argsort(matrix == 0, axis=1, kind="stable")[:, :terms]
    return place, np.take_along_axis(matrix, place, 1)


def choice_sum(call: NodeCall, inputs: Sequence[Any], convert: Callable[[list[Any]], Result]) -> Value:
    """Return the sum, over the possible values of inputs, of the node's result times their indicator."""
    keys, cases, which = _choices(inputs)
    hit = selected(call, ValueTable(keys, list(np.eye(len(cases), dtype=np.float32)), which))
    parts = []
    for number, case in enumerate(cases):
        made = convert(case)
        parts.append(times(call, call.build.moved(hit, np.full(made.shape, number)), made))
    return call.build.sum(*parts)


# Quantised operators

_PRECISE = {0: None, onnx.TensorProto.FLOAT: None}
"""The types in which scales and results may be asked for; 0 is none."""


@converts("QuantizeLinear", 10, 13, 19, *SINCE_21, 28, group="steps")
@converts(f"{RUNTIME}.QuantizeLinear", 1, group="steps")
def _quantize(call: NodeCall) -> Value:
    call.choice("precision", 0, _PRECISE)
    return _quantised(call, call.value(), 1)


@converts("DequantizeLinear", 10, 13, 19, *SINCE_21, 28)
@converts(f"{RUNTIME}.DequantizeLinear", 1)
def _dequantize(call: NodeCall) -> Result:
    call.choice("output_dtype", 0, _PRECISE)
    return _dequantised(call, call.value(), call.constant(1), call.optional(2))


def _quantised(call: NodeCall, x: Value, start: int) -> Value:
    """Return the whole numbers that stand for x, by the scale and the zero point that are inputs from ``start`` on."""
    build, scale, zero = call.build, along(call.constant(start), x.shape, call.attributes), call.optional(start + 1)
    kind = call.get("output_dtype", 0) or onnx.TensorProto.UINT8
    low, high = limits(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind)) if zero is None else zero.dtype)
    at = build.function(build.divided(x, _tensor(scale)), "Round")
    moved = np.zeros((), np.int32) if zero is None else along(zero, x.shape, call.attributes).astype(np.int32)
    # Kept above low − zero and below high − zero, and moved by zero: high − relu(high − low − relu(· − low + zero)).
    above = build.relu(build.scale(at, center=_tensor(low - moved)))
    within = build.relu(build.scale(above, -1.0, shift=float(high - low)))
    return build.scale(within, -1.0, shift=float(high))


def _dequantised(call: NodeCall, x: Result, scale: np.ndarray, zero: np.ndarray | None) -> Result:
    """Return the numbers for which whole ones stand; scale and zero point are of one number, or of an axis."""
    scale = along(scale, x.shape, call.attributes)
    zero = None if zero is None else along(zero, x.shape, call.attributes)
    if not isinstance(x, Value):
        return _product(np.asarray(_centred(call, x, zero)), scale)
    build, op = call.build, call.build.ops[x.op]
    factor, center = _tensor(scale), _tensor(np.zeros((), np.int32) if zero is None else zero)
    turned = isinstance(op, Affine) and isinstance(op.map, Diagonal) and bool((op.map.weight == -1).all())
    if turned and x.index is None and isinstance(op, Affine) and op.is_exact:
        # high − r less the zero point is −(r − (high − zero)).
        high = 0.0 if op.bias is None else op.bias.reshape(x.shape)
        center, factor = high - build.constant(center, x.shape).reshape(x.shape), -factor
        x = Value(op.inputs[0], x.shape)
    # A whole number less another is exact: of what runs, the product with the scale alone is rounded.
    return build.scale(build.scale(x, center=center), factor)


def _centred(call: NodeCall, x: Result | None, zero: np.ndarray | None) -> Result:
    """Return whole numbers less their zero point, which broadcasts against them."""
    if x is None:
        raise UnsupportedError("an operand is missing")
    if isinstance(x, Value):
        return x if zero is None or not zero.any() else call.build.scale(x, center=_tensor(zero))
    limits(x.dtype)
    return x.astype(np.int32) - (0 if zero is None else zero.astype(np.int32))


def _tensor(numbers: np.ndarray) -> Tensor:
    return tensor(np.asarray(numbers if numbers.dtype.kind in "fiu" else numbers.astype(np.int32)))


def _product(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the product of scales, or of whole numbers and a scale, which float64 must hold exactly."""
    whole = first.astype(np.int32) if first.dtype.kind in "iu" else first
    if whole.dtype.kind == "i" and np.abs(whole).max(initial=0) < 1 << 24:
        whole = whole.astype(np.float32)
    found = exact_product(whole, second)
    if found is None:
        raise UnsupportedError("a product of scales that is rounded")
    return found


def _parameters(numbers: np.ndarray | None, behind: int) -> np.ndarray:
    """Return numbers for the places of an axis with some axes ``behind`` it; 0 where they are left out.

    A single number has no axes, and numbers of several axes keep these.
    """
    found = np.zeros((), np.int32) if numbers is None else numbers
    found = found.reshape(()) if found.size == 1 else found
    return found[..., *(None,) * behind] if found.ndim == 1 else found


def _integer(call: NodeCall, operator: str, second: int, bias: int | None = None, start: int = 9) -> Value:
    """Read a product of whole numbers, whose result may be rescaled and quantised.

    Args:
        operator: of the standard, that multiplies.
        second: position of the second operand. Behind 3 operands have a scale and a zero point each, before a zero
            point alone, behind them both.
        bias: its position.
        start: of the result's scale and zero point.
    """
    right, behind = call.inputs[second], int(operator == "MatMul")
    rank, alpha = 0 if right is None else len(right.shape), call.get("alpha", 1.0)
    # A row of Gemm's right matrix as it is stored is a column of the product only if it is transposed.
    own = {"MatMul": 0, "Conv": rank - 1, "Gemm": int(bool(call.get("transB", 0)))}[operator]
    zero = call.optional(5 if second == 3 else 3)
    centred = [_centred(call, call.inputs[0], _parameters(call.optional(2), behind))]
    centred.append(_centred(call, right, _parameters(zero, own)))
    attributes = {**call.attributes, "alpha": 1.0, "beta": 1.0}
    inputs = centred if bias is None else [*centred, call.optional(bias)]
    whole = call.as_operator(operator, 11 if operator == "Conv" else 13, inputs, attributes)
    whole = whole if alpha == 1 else call.build.scale(whole, alpha)
    if second < 3:
        return whole
    first, scales = call.constant(1), call.constant(4)
    if operator != "MatMul" and first.size != 1:
        raise UnsupportedError("several scales of its left operand")
    if operator == "Gemm" and zero is not None and zero.size != scales.size:
        raise UnsupportedError("other zero points than scales of its right operand")
    scale = _product(_parameters(first, behind), _parameters(scales, rank - 2 if operator == "Conv" else 0))
    numbers = call.build.scale(whole, _tensor(scale))
    return numbers if call.optional(start) is None else _quantised(call, numbers, start)


converts("ConvInteger", 10)(lambda call: _integer(call, "Conv", 1))
converts("MatMulInteger", 10)(lambda call: _integer(call, "MatMul", 1))
converts("QLinearConv", 10, group="steps")(lambda call: _integer(call, "Conv", 3, 8, 6))
converts("QLinearMatMul", 10, 21, group="steps")(lambda call: _integer(call, "MatMul", 3, None, 6))
converts(f"{RUNTIME}.QGemm", 1, group="steps")(lambda call: _integer(call, "Gemm", 3, 6, 7))


def _requantised(call: NodeCall, operator: str, version: int, triples: tuple[int, int | None, int]) -> Value:
    """Read an operator of the standard on the numbers for which whole ones stand, and quantise its result.

    Its operands are triples of numbers, scale and zero point; ``triples`` are the first of these inputs, the one behind
    the last, and the result's scale, which its zero point follows.
    """
    call.refuse(channels_last=0)
    first, last, start = triples
    inputs, operands = [], call.inputs[first:last]
    for x, scale, zero in zip(operands[0::3], operands[1::3], (*operands[2::3], None), strict=False):
        if x is None or not isinstance(scale, np.ndarray) or isinstance(zero, Value):
            raise UnsupportedError("a scale or a zero point that is not a constant")
        inputs.append(_dequantised(call, x, scale, zero))
    return _quantised(call, call.as_operator(operator, version, inputs), start)


for _name, _version, _places, _group in (
    ("Add", 14, (0, 6, 6), "steps"),
    ("Mul", 14, (0, 6, 6), "products"),
    ("Sigmoid", 13, (0, 3, 3), "smooth"),
    ("LeakyRelu", 16, (0, 3, 3), "steps"),
    ("AveragePool", 11, (0, 3, 3), "steps"),
    ("GlobalAveragePool", 1, (0, 3, 3), "steps"),
    ("Concat", 13, (2, None, 0), "steps"),
):
    _read = functools.partial(_requantised, operator=_name, version=_version, triples=_places)
    converts(f"{RUNTIME}.QLinear{_name}", 1, group=_group)(_read)
