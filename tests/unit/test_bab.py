"""Branch and bound on a fixed root: against enumeration, planted witnesses, and searches that lie."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.soundness.judge import Report
from tests.soundness.trees import trees
from tests.support.asking import claims, query_batch
from tests.support.draws import draws, some
from tests.support.exact import exact_values
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
from verifiable_relu.bounds import crown_relaxation, input_box
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Input, Linear, Node, Relu
from verifiable_relu.spec.property import Box, Property, Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.bab.ascent import Bounded, DualAscent, Nodes
from verifiable_relu.verifiers.bab.folded import AffineForms, Folded
from verifiable_relu.verifiers.bab.folding import fold
from verifiable_relu.verifiers.bab.loop import State, gain
from verifiable_relu.verifiers.bab.proof import Proofs
from verifiable_relu.verifiers.bab.query import FoldedQuery
from verifiable_relu.verifiers.bab.search import Schedule
from verifiable_relu.verifiers.bab.slopes import Slopes
from verifiable_relu.verifiers.bab.strip import TreeRelaxation
from verifiable_relu.verifiers.bab.tree import Branching, PhaseTree
from verifiable_relu.verifiers.base import Outcome, Reason, Verdict


def decide(*queries: Query, seconds: float = 20.0, method: Bab | None = None, **limits: Any) -> list[Outcome]:
    return claims(method or Bab(), queries, seconds, **limits)


@pytest.mark.thorough
def test_systems_that_are_not_held_as_a_whole_are_decided_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without steps for all neurons splits alone decide, so that near ties stay open."""
    monkeypatch.setattr("verifiable_relu.verifiers.bab.folded._WHOLE", 0)
    cases = [random_query(seed, leaky=seed % 2 == 1) for seed in range(8)]
    decided = 0
    for (query, margin), outcome in zip(cases, decide(*(q for q, _ in cases)), strict=True):
        if outcome.verdict is not Verdict.UNKNOWN:
            check(query, outcome, margin)
            decided += 1
    assert decided >= 6


def folded(network: Network, box: Box) -> tuple[Folded, AffineForms]:
    """The folded system, and the network's outputs as its forms."""
    bounds = crown_relaxation(network.to(torch.float64), input_box([Property(box, ())], network))
    return fold(bounds, 0, box, torch.eye(network.output_size))


@pytest.mark.parametrize("leaky", [False, True, None])
@pytest.mark.parametrize("seed", range(draws(4)))
def test_forms_are_the_network_but_for_their_errors(seed: int, leaky: bool | None) -> None:
    """At exact points of the box the folded forms, and those of the relaxation, give the network's exact values."""
    rng = np.random.default_rng(seed)
    network = residual(rng) if leaky is None else mlp(rng, (5, 9, 8, 3), leaky=leaky)
    box = ball(rng.integers(-4, 5, network.input_size) / 8, 0.3 if leaky is not None else 1.5)
    system, outputs = folded(network, box)
    assert system.size > 2
    below, above = system.slope.clamp(max=1), system.slope.clamp(min=1)
    slopes = below + torch.from_numpy(rng.random(system.size)) * (above - below)
    every = torch.arange(system.size)
    # By walks through the network, and by products of rows that are held.
    forms = [(made.neurons.of(every), made.rows) for made in (TreeRelaxation(system, outputs, slopes),)]
    neurons = system.neurons
    strip = TreeRelaxation(system, outputs, slopes)
    forms.append((strip.neurons.of(every), strip.rows))
    for _ in range(5):
        x = [Fraction(float(v)) for v in box.lower + rng.random(box.size) * (box.upper - box.lower)]
        values = exact_values(network, x)
        node_of = {index: network.nodes[index].inputs[0] for index in network.activations}
        z = [values[node_of[i]].reshape(-1)[k] for i, k in system.places.tolist()]
        r = [values[i].reshape(-1)[k] for i, k in system.places.tolist()]
        q = [
            (value - Fraction(t) * pre) / Fraction(width)
            for value, t, pre, width in zip(r, slopes.tolist(), z, strip.width.tolist(), strict=True)
        ]
        assert all(0 <= v <= 1 for v in q)
        e = [
            (x[i] - Fraction(float(system.center[i]))) / Fraction(float(system.radius[i])) for i in system.free.tolist()
        ]
        assert all(abs(v) <= 1 for v in e)
        for rows, targets in ((neurons, z), (outputs, list(values[-1].reshape(-1)))):
            for k, target in enumerate(targets):
                at = zip([*rows.inputs[k].tolist(), *rows.neurons[k].tolist()], [*e, *r], strict=True)
                value = Fraction(float(rows.constant[k])) + sum(Fraction(c) * v for c, v in at)
                assert abs(value - target) <= Fraction(float(rows.error[k])) < 1e-12
        last = list(values[-1].reshape(-1))
        for made, targets in [pair for inside, rows in forms for pair in ((inside, z), (rows, last))]:
            for k, target in enumerate(targets):
                at = zip(made.matrix[k].tolist(), [*e, *q], strict=True)
                value = Fraction(float(made.constant[k])) + sum(Fraction(c) * v for c, v in at)
                assert abs(value - target) <= Fraction(float(made.error[k])) < 1e-10


