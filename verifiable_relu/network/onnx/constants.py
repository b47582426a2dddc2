"""Constants that an ONNX file computes from constants: shapes, indices, reordered and rescaled parameters.

What no input of the network reaches is computed once, by the standard's own reference evaluator and in the file's own
number types, as every runtime does before it runs a network: its result is the network's constant, rounding included.
How large a result will be is worked out first: a file of a hundred bytes may ask for terabytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.onnx.model import array

MAX_ELEMENTS = 1 << 24
"""Most elements of a constant that a file computes."""

MAX_SLOW_ELEMENTS = 1 << 18
"""The same for operators that the reference evaluator computes element by element."""

_ELEMENTWISE = {
    "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Cos", "DequantizeLinear", "Div", "Equal", "Erf", "Exp",
    "Floor", "Greater", "GreaterOrEqual", "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Mean",
    "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softmax",
    "Sqrt", "Sub", "Sum", "Tanh", "Where", "Xor",
}  # fmt: skip
_MOVING = {
    "Concat", "ConstantOfShape", "DepthToSpace", "Expand", "EyeLike", "Flatten", "Gather", "OneHot", "Pad", "Range",
    "Reshape", "Shape", "Size", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze",
}  # fmt: skip
_SUMMING = {
    "ArgMax", "ArgMin", "CumSum", "Gemm", "MatMul", "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin",
    "ReduceProd", "ReduceSum", "ReduceSumSquare",
}  # fmt: skip
SLOW = {"Compress", "GatherElements", "GatherND", "NonZero", "ReverseSequence", "ScatterElements", "ScatterND"}
"""Operators that the reference evaluator computes element by element."""

FOLDED = _ELEMENTWISE | _MOVING | _SUMMING | SLOW
"""Operators that are computed where all their inputs are constant."""


def written(attributes: dict[str, Any], place: str) -> np.ndarray:
    """The value of a ``Constant`` node.

    Raises:
        InputError: if its bytes do not fit its type and shape.
        UnsupportedError: if it is no dense tensor of numbers.
    """
    for attribute, value in attributes.items():
        if attribute == "value":
            return array(value, place)
        if attribute in ("value_float", "value_floats"):
            return np.array(value, np.float32)
        if attribute in ("value_int", "value_ints"):
            return np.array(value, np.int64)
    raise UnsupportedError("a constant that is no tensor of numbers", place=place)


def folded(node: onnx.NodeProto, inputs: Sequence[np.ndarray | None], opset: int) -> list[np.ndarray]:
    """The results of a node whose inputs are all constant.

    Args:
        node: of the standard's operators.
        inputs: as many as the node names; None where one is left out.
        opset: the version of the standard's operators.

    Raises:
        UnsupportedError: if the operator is not known to be a function of its inputs alone, a cast has no defined
            result, or a result would have more than ``MAX_ELEMENTS`` elements.
        InputError: if the inputs do not fit the operator.
    """
    if node.op_type not in FOLDED:
        raise UnsupportedError("of constants alone is not supported")
    results = evaluated(node, inputs, opset)
    given = inputs[0] if inputs else None
    if node.op_type in ("Cast", "CastLike") and given is not None and not _is_defined(given, results[0].dtype):
        raise UnsupportedError("casts a constant to whole numbers that cannot hold it")
    return results


def _is_defined(value: np.ndarray, target: np.dtype) -> bool:
    """Whether the cast of an array to a type has a result that all implementations agree on."""
    if not np.issubdtype(target, np.integer) or not np.issubdtype(value.dtype, np.floating):
        return True
    info = np.iinfo(target)
    return bool((np.isfinite(value) & (value > info.min - 1.0) & (value < info.max)).all())


def evaluated(node: onnx.NodeProto, inputs: Sequence[np.ndarray | None], opset: int) -> list[np.ndarray]:
    """What the standard's reference evaluator computes for one node, as many results as the node names.

    Args:
        node: of the standard's operators.
        inputs: as many as the node names; None where one is left out.
        opset: the version of the standard's operators.

    Raises:
        UnsupportedError: if how large its results are is not known, or they would be too large.
        InputError: if the inputs do not fit the operator.
    """
    # Imported here, because most files compute no constants.
    from onnx.reference import ReferenceEvaluator

    model, feeds = _alone(node, inputs, opset)
    size, most = _elements(model, node, inputs), MAX_SLOW_ELEMENTS if node.op_type in SLOW else MAX_ELEMENTS
    if size > most:
        raise UnsupportedError(f"computes a constant of {size} elements, more than {most}")
    try:
        with np.errstate(all="ignore"):
            found = ReferenceEvaluator(model).run(None, feeds)
    except Exception as error:  # the evaluator lets whatever numpy says through
        raise InputError(f"does not fit its inputs: {error}") from error
    if not all(isinstance(value, np.ndarray | np.generic) for value in found):
        raise UnsupportedError("computes a constant that is no tensor")
    return [np.asarray(value) for value in found]


def _alone(
    node: onnx.NodeProto, inputs: Sequence[np.ndarray | None], opset: int
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node, of which short inputs are constants, since its output's shape may depend on them."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    del made.input[:], made.output[:]
    made.input.extend("" if value is None else f"x{position}" for position, value in enumerate(inputs))
    made.output.extend(name and f"y{position}" for position, name in enumerate(node.output))
    known, constant, feeds = [], [], {}
    for name, value in zip(made.input, inputs, strict=True):
        if value is None:
            continue
        if value.size <= _SHORT:
            constant.append(onnx.numpy_helper.from_array(value, name))
        else:
            kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            known.append(onnx.helper.make_tensor_value_info(name, kind, value.shape))
            feeds[name] = value
    results = [onnx.helper.make_empty_tensor_value_info(name) for name in made.output if name]
    graph = onnx.helper.make_graph([made], "constants", known, results, constant)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)]), feeds


_SHORT = 1 << 10


def _elements(model: onnx.ModelProto, node: onnx.NodeProto, inputs: Sequence[np.ndarray | None]) -> int:
    """An upper bound of the number of elements of a node's results, and of the products that are summed for them.

    Raises:
        InputError: if the inputs do not fit the operator.
        UnsupportedError: if the standard's shape inference does not tell.
    """
    given = [value for value in inputs if value is not None]
    try:
        inferred = onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=True, data_prop=True)
    except Exception as error:  # shape inference has exceptions of its own, and lets others of C++ through
        raise InputError(f"does not fit its inputs: {error}") from error
    total = 0
    for output in inferred.graph.output:
        dims = output.type.tensor_type.shape.dim
        if output.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
            total += math.prod(dim.dim_value for dim in dims)
        elif node.op_type in _NO_LARGER:
            total += sum(value.size * max(1, value.ndim) for value in given)
        else:
            raise UnsupportedError("computes a constant whose size is not known")
    if node.op_type in ("MatMul", "Gemm"):
        # The smaller input's columns, of which each element of the result is a sum.
        return max(total, total * min(max(value.shape, default=1) for value in given) >> 8)
    return total


_NO_LARGER = {"Compress", "NonZero", "Reshape", "Squeeze"}
"""Operators whose results have no more elements than their inputs, whatever shape inference says."""
