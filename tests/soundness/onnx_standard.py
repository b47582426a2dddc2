"""The test cases that the ONNX standard has for its operators, as the ``onnx`` package computes them."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case import node as standard

OPERATORS = frozenset((
    "Add", "AveragePool", "BatchNormalization", "Clip", "Concat", "Constant", "ConstantOfShape", "Conv", "Div",
    "Dropout", "Erf", "Expand", "Flatten", "Gather", "Gelu", "Gemm", "GlobalAveragePool", "Identity", "LeakyRelu",
    "MatMul", "Mul", "Neg", "PRelu", "Range", "Relu", "Reshape", "Shape", "Sigmoid", "Slice", "Squeeze", "Sub", "Tanh",
    "Transpose", "Unsqueeze",
))  # fmt: skip
"""Operators whose cases are evaluated in rational arithmetic."""

LARGEST = 3_000
"""Cases with more numbers are left out: rational arithmetic is slow."""


@functools.cache
def _collected() -> Sequence[Any]:
    """All cases that the package has."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return tuple(standard.collect_testcases(None))


def cases() -> Iterator[tuple[str, onnx.ModelProto, dict[str, np.ndarray], np.ndarray]]:
    """Name, file, inputs and expected output of each case of a single node with one output, over numbers."""
    for case in _collected():
        graph = case.model.graph
        if len(graph.node) != 1 or len(graph.output) != 1 or graph.node[0].op_type not in OPERATORS:
            continue
        for arrays, expected in case.data_sets:
            given = dict(zip((declared.name for declared in graph.input), arrays, strict=False))
            if not all(isinstance(a, np.ndarray) and a.dtype.kind in "fi" for a in (*arrays, *expected)):
                continue
            if sum(a.size for a in (*arrays, *expected)) <= LARGEST:
                yield case.name, case.model, given, expected[0]


def every_case() -> Iterator[tuple[str, bytes, np.ndarray, np.ndarray]]:
    """Name, file, free input and expected output of each case whose first input is of floating-point numbers.

    The other inputs are constants. Cases of several outputs, or of inputs that are no tensors, are left out.
    """
    for case in _collected():
        inputs, outputs = case.model.graph.input, case.model.graph.output
        arrays, expected = case.data_sets[0]
        plain = all(isinstance(one, np.ndarray | np.generic) for one in (*arrays, *expected))
        if len(outputs) != 1 or not inputs or not plain or np.asarray(arrays[0]).dtype not in _FLOATS:
            continue
        given = {declared.name: np.asarray(array) for declared, array in zip(inputs, arrays, strict=False)}
        yield (
            case.name,
            with_constants(case.model, given, inputs[0].name),
            np.asarray(arrays[0]),
            np.asarray(expected[0]),
        )


_FLOATS = (np.float16, np.float32, np.float64)


def with_constants(model: onnx.ModelProto, given: dict[str, np.ndarray], free: str) -> bytes:
    """The file of a case whose inputs are constants but for one."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for declared in list(made.graph.input):
        if declared.name != free:
            if model.ir_version > 3:  # before, constants had to be inputs too
                made.graph.input.remove(declared)
            made.graph.initializer.append(numpy_helper.from_array(given[declared.name], declared.name))
    return made.SerializeToString()
