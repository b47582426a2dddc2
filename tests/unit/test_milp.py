"""The MILP and its encoding against enumeration, planted witnesses and solver statuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from types import SimpleNamespace

import highspy
import numpy as np
import pytest
import torch

from tests.support.asking import claims
from tests.support.draws import some
from tests.support.solver_cases import (
    ball,
    chain,
    check,
    hinge,
    mlp,
    random_query,
    residual,
    row,
)
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.network.nodes import Input, Linear, Relu
from verifiable_relu.search.solvers.highs import HighsResult, HighsTask
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.verifiers import milp as module
from verifiable_relu.verifiers.base import Outcome, Reason, Trust, Verdict
from verifiable_relu.verifiers.milp import Milp


def decide(*queries: Query, seconds: float = 20.0) -> list[Outcome]:
    return claims(Milp(), queries, seconds)


def left_open(count: int) -> list[Query]:
    """Queries that bounds alone do not decide."""
    queries = (query for query, _ in map(random_query, range(100)))
    return list(islice((q for q in queries if "bounds" not in decide(q)[0].detail), count))


@pytest.mark.parametrize("seed", range(2))
def test_every_operator_is_encoded_exactly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    network = residual(rng)
    box = ball(rng.integers(-4, 5, 12) / 8, 0.25)
    # Sampling bounds the least margin from above; the property asks for less, or for a little more.
    x = torch.from_numpy(rng.uniform(box.lower, box.upper, (20000, 12))).reshape(-1, 2, 3, 2)
    y = network(x)
    reached = float((y[:, 0] - y[:, 1]).min())
    for bound in (reached + 1e-3, reached - 1e-3, reached - 3.0):
        query = Query(network, Property(box, ((row({0: 1, 1: -1}, bound),),)))
        (outcome,) = decide(query)
        assert outcome.verdict is not Verdict.UNKNOWN
        if bound > reached:
            check(query, outcome, reached - bound)
        elif outcome.verdict is Verdict.SAT:
            check(query, outcome, 0.0)


def test_coefficients_too_small_for_the_solver_are_not_forgotten() -> None:
    # y = x_0 + 1e-13·x_1 with x_1 up to 1e14: the second term is what decides.
    nodes = [
        Input(name="x", inputs=(), shape=(2,)),
        Linear(
            name="fc",
            inputs=(0,),
            shape=(1,),
            weight=torch.tensor([[1.0, 1e-13]], dtype=torch.float64),
            bias=torch.zeros(1, dtype=torch.float64),
        ),
        Relu(name="act", inputs=(1,), shape=(1,)),
    ]
    box = Box(np.array([-1.0, -1e14]), np.array([1.0, 1e14]))
    (outcome,) = decide(Query(chain(nodes), Property(box, ((row({0: -1}, -5),),))))
    assert outcome.verdict is not Verdict.UNSAT


def test_a_query_whose_time_runs_out_is_unknown() -> None:
    rng = np.random.default_rng(1)
    network = mlp(rng, (20, 60, 60, 60, 2))
    box = ball(np.zeros(20), 0.5)
    with torch.no_grad():
        y = network(torch.from_numpy(rng.uniform(-0.5, 0.5, (5000, 20))))
    low = float((y[:, 0] - y[:, 1]).min())
    query = Query(network, Property(box, ((row({0: 1, 1: -1}, 6 * low),),)))
    outcome, none_left = claims(Milp(), [query, query], [0.3, 0.0])
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.TIMEOUT)
    assert none_left.reason is Reason.TIMEOUT


def solver_that(call: Callable[..., object]) -> SimpleNamespace:
    return SimpleNamespace(start=lambda: None, call=call)


@pytest.mark.thorough
@pytest.mark.parametrize("status", list(some(sorted(set(highspy.HighsModelStatus.__members__) - {"kInfeasible"}))))
def test_only_a_proof_of_infeasibility_excludes(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query = next(q for q in left_open(9) if decide(q)[0].verdict is Verdict.UNSAT)
    solved = HighsResult(status, np.zeros(1000), 1.0)
    monkeypatch.setattr(module, "HIGHS", solver_that(lambda *_: solved))
    (outcome,) = decide(query)
    # A solver whose arithmetic fails has not decided; an error would be the program's.
    assert outcome.verdict is Verdict.UNKNOWN and outcome.reason is not Reason.ERROR


def infeasible(*_: object) -> HighsResult:
    """What HiGHS says of every program, if its word were worth nothing."""
    return HighsResult("kInfeasible", np.zeros(0), 0.0)


@pytest.mark.thorough
def test_what_the_solver_calls_infeasible_is_proved_again_or_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {query: decide(query)[0] for query in left_open(9)}
    unsat, sat = (next(q for q, o in outcomes.items() if o.verdict is v) for v in (Verdict.UNSAT, Verdict.SAT))
    proved = outcomes[unsat]
    assert proved.trust is Trust.ROUNDED and "proved again" in proved.detail
    assert proved.margin is not None and proved.margin > 0
    monkeypatch.setattr(module, "HIGHS", solver_that(infeasible))
    (word,) = claims(Milp(again=0.0), [unsat], 20)
    assert (word.verdict, word.trust) == (Verdict.UNSAT, Trust.FLOAT) and "word" in word.detail
    (refuted,) = decide(sat)
    check(sat, refuted, -1.0)
    assert refuted.method == "milp" and refuted.witness is not None


@pytest.mark.parametrize("error", [OutOfTime(), MemoryError(), CallFailed("it crashed")])
def test_a_counterexample_found_before_the_solver_ended_is_kept(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(chain(hinge()), Property(ball(np.zeros(1), 1.0), ((row({0: -1}, -0.9),),)))

    def call(task: HighsTask, seconds: float, memory: int | None, judge: Callable[[np.ndarray], bool]) -> object:
        # HiGHS's clock may be set while it runs; the budget's is monotonic.
        assert "time_limit" not in task.options
        # Inputs are scaled to be between -1 and 1.
        assert not judge(np.zeros_like(task.program.cost)) and judge(np.ones_like(task.program.cost))
        raise error

    monkeypatch.setattr(module, "HIGHS", solver_that(call))
    (outcome,) = decide(query)
    assert outcome.verdict is Verdict.SAT
    assert outcome.witness == (Fraction(1),)


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    decide(*(random_query(seed)[0] for seed in range(4)))
    assert capfd.readouterr().out == ""


def test_a_network_beyond_all_scales_is_refused() -> None:
    huge = chain(hinge())
    nodes = [
        replace(n, weight=n.weight.double() * 1e300, bias=n.bias.double()) if isinstance(n, Linear) else n
        for n in huge.nodes
    ]
    box = Box(np.array([-1e20]), np.array([1e20]))
    (outcome,) = decide(Query(chain(nodes), Property(box, ((row({0: -1}, -1),),))))
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.UNSUPPORTED)


@pytest.mark.parametrize("coefficient, bound", [(Fraction(1), Fraction(10**400)), (Fraction(10**400), Fraction(0))])
def test_a_polytope_whose_rows_are_all_beyond_float64_is_not_excluded(coefficient: Fraction, bound: Fraction) -> None:
    """No row of it is left in float64, so that the solver would be asked nothing; all points, or some, are unsafe."""
    unsafe = ((Row(((0, coefficient),), bound),),)
    (outcome,) = decide(Query(chain(hinge()), Property(ball(np.zeros(1), 1.0), unsafe)))
    assert outcome.verdict is not Verdict.UNSAT
