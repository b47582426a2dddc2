"""Constants that an ONNX file computes from constants: shapes, indices, reordered and rescaled parameters.

What no input of the network reaches is computed once. What moves numbers, compares them or computes with whole ones is
left to the standard's own reference evaluator; what computes with floating-point numbers is computed in rational
arithmetic (``readers.derived``), since a network is read as a function in real arithmetic. A Cast alone rounds: that is
what the operator is for. How large a result will be is worked out first: a file of a hundred bytes may ask for
terabytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import onnx

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.readers.derived import (
    Derived,
    cast,
    exact_product,
    exact_sum,
    exponential,
    linear,
    logarithm,
    reciprocal,
    root,
    selected,
    settled,
)

Constant = np.ndarray | Derived
"""A constant of the file: an array of its numbers, or numbers that no array of floats holds."""

RUNTIME = "com.microsoft"
"""The domain of onnxruntime's own operators."""

MAX_ELEMENTS = 1 << 24
"""Most elements of a constant that a file computes."""

MAX_SLOW_ELEMENTS = 1 << 18
"""Most elements of a constant that is computed element by element."""

_SLOW = {"Compress", "GatherElements", "GatherND", "NonZero", "ReverseSequence", "ScatterElements", "ScatterND"}
_RESHAPES = {"Flatten", "Reshape", "Squeeze", "Unsqueeze"}
MOVING = _RESHAPES | _SLOW | {
    "Concat", "ConstantOfShape", "DepthToSpace", "Expand", "EyeLike", "Gather", "OneHot", "Pad", "Range", "Shape",
    "Size", "Slice", "SpaceToDepth", "Split", "Tile", "Transpose", "Trilu",
}  # fmt: skip
"""Operators whose results are elements of their inputs, or places of these."""

FOLDED = MOVING | {
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Clip", "CumSum", "DequantizeLinear",
    "Div", "Equal", "Exp", "Floor", "Gemm", "Greater", "GreaterOrEqual", "Identity", "IsInf", "IsNaN", "Less",
    "LessOrEqual", "Log", "MatMul", "Max", "Mean", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "QuantizeLinear",
    "Reciprocal", "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
    "ReduceSumSquare", "Relu", "Round", "Sigmoid", "Sign", "Softmax", "Sqrt", "Sub", "Sum", "Tanh", "Where",
    "Xor",
}  # fmt: skip
"""Operators that are computed where all their inputs are constant.

Those that round, and for which no rule of ``_ARITHMETIC`` tells how far, are not among them.
"""


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return a node's attributes by their names."""
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def folded(node: onnx.NodeProto, inputs: Sequence[Constant | None], opset: int) -> Sequence[Constant]:
    """Return the results of a node whose inputs are all constant, in real arithmetic.

    Args:
        node: of the standard's operators.
        inputs: as many as the node names; None where one is left out.
        opset: the version of the standard's operators.

    Raises:
        UnsupportedError: if the operator is not known to be a function of its inputs alone, a cast has no defined
            result, a result would have more than ``MAX_ELEMENTS`` elements, or ``MAX_SLOW_ELEMENTS`` where numbers are
            rounded, or how far a result would be off is not known.
        InputError: if the inputs do not fit the operator.
    """
    operator = node.op_type
    if operator not in FOLDED:
        raise UnsupportedError("of constants alone is not supported")
    attributes = attributes_of(node)
    arrays = [value for value in inputs if not isinstance(value, Derived)]
    floating = [value for value in arrays if value is not None and _is_floating(value)]
    if operator in ("DequantizeLinear", "QuantizeLinear"):
        for value in arrays:
            if value is not None and value.dtype.kind not in "fi":
                limits(value.dtype)
    derived, first = len(arrays) < len(inputs), inputs[0] if inputs else None
    if isinstance(first, Derived) and operator == "Cast":
        return [cast(first, np.dtype(onnx.helper.tensor_dtype_to_np_dtype(attributes["to"])))]
    # The result of a sum may be wider than the file says: all floats have the widest of their types.
    widest = np.result_type(np.float16, *(value.dtype for value in floating))
    if operator in _ARITHMETIC and (derived or (operator not in _CHOOSING and floating)):
        return [_arithmetic(node, inputs, attributes, widest, opset)]
    if derived:
        return _moved(node, inputs, attributes, opset)
    given = [v.astype(widest) if v is not None and _is_floating(v) else v for v in arrays]
    results = evaluated(node, given, opset)
    if operator == "Cast" and isinstance(first, np.ndarray) and results[0].dtype.kind in "iu":
        info = np.iinfo(results[0].dtype)
        inside = np.isfinite(first) & (first > info.min - 1.0) & (first < info.max) if _is_floating(first) else True
        if not np.all(inside):
            raise UnsupportedError("casts a constant to whole numbers that cannot hold it")
    return results


