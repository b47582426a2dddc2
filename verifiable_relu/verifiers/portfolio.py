"""``auto``: cheap bounds for all queries, the attack on what is left, then complete methods within the budget.

A counterexample that does not stand up to exact evaluation and replay does not end a query here: the next method
takes over, and only if none decides is the query unknown (unconfirmed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from verifiable_relu.bounds import MEMORY, Ascent
from verifiable_relu.spec.property import Query
from verifiable_relu.trust.replay import confirm
from verifiable_relu.verifiers.attack import Attack
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.base import SILENT, Budget, Outcome, Progress, Reason, Verdict, Verifier
from verifiable_relu.verifiers.incomplete import AlphaCrown, Crown
from verifiable_relu.verifiers.input_split import InputSplit

_FEW_INPUTS = 20
"""Up to here it can pay to split the input box."""

_INTERMEDIATE = Ascent(steps=6)
"""The search for bounds of unstable neurons: most of what more steps would gain is gained by now."""

_FEW_NEURONS = 40
"""Up to so many unstable neurons their phases are fewer than the boxes that inputs are split into, and go first."""

_SHARE = 0.75
"""How much of the time branch and bound over phases may take before the MILP has what is left."""

_MOSTLY = 0.8
"""How much of the time splitting few inputs may take where many neurons are unstable: phases are far more then."""

_EXACT_NEURONS = 10
"""Up to so many unstable neurons exact arithmetic (SMT) has a chance."""


@dataclass(frozen=True)
class Auto:
    """CROWN, then PGD, then α-CROWN, then input splitting (few inputs), then what piecewise-linear networks allow.

    That is branch and bound over the phases of unstable neurons, which begins with α-CROWN, then the MILP and SMT.

    Attributes:
        device: where bounds and attack run.
        memory: a limit in bytes on what each stage holds at once; attack, MILP and SMT have none.
    """

    device: str = "cpu"
    memory: int = MEMORY

    name: ClassVar[str] = "auto"
    complete: ClassVar[bool] = True

    def verify(self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT) -> list[Outcome]:
        run = _Run(queries, budget, progress)
        run.stage(lambda: Crown(self.device, self.memory), run.open(), share=0.25)
        run.stage(lambda: Attack(device=self.device), run.open())
        linear = run.open(lambda q: q.network.piecewise_linear)
        narrow = run.open(lambda q: _free_inputs(q) <= _FEW_INPUTS)
        bab = Bab(memory=self.memory)
        foldable = [i for i in linear if bab.fits(_free_inputs(queries[i]), run.unstable(i))]
        few = [i for i in foldable if run.unstable(i) <= _FEW_NEURONS]
        # α-CROWN is where branch and bound begins; where that comes late or not at all, it goes first.
        late = [i for i in run.open() if i not in foldable or (i in narrow and i not in few)]
        run.stage(lambda: AlphaCrown(self.device, self.memory, intermediate=_INTERMEDIATE), late, share=0.5)
        # Where either may do, neither gets more than half of the time at first.
        run.stage(lambda: bab, [i for i in few if i in narrow], share=0.5)
        split = InputSplit(device=self.device, memory=self.memory)
        run.stage(lambda: split, [i for i in narrow if i in few], share=0.5)
        run.stage(lambda: split, [i for i in narrow if i not in few], share=_MOSTLY)
        run.stage(lambda: bab, foldable, share=_SHARE)
        run.stage(_milp, linear)
        run.stage(lambda: split, narrow)
        # What is left with time to spare lies within the others' tolerances of the boundary.
        run.stage(_smt, [i for i in linear if run.unstable(i) <= _EXACT_NEURONS])
        return run.close()


def _milp() -> Verifier:
    # Its solver is imported only where a query gets this far.
    from verifiable_relu.verifiers.milp import Milp

    return Milp()


def _smt() -> Verifier:
    from verifiable_relu.verifiers.smt import Smt

    return Smt()


def _free_inputs(query: Query) -> int:
    """Inputs that are not fixed to one value (which outward rounding may have made two neighbouring floats)."""
    box = query.property.box
    return int((np.nextafter(box.lower, np.inf) < box.upper).sum())


class _Run:
    """What has become of each query, stage after stage."""

    def __init__(self, queries: Sequence[Query], budget: Budget, progress: Progress) -> None:
        self.queries = queries
        self.budget = budget
        self.progress = progress
        self.outcomes: dict[int, Outcome] = {}
        self.final: set[int] = set()

    def open(self, accept: Callable[[Query], bool] = lambda _: True) -> list[int]:
        """Queries still undecided, with time left, that ``accept`` takes."""
        return [
            i
            for i, query in enumerate(self.queries)
            if i not in self.final and (i not in self.outcomes or self.budget.remaining(i) > 0) and accept(query)
        ]

    def unstable(self, index: int) -> float:
        """The number of unstable neurons, as far as it is known."""
        known = self.outcomes[index].unstable
        return math.inf if known is None else known

    def stage(self, make: Callable[[], Verifier], members: list[int], share: float = 1.0) -> None:
        """Put those of ``members`` that are still open to a verifier, which is made only if there are any."""
        left = set(self.open())
        members = [i for i in members if i in left]
        if members:
            budget = self.budget.subset(members, share)
            make().verify([self.queries[i] for i in members], budget, _Relay(self, members, self.progress))

    def add(self, index: int, outcome: Outcome) -> None:
        """Take a member's outcome: decided ones are final, of the others the most telling is kept."""
        before = self.outcomes.get(index)
        if before is not None:
            margins = [m for m in (before.margin, outcome.margin) if m is not None]
            if outcome.verdict is Verdict.UNKNOWN:
                keep = before if before.reason is Reason.UNCONFIRMED else outcome
                outcome = replace(keep, margin=max(margins, default=None))
            outcome = replace(
                outcome,
                seconds={**before.seconds, **outcome.seconds},
                unstable=before.unstable if outcome.unstable is None else outcome.unstable,
            )
        if outcome.verdict is Verdict.SAT:
            assert outcome.witness is not None
            checked = confirm(self.queries[index], outcome.witness)
            if not checked.confirmed:
                known = {"seconds": outcome.seconds, "unstable": outcome.unstable, "witness": outcome.witness}
                outcome = Outcome.unknown(Reason.UNCONFIRMED, outcome.method, checked.detail, **known)
        self.outcomes[index] = outcome
        if outcome.verdict is not Verdict.UNKNOWN:
            self.final.add(index)
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
