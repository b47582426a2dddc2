"""Lazy SMT against enumeration: every clause holds, every verdict is right, and a search that fails is an unknown."""

from __future__ import annotations

import itertools
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import hostile
from tests.support.solver_cases import ball, chain, least_by_phases, mlp, planted, random_query, row, union_in_order
from verifiable_relu.network.nodes import Input, Linear, Relu
from verifiable_relu.spec.property import Box, Property, Query
from verifiable_relu.trust.exact import evaluate_exact
from verifiable_relu.verifiers.bab.strip import Slopes, Strip
from verifiable_relu.verifiers.bab.system import System
from verifiable_relu.verifiers.base import Budget, Outcome, Reason, Trust, Verdict
from verifiable_relu.verifiers.encoding import Folding
from verifiable_relu.verifiers.lazy import LazySmt
from verifiable_relu.verifiers.lazy import verifier as module
from verifiable_relu.verifiers.lazy.theory import Bounding, Theory
from verifiable_relu.verifiers.root import NONE
from verifiable_relu.verifiers.solvers.phases import PHASES, Advice, Searched, Task
from verifiable_relu.verifiers.solvers.process import Worker
from verifiable_relu.verifiers.solving import bounded


def decide(*queries: Query, seconds: float = 30.0) -> list[Outcome]:
    return LazySmt().verify(queries, Budget.each(seconds, len(queries)))


def theory(query: Query, bounding: Bounding | None = None) -> tuple[Theory, System]:
    """The theory of a query's only polytope, which believes in no counterexample."""
    (problem,) = bounded(Folding(query.network, exact=True), [query], lambda: False, NONE)
    assert problem.boxes is not None
    system = System.of(query, problem.boxes.relaxation, 0, [0], Slopes(), lambda: False)
    part = system.parts[0]
    strip = Strip(system.folded, part.rows, part.slopes)
    options = Bounding() if bounding is None else bounding
    return Theory(strip, part.rows, lambda e: False, lambda split: None, lambda: 60.0, options, 1 << 28), system


def apart(seed: int, sizes: tuple[int, ...], share: float, *, leaky: bool = False) -> Query:
    """Whether the first output gets below the second by more than at the best of many points, by a share of that."""
    rng = np.random.default_rng(seed)
    network, box = mlp(rng, sizes, leaky=leaky), ball(np.zeros(sizes[0]), 0.5)
    with torch.no_grad():
        y = network(torch.from_numpy(rng.uniform(box.lower, box.upper, (5000, sizes[0]))))
    gap = y[:, 0] - y[:, 1]
    bound = float(gap.min() - share * (gap.max() - gap.min()))
    return Query(network, Property(box, ((row({0: 1, 1: -1}, bound),),)))


@pytest.mark.parametrize("leaky", [False, True])
def test_verdicts_agree_with_enumeration(leaky: bool) -> None:
    cases = [random_query(seed, leaky=leaky, dyadic=seed % 2 == 0) for seed in range(9)]
    verdicts = set()
    for (query, margin), outcome in zip(cases, decide(*(query for query, _ in cases)), strict=True):
        assert outcome.verdict is (Verdict.SAT if margin <= 0 else Verdict.UNSAT), outcome
        verdicts.add(outcome.verdict)
        if outcome.witness is not None:
            assert query.property.box.contains(outcome.witness)
            assert query.property.violated(evaluate_exact(query.network, outcome.witness))
        else:
            assert outcome.trust is Trust.ROUNDED
    assert verdicts == {Verdict.SAT, Verdict.UNSAT}


