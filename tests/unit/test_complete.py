"""What every complete method decides: against enumeration, planted witnesses, boundaries and unions of polytopes."""

from __future__ import annotations

import pytest

from tests.support.asking import claims
from tests.support.draws import draws
from tests.support.solver_cases import (
    UNIT,
    barely_unstable,
    chain,
    check,
    hinge,
    planted,
    random_query,
    row,
    union_in_order,
)
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.base import Trust, Verdict
from verifiable_relu.verifiers.batch import Verifier
from verifiable_relu.verifiers.milp import Milp
from verifiable_relu.verifiers.smt import Smt

METHODS: dict[str, Verifier] = {
    "bab": Bab(),
    "milp": Milp(),
    "smt": Smt(),
    "smt of whole queries": Smt(whole=True),
}
methods = pytest.mark.parametrize("name", METHODS)


@pytest.mark.thorough
@pytest.mark.parametrize("leaky", [False, True])
@methods
def test_verdicts_agree_with_enumeration(name: str, leaky: bool) -> None:
    cases = [random_query(seed, leaky=leaky, dyadic=seed % 2 == 0) for seed in range(9)]
    found = claims(METHODS[name], [query for query, _ in cases], 20.0)
    for (query, margin), outcome in zip(cases, found, strict=True):
        check(query, outcome, margin)
        if outcome.verdict is Verdict.UNSAT:
            assert outcome.trust is Trust.ROUNDED


@pytest.mark.parametrize("seed", range(draws(8)))
@pytest.mark.parametrize("name", ["bab", "milp", "smt"])
def test_a_planted_counterexample_is_never_denied(name: str, seed: int) -> None:
    (outcome,) = claims(METHODS[name], [planted(seed)], 1.0)
    assert outcome.verdict is not Verdict.UNSAT


@methods
def test_strict_rows_are_not_met_by_their_boundary(name: str) -> None:
    queries = [Query(chain(hinge()), Property(UNIT, ((row({0: 1}, 0, strict),),))) for strict in (False, True)]
    touched, missed = claims(METHODS[name], queries, 1.0)
    assert touched.verdict is Verdict.SAT
    assert missed.verdict is not Verdict.SAT


@methods
def test_a_union_is_excluded_only_as_a_whole(name: str) -> None:
    far, near = (row({0: -1}, -1.5),), (row({0: -1}, -1.125),)
    unions = ((far,), (far, near), (near, far), (), ((),))
    found = claims(METHODS[name], [Query(chain(hinge(bias=0.25)), Property(UNIT, unsafe)) for unsafe in unions], 20.0)
    expected = [Verdict.UNSAT, Verdict.SAT, Verdict.SAT, Verdict.UNSAT, Verdict.SAT]
    assert [outcome.verdict for outcome in found] == expected


@methods
def test_unions_go_on_after_a_polytope_and_barely_unstable_neurons_have_two_sides(name: str) -> None:
    queries = [union_in_order(), barely_unstable()]
    for query, outcome in zip(queries, claims(METHODS[name], queries, 20.0), strict=True):
        check(query, outcome, 0.0)
