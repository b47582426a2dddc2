"""The test cases that the ONNX standard has for its operators, as the ``onnx`` package computes them.

``python -m tests.soundness.onnx_standard`` prints the last section of ``docs/operators.md``.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnx.backend.test.case import base
from onnx.backend.test.case import node as standard
from onnx.reference.ops import op_pool_common

from verifiable_relu.errors import InputError
from verifiable_relu.ir.functions import PiecewiseLinear, StepFunction
from verifiable_relu.ir.network import Elementwise, Maximum, Network, Product
from verifiable_relu.readers import read_onnx

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


@dataclass(frozen=True)
class Answer:
    """What the reader makes of a case.

    Attributes:
        case: the case's name.
        operators: the operators of the case, as one text.
        refused: why the case is refused; None if it is read.
        right: whether what was read computes the expected numbers.
        shown: the first numbers that it computes, and those that are expected.
        group: what the network that was read is made of, as ``readers.onnx.call.GROUPS`` names it.
    """

    case: str
    operators: str
    refused: str | None = None
    right: bool = False
    shown: str = ""
    group: str = ""


@functools.cache
def answers() -> Sequence[Answer]:
    """What the reader makes of each of ``every_case``."""
    found = []
    for name, data, x, expected in every_case():
        operators = " ".join(dict.fromkeys(node.op_type for node in onnx.load_model_from_string(data).graph.node))
        try:
            network = read_onnx(data)
        except InputError as error:
            found.append(Answer(name, operators, refused=str(error)))
            continue
        made = network(torch.from_numpy(x.astype(np.float64)).reshape(1, -1)).reshape(-1).numpy()
        wanted = expected.reshape(-1)
        # The cases write some of their numbers with four digits; half-precision numbers have three.
        tolerance = 2e-3 if x.dtype == np.float16 else 1e-4
        right = made.size == wanted.size and np.allclose(made, wanted, rtol=tolerance, atol=tolerance)
        shown = f"{made[:4]} instead of {wanted[:4]}"
        found.append(Answer(name, operators, right=right, shown=shown, group=_group(network)))
    return tuple(found)


def _group(network: Network) -> str:
    """The group of what is hardest to bound."""
    if any(isinstance(op, Product) for op in network.ops):
        return "products"
    functions = [op.function for op in network.ops if isinstance(op, Elementwise)]
    if not all(isinstance(function, PiecewiseLinear | StepFunction) for function in functions):
        return "smooth"
    if any(isinstance(function, StepFunction) for function in functions):
        return "steps"
    return "pieces" if functions or any(isinstance(op, Maximum) for op in network.ops) else "affine"


HEADING = "## The cases of the ONNX standard"
"""Begins the last section of the page of operators, which ``section`` makes."""

_UNREAD, _RUNTIME, _OTHERS = "the operator is not read", "onnxruntime refuses the file", "several operators"


def section() -> str:
    """Return the section of the documentation with the figures, and with what is refused and why."""
    every = answers()
    agree, refused = sum(a.right for a in every), [a for a in every if a.refused is not None]
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for answer in refused:
        # A case of several operators is a function of the standard, written out.
        reasons[_reason(answer.refused or "")][answer.operators if " " not in answer.operators else _OTHERS] += 1
    paragraphs = [
        "The `onnx` package has test cases for every operator. Those with one output and a first input of real numbers "
        "are tried: this input is free, the others are constants. (*Several operators* are a function of the standard, "
        "written out.) `python -m tests.soundness.onnx_standard` prints this section.",
        f"Of the {len(_collected())} cases of onnx {onnx.__version__}, {len(every)} are of that form: {agree} are read "
        f"and agree, {len(every) - agree - len(refused)} differ, {len(refused)} are refused.",
        f"**Not read** ({reasons[_UNREAD].total()} cases): {_named(reasons.pop(_UNREAD))}.",
        f"**Refused by onnxruntime** ({reasons[_RUNTIME].total()}): {_named(reasons.pop(_RUNTIME))}.",
    ]
    rows = sorted(reasons.items(), key=lambda row: (-row[1].total(), row[0]))
    table = [f"| {reason} | {found.total()} | {_named(found)} |" for reason, found in rows]
    wrapped = "\n\n".join(textwrap.fill(text, 120, break_on_hyphens=False) for text in paragraphs)
    head = ["| other reason | cases | operators |", "|---|---:|---|"]
    return "\n".join([HEADING, "", wrapped, "", *head, *table]) + "\n"


def _named(found: Counter[str]) -> str:
    return ", ".join(sorted(found, key=lambda operator: (operator == _OTHERS, operator)))


def _reason(error: str) -> str:
    """Return an error without the name of the node and the numbers of a case, and without other programs' words."""
    for whose in ("onnxruntime", "the ONNX checker"):
        if f"{whose} refuses the file" in error:
            return f"{whose} refuses the file"
    error = re.sub(r"^(node|input|output|initializer) '[^:]*: (not supported: )?", "", error)
    if re.fullmatch(r"version \d+ of this operator|.* 0 versions of the standard operators .*", error):
        return _UNREAD
    error = re.sub(r"^(its attribute \w+) = .*", r"\1 has another value", error)
    error = re.sub(r"^of shape \(.*\): |, \[.*\]$", "", error)
    return error.replace("|", "\\|")


if __name__ == "__main__":
    print(section(), end="")
