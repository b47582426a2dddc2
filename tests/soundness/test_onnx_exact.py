"""The rational evaluator of ONNX files: against the standard's own cases and onnx's reference evaluator."""

from __future__ import annotations

import numpy as np
import pytest

from . import onnx_exact, onnx_standard
from .onnx_agreement import ROUNDINGS, Source, points
from .onnx_graphs import graph


def floats(array: np.ndarray) -> np.ndarray:
    return np.array([float(v) for v in array.reshape(-1)]).reshape(array.shape)


@pytest.mark.seldom
def test_the_standards_cases_have_the_expected_outputs() -> None:
    agreed, wrong = 0, []
    for name, model, given, expected in onnx_standard.cases():
        try:
            found = floats(onnx_exact.exact(model, given)[model.graph.output[0].name])
        except onnx_exact.UnknownOperatorError:
            continue
        # The cases write some of their numbers with four digits.
        if found.shape == expected.shape and np.allclose(found, expected, rtol=1e-5, atol=1e-4):
            agreed += 1
        else:
            wrong.append(name)
    assert not wrong
    assert agreed >= 150


def test_onnxs_reference_evaluator_agrees_on_random_files() -> None:
    agreed, wrong = 0, []
    for seed in range(7_000_000, 7_000_120):
        case = graph(seed)
        try:
            source = Source(case.data)
        except ValueError:
            continue
        if case.weights == "extreme" or not source.trusted_by_reference:
            continue
        x = points(source.shape, seed)[0]
        name, given = source.model.graph.output[0].name, {source.inputs[0].name: x}
        try:
            theirs = source.reference().run(None, {source.inputs[0].name: x.astype(source.dtype)})[0]
        except Exception:
            continue  # the reference evaluator knows less than the standard
        off = np.abs(floats(onnx_exact.exact(source.model, given)[name]) - theirs)
        if (off <= ROUNDINGS * 2.0**-24 * onnx_exact.magnitudes(source.model, given)[name].astype(np.float64)).all():
            agreed += 1
        else:
            wrong.append(seed)
    assert not wrong
    assert agreed >= 70


def test_no_value_is_larger_than_its_magnitude() -> None:
    for seed in range(7_001_000, 7_001_060):
        case = graph(seed)
        try:
            source = Source(case.data)
        except ValueError:
            continue
        given = {source.inputs[0].name: points(source.shape, seed)[1]}
        true, size = onnx_exact.exact(source.model, given), onnx_exact.magnitudes(source.model, given)
        for name, value in true.values.items():
            if value.kind in onnx_exact.REALS:
                for entry, bound in zip(value.array.reshape(-1), size[name].reshape(-1), strict=True):
                    assert abs(float(entry)) <= bound * (1 + 1e-9), (seed, name)
