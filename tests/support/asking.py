"""Verifiers asked directly: what they claim, before anything is judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from verifiable_relu.spec.property import Query
from verifiable_relu.verifiers.base import Limits, Outcome, Verifier
from verifiable_relu.verifiers.docket import Account, Docket
from verifiable_relu.verifiers.root import NONE, Roots


def docket(
    queries: Sequence[Query],
    seconds: float | Sequence[float] = math.inf,
    owner: Sequence[int] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    roots: Roots = NONE,
    **limits: Any,
) -> Docket:
    """Queries with so many seconds each; a sequence has those of accounts, ``owner`` which of them is a query's."""
    if isinstance(seconds, Sequence):
        accounts = [Account(each) for each in seconds]
        of = {number: accounts[number if owner is None else owner[number]] for number in range(len(queries))}
        return Docket(queries, Limits(**limits), of, progress, roots)
    return Docket(queries, Limits(seconds, **limits), None, progress, roots)


def claims(method: Verifier, queries: Sequence[Query], *arguments: Any, **named: Any) -> list[Outcome]:
    """What a verifier claims of queries, in their order; further arguments are those of ``docket``."""
    found = dict(method.claims(docket(queries, *arguments, **named)))
    return [found[number] for number in range(len(queries))]
