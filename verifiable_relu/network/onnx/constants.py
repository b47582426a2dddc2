"""Constants that an ONNX file computes from constants: shapes, indices, and reordered parameters.

Only what involves no rounding is folded, by the standard's own reference evaluator. How large a result will be is
worked out first: a file of a hundred bytes may ask for terabytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import onnx

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.onnx.model import array

MAX_ELEMENTS = 1 << 24
"""Most elements of a constant that a file computes."""

_ORDER_ALONE = {
    "Cast", "Concat", "ConstantOfShape", "Expand", "Flatten", "Gather", "Identity", "Range",
    "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators whose results are a selection or a reordering of numbers that are there."""

_INTEGER_ARITHMETIC = {"Add", "Div", "Mul", "Neg", "ReduceProd", "Sub"}
"""Operators that are folded for integers, which are not rounded."""


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


def folded(node: onnx.NodeProto, inputs: Sequence[np.ndarray], opset: int) -> np.ndarray:
    """The result of a node whose inputs are all constant.

    Args:
        node: with one output.
        inputs: as many as the node names.
        opset: the version of the standard's operators.

    Raises:
        UnsupportedError: if the node computes with floating-point numbers, changes one by a cast, or its result would
            have more than ``MAX_ELEMENTS`` elements.
        InputError: if the inputs do not fit the operator.
    """
    integers = all(np.issubdtype(value.dtype, np.integer) for value in inputs)
    if node.op_type not in _ORDER_ALONE and not (integers and node.op_type in _INTEGER_ARITHMETIC):
        raise UnsupportedError("of constants alone is not supported: fold constants when exporting")
    if (size := _elements(node, inputs)) > MAX_ELEMENTS:
        raise UnsupportedError(f"computes a constant of {size} elements, more than {MAX_ELEMENTS}")
    # Imported here, because most files compute no constants.
    from onnx.reference import ReferenceEvaluator

    feeds = dict(zip(node.input, inputs, strict=True))
    known = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    result = onnx.helper.make_empty_tensor_value_info(node.output[0])
    graph = onnx.helper.make_graph([node], "constants", known, [result])
    try:
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
        (computed,) = (np.asarray(value) for value in ReferenceEvaluator(model).run(None, feeds))
    except Exception as error:  # the evaluator lets whatever numpy says through
        raise InputError(f"does not fit its inputs: {error}") from error
    if node.op_type == "Cast" and not _same_numbers(computed, inputs[0]):
        raise UnsupportedError("changes the numbers of a constant")
    return computed


def _same_numbers(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays hold the same numbers, compared as Python compares them: without rounding."""
    return one.shape == other.shape and all(
        a == b for a, b in zip(one.ravel().tolist(), other.ravel().tolist(), strict=True)
    )


def _elements(node: onnx.NodeProto, inputs: Sequence[np.ndarray]) -> int:
    """An upper bound of the number of elements of a node's result.

    Raises:
        InputError: if the inputs do not tell.
    """
    measure = _GROWTH.get(node.op_type)
    try:
        return sum(value.size for value in inputs) if measure is None else measure(node, inputs)
    except (ArithmeticError, IndexError, TypeError, ValueError) as error:
        raise InputError(f"does not fit its inputs: {error}") from error


def _whole(value: np.ndarray) -> list[int]:
    return [int(number) for number in value.reshape(-1).tolist()]


def _of_shape(node: onnx.NodeProto, inputs: Sequence[np.ndarray]) -> int:
    return math.prod(_whole(inputs[0]))


def _expanded(node: onnx.NodeProto, inputs: Sequence[np.ndarray]) -> int:
    return inputs[0].size * math.prod(max(1, size) for size in _whole(inputs[1]))


def _ranged(node: onnx.NodeProto, inputs: Sequence[np.ndarray]) -> int:
    start, limit, step = (Fraction(value.reshape(()).item()) for value in inputs)
    return max(0, math.ceil((limit - start) / step))


def _gathered(node: onnx.NodeProto, inputs: Sequence[np.ndarray]) -> int:
    return inputs[0].size * inputs[1].size


_GROWTH: dict[str, Callable[[onnx.NodeProto, Sequence[np.ndarray]], int]] = {
    "ConstantOfShape": _of_shape,
    "Expand": _expanded,
    "Gather": _gathered,
    "Range": _ranged,
    "Add": lambda node, inputs: math.prod(max(1, value.size) for value in inputs),
    "Div": lambda node, inputs: math.prod(max(1, value.size) for value in inputs),
    "Mul": lambda node, inputs: math.prod(max(1, value.size) for value in inputs),
    "Sub": lambda node, inputs: math.prod(max(1, value.size) for value in inputs),
}
"""Operators whose result may have more elements than their inputs together."""
