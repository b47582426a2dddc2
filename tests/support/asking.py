"""Verifiers asked directly: what they claim, before anything is judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from verifiable_relu.spec.property import Query
from verifiable_relu.verifiers.base import Outcome, TimeBudget
from verifiable_relu.verifiers.batch import Account, QueryBatch, Verifier
from verifiable_relu.verifiers.root_bounds import NO_BOUNDS, BoundsCache


def query_batch(
    queries: Sequence[Query],
    seconds: float | Sequence[float] = math.inf,
    owner: Sequence[int] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    bounds_cache: BoundsCache = NO_BOUNDS,
    **limits: Any,
) -> QueryBatch:
    """Queries with so many seconds each; a sequence has those of accounts, ``owner`` which of them is a query's."""
    if isinstance(seconds, Sequence):
        accounts = [Account(each) for each in seconds]
        of = {number: accounts[number if owner is None else owner[number]] for number in range(len(queries))}
        return QueryBatch(queries, TimeBudget(**limits), of, progress, bounds_cache)
    return QueryBatch(queries, TimeBudget(seconds, **limits), None, progress, bounds_cache)


def claims(method: Verifier, queries: Sequence[Query], *arguments: Any, **named: Any) -> list[Outcome]:
    """What a verifier claims of queries, in their order; further arguments are those of ``batch``."""
    found = dict(method.claims(query_batch(queries, *arguments, **named)))
    return [found[number] for number in range(len(queries))]
