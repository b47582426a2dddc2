"""Constants that an ONNX file computes from constants: shapes, indices, reordered and rescaled parameters.

Nodes that no input of the network reaches are computed once. The standard's own reference evaluator runs those that
move or compare numbers, or compute with whole ones. Those that compute with floating-point numbers are read as if these
were computed, and the ops are evaluated in rational arithmetic (``readers.derived``), since a network is read as a
function in real arithmetic. Only a Cast rounds: that is the operator's purpose. The size of a result is worked out
first: a file of a hundred bytes may ask for terabytes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import torch

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.functions import PiecewiseLinear
from verifiable_relu.ir.linear import Diagonal, Gather
from verifiable_relu.ir.network import Affine, Elementwise, Input, Maximum, Op, Product
from verifiable_relu.readers.builder import OpBuilder, Value
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
from verifiable_relu.readers.onnx.call import CONVERTERS, RUNTIME, NodeCall, converter_of

Constant = np.ndarray | Derived
"""A constant of the file: an array of its numbers, or numbers that no array of floats holds."""

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
    operator, attributes = node.op_type, attributes_of(node)
    if operator not in FOLDED:
        raise UnsupportedError("this operator on constants alone")
    # There is nothing to be off in a tensor without elements.
    inputs = [np.zeros(v.shape, np.float32) if isinstance(v, Derived) and not v.values.size else v for v in inputs]
    arrays = [value for value in inputs if value is not None and not isinstance(value, Derived)]
    derived, first = any(isinstance(value, Derived) for value in inputs), inputs[0] if inputs else None
    if operator in ("DequantizeLinear", "QuantizeLinear"):
        for value in arrays:
            if value.dtype.kind not in "fi":
                limits(value.dtype)
    if isinstance(first, Derived) and operator == "Cast":
        return [cast(first, np.dtype(onnx.helper.tensor_dtype_to_np_dtype(attributes["to"])))]
    # The result of a sum may be wider than the file says: all floats have the widest of their types.
    floating = [value for value in arrays if _is_floating(value)]
    widest = np.result_type(np.float16, *(value.dtype for value in floating))
    rounds = operator in ARITHMETIC and operator not in _CHOOSING and bool(floating)
    if derived or (rounds and (operator == "Gemm" or all(value.size for value in floating))):
        return _exact(node, inputs, attributes, widest, opset)
    given: list[Any] = [value.astype(widest) if _is_floating(value) else value for value in inputs]  # type: ignore[union-attr]
    results = evaluated(node, given, opset)
    if operator == "Cast" and isinstance(first, np.ndarray) and results[0].dtype.kind in "iu":
        info = np.iinfo(results[0].dtype)
        if _is_floating(first) and not np.all(np.isfinite(first) & (first > info.min - 1.0) & (first < info.max)):
            raise UnsupportedError("casts a constant to whole numbers that cannot hold it")
    return results


def _is_floating(value: Any) -> bool:
    return isinstance(value, Derived) or (value is not None and np.issubdtype(value.dtype, np.floating))


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


def _exact(
    node: onnx.NodeProto, inputs: Sequence[Constant | None], attributes: dict[str, Any], like: np.dtype, opset: int
) -> Sequence[Constant]:
    """Return the results of a node in rational arithmetic."""
    if node.op_type == "Range":
        return [settled(_range(*(Derived.from_numbers(value) for value in inputs if value is not None)), like)]
    shaped: list[Any] = [np.zeros(v.shape, like) if _is_floating(v) else v for v in inputs]  # type: ignore[union-attr]
    size, _ = _size(_alone(node, shaped, opset)[0], node, shaped)
    size = max(size, *(math.prod(value.shape) for value in inputs if value is not None))
    if size > MAX_SLOW_ELEMENTS:
        return [_large(node.op_type, inputs, attributes, like, size)]
    if node.op_type == "Mod":
        whole = math.trunc if attributes.get("fmod", 0) else math.floor
        operands = (Derived.from_numbers(value) for value in inputs if value is not None)
        return [settled(selected(lambda a, b: a - b * whole(a / b), *operands), like)]
    return [v if isinstance(v, np.ndarray) else settled(v, like) for v in _as_read(node, inputs, opset)]


def _as_read(node: onnx.NodeProto, inputs: Sequence[Constant | None], opset: int) -> list[Constant]:
    """Return the results of a node by the ops that it is read as where its inputs are computed.

    Such inputs are the numbers that no array holds, the first one of an operator that computes with numbers, and what a
    Gemm adds.
    """
    # A mean is read as a sum times 1/n, which is rounded.
    operator, mean = node.op_type, node.op_type == "ReduceMean"
    converter, version = (CONVERTERS["ReduceSum", 13], 13) if mean else converter_of(node, opset)
    build, numbers, given = OpBuilder((0,), node.name), list[Derived](), list[Any](inputs)
    build.ops.clear()
    for position, value in enumerate(inputs):
        computed = operator in ARITHMETIC and position in ((0, 2) if operator == "Gemm" else (0,))
        if isinstance(value, Derived) or (computed and value is not None):
            numbers.append(Derived.from_numbers(value).moved(np.ravel))
            given[position] = Value(len(build.ops), value.shape)
            build.ops.append(Input(name=node.name, size=math.prod(value.shape)))
    made = converter(NodeCall(build, operator, version, tuple(given), attributes_of(node), node, opset))
    for op in build.ops[len(numbers) :]:
        numbers.append(_value(op, *(numbers[i] for i in op.inputs)))
    results: list[Constant] = []
    for result in [made] if isinstance(made, Value | np.ndarray) else made:
        if isinstance(result, Value):
            # The number −1 is that of a 0 behind the others.
            values = np.array([*numbers[result.op].values, Fraction(0)], object)[result.numbers]
            part = Fraction(result.size, numbers[0].values.size) if mean else 1
            results.append(Derived(np.asarray(values * part), numbers[result.op].error))
        elif result is not None:
            results.append(result)
    return results


def _value(op: Op, *inputs: Derived) -> Derived:
    """Return the numbers that an op makes of its inputs'."""
    if any(2 * one.error > 1 for one in inputs):
        raise UnsupportedError("computes a constant that rounding may have lost")
    x = inputs[0]
    if isinstance(op, Affine):
        map = op.map
        if op.bias_error is not None:
            raise UnsupportedError("adds a constant that is rounded")
        if isinstance(map, Diagonal) and map.divisor is not None:
            found = linear(operator.mul, x, reciprocal(Derived.from_numbers(map.divisor.numpy())))
        elif isinstance(map, Gather):
            found = x.moved(lambda values: map.product(np.ones(1, object), values))
            if op.bias is not None and not bool(op.bias[map.index >= 0].any()):
                # Constants in places of their own.
                gaps, rest = map.index.numpy() < 0, Derived.from_numbers(op.bias.numpy()).values
                return found.moved(lambda values: np.where(gaps, rest, values))
        else:
            weight = Derived(Derived.from_numbers(map.weight.numpy()).values, Fraction(op.weight_error))
            found = linear(map.product, weight, x)
        return found if op.bias is None else linear(operator.add, found, Derived.from_numbers(op.bias.numpy()))
    if isinstance(op, Elementwise):
        if isinstance(op.function, PiecewiseLinear):
            below, above = (Derived.from_numbers(v.numpy()).values for v in (op.function.slope_below, torch.ones(())))
            return linear(operator.mul, Derived(np.where(x.values > 0, above, below)), x)
        if op.function.kind not in _FUNCTIONS:
            raise UnsupportedError(f"{op.function.kind} of constants")
        return _FUNCTIONS[op.function.kind](x)
    if isinstance(op, Maximum):
        return selected(max, *(Derived(x.values[at], x.error) for at in op.candidates.numpy()))
    join = operator.mul if isinstance(op, Product) else operator.add
    return linear(lambda *terms: functools.reduce(join, terms), *inputs)


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