def test_every_clause_holds_of_all_phases() -> None:
    """Phases that a clause rules out have no unsafe point, by a linear program for each pattern of phases."""
    lengths = []
    for seed in range(4):
        query = apart(seed // 2, (3, 3, 4, 2), 0.02, leaky=seed % 2 == 1)
        # Without a search for multipliers a proof needs more phases.
        asked, system = theory(query, Bounding(steps=0, adaptive=0, stalled=0.0))
        rng, size = np.random.default_rng(seed), system.folded.size
        for _ in range(12):
            asked.consult(rng.choice([-1, 0, 1], size).astype(np.int8).tobytes())
        places = [(i - 2) // 2 * 3 + j for i, j in system.folded.places.tolist()]
        outcomes = least_by_phases(query.network, query.property.box, query.property.unsafe[0])
        for clause in asked.proven:
            lengths.append(len(clause))
            for pattern, margin in outcomes.items():
                if all(pattern[places[abs(literal) - 1]] != (literal > 0) for literal in clause):
                    assert margin > 0, (seed, clause, pattern)
    assert len(lengths) > 8 and max(lengths) > 2


def test_clauses_are_shorter_than_what_they_were_learned_from() -> None:
    asked, system = theory(apart(1, (4, 12, 12, 2), 0.05))
    phases = np.where(np.random.default_rng(0).random(system.folded.size) < 0.5, 1, -1).astype(np.int8)
    advice = asked.consult(phases.tobytes())
    (clause,) = (clause for clause in advice.clauses if set(clause) <= set(-phases * np.arange(1, len(phases) + 1)))
    assert len(clause) < len(phases) / 2


def test_a_search_through_clauses_alone_agrees_with_enumeration() -> None:
    """z3's plain search over phases, as the refutation is confirmed with."""
    rng = np.random.default_rng(0)
    answers = set()
    for count in (10, 20, 30, 40):
        clauses = tuple(tuple(int(v) for v in rng.choice(np.r_[-5:0, 1:6], 3, replace=False)) for _ in range(count))
        patterns = (np.array([p >> j & 1 for j in range(5)]) * 2 - 1 for p in range(32))
        possible = any(all(any(p[abs(v) - 1] * v > 0 for v in clause) for clause in clauses) for p in patterns)
        answer = PHASES.call(Task(5, clauses, 10.0, advised=False)).answer
        assert answer == ("sat" if possible else "unsat")
        # The propagator learns the same clauses one by one, when they are broken.
        learned = PHASES.call(Task(5, (), 10.0), converse=lambda phases, known=clauses: broken(phases, known)).answer
        assert learned == answer
        answers.add(answer)
    assert answers == {"sat", "unsat"}


def broken(phases: bytes, clauses: tuple[tuple[int, ...], ...]) -> Advice:
    """The clauses that no open or decided phase satisfies."""
    assigned = np.frombuffer(phases, np.int8)
    return Advice(tuple(c for c in clauses if all(assigned[abs(v) - 1] * v < 0 for v in c)))


@pytest.mark.parametrize("seed", range(4))
def test_a_planted_counterexample_is_never_denied(seed: int) -> None:
    (outcome,) = decide(planted(seed), seconds=1.0)
    assert outcome.verdict is not Verdict.UNSAT


def test_conflicts_propositions_and_costs_are_told() -> None:
    query = apart(4, (8, 24, 24, 2), 0.2)
    (outcome,) = decide(query)
    assert outcome.verdict is Verdict.UNSAT and outcome.trust is Trust.ROUNDED
    counted = {name: float(count) for count, name in (part.strip().split(" ", 1) for part in outcome.detail.split(","))}
    assert counted["decisions"] > 0 and counted["conflicts"] > 0 and counted["sub-problems"] > 2


def test_boundaries_are_decided_exactly() -> None:
    nodes = [
        Input(name="x", inputs=(), shape=(1,)),
        Linear(name="fc", inputs=(0,), shape=(1,), weight=torch.ones(1, 1), bias=torch.zeros(1)),
        Relu(name="act", inputs=(1,), shape=(1,)),
    ]
    network, box = chain(nodes), Box(np.array([-1.0]), np.array([1.0]))
    touched, missed, corner, below = decide(
        Query(network, Property(box, ((row({0: 1}, 0),),))),
        Query(network, Property(box, ((row({0: 1}, 0, True),),))),
        Query(network, Property(box, ((row({0: -1}, -1),),))),
        Query(network, Property(box, ((row({0: -1}, -1 - Fraction(1, 10**30)),),))),
    )
    assert (touched.verdict, corner.verdict) == (Verdict.SAT, Verdict.SAT)
    assert (missed.verdict, below.verdict) == (Verdict.UNSAT, Verdict.UNSAT)
    assert "z3's word" in missed.detail and "z3's word" in below.detail


def test_a_union_is_excluded_only_as_a_whole() -> None:
    (outcome,) = decide(union_in_order())
    assert outcome.verdict is Verdict.SAT


@pytest.mark.parametrize(
    "kind", [hostile.is_killed, hostile.hangs, hostile.raises, hostile.gets_no_memory], ids=lambda kind: kind.__name__
)
def test_a_search_that_fails_on_its_way_costs_one_query(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    query, reason = apart(4, (8, 24, 24, 2), 0.2), Reason(hostile.KINDS[kind][1])
    worker = Worker(f"tests.support.hostile:phases_{kind.__name__}")
    monkeypatch.setattr(module, "PHASES", worker)
    small = random_query(1)[0]
    try:
        outcomes = LazySmt().verify([query, small], Budget([1.5 if reason is Reason.TIMEOUT else 60.0, 60.0]))
    finally:
        worker.stop()
    assert (outcomes[0].verdict, outcomes[0].reason) == (Verdict.UNKNOWN, reason)
    # This one ends with its first bounds, and needs no search.
    assert outcomes[1].verdict is not Verdict.UNKNOWN


def test_a_refutation_that_the_clauses_do_not_support_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    query = apart(4, (8, 24, 24, 2), 0.2)

    def lie(task: Task, seconds: float, memory: int | None, converse: Any = None) -> Searched:
        return Searched("unsat") if task.advised else PHASES.call(task, seconds, memory)

    monkeypatch.setattr(module, "PHASES", SimpleNamespace(start=lambda: None, call=lie))
    (outcome,) = decide(query)
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.ERROR)


def test_a_search_whose_time_runs_out_is_unknown() -> None:
    hard = apart(1, (20, 60, 60, 60, 2), 0.5)
    outcome, none_left = LazySmt().verify([hard, hard], Budget([0.5, 0.0]))
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.TIMEOUT)
    assert none_left.reason is Reason.TIMEOUT


def test_whenever_the_time_runs_out_that_is_said() -> None:
    """A budget whose clock ticks whenever it is looked at; no neuron is left that could be split."""
    nodes = [
        Input(name="x", inputs=(), shape=(1,)),
        Linear(name="fc", inputs=(0,), shape=(1,), weight=torch.ones(1, 1), bias=torch.zeros(1)),
        Relu(name="act", inputs=(1,), shape=(1,)),
    ]
    # Only exact arithmetic decides.
    unsafe = ((row({0: -1}, -1 - Fraction(1, 10**30)),),)
    query = Query(chain(nodes), Property(Box(np.array([0.5]), np.array([1.0])), unsafe))
    ticks = itertools.count()
    (decided,) = LazySmt().verify([query], Budget([1e6], clock=ticks.__next__))
    assert decided.verdict is Verdict.UNSAT
    # Before that, bounds are searched for.
    for limit in range(max(1, next(ticks) - 12), next(ticks)):
        (outcome,) = LazySmt().verify([query], Budget([float(limit)], clock=itertools.count().__next__))
        assert outcome.verdict is Verdict.UNSAT or outcome.reason is Reason.TIMEOUT, limit
