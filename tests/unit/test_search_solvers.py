"""Queries of flat networks that solvers decide: against enumeration and fractions, and whatever a solver answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import highspy
import numpy as np
import pytest
import torch

from tests.support import exact
from tests.support.draws import draws, some
from tests.support.exact import exact_outputs
from tests.support.solver_cases import (
    UNIT,
    ball,
    barely_unstable,
    check,
    hinge,
    mlp,
    planted,
    random_query,
    residual,
    row,
    union_in_order,
)
from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import CallFailed, OutOfTime, UnsupportedError
from verifiable_relu.ir.exact import evaluate_exact
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.functions.smooth import Smooth
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Dense, Diagonal
from verifiable_relu.ir.network import Affine, Elementwise, Input, Maximum, Network, Op, Product, Source
from verifiable_relu.search.bab.tree import Branching
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict, fault
from verifiable_relu.search.piecewise_linear import without_maxima
from verifiable_relu.search.property_rows import PropertyRows
from verifiable_relu.search.question import BoundedQuery, CompleteMethod
from verifiable_relu.search.solvers import milp, smt
from verifiable_relu.search.solvers.encoding import ExactEncoding, ExactForms, exact_point
from verifiable_relu.search.solvers.marabou import Marabou
from verifiable_relu.search.solvers.milp import Milp
from verifiable_relu.search.solvers.smt import Smt
from verifiable_relu.search.solvers.workers import HighsResult, HighsTask, Z3Answer, Z3Task
from verifiable_relu.search.witness import WitnessCheck
from verifiable_relu.settings import default_settings
from verifiable_relu.spec.property import Box, Polytope, Property, Query, Row

METHODS: dict[str, CompleteMethod] = {"milp": Milp(), "smt": Smt(), "smt-exact": Smt(whole=True)}
if find_spec("maraboupy"):
    METHODS["marabou"] = Marabou()
BARE = Branching(steps=0, adaptive_neurons=0, finish_below_blame=1e9, decide_below_blame=1e9, finishing_steps=0)
exact_methods = pytest.mark.parametrize("method", [Smt(whole=True), Smt()], ids=lambda method: method.name)


def intervals(network: Network, box: Box) -> dict[int, Interval]:
    """Intervals of all ops, with far more room than rounding takes."""
    return exact.intervals(network, Interval(*(torch.from_numpy(end)[None] for end in (box.lower, box.upper))))


def bounded(network: Network, prop: Property, known: dict[int, Interval]) -> BoundedQuery:
    """A query of which nothing but intervals is known."""
    count = int(PropertyRows.from_properties([prop], network.output_size).exists.sum())
    return BoundedQuery(network, prop, known, torch.full((count,), -torch.inf))


def decide(method: CompleteMethod, network: Network, prop: Property, seconds: float = 20.0) -> Outcome:
    """Ask a method about a query of which intervals by interval arithmetic are known."""
    method.start()
    with default_settings():
        try:
            method.require(network)
            return method.decide(bounded(network, prop, intervals(network, prop.box)), TimeBudget().begun(seconds))
        except Exception as error:
            return fault(error, method.name)


def ask(method: CompleteMethod, query: Query, seconds: float = 20.0) -> Outcome:
    return decide(method, query.network, query.property, seconds)


def flat(*ops: Op) -> Network:
    return Network(ops, Source((ops[0].size,), (ops[-1].size,)))


def relu_of(weight: list[list[float]], bias: list[float] | None = None) -> Network:
    """y = relu(weight·x + bias)."""
    matrix = torch.tensor(weight, dtype=torch.float64)
    added = None if bias is None else torch.tensor(bias, dtype=torch.float64)
    return flat(
        Input(name="x", size=matrix.shape[1]),
        Affine(name="fc", inputs=(0,), size=len(matrix), map=Dense(matrix), bias=added),
        Elementwise(name="act", inputs=(1,), size=len(matrix), function=PiecewiseLinear()),
    )


def pooled(rng: np.random.Generator) -> Network:
    """A maximum of maxima between two layers."""
    weight, bias = (torch.from_numpy(rng.integers(-8, 9, shape) / 8) for shape in ((8, 2), (8,)))
    return flat(
        Input(name="x", size=2),
        Affine(name="fc", inputs=(0,), size=8, map=Dense(weight), bias=bias),
        Maximum(name="pool", inputs=(1,), size=3, candidates=torch.tensor([[0, 3, 6], [1, 4, 7], [2, 5, 6]])),
        Elementwise(name="act", inputs=(2,), size=3, function=PiecewiseLinear(torch.tensor([0.0, 0.25, -0.5]))),
        Maximum(name="last", inputs=(3,), size=1, candidates=torch.tensor([[0], [1], [2]])),
    )


def difference(bound: float | Fraction) -> tuple[Polytope, ...]:
    return ((row({0: 1, 1: -1}, bound),),)


# Verdicts


@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_verdicts_agree_with_enumeration(method: str, leaky: bool) -> None:
    for seed in range(draws(12)):
        query, margin = random_query(seed, leaky=leaky, dyadic=seed % 2 == 0)
        outcome = ask(METHODS[method], query)
        if method == "marabou" and outcome.verdict is Verdict.UNKNOWN:
            assert outcome.reason is (Reason.UNSUPPORTED if leaky else Reason.INCOMPLETE)
        else:
            check(query, outcome, margin)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("query", [*(planted(seed) for seed in range(2)), union_in_order(), barely_unstable()])
def test_planted_counterexamples_are_never_denied(query: Query, method: str) -> None:
    assert ask(METHODS[method], query, 5.0).verdict is not Verdict.UNSAT


@pytest.mark.parametrize("method", METHODS)
def test_every_operator_is_encoded(method: str) -> None:
    network = residual(np.random.default_rng(1))
    center = np.random.default_rng(0).integers(-4, 5, 12) / 8
    box, y = ball(center, 1 / 64), exact_outputs(network, [Fraction(float(v)) for v in center])
    # The centre is a counterexample to the first with little to spare; the second is far from being reached.
    for spare, verdict in ((Fraction(1, 10**9), Verdict.SAT), (Fraction(-100), Verdict.UNSAT)):
        outcome = decide(METHODS[method], network, Property(box, difference(y[0] - y[1] + spare)))
        assert outcome.verdict is verdict


@pytest.mark.parametrize("method", METHODS)
def test_maxima_are_tournaments(method: str) -> None:
    for seed in range(draws(4)):
        rng = np.random.default_rng(seed)
        net, box = pooled(rng), ball(rng.integers(-4, 5, 2) / 8, 0.5)
        least = float(net(torch.from_numpy(rng.uniform(box.lower, box.upper, (20000, 2)))).min())
        for bound, verdict in ((least + 1e-3, Verdict.SAT), (least - 0.1, Verdict.UNSAT)):
            outcome = decide(METHODS[method], net, Property(box, ((row({0: 1}, bound),),)))
            assert outcome.verdict is verdict or method == "marabou"
            if outcome.verdict is Verdict.SAT:
                assert outcome.witness is not None and evaluate_exact(net, outcome.witness)[0] <= bound


@pytest.mark.parametrize("method", METHODS)
def test_a_query_without_unstable_neurons_is_decided(method: str) -> None:
    box = Box(np.array([1.0]), np.array([2.0]))
    for bound, verdict in ((1.5, Verdict.SAT), (0.5, Verdict.UNSAT)):
        prop = Property(box, ((row({0: 1}, bound), row({0: -1}, -0.25)),))
        assert decide(METHODS[method], hinge(), prop).verdict is verdict


@exact_methods
def test_boundaries_are_decided_exactly(method: Smt) -> None:
    opened = Box(np.array([-1.0]), np.array([1.0]), open_upper=frozenset({0}))
    below = Box(np.array([-0.5]), np.array([1.0]), open_lower=frozenset({0}))
    cases = [
        (UNIT, row({0: 1}, 0), Verdict.SAT),
        (UNIT, row({0: 1}, 0, True), Verdict.UNSAT),
        (UNIT, row({0: -1}, -1), Verdict.SAT),
        (opened, row({0: -1}, -1), Verdict.UNSAT),
        (below, row({0: 1}, 0), Verdict.SAT),
        (below, row({1: -1}, -0.5), Verdict.UNSAT),
        # Bounds take the row's bound in float64, and so can't tell it from -1; z3 can.
        (UNIT, row({0: -1}, -1 - Fraction(1, 10**30)), Verdict.UNSAT),
    ]
    net = relu_of([[1.0], [-1.0]])
    found = [decide(method, net, Property(box, ((one,),))) for box, one, _ in cases]
    assert [outcome.verdict for outcome in found] == [expected for *_, expected in cases]
    # Nothing is known of the margin but that it is positive.
    assert found[-1].margin == 0.0 and found[-1].trust is Trust.ROUNDED
    assert method.whole or "1 of them decided by z3" in found[-1].detail


def test_a_counterexample_may_be_a_number_that_no_float_is() -> None:
    """relu(3·x) reaches 1 at x = 1/3 alone, held there by relu(2 − 3·x)."""
    net = relu_of([[3.0], [-3.0]], [0.0, 2.0])
    outcome = decide(Smt(whole=True), net, Property(UNIT, ((row({0: -1}, -1), row({1: -1}, -1)),)))
    assert (outcome.verdict, outcome.trust, outcome.witness) == (Verdict.SAT, Trust.EXACT, (Fraction(1, 3),))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [lambda rng: mlp(rng, (3, 6, 5, 2), leaky=True), pooled])
def test_at_a_point_a_network_has_its_value_alone(make: Callable[[np.random.Generator], Network], method: str) -> None:
    """Though intervals around the point leave the phases of many neurons to the solver."""
    for seed in range(draws(8)):
        rng = np.random.default_rng(seed)
        net, center = make(rng), rng.integers(-4, 5, 3) / 8
        center = center[: net.input_size]
        value, known = evaluate_exact(net, [Fraction(v) for v in center])[0], intervals(net, ball(center, 0.5))
        for rows in ((row({0: 1}, value - Fraction(1, 1000)),), (row({0: -1}, -value - Fraction(1, 1000)),)):
            query = bounded(net, Property(Box(center, center), (rows,)), known)
            try:
                assert METHODS[method].decide(query, TimeBudget().begun(20.0)).verdict is Verdict.UNSAT
            except UnsupportedError:
                # Marabou does not take such slopes.
                assert method == "marabou"


def test_sub_problems_that_bounds_leave_open_are_decided_with_their_own_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing but z3 finds counterexamples, and bounds close other sub-problems."""
    monkeypatch.setattr(WitnessCheck, "reached", lambda *_: False)
    branching = Branching(
        steps=4, adaptive_neurons=0, finish_below_blame=1e9, decide_below_blame=1e9, finishing_steps=4
    )
    for seed in range(12):
        query, margin = random_query(seed, leaky=True)
        check(query, ask(Smt(branching=branching, open_neurons=seed % 3), query), margin)


