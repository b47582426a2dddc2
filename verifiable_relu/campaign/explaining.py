"""What ``auto`` would do with an instance, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from verifiable_relu.campaign.runner import Case
from verifiable_relu.errors import InputError
from verifiable_relu.verifiers.auto import Auto
from verifiable_relu.verifiers.base import TimeBudget, Verifier


def explained(case: Case, verifier: Verifier, budget: TimeBudget) -> Iterator[str]:
    """Lines that say which methods an instance goes to, in which order, why, and with which share of its time.

    The instance's neurons are bounded by CROWN, within its time limit; nothing else is asked about it.

    Raises:
        InputError: if the verifier is another than ``auto``.
    """
    if not isinstance(verifier, Auto):
        raise InputError(f"only the method 'auto' chooses and can be explained, not '{verifier.name}'")
    for number, query in enumerate(case.queries, start=1):
        if len(case.queries) > 1:
            yield f"box {number} of {len(case.queries)}:"
        yield from verifier.explain(query, replace(budget, seconds=case.timeout / len(case.queries))).splitlines()
