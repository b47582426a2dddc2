"""The run of a campaign: one verifier answers many instances in one batch.

A verifier claims outcomes; the batch makes verdicts of them, which are recorded here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from verifiable_relu.campaign.result import QUIET, REFUSED, Observer, Result, join, versions
from verifiable_relu.campaign.store import assignment
from verifiable_relu.ir.network import Network
from verifiable_relu.search.batch import Account, QueryBatch, Verifier, described
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict, fault
from verifiable_relu.settings import default_settings
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.specfile import SpecFile
from verifiable_relu.supervisor.forks import peak_memory

if TYPE_CHECKING:  # Certificates come with branch and bound, which other methods should not wait for.
    from verifiable_relu.campaign.certificates import Certificates
    from verifiable_relu.proof.recorder import Recorder

HEADLESS = "the last layer keeps the order of the outputs, which the property only compares, and was left out"


def open_certificates(
    folder: Path | None, files: Sequence[str] = (), networks: Sequence[Network] = ()
) -> Certificates | None:
    """Return the folder for certificates; None if none is asked for."""
    if folder is None:
        return None
    # Imported here, because the checker takes 0.4 s of processor time.
    from verifiable_relu.campaign.certificates import Certificates

    return Certificates(folder, files, networks)


@dataclass(frozen=True, eq=False)
class Case:
    """One instance: queries of one network that have one answer together and share one time limit.

    Attributes:
        onnx, vnnlib: the network's file and the property file, as the user named them.
        spec, files: the property file as read, None for queries that come from no file; and ``Loader.files``.
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


@default_settings()
def run(
    cases: Sequence[Case | Result],
    verifier: Verifier,
    observer: Observer = QUIET,
    certificates: Certificates | None = None,
    budget: TimeBudget = TimeBudget(),  # noqa: B008 -- frozen
) -> list[Result]:
    """Answer all instances in one batch, and record each result as soon as it is known; returns them in order.

    A ``Result`` among the cases (``unanswered``) is only recorded, as this verifier's. An instance that
    has an earlier answer is not asked again. Each has a time limit of its own, which counts by the budget's clock.
    Certificates of every sat and unsat are checked at once, for which instances are not charged; a *sat* whose
    certificate the checker refuses is *unknown* (``Result.disputed``), an *unsat* stands with a note.

    Raises:
        KeyboardInterrupt: if the user interrupts, after all results known so far are recorded.
        InputError: if the store cannot be written.
    """
    campaign = _Campaign(cases, verifier, budget, observer, certificates)
    campaign.settle()
    campaign.attempt(range(len(campaign.owner)))
    return [campaign.known[number] for number in sorted(campaign.known)]