def _scaled(x: Derived, factor: Fraction | float) -> Derived:
    return x.moved(lambda values: values * Fraction(factor))


def _range(start: Derived, limit: Derived, step: Derived) -> Derived:
    if start.error or limit.error or step.error:
        raise UnsupportedError("a range whose ends are known up to rounding only")
    first, end, by = (x.values.item() for x in (start, limit, step))
    count = max(0, math.ceil((end - first) / by))
    if count > MAX_SLOW_ELEMENTS:
        raise UnsupportedError(f"computes a constant of {count} elements, more than {MAX_SLOW_ELEMENTS}")
    return Derived(first + np.arange(count).astype(object) * by)


_ONE = Derived.from_numbers(np.ones((), np.float32))


def _sigmoid(x: Derived) -> Derived:
    return reciprocal(linear(operator.add, _ONE, exponential(_scaled(x, -1))))


_FUNCTIONS: dict[str, Callable[[Derived], Derived]] = {
    "Cube": lambda x: linear(operator.mul, x, linear(operator.mul, x, x)),
    "Exp": exponential,
    "InverseRoot": lambda x: reciprocal(root(x)),
    "Log": logarithm,
    "Reciprocal": reciprocal,
    "Sigmoid": _sigmoid,
    "Sqrt": root,
    "Square": lambda x: linear(operator.mul, x, x),
    "Tanh": lambda x: linear(operator.add, _scaled(_sigmoid(_scaled(x, 2)), 2), _scaled(_ONE, -1)),
}
"""Functions of one variable of constants."""

