"""The method ``marabou``: it agrees with other methods, keeps to its budget, and says so where it is not installed."""

from __future__ import annotations

from fractions import Fraction
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from tests.support import nets
from tests.support.asking import claims
from verifiable_relu.adapters.marabou import Marabou
from verifiable_relu.network.nodes import LeakyRelu, Relu
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.trust.replay import confirm
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.base import Reason, Trust, Verdict

installed = pytest.mark.skipif(find_spec("maraboupy") is None, reason="maraboupy is not installed")


def queries(count: int, leaky: bool) -> list[Query]:
    """Whether two outputs are at most a number that sampled outputs are near."""
    found = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        network = nets.mlp(rng, nets.gaussian(rng), LeakyRelu if leaky else Relu)
        outputs = network(torch.from_numpy(rng.uniform(-1, 1, (50, 3))).float()).detach().numpy()
        bound = Fraction(float(outputs[:, :2].max(1).min())) + Fraction(-3 if seed % 2 else 1, 10)
        rows = tuple(Row(((i, Fraction(1)),), bound) for i in range(2))
        found.append(Query(network, Property(Box(-np.ones(3), np.ones(3)), (rows,))))
    return found


@pytest.mark.thorough
@installed
@pytest.mark.parametrize("leaky", [False, True])
def test_marabou_contradicts_nobody(leaky: bool) -> None:
    asked = queries(6, leaky)
    found = claims(Marabou(), asked, 60.0)
    assert {Verdict.SAT, Verdict.UNSAT} <= {outcome.verdict for outcome in found}
    for query, outcome, other in zip(asked, found, claims(Bab(), asked, 60.0), strict=True):
        assert {outcome.verdict, other.verdict} != {Verdict.SAT, Verdict.UNSAT}
        if outcome.verdict is Verdict.SAT:
            assert outcome.witness is not None and confirm(query, outcome.witness).confirmed
        elif outcome.detail != "decided by bounds alone":
            assert outcome.trust is not Trust.ROUNDED


@installed
def test_without_time_left_marabou_is_not_asked() -> None:
    (outcome,) = claims(Marabou(), queries(1, False), 1e-9)
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.TIMEOUT)
