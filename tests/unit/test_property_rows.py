"""Rows of properties in float64 describe a set that contains the exact one; witnesses lie in their box."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.draws import draws
from verifiable_relu.search.property_rows import PropertyRows
from verifiable_relu.spec.property import Box, Polytope, Property, Row

decimals = st.decimals(min_value=-1000, max_value=1000, places=25, allow_nan=False).map(Fraction)
sized = st.builds(lambda v, e: v * Fraction(10) ** e, decimals, st.integers(-30, 30))
thirds = st.builds(Fraction, st.integers(-(10**20), 10**20), st.integers(1, 10**20))
numbers = st.one_of(decimals, sized, thirds, st.integers(-5, 5).map(Fraction), st.just(Fraction(10**400)))
rows = st.builds(
    lambda values, bound: Row(tuple((i, v) for i, v in enumerate(values) if v), bound),
    st.lists(numbers, min_size=2, max_size=2),
    numbers,
)


def slack(batch: PropertyRows, row: int, y: list[Fraction]) -> Fraction:
    """The exact values of matrix·y − bound."""
    weights = [Fraction(v) for v in batch.matrix[0, row].tolist()]
    return sum((w * v for w, v in zip(weights, y, strict=True)), Fraction(0)) - Fraction(float(batch.bound[0, row]))


@pytest.mark.thorough
@settings(max_examples=draws(200), deadline=None)
@given(polytope=st.lists(rows, min_size=1, max_size=2).map(tuple), y=st.lists(numbers, min_size=2, max_size=2))
def test_the_float_rows_hold_the_polytope_and_bound_its_margin(polytope: Polytope, y: list[Fraction]) -> None:
    prop = Property(Box(np.zeros(1), np.ones(1)), (polytope,))
    batch = PropertyRows.from_properties([prop], 2)
    assert set(batch.origin[batch.exists].tolist()) == {0}
    parts = []
    for part in range(batch.exists.shape[1]):
        mine = (batch.polytope[0] == part).nonzero().flatten().tolist()
        values = [slack(batch, row, y) / Fraction(float(batch.scale[0, row])) for row in mine]
        parts.append(max(values, default=Fraction(-(10**1000))))
    margin = prop.margin(y)
    assert min(parts) <= margin + abs(Fraction(margin)) / 2**50, "the margin in float64 is larger than the row's own"
    assert margin > 0 or min(parts) <= 0, "a point of the polytope is in none of its parts"


@settings(max_examples=draws(200), deadline=None)
@given(
    ends=st.tuples(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False)),
    x=st.floats(),
)
def test_a_witness_is_a_point_of_its_box(ends: tuple[float, float], x: float) -> None:
    low, high = sorted(ends)
    box = Box(np.array([low]), np.array([high]))
    (value,) = box.witness(np.array([x]))
    assert box.contains((value,))
    inside = low <= x <= high and float(np.float32(np.clip(x, -3e38, 3e38))) == x
    assert not inside or value == Fraction(x)


def sums(batch: PropertyRows, weights: list[int]) -> PropertyRows:
    """Sums of rows, whose best weights are about in the ratio of the first two of ``weights``."""
    along = torch.zeros(1, 1, batch.bound.shape[1], dtype=torch.float64)
    for members in batch.members[0]:
        mine = members[members < batch.bound.shape[1]]
        along[0, 0, mine] = torch.tensor([weights[1], -weights[0], weights[2]]).double()[: len(mine)]
    return batch.sums(torch.full_like(batch.bound, -1.0), torch.zeros_like(batch.bound), along)


@pytest.mark.thorough
@settings(max_examples=draws(200), deadline=None)
@given(
    polytopes=st.lists(st.lists(rows, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple),
    weights=st.lists(st.integers(1, 1024), min_size=3, max_size=3),
    y=st.lists(numbers, min_size=2, max_size=2),
)
def test_a_sum_of_rows_holds_where_all_of_them_hold_and_is_no_larger_than_the_largest(
    polytopes: tuple[Polytope, ...], weights: list[int], y: list[Fraction]
) -> None:
    batch = PropertyRows.from_properties([Property(Box(np.zeros(1), np.ones(1)), polytopes)], 2)
    both, count = batch.and_sums(sums(batch, weights)), batch.bound.shape[1]
    assert torch.equal(both.matrix[:, :count], batch.matrix)
    for part in batch.exists[0].nonzero().flatten().tolist():
        mine = (batch.polytope[0] == part).nonzero().flatten().tolist()
        values = [slack(batch, one, y) / Fraction(float(batch.scale[0, one])) for one in mine]
        if both.polytope[0, count + part] == part:
            found = slack(both, count + part, y)
            assert found / Fraction(float(both.scale[0, count + part])) <= max(values) + abs(max(values)) / 2**49
            assert max(values) > 0 or found <= 0, "the polytope's point is cut off by a sum of its rows"


def test_sums_that_float64_cannot_hold_are_left_out() -> None:
    large, small = Row(((0, Fraction(2**52)),), Fraction(0)), Row(((0, Fraction(1)),), Fraction(1))
    batch = PropertyRows.from_properties([Property(Box(np.zeros(1), np.ones(1)), ((large, small), (small, small)))], 1)
    found = sums(batch, [1, 3, 0])
    assert found.polytope[0].tolist() == [2, 1]
    total = float(found.matrix[0, 1, 0])
    assert found.weights is not None and total == found.weights[0, 1].sum() == 1024 and found.scale[0, 1] >= total
    assert total <= found.bound[0, 1] < total + 1e-4
