"""The run of a campaign: many instances are put to one verifier in one batch.

A verifier claims outcomes; the batch makes verdicts of them, which are recorded here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from verifiable_relu.campaign.counterexample import assignment
from verifiable_relu.campaign.result import REFUSED, Key, Result, join, versions
from verifiable_relu.errors import InputError, OutOfTime
from verifiable_relu.settings import neutral
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.specfile import SpecFile
from verifiable_relu.supervisor.memory import peak
from verifiable_relu.verifiers.base import Outcome, Reason, TimeBudget, Trust, Verdict, Verifier, described, fault
from verifiable_relu.verifiers.batch import Account, QueryBatch

if TYPE_CHECKING:  # Certificates come with branch and bound, which other methods should not wait for.
    from verifiable_relu.campaign.certificates import Certificates

HEADLESS = "the last layer keeps the order of the outputs, which the property only compares, and was left out"


@dataclass(frozen=True, eq=False)
class Case:
    """One instance: queries that have one answer together and share one time limit.

    Attributes:
        onnx: the network's file, as the user named it.
        vnnlib: the property file, as the user named it.
        queries: at least one, all of one network.
        timeout: the time limit in seconds, finite.
        spec: the property file as it was read; None for queries that come from no file.
        files: the digest of the files' bytes (``Loader.files``).
        spent: the seconds of the time limit that reading took: of the property, and of the network where it was read
            first, so that an instance has the same time wherever it stands in a list.
    """

    onnx: str
    vnnlib: str
    queries: tuple[Query, ...]
    timeout: float
    spec: SpecFile | None = None
    files: str = ""
    spent: float = 0.0

    @property
    def digest(self) -> str:
        """The digest of what the instance asks: the query's, or SHA-256 over the digests of several queries."""
        if len(self.queries) == 1:
            return self.queries[0].digest
        return hashlib.sha256("".join(q.digest for q in self.queries).encode()).hexdigest()


class Observer(Protocol):
    """An object that a campaign tells of its progress."""

    def stage(self, name: str, done: int, total: int) -> None:
        """``done`` of ``total`` queries have been through the stage ``name`` of the verifier."""

    def result(self, number: int, result: Result, recorded: bool) -> None:
        """The instance with this number is answered; ``recorded`` if the answer is of an earlier run."""


class _Quiet:
    def stage(self, name: str, done: int, total: int) -> None:
        pass

    def result(self, number: int, result: Result, recorded: bool) -> None:
        pass


QUIET: Observer = _Quiet()
"""The observer that does nothing."""


class Records(Protocol):
    """The keeper of a campaign's results, such as a ``Store``."""

    def find(self, key: Key, timeout: float, checked: bool) -> Result | None:
        """An earlier result that answers an instance (``Store.find``)."""

    def holds(self, result: Result) -> bool:
        """Whether there is a record of the same verifier for files of the same names."""

    def append(self, result: Result, counterexample: str | None) -> None:
        """Keep a result, and its counterexample as a text if it has one."""

    def enter(self, number: int, result: Result) -> None:
        """Take the result of an instance, by its number, into the table of the run."""

    def tabulate(self) -> None:
        """Replace the table of results."""


def keep(
    store: Records | None,
    observer: Observer,
    number: int,
    result: Result,
    counterexample: str | None = None,
    recorded: bool = False,
) -> None:
    """Keep the result of an instance in the store and its table, and tell of it.

    Args:
        store: an open store for the records, or None.
        observer: the object that is told.
        number: the instance's number in the run.
        result: the result.
        counterexample: the text of its counterexample, if it has one.
        recorded: whether the store has the answer from an earlier run, or from an equal question in other files. Its
            record is then written under the names of these files, if it is not there.
    """
    if store is not None:
        if recorded and not store.holds(result):
            if result.verdict is Verdict.SAT:
                counterexample = "\n".join(assignment(result, None)) + "\n"
            store.append(result, counterexample)
        elif not recorded:
            store.append(result, counterexample)
        store.enter(number, result)
    observer.result(number, result, recorded)


READING = "reading"
"""The ``Result.method`` of an instance whose reading failed by a fault of the program rather than by a bad file."""


def unasked(onnx: str, vnnlib: str, error: Exception, timeout: float, arithmetic: str = "real") -> Result:
    """The result of an instance that could not be read; ``run`` adds the verifier for which it was to be read.

    Args:
        onnx: the network's file, as the user named it.
        vnnlib: the property file, as the user named it.
        error: the exception; an InputError means bad input, any other exception a fault of the program.
        timeout: the instance's time limit in seconds.
        arithmetic: about which it was to be asked.
    """
    bad = isinstance(error, InputError)
    method, detail = ("", str(error)) if bad else (READING, f"{type(error).__name__}: {error}")
    return Result(
        onnx, vnnlib, Verdict.UNKNOWN, Reason.ERROR, method, 0.0, detail=detail, timeout=timeout, arithmetic=arithmetic
    )


