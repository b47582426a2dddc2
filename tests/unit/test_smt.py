"""z3 against enumeration and the MILP, boundaries decided exactly, and what it says when it does not know."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.asking import claims
from tests.support.draws import draws
from tests.support.solver_cases import UNIT, ball, chain, check, hinge, mlp, random_query, residual, row
from verifiable_relu.bounds import Ascent, Bounds
from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.network.nodes import Linear, Relu, Sigmoid
from verifiable_relu.search.solvers.z3 import Z3Answer, Z3Task
from verifiable_relu.spec.property import Box, Property, Query
from verifiable_relu.trust.exact import evaluate_exact
from verifiable_relu.verifiers import smt as module
from verifiable_relu.verifiers.bab.slopes import Slopes
from verifiable_relu.verifiers.bab.tree import Branching
from verifiable_relu.verifiers.base import Outcome, Reason, Trust, Verdict
from verifiable_relu.verifiers.encoding import ExactEncoding, magnitudes
from verifiable_relu.verifiers.milp import Milp
from verifiable_relu.verifiers.smt import Smt

whole = pytest.mark.parametrize("whole", [True, False], ids=["smt-exact", "smt"])


def decide(*queries: Query, whole: bool = True, seconds: float = 20.0) -> list[Outcome]:
    return claims(Smt(whole=whole), queries, seconds)


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
        unsafe = (((row({0: 1, 1: -1}, nearest + shift),),) for shift in (-0.02, 0.001))
        queries += [Query(network, Property(box, one)) for one in unsafe]
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
def test_planted_witness_is_never_denied(seed: int) -> None:
    rng = np.random.default_rng(seed)
    network = mlp(rng, (2, 5, 4, 2))
    box = ball(rng.normal(size=2).round(3), 0.2)
    corner = np.where(rng.random(2) < 0.5, box.lower, box.upper)
    y = evaluate_exact(network, [Fraction(float(v)) for v in corner])
    unsafe = ((row({0: 1}, y[0]), row({1: -1}, -y[1])),)
    assert decide(Query(network, Property(box, unsafe)), seconds=5)[0].verdict is not Verdict.UNSAT


@whole
def test_boundaries_are_decided_exactly(whole: bool) -> None:
    network = chain(hinge())
    opened = Box(np.array([-1.0]), np.array([1.0]), open_upper=frozenset({0}))
    cases = [
        (UNIT, row({0: 1}, 0), Verdict.SAT),
        (UNIT, row({0: 1}, 0, True), Verdict.UNSAT),
        (UNIT, row({0: -1}, -1), Verdict.SAT),
        (opened, row({0: -1}, -1), Verdict.UNSAT),
        # Bounds take the row's bound in float64, and so can't tell it from -1; z3 can.
        (UNIT, row({0: -1}, -1 - Fraction(1, 10**30)), Verdict.UNSAT),
    ]
    found = decide(*(Query(network, Property(box, ((one,),))) for box, one, _ in cases), whole=whole)
    assert [outcome.verdict for outcome in found] == [expected for *_, expected in cases]
    # Nothing is known of the margin but that it is positive.
    assert found[4].margin == 0.0
    assert whole or "1 of them decided by z3" in found[4].detail


def test_a_counterexample_may_be_a_number_that_no_float_is() -> None:
    # relu(3·x) reaches 1 at x = 1/3 alone, held there by a second neuron's row.
    nodes = hinge(3.0)
    weight, bias = torch.tensor([[3.0], [-3.0]]), torch.tensor([0.0, 2.0])
    nodes[1] = Linear(name="fc", inputs=(0,), shape=(2,), weight=weight, bias=bias)
    nodes[2] = Relu(name="act", inputs=(1,), shape=(2,))
    (outcome,) = decide(Query(chain(nodes), Property(UNIT, ((row({0: -1}, -1), row({1: -1}, -1)),))))
    assert (outcome.verdict, outcome.trust) == (Verdict.SAT, Trust.EXACT)
    assert outcome.witness == (Fraction(1, 3),)


@whole
def test_a_query_whose_time_runs_out_is_unknown(whole: bool) -> None:
    rng = np.random.default_rng(1)
    network, box = mlp(rng, (20, 60, 60, 60, 2)), ball(np.zeros(20), 0.5)
    with torch.no_grad():
        y = network(torch.from_numpy(rng.uniform(-0.5, 0.5, (5000, 20))))
    gap = y[:, 0] - y[:, 1]
    bound = float(gap.min() - 0.5 * (gap.max() - gap.min()))
    hard = Query(network, Property(box, ((row({0: 1, 1: -1}, bound),),)))
    for outcome in claims(Smt(whole=whole), [hard, hard], [0.5, 0.0]):
        assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.TIMEOUT)


def solver_that(monkeypatch: pytest.MonkeyPatch, answer: Z3Answer | BaseException) -> list[Z3Task]:
    """Have z3's process give this answer, or raise; returns a list of what it is asked."""
    asked: list[Z3Task] = []

    def call(task: Z3Task, *limits: object) -> Z3Answer:
        asked.append(task)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(module, "Z3", SimpleNamespace(start=lambda: None, call=call))
    return asked


