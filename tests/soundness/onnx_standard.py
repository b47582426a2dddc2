"""The test cases that the ONNX standard has for its operators, as the ``onnx`` package computes them."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case import node as standard

MODULES = (
    "add", "averagepool", "batch_normalization", "clip", "concat", "constant", "constantofshape", "conv", "div",
    "dropout", "erf", "expand", "flatten", "gather", "gelu", "gemm", "globalaveragepool", "identity", "leakyrelu",
    "matmul", "mul", "neg", "prelu", "rangeop", "relu", "reshape", "shape", "sigmoid", "slice", "squeeze", "sub",
    "tanh", "transpose", "unsqueeze",
)  # fmt: skip
LARGEST = 3_000
"""Cases with more numbers are left out: rational arithmetic is slow."""


def cases() -> Iterator[tuple[str, onnx.ModelProto, dict[str, np.ndarray], np.ndarray]]:
    """Name, file, inputs and expected output of each case of a single node with one output, over numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in MODULES:
            importlib.import_module(f"onnx.backend.test.case.node.{module}")
    for case in standard._NodeTestCases:
        graph = case.model.graph
        if len(graph.node) != 1 or len(graph.output) != 1:
            continue
        for arrays, expected in case.data_sets:
            given = dict(zip((declared.name for declared in graph.input), arrays, strict=False))
            if not all(isinstance(a, np.ndarray) and a.dtype.kind in "fi" for a in (*arrays, *expected)):
                continue
            if sum(a.size for a in (*arrays, *expected)) <= LARGEST:
                yield case.name, case.model, given, expected[0]


def with_constants(model: onnx.ModelProto, given: dict[str, np.ndarray], free: str) -> bytes:
    """The file of a case whose inputs are constants but for one."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for declared in list(made.graph.input):
        if declared.name != free:
            made.graph.input.remove(declared)
            made.graph.initializer.append(numpy_helper.from_array(given[declared.name], declared.name))
    return made.SerializeToString()
