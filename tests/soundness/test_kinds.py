"""The kinds of soundness test, over every method; ``test_faults`` asks for corners, which know no methods."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.draws import draws, some
from verifiable_relu.readers import read_onnx
from verifiable_relu.search.batch import answers
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Reason, Verdict
from verifiable_relu.search.registry import make, methods
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.read import read_vnnlib

from .boundary import KINDS, cases
from .judge import LIRPA, Report
from .kinds import agreement, boundary, planted, points

OWN = {
    **dict.fromkeys(("attack", "ibp", "crown-ibp", "crown", "alpha-crown", "alpha-crown-tight"), 1.0),
    **{"split": 0.3, "bab": 1.0, "milp": 1.0, "smt": 1.0, "smt-exact": 0.3, "auto": 0.5},
}
"""Seconds for each case."""

BOTH = {Verdict.SAT, Verdict.UNSAT}
lirpa = pytest.mark.skipif(find_spec("auto_LiRPA") is None, reason="needs the package auto_LiRPA")


def test_methods_agree_near_the_decision_boundary() -> None:
    # The networks of seed 0 are asked about where faults are seeded (``test_faults``).
    report = agreement(OWN, seed=1, boxes=1, report=Report(of=some))
    assert report.problems == []
    for method in ("bab", "milp", "smt", "auto", "split"):
        assert report.verdicts(method) == BOTH, method
    assert report.verdicts("crown") == {Verdict.UNSAT} and report.verdicts("attack") == {Verdict.SAT}


def test_methods_agree_on_smooth_networks() -> None:
    bounds = dict.fromkeys(("attack", "ibp", "crown-ibp", "crown", "alpha-crown"), 1.0)
    asked = {**bounds, "split": 0.1, "bab": 0.05, "auto": 0.1}
    report = agreement(asked, smooth=True, boxes=1, report=Report(of=some))
    assert report.problems == []
    assert Verdict.UNSAT in report.verdicts("bab") and report.verdicts("split") == report.verdicts("auto") == BOTH


@pytest.mark.parametrize("decimal", [False, True], ids=["dyadic", "decimal"])
def test_methods_decide_boxes_of_one_point_as_exact_arithmetic_does(decimal: bool) -> None:
    report = points({**OWN, "auto": 0.2}, decimal=decimal, report=Report(of=some))
    assert report.problems == []
    for method in ("bab", "milp", "smt", "auto", "split"):
        assert report.verdicts(method) == BOTH, method
    assert decimal or report.decided["smt", Verdict.UNKNOWN] == 0


def test_planted_witnesses_are_never_denied() -> None:
    asked = {**OWN, "attack": 0.5, **dict.fromkeys(("bab", "smt", "smt-exact", "auto"), 0.1)}
    report = planted(asked, report=Report(of=some))
    assert report.problems == []
    count = sum(count for (name, _), count in report.decided.items() if name == "milp")
    assert report.decided["milp", Verdict.SAT] == count
    assert report.decided["attack", Verdict.UNKNOWN] > count / 2, "the witnesses are not hidden"


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05])
def test_no_budget_is_so_small_that_a_planted_witness_is_denied(seconds: float) -> None:
    assert planted(dict.fromkeys(OWN, seconds), sizes=(8,), seed=1, report=Report(of=some)).problems == []


def test_no_counterexample_at_the_boundary_is_denied() -> None:
    asked = {**OWN, **dict.fromkeys(("attack", "split", "bab", "milp", "smt", "smt-exact", "auto"), 0.15)}
    report = boundary(asked, count=draws(48))
    assert report.problems == []
    for method in ("split", "milp", "smt", "auto"):
        assert report.decided[method, Verdict.SAT] > 0, method


def test_every_kind_of_activation_is_planted_and_certain() -> None:
    found = list(cases(0, draws(80) * len(KINDS) // 4))
    assert {case.name.split()[0].strip(",") for case in found} == set(KINDS)
    assert sum(case.truth is Verdict.SAT for case in found) > 0.9 * len(found)
    assert {"inexact" in case.name for case in found} == {False, True}


@lirpa
@pytest.mark.parametrize("method", LIRPA)
def test_auto_lirpa_denies_no_counterexample(method: str) -> None:
    asked, report = {method: 30.0}, Report(of=some)
    agreement(asked, offsets=(1e-3, -0.4), boxes=1, report=report)
    if "alpha" not in method:  # which takes long, and finds no other slopes at a point
        agreement(asked, offsets=(1e-3, -0.4), smooth=True, boxes=1, report=report)
        points(asked, report=report)
    planted(asked, sizes=(3,), report=report)
    assert report.problems == []
    assert report.verdicts(method) == {Verdict.UNSAT}


def test_every_method_is_asked() -> None:
    assert {*OWN, *LIRPA, "auto_lirpa", "marabou"} == set(methods())
    assert make("auto_lirpa") == make("auto_lirpa-alpha-crown")


def test_coefficients_with_more_digits_than_float64_are_not_rounded(data: Path) -> None:
    folder = data / "wrong_verdicts"
    if not folder.is_dir():
        pytest.skip("needs the files that were once answered wrongly")
    (prop,) = read_vnnlib(folder / "long_coefficient.vnnlib").properties
    query = Query(read_onnx(folder / "long_coefficient.onnx"), prop)
    found = {method: answers(make(method), [query], TimeBudget(2.0))[0] for method in OWN}
    assert not any(outcome.reason is Reason.ERROR for outcome in found.values())
    assert Verdict.SAT not in {outcome.verdict for outcome in found.values()}, "no output is so large"
    assert {found[method].verdict for method in ("crown", "smt", "auto")} == {Verdict.UNSAT}
