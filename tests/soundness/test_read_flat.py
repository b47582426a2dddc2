"""Networks of drawn files compute what the files do in rational arithmetic."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import onnx

from tests.support.draws import draws
from verifiable_relu.errors import InputError
from verifiable_relu.ir.exact import evaluate_exact, is_evaluable
from verifiable_relu.readers.onnx.read import read_flat

from . import onnx_exact
from .onnx_agreement import Source, cases, points

COUNT = draws(300)
LARGEST = 2_000
"""Files of which more values are computed are left out: rational numbers are slow."""


def test_drawn_files_have_the_values_of_rational_arithmetic() -> None:
    tally, wrong = Counter[str](), []
    for case in cases(COUNT, seed=5):
        try:
            (flat, reading), source = read_flat(case.data, "drawn"), Source(case.data)
        except (InputError, ValueError):
            tally["refused"] += 1
            continue
        x = points(source.shape, case.seed)[0]
        assert flat.output_size == reading.output.size
        if not is_evaluable(flat) or sum(op.size for op in flat.ops) > LARGEST:
            continue
        output = onnx.load_model_from_string(case.data).graph.output[0].name
        try:
            true = onnx_exact.exact(source.model, {source.inputs[0].name: x})[output]
        except onnx_exact.UnknownOperatorError:
            continue
        tally["exact"] += 1
        found = evaluate_exact(flat, [Fraction(float(v)) for v in x.reshape(-1)])
        if found != list(true.reshape(-1)):
            wrong.append(f"{case.seed}: other numbers than the file's")
    assert not wrong, "\n".join(wrong[:8])
    assert tally["exact"] > COUNT / 3 > tally["refused"]
