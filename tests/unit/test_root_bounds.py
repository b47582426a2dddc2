"""Bounds before any split are computed once, hold for their query alone, and make no verdict less certain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.families import NETWORKS, Random, member, mlp, points
from verifiable_relu.bounds import Ascent, Bounds, Relaxation, crown_relaxation, input_box
from verifiable_relu.network import hardened
from verifiable_relu.network.graph import Network
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.trust.replay import Confirmation
from verifiable_relu.verifiers import batch as judging
from verifiable_relu.verifiers import root_bounds as module
from verifiable_relu.verifiers.auto import Auto
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.base import Outcome, Reason, TimeBudget, Trust, Verdict
from verifiable_relu.verifiers.batch import QueryBatch, Verifier
from verifiable_relu.verifiers.incomplete import AlphaCrown, Crown, Ibp
from verifiable_relu.verifiers.milp import Milp
from verifiable_relu.verifiers.root_bounds import NO_BOUNDS, BoundsCache
from verifiable_relu.verifiers.smt import Smt

PLENTY = 1 << 26
SEARCHING = AlphaCrown(intermediate=Ascent(steps=4))


def queries(network: Network, count: int = 3, radius: float = 0.3, depth: float = -0.01, seed: int = 0) -> list[Query]:
    """Each asks whether the first output gets below its least value at some points of a box, or the second one's.

    ``depth``: how far below; where it is negative, both polytopes are reached.
    """
    rng, asked = Random(seed), []
    for _ in range(count):
        center = rng.normal(*network.input_shape)
        box = Bounds((center - radius)[None].float().double(), (center + radius)[None].float().double())
        least = network(points(box).flatten(0, 1)).flatten(1).amin(0)
        unsafe = tuple((Row(((i, Fraction(1)),), Fraction(float(least[i])) - Fraction(depth)),) for i in (0, 1))
        ends = (end.flatten().numpy() for end in (box.lower, box.upper))
        asked.append(Query(network, Property(Box(*ends), unsafe)))
    return asked


def ask(
    method: Verifier,
    asked: Sequence[Query] | Mapping[int, Query],
    bounds_cache: BoundsCache = NO_BOUNDS,
    seconds: float = 20.0,
) -> list[Outcome]:
    return [
        outcome
        for _, outcome in sorted(
            method.claims(QueryBatch(asked, TimeBudget(seconds), bounds_cache=bounds_cache)), key=itemgetter(0)
        )
    ]


def pre(query: Query) -> dict[int, Bounds]:
    """CROWN's bounds of the query alone."""
    return crown_relaxation(query.network, input_box([query.property], query.network)).pre


def before(network: Network, index: int, x: Tensor) -> Tensor:
    """The values of an activation's input at some inputs."""
    return network.values(x)[network.nodes[index].inputs[0]]


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Over how many whole boxes CROWN bounds the unstable neurons, and over how many slopes are searched for that."""
    counted: Counter[str] = Counter()

    def counting(
        network: Network, box: Bounds, *, crown: bool = True, search: Any = None, **options: Any
    ) -> Relaxation:
        counted["CROWN"] += crown * len(box.lower)
        counted["search"] += (search is not None) * len(box.lower)
        return crown_relaxation(network, box, crown=crown, search=search, **options)

    monkeypatch.setattr(module, "crown_relaxation", counting)
    return counted


@pytest.fixture
def nothing_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every counterexample is refused, so that every stage has its turn."""
    monkeypatch.setattr(judging, "confirm", lambda *_: Confirmation(False, "refused"))


@pytest.mark.thorough
@pytest.mark.usefixtures("nothing_is_confirmed")
@pytest.mark.parametrize(
    ("sizes", "stages"),
    [
        ((3, 6, 5, 3), {"crown", "attack", "bounds", "bab", "split", "milp", "smt-exact"}),
        ((30, 20, 15, 3), {"crown", "attack", "bounds", "bab", "milp"}),
    ],
)
def test_auto_bounds_each_whole_box_once(sizes: tuple[int, ...], stages: set[str], bounded: Counter[str]) -> None:
    asked = queries(mlp(1, sizes))
    outcomes = ask(Auto(), asked)
    for outcome in outcomes:
        assert stages <= set(outcome.seconds), outcome
    # Slopes are searched again with more steps.
    assert bounded["CROWN"] == len(asked)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NETWORKS)