@pytest.mark.thorough
def test_leaves_are_proved_again_in_rational_arithmetic() -> None:
    # The cases of the seeded faults (``soundness/test_faults.py``), which relies on it that nothing is found here.
    report = trees(report=Report(of=some))
    assert report.problems == []
    assert report.decided["leaves", Verdict.UNSAT] > draws(50)
    assert report.decided["leaves over planes", Verdict.UNSAT] > draws(2)
    assert report.decided["bab", Verdict.UNSAT] > draws(10)
    # Counterexamples by less than the relaxations' error are left to others.
    assert report.decided["bab", Verdict.SAT] > 0


def test_a_network_whose_values_overflow_is_refused() -> None:
    """The second layer's pre-activations are beyond float64: nothing is known of them, and that is no fault."""
    nodes: list[Node] = [Input(name="x", inputs=(), shape=(1,))]
    for layer in range(2):
        weight, bias = torch.full((1, 1), 1e200, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        nodes.append(Linear(name=f"fc{layer}", inputs=(2 * layer,), shape=(1,), weight=weight, bias=bias))
        nodes.append(Relu(name=f"act{layer}", inputs=(2 * layer + 1,), shape=(1,)))
    (outcome,) = decide(Query(chain(nodes), Property(UNIT, ((row({0: 1}, -1),),))))
    assert outcome.reason is Reason.UNSUPPORTED and "not finite" in outcome.detail


def hard(seed: int = 0, gap: float = 1e-3) -> Query:
    """A property that takes hundreds of sub-problems: a sampled minimum, a little out of reach."""
    rng = np.random.default_rng(seed)
    network = mlp(rng, (6, 24, 24, 2))
    box = ball(np.zeros(6), 1.0)
    x = torch.from_numpy(rng.uniform(-1, 1, (4096, 6)))
    y = network.to(torch.float64)(x)
    least = float((y[:, 0] - y[:, 1]).min())
    return Query(network, Property(box, ((row({0: 1, 1: -1}, least - gap),),)))


def test_without_time_nothing_is_decided() -> None:
    (outcome,) = decide(hard(), seconds=0.0)
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.TIMEOUT)


def begin(query: Query) -> FoldedQuery:
    prop = query.property
    bounds = crown_relaxation(query.network.to(torch.float64), input_box([prop], query.network))
    return FoldedQuery.of(query, bounds, 0, list(range(len(prop.unsafe))), Slopes(), lambda: False)


def tree(
    query: Query, search: Branching, reached: Callable[..., bool] = lambda *_: False, memory: int = 1 << 30
) -> PhaseTree:
    """The tree of a query's first polytope, by default without eyes for counterexamples."""
    folded = begin(query)
    part = folded.parts[0]
    return PhaseTree(folded.strip(0), part.scale, reached, lambda: 1.0, search, memory)


def test_the_bound_of_an_open_tree_grows_and_stays_sound() -> None:
    query = hard(gap=0.0)
    x = torch.from_numpy(np.random.default_rng(1).uniform(-1, 1, (4096, 6)))
    y = query.network.to(torch.float64)(x)
    rows = RowBatch.from_properties([query.property], 2)
    sampled = float(rows.margins(y @ rows.matrix.T - rows.bound).min())
    searched = tree(query, Branching(batch=16))
    bounds = [searched.bound(lambda: False)]
    for _ in range(8):
        searched.advance()
        bounds.append(searched.bound(lambda: False))
    assert searched.now.state is State.OPEN
    assert bounds[0] < bounds[4] < bounds[8] <= sampled
    assert searched.bound(lambda: True) <= bounds[8]


def test_a_bound_does_not_depend_on_the_batch_it_is_in() -> None:
    query = hard()
    part = begin(query)
    strip = TreeRelaxation(part.folded, part.parts[0].rows, part.parts[0].slopes)
    rng = np.random.default_rng(0)
    split = torch.from_numpy(rng.choice([-1, 0, 0, 0, 1], (12, part.folded.size)).astype(np.int8))
    adaptive = torch.from_numpy(rng.random(part.folded.size) < 0.3)
    ascent, proofs = DualAscent(strip, adaptive, torch.float32), Proofs(strip)

    def lower(chosen: Tensor) -> Tensor:
        batch = Nodes(
            chosen, torch.zeros(chosen.shape), torch.zeros(len(chosen), 0), torch.zeros(len(chosen), dtype=torch.long)
        )
        found = ascent.run(batch, 4)
        return proofs.lower(batch.split, found.columns, found.w, batch.mu)

    alone = torch.cat([lower(one[None]) for one in split])
    torch.testing.assert_close(lower(split), alone, rtol=1e-3, atol=1e-3)