def lost(
    onnx: str, vnnlib: str, timeout: float, verifier: Verifier, budget: TimeBudget, error: Exception, arithmetic: str
) -> Result:
    """The result of an instance whose process was ended, or ended by itself.

    Args:
        onnx: the network's file, as the user named it.
        vnnlib: the property file, as the user named it.
        timeout: the instance's time limit in seconds.
        verifier: the verifier.
        budget: of its work.
        error: OutOfTime, which names the instance if its files were not read in time, MemoryError, or how it ended.
        arithmetic: about which the instance was asked.
    """
    reason, method, seconds, detail = Reason.ERROR, verifier.name, 0.0, str(error)
    if isinstance(error, MemoryError):
        reason, detail = Reason.MEMORY, detail or "out of memory"
    elif isinstance(error, OutOfTime):
        reason, seconds, detail = Reason.TIMEOUT, timeout, "the process did not end within the time limit"
        if error.subject is not None:
            method, detail = READING, "the files were not read within the time limit"
    # Without the digest of the query, the record is no answer for later runs, which ask again.
    known = described(verifier, budget)
    return Result(
        onnx, vnnlib, Verdict.UNKNOWN, reason, method, seconds, detail=detail, verifier=known, timeout=timeout,
        arithmetic=arithmetic,
    )  # fmt: skip


@neutral()
def run(
    cases: Sequence[Case | Result],
    verifier: Verifier,
    store: Records | None = None,
    observer: Observer = QUIET,
    certificates: Certificates | None = None,
    budget: TimeBudget = TimeBudget(),  # noqa: B008 -- frozen
) -> list[Result]:
    """Answer all instances in one batch, and record each result as soon as it is known.

    Args:
        cases: the instances. A ``Result`` among them, such as one of ``unasked``, is only recorded, as this verifier's.
        verifier: the verifier that answers the queries.
        store: an open store for the records, or None. An instance that a record there answers is not asked again.
        observer: the object that is told of stages and results.
        certificates: the folder for a certificate of every sat and unsat, each checked at once, or None. The time that
            this takes is not charged to the instances. A verdict whose certificate the checker refuses is *unknown*
            (``Result.disputed``).
        budget: of the verifier's work. Each instance has a time limit of its own, which counts by the budget's clock.

    Returns:
        One result per instance, in their order.

    Raises:
        KeyboardInterrupt: if the user interrupts, after all results known so far are recorded.
        InputError: if the store cannot be written.
    """
    campaign = _Campaign(cases, verifier, budget, store, observer, certificates)
    try:
        campaign.settle()
        campaign.attempt(range(len(campaign.owner)))
    finally:
        if store is not None:
            store.tabulate()
    return [campaign.known[number] for number in sorted(campaign.known)]


