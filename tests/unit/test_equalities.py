"""Equalities of outputs that are reached at rational points: found, judged exactly, and told where floats miss them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.exact import exact_outputs
from tests.support.hooks import Hook
from tests.support.solver_cases import row
from verifiable_relu.network import from_torch
from verifiable_relu.network.graph import Network
from verifiable_relu.spec.property import Box, Polytope, Property, Query
from verifiable_relu.verifiers.attack import Attack
from verifiable_relu.verifiers.base import Outcome, Reason, TimeBudget, Trust, Verdict
from verifiable_relu.verifiers.batch import answers


def equal(coefficients: dict[int, float], value: Fraction, scale: float = 1.0) -> Polytope:
    return row(coefficients, value), row({i: -c * scale for i, c in coefficients.items()}, -value * Fraction(scale))


def network(seed: int, inputs: int = 3, outputs: int = 3) -> Network:
    torch.manual_seed(seed)
    return from_torch(
        nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 6), nn.LeakyReLU(0.1), nn.Linear(6, outputs)),
        (inputs,),
    )


def asked(net: Network, polytope: Polytope) -> Outcome:
    prop = Property(Box(-np.ones(net.input_size), np.ones(net.input_size)), (polytope,))
    return answers(Attack(), [Query(net, prop)], TimeBudget(seconds=20.0))[0]


def values(net: Network) -> list[Fraction]:
    """Exact outputs at a point, rounded to a third digit that no float has."""
    with torch.no_grad():
        return [Fraction(round(1000 * float(v)), 1000) for v in net(torch.tensor([[0.1, -0.2, 0.3]])).flatten()]


KINDS = {
    "one output": lambda y: equal({0: 1.0}, y[0], 2.0),
    "two outputs": lambda y: (*equal({0: 1.0}, y[0]), *equal({1: 1.0}, y[1])),
    "two outputs and a bound": lambda y: (*equal({0: 1.0}, y[0]), *equal({1: 3.0}, 3 * y[1]), row({2: 1.0}, y[2] + 1)),
    "a difference": lambda y: equal({0: 1.0, 2: -1.0}, y[0] - y[2]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_equalities_that_are_reached_are_sat(seed: int, kind: str) -> None:
    net = network(seed)
    polytope = KINDS[kind](values(net))
    outcome = asked(net, polytope)
    assert (outcome.verdict, outcome.trust) == (Verdict.SAT, Trust.EXACT)
    assert outcome.witness is not None and all(-1 <= v <= 1 for v in outcome.witness)
    y = exact_outputs(net, outcome.witness)
    assert all(r.holds(y) for r in polytope)


@pytest.mark.parametrize("seed", range(4))
def test_equalities_beyond_what_is_reached_are_not_sat(seed: int) -> None:
    assert asked(network(seed), equal({0: 1.0}, Fraction(1001, 10))).verdict is Verdict.UNKNOWN


def test_a_point_that_floats_miss_is_sat_with_a_note() -> None:
    """relu(x) − 1/2 is 3/10 at x = 4/5, which no float32 number is."""
    module = nn.Sequential(nn.ReLU(), nn.Linear(1, 1))
    with torch.no_grad():
        module[1].weight.fill_(1.0)
        module[1].bias.fill_(-0.5)
    outcome = asked(from_torch(module, (1,)), equal({0: 1.0}, Fraction(3, 10)))
    assert (outcome.verdict, outcome.trust, outcome.margin) == (Verdict.SAT, Trust.EXACT, 0.0)
    assert outcome.witness == (Fraction(4, 5),)
    assert "float32 misses" in outcome.detail


def test_what_cannot_be_solved_is_no_error() -> None:
    """A row without coefficients, numbers beyond float64, and a point that already fulfils the equality."""
    net, huge = network(0), Fraction(10**400)
    impossible = (*equal({0: 1.0}, values(net)[0]), row({}, -1))
    for polytope in (impossible, (row({0: 1.0}, huge), row({0: -1.0}, -huge))):
        assert asked(net, polytope).reason not in (Reason.ERROR, Reason.REFUTED)
    module = nn.Sequential(nn.Linear(3, 1), nn.ReLU())
    assert asked(from_torch(module, (3,)), equal({0: 1.0}, Fraction(0))).verdict is Verdict.SAT


def test_exact_outputs_do_not_excuse_a_replay_that_is_far_off() -> None:
    net = network(0)
    off = Hook("network.source:replay", lambda right, *args: right(*args) + 1)
    with off.applied():
        assert asked(net, KINDS["one output"](values(net))).verdict is Verdict.UNKNOWN