def _is_floating(value: Any) -> bool:
    return isinstance(value, Derived) or (value is not None and np.issubdtype(value.dtype, np.floating))


def _moved(
    node: onnx.NodeProto, inputs: Sequence[Constant | None], attributes: dict[str, Any], opset: int
) -> list[Constant]:
    """Return the results of a node that moves numbers, by what it does to the numbers' places."""
    if node.op_type not in _MOVED or attributes.get("reduction", b"none") != b"none" or "value" in attributes:
        raise UnsupportedError("computes with constants that no float64 number is")
    parts = [Derived.of(value) for value in inputs if value is not None and _is_floating(value)]
    numbers = np.concatenate([np.array([Fraction(0)]), *(part.values.reshape(-1) for part in parts)])
    places = numbered_places(node, inputs, [_is_floating(value) for value in inputs], opset)
    error = max(part.error for part in parts)
    return [settled(Derived(np.asarray(numbers[at]), error), np.dtype(np.float32)) for at in places]


def numbered_places(node: onnx.NodeProto, inputs: Sequence[Any], moved: Sequence[bool], opset: int) -> list[np.ndarray]:
    """Return the results of a node that moves elements, on the elements' numbers, which are counted from 1 on.

    For each input, a constant, None, or anything that has a shape where it is ``moved``, that says whether its elements
    are numbered, one input after another.
    """
    places, count = [], 1
    for given, moves in zip(inputs, moved, strict=True):
        size = math.prod(given.shape) if moves else 0
        places.append(np.arange(count, count + size).reshape(given.shape) if moves else given)
        count += size
    return evaluated(node, places, opset)


def _arithmetic(
    node: onnx.NodeProto, inputs: Sequence[Constant | None], attributes: dict[str, Any], like: np.dtype, opset: int
) -> Constant:
    """Return the result of a node that computes with numbers, in rational arithmetic."""
    if node.op_type != "Range":
        shaped: list[Any] = [np.zeros(v.shape, like) if _is_floating(v) else v for v in inputs]  # type: ignore[union-attr]
        size, _ = _size(_alone(node, shaped, opset)[0], node, shaped)
        size = max(size, *(math.prod(value.shape) for value in inputs if value is not None))
        if size > MAX_SLOW_ELEMENTS:
            return _large(node.op_type, inputs, attributes, like, size)
    found = _ARITHMETIC[node.op_type](attributes, *(None if v is None else Derived.of(v) for v in inputs))
    return settled(found, like)


def _large(
    operator: str, inputs: Sequence[Constant | None], attributes: dict[str, Any], like: np.dtype, size: int
) -> np.ndarray:
    """Return the result of an operator on many numbers, which float64 holds exactly."""
    arrays, found = [value for value in inputs if isinstance(value, np.ndarray)], None
    if size <= MAX_ELEMENTS and len(arrays) == len(inputs):
        if operator == "Mul":
            found = exact_product(*arrays)
        elif operator in ("Add", "Sub"):
            found = exact_sum(arrays[0], arrays[1] if operator == "Add" else -arrays[1])
        elif operator == "DequantizeLinear" and arrays[0].dtype.itemsize <= 2 and arrays[1].dtype != np.float64:
            # Differences of short integers are integers of at most 17 bits.
            scale, zero, *_ = (along(v, arrays[0].shape, attributes) for v in (*arrays[1:], np.zeros((), np.int8)))
            found = (arrays[0].astype(np.float64) - zero.astype(np.float64)) * scale.astype(np.float64)
    if found is None:
        raise UnsupportedError(f"computes a constant of {size} numbers that are rounded, more than {MAX_SLOW_ELEMENTS}")
    with np.errstate(over="ignore"):
        narrow = found.astype(like)
    return narrow if bool((narrow == found).all()) else found


