"""Several processes that share the work on a query: what they answer is what one process answers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.asking import claims
from tests.support.draws import draws
from tests.support.solver_cases import ball, mlp, planted, random_query, row
from verifiable_relu.search.bab import query as refine
from verifiable_relu.search.bab import verifier as trees
from verifiable_relu.search.bab.query import Refinement
from verifiable_relu.search.bab.tree import Branching
from verifiable_relu.search.bab.verifier import Bab, Schedule
from verifiable_relu.search.batch import Verifier
from verifiable_relu.search.outcomes import Outcome, Reason, Verdict
from verifiable_relu.search.solvers.workers import HIGHS
from verifiable_relu.search.split import InputSplit
from verifiable_relu.search.split import search as split
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.supervisor.forks import most_shares, run_shares

pytestmark = pytest.mark.skipif(most_shares(2) == 1, reason="processes are copied on Linux alone")

SLOW = Branching(steps=1, finishing_steps=0, batch=8)
"""A search that makes many sub-problems of a small network."""

TREES = Bab(search=SLOW, schedule=Schedule(refinement=None, improve=None), solo_work=0)
REFINED = Bab(search=SLOW, schedule=Schedule(Refinement(leaves=8), first_work=0, refinement_share=0), solo_work=0)
SPLIT = InputSplit(batch=4, share_after_s=0)
PROCESSES = 3

METHODS = {"trees": TREES, "refinements": REFINED, "input splits": SPLIT}
SHARING = {"trees": trees, "refinements": refine, "input splits": split}

QUESTIONS = {
    "trees": [(0, -0.2, 10), (1, -1.0, 10)],
    "refinements": [(1, -0.2, 16), (0, -0.4, 24)],
    "input splits": [(0, -0.2, 10), (1, -0.6, 10)],
}
"""For each method a question (``question``) with a counterexample that is found late, and one that has none."""


@cache
def question(seed: int, spare: float, width: int = 10) -> Query:
    """A query that takes some tens to thousands of sub-problems.

    The first output is compared with each other one, at the least difference that is found at corners and other points,
    more or less ``spare``; where that is positive, there is a counterexample. Layers have so many neurons as ``width``.
    """
    rng = np.random.default_rng(seed)
    network = mlp(rng, (4, width, width, 5))
    box = ball(np.round(rng.normal(size=4) * 8) / 8, 0.75)
    shares = np.concatenate([rng.uniform(size=(20_000, 4)), rng.integers(0, 2, (200, 4))])
    outputs = network(torch.from_numpy(box.lower + shares * (box.upper - box.lower)))
    values = [float((outputs[:, 0] - outputs[:, k]).min()) for k in range(1, 5)]
    unsafe = tuple((row({0: 1, k: -1}, Fraction(v + spare)),) for k, v in enumerate(values, start=1))
    return Query(network, Property(box, unsafe))


def answer(
    method: Verifier, query: Query, seconds: float = 300.0, processes: int = PROCESSES, **limits: Any
) -> Outcome:
    HIGHS.start()
    before = children()
    (outcome,) = claims(method, [query], seconds, processes=processes, **limits)
    assert children() <= before
    return outcome


@contextmanager
def counted(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many shares each piece of work of a module was dealt in."""
    counts: list[int] = []

    def counting(shares: Sequence[Callable[..., Any]], *rest: Any, **named: Any) -> list[Any]:
        counts.append(len(shares))
        return run_shares(shares, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(module, "run_shares", counting)
        yield counts


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["trees", "input splits", pytest.param("refinements", marks=pytest.mark.seldom)])
def test_several_processes_answer_as_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, verdicts = METHODS[name], []
    for query in [question(*one) for one in QUESTIONS[name]]:
        with counted(SHARING[name], monkeypatch) as counts:
            outcome = answer(method, query)
        assert any(count > 1 for count in counts)
        assert outcome.verdict is answer(method, query, processes=1).verdict
        assert outcome.margin is not None and (outcome.margin > 0) is (outcome.verdict is Verdict.UNSAT)
        verdicts.append(outcome.verdict)
    assert verdicts == [Verdict.SAT, Verdict.UNSAT]


@pytest.mark.parametrize("name", METHODS)
def test_verdicts_are_those_of_enumeration(name: str) -> None:
    for seed in range(draws(12)):
        query, gap = random_query(seed)
        verdict = answer(METHODS[name], query).verdict
        assert verdict is (Verdict.SAT if gap < 0 else Verdict.UNSAT), (seed, gap)


@pytest.mark.thorough
@pytest.mark.parametrize("name", METHODS)
def test_no_counterexample_is_denied(name: str) -> None:
    for seed in range(4):
        assert answer(METHODS[name], planted(seed), 3.0).verdict is not Verdict.UNSAT


@pytest.mark.thorough
def test_boxes_of_several_queries_are_shared_together() -> None:
    queries = [question(1, spare) for spare in (-0.6, 0.01, -0.7)]
    network = queries[0].network
    outcomes = claims(SPLIT, [Query(network, query.property) for query in queries], 300.0)
    assert [outcome.verdict for outcome in outcomes] == [Verdict.UNSAT, Verdict.SAT, Verdict.UNSAT]


def children() -> set[int]:
    """The processes that this one has started."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread may have ended meanwhile.
        with suppress(OSError):
            found.update(map(int, (task / "children").read_text().split()))
    return found


@contextmanager
def killing() -> Iterator[list[int]]:
    """Kill this process's copies as they come, but for every third."""
    HIGHS.start()
    others, killed, ended = children(), list[int](), threading.Event()

    def kill() -> None:
        seen = set(others)
        while not ended.wait(0.002):
            for child in sorted(children() - seen):
                seen.add(child)
                if len(seen - others) % 3:
                    os.kill(child, signal.SIGKILL)
                    killed.append(child)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()


@pytest.mark.thorough
@pytest.mark.parametrize("name", METHODS)
def test_a_copy_that_is_killed_costs_no_more_than_its_work(name: str) -> None:
    with killing() as killed:
        verdicts = [answer(METHODS[name], question(*one)).verdict for one in QUESTIONS[name]]
    assert verdicts == [Verdict.SAT, Verdict.UNSAT]
    assert killed


def test_boxes_that_were_dealt_to_copies_that_failed_are_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(shares: Sequence[Callable[..., Any]], *_: object, **__: object) -> list[Any]:
        return [shares[0](lambda: False), *[None] * (len(shares) - 1)]

    # The copies alone would come across the counterexample.
    monkeypatch.setattr(split, "run_shares", alone)
    assert answer(SPLIT, question(0, -0.2)).verdict is Verdict.SAT


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seconds", [0.01, 0.1, 0.3])
def test_however_short_the_time_is_no_answer_is_wrong(name: str, seconds: float) -> None:
    for seed in range(2):
        outcome = answer(METHODS[name], question(seed, 0.01), seconds)
        assert outcome.verdict is not Verdict.UNSAT
        assert outcome.verdict is Verdict.SAT or outcome.reason is Reason.TIMEOUT
