"""The competition's rules for counterexamples: what is one, what is one up to tolerance, and what is none."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info

from benchmarks.verification.competition_rules import Judgement, holds, judged, terms
from benchmarks.verification.competition_scripts import some, table

PROPERTY = """; y = relu(x0 - x1) can be at least 0.5, with x1 at most 0.25
(declare-const X_0 Real) (declare-const X_1 Real) (declare-const Y_0 Real)
(assert (<= X_0 1.0)) (assert (>= X_0 -1.0))
(assert (or (and (<= X_1 0.25) (>= X_1 (- 0.25)) (>= Y_0 0.5)) (and (>= X_1 9.0) (<= X_1 9.5))))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("rules")
    weight = numpy_helper.from_array(np.array([[1], [-1]], np.float32), "W")
    graph = make_graph(
        [make_node("MatMul", ["x", "W"], ["d"]), make_node("Relu", ["d"], ["y"])],
        "difference",
        [make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2])],
        [make_tensor_value_info("y", TensorProto.FLOAT, ["N", 1])],
        [weight],
    )
    model = make_model(graph, opset_imports=[make_opsetid("", 13)], ir_version=8)
    (folder / "net.onnx").write_bytes(model.SerializeToString())
    (folder / "p.vnnlib").write_text(PROPERTY)
    return folder / "net.onnx", folder / "p.vnnlib"


@pytest.mark.parametrize(
    ("said", "judgement"),
    [
        ("((X_0 0.75)\n(X_1 0.25)\n(Y_0 0.5))", Judgement.CORRECT),
        ("((X_0 0.75) (X_1 (/ 1.0 4.0)) (Y_0 0.5))", Judgement.CORRECT),
        ("((X_0 0.75) (X_1 (- 0.25)) (Y_0 1.0))", Judgement.CORRECT),
        ("((X_0 1.00005) (X_1 0.0) (Y_0 1.00005))", Judgement.TOLERATED),
        ("((X_0 0.74995) (X_1 0.25) (Y_0 0.49995))", Judgement.TOLERATED),
        ("((X_0 1.001) (X_1 0.0) (Y_0 1.001))", Judgement.NOT_VIOLATED),
        ("((X_0 0.5) (X_1 0.25) (Y_0 0.25))", Judgement.NOT_VIOLATED),
        ("((X_0 0.5) (X_1 0.25) (Y_0 0.75))", Judgement.OTHER_OUTPUTS),
        ("((X_0 0.75) (X_1 0.25))", Judgement.MISSING),
        ("((X_0 0.75) (X_2 0.25) (Y_0 0.5))", Judgement.MISSING),
        ("((X_0 0.75) (Y_0 0.5))", Judgement.MISSING),
        ("((X_0 much) (X_1 0.25) (Y_0 0.5))", Judgement.MISSING),
        ("", Judgement.MISSING),
    ],
)
def test_counterexamples_are_judged_as_in_the_competition(
    files: tuple[Path, Path], said: str, judgement: Judgement
) -> None:
    assert judged(*files, f"sat\n{said}\n") is judgement


def test_comparisons_are_strict_where_they_are_written_so() -> None:
    for text, exactly, relaxed in (
        ("(< 1.0 1.0)", False, True),
        ("(> 1.0 1.0)", False, True),
        ("(<= 1.0 1.0)", True, True),
        ("(< 1.1 1.0)", False, False),
        ("(>= (+ 0.25 (* 2.0 0.25)) 0.75)", True, True),
    ):
        (term,) = terms(text)
        assert holds(term, {}, Fraction(0)) is exactly and holds(term, {}, Fraction(1, 10_000)) is relaxed, text


def test_what_is_wrong_rejected_or_failed_is_counted() -> None:
    right = {
        "family": "f", "prepared": 0, "ran": 0, "verdict": "sat", "truth": "sat", "counterexample": "correct",
        "own limit": 10, "cpu": 1.0,
    }  # fmt: skip
    records = [
        right,
        {**right, "counterexample": "the property is not violated", "truth": "unsat"},
        {**right, "verdict": "unsat", "counterexample": "", "cpu": 11.0},
        {**right, "verdict": "error", "counterexample": "", "ran": 1},
    ]
    (row,) = table(records).rows
    found = dict(zip(table(records).columns, row, strict=True))
    assert found["sat"] == 2 and found["unsat"] == 1 and found["open"] == 1
    assert found["correct"] == 1 and found["rejected"] == 1 and found["wrong"] == 2 and found["failed"] == 1
    assert found["within own limit"] == 2 and found["most CPU s"] == 11.0


def test_instances_are_evenly_spaced() -> None:
    assert some(range(100), 4) == [0, 25, 50, 75] and some(range(3), 20) == [0, 1, 2]  # type: ignore[arg-type]