@pytest.mark.parametrize("open_neurons", [0, 2, 100])
def test_sub_problems_of_any_size_may_be_decided_by_z3(open_neurons: int) -> None:
    decided = 0
    for seed in range(6):
        query, margin = random_query(seed, leaky=True, dyadic=seed % 2 == 0)
        outcome = ask(Smt(branching=BARE, open_neurons=open_neurons), query)
        check(query, outcome, margin)
        decided += "sub-problems, 0 of them" not in outcome.detail and "of them decided by z3" in outcome.detail
    assert decided or open_neurons < 100


@pytest.mark.parametrize("method", METHODS)
def test_a_query_whose_time_runs_out_is_unknown(method: str) -> None:
    rng = np.random.default_rng(1)
    network, box = mlp(rng, (20, 60, 60, 60, 2)), ball(np.zeros(20), 0.5)
    y = network(torch.from_numpy(rng.uniform(-0.5, 0.5, (5000, 20))))
    gap = y[:, 0] - y[:, 1]
    for seconds in (0.3, 0.0):
        prop = Property(box, difference(float(gap.min() - 0.5 * (gap.max() - gap.min()))))
        outcome = decide(METHODS[method], network, prop, seconds)
        assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.TIMEOUT)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_piecewise_linear_is_refused_by_name(method: str) -> None:
    x, act = Input(name="x", size=1), Elementwise(name="sig_7", inputs=(0,), size=1, function=Smooth("Sigmoid"))
    for net, names in (
        (flat(x, act), ("sig_7", "Sigmoid")),
        (flat(x, Product(name="sq", inputs=(0, 0), size=1)), ("sq",)),
    ):
        outcome = decide(METHODS[method], net, Property(UNIT, ((row({0: 1}, -1),),)))
        assert outcome.reason is Reason.UNSUPPORTED and all(name in outcome.detail for name in names)


