"""Attacks on flat networks: points that they find, and claims that they make."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support import nets
from tests.support.asking import claims
from tests.support.solver_cases import random_query
from tests.unit.test_pgd import narrow
from verifiable_relu.ir.flatten import flatten
from verifiable_relu.search.attack import Attack, Pgd, search_dtype
from verifiable_relu.search.property_rows import input_box
from verifiable_relu.spec.property import Box, Property
from verifiable_relu.verifiers.base import Verdict


def test_points_at_some_ends_of_the_box_lead_to_counterexamples_that_corners_do_not() -> None:
    graph, prop = narrow()
    network = flatten(graph)
    for seed in range(3):
        _, first = Pgd(rounds=1, seed=seed).search(network, [prop])
        assert float(first) > 0
        point, margin = Pgd(screened=16384, seed=seed).search(network, [prop])
        assert float(margin) < 0 and bool((network(point.float()) <= 0).all())


def test_the_same_seed_gives_the_same_point() -> None:
    graph, prop = narrow()
    found = [Pgd(screened=16384, seed=1).search(flatten(graph), [prop, prop]) for _ in range(2)]
    assert torch.equal(found[0][0], found[1][0])


def test_properties_without_unsafe_outputs_have_no_counterexample() -> None:
    graph, prop = narrow()
    nothing = Property(prop.box, ())
    _, margins = Pgd(steps=3, screened=16384).search(flatten(graph), [nothing, prop, nothing])
    assert margins[0] == margins[2] == torch.inf and margins[1] < 0


def test_claims_are_confirmed_and_never_unsat() -> None:
    cases = [random_query(seed) for seed in range(20)]
    found = claims(Attack(), [query for query, _ in cases], 20.0)
    for (query, gap), outcome in zip(cases, found, strict=True):
        assert outcome.verdict in (Verdict.SAT, Verdict.UNKNOWN)
        if outcome.verdict is Verdict.SAT:
            assert gap <= 0 and outcome.witness is not None and query.property.box.contains(outcome.witness)
    assert sum(outcome.verdict is Verdict.SAT for outcome in found) >= sum(gap < -0.05 for _, gap in cases) - 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_boxes_are_rounded_outward(dtype: torch.dtype) -> None:
    lower, upper = np.array([0.1, -1.0, 1 / 3]), np.array([0.2, -1.0, 2 / 3])
    box = input_box([Property(Box(lower, upper), ())], dtype, "cpu")
    assert (box.lower.double().numpy() <= lower).all() and (box.upper.double().numpy() >= upper).all()
    assert float(box.lower[0, 1]) == float(box.upper[0, 1]) == -1.0


def test_weights_beyond_float32_are_searched_in_float64() -> None:
    rng = np.random.default_rng(0)
    network = nets.mlp(rng, nets.gaussian(rng))
    assert search_dtype(flatten(network)) == torch.float32
    large = network.to(torch.float64)
    large = type(large)(tuple(node.map_tensors(lambda t: t * 1e30) for node in large.nodes))
    assert (
        search_dtype(flatten(type(large)(tuple(n.map_tensors(lambda t: t * 1e30) for n in large.nodes))))
        == torch.float64
    )
