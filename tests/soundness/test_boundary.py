"""No method denies a counterexample planted at the boundary, nor files that were once answered wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.asking import claims
from tests.support.draws import draws
from verifiable_relu.network import read_onnx
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.read import read_vnnlib
from verifiable_relu.trust.replay import confirm
from verifiable_relu.verifiers.base import Reason, Verdict
from verifiable_relu.verifiers.registry import make, methods

from .boundary import KINDS, cases
from .kinds import boundary

CASES = draws(48)


def test_no_counterexample_at_the_boundary_is_denied() -> None:
    report = boundary(
        {
            "ibp": 1.0,
            "crown-ibp": 1.0,
            "crown": 1.0,
            "alpha-crown": 1.0,
            "split": 0.1,
            "milp": 0.5,
            "smt": 0.5,
            "auto": 0.2,
        },
        count=CASES,
    )
    assert report.problems == []
    for method in ("split", "milp", "smt", "auto"):
        assert report.decided[method, Verdict.SAT] > 0, method


def test_every_kind_of_activation_is_planted_and_certain() -> None:
    planted = list(cases(0, 20 * len(KINDS)))
    assert {case.name.split()[0].strip(",") for case in planted} == set(KINDS)
    assert sum(case.truth is Verdict.SAT for case in planted) > 0.9 * len(planted)
    assert {bool(case.query.network.weight_error) for case in planted} == {False, True}


def _query(data: Path, name: str) -> Query:
    folder = data / "wrong_verdicts"
    if not folder.is_dir():
        pytest.skip("needs the files that were once answered wrongly")
    (prop,) = read_vnnlib(folder / f"{name}.vnnlib").properties
    return Query(read_onnx(folder / f"{name}.onnx"), prop)


OWN = [name for name in methods() if not name.startswith(("auto_lirpa", "marabou"))]


def _ask(query: Query, method: str) -> Verdict:
    """The verdict, a counterexample confirmed."""
    (outcome,) = claims(make(method), [query], 2.0)
    assert outcome.reason is not Reason.ERROR, f"{method}: {outcome.detail}"
    if outcome.verdict is Verdict.SAT:
        assert outcome.witness is not None
        return Verdict.SAT if confirm(query, outcome.witness).confirmed else Verdict.UNKNOWN
    return outcome.verdict


def test_coefficients_with_more_digits_than_float64_are_not_rounded(data: Path) -> None:
    query = _query(data, "long_coefficient")
    said = {method: _ask(query, method) for method in OWN}
    assert Verdict.SAT not in said.values(), "no output is so large"
    assert said["crown"] is said["smt"] is said["auto"] is Verdict.UNSAT
