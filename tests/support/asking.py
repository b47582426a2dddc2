"""Methods asked directly: what they claim, before anything is judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from verifiable_relu.search.batch import Account, QueryBatch
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome
from verifiable_relu.spec.property import Query


def query_batch(
    queries: Sequence[Query],
    seconds: float | Sequence[float] = math.inf,
    owner: Sequence[int] | None = None,
    **limits: Any,
) -> QueryBatch:
    """Queries with so many seconds each; a sequence has those of accounts, ``owner`` which of them is a query's."""
    named = {name: limits.pop(name) for name in ("progress", "bounds_cache", "observer") if name in limits}
    if isinstance(seconds, Sequence):
        accounts = [Account(each) for each in seconds]
        of = {number: accounts[number if owner is None else owner[number]] for number in range(len(queries))}
        return QueryBatch(queries, TimeBudget(**limits), of, **named)
    return QueryBatch(queries, TimeBudget(seconds, **limits), **named)


def claims(method: Any, queries: Sequence[Query], *arguments: Any, **named: Any) -> list[Outcome]:
    """What a method claims of queries, in their order; further arguments are those of ``query_batch``."""
    found = dict(method.claims(query_batch(queries, *arguments, **named)))
    return [found[number] for number in range(len(queries))]