def test_a_root_holds_at_all_points_of_its_own_box(name: str) -> None:
    network, bounds_cache = NETWORKS[name](), BoundsCache(PLENTY)
    asked = queries(network, radius=0.5)
    for method in (Crown(), SEARCHING, Bab()):
        # In every order and number, so that each query has other neighbours in its batch.
        ask(method, asked, bounds_cache)
        ask(method, dict(list(enumerate(asked))[::-2]), bounds_cache)
        for number, query in enumerate(asked):
            root, box = bounds_cache.get(number), input_box([query.property], network)
            assert root is not None
            x = points(box, 200).flatten(0, 1)
            for index, bounds in root.pre.items():
                values = before(network, index, x)
                assert bool((values >= bounds.lower - 1e-12).all() and (values <= bounds.upper + 1e-12).all())
            rows = RowBatch.from_properties([query.property], network.output_size)
            reached = rows.largest(network(x).flatten(1) @ rows.matrix.T - rows.bound).amin(0)
            assert bool((root.lower <= reached + 1e-12).all())


def test_a_root_is_of_its_query_alone() -> None:
    network, bounds_cache = mlp(), BoundsCache(PLENTY)
    (query,) = queries(network, 1)
    prop, family = query.property, hardened(network, 5.0)
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
    for number, other in enumerate(asked):
        assert bounds_cache.get(number) is None
        ask(Crown(), {number: other}, bounds_cache)
        alone, root = BoundsCache(PLENTY), bounds_cache.get(number)
        ask(Crown(), [other], alone)
        same = alone.get(0)
        assert root is not None and same is not None and torch.equal(root.lower, same.lower)
        assert all(torch.equal(root.pre[i].upper, same.pre[i].upper) for i in root.pre)
    # The last one asks the first one's question, in other units.
    (one, last) = (bounds_cache.get(number) for number in (0, 6))
    assert one is not None and last is not None and asked[-1].digest == query.digest
    torch.testing.assert_close(last.lower, 2 * one.lower)


def test_a_query_in_the_place_of_another_is_bounded_from_its_own_box_alone() -> None:
    (narrow,), (wide,) = queries(mlp(), 1, radius=0.01), queries(mlp(), 1, radius=1.0)
    batch = QueryBatch([narrow], bounds_cache=BoundsCache(PLENTY))
    list(Crown().claims(batch))
    assert batch.part([0]).bounds_cache.get(0) is not None
    inner = batch.part([0], queries={0: wide})
    assert inner.bounds_cache.get(0) is None
    ((_, found),), (alone,) = list(Crown().claims(inner)), ask(Crown(), [wide])
    assert (found.verdict, found.margin) == (alone.verdict, alone.margin)


def test_bounds_of_another_box_are_noticed_before_they_prove_anything() -> None:
    network = mlp()
    one, two = queries(network, 1, radius=0.05)[0], queries(network, 1, radius=0.05, seed=9)[0]
    for method in (Crown(), SEARCHING, Bab(), Milp(), Smt(whole=True)):
        bounds_cache = BoundsCache(PLENTY)
        rows = RowBatch.from_properties([one.property], network.output_size)
        nothing = torch.full((len(rows.bound),), -torch.inf, dtype=torch.float64)
        bounds_cache.learn([0], network, pre(two), rows, nothing, reached=math.inf)
        (outcome,) = ask(method, [one], bounds_cache)
        assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, Reason.ERROR)
        assert "exclude" in outcome.detail


def test_bounds_whose_rounding_is_not_covered_are_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, bounds_cache = queries(mlp()), BoundsCache(PLENTY)
    monkeypatch.setattr(module, "covers", lambda *_: False)
    ask(Crown(), asked, bounds_cache)
    assert not any(bounds_cache.get(number) for number in range(len(asked)))
    monkeypatch.undo()
    ask(Crown(dtype="float32"), asked, bounds_cache)
    assert all(bounds_cache.get(number) for number in range(len(asked)))
    # Nor does a verifier use roots in whose own arithmetic rounding is not covered.
    monkeypatch.setattr(module, "covers", lambda *_: False)
    assert bounds_cache.known(range(len(asked)), mlp(), torch.zeros(1, dtype=torch.float64)) is None