ARITHMETIC = {
    "Abs", "Add", "Clip", "CumSum", "DequantizeLinear", "Div", "Exp", "Gemm", "Log", "MatMul", "Max", "Mean", "Min",
    "Mod", "Mul", "Neg", "Pow", "Range", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceMean", "ReduceProd", "ReduceSum",
    "ReduceSumSquare", "Relu", "Sigmoid", "Softmax", "Sqrt", "Sub", "Sum", "Tanh",
}  # fmt: skip
"""Operators that compute with numbers: those of constants are computed in rational arithmetic."""

_CHOOSING = {"Abs", "Clip", "Max", "Min", "Neg", "Relu"}
"""Operators that round nothing where floats hold their inputs."""

FOLDED = MOVING | ARITHMETIC | {
    "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Equal", "Floor", "Greater", "GreaterOrEqual", "Identity",
    "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "QuantizeLinear", "ReduceMax", "ReduceMin", "Round", "Sign",
    "Where", "Xor",
}  # fmt: skip
"""Operators that are computed where all their inputs are constant.

Those that round otherwise are not among them.
"""

# The standard's reference evaluator


def evaluated(node: onnx.NodeProto, inputs: Sequence[np.ndarray | None], opset: int) -> list[np.ndarray]:
    """Return the results of the standard's reference evaluator for one node, as many as the node names.

    Raises:
        UnsupportedError: if how large its results are is not known, or they would be too large.
        InputError: if the inputs do not fit the operator.
    """
    # Imported here, because most files compute no constants.
    from onnx.reference import ReferenceEvaluator

    model, feeds = _alone(node, inputs, opset)
    (size, shape), most = _size(model, node, inputs), MAX_SLOW_ELEMENTS if node.op_type in _SLOW else MAX_ELEMENTS
    if size > most:
        raise UnsupportedError(f"computes a constant of {size} elements, more than {most}")
    if node.op_type in _RESHAPES and inputs[0] is not None and shape is not None:
        # Old versions of the evaluator's operators take axes that are not sorted for others.
        if math.prod(shape) != inputs[0].size:
            raise InputError(f"shape {inputs[0].shape} cannot become {tuple(shape)}")
        return [inputs[0].reshape(shape)]
    try:
        if node.op_type == "Pad":
            return [_padded(attributes_of(node), *inputs)]
        with np.errstate(all="ignore"):
            found = ReferenceEvaluator(model).run(None, feeds)
    except InputError:
        raise
    except Exception as error:  # the evaluator lets whatever numpy says through
        raise InputError(f"does not fit its inputs: {error}") from error
    if not all(isinstance(value, np.ndarray | np.generic) for value in found):
        raise UnsupportedError("computes a constant that is no tensor")
    return [np.asarray(value) for value in found]


def _padded(attributes: dict[str, Any], data: Any, pads: Any = None, value: Any = None, axes: Any = None) -> np.ndarray:
    """Return padded data; negative pads, which the evaluator does not know, are applied first."""
    full, mode = np.zeros((2, data.ndim), np.int64), attributes.get("mode", b"constant").decode()
    full[:, range(data.ndim) if axes is None else axes] = np.reshape(attributes.get("pads", pads), (2, -1))
    starts, ends = np.maximum(0, -full[0]), np.array(data.shape) + np.minimum(0, full[1])
    if (starts > ends).any():
        raise UnsupportedError("negative pads take off more than there is")
    kept = data[tuple(map(slice, starts, ends))]
    filled = {"constant_values": attributes.get("value", 0) if value is None else value} if mode == "constant" else {}
    return np.pad(kept, np.maximum(full, 0).T, mode, **filled)


def _alone(
    node: onnx.NodeProto, inputs: Sequence[np.ndarray | None], opset: int
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return a model of one node, whose short inputs are constants: its output's shape may depend on them."""
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
        # Each element of the result is a sum over the smaller input's columns.
        total = max(total, total * min(max(value.shape, default=1) for value in given) >> 8)
    return total, shape
