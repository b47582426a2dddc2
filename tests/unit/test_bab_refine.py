"""Refined bounds of neurons: sound, tighter, and smaller systems that are the same network."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.support.asking import claims
from tests.support.exact import exact_values
from tests.support.solver_cases import ball, mlp, residual, row
from verifiable_relu.bounds import crown_relaxation, input_box
from verifiable_relu.network.graph import Network
from verifiable_relu.spec.property import Box, Property, Query
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.bab.folded import AffineForms, Folded
from verifiable_relu.verifiers.bab.folding import fold
from verifiable_relu.verifiers.bab.refine import Refinement
from verifiable_relu.verifiers.bab.search import Schedule
from verifiable_relu.verifiers.base import TimeBudget, Verdict

DEEP = (5, 14, 14, 14, 14, 3)


ALL = TimeBudget()
NONE = TimeBudget(0.0)


def network_of(seed: int, kind: str) -> Network:
    rng = np.random.default_rng(seed)
    return residual(rng) if kind == "residual" else mlp(rng, DEEP, leaky=kind == "leaky")


def folded(network: Network, box: Box) -> tuple[Folded, AffineForms]:
    bounds = crown_relaxation(network.to(torch.float64), input_box([Property(box, ())], network))
    return fold(bounds, 0, box, torch.eye(network.output_size))


def points(box: Box, rng: np.random.Generator, count: int) -> list[list[Fraction]]:
    """Exact points of a box, half of them corners."""
    share = rng.random((count, box.size))
    share[: count // 2] = share[: count // 2].round()
    return [[Fraction(float(v)) for v in box.lower * (1 - s) + box.upper * s] for s in share]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["relu", "leaky", "residual"])
@pytest.mark.parametrize("seed", range(2))
def test_refined_systems_hold_the_exact_values_of_the_network(seed: int, kind: str) -> None:
    network = network_of(seed, kind)
    rng = np.random.default_rng(seed)
    box = ball(rng.integers(-4, 5, network.input_size) / 8, 1.0 if kind == "residual" else 0.2)
    before, outputs = folded(network, box)
    after, rows = Refinement(leaves=8).refine(before, outputs, ALL)
    assert after.size < before.size or kind == "residual"
    for x in points(box, rng, 8):
        values = exact_values(network, x)
        z = [values[network.nodes[i].inputs[0]].reshape(-1)[k] for i, k in after.places.tolist()]
        r = [values[i].reshape(-1)[k] for i, k in after.places.tolist()]
        ends = zip(z, after.lower.tolist(), after.upper.tolist(), strict=True)
        assert all(Fraction(low) <= value <= Fraction(high) for value, low, high in ends)
        e = [(x[i] - Fraction(float(after.center[i]))) / Fraction(float(after.radius[i])) for i in after.free.tolist()]
        for forms, targets in ((after.neurons, z), (rows, list(values[-1].reshape(-1)))):
            for k, target in enumerate(targets):
                at = zip([*forms.inputs[k].tolist(), *forms.neurons[k].tolist()], [*e, *r], strict=True)
                value = Fraction(float(forms.constant[k])) + sum(Fraction(c) * v for c, v in at)
                assert abs(value - target) <= Fraction(float(forms.error[k])) < 1e-9


def test_a_restricted_system_gives_the_same_values() -> None:
    network = network_of(1, "residual")
    system, outputs = folded(network, ball(np.zeros(network.input_size), 1.0))
    e = torch.rand(6, system.inputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    _, r = system.values(e)
    for k in range(len(outputs)):
        small, row_there = system.restricted(outputs[k : k + 1])
        read = [system.free.tolist().index(i) for i in small.free.tolist()]
        _, mine = small.values(e[:, read])
        there = e[:, read] @ row_there.inputs.T + mine @ row_there.neurons.T
        whole = e @ outputs.inputs[k : k + 1].T + r @ outputs.neurons[k : k + 1].T
        torch.testing.assert_close(there, whole)


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.5, pytest.param(0.0, marks=pytest.mark.seldom)])
def test_verdicts_on_a_deep_network_are_those_of_trees_alone(share: float) -> None:
    """A property at a sampled minimum, and one out of reach of the samples."""
    network = mlp(np.random.default_rng(5), (6, 16, 16, 16, 16, 2))
    box = ball(np.zeros(6), 0.6)
    x = torch.from_numpy(np.random.default_rng(0).uniform(-0.6, 0.6, (20000, 6)))
    y = network.to(torch.float64)(x)
    difference = y[:, 0] - y[:, 1]
    least, spread = float(difference.min()), float(difference.max() - difference.min())
    query = Query(network, Property(box, ((row({0: 1, 1: -1}, least - share * spread),),)))
    outcomes = [
        claims(Bab(rounds=rounds), [query], 30.0)[0]
        for rounds in (Schedule(None), Schedule(first=0, patience=0, gain=1.0))
    ]
    assert {outcome.verdict for outcome in outcomes} == {Verdict.UNSAT if share > 0 else Verdict.SAT}
