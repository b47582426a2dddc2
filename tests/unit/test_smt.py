"""z3 against enumeration and the MILP, boundaries decided exactly, and what it says when it does not know."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.asking import claims
from tests.support.draws import draws
from tests.support.solver_cases import (
    UNIT,
    ball,
    chain,
    check,
    hinge,
    mlp,
    random_query,
    residual,
    row,
)
from verifiable_relu.bounds import Ascent, Bounds
from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.network.nodes import Linear, Relu, Sigmoid
from verifiable_relu.spec.property import Box, Property, Query
from verifiable_relu.trust.exact import evaluate_exact
from verifiable_relu.verifiers import smt as module
from verifiable_relu.verifiers.bab.slopes import Slopes
from verifiable_relu.verifiers.bab.tree import Branching
from verifiable_relu.verifiers.base import Outcome, Reason, Trust, Verdict
from verifiable_relu.verifiers.encoding import Folding, Phases, sizes_of
from verifiable_relu.verifiers.milp import Milp
from verifiable_relu.verifiers.smt import Smt
from verifiable_relu.verifiers.solvers.z3 import Checked, Z3Task


def decide(*queries: Query, bounds: bool = True, seconds: float = 20.0) -> list[Outcome]:
    return claims(Smt(whole=True, bounds=bounds), queries, seconds)


@pytest.mark.thorough
def test_verdicts_agree_with_milp() -> None:
    queries = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        network = mlp(rng, (3, 6, 6, 2), leaky=seed % 2 == 1)
        box = ball(rng.normal(size=3).round(3), 0.1)
        with torch.no_grad():
            y = network(torch.from_numpy(rng.uniform(box.lower, box.upper, (2000, 3))))
        nearest = float((y[:, 0] - y[:, 1]).min())
        queries += [
            Query(network, Property(box, ((row({0: 1, 1: -1}, nearest + shift),),))) for shift in (-0.02, 0.001)
        ]
    ours, theirs = decide(*queries), claims(Milp(), queries, 10)
    assert [o.verdict for o in ours] == [o.verdict for o in theirs]
    assert {o.verdict for o in ours} == {Verdict.SAT, Verdict.UNSAT}


def test_every_operator_is_encoded_exactly() -> None:
    rng = np.random.default_rng(0)
    network = residual(rng)
    center = rng.integers(-4, 5, 12) / 8
    box = ball(center, 1 / 64)
    y = evaluate_exact(network, [Fraction(float(v)) for v in center])
    # The centre is a counterexample to the first with nothing to spare; the second is far from being reached.
    first = Query(network, Property(box, ((row({0: 1, 1: -1}, y[0] - y[1]),),)))
    second = Query(network, Property(box, ((row({0: 1, 1: -1}, y[0] - y[1] - 100),),)))
    out = decide(first, second)
    check(first, out[0], 0.0)
    check(second, out[1], 100.0)


@pytest.mark.parametrize("seed", range(draws(4)))
@pytest.mark.parametrize("bounds", [True, False])
def test_planted_witness_is_never_denied(seed: int, bounds: bool) -> None:
    rng = np.random.default_rng(seed)
    network = mlp(rng, (2, 5, 4, 2))
    box = ball(rng.normal(size=2).round(3), 0.2)
    corner = np.where(rng.random(2) < 0.5, box.lower, box.upper)
    y = evaluate_exact(network, [Fraction(float(v)) for v in corner])
    (outcome,) = decide(
        Query(network, Property(box, ((row({0: 1}, y[0]), row({1: -1}, -y[1])),))), bounds=bounds, seconds=5
    )
    assert outcome.verdict is not Verdict.UNSAT


@pytest.mark.parametrize("bounds", [True, False])
def test_boundaries_are_decided_exactly(bounds: bool) -> None:
    network = chain(hinge())
    opened = Box(np.array([-1.0]), np.array([1.0]), open_upper=frozenset({0}))
    touched, missed, corner, cut, below = decide(
        Query(network, Property(UNIT, ((row({0: 1}, 0),),))),
        Query(network, Property(UNIT, ((row({0: 1}, 0, True),),))),
        Query(network, Property(UNIT, ((row({0: -1}, -1),),))),
        Query(network, Property(opened, ((row({0: -1}, -1),),))),
        Query(network, Property(UNIT, ((row({0: -1}, -1 - Fraction(1, 10**30)),),))),
        bounds=bounds,
    )
    assert (touched.verdict, corner.verdict) == (Verdict.SAT, Verdict.SAT)
    assert (missed.verdict, cut.verdict) == (Verdict.UNSAT, Verdict.UNSAT)
    # Bounds take the row's bound in float64, and so can't tell it from -1; z3 can.
    assert below.verdict is Verdict.UNSAT


def test_a_counterexample_may_be_a_number_that_no_float_is() -> None:
    # relu(3·x) reaches 1 at x = 1/3 alone, held there by a second neuron's row.
    nodes = hinge(3.0)
    nodes[1] = Linear(
        name="fc", inputs=(0,), shape=(2,), weight=torch.tensor([[3.0], [-3.0]]), bias=torch.tensor([0.0, 2.0])
    )
    nodes[2] = Relu(name="act", inputs=(1,), shape=(2,))
    (outcome,) = decide(Query(chain(nodes), Property(UNIT, ((row({0: -1}, -1), row({1: -1}, -1)),))))
    assert (outcome.verdict, outcome.trust) == (Verdict.SAT, Trust.EXACT)
    assert outcome.witness == (Fraction(1, 3),)


def test_a_query_whose_time_runs_out_is_unknown() -> None:
    rng = np.random.default_rng(1)
    network = mlp(rng, (20, 40, 40, 2))
    box = ball(np.zeros(20), 0.5)
    with torch.no_grad():
        y = network(torch.from_numpy(rng.uniform(-0.5, 0.5, (5000, 20))))
    low = float((y[:, 0] - y[:, 1]).min())
    query = Query(network, Property(box, ((row({0: 1, 1: -1}, 3 * low),),)))
    outcome, none_left = claims(Smt(whole=True), [query, query], [0.3, 0.0])
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.TIMEOUT)
    assert none_left.reason is Reason.TIMEOUT


def solver_that(monkeypatch: pytest.MonkeyPatch, *answers: Checked | BaseException) -> list[str | None]:
    """Have z3's process give these answers, or raise; returns a list of what it is asked after each answer."""
    asked: list[str | None] = []

    def call(task: Z3Task, seconds: float, memory: int | None, judge: Callable[[Checked], str | None]) -> None:
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            asked.append(judge(answer))
            if asked[-1] is None:
                return

    monkeypatch.setattr(module, "Z3", SimpleNamespace(start=lambda: None, call=call))
    return asked


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Checked("unknown", {}, "incomplete"), Reason.ERROR),
        (Checked("unknown", {}, "timeout"), Reason.TIMEOUT),
        (Checked("unknown", {}, "canceled"), Reason.TIMEOUT),
        (OutOfTime(), Reason.TIMEOUT),
        (MemoryError(), Reason.MEMORY),
        (CallFailed("it crashed"), Reason.ERROR),
    ],
)
def test_an_unknown_answer_of_the_solver_is_no_unsat(
    answer: Checked | Exception, reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, _ = next(case for case in map(random_query, range(50)) if case[1] > 0 and not decided_by_bounds(case[0]))
    solver_that(monkeypatch, answer)
    (outcome,) = decide(query)
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, reason)