@pytest.mark.thorough
def test_roots_keep_within_their_memory_and_what_is_missing_is_computed_again() -> None:
    network, everything = mlp(), BoundsCache(PLENTY)
    asked = queries(network, 4, radius=0.5)
    ask(Crown(), asked, everything)
    sizes = [root.bytes for number in range(4) if (root := everything.get(number))]
    few = BoundsCache(2 * max(sizes))
    for method in (Crown(), SEARCHING, Bab()):
        ask(method, asked, few)
        kept = [root for number in range(4) if (root := few.get(number))]
        assert len(kept) == 2 and sum(root.bytes for root in kept) <= 2 * max(sizes)
    for one, other in zip(ask(Bab(), asked, few), ask(Bab(), asked), strict=True):
        assert one.verdict is other.verdict


def test_bounding_that_was_cut_short_is_taken_up_again() -> None:
    network = mlp(0, (5, 8, 8, 7, 3))
    query = queries(network, 1, radius=0.5)[0]
    bounds_cache = BoundsCache(PLENTY)
    found = module.relaxation(network, input_box([query.property], network), None, stop=lambda: True)
    rows = RowBatch.from_properties([query.property], network.output_size)
    nothing = torch.full((len(rows.bound),), -torch.inf, dtype=torch.float64)
    bounds_cache.learn([0], network, found.pre, rows, nothing, reached=-1)
    ask(Crown(), [query], bounds_cache)
    root, alone = bounds_cache.get(0), pre(query)
    assert root is not None and root.bounded
    width, least = (sum(float((b.upper - b.lower).sum()) for b in p.values()) for p in (root.pre, alone))
    assert width <= least * 1.001


def test_what_decides_a_query_decides_it_whoever_was_asked_before() -> None:
    asked = queries(mlp(), 6, radius=0.05, depth=0.02)
    verdicts = [outcome.verdict for outcome in ask(Bab(), asked)]
    assert Verdict.UNSAT in verdicts
    bounds_cache = BoundsCache(PLENTY)
    for method in (Ibp(), Crown(), Bab()):
        outcomes = ask(method, asked, bounds_cache)
        decided = {outcome.verdict for number, outcome in enumerate(outcomes) if bounds_cache.get(number) is None}
        assert decided <= {Verdict.UNSAT}
    assert Verdict.UNSAT in decided
    assert [outcome.verdict for outcome in outcomes] == verdicts


def test_what_several_stages_exclude_together_is_a_verdict() -> None:
    (near,), (far,) = queries(mlp(), 1, radius=0.1), queries(mlp(), 1, radius=0.1, depth=100.0)
    unsafe = (near.property.unsafe[0], far.property.unsafe[1])
    query = Query(near.network, Property(near.property.box, unsafe))
    for method in (Crown(), SEARCHING, Bab(), Milp(), Smt(whole=True)):
        bounds_cache = BoundsCache(PLENTY)
        ask(Ibp(), [query], bounds_cache)
        root = bounds_cache.get(0)
        assert root is not None and root.lower[0] < 0 < root.lower[1]
        bounds_cache.prove(0, {0: 0.125})
        (outcome,) = ask(method, [query], bounds_cache)
        assert (outcome.verdict, outcome.trust, outcome.margin) == (Verdict.UNSAT, Trust.ROUNDED, 0.125)


def test_a_bound_that_is_not_a_number_says_nothing() -> None:
    network, bounds_cache = mlp(), BoundsCache(PLENTY)
    query = queries(network, 1)[0]
    rows, found = RowBatch.from_properties([query.property], network.output_size), pre(query)
    broken = {i: Bounds(b.lower * torch.nan, b.upper) for i, b in found.items()}
    values = torch.tensor([torch.nan, -1.0], dtype=torch.float64)
    assert bounds_cache.learn([0], network, broken, rows, values, reached=math.inf).tolist() == [-torch.inf, -1.0]
    ask(Crown(), [query], bounds_cache)
    root = bounds_cache.get(0)
    assert root is not None
    assert all(bool(b.lower.isfinite().all() and b.upper.isfinite().all()) for b in root.pre.values())