def along(values: Any, shape: Sequence[int], attributes: dict[str, Any]) -> Any:
    """Return parameters of a quantisation in a shape that broadcasts against that of the numbers.

    Raises:
        InputError: if they are neither one for all numbers, nor one for each place or each block of an axis.
    """
    if values.size == 1:
        return values.reshape(())
    axis, block = attributes.get("axis", 1), attributes.get("block_size", 0)
    if block and values.ndim == len(shape):
        values = np.repeat(values, block, axis).take(range(shape[axis]), axis)
    elif values.ndim == 1 and not block:
        values = values.reshape([values.size if i == axis % len(shape) else 1 for i in range(len(shape))])
    if values.ndim != len(shape) or any(a not in (1, b) for a, b in zip(values.shape, shape, strict=True)):
        raise InputError(f"scales or zero points of shape {values.shape} for numbers of shape {tuple(shape)}")
    return values


def limits(dtype: np.dtype) -> tuple[int, int]:
    """Return the least and the largest whole number of a type; other types are refused."""
    name, _, bits = str(dtype).rpartition("int")
    if not bits.isdigit() or name not in ("", "u"):
        raise UnsupportedError(f"quantised to {dtype}")
    return (0, 2 ** int(bits) - 1) if name else (-(2 ** (int(bits) - 1)), 2 ** (int(bits) - 1) - 1)


# Rules: from a node's attributes and inputs, None where one is left out, to its result

Rule = Callable[..., Derived]
_ONE = Derived.of(np.ones((), np.float32))
MAX_POWER = 64
"""The largest exponent that is read."""


def _product(x: Derived, y: Derived) -> Derived:
    return linear(lambda a, b: a * b, x, y)


def _sum(*terms: Derived) -> Derived:
    return linear(lambda *arrays: functools.reduce(lambda a, b: a + b, arrays), *terms)


def _scaled(x: Derived, factor: Fraction | float) -> Derived:
    return x.moved(lambda values: values * Fraction(factor))


def _power(_: Any, x: Derived, y: Derived) -> Derived:
    exponents = {Fraction(v) for v in y.values.flat}
    if y.error or len(exponents) != 1 or y.values.size > 1:
        raise UnsupportedError("powers of constants with different exponents")
    exponent = exponents.pop()
    base = x if exponent >= 0 else reciprocal(x)
    if abs(exponent) == Fraction(1, 2):
        return root(base)
    if exponent.denominator > 1 or abs(exponent) > MAX_POWER:
        raise UnsupportedError(f"a constant to the power of {float(exponent):g}")
    return functools.reduce(_product, [base] * abs(int(exponent))) if exponent else base.moved(lambda v: v**0)


def _gemm(attributes: dict[str, Any], a: Derived, b: Derived, c: Derived | None = None) -> Derived:
    left = a.moved(np.transpose) if attributes.get("transA", 0) else a
    right = b.moved(np.transpose) if attributes.get("transB", 0) else b
    found = _scaled(linear(np.matmul, left, right), attributes.get("alpha", 1.0))
    return found if c is None else _sum(found, _scaled(c, attributes.get("beta", 1.0)))


def _reduction(kind: str) -> Rule:
    def reduced(attributes: dict[str, Any], x: Derived, named: Derived | None = None) -> Derived:
        axes = attributes.get("axes") if named is None else [int(axis) for axis in named.values.flat]
        axes = tuple(axes or (() if attributes.get("noop_with_empty_axes", 0) else range(x.values.ndim)))
        along_axes: dict[str, Any] = {"axis": axes, "keepdims": bool(attributes.get("keepdims", 1))}
        if kind == "Prod":
            if x.error:
                raise UnsupportedError("the product of constants that are known up to rounding only")
            return x.moved(lambda v: np.prod(v, **along_axes))
        terms = x.moved(np.abs) if kind == "L1" else _product(x, x) if kind in ("L2", "SumSquare") else x
        total = linear(lambda v: np.sum(v, **along_axes), terms)
        if kind == "Mean":
            return _scaled(total, Fraction(1, math.prod(x.shape[axis] for axis in axes)))
        return root(total) if kind == "L2" else total

    return reduced


def _cumulative(attributes: dict[str, Any], x: Derived, axis: Derived) -> Derived:
    if attributes.get("exclusive", 0) or attributes.get("reverse", 0):
        raise UnsupportedError("its attributes exclusive and reverse")
    return linear(lambda v: np.cumsum(v, axis=int(axis.values.item())), x)


def _dequantised(attributes: dict[str, Any], x: Derived, scale: Derived, zero: Derived | None = None) -> Derived:
    moved = x if zero is None else _sum(x, zero.moved(lambda v: -along(v, x.shape, attributes)))
    return _product(moved, scale.moved(lambda v: along(v, x.shape, attributes)))


