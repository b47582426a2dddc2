"""``auto``: cheap bounds for all queries, the attack on what is left, then complete methods within the budget.

A counterexample that does not stand up to exact evaluation and replay does not end a query here: the next method
takes over, and only if none decides is the query unknown (unconfirmed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from verifiable_relu.bounds import MEMORY
from verifiable_relu.settings import neutral
from verifiable_relu.spec.property import Query
from verifiable_relu.trust.replay import confirm
from verifiable_relu.verifiers.base import SILENT, Budget, Outcome, Progress, Reason, Verdict, Verifier
from verifiable_relu.verifiers.incomplete import Crown
from verifiable_relu.verifiers.root import NONE, Roots
from verifiable_relu.verifiers.rules import CROWN_SHARE, STAGES, Resources, Traits, explanation

_HANDED_ON = 1 / 4
"""The part of the limit of memory that is for what stages hand on."""


def _as_it_is(verifier: Verifier) -> Verifier:
    # A function with a name, because campaigns on several workers pickle the verifier.
    return verifier


@dataclass(frozen=True)
class Auto:
    """A portfolio: the verifiers of ``rules.STAGES``, one after the other, each for the queries that are left by then.

    A later stage starts from what earlier ones have proven of a query's whole box (``Roots``).

    Attributes:
        device: where bounds and attack run.
        memory: a limit in bytes on what each stage holds at once, and on what is handed on; attack, MILP and SMT have
            none.
        prepare: what every stage's verifier becomes before it is asked.
        processes: how many processes share the work on a query, in the stages that can (``Bab``, ``InputSplit``).
    """

    device: str = "cpu"
    memory: int = MEMORY
    prepare: Callable[[Verifier], Verifier] = field(default=_as_it_is, repr=False)
    processes: int = field(default=1, repr=False)

    name: ClassVar[str] = "auto"

    @neutral()
    def verify(
        self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT, roots: Roots = NONE
    ) -> list[Outcome]:
        run = _Run(queries, budget, progress, Roots(int(self.memory * _HANDED_ON)) if roots is NONE else roots)
        run.stage(self.prepare(Crown(self.device, self.memory)), run.open(), CROWN_SHARE)
        traits = {i: Traits.of(queries[i], run.unstable(i), self.memory) for i in run.open()}
        given = Resources(self.device, self.memory, self.processes)
        for stage in STAGES:
            members = [i for i in run.open() if stage.takes(traits[i]) and run.unstable(i) <= stage.most]
            shares = {i: stage.share(traits[i]) for i in members}
            for share in sorted(set(shares.values())):
                run.stage(self.prepare(stage.make(given)), [i for i in members if shares[i] == share], share)
        return run.close()

    def explain(self, query: Query, seconds: float) -> str:
        """What ``auto`` does with a query, in plain words; bounding its neurons by CROWN may take so many seconds."""
        (outcome,) = Crown(self.device, self.memory).verify([query], Budget([seconds]))
        if outcome.verdict is Verdict.UNSAT:
            return "CROWN's bounds decide"
        unstable = math.inf if outcome.unstable is None else outcome.unstable
        return explanation(Traits.of(query, unstable, self.memory))


class _Run:
    """What has become of each query, stage after stage."""

    def __init__(self, queries: Sequence[Query], budget: Budget, progress: Progress, roots: Roots) -> None:
        self.queries = queries
        self.budget = budget
        self.progress = progress
        self.roots = roots
        self.outcomes: dict[int, Outcome] = {}
        self.final: set[int] = set()

    def open(self) -> list[int]:
        """Queries still undecided, with time left."""
        return [
            i
            for i in range(len(self.queries))
            if i not in self.final and (i not in self.outcomes or self.budget.remaining(i) > 0)
        ]

    def unstable(self, index: int) -> float:
        """The number of unstable neurons, as far as it is known."""
        known = self.outcomes[index].unstable
        return math.inf if known is None else known

    def stage(self, verifier: Verifier, members: list[int], share: float) -> None:
        """Put ``members`` to a verifier, each with a share of the time that it has left."""
        relay = _Relay(self, members, self.progress)
        verifier.verify([self.queries[i] for i in members], self.budget.subset(members, share), relay, self.roots)

    def add(self, index: int, outcome: Outcome) -> None:
        """Take a member's outcome: decided ones are final, of the others the most telling is kept."""
        before = self.outcomes.get(index)
        if before is not None:
            margins = [m for m in (before.margin, outcome.margin) if m is not None]
            seconds = _sum(before.seconds, outcome.seconds)
            unstable = before.unstable if outcome.unstable is None else outcome.unstable
            counts = [n for n in (before.subproblems, outcome.subproblems) if n is not None]
            if outcome.verdict is Verdict.UNKNOWN:
                keep = before if before.reason is Reason.UNCONFIRMED else outcome
                outcome = replace(keep, margin=max(margins, default=None))
            outcome = replace(outcome, seconds=seconds, unstable=unstable, subproblems=sum(counts) if counts else None)
        if outcome.verdict is Verdict.SAT:
            assert outcome.witness is not None
            start = self.budget.clock()
            checked = confirm(self.queries[index], outcome.witness)
            outcome = replace(outcome, seconds=_sum(outcome.seconds, {"confirm": self.budget.clock() - start}))
            if not checked.confirmed:
                kept = ("seconds", "unstable", "subproblems", "witness")
                known = {name: getattr(outcome, name) for name in kept}
                outcome = Outcome.unknown(Reason.UNCONFIRMED, outcome.method, checked.detail, **known)
        self.outcomes[index] = outcome
        if outcome.verdict is not Verdict.UNKNOWN:
            self.final.add(index)
            self.roots.drop(self.queries[index])
            self.progress.finish(index, outcome)

    def close(self) -> list[Outcome]:
        """Report what stayed unknown; returns all outcomes."""
        for index in range(len(self.queries)):
            if index not in self.final:
                outcome = self.outcomes[index]
                if outcome.reason is Reason.INCOMPLETE and self.budget.remaining(index) <= 0:
                    outcome = replace(outcome, reason=Reason.TIMEOUT, detail="the budget ran out")
                self.outcomes[index] = outcome
                self.progress.finish(index, outcome)
        return [self.outcomes[i] for i in range(len(self.queries))]


def _sum(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """The seconds of two outcomes together, by stage: a verifier may have had several turns."""
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}


class _Relay:
    """Progress of one stage, translated to the portfolio's queries."""

    def __init__(self, run: _Run, members: list[int], progress: Progress) -> None:
        self.run = run
        self.members = members
        self.progress = progress

    def stage(self, name: str, done: int, total: int) -> None:
        self.progress.stage(name, done, total)

    def finish(self, query: int, outcome: Outcome) -> None:
        self.run.add(self.members[query], outcome)
