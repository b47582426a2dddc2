"""The test cases that the ONNX standard has for its operators, as the ``onnx`` package computes them."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case import base
from onnx.backend.test.case import node as standard
from onnx.reference.ops import op_pool_common

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
    """All cases that the package has.

    Three quarters of the time that the package takes to make them are spared: pooling in three dimensions is computed
    for all windows at once, and the source code of the cases, which is for the standard's pages, is not looked up.
    """
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        patch.object(op_pool_common, "pool", _pool),
        patch.object(base, "process_snippet", lambda *_: ("", "")),
    ):
        warnings.simplefilter("ignore")
        return tuple(standard.collect_testcases(None))


_POOL = op_pool_common.pool


def _pool(
    padded: np.ndarray,
    x_shape: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    out_shape: Sequence[int],
    pooling_type: str,
    *pads: Sequence[int] | None,
    dilations: Sequence[int] | None = None,
    p: int = 1,
    **others: Any,
) -> np.ndarray:
    """What onnx's ``pool`` computes: by itself where windows are padded, dilated or of fewer than three dimensions."""
    axes = tuple(range(2, padded.ndim))
    if len(axes) < 3 or dilations is not None or others or any(pad is not None and np.any(pad) for pad in pads):
        given = (padded, x_shape, kernel, strides, out_shape, pooling_type, *pads)
        return _POOL(*given, dilations=dilations, p=p, **others)
    windows = np.lib.stride_tricks.sliding_window_view(padded, tuple(kernel), axes)
    windows = windows[(..., *(slice(None, None, stride) for stride in strides), *(slice(None) for _ in axes))]
    inner = tuple(range(-len(axes), 0))
    match pooling_type:
        case "MAX":
            return windows.max(inner)
        case "AVG":
            return windows.mean(inner)
    return (np.abs(windows) ** p).sum(inner) ** (1 / p)


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