class _Campaign:
    """The state of one run.

    Attributes:
        cases: the instances, and results of instances that were not asked.
        verifier, budget: the verifier and what its work may use.
        method: the text by which records know these.
        store: the store of the records, or None.
        observer: the object that is told of stages and results.
        known: the results so far, by the numbers of their instances.
        batch: the queries of all instances that are asked, without heads that are of no account.
        owner: for each query the number of its instance.
        members: for each instance that is asked the numbers of its queries.
        outcomes: the outcomes so far, by instance and query.
    """

    def __init__(
        self,
        cases: Sequence[Case | Result],
        verifier: Verifier,
        budget: TimeBudget,
        store: Records | None,
        observer: Observer,
        certificates: Certificates | None,
    ) -> None:
        self.cases = cases
        self.verifier = verifier
        self.budget = budget
        self.method = described(verifier, budget)
        self.store = store
        self.observer = observer
        self.certificates = certificates
        self.known: dict[int, Result] = {}
        self.owner: list[int] = []
        self.members: dict[int, range] = {}
        self.outcomes: dict[int, dict[int, Outcome]] = {}

    def settle(self) -> None:
        """Record the instances whose results are known, and put the queries of the others on the batch."""
        queries: list[Query] = []
        accounts: dict[int, Account] = {}
        for index, case in enumerate(self.cases):
            if isinstance(case, Result):
                self.record(index, replace(case, verifier=self.method))
                continue
            key = (case.digest, self.method, versions()["verifiable_relu"])
            wanted = self.certificates is not None
            known = None if self.store is None else self.store.find(key, case.timeout, wanted)
            # A certificate speaks of its own files, which an equal question in other files is not.
            if known is not None and not (wanted and Path(known.vnnlib).resolve() != Path(case.vnnlib).resolve()):
                self.take(index, replace(known, onnx=case.onnx, vnnlib=case.vnnlib), None, True)
                continue
            self.outcomes[index] = {}
            account = Account(max(0.0, case.timeout - case.spent))
            self.members[index] = range(len(queries), len(queries) + len(case.queries))
            accounts |= dict.fromkeys(self.members[index], account)
            queries.extend(query.without_head for query in case.queries)
            self.owner.extend([index] * len(case.queries))
        self.query_batch = QueryBatch(queries, self.budget, accounts, self.observer.stage)

    def open(self, members: Sequence[int]) -> list[int]:
        """The queries among ``members`` that have no outcome, and whose instance has no result."""
        return [i for i in members if self.owner[i] not in self.known and i not in self.outcomes[self.owner[i]]]

    def attempt(self, members: Sequence[int]) -> None:
        """Put the queries ``members`` to the verifier.

        If the verifier raises an exception, the halves of the batch that is left are put to it one after the other,
        until the query at fault is alone in its batch and takes the exception as its outcome.
        """
        members = self.open(members)
        if not members:
            return
        asked = self.query_batch.part(members).ask(self.verifier)
        while True:
            try:
                query = next(asked, None)
            except Exception as error:
                left = self.open(members)
                if len(left) == 1:
                    self.query_batch.judge(left[0], fault(error, self.verifier.name))
                    self.finish(left[0])
                else:
                    self.attempt(left[: len(left) // 2])
                    self.attempt(left[len(left) // 2 :])
                return
            if query is None:
                return
            self.finish(query)

    def finish(self, query: int) -> None:
        """Keep the outcome of one query."""
        index, outcome = self.owner[query], self.query_batch.outcomes[query]
        if index in self.known:
            return
        case = self.cases[index]
        assert isinstance(case, Case)
        if self.query_batch.queries[query].network is not case.queries[0].network:
            outcome = replace(outcome, detail=f"{outcome.detail}; {HEADLESS}" if outcome.detail else HEADLESS)
        self.outcomes[index][query] = outcome
        if outcome.verdict is Verdict.SAT or len(self.outcomes[index]) == len(case.queries):
            self.conclude(index, case, query)

    def conclude(self, index: int, case: Case, query: int) -> None:
        """Record the result of an instance whose answer is known; ``query`` is the query that was answered last."""
        joined = join(list(self.outcomes[index].values()))
        left = self.query_batch.left([query])
        # The instance's other queries need no answer: no time ends the work on them.
        self.query_batch.charge([query], left)
        for other in self.members[index]:
            self.query_batch.close(other)
        network = case.queries[0].network
        joined, certificate = self.certified(index, case, joined)
        self.record(
            index,
            Result(
                case.onnx,
                case.vnnlib,
                joined.verdict,
                joined.reason,
                joined.method,
                max(sum(joined.seconds.values()), case.timeout - case.spent - left),
                joined.trust,
                joined.margin,
                joined.witness,
                joined.outputs,
                network.input_shape,
                joined.detail,
                joined.seconds,
                joined.unstable,
                joined.subproblems,
                network.digest,
                case.digest,
                self.method,
                case.timeout,
                files=case.files,
                arithmetic=network.arithmetic,
                processor_seconds=self.query_batch.processor(query),
                memory=None if self.store is None else peak() or None,
                certificate=certificate,
                mended=network.mended,
            ),
        )

    def certified(self, index: int, case: Case, joined: Outcome) -> tuple[Outcome, str]:
        """What a certificate makes of a verdict, *checked*, or unknown where the checker refuses it; and its file."""
        if self.certificates is None or joined.verdict is Verdict.UNKNOWN:
            return joined, ""
        mine = dict(sorted(self.outcomes[index].items()))
        kept = self.certificates.keep(case.onnx, case.vnnlib, case.queries, list(mine.values()), case.timeout)
        # Proofs can be large.
        self.outcomes[index] = {query: replace(outcome, proof=None) for query, outcome in mine.items()}
        if kept.accepted:
            return replace(joined, trust=Trust.CHECKED), kept.file
        if kept.refused:
            detail = f'{REFUSED} of "{joined.verdict}" by {joined.method}: {kept.detail}'
            refused = replace(
                joined, verdict=Verdict.UNKNOWN, reason=Reason.UNCONFIRMED, trust=None, margin=None, detail=detail
            )
            return refused, kept.file
        note = f"no certificate: {kept.detail}"
        return replace(joined, detail=f"{joined.detail}; {note}" if joined.detail else note), kept.file

    def record(self, index: int, result: Result) -> None:
        """Keep a result."""
        self.take(index, result, self.counterexample(index, result), False)

    def take(self, index: int, result: Result, counterexample: str | None, recorded: bool) -> None:
        self.known[index] = result
        keep(self.store, self.observer, index, result, counterexample, recorded)

    def counterexample(self, index: int, result: Result) -> str | None:
        """The text of a result's counterexample for the store, in the form of its property file; None for no text."""
        if self.store is None or result.verdict is not Verdict.SAT:
            return None
        case = self.cases[index]
        return "\n".join(assignment(result, case.spec if isinstance(case, Case) else None)) + "\n"
