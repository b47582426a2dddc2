"""A campaign: many instances put to one verifier as one batch.

A verifier claims, the campaign records: every claimed counterexample is first confirmed by exact evaluation and
replay, and a claim that cannot be true is no answer.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from verifiable_relu.campaign.result import Result, join, versions
from verifiable_relu.campaign.store import Store
from verifiable_relu.errors import InputError
from verifiable_relu.spec.property import Query
from verifiable_relu.trust.replay import Confirmation, confirm
from verifiable_relu.verifiers.base import Budget, Outcome, Reason, Trust, Verdict, Verifier, fault

if TYPE_CHECKING:  # Certificates come with branch and bound, which other methods should not wait for.
    from verifiable_relu.campaign.certificates import Certificates

TABLE_EVERY = 1.0
"""Seconds between two writings of the table; the records are written at once."""


@dataclass(frozen=True, eq=False)
class Case:
    """One instance: queries whose answers join, with one time limit between them.

    Attributes:
        onnx: the network, as the user named it.
        vnnlib: the property, as the user named it.
        queries: at least one, all of one network.
        timeout: seconds, finite.
    """

    onnx: str
    vnnlib: str
    queries: tuple[Query, ...]
    timeout: float

    @property
    def digest(self) -> str:
        """What is asked: the query's digest, for several the digest of theirs."""
        if len(self.queries) == 1:
            return self.queries[0].digest
        return hashlib.sha256("".join(q.digest for q in self.queries).encode()).hexdigest()


class Observer(Protocol):
    """Who watches a campaign."""

    def stage(self, name: str, done: int, total: int) -> None:
        """``done`` of ``total`` queries have been through the stage ``name`` of the verifier."""

    def result(self, result: Result) -> None:
        """An instance is answered."""


class _Quiet:
    def stage(self, name: str, done: int, total: int) -> None:
        pass

    def result(self, result: Result) -> None:
        pass


QUIET: Observer = _Quiet()
"""Nobody watches."""


READING = "reading"
"""Stands for a method where a fault of the program, not a bad file, kept an instance from being asked."""


def unasked(onnx: str, vnnlib: str, error: Exception, timeout: float) -> Result:
    """What is recorded of an instance that could not be read: bad input, or any other exception in reading it."""
    bad = isinstance(error, InputError)
    method, detail = ("", str(error)) if bad else (READING, f"{type(error).__name__}: {error}")
    return Result(onnx, vnnlib, Verdict.UNKNOWN, Reason.ERROR, method, 0.0, detail=detail, timeout=timeout)


def run(
    cases: Sequence[Case | Result],
    verifier: Verifier,
    store: Store | None = None,
    observer: Observer = QUIET,
    certificates: Certificates | None = None,
) -> list[Result]:
    """Answer all cases in one batch, keeping each result as it comes.

    Args:
        cases: the instances; a ``Result`` stands for one that was settled before (``unasked``) and is only recorded.
        verifier: what answers them.
        store: open; keeps the records. A case that has a final record there is not asked again.
        observer: is told of stages and results.
        certificates: where a certificate of every sat and unsat goes, which is checked at once; in no case's time.

    Returns:
        One result per case, in their order.

    Raises:
        KeyboardInterrupt: after everything answered so far was kept.
        InputError: if the store cannot be written.
    """
    campaign = _Campaign(cases, verifier, store, observer, certificates)
    try:
        campaign.settle()
        campaign.attempt(range(len(campaign.queries)))
    finally:
        campaign.tabulate()
    return campaign.results()


def _checked(query: Query, outcome: Outcome) -> tuple[Outcome, Confirmation | None]:
    """What a claim is worth, with the confirmation of a claimed counterexample."""
    if outcome.margin is not None and math.isnan(outcome.margin) and outcome.verdict is Verdict.UNKNOWN:
        outcome = replace(outcome, margin=None)
    if outcome.verdict is Verdict.UNSAT and outcome.margin is not None and not outcome.margin >= 0:
        complaint = f"{outcome.method} claimed unsat with the margin {outcome.margin}"
        return replace(
            outcome, verdict=Verdict.UNKNOWN, reason=Reason.ERROR, trust=None, margin=None, detail=complaint
        ), None
    if outcome.verdict is not Verdict.SAT:
        return outcome, None
    start = time.perf_counter()
    judged = confirm(query, outcome.witness or ())
    seconds = {**outcome.seconds, "confirm": outcome.seconds.get("confirm", 0.0) + time.perf_counter() - start}
    outcome = replace(outcome, seconds=seconds, margin=judged.margin)
    if not judged.confirmed:
        return replace(
            outcome, verdict=Verdict.UNKNOWN, reason=Reason.UNCONFIRMED, trust=None, margin=None, detail=judged.detail
        ), judged
    return replace(outcome, trust=Trust.EXACT if judged.exact else Trust.ROUNDED), judged


