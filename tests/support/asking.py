"""Verifiers asked directly: what they claim, before anything is judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from verifiable_relu.ir.flatten import flatten
from verifiable_relu.search import batch as search_batch
from verifiable_relu.search.query import Query as FlatQuery
from verifiable_relu.spec.property import Query
from verifiable_relu.verifiers.base import Outcome, TimeBudget
from verifiable_relu.verifiers.batch import Account, QueryBatch
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


def claims(method: Any, queries: Sequence[Query], *arguments: Any, **named: Any) -> list[Outcome]:
    """What a verifier claims of queries, in their order; further arguments are those of ``query_batch``.

    Methods on flat networks are asked about the flat networks of the queries.
    """
    if type(method).__module__.startswith("verifiable_relu.search"):
        observer, (seconds, *_) = named.pop("observer", None), (*arguments, math.inf)
        asked = search_batch.QueryBatch(flat_queries(queries), TimeBudget(seconds, **named), observer=observer)
        found = dict(method.claims(asked))
    else:
        found = dict(method.claims(query_batch(queries, *arguments, **named)))
    return [found[number] for number in range(len(queries))]


def flat_queries(queries: Sequence[Query]) -> list[FlatQuery]:
    """Return the queries about flat networks; queries about one network still are."""
    networks = {id(query.network): query.network for query in queries}
    made = {key: flatten(network) for key, network in networks.items()}
    return [FlatQuery(made[id(query.network)], query.property) for query in queries]
