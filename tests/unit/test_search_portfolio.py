"""Claims, verdicts, and the bounds of whole boxes that methods start from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from tests.support.families import NETWORKS
from tests.unit.test_root_bounds import queries
from verifiable_relu.bounds.alpha import Ascent
from verifiable_relu.search.attack import Attack
from verifiable_relu.search.balls import InBalls
from verifiable_relu.search.batch import Account, BoundsCache, QueryBatch, answers, described
from verifiable_relu.search.bounding import AlphaCrown, Crown
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict
from verifiable_relu.search.registry import METHODS, limited, make
from verifiable_relu.spec.property import Ball, Property, Query

IBP, CROWN_IBP = Crown(name="ibp", by_crown=False, linear=False), Crown(name="crown-ibp", by_crown=False)
BOUNDS = (IBP, CROWN_IBP, Crown(), AlphaCrown())


def asked(kind: str = "mlp", **options: Any) -> list[Query]:
    return queries(NETWORKS[kind](), **options)


def sampled(query: Query, count: int = 2000) -> float:
    """The least margin at some points of the box."""
    box, prop = query.property.box, query.property
    share = torch.rand(count, box.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.from_numpy(box.lower) + share * torch.from_numpy(box.upper - box.lower)
    return min(float(prop.margin([Fraction(v) for v in y])) for y in query.network(x).tolist())


@pytest.mark.parametrize("kind", NETWORKS)
def test_margins_are_below_all_samples_and_tighter_from_method_to_method(kind: str) -> None:
    given = asked(kind, depth=0.3) + asked(kind, radius=0.05, depth=0.1, seed=1)
    least, wide = [sampled(query) for query in given], [-math.inf] * len(given)
    for method in BOUNDS:
        for dtype in ("float64", None):
            margins = [outcome.margin for outcome in answers(replace(method, dtype=dtype), given)]
            for margin, most, before in zip(margins, least, wide, strict=True):
                assert margin is not None and before - 1e-4 * (1 + abs(before)) <= margin <= most
        wide = [margin for margin in margins if margin is not None]


@pytest.mark.parametrize("order", [1, 2])
def test_balls_have_larger_margins_than_the_boxes_around_them(order: int) -> None:
    for query in asked(depth=0.02):
        center = (query.property.box.lower + query.property.box.upper) / 2
        ball = replace(query.property, ball=Ball(center, Fraction(3, 10), order))
        inside = replace(query, property=ball)
        (box,), (found,) = answers(Crown(), [query]), answers(InBalls(Crown()), [inside])
        assert found.margin is not None and box.margin is not None and found.margin > box.margin
        x = torch.randn(2000, center.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x = 0.299 * x / x.norm(order, 1, keepdim=True)
        values = query.network(x + torch.from_numpy(center)).tolist()
        assert found.margin <= min(float(query.property.margin([Fraction(v) for v in y])) for y in values)


# What is known of queries


def test_every_step_starts_from_the_bounds_of_those_before() -> None:
    given, cache = asked(count=2, radius=0.3), BoundsCache(1 << 24)

    def ask(method: Crown) -> list[float]:
        batch = QueryBatch(given, bounds_cache=cache)
        return [outcome.margin or 0.0 for _, outcome in method.claims(batch)]

    tight = AlphaCrown(intermediate=Ascent(steps=4))
    margins = [ask(method) for method in (IBP, CROWN_IBP, Crown(), Crown(), tight, IBP)]
    roots = [cache.get(number) for number in (0, 1)]
    assert all(root is not None and root.reached == math.inf and root.searched == 4 for root in roots)
    # Nothing is lost, and nothing that is known is computed again.
    for earlier, later in itertools.pairwise(margins):
        assert all(a <= b for a, b in zip(earlier, later, strict=True))
    assert margins[2] == margins[3] and margins[4] == margins[5] and margins[0] < margins[1] < margins[2] < margins[4]
    for query, root in zip(given, roots, strict=True):
        assert root is not None
        box = query.property.box
        x = torch.lerp(torch.from_numpy(box.lower), torch.from_numpy(box.upper), 0.3)
        values = query.network.values(x[None])
        assert all(((i.lower <= values[k]) & (values[k] <= i.upper)).all() for k, i in root.intervals.items())
    cache.prove(0, {0: 1.0, 1: 1.0})
    assert min(cache.get(0).lower.tolist()) == 1.0  # type: ignore[union-attr]
    other = asked(count=1, radius=0.01, seed=7)
    with pytest.raises(RuntimeError, match="exclude each other"):
        raise_fault(QueryBatch(other, bounds_cache=cache))


def raise_fault(batch: QueryBatch) -> None:
    (outcome,) = (outcome for _, outcome in Crown().claims(batch))
    assert outcome.reason is Reason.ERROR
    raise RuntimeError(outcome.detail)


def test_bounds_that_time_cut_short_go_on_where_they_were() -> None:
    given, cache, ticks = asked("residual", count=1, radius=0.3), BoundsCache(1 << 24), itertools.count()
    whole, method = answers(Crown(), given)[0].margin, Crown()
    budget = TimeBudget(0.25, clock=lambda: 0.1 * next(ticks))
    ((_, first),) = method.claims(QueryBatch(given, budget, bounds_cache=cache))
    root = cache.get(0)
    assert first.reason is Reason.TIMEOUT and root is not None and root.reached < math.inf
    ((_, second),) = method.claims(QueryBatch(given, bounds_cache=cache))
    root = cache.get(0)
    assert second.margin == pytest.approx(whole, abs=1e-6) and root is not None and root.reached == math.inf


# Claims become verdicts


@dataclass(frozen=True)
class Scripted:
    """Claims what it is told to."""

    outcomes: Sequence[Outcome]
    name: str = "scripted"

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        yield from zip(batch.queries, self.outcomes, strict=True)


def judged(query: Query, **claim: Any) -> Outcome:
    defaults: Mapping[str, Any] = {"verdict": Verdict.UNSAT, "reason": Reason.PROVED, "method": "scripted"}
    (found,) = answers(Scripted([Outcome(**{**defaults, **claim})]), [query])
    return found


def test_a_claimed_counterexample_counts_if_it_is_confirmed() -> None:
    (query,) = asked(count=1)
    (real,) = answers(Attack(), [query])
    assert real.verdict is Verdict.SAT and real.trust is Trust.EXACT and "confirm" in real.seconds
    sat = {"verdict": Verdict.SAT, "reason": Reason.REFUTED}
    assert judged(query, **sat, witness=real.witness).verdict is Verdict.SAT
    outside = tuple(Fraction(float(v)) + 1 for v in query.property.box.upper)
    unsafe = replace(query, property=Property(query.property.box, ((), *query.property.unsafe)))
    for witness, asking in ((outside, query), (None, query), (outside, unsafe)):
        found = judged(asking, **sat, witness=witness)
        assert (found.verdict, found.reason, found.trust) == (Verdict.UNKNOWN, Reason.UNCONFIRMED, None)


def test_claims_of_unsat_that_prove_nothing() -> None:
    (query,) = asked(count=1, depth=0.3)
    partial = replace(query, property=replace(query.property, partial="X_0 has no bound"))
    float32 = replace(query, network=replace(query.network, arithmetic="float16"))
    cases: list[tuple[Query, dict[str, Any], Reason, str]] = [
        (query, {"margin": -1.0}, Reason.ERROR, "with the margin -1.0"),
        (query, {"margin": math.nan}, Reason.ERROR, "with the margin nan"),
        (partial, {"margin": 1.0}, Reason.INCOMPLETE, "in a part of the inputs there is no counterexample"),
        (float32, {"margin": 1.0, "trust": Trust.FLOAT}, Reason.UNSUPPORTED, "does not account for rounding"),
    ]
    for asking, claim, reason, words in cases:
        found = judged(asking, **claim)
        assert (found.verdict, found.reason, found.trust) == (Verdict.UNKNOWN, reason, None)
        assert words in found.detail
    assert judged(query, margin=1.0, trust=Trust.ROUNDED).verdict is Verdict.UNSAT


def test_queries_that_share_an_account_share_its_time() -> None:
    given, account = asked(count=2), Account(10.0)
    batch = QueryBatch(given, TimeBudget(10.0), dict.fromkeys((0, 1), account))
    half = batch.part([0], 0.5)
    batch.charge([0, 1], 4.0, 1.0)
    assert batch.left([0, 1]) == 6.0 and half.left([0]) == 1.0 and account.processor == 1.0
    batch.charge([1], 9.0)
    (first, second) = (outcome for _, outcome in Crown().claims(batch))
    assert first.reason is second.reason is Reason.TIMEOUT


# Names, keys and rules


def test_records_keep_their_keys() -> None:
    keys = {name: described(make(name), limited(name)) for name in METHODS if not METHODS[name].needs}
    bounds = '{"version": 1, "device": "cpu", "memory": 1073741824}'
    assert keys["crown"] == f"crown({bounds})" and keys["auto"] == f"auto({bounds})" and keys["bab"] == f"bab({bounds})"
    assert keys["milp"] == 'milp({"version": 1})' and keys["smt-exact"] == 'smt-exact({"version": 1, "whole": true})'
    found = described(AlphaCrown(intermediate=Ascent(steps=6)), TimeBudget())
    assert found == 'alpha-crown({"version": 1, "intermediate": {"steps": 6}})'
