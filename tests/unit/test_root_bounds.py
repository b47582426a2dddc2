"""Bounds before any split hold for their query alone, are handed on, and make no verdict less certain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from operator import itemgetter

import numpy as np
import pytest
import torch

from tests.support.families import NETWORKS, Random, member, mlp, points
from verifiable_relu.bounds.alpha import Ascent
from verifiable_relu.ir.families import harden
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Network
from verifiable_relu.search.bab.verifier import Bab
from verifiable_relu.search.batch import NO_BOUNDS, BoundsCache, QueryBatch, RootBounds, Verifier
from verifiable_relu.search.bounding import AlphaCrown, Crown
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict
from verifiable_relu.search.property_rows import PropertyRows
from verifiable_relu.search.registry import make
from verifiable_relu.search.solvers.milp import Milp
from verifiable_relu.search.solvers.smt import Smt
from verifiable_relu.spec.property import Box, Property, Query, Row

PLENTY = 1 << 26
SEARCHING = AlphaCrown(intermediate=Ascent(steps=4))
EVERY = (Crown(), SEARCHING, Bab(), Milp(), Smt(whole=True))


def queries(network: Network, count: int = 3, radius: float = 0.3, depth: float = -0.01, seed: int = 0) -> list[Query]:
    """Each asks whether the first output gets below its least value at some points of a box, or the second one's.

    ``depth``: how far below; where it is negative, both polytopes are reached.
    """
    rng, asked = Random(seed), []
    for _ in range(count):
        center = rng.normal(1, network.input_size)
        box = Interval((center - radius).float().double(), (center + radius).float().double())
        least = network(points(box).flatten(0, 1)).amin(0)
        unsafe = tuple((Row(((i, Fraction(1)),), Fraction(float(least[i])) - Fraction(depth)),) for i in (0, 1))
        ends = Box(box.lower.flatten().numpy(), box.upper.flatten().numpy())
        asked.append(Query(network, Property(ends, unsafe)))
    return asked


def ask(
    method: Verifier, asked: Sequence[Query] | Mapping[int, Query], cache: BoundsCache = NO_BOUNDS
) -> list[Outcome]:
    batch = QueryBatch(asked, TimeBudget(20.0), bounds_cache=cache)
    return [outcome for _, outcome in sorted(method.claims(batch), key=itemgetter(0))]


def root_of(query: Query) -> RootBounds:
    """CROWN's bounds of the query alone."""
    ask(Crown(), [query], cache := BoundsCache(PLENTY))
    found = cache.get(0)
    assert found is not None
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("name", NETWORKS)
def test_a_root_holds_at_all_points_of_its_own_box(name: str) -> None:
    network, cache = NETWORKS[name](), BoundsCache(PLENTY)
    asked = queries(network, radius=0.5)
    for method in (Crown(), SEARCHING, Bab()):
        # In every order and number, so that each query has other neighbours in its batch.
        ask(method, asked, cache)
        ask(method, dict(list(enumerate(asked))[::-2]), cache)
        for number, query in enumerate(asked):
            root, box = cache.get(number), query.property.box
            assert root is not None
            x = points(Interval(*(torch.from_numpy(end)[None] for end in (box.lower, box.upper))), 200).flatten(0, 1)
            values = network.values(x)
            for index, bounds in root.intervals.items():
                assert bool((values[index] >= bounds.lower - 1e-12).all())
                assert bool((values[index] <= bounds.upper + 1e-12).all())
            rows = PropertyRows.from_properties([query.property], network.output_size)
            reached = rows.largest(rows.values(network(x)[:, None]))[:, 0].amin(0)
            assert bool((root.lower <= reached + 1e-12).all())


def test_a_root_is_of_its_query_alone() -> None:
    network, cache = mlp(), BoundsCache(PLENTY)
    (query,) = queries(network, 1)
    prop, family = query.property, harden(network, 5.0)
    doubled = [Row(tuple((i, 2 * c) for i, c in row.coefficients), 2 * row.bound) for (row,) in prop.unsafe]
    asked = [
        query,
        Query(network, Property(Box(np.nextafter(prop.box.lower, -9), prop.box.upper), prop.unsafe)),
        Query(network, Property(prop.box, prop.unsafe[:1])),
        Query(mlp(7), prop),
        Query(family, prop),
        Query(member(family, [6.0] * 3), prop),
        Query(network, Property(prop.box, tuple((row,) for row in doubled))),
    ]
    # Nobody's bounds depend on who was asked before.
    roots = []
    for number, other in enumerate(asked):
        assert cache.get(number) is None
        ask(Crown(), {number: other}, cache)
        root, same = cache.get(number), root_of(other)
        assert root is not None and torch.equal(root.lower, same.lower)
        assert all(torch.equal(root.intervals[i].upper, same.intervals[i].upper) for i in root.intervals)
        roots.append(root)
    # The last one asks the first one's question, in other units.
    assert asked[-1].digest == query.digest
    torch.testing.assert_close(roots[-1].lower, 2 * roots[0].lower)


def test_bounds_of_another_box_are_noticed_before_they_prove_anything() -> None:
    one, two = (queries(mlp(), 1, radius=0.05, seed=seed)[0] for seed in (0, 9))
    for method in EVERY:
        cache = BoundsCache(PLENTY)
        cache.learn(0, RootBounds(root_of(two).intervals, torch.full((2,), -torch.inf, dtype=torch.float64)))
        (outcome,) = ask(method, [one], cache)
        assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.ERROR)
        assert "exclude" in outcome.detail


def test_what_is_missing_for_want_of_memory_is_computed_again() -> None:
    asked = queries(mlp(), 4, radius=0.5)
    few = BoundsCache(2 * max(root_of(query).bytes for query in asked))
    for method in (Crown(), SEARCHING, Bab()):
        ask(method, asked, few)
        assert sum(few.get(number) is not None for number in range(4)) == 2
    assert [one.verdict for one in ask(Bab(), asked, few)] == [one.verdict for one in ask(Bab(), asked)]


def test_what_decides_a_query_decides_it_whoever_was_asked_before() -> None:
    asked = queries(mlp(), 6, radius=0.05, depth=0.02)
    verdicts = [outcome.verdict for outcome in ask(Bab(), asked)]
    assert Verdict.UNSAT in verdicts
    cache = BoundsCache(PLENTY)
    for method in (make("ibp"), Crown(), Bab()):
        outcomes = ask(method, asked, cache)
        decided = {outcome.verdict for number, outcome in enumerate(outcomes) if cache.get(number) is None}
        assert decided <= {Verdict.UNSAT}
    assert Verdict.UNSAT in decided
    assert [outcome.verdict for outcome in outcomes] == verdicts


def test_what_several_stages_exclude_together_is_a_verdict() -> None:
    (near,), (far,) = queries(mlp(), 1, radius=0.1), queries(mlp(), 1, radius=0.1, depth=100.0)
    query = Query(near.network, Property(near.property.box, (near.property.unsafe[0], far.property.unsafe[1])))
    for method in EVERY:
        cache = BoundsCache(PLENTY)
        ask(make("ibp"), [query], cache)
        root = cache.get(0)
        assert root is not None and root.lower[0] < 0 < root.lower[1]
        cache.prove(0, {0: 0.125})
        (outcome,) = ask(method, [query], cache)
        assert (outcome.verdict, outcome.trust, outcome.margin) == (Verdict.UNSAT, Trust.ROUNDED, 0.125)