@pytest.mark.thorough
def test_nothing_that_a_search_says_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds, blame and multipliers made of nothing: no counterexample is denied."""
    rng = torch.Generator().manual_seed(0)
    run = DualAscent.run

    def lying(self: DualAscent, batch: Nodes, steps: int) -> Bounded:
        found = run(self, batch, steps)
        noise = torch.randn(found.w.shape, generator=rng).to(found.w)
        return replace(found, bound=torch.full_like(found.bound, 1e9), w=found.w + noise)

    monkeypatch.setattr(DualAscent, "run", lying)
    cases = [random_query(seed) for seed in range(9)]
    outcomes = decide(*(q for q, _ in cases))
    assert all(
        outcome.verdict is not Verdict.UNSAT
        for (_, margin), outcome in zip(cases, outcomes, strict=True)
        if margin <= 0
    )
    assert any(margin <= 0 for _, margin in cases)


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [0.05, 0.3, 5.0])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_arithmetic_that_breaks_down_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, broken: float, seconds: float
) -> None:
    queries = [random_query(seed)[0] for seed in range(6)]
    monkeypatch.setattr(
        Proofs, "lower", lambda self, split, *rest: split.new_full((len(split),), broken, dtype=torch.float64)
    )
    for outcome in decide(*queries, seconds=seconds):
        by_bounds = outcome.detail == "decided by bounds alone"
        assert outcome.verdict is not Verdict.UNSAT or by_bounds, outcome
        assert outcome.margin is None or outcome.margin < torch.inf


@pytest.mark.thorough
def test_too_little_memory_is_a_reason_of_its_own() -> None:
    (outcome,) = decide(hard(), memory=1 << 12)
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.MEMORY)
    full = tree(hard(), Branching(), memory=100)
    while full.now.state is State.OPEN:
        full.advance()
    assert full.now.state is State.FULL


def test_an_interrupt_loses_nothing_that_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    query, _ = random_query(0)

    def interrupt(self: PhaseTree) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PhaseTree, "advance", interrupt)
    asked = query_batch([Query(chain(hinge()), Property(UNIT, ((row({0: 1}, -1),),))), hard(), query])
    with pytest.raises(KeyboardInterrupt):
        for _ in asked.ask(Bab()):
            pass
    assert list(asked.outcomes) == [0] and asked.outcomes[0].verdict is Verdict.UNSAT


@pytest.mark.parametrize("parent", [0.0, -0.0, -torch.inf, torch.nan, -1e-45])
def test_every_split_gains_something_finite_whatever_the_parents_bound_is(parent: float) -> None:
    values = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, torch.inf, -torch.inf, torch.nan])
    pairs = torch.cartesian_prod(values, values).T
    found = gain(pairs, torch.full((pairs.shape[1],), parent))
    assert bool(((found >= 0) & (found <= 1.2)).all())


@pytest.mark.thorough
def test_look_ahead_splits_every_node_and_loses_none() -> None:
    """The outputs of a network with every neuron twice, of which one copy counts against the other, are its bias.

    Relaxations do not know that the copies are equal. Biases are such that bounds of nodes are zero, and nearly so.
    """
    rng = np.random.default_rng(1)
    weight = torch.from_numpy(rng.integers(-2, 3, (3, 2))).float().repeat(2, 1)
    copies = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]])
    box = ball(np.zeros(2), 1.0)
    search = Branching(steps=6, adaptive=1 << 20, choices=4)
    for bias in (0.0, 1.0, 2.0):
        nodes: list[Node] = [
            Input(name="x", inputs=(), shape=(2,)),
            Linear(name="copies", inputs=(0,), shape=(6,), weight=weight, bias=torch.zeros(6)),
            Relu(name="relu", inputs=(1,), shape=(6,)),
            Linear(name="sum", inputs=(2,), shape=(1,), weight=copies, bias=torch.tensor([bias])),
        ]
        network = chain(nodes)
        for most, verdict in ((bias - 0.25, Verdict.UNSAT), (bias, Verdict.SAT)):
            query = Query(network, Property(box, ((row({0: 1}, Fraction(most)),),)))
            (found,) = claims(Bab(search=search, rounds=Schedule(None)), [query], math.inf)
            assert found.verdict is verdict
