"""The kinds of soundness test, over every method.

``test_boundary`` asks about counterexamples at the boundary, ``test_faults`` about corners, which know no methods.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.support.draws import some
from verifiable_relu.verifiers.base import Verdict
from verifiable_relu.verifiers.registry import make, methods

from .judge import LIRPA, Report
from .kinds import agreement, planted, points

OWN = {
    "attack": 1.0,
    "ibp": 1.0,
    "crown-ibp": 1.0,
    "crown": 1.0,
    "alpha-crown": 1.0,
    "alpha-crown-tight": 1.0,
    "split": 0.3,
    "bab": 2.0,
    "milp": 2.0,
    "smt": 3.0,
    "smt-exact": 0.3,
    "auto": 0.5,
}
"""Seconds for each case."""

lirpa = pytest.mark.skipif(find_spec("auto_LiRPA") is None, reason="needs the package auto_LiRPA")


def decided(report: Report, method: str) -> set[Verdict]:
    return {verdict for name, verdict in report.decided if name == method} - {Verdict.UNKNOWN}


def test_methods_agree_near_the_decision_boundary() -> None:
    # The networks of seed 0 are asked about where faults are seeded (``test_faults``).
    report = agreement(OWN, seed=1, boxes=1, report=Report(of=some))
    assert report.problems == []
    for method in ("bab", "milp", "smt", "auto", "split"):
        assert decided(report, method) == {Verdict.SAT, Verdict.UNSAT}, method
    assert decided(report, "crown") == {Verdict.UNSAT}
    assert decided(report, "attack") == {Verdict.SAT}


def test_methods_agree_on_smooth_networks() -> None:
    report = agreement(
        {
            **dict.fromkeys(("attack", "ibp", "crown-ibp", "crown", "alpha-crown"), 1.0),
            "split": 0.1,
            "bab": 0.05,
            "auto": 0.1,
        },
        smooth=True,
        boxes=1,
        report=Report(of=some),
    )
    assert report.problems == []
    assert Verdict.UNSAT in decided(report, "bab")
    assert decided(report, "split") == decided(report, "auto") == {Verdict.SAT, Verdict.UNSAT}


@pytest.mark.parametrize("method", ["milp", "smt"])
def test_encodings_refuse_smooth_networks(method: str) -> None:
    report = agreement({method: 1.0}, smooth=True, offsets=(0.2,))
    assert report.problems == []
    assert decided(report, method) == set()


@pytest.mark.parametrize("decimal", [False, True], ids=["dyadic", "decimal"])
def test_methods_decide_boxes_of_one_point_as_exact_arithmetic_does(decimal: bool) -> None:
    report = points({**OWN, "auto": 0.2}, decimal=decimal, report=Report(of=some))
    assert report.problems == []
    for method in ("bab", "milp", "smt", "auto", "split"):
        assert decided(report, method) == {Verdict.SAT, Verdict.UNSAT}, method
    if not decimal:
        assert report.decided["smt", Verdict.UNKNOWN] == 0


def test_planted_witnesses_are_never_denied() -> None:
    report = planted(
        {**OWN, "attack": 0.5, "bab": 0.1, "smt": 0.1, "smt-exact": 0.1, "auto": 0.1}, report=Report(of=some)
    )
    assert report.problems == []
    cases = sum(count for (name, _), count in report.decided.items() if name == "milp")
    assert report.decided["milp", Verdict.SAT] == cases
    assert report.decided["attack", Verdict.UNKNOWN] > cases / 2, "the witnesses are not hidden"


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05])
def test_no_budget_is_so_small_that_a_planted_witness_is_denied(seconds: float) -> None:
    assert planted(dict.fromkeys(OWN, seconds), sizes=(8,), seed=1, report=Report(of=some)).problems == []


@lirpa
@pytest.mark.parametrize("method", LIRPA)
def test_auto_lirpa_denies_no_counterexample(method: str) -> None:
    asked = {method: 30.0}
    report = Report(of=some)
    agreement(asked, offsets=(1e-3, -0.4), boxes=1, report=report)
    if "alpha" not in method:  # which takes long, and finds no other slopes at a point
        agreement(asked, offsets=(1e-3, -0.4), smooth=True, boxes=1, report=report)
        points(asked, report=report)
    planted(asked, sizes=(3,), report=report)
    assert report.problems == []
    assert decided(report, method) == {Verdict.UNSAT}


def test_every_method_is_asked() -> None:
    assert {*OWN, *LIRPA, "auto_lirpa", "marabou"} == set(methods())
    assert make("auto_lirpa") == make("auto_lirpa-alpha-crown")
