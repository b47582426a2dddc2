"""The MILP and its encoding against enumeration, planted witnesses and solver statuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from types import SimpleNamespace

import highspy
import numpy as np
import pytest
import torch

from tests.support.asking import claims, query_batch
from tests.support.draws import draws, some
from tests.support.solver_cases import (
    UNIT,
    ball,
    chain,
    check,
    hinge,
    least,
    mlp,
    random_query,
    residual,
    row,
)
from verifiable_relu.bounds import Ascent
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Gelu, Input, Linear, Relu
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.verifiers import milp as module
from verifiable_relu.verifiers.bab.program import Program
from verifiable_relu.verifiers.base import Outcome, Reason, Trust, Verdict
from verifiable_relu.verifiers.milp import Milp
from verifiable_relu.verifiers.solvers import highs
from verifiable_relu.verifiers.solvers.highs import HighsResult, HighsTask


def decide(*queries: Query, seconds: float = 20.0) -> list[Outcome]:
    return claims(Milp(), queries, seconds)


def left_open(count: int) -> list[Query]:
    """Queries that bounds alone do not decide."""
    queries = (query for query, _ in map(random_query, range(100)))
    return list(islice((q for q in queries if "bounds" not in decide(q)[0].detail), count))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(draws(4)))
def test_every_box_of_a_batch_has_its_own_bounds(seed: int) -> None:
    network = mlp(np.random.default_rng(seed), (2, 2, 3, 2))
    boxes = [ball(np.array(center), 0.5) for center in ((6.0, 6.0), (-6.0, -6.0), (6.0, -6.0), (-6.0, 6.0))]
    polytope = (row({0: 1, 1: -1}, 0),)
    margins = [least(network, box, polytope) for box in boxes]
    for shift in (-1e-3, 1e-3):
        queries = [
            Query(network, Property(box, (replace_bound(polytope, margin + shift),)))
            for box, margin in zip(boxes, margins, strict=True)
        ]
        for query, outcome in zip(queries, decide(*queries), strict=True):
            check(query, outcome, -shift)


@pytest.mark.parametrize("seed", range(2))
def test_every_operator_is_encoded_exactly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    network = residual(rng)
    box = ball(rng.integers(-4, 5, 12) / 8, 0.25)
    polytope = (row({0: 1, 1: -1}, 0),)
    # Sampling bounds the least margin from above; the property asks for less, or for a little more.
    x = torch.from_numpy(rng.uniform(box.lower, box.upper, (20000, 12))).reshape(-1, 2, 3, 2)
    y = network(x)
    reached = float((y[:, 0] - y[:, 1]).min())
    for bound in (reached + 1e-3, reached - 1e-3, reached - 3.0):
        query = Query(network, Property(box, (replace_bound(polytope, bound),)))
        (outcome,) = decide(query)
        assert outcome.verdict is not Verdict.UNKNOWN
        if bound > reached:
            check(query, outcome, reached - bound)
        elif outcome.verdict is Verdict.SAT:
            check(query, outcome, 0.0)


def replace_bound(polytope: tuple, bound: float) -> tuple:
    return tuple(replace(one, bound=Fraction(bound)) for one in polytope)


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
    """Stands in for the process of HiGHS."""
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
def test_what_the_solver_calls_infeasible_is_proved_again() -> None:
    query = next(q for q in left_open(9) if decide(q)[0].verdict is Verdict.UNSAT)
    (outcome,) = decide(query)
    assert outcome.trust is Trust.ROUNDED and "proved again" in outcome.detail
    assert outcome.margin is not None and outcome.margin > 0


@pytest.mark.thorough
def test_the_solver_s_word_alone_is_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    query = next(q for q in left_open(9) if decide(q)[0].verdict is Verdict.UNSAT)
    monkeypatch.setattr(module, "HIGHS", solver_that(infeasible))
    (outcome,) = claims(Milp(again=0.0), [query], 20)
    assert (outcome.verdict, outcome.trust) == (Verdict.UNSAT, Trust.FLOAT) and "word" in outcome.detail


@pytest.mark.thorough
def test_a_solver_that_denies_a_counterexample_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    query = next(q for q in left_open(9) if decide(q)[0].verdict is Verdict.SAT)
    monkeypatch.setattr(module, "HIGHS", solver_that(infeasible))
    (outcome,) = decide(query)
    check(query, outcome, -1.0)
    assert outcome.method == "milp" and outcome.witness is not None


@pytest.mark.parametrize("error", [OutOfTime(), MemoryError(), CallFailed("it crashed")])
def test_a_counterexample_found_before_the_solver_ended_is_kept(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(chain(hinge()), Property(ball(np.zeros(1), 1.0), ((row({0: -1}, -0.9),),)))

    def call(task: HighsTask, seconds: float, memory: int | None, judge: Callable[[np.ndarray], bool]) -> object:
        # Inputs are scaled to be between -1 and 1.
        assert not judge(np.zeros_like(task.program.cost)) and judge(np.ones_like(task.program.cost))
        raise error

    monkeypatch.setattr(module, "HIGHS", solver_that(call))
    (outcome,) = decide(query)
    assert outcome.verdict is Verdict.SAT
    assert outcome.witness == (Fraction(1),)


def test_smooth_networks_are_refused_by_name() -> None:
    nodes = hinge()
    nodes[2] = Gelu(name="gelu_7", inputs=(1,), shape=(1,), lam=torch.tensor(1.0))
    fine = Query(chain(hinge()), Property(UNIT, ((row({0: 1}, -1),),)))
    outcome, other = decide(Query(chain(nodes), Property(UNIT, ((row({0: 1}, -1),),))), fine)
    assert outcome.reason is Reason.UNSUPPORTED
    assert "gelu_7" in outcome.detail and "Gelu" in outcome.detail
    assert other.verdict is Verdict.UNSAT


@pytest.mark.thorough
def test_a_fault_stays_with_its_query(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = left_open(2)
    (alone,) = decide(good)
    decide_one = Milp.decide
    monkeypatch.setattr(
        Milp, "decide", lambda self, b, i, t: 1 / 0 if b.queries[i] is bad else decide_one(self, b, i, t)
    )
    first, second = decide(bad, good)
    assert first.reason is Reason.ERROR
    assert second.verdict is alone.verdict is not Verdict.UNKNOWN


def test_progress_is_told_of_a_query_that_is_finished() -> None:
    query, margin = next(case for case in map(random_query, range(50)) if case[1] > 0)
    stages: list[tuple[str, int, int]] = []
    asked = query_batch([query], 10, progress=lambda *stage: stages.append(stage))
    ((_, outcome),) = Milp().claims(asked)
    assert stages == [("milp", 1, 1)]
    assert asked.left([0]) < 10
    assert outcome.trust in (Trust.FLOAT, Trust.ROUNDED)
    assert outcome.margin is not None and outcome.margin <= margin + 1e-9
    assert outcome.unstable is not None and {"bounds"} <= set(outcome.seconds)
    assert least(query.network, query.property.box, query.property.unsafe[0]) >= 0


def rescaled(network: Network, exponents: Sequence[int]) -> Network:
    """The same function: what a hidden layer gives is multiplied by a power of two, which the next one undoes."""
    nodes, before = [], 0
    maps = [i for i, node in enumerate(network.nodes) if isinstance(node, Linear)]
    for index, node in enumerate(network.nodes):
        if isinstance(node, Linear):
            after = 0 if index == maps[-1] else exponents[maps.index(index)]
            weight, bias = node.weight.double() * 2.0 ** (after - before), node.bias.double() * 2.0**after
            node, before = replace(node, weight=weight, bias=bias), after
        nodes.append(node)
    return chain(nodes)


@pytest.mark.parametrize("exponents", [(-28, -28), (40, 40), (30, -40), (-200, 150)])
def test_a_rescaled_network_makes_the_same_program(exponents: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    network = mlp(rng, (3, 6, 5, 2))
    prop = Property(ball(np.zeros(3), 1.0), ((row({0: 1, 1: -1}, 0),),))
    programs: list[tuple] = []
    mixed = Program.mixed

    def taken(self: Program, most: float, loose: float | None) -> highs.Program:
        program = mixed(self, most, None)
        programs.append((program.entries, program.row_lower, program.row_upper, program.lower, program.upper))
        return mixed(self, most, loose)

    monkeypatch.setattr(Program, "mixed", taken)
    for net in (network, rescaled(network, exponents)):
        # The search for slopes depends on scales.
        claims(Milp(intermediate=Ascent(steps=0)), [Query(net, prop)], 20)
    assert len(programs[0][0]) > 50
    for first, second in zip(programs[0], programs[-1], strict=True):
        np.testing.assert_allclose(np.asarray(first), np.asarray(second), rtol=1e-12, atol=1e-12)


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    decide(*(random_query(seed)[0] for seed in range(4)))
    assert capfd.readouterr().out == ""


def test_the_solver_keeps_no_time_of_its_own() -> None:
    """Its clock may be set while it runs; the budget's is monotonic."""
    assert "time_limit" not in Milp()._options()


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
