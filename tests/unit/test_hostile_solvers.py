"""Whatever a solver does costs one query, an unknown with its reason; what comes before and after is answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import highspy
import numpy as np
import pytest
import torch
from highspy import HighsStatus

from tests.support import hostile
from tests.support.asking import claims
from tests.support.solver_cases import ball, mlp, row
from verifiable_relu.search.batch import Verifier
from verifiable_relu.search.outcomes import Outcome, Reason, Verdict
from verifiable_relu.search.solvers import milp, smt, workers
from verifiable_relu.search.solvers.milp import Milp
from verifiable_relu.search.solvers.smt import Smt
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.supervisor.workers import Worker

WORKERS = {"milp": (milp, "HIGHS", "highs"), "smt-exact": (smt, "Z3", "z3")}
"""By method: the module that asks the solver, its name for the solver's process, and what hostile ones are called."""


def near(inputs: int, seed: int, beyond: float) -> Query:
    """Whether the first output gets below the second by ``beyond`` more than it does at the best of many points."""
    rng = np.random.default_rng(seed)
    network, box = mlp(rng, (inputs, 5, 5, 2)), ball(np.zeros(inputs), 0.5)
    with torch.no_grad():
        y = network(torch.from_numpy(rng.uniform(box.lower, box.upper, (5000, inputs))))
    return Query(network, Property(box, ((row({0: 1, 1: -1}, float((y[:, 0] - y[:, 1]).min()) - beyond),),)))


QUERIES = [near(2, 0, -0.01), near(hostile.MARKED, 1, 0.01), near(3, 2, 0.3), near(2, 3, -0.01)]
"""The second is the one that a hostile solver does something about. No bounds decide any of them."""


def verifier(method: str) -> Verifier:
    return Milp(process_memory=hostile.MEMORY) if method == "milp" else Smt(whole=True, process_memory=hostile.MEMORY)


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Outcome]]:
    """What the methods say when nothing goes wrong."""
    found = {method: claims(verifier(method), QUERIES, 60) for method in WORKERS}
    for outcomes in found.values():
        assert all(o.verdict is not Verdict.UNKNOWN and "bounds alone" not in o.detail for o in outcomes)
    return found


@pytest.fixture
def hostile_solver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Worker]]:
    """Has a method call a hostile solver of one kind."""
    made: list[Worker] = []

    def replace(method: str, kind: str) -> Worker:
        module, name, solver = WORKERS[method]
        made.append(Worker(f"tests.support.hostile:{solver}_{kind}"))
        monkeypatch.setattr(module, name, made[-1])
        return made[-1]

    yield replace
    for worker in made:
        worker.stop()


@pytest.mark.combined
@pytest.mark.thorough
@pytest.mark.parametrize("method", WORKERS)
@pytest.mark.parametrize("kind", hostile.KINDS, ids=lambda kind: kind.__name__)
def test_whatever_a_solver_does_costs_one_query(
    kind: Callable[[], None],
    method: str,
    answers: dict[str, list[Outcome]],
    hostile_solver: Callable[[str, str], Worker],
) -> None:
    hostile_solver(method, kind.__name__)
    threads = threading.active_count()
    reason = Reason(hostile.KINDS[kind][1])
    seconds = [60.0, 0.2 if reason is Reason.TIMEOUT else 60.0, 60.0, 60.0]
    outcomes = claims(verifier(method), QUERIES, seconds)
    assert (outcomes[1].verdict, outcomes[1].reason) == (Verdict.UNKNOWN, reason)
    # Bounds were there before the solver was asked.
    assert outcomes[1].unstable == answers[method][1].unstable and outcomes[1].margin is not None
    for index in (0, 2, 3):
        assert outcomes[index].verdict is answers[method][index].verdict
    assert threading.active_count() == threads


@pytest.mark.parametrize("method", WORKERS)
def test_a_solver_that_cannot_be_started_is_an_error_of_each_query(
    method: str, hostile_solver: Callable[[str, str], Worker]
) -> None:
    hostile_solver(method, "no_such_kind")
    for outcome in claims(verifier(method), QUERIES[:2], 60):
        assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.ERROR)
        assert "does not start" in outcome.detail


@pytest.mark.parametrize("method", WORKERS)
def test_memory_that_the_real_solvers_take_is_limited(method: str) -> None:
    """Under a limit that the libraries exceed by themselves, the process is ended when it is first looked at."""
    rng = np.random.default_rng(1)
    network, box = mlp(rng, (20, 60, 60, 60, 2)), ball(np.zeros(20), 0.5)
    hard = Query(network, Property(box, ((row({0: 1, 1: -1}, -60),),)))
    limited = Milp(process_memory=1 << 20) if method == "milp" else Smt(whole=True, process_memory=1 << 20)
    (outcome,) = claims(limited, [hard], 60)
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.MEMORY)
    assert "1 MiB" in outcome.detail


@pytest.mark.parametrize("method", WORKERS)
def test_one_process_answers_all_queries(method: str) -> None:
    module, name, _ = WORKERS[method]
    worker: Worker = getattr(module, name)
    seen = set()
    for query in QUERIES:
        claims(verifier(method), [query], 60)
        seen.add(worker.pid)
    assert len(seen) == 1 and None not in seen


@pytest.mark.parametrize("upper", [1.0, 3.0])
def test_of_a_run_that_failed_nothing_is_believed(upper: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Least x with 2 ≤ x ≤ ``upper``: whatever HiGHS left behind."""

    class Failing(highspy.Highs):
        def run(self) -> HighsStatus:
            super().run()
            return HighsStatus.kError

    one, row = np.ones(1), (np.array([0, 1]), np.array([0]), np.ones(1))
    program = workers.MixedIntegerProgram(
        one, 0 * one, upper * one, 2 * one, np.inf * one, *row, np.zeros(1, dtype=bool)
    )
    task = workers.HighsTask(program, 1e-9, 60.0)
    sound = workers.solve_program(task)
    assert sound.status == ("kOptimal" if upper > 2 else "kInfeasible")
    monkeypatch.setattr(highspy, "Highs", Failing)
    failed = workers.solve_program(task)
    assert failed.status == "kSolveError" and not len(failed.values)