@pytest.mark.parametrize("coefficient, bound", [(Fraction(1), Fraction(10**400)), (Fraction(10**400), Fraction(0))])
@pytest.mark.parametrize("method", METHODS)
def test_a_polytope_whose_rows_are_all_beyond_float64_is_not_excluded(
    method: str, coefficient: Fraction, bound: Fraction
) -> None:
    """No row of it is left in float64, so that the solver would be asked nothing; all points, or some, are unsafe."""
    prop = Property(UNIT, ((Row(((0, coefficient),), bound),),))
    outcome = decide(METHODS[method], hinge(), prop)
    assert outcome.verdict is not Verdict.UNSAT and outcome.reason is not Reason.ERROR


# Rounding


@exact_methods
@pytest.mark.parametrize("divisor", [None, torch.tensor([3.0])])
def test_weights_that_are_known_up_to_an_error_are_not_believed_to_the_last_bit(
    method: Smt, divisor: torch.Tensor | None
) -> None:
    """y = relu(x/3) at x = 1: the stored third is too small, and 3y ≥ 1 holds of the true one."""
    third = Diagonal(torch.tensor([1 / 3], dtype=torch.float64), divisor)
    assert Fraction(float(third.weight)) < Fraction(1, 3)
    x, act = Input(name="x", size=1), Elementwise(name="act", inputs=(1,), size=1, function=PiecewiseLinear())
    for error, off in ((0.0, None), (2.0**-53, None), (0.0, torch.tensor([1e-16], dtype=torch.float64))):
        if divisor is not None and not error:
            continue
        net = flat(x, Affine(name="a", inputs=(0,), size=1, map=third, weight_error=error, bias_error=off), act)
        box = Box(np.ones(1), np.ones(1))
        touched, missed = (decide(method, net, Property(box, ((row({0: -3}, -1 - d),),))) for d in (0, 1e-9))
        assert missed.verdict is Verdict.UNSAT
        is_exact = not error and off is None
        assert (touched.verdict is Verdict.UNSAT) == is_exact
        assert divisor is None or (touched.verdict is Verdict.SAT and touched.trust is Trust.EXACT)