def beyond_seven_tenths() -> tuple[Query, Checked]:
    """Whether relu(−x) reaches 7/10, and the model on the boundary: the float32 nearest to it is less."""
    assert float(np.float32(0.7)) < 0.7
    query = Query(chain(hinge(-1.0)), Property(UNIT, ((row({0: -1}, Fraction(-7, 10)),),)))
    return query, at(Fraction(7, 10))


def at(value: Fraction) -> Checked:
    """A model at x = −value, where the only neuron is active."""
    return Checked("sat", {"x_0": -value, "p_2_0": value})


def test_a_deeper_counterexample_is_looked_for_until_one_survives_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    query, edge = beyond_seven_tenths()
    asked = solver_that(monkeypatch, edge, Checked("unsat", {}), at(Fraction(3, 4)))
    (outcome,) = decide(query)
    # Each time that the neuron's phase is the model's, and that the point lies further inside.
    assert len(asked) == 3 and all(text is not None and "(<= n_2_0 0.0)" in text for text in asked[:2])
    assert all(text is not None and "(>= gap (/ 1.0 " in text for text in asked[:2]) and asked[0] != asked[1]
    assert asked[2] is None
    assert (outcome.verdict, outcome.witness) == (Verdict.SAT, (Fraction(-3, 4),))