def _range(_: Any, start: Derived, limit: Derived, step: Derived) -> Derived:
    if start.error or limit.error or step.error:
        raise UnsupportedError("a range whose ends are known up to rounding only")
    first, end, by = (x.values.item() for x in (start, limit, step))
    count = max(0, math.ceil((end - first) / by))
    if count > MAX_SLOW_ELEMENTS:
        raise UnsupportedError(f"computes a constant of {count} elements, more than {MAX_SLOW_ELEMENTS}")
    found = np.empty(count, dtype=object)
    found[:] = [first + i * by for i in range(count)]
    return Derived(found)


def _modulo(attributes: dict[str, Any], x: Derived, y: Derived) -> Derived:
    whole = math.trunc if attributes.get("fmod", 0) else math.floor
    return selected(lambda a, b: a - b * whole(a / b), x, y)


def _tanh(_: Any, x: Derived) -> Derived:
    power = exponential(_scaled(x, 2))
    return _product(_sum(power, _scaled(_ONE, -1)), reciprocal(_sum(power, _ONE)))


def _softmax(attributes: dict[str, Any], x: Derived) -> Derived:
    if x.values.ndim > 1 and attributes.get("axis", -1) not in (-1, x.values.ndim - 1):
        raise UnsupportedError("a softmax of constants along another axis than the last")
    largest = x.moved(lambda v: np.max(v, axis=-1, keepdims=True))
    powers = exponential(selected(lambda a, b: a - b, x, largest))
    return _product(powers, reciprocal(linear(lambda v: np.sum(v, axis=-1, keepdims=True), powers)))


def _clipped(
    attributes: dict[str, Any], x: Derived, low: Derived | None = None, high: Derived | None = None
) -> Derived:
    for end, name, function in ((low, "min", max), (high, "max", min)):
        given = Derived.of(np.asarray(attributes[name], np.float32)) if end is None and name in attributes else end
        x = x if given is None else selected(function, x, given)
    return x


_ARITHMETIC: dict[str, Rule] = {
    "Abs": lambda _, x: x.moved(np.abs),
    "Add": lambda _, x, y: _sum(x, y),
    "Clip": _clipped,
    "CumSum": _cumulative,
    "DequantizeLinear": _dequantised,
    "Div": lambda _, x, y: _product(x, reciprocal(y)),
    "Exp": lambda _, x: exponential(x),
    "Gemm": _gemm,
    "Log": lambda _, x: logarithm(x),
    "MatMul": lambda _, x, y: linear(np.matmul, x, y),
    "Max": lambda _, *inputs: selected(lambda *values: max(values), *inputs),
    "Mean": lambda _, *terms: _scaled(_sum(*terms), Fraction(1, len(terms))),
    "Min": lambda _, *inputs: selected(lambda *values: min(values), *inputs),
    "Mod": _modulo,
    "Mul": lambda _, x, y: _product(x, y),
    "Neg": lambda _, x: _scaled(x, -1),
    "Pow": _power,
    "Range": _range,
    "Reciprocal": lambda _, x: reciprocal(x),
    **{f"Reduce{kind}": _reduction(kind) for kind in ("L1", "L2", "Mean", "Prod", "Sum", "SumSquare")},
    "Relu": lambda _, x: x.moved(lambda v: (v > 0) * v),
    "Sigmoid": lambda _, x: reciprocal(_sum(_ONE, exponential(_scaled(x, -1)))),
    "Softmax": _softmax,
    "Sqrt": lambda _, x: root(x),
    "Sub": lambda _, x, y: _sum(x, _scaled(y, -1)),
    "Sum": lambda _, *terms: _sum(*terms),
    "Tanh": _tanh,
}
"""Arithmetic of operators on floating-point constants. All others give some of these, or whole numbers."""

_CHOOSING = {"Abs", "Clip", "Max", "Min", "Neg", "Relu"}
"""Operators that round nothing where floats hold their inputs."""

_MOVED = (MOVING | {"Identity", "Where"}) - {"ConstantOfShape", "EyeLike", "NonZero", "Shape", "Size"}


# The standard's reference evaluator