def test_exact_forms_have_the_values_of_the_network() -> None:
    """With the phases of a point, the forms give the point's own pre-activations and outputs, to the last bit."""
    for seed, net in enumerate([residual(np.random.default_rng(5)), pooled(np.random.default_rng(5))]):
        net, _ = without_maxima(net)
        rng = np.random.default_rng(seed)
        x = [Fraction(int(v), 8) for v in rng.integers(-8, 9, net.input_size)]
        at = [
            np.array(evaluate_exact(replace(net, ops=net.ops[: i + 1]), x), dtype=object) for i in range(len(net.ops))
        ]
        # Every third neuron is left to the solver.
        phases = {}
        for i in net.activations:
            sign = np.where(at[net.ops[i].inputs[0]] >= 0, 1, -1)
            phases[i] = np.where(np.arange(len(sign)) % 3 == 0, 0, sign)
        encoding = ExactEncoding(net, phases)
        values = np.array([*x, *(at[i][j] for i, j in encoding.places)], dtype=object)

        def compare(forms: ExactForms, expected: list[Fraction], values: np.ndarray = values) -> None:
            coefficients, constant = (
                f.numbers * Fraction(2) ** f.exponent for f in (forms.coefficients, forms.constant)
            )
            assert (coefficients @ values + constant).tolist() == expected
            assert not forms.error.numbers.any()

        unit = np.array(np.eye(net.output_size, dtype=int), dtype=object)
        compare(encoding.forms(len(net.ops) - 1, Dyadic(unit, 0)), at[-1].tolist())
        count = 0
        for start, forms in encoding.neurons():
            places = encoding.places[start : start + len(forms.constant.numbers)]
            compare(forms, [at[net.ops[i].inputs[0]][j] for i, j in places])
            count += len(places)
        assert count == len(encoding.places) > 0