def test_an_exact_counterexample_on_the_boundary_that_floats_miss_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    query, edge = beyond_seven_tenths()
    asked = solver_that(monkeypatch, edge, *[Checked("unsat", {})] * 50)
    (outcome,) = decide(query)
    assert len(set(asked)) == len(asked) < 50 and asked[-1] is None
    assert (outcome.verdict, outcome.trust, outcome.witness) == (Verdict.SAT, Trust.EXACT, (Fraction(-7, 10),))


@pytest.mark.parametrize("error", [OutOfTime(), MemoryError(), CallFailed("it crashed")])
def test_an_exact_counterexample_found_before_the_solver_ended_is_kept(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, edge = beyond_seven_tenths()
    solver_that(monkeypatch, edge, error)
    (outcome,) = decide(query)
    assert (outcome.verdict, outcome.trust, outcome.witness) == (Verdict.SAT, Trust.EXACT, (Fraction(-7, 10),))


def decided_by_bounds(query: Query) -> bool:
    (outcome,) = decide(query)
    return outcome.detail == "decided by bounds alone"


def test_smooth_networks_are_refused_by_name() -> None:
    nodes = hinge()
    nodes[2] = Sigmoid(name="sig_7", inputs=(1,), shape=(1,))
    (outcome,) = decide(Query(chain(nodes), Property(UNIT, ((row({0: 1}, -1),),))))
    assert outcome.reason is Reason.UNSUPPORTED
    assert "sig_7" in outcome.detail and "Sigmoid" in outcome.detail


def test_interruption_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    query, _ = random_query(1)
    solver_that(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        decide(query, bounds=False)


@pytest.mark.parametrize("bounds", [True, False])
def test_weights_that_are_known_up_to_an_error_are_not_believed_to_the_last_bit(bounds: bool) -> None:
    """y = relu(x/3) at x = 1: the stored third is too small, and 3y ≥ 1 holds of the true one."""
    third = torch.tensor([[1 / 3]], dtype=torch.float64)
    assert Fraction(float(third)) < Fraction(1, 3)
    nodes = hinge()
    zero = torch.zeros(1, dtype=torch.float64)
    box, touched, missed = Box(np.ones(1), np.ones(1)), row({0: -3}, -1), row({0: -3}, -1 - 1e-9)
    for error, expected in ((0.0, Verdict.UNSAT), (2.0**-53, Verdict.UNKNOWN)):
        nodes[1] = Linear(name="fc", inputs=(0,), shape=(1,), weight=third, bias=zero, weight_error=error)
        network = chain(nodes)
        first, second = decide(*(Query(network, Property(box, ((one,),))) for one in (touched, missed)), bounds=bounds)
        assert second.verdict is Verdict.UNSAT
        assert first.verdict is expected or (error and first.verdict is Verdict.SAT and first.trust is Trust.FLOAT)
        if not bounds:
            assert second.trust is (Trust.ROUNDED if error else Trust.EXACT)


def test_linear_forms_have_the_values_of_the_network() -> None:
    """With the phases of a point, the folded forms give the point's own pre-activations and outputs."""
    rng = np.random.default_rng(5)
    network = residual(rng).to(torch.float64)
    x = torch.from_numpy(rng.integers(-8, 9, (1, 2, 3, 2)) / 8)
    values = network.values(x)
    phases = {}
    sizes = sizes_of(network, [Bounds(value - 1, value + 1) for value in values], 0)
    for index in network.activations:
        z = values[network.nodes[index].inputs[0]].flatten().numpy()
        # Every third neuron is left to the solver.
        free = np.arange(len(z)) % 3 == 0
        phases[index] = Phases(np.where(free, -np.inf, z), np.where(free, np.inf, z))
    folding = Folding(network)
    last = len(network.nodes) - 1
    rows = Dyadic(np.array([[1, 0], [0, 1]], dtype=object), 0)
    targets = [(last, range(2), folding.pull_back(last, rows, phases, sizes))]
    targets += [(network.nodes[i].inputs[0], chosen, forms) for i, chosen, forms in folding.neurons(phases, sizes)]
    for target, chosen, forms in targets:
        total = forms.constant.numbers.astype(np.float64) * 2.0**forms.constant.exponent
        for source, term in forms.terms.items():
            coefficients = term.numbers.astype(np.float64) * 2.0**term.exponent
            total = total + coefficients @ values[source].flatten().numpy()
        expected = values[target].flatten().numpy()[list(chosen)]
        np.testing.assert_allclose(total, expected, rtol=1e-12, atol=1e-12)


def tree(*queries: Query, seconds: float = 30.0) -> list[Outcome]:
    """What ``smt`` says, which asks z3 about sub-problems."""
    return claims(Smt(), queries, seconds)


@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("few", [0, 2, 100])
def test_verdicts_of_sub_problems_agree_with_enumeration(
    few: int, leaky: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size of the sub-problems that z3 decides; almost nothing else decides any here."""
    monkeypatch.setattr(module, "FEW", few)
    cases = [random_query(seed, leaky=leaky, dyadic=seed % 2 == 0) for seed in range(9)]
    decided = 0
    bare = Branching(steps=0, adaptive=0, stalled=1e9, settled=1e9, finishing=0)
    method = Smt(search=bare, slopes=Slopes(steps=0), intermediate=Ascent(steps=0))
    found = claims(method, [query for query, _ in cases], 30)
    for (query, margin), outcome in zip(cases, found, strict=True):
        check(query, outcome, margin)
        if outcome.verdict is Verdict.UNSAT:
            assert outcome.trust is Trust.ROUNDED
        decided += "sub-problems, 0 of them" not in outcome.detail and "of them decided by z3" in outcome.detail
    # The relaxations of networks without slopes are good enough for the others.
    assert decided > 0 or few < 100 or not leaky


def test_sub_problems_at_the_boundary_are_decided_exactly() -> None:
    network, box = chain(hinge()), UNIT
    touched, missed, corner, below = tree(
        Query(network, Property(box, ((row({0: 1}, 0),),))),
        Query(network, Property(box, ((row({0: 1}, 0, True),),))),
        Query(network, Property(box, ((row({0: -1}, -1),),))),
        Query(network, Property(box, ((row({0: -1}, -1 - Fraction(1, 10**30)),),))),
    )
    assert (touched.verdict, corner.verdict) == (Verdict.SAT, Verdict.SAT)
    assert (missed.verdict, below.verdict) == (Verdict.UNSAT, Verdict.UNSAT)
    # Nothing is known of the margin but that it is positive.
    assert missed.margin == below.margin == 0.0 and "1 of them decided by z3" in below.detail


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Checked("unknown", {}, "incomplete"), Reason.INCOMPLETE),
        (MemoryError(), Reason.INCOMPLETE),
        (CallFailed("it crashed"), Reason.INCOMPLETE),
    ],
)
def test_a_sub_problem_that_the_solver_does_not_decide_is_no_unsat(
    answer: Checked | Exception, reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    solver_that(monkeypatch, answer)
    (outcome,) = tree(Query(chain(hinge()), Property(UNIT, ((row({0: -1}, -1 - Fraction(1, 10**30)),),))))
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, reason)


@pytest.mark.parametrize("evaluable", [True, False])
def test_an_exact_counterexample_of_a_sub_problem_that_floats_miss_is_told(
    monkeypatch: pytest.MonkeyPatch, evaluable: bool
) -> None:
    query, edge = beyond_seven_tenths()
    solver_that(monkeypatch, edge, *[Checked("unsat", {})] * 50)
    monkeypatch.setattr(module.WitnessCheck, "reached", lambda *_: False)
    if not evaluable:
        monkeypatch.setattr(module, "evaluable", lambda network: False)
    (outcome,) = tree(query)
    expected = (Verdict.SAT, Reason.REFUTED) if evaluable else (Verdict.UNKNOWN, Reason.UNCONFIRMED)
    assert (outcome.verdict, outcome.reason) == expected


def test_a_search_of_sub_problems_whose_time_runs_out_is_unknown() -> None:
    rng = np.random.default_rng(1)
    network, box = mlp(rng, (20, 60, 60, 60, 2)), ball(np.zeros(20), 0.5)
    with torch.no_grad():
        y = network(torch.from_numpy(rng.uniform(-0.5, 0.5, (5000, 20))))
    gap = y[:, 0] - y[:, 1]
    bound = float(gap.min() - 0.5 * (gap.max() - gap.min()))
    hard = Query(network, Property(box, ((row({0: 1, 1: -1}, bound),),)))
    outcome, none_left = claims(Smt(), [hard, hard], [0.5, 0.0])
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.TIMEOUT)
    assert none_left.reason is Reason.TIMEOUT
