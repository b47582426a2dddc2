"""Attacks: points that they find, and claims that they make."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.support import nets
from tests.support.asking import claims
from tests.support.solver_cases import UNIT, hinge, random_query, row
from verifiable_relu.ir.linear import Dense
from verifiable_relu.ir.network import Affine, Network
from verifiable_relu.search.attack import Attack, Pgd, search_dtype
from verifiable_relu.search.batch import answers
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Trust, Verdict
from verifiable_relu.search.property_rows import input_box
from verifiable_relu.spec.property import Box, Property, Query, Row


def narrow() -> tuple[Network, Property]:
    """A network that is flat but near three ends of the inputs and one inner value of the fourth, and that point."""
    weight = torch.tensor([[1.0, 1, 1, 0], [0, 0, 0, 20], [0, 0, 0, 20], [0, 0, 0, 20]])
    chain = nets.Chain(4)
    chain.linear(weight, torch.tensor([-2.8, -5, -6, -7]))
    chain.act()
    chain.linear(torch.tensor([[-1.0, 0, 0, 0], [0, -1.0, 2, -1]]), torch.tensor([0.1, 0.5]))
    rows = tuple(Row(((i, Fraction(1)),), Fraction(0)) for i in range(2))
    return chain.network("narrow"), Property(Box(np.zeros(4), np.ones(4)), (rows,))


def test_points_at_some_ends_of_the_box_lead_to_counterexamples_that_corners_do_not() -> None:
    network, prop = narrow()
    for seed in range(3):
        point, margin = Pgd(screened_points=16384, seed=seed).search(network, [prop])
        assert float(margin) < 0 and bool((network(point.float()) <= 0).all())
    found = [Pgd(screened_points=16384, seed=1).search(network, [prop, prop])[0] for _ in range(2)]
    assert torch.equal(found[0], found[1])


def test_properties_without_unsafe_outputs_have_no_counterexample() -> None:
    network, prop = narrow()
    nothing = Property(prop.box, ())
    _, margins = Pgd(steps=3, screened_points=16384).search(network, [nothing, prop, nothing])
    assert margins[0] == margins[2] == torch.inf and margins[1] < 0


def test_claims_are_confirmed_and_never_unsat() -> None:
    cases = [random_query(seed) for seed in range(20)]
    found = claims(Attack(), [query for query, _ in cases], 20.0)
    for (query, gap), outcome in zip(cases, found, strict=True):
        assert outcome.verdict in (Verdict.SAT, Verdict.UNKNOWN)
        if outcome.verdict is Verdict.SAT:
            assert gap <= 0 and outcome.witness is not None and query.property.box.contains(outcome.witness)
    assert sum(outcome.verdict is Verdict.SAT for outcome in found) >= sum(gap < -0.05 for _, gap in cases) - 2


def test_a_point_that_floats_miss_is_sat_with_a_note() -> None:
    """relu(x) − 1/2 is 3/10 at x = 4/5, which no float32 number is."""
    chain = nets.Chain(1)
    chain.act()
    chain.linear(torch.ones(1, 1), torch.tensor([-0.5]))
    equal = (row({0: 1}, Fraction(3, 10)), row({0: -1}, -Fraction(3, 10)))
    (found,) = answers(Attack(), [Query(chain.network(), Property(UNIT, (equal,)))], TimeBudget(20.0))
    assert (found.verdict, found.trust, found.margin) == (Verdict.SAT, Trust.EXACT, 0.0)
    assert found.witness == (Fraction(4, 5),) and "float32 misses" in found.detail
    beyond = Query(hinge(), Property(UNIT, ((row({0: 1}, 2), row({0: -1}, -2)),)))
    assert answers(Attack(), [beyond], TimeBudget(5.0))[0].verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_boxes_are_rounded_outward(dtype: torch.dtype) -> None:
    lower, upper = np.array([0.1, -1.0, 1 / 3]), np.array([0.2, -1.0, 2 / 3])
    box = input_box([Property(Box(lower, upper), ())], dtype, "cpu")
    assert (box.lower.double().numpy() <= lower).all() and (box.upper.double().numpy() >= upper).all()
    assert float(box.lower[0, 1]) == float(box.upper[0, 1]) == -1.0


def test_weights_beyond_float32_are_searched_in_float64() -> None:
    network = hinge(2.0)
    assert search_dtype(network) == torch.float32
    op = network.ops[1]
    assert isinstance(op, Affine)
    large = replace(op, map=Dense(op.map.weight.double() * 1e60))
    assert search_dtype(replace(network, ops=(network.ops[0], large, network.ops[2]))) == torch.float64