def test_coefficients_too_small_for_highs_are_not_forgotten() -> None:
    """y = x_0 + 1e-13·x_1 with x_1 up to 1e14: the second term is what decides."""
    box = Box(np.array([-1.0, -1e14]), np.array([1.0, 1e14]))
    assert decide(Milp(), relu_of([[1.0, 1e-13]]), Property(box, ((row({0: -1}, -5),),))).verdict is not Verdict.UNSAT


def test_a_network_beyond_all_scales_is_refused() -> None:
    box = Box(np.array([-1e20]), np.array([1e20]))
    outcome = decide(Milp(), relu_of([[1e300]]), Property(box, ((row({0: -1}, -1),),)))
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.UNSUPPORTED)


# Whatever the solver answers


def stand_in(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, answer: Any) -> list[Any]:
    """Have a solver's process give this answer, raise it, or call it; returns a list of what it is asked."""
    asked: list[Any] = []

    def call(task: Any, *rest: Any) -> Any:
        asked.append(task)
        if isinstance(answer, BaseException):
            raise answer
        return answer(task, *rest) if callable(answer) else answer

    monkeypatch.setattr(module, name, SimpleNamespace(start=lambda: None, call=call))
    return asked


@exact_methods
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
def test_an_unknown_answer_of_z3_is_no_unsat(
    answer: Z3Answer | Exception, reason: Reason, method: Smt, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = stand_in(monkeypatch, smt, "Z3", answer)
    outcome = decide(method, hinge(), Property(UNIT, ((row({0: -1}, -1 - Fraction(1, 10**30)),),)))
    # A tree goes on without.
    expected = reason if method.whole else Reason.INCOMPLETE
    assert asked and (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, expected)


BEYOND = Property(UNIT, ((row({0: -1}, Fraction(-7, 10)),),))
"""Whether relu(−x) reaches 7/10 on [−1, 1]: the float32 number nearest to 7/10 is less."""


def model(value: Fraction) -> dict[str, Fraction]:
    """The model at x = −value, where the only neuron is active."""
    return {"x_0": -value, "p_2_0": value}


def test_a_counterexample_that_survives_rounding_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch, smt, "Z3", Z3Answer("sat", (model(Fraction(7, 10)), model(Fraction(3, 4)))))
    outcome = decide(Smt(whole=True), hinge(-1.0), BEYOND)
    assert (outcome.verdict, outcome.witness) == (Verdict.SAT, (Fraction(-3, 4),))
    assert isinstance(asked[0], Z3Task) and asked[0].pairs == [("p_2_0", "n_2_0")]
    monkeypatch.undo()
    outcome = decide(Smt(whole=True), hinge(-1.0), BEYOND)
    assert outcome.witness is not None and float(np.float32(outcome.witness[0])) == outcome.witness[0] < -0.7


@pytest.mark.parametrize("evaluable", [True, False])
@exact_methods
def test_an_exact_counterexample_on_the_boundary_that_floats_miss_is_one(
    method: Smt, evaluable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, smt, "Z3", Z3Answer("sat", (model(Fraction(7, 10)),)))
    monkeypatch.setattr(WitnessCheck, "reached", lambda *_: False)
    monkeypatch.setattr(smt, "is_evaluable", lambda network: evaluable)
    outcome = decide(method, hinge(-1.0), BEYOND)
    expected = (Verdict.SAT, Trust.EXACT) if evaluable else (Verdict.UNKNOWN, None)
    assert (outcome.verdict, outcome.trust) == expected
    assert outcome.witness == (Fraction(-7, 10),)
    assert evaluable or outcome.reason is Reason.UNCONFIRMED


NEARLY = Property(UNIT, ((row({0: -1}, -1 - Fraction(1, 100)),),))
"""Whether relu(x) reaches 1.01 on [−1, 1]."""


@pytest.mark.parametrize("status", list(some(sorted(set(highspy.HighsModelStatus.__members__) - {"kInfeasible"}))))
def test_only_a_proof_of_infeasibility_excludes(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, milp, "HIGHS", HighsResult(status, np.zeros(1000), 1.0))
    outcome = decide(Milp(), hinge(), NEARLY)
    # A solver whose arithmetic fails has not decided; an error would be the program's.
    assert outcome.verdict is Verdict.UNKNOWN and outcome.reason is not Reason.ERROR


