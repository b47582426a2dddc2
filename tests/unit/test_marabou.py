"""The method ``marabou``: it agrees with other methods, keeps to its budget, and says so where it is not installed."""

from __future__ import annotations

from fractions import Fraction
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from tests.support import nets
from tests.support.asking import claims
from verifiable_relu.network.nodes import LeakyRelu, Relu
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.trust.replay import confirm
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.base import Outcome, Reason, Trust, Verdict, Verifier
from verifiable_relu.verifiers.marabou import Marabou

installed = pytest.mark.skipif(find_spec("maraboupy") is None, reason="maraboupy is not installed")


def queries(count: int, leaky: bool) -> list[Query]:
    """Whether two outputs are at most a number that sampled outputs are near."""
    found = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        network = nets.mlp(rng, nets.gaussian(rng), LeakyRelu if leaky else Relu)
        box = Box(-np.ones(3), np.ones(3))
        outputs = [network(point[None]).detach().numpy()[0] for point in torch.rand(50, 3) * 2 - 1]
        least = np.min([output[:2].max() for output in outputs])
        rows = tuple(Row(((i, Fraction(1)),), Fraction(float(least) + (-0.3 if seed % 2 else 0.1))) for i in range(2))
        found.append(Query(network, Property(box, (rows,))))
    return found


def ask(method: Verifier, asked: list[Query], seconds: float = 60.0) -> list[Outcome]:
    return claims(method, asked, seconds)


@installed
@pytest.mark.parametrize("leaky", [False, True])
def test_marabou_contradicts_nobody(leaky: bool) -> None:
    asked = queries(6, leaky)
    found = ask(Marabou(), asked)
    verdicts = [outcome.verdict for outcome in found]
    assert {Verdict.SAT, Verdict.UNSAT} <= set(verdicts)
    for query, outcome, other in zip(asked, found, ask(Bab(), asked), strict=True):
        assert {outcome.verdict, other.verdict} != {Verdict.SAT, Verdict.UNSAT}
        if outcome.verdict is Verdict.SAT:
            assert outcome.witness is not None and confirm(query, outcome.witness).confirmed
        elif outcome.detail != "decided by bounds alone":
            assert outcome.trust is not Trust.ROUNDED


@installed
def test_without_time_left_marabou_is_not_asked() -> None:
    (outcome,) = ask(Marabou(), queries(1, False), 1e-9)
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.TIMEOUT)