@dataclass(eq=False)
class _Campaign:
    """The state of one run: ``owner`` has the instance of each query of the batch, ``members`` its queries."""

    cases: Sequence[Case | Result]
    verifier: Verifier
    budget: TimeBudget
    observer: Observer
    certificates: Certificates | None
    known: dict[int, Result] = field(default_factory=dict)
    owner: list[int] = field(default_factory=list)
    members: dict[int, range] = field(default_factory=dict)
    outcomes: dict[int, dict[int, Outcome]] = field(default_factory=dict)
    recorder: Recorder | None = None

    def settle(self) -> None:
        """Record the instances whose results are known, and put the queries of the others on the batch."""
        self.method = described(self.verifier, self.budget)
        queries: list[Query] = []
        accounts: dict[int, Account] = {}
        for index, case in enumerate(self.cases):
            if isinstance(case, Result):
                self.record(index, replace(case, verifier=self.method))
                continue
            key, wanted = (case.digest, self.method, versions()["verifiable_relu"]), self.certificates is not None
            known = self.observer.find(key, case.timeout, wanted)
            # A certificate speaks of its own files, which an equal question in other files is not.
            if known is not None and not (wanted and Path(known.vnnlib).resolve() != Path(case.vnnlib).resolve()):
                self.record(index, replace(known, onnx=case.onnx, vnnlib=case.vnnlib), recorded=True)
                continue
            self.outcomes[index] = {}
            account = Account(max(0.0, case.timeout - case.spent))
            self.members[index] = range(len(queries), len(queries) + len(case.queries))
            accounts |= dict.fromkeys(self.members[index], account)
            # Heads that are of no account are left out.
            queries.extend(query.without_head for query in case.queries)
            self.owner.extend([index] * len(case.queries))
        if self.certificates is not None:
            # Imported here, because few campaigns write certificates.
            from verifiable_relu.proof.recorder import Recorder

            self.recorder = Recorder()
        self.batch = QueryBatch(queries, self.budget, accounts, self.observer.stage, observer=self.recorder)

    def attempt(self, members: Sequence[int]) -> None:
        """Put the queries ``members``, as far as they are open, to the verifier; where that fails, in halves.

        A query that is at fault is alone in its batch in the end and takes the exception as its outcome.
        """
        members = self.open(members)
        asked = self.batch.part(members).ask(self.verifier) if members else iter(())
        while True:
            try:
                query = next(asked, None)
            except Exception as error:
                left = self.open(members)
                if len(left) > 1:
                    self.attempt(left[: len(left) // 2])
                    self.attempt(left[len(left) // 2 :])
                    return
                (query,) = left
                self.batch.judge(query, fault(error, self.verifier.name))
                asked = iter(())
            if query is None:
                return
            self.finish(query)

    def open(self, members: Sequence[int]) -> list[int]:
        return [i for i in members if self.owner[i] not in self.known and i not in self.outcomes[self.owner[i]]]

    def finish(self, query: int) -> None:
        """Keep the outcome of one query, and the result of its instance once that is known."""
        index, outcome = self.owner[query], self.batch.outcomes[query]
        case = self.cases[index]
        if index in self.known or isinstance(case, Result):
            return
        if self.batch.queries[query].network is not case.queries[0].network:
            outcome = _noted(outcome, HEADLESS)
        found = self.outcomes[index]
        found[query] = outcome
        if outcome.verdict is Verdict.SAT or len(found) == len(case.queries):
            self.conclude(index, case, query)

    def conclude(self, index: int, case: Case, query: int) -> None:
        """Record the result of an instance whose answer is known; ``query`` is the query that was answered last."""
        left = self.batch.left([query])
        # The instance's other queries need no answer: no time ends the work on them.
        self.batch.charge([query], left)
        for other in self.members[index]:
            self.batch.close(other)
        found, certificate = self.certified(index, case)
        if self.recorder is not None:
            for number in self.members[index]:
                self.recorder.forget(number)
        network, source = case.queries[0].network, case.queries[0].network.source
        result = Result(
            case.onnx, case.vnnlib, found.verdict, found.reason, found.method,
            max(sum(found.seconds.values()), case.timeout - case.spent - left),
            found.trust, found.margin, found.witness, found.outputs, source.input_shape, found.detail, found.seconds,
            found.unstable, found.subproblems, network.digest, case.digest, self.method, case.timeout, files=case.files,
            arithmetic=network.arithmetic, processor_seconds=self.batch.processor(query),
            memory=peak_memory() or None, certificate=certificate, repairs=source.repairs,
        )  # fmt: skip
        if result.verdict is Verdict.SAT and case.spec is not None:
            result = replace(result, assignment="\n".join(assignment(result, case.spec)))
        self.record(index, result)

    def certified(self, index: int, case: Case) -> tuple[Outcome, str]:
        """Return an instance's outcome, *checked* with a certificate, *unknown* if a *sat* is refused; and its file."""
        # They are not needed afterwards, and proofs can be large.
        mine = [outcome for _, outcome in sorted(self.outcomes.pop(index).items())]
        joined = join(mine)
        if self.certificates is None or joined.verdict is Verdict.UNKNOWN:
            return joined, ""
        asked = case.onnx, case.vnnlib, case.queries
        kept = self.certificates.keep(*asked, mine, case.timeout, self.recorder, self.members[index])
        if kept.accepted:
            return replace(joined, trust=Trust.CHECKED), kept.file
        if not kept.refused:
            return _noted(joined, f"no certificate: {kept.detail}"), kept.file
        detail = f'{REFUSED} of "{joined.verdict}" by {joined.method}: {kept.detail}'
        return joined.withdrawn(Reason.UNCONFIRMED, detail), kept.file

    def record(self, index: int, result: Result, recorded: bool = False) -> None:
        self.known[index] = result
        self.observer.result(index, result, recorded)


def _noted(outcome: Outcome, note: str) -> Outcome:
    return replace(outcome, detail=f"{outcome.detail}; {note}" if outcome.detail else note)