def test_what_highs_calls_infeasible_is_proved_again_or_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    proved = decide(Milp(), hinge(), NEARLY)
    assert proved.trust is Trust.ROUNDED and "proved again" in proved.detail
    assert proved.margin is not None and 0 < proved.margin <= 0.01 + 1e-9
    stand_in(monkeypatch, milp, "HIGHS", HighsResult("kInfeasible", np.zeros(0), 0.0))
    word = decide(Milp(reproof_share=0.0), hinge(), NEARLY)
    assert (word.verdict, word.trust, word.margin) == (Verdict.UNSAT, Trust.FLOAT, 0.0)
    assert "not proved again" in word.detail
    for seed in range(9):
        query, margin = random_query(seed)
        if margin <= 0:
            check(query, ask(Milp(), query), margin)


@pytest.mark.parametrize("error", [OutOfTime(), MemoryError(), CallFailed("it crashed")])
def test_a_counterexample_found_before_highs_ended_is_kept(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(task: HighsTask, seconds: float, memory: int | None, judge: Callable[[np.ndarray], bool]) -> object:
        assert task.seconds > 0
        # Inputs are scaled to be between -1 and 1.
        assert not judge(np.zeros_like(task.program.cost)) and judge(np.ones_like(task.program.cost))
        raise error

    stand_in(monkeypatch, milp, "HIGHS", call)
    outcome = decide(Milp(), hinge(), Property(UNIT, ((row({0: -1}, -0.9),),)))
    assert (outcome.verdict, outcome.witness) == (Verdict.SAT, (Fraction(1),))


# Equalities


def equal(coefficients: dict[int, float], value: Fraction, scale: float = 1.0) -> Polytope:
    return row(coefficients, value), row({i: -c * scale for i, c in coefficients.items()}, -value * Fraction(scale))


KINDS: dict[str, Callable[[list[Fraction]], Polytope]] = {
    "one output": lambda y: equal({0: 1.0}, y[0], 2.0),
    "two outputs": lambda y: (*equal({0: 1.0}, y[0]), *equal({1: 1.0}, y[1])),
    "two outputs and a bound": lambda y: (*equal({0: 1.0}, y[0]), *equal({1: 3.0}, 3 * y[1]), row({2: 1.0}, y[2] + 1)),
    "a difference": lambda y: equal({0: 1.0, 2: -1.0}, y[0] - y[2]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_equalities_that_are_reached_have_an_exact_point(seed: int, kind: str) -> None:
    network, box = mlp(np.random.default_rng(seed), (3, 8, 6, 3), leaky=True), ball(np.zeros(3), 1.0)
    # Exact outputs at a point, rounded to a third digit that no float has.
    y = network(torch.tensor([[0.1, -0.2, 0.3]]))[0].tolist()
    prop = Property(box, (KINDS[kind]([Fraction(round(1000 * v), 1000) for v in y]),))
    found = exact_point(network, prop, np.array([0.1, -0.2, 0.3]))
    assert found is not None and box.contains(found) and prop.violated(exact_outputs(network, found))


def test_what_cannot_be_solved_has_no_exact_point() -> None:
    """A row without coefficients, numbers beyond float64 and beyond what is reached."""
    net, huge = mlp(np.random.default_rng(0), (3, 8, 3)), Fraction(10**400)
    impossible = (*equal({0: 1.0}, Fraction(0)), row({}, -1))
    for polytope in (impossible, (row({0: 1.0}, huge), row({0: -1.0}, -huge)), equal({0: 1.0}, Fraction(10**4))):
        assert exact_point(net, Property(ball(np.zeros(3), 1.0), (polytope,)), np.zeros(3)) is None


def test_equalities_behind_a_maximum() -> None:
    net, box = pooled(np.random.default_rng(3)), ball(np.zeros(2), 1.0)
    (y,) = evaluate_exact(net, [Fraction(1, 7), Fraction(1, 3)])
    prop = Property(box, (equal({0: 1.0}, y),))
    found = exact_point(net, prop, np.array([0.2, 0.3]))
    assert found is not None and evaluate_exact(net, found) == [y]