@whole
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Z3Answer("unknown", reason="incomplete"), Reason.ERROR),
        (Z3Answer("unknown", reason="timeout"), Reason.TIMEOUT),
        (Z3Answer("unknown", reason="canceled"), Reason.TIMEOUT),
        (OutOfTime(), Reason.TIMEOUT),
        (MemoryError(), Reason.MEMORY),
        (CallFailed("it crashed"), Reason.ERROR),
    ],
)
def test_an_unknown_answer_of_the_solver_is_no_unsat(
    answer: Z3Answer | Exception, reason: Reason, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(chain(hinge()), Property(UNIT, ((row({0: -1}, -1 - Fraction(1, 10**30)),),)))
    asked = solver_that(monkeypatch, answer)
    (outcome,) = decide(query, whole=whole)
    # A tree goes on without.
    assert asked and (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, reason if whole else Reason.INCOMPLETE)


def beyond_seven_tenths() -> Query:
    """Whether relu(−x) reaches 7/10 on [−1, 1]: the float32 number nearest to 7/10 is less."""
    return Query(chain(hinge(-1.0)), Property(UNIT, ((row({0: -1}, Fraction(-7, 10)),),)))


def model(value: Fraction) -> dict[str, Fraction]:
    """The model at x = −value, where the only neuron is active."""
    return {"x_0": -value, "p_2_0": value}


def test_a_counterexample_that_survives_rounding_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Z3Answer("sat", (model(Fraction(7, 10)), model(Fraction(3, 4))))
    solver_that(monkeypatch, answer)
    (outcome,) = decide(beyond_seven_tenths())
    assert (outcome.verdict, outcome.witness) == (Verdict.SAT, (Fraction(-3, 4),))
    monkeypatch.undo()
    (outcome,) = decide(beyond_seven_tenths())
    assert outcome.witness is not None and float(np.float32(outcome.witness[0])) == outcome.witness[0] < -0.7


@pytest.mark.parametrize("evaluable", [True, False])
@whole
def test_an_exact_counterexample_on_the_boundary_that_floats_miss_is_one(
    whole: bool, evaluable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    solver_that(monkeypatch, Z3Answer("sat", (model(Fraction(7, 10)),)))
    monkeypatch.setattr(module.WitnessCheck, "reached", lambda *_: False)
    monkeypatch.setattr(module, "evaluable", lambda network: evaluable)
    (outcome,) = decide(beyond_seven_tenths(), whole=whole)
    expected = (Verdict.SAT, Trust.EXACT) if evaluable else (Verdict.UNKNOWN, None)
    assert (outcome.verdict, outcome.trust) == expected
    assert outcome.witness == (Fraction(-7, 10),)
    assert evaluable or outcome.reason is Reason.UNCONFIRMED


def test_smooth_networks_are_refused_by_name() -> None:
    nodes = hinge()
    nodes[2] = Sigmoid(name="sig_7", inputs=(1,), shape=(1,))
    (outcome,) = decide(Query(chain(nodes), Property(UNIT, ((row({0: 1}, -1),),))))
    assert outcome.reason is Reason.UNSUPPORTED
    assert "sig_7" in outcome.detail and "Sigmoid" in outcome.detail


def test_interruption_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = solver_that(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        decide(beyond_seven_tenths())
    assert asked


def test_weights_that_are_known_up_to_an_error_are_not_believed_to_the_last_bit() -> None:
    """y = relu(x/3) at x = 1: the stored third is too small, and 3y ≥ 1 holds of the true one."""
    third = torch.tensor([[1 / 3]], dtype=torch.float64)
    assert Fraction(float(third)) < Fraction(1, 3)
    nodes = hinge()
    zero = torch.zeros(1, dtype=torch.float64)
    box, touched, missed = Box(np.ones(1), np.ones(1)), row({0: -3}, -1), row({0: -3}, -1 - 1e-9)
    for error, expected in ((0.0, Verdict.UNSAT), (2.0**-53, Verdict.UNKNOWN)):
        nodes[1] = Linear(name="fc", inputs=(0,), shape=(1,), weight=third, bias=zero, weight_error=error)
        first, second = decide(*(Query(chain(nodes), Property(box, ((one,),))) for one in (touched, missed)))
        assert second.verdict is Verdict.UNSAT
        assert first.verdict is expected or (error and first.verdict is Verdict.SAT and first.trust is Trust.FLOAT)


@pytest.mark.parametrize("scale", [None, 0.375])
def test_exact_forms_have_the_values_of_the_network(scale: float | None) -> None:
    """With the phases of a point, the forms give the point's own pre-activations and outputs."""
    rng = np.random.default_rng(5)
    nodes = list(residual(rng).to(torch.float64).nodes)
    if scale is not None:
        # One number for all elements.
        nodes[1] = replace(nodes[1], scale=torch.tensor(scale, dtype=torch.float64))  # type: ignore[call-arg]
    network = chain(nodes)
    x = torch.from_numpy(rng.integers(-8, 9, (1, 2, 3, 2)) / 8)
    values = network.values(x)
    # Every third neuron is left to the solver.
    signs = {i: np.sign(values[network.nodes[i].inputs[0]].flatten().numpy()) for i in network.activations}
    phases = {i: np.where(np.arange(len(sign)) % 3 == 0, 0, sign) for i, sign in signs.items()}
    encoding = ExactEncoding(network, phases, magnitudes(network, [Bounds(v - 1, v + 1) for v in values]))
    last, rows = len(network.nodes) - 1, Dyadic(np.array([[1, 0], [0, 1]], dtype=object), 0)
    targets = [(last, np.arange(2), encoding.pull_back(last, rows))]
    targets += [(network.nodes[i].inputs[0], chosen, forms) for i, chosen, forms in encoding.neurons()]
    assert len(targets) == 3
    for target, chosen, forms in targets:
        total = forms.constant.numbers.astype(np.float64) * 2.0**forms.constant.exponent
        for source, term in forms.terms.items():
            coefficients = term.numbers.astype(np.float64) * 2.0**term.exponent
            total = total + coefficients @ values[source].flatten().numpy()
        expected = values[target].flatten().numpy()[chosen]
        np.testing.assert_allclose(total, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("few", [0, 2, 100])
def test_verdicts_of_sub_problems_agree_with_enumeration(
    few: int, leaky: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size of the sub-problems that z3 decides; almost nothing else decides any here."""
    monkeypatch.setattr(module, "FEW", few)
    cases = [random_query(seed, leaky=leaky, dyadic=seed % 2 == 0) for seed in range(9)]
    bare = Branching(steps=0, adaptive=0, stalled=1e9, settled=1e9, finishing=0)
    method = Smt(search=bare, slopes=Slopes(steps=0), intermediate=Ascent(steps=0))
    decided = 0
    for (query, margin), outcome in zip(cases, claims(method, [query for query, _ in cases], 30), strict=True):
        check(query, outcome, margin)
        decided += "sub-problems, 0 of them" not in outcome.detail and "of them decided by z3" in outcome.detail
    # The relaxations of networks without slopes are good enough for the others.
    assert decided > 0 or few < 100 or not leaky
