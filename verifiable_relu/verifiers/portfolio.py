"""``auto``: cheap bounds for all queries, the attack on what is left, then complete methods within the budget.

A counterexample that does not stand up to exact evaluation and replay does not end a query here: the next method
takes over, and only if none decides is the query unknown (unconfirmed).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from verifiable_relu.verifiers.root import NONE, Roots

_FEW_INPUTS = 20
"""Up to so many inputs that vary it can pay to split the input box."""

_FEW_NEURONS = 40
"""Up to so many unstable neurons their phases are fewer than the boxes that inputs are split into, and go first."""

_EXACT_NEURONS = 10
"""Up to so many unstable neurons exact arithmetic (SMT) has a chance."""

_INTERMEDIATE = Ascent(steps=6)
"""The search for bounds of unstable neurons: most of what more steps would gain is gained by now."""

_HANDED_ON = 1 / 4
"""The part of the limit of memory that is for what stages hand on."""


@dataclass(frozen=True)
class Auto:
    """A portfolio: the verifiers of ``_STAGES``, one after the other, each for the queries that are left by then.

    A later stage starts from what earlier ones have proven of a query's whole box (``Roots``).

    Attributes:
        device: where bounds and attack run.
        memory: a limit in bytes on what each stage holds at once, and on what is handed on; attack, MILP and SMT have
            none.
        prepare: what every stage's verifier becomes before it is asked.
    """

    device: str = "cpu"
    memory: int = MEMORY
    prepare: Callable[[Verifier], Verifier] = field(default=lambda verifier: verifier, repr=False)

    name: ClassVar[str] = "auto"

    def verify(
        self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT, roots: Roots = NONE
    ) -> list[Outcome]:
        run = _Run(queries, budget, progress, Roots(int(self.memory * _HANDED_ON)) if roots is NONE else roots)
        traits: dict[int, _Traits] = {}
        for stage in _STAGES:
            if stage.takes is not None and not traits:
                traits = {i: _Traits.of(queries[i], run.unstable(i), self.memory) for i in run.open()}
            members = [i for i in run.open() if stage.takes is None or stage.takes(traits[i])]
            members = [i for i in members if stage.most is None or run.unstable(i) <= stage.most]
            if members:
                run.stage(self.prepare(stage.make(self)), members, stage.share)
        return run.close()


@dataclass(frozen=True)
class _Traits:
    """What decides which stages take a query, as it is known before the first stage that does not take every one.

    Attributes:
        linear: whether every activation of the network is piecewise linear.
        narrow: whether few inputs vary.
        foldable: whether branch and bound over phases has memory for the query.
        few: whether it has, and few neurons are unstable.
    """

    linear: bool
    narrow: bool
    foldable: bool
    few: bool

    @staticmethod
    def of(query: Query, unstable: float, memory: int) -> _Traits:
        """The traits of a query with so many unstable neurons."""
        inputs, linear = _free_inputs(query), query.network.piecewise_linear
        foldable = linear and Bab(memory=memory).fits(inputs, unstable)
        return _Traits(linear, inputs <= _FEW_INPUTS, foldable, foldable and unstable <= _FEW_NEURONS)


@dataclass(frozen=True)
class _Stage:
    """One verifier of the portfolio.

    Attributes:
        make: makes the verifier.
        takes: which queries the stage takes by their traits; None for every query.
        share: the part of the time left that a query may spend here.
        most: takes only queries with at most so many unstable neurons under the latest bounds; None for no limit.
    """

    make: Callable[[Auto], Verifier]
    takes: Callable[[_Traits], bool] | None = None
    share: float = 1.0
    most: float | None = None


def _alpha_crown(auto: Auto) -> Verifier:
    return AlphaCrown(auto.device, auto.memory, intermediate=_INTERMEDIATE)


def _bab(auto: Auto) -> Verifier:
    return Bab(memory=auto.memory)


def _split(auto: Auto) -> Verifier:
    return InputSplit(device=auto.device, memory=auto.memory)


def _milp(_: Auto) -> Verifier:
    # Its solver is imported only where a query gets this far.
    from verifiable_relu.verifiers.milp import Milp

    return Milp()


def _smt(_: Auto) -> Verifier:
    from verifiable_relu.verifiers.smt import Smt

    return Smt()


_STAGES = (
    _Stage(lambda auto: Crown(auto.device, auto.memory), share=0.25),
    _Stage(lambda auto: Attack(device=auto.device)),
    # α-CROWN is where branch and bound begins; where that comes late or not at all, it goes first.
    _Stage(_alpha_crown, lambda t: not t.foldable or (t.narrow and not t.few), share=0.5),
    # Where either may do, neither gets more than half of the time at first.
    _Stage(_bab, lambda t: t.narrow and t.few, share=0.5),
    _Stage(_split, lambda t: t.narrow and t.few, share=0.5),
    # Where many neurons are unstable, phases are far more than boxes.
    _Stage(_split, lambda t: t.narrow and not t.few, share=0.8),
    _Stage(_bab, lambda t: t.foldable, share=0.9),
    _Stage(_milp, lambda t: t.linear),
    _Stage(_split, lambda t: t.narrow),
    # What is left with time to spare lies within the others' tolerances of the boundary.
    _Stage(_smt, lambda t: t.linear, most=_EXACT_NEURONS),
)
"""The portfolio, cheapest first."""


def _free_inputs(query: Query) -> int:
    """Inputs that are not fixed to one value (which outward rounding may have made two neighbouring floats)."""
    box = query.property.box
    return int((np.nextafter(box.lower, np.inf) < box.upper).sum())


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
            if outcome.verdict is Verdict.UNKNOWN:
                keep = before if before.reason is Reason.UNCONFIRMED else outcome
                outcome = replace(keep, margin=max(margins, default=None))
            outcome = replace(outcome, seconds=seconds, unstable=unstable)
        if outcome.verdict is Verdict.SAT:
            assert outcome.witness is not None
            start = time.perf_counter()
            checked = confirm(self.queries[index], outcome.witness)
            outcome = replace(outcome, seconds=_sum(outcome.seconds, {"confirm": time.perf_counter() - start}))
            if not checked.confirmed:
                known = {"seconds": outcome.seconds, "unstable": outcome.unstable, "witness": outcome.witness}
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