class _Campaign:
    """The state of one run: which queries are answered, and what that makes of their cases."""

    def __init__(
        self,
        cases: Sequence[Case | Result],
        verifier: Verifier,
        store: Store | None,
        observer: Observer,
        certificates: Certificates | None,
    ) -> None:
        self.cases = cases
        self.verifier = verifier
        self.method = repr(verifier)
        self.store = store
        self.observer = observer
        self.certificates = certificates
        self.recorded: dict[int, Result] = {}
        self.queries: list[Query] = []
        self.owner: list[int] = []
        self.outcomes: dict[int, dict[int, Outcome]] = {}
        self.replayed: dict[int, np.ndarray | None] = {}
        self.failure: Exception | None = None
        self.tabulated = -TABLE_EVERY

    def settle(self) -> None:
        """Take what is known already, and line up the queries of the rest."""
        purses: list[float] = []
        for index, case in enumerate(self.cases):
            if isinstance(case, Result):
                self.record(index, case)
                continue
            key = (case.digest, self.method, case.timeout, versions()["verifiable_relu"])
            known = None if self.store is None else self.store.find(key)
            if known is not None and not self.to_certify(known):
                self.recorded[index] = known = replace(known, onnx=case.onnx, vnnlib=case.vnnlib)
                self.observer.result(known)
                continue
            self.outcomes[index] = {}
            self.queries.extend(case.queries)
            self.owner.extend([index] * len(case.queries))
            purses.append(case.timeout)
        purse = {case: number for number, case in enumerate(self.outcomes)}
        self.budget = Budget(purses, [purse[case] for case in self.owner])

    def to_certify(self, known: Result) -> bool:
        """Whether a verdict that is known lacks the certificate that is wanted."""
        return (
            self.certificates is not None and known.verdict is not Verdict.UNKNOWN and known.trust is not Trust.CHECKED
        )

    def open(self, members: Sequence[int]) -> list[int]:
        """Those of ``members`` whose answer is still awaited."""
        return [i for i in members if self.owner[i] not in self.recorded and i not in self.outcomes[self.owner[i]]]

    def attempt(self, members: Sequence[int]) -> None:
        """Put queries to the verifier. If it breaks, halve the batch until the query at fault is alone."""
        members = self.open(members)
        if not members:
            return
        try:
            claims = self.verifier.verify(
                [self.queries[i] for i in members], self.budget.subset(members), _Relay(self, members)
            )
            for query, outcome in zip(members, claims, strict=True):
                self.finish(query, outcome)
        except Exception as error:
            if self.failure is not None:
                raise self.failure from None
            left = self.open(members)
            if len(left) == 1:
                self.finish(left[0], fault(error, self.verifier.name))
            else:
                self.attempt(left[: len(left) // 2])
                self.attempt(left[len(left) // 2 :])

    def finish(self, query: int, claim: Outcome) -> None:
        """Take a claim about one query; the first one counts."""
        index = self.owner[query]
        if index in self.recorded or query in self.outcomes[index]:
            return
        outcome, judged = _checked(self.queries[query], claim)
        self.outcomes[index][query] = outcome
        if outcome.verdict is Verdict.SAT:
            assert judged is not None
            self.replayed[index] = judged.replayed
        case = self.cases[index]
        assert isinstance(case, Case)
        if outcome.verdict is Verdict.SAT or len(self.outcomes[index]) == len(case.queries):
            self.conclude(index, case, query)

    def conclude(self, index: int, case: Case, query: int) -> None:
        """Make the result of a case whose answer is known."""
        joined = join(list(self.outcomes[index].values()))
        left = self.budget.remaining(query)
        # The other boxes of a case that is decided have nothing more to spend.
        self.budget.charge([query], left)
        replayed = self.replayed.get(index)
        network = case.queries[0].network
        joined = self.certified(index, case, joined)
        self.record(
            index,
            Result(
                case.onnx,
                case.vnnlib,
                joined.verdict,
                joined.reason,
                joined.method,
                max(sum(joined.seconds.values()), case.timeout - left),
                joined.trust,
                joined.margin,
                joined.witness,
                None if replayed is None else tuple(replayed.tolist()),
                network.input_shape,
                joined.detail,
                joined.seconds,
                joined.unstable,
                network.digest,
                case.digest,
                self.method,
                case.timeout,
            ),
        )

    def certified(self, index: int, case: Case, joined: Outcome) -> Outcome:
        """What a certificate makes of the trust in a verdict."""
        if self.certificates is None or joined.verdict is Verdict.UNKNOWN:
            return joined
        mine = dict(sorted(self.outcomes[index].items()))
        kept = self.certificates.keep(case.onnx, case.vnnlib, case.queries, list(mine.values()), case.timeout)
        # Proofs can be large.
        self.outcomes[index] = {query: replace(outcome, proof=None) for query, outcome in mine.items()}
        if kept.accepted:
            return replace(joined, trust=Trust.CHECKED)
        note = f"no certificate: {kept.detail}"
        return replace(joined, detail=f"{joined.detail}; {note}" if joined.detail else note)

    def record(self, index: int, result: Result) -> None:
        """Keep a result."""
        self.recorded[index] = result
        try:
            if self.store is not None:
                self.store.append(result)
            if time.perf_counter() - self.tabulated > TABLE_EVERY:
                self.tabulate()
            self.observer.result(result)
        except Exception as error:
            # Whoever reported the outcome is a verifier, and this is not its fault.
            self.failure = error
            raise

    def tabulate(self) -> None:
        """Write the table of what is answered."""
        if self.store is not None:
            self.store.tabulate(self.results())
        self.tabulated = time.perf_counter()

    def results(self) -> list[Result]:
        """What is answered, in the order of the cases."""
        return [self.recorded[i] for i in sorted(self.recorded)]


class _Relay:
    """A verifier's progress, translated to the campaign's queries."""

    def __init__(self, campaign: _Campaign, members: Sequence[int]) -> None:
        self.campaign = campaign
        self.members = members

    def stage(self, name: str, done: int, total: int) -> None:
        self.campaign.observer.stage(name, done, total)

    def finish(self, query: int, outcome: Outcome) -> None:
        self.campaign.finish(self.members[query], outcome)