def evaluated(node: onnx.NodeProto, inputs: Sequence[np.ndarray | None], opset: int) -> list[np.ndarray]:
    """Return the results of the standard's reference evaluator for one node, as many as the node names.

    Raises:
        UnsupportedError: if how large its results are is not known, or they would be too large.
        InputError: if the inputs do not fit the operator.
    """
    # Imported here, because most files compute no constants.
    from onnx.reference import ReferenceEvaluator

    if node.op_type == "Pad":
        node, inputs = _cropped(node, inputs)
    model, feeds = _alone(node, inputs, opset)
    (size, shape), most = _size(model, node, inputs), MAX_SLOW_ELEMENTS if node.op_type in _SLOW else MAX_ELEMENTS
    if size > most:
        raise UnsupportedError(f"computes a constant of {size} elements, more than {most}")
    if node.op_type in _RESHAPES and inputs[0] is not None and shape is not None:
        # Old versions of the evaluator's operators take axes that are not sorted for others.
        if math.prod(shape) != inputs[0].size:
            raise InputError(f"reshapes {inputs[0].shape} to {tuple(shape)}")
        return [inputs[0].reshape(shape)]
    try:
        with np.errstate(all="ignore"):
            found = ReferenceEvaluator(model).run(None, feeds)
    except Exception as error:  # the evaluator lets whatever numpy says through
        raise InputError(f"does not fit its inputs: {error}") from error
    if not all(isinstance(value, np.ndarray | np.generic) for value in found):
        raise UnsupportedError("computes a constant that is no tensor")
    return [np.asarray(value) for value in found]


def _cropped(
    node: onnx.NodeProto, inputs: Sequence[np.ndarray | None]
) -> tuple[onnx.NodeProto, Sequence[np.ndarray | None]]:
    """Take off what the negative pads of a Pad do, before anything is padded: the evaluator knows none."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    written = next((attribute for attribute in made.attribute if attribute.name == "pads"), None)
    data, *others = inputs
    pads = np.array(written.ints) if written else others[0] if others else None
    if data is None or pads is None or not (pads < 0).any():
        return node, inputs
    named = others[2] if len(others) > 2 else None
    axes = range(data.ndim) if named is None else [int(axis) % data.ndim for axis in named]
    for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        kept = range(max(0, -int(before)), data.shape[axis] + min(0, int(after)))
        if kept.start > kept.stop:
            raise UnsupportedError("negative pads take off more than there is")
        data = data.take(kept, axis)
    if written:
        written.ints[:] = np.maximum(pads, 0).tolist()
        return made, [data, *others]
    return node, [data, np.maximum(pads, 0), *others[1:]]


def _alone(
    node: onnx.NodeProto, inputs: Sequence[np.ndarray | None], opset: int
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return a model of one node, of which short inputs are constants, since its output's shape may depend on them."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    if node.domain == RUNTIME:
        # Its operators are those of the standard that came later.
        made.domain, opset = "", max(opset, 21)
    del made.input[:], made.output[:]
    made.input.extend("" if value is None else f"x{position}" for position, value in enumerate(inputs))
    made.output.extend(name and f"y{position}" for position, name in enumerate(node.output))
    given = {name: value for name, value in zip(made.input, inputs, strict=True) if value is not None}
    feeds = {name: value for name, value in given.items() if value.size > 1 << 10}
    known = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    constant = [onnx.numpy_helper.from_array(value, name) for name, value in given.items() if name not in feeds]
    results = [onnx.helper.make_empty_tensor_value_info(name) for name in made.output if name]
    graph = onnx.helper.make_graph([made], "constants", known, results, constant)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)]), feeds


def _size(
    model: onnx.ModelProto, node: onnx.NodeProto, inputs: Sequence[np.ndarray | None]
) -> tuple[int, list[int] | None]:
    """Return an upper bound of the elements of a node's results, and of the products that are summed for them.

    The shape of its only result comes second, where shape inference knows it.
    """
    given = [value for value in inputs if value is not None]
    try:
        inferred = onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=True, data_prop=True)
    except Exception as error:  # shape inference has exceptions of its own, and lets others of C++ through
        raise InputError(f"does not fit its inputs: {error}") from error
    total, shape = 0, None
    for output in inferred.graph.output:
        dims = output.type.tensor_type.shape.dim
        if output.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
            shape = [dim.dim_value for dim in dims]
            total += math.prod(shape)
        elif node.op_type in ("Compress", "Concat", "NonZero", "Reshape", "Squeeze"):
            # Their results have no more elements than their inputs, whatever shape inference says.
            total += sum(value.size * max(1, value.ndim) for value in given)
        else:
            raise UnsupportedError("computes a constant whose size is not known")
    if node.op_type in ("MatMul", "Gemm"):
        # The smaller input's columns, of which each element of the result is a sum.
        total = max(total, total * min(max(value.shape, default=1) for value in given) >> 8)
    return total, shape
