"""Queries that are put to verifiers: what each may cost, what is known of it, and the verdict that claims make.

Claims of all methods come here once. A claimed counterexample becomes *sat* if exact evaluation and a replay in
onnxruntime confirm it, and what was claimed before is joined with what is claimed later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction

from verifiable_relu.bounds.forward import within
from verifiable_relu.network.graph import Network
from verifiable_relu.rounding import ARITHMETICS, MOST_WHOLE
from verifiable_relu.settings import neutral
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.specfile import decimal_near, decimal_places
from verifiable_relu.supervisor.workers import processor_seconds
from verifiable_relu.trust.replay import Confirmation, confirm, representable
from verifiable_relu.verifiers.base import PATIENCE, Limits, Outcome, Reason, Trust, Verdict, Verifier
from verifiable_relu.verifiers.root import NONE, Roots


@dataclass(eq=False)
class Purse:
    """Seconds that queries may cost together.

    Attributes:
        seconds: that are left of its own, negative where more was spent.
        processor: seconds of processor time that were spent.
        whole: the purse that it is a share of, which pays everything, too.
    """

    seconds: float
    whole: Purse | None = None
    processor: float = 0.0

    @property
    def left(self) -> float:
        """The seconds that are left, never negative."""
        own = max(0.0, self.seconds)
        return own if self.whole is None else min(own, self.whole.left)

    @property
    def spare(self) -> float:
        """The seconds that the outermost purse has beyond those that are left here."""
        outermost = self
        while outermost.whole is not None:
            outermost = outermost.whole
        return 0.0 if outermost.left == math.inf else outermost.left - self.left

    def charge(self, seconds: float, processor: float = 0.0) -> None:
        """Take seconds, and note those of processor time."""
        self.seconds -= seconds
        self.processor += processor
        if self.whole is not None:
            self.whole.charge(seconds, processor)


class Docket:
    """Queries that are put to a verifier, by number.

    Args:
        queries: by number, or in the order of their numbers.
        limits: what work on them may use. Its ``seconds`` are what each query may cost, where there are no ``purses``.
        purses: by the number of a query, what it may cost. Queries can share one, as the boxes of one VNN-LIB file do,
            which have one time limit together.
        progress: told of stages: the name, and how many of how many queries have been through it.
        roots: what is known of the queries before they are split, and room for more.

    Attributes:
        queries, limits, roots: the arguments.
        outcomes: what has become of queries so far.
        closed: the queries that need no answer any more.
    """

    def __init__(
        self,
        queries: Mapping[int, Query] | Sequence[Query],
        limits: Limits = Limits(),  # noqa: B008 -- frozen
        purses: Mapping[int, Purse] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        roots: Roots = NONE,
    ) -> None:
        self.queries = dict(queries if isinstance(queries, Mapping) else enumerate(queries))
        self.limits = limits
        self.roots = roots
        self.outcomes: dict[int, Outcome] = {}
        self.closed: set[int] = set()
        self._purses = purses or {number: Purse(limits.seconds) for number in self.queries}
        self._progress = progress

    def part(
        self,
        numbers: Sequence[int],
        share: float = 1.0,
        roots: Roots | None = None,
        queries: Mapping[int, Query] | None = None,
    ) -> Docket:
        """The docket of some of the queries, whose time and outcomes are those of this one.

        Args:
            numbers: of the queries.
            share: the part of the time that is left to each of them which they may spend there.
            roots: others than these.
            queries: to be asked in place of those with these numbers; their outcomes are none of this docket's, and
                nothing is known of them.
        """
        purses = {number: self._purses[number] for number in numbers}
        if share != 1:
            shares = {purse: Purse(share * purse.left, purse) for purse in purses.values()}
            purses = {number: shares[purse] for number, purse in purses.items()}
        chosen = {number: (queries or self.queries)[number] for number in numbers}
        # Roots go by number: what is known of a query says nothing of another one in its place.
        kept = NONE if queries is not None else self.roots
        part = Docket(chosen, self.limits, purses, self._progress, kept if roots is None else roots)
        if queries is None:
            part.outcomes, part.closed = self.outcomes, self.closed
        return part

    def batches(self, size: Callable[[Network, Limits], int]) -> Iterator[Docket]:
        """Parts of one network each, in the order in which the networks first appear.

        Args:
            size: returns the most queries of a network in one part.
        """
        groups: dict[str, list[int]] = {}
        for number, query in self.queries.items():
            groups.setdefault(query.network.digest, []).append(number)
        for members in groups.values():
            most = size(self.queries[members[0]].network, self.limits)
            for start in range(0, len(members), most):
                yield self.part(members[start : start + most])

    @property
    def network(self) -> Network:
        """The network of the queries of a batch."""
        return next(iter(self.queries.values())).network

    @property
    def open(self) -> list[int]:
        """The queries that may be answered still: never asked about, or undecided with time left."""
        return [
            number
            for number in self.queries
            if number not in self.closed and (number not in self.outcomes or self._purses[number].left > 0)
        ]

    def left(self, numbers: Sequence[int]) -> float:
        """The seconds that are left for queries together, never negative."""
        return sum(purse.left for purse in dict.fromkeys(self._purses[number] for number in numbers))

    def processor(self, number: int) -> float:
        """The seconds of processor time that a query, and those it shares a purse with, have cost."""
        return self._purses[number].processor

    def charge(self, numbers: Sequence[int], seconds: float, processor: float = 0.0) -> None:
        """Charge seconds, and seconds of processor time, to queries, in equal shares."""
        for number in numbers:
            self._purses[number].charge(seconds / len(numbers), processor / len(numbers))

    @contextmanager
    def work(self, numbers: Sequence[int]) -> Iterator[Limits]:
        """What a piece of work for queries may use, from now on; its time is charged to them in equal shares."""
        spare = sum(purse.spare for purse in dict.fromkeys(self._purses[number] for number in numbers))
        begun = replace(self.limits.begun(self.left(numbers)), patience=PATIENCE + spare)
        used = processor_seconds()
        try:
            yield begun
        finally:
            self.charge(numbers, begun.elapsed(), processor_seconds() - used)

    def stage(self, name: str, done: int, total: int) -> None:
        """``done`` of ``total`` queries have been through the stage ``name``."""
        if self._progress is not None:
            self._progress(name, done, total)

    def ask(self, verifier: Verifier) -> Iterator[int]:
        """Put the queries to a verifier; yields the number of each as soon as its outcome is known.

        Raises:
            RuntimeError: if the verifier leaves a query out.
        """
        missing = dict.fromkeys(self.queries)
        self.stage(verifier.name, 0, len(self.queries))
        for number, claim in verifier.claims(self):
            missing.pop(number, None)
            # An outcome that is held here was judged where a verifier asked others.
            if claim is not self.outcomes.get(number):
                if number in self.closed:
                    continue
                self.judge(number, claim)
            yield number
        if missing.keys() - self.closed:
            raise RuntimeError(f"{verifier.name} has not answered every query")

    def judge(self, number: int, claim: Outcome) -> None:
        """Make the outcome of a query of a claim and of what was claimed before; what is decided needs no other."""
        outcome = claim.after(self.outcomes.get(number))
        if outcome.verdict is Verdict.SAT:
            outcome = self._confirmed(self.queries[number], outcome)
        elif partial := self.queries[number].property.partial:
            if outcome.verdict is Verdict.UNSAT:
                outcome = replace(outcome, reason=Reason.INCOMPLETE)
                partial += "; in a part of the inputs there is no counterexample"
                self.closed.add(number)
            outcome = _withdrawn(outcome, outcome.reason, partial)
        elif outcome.verdict is Verdict.UNSAT and outcome.margin is not None and not outcome.margin >= 0:
            detail = f"{outcome.method} claimed unsat with the margin {outcome.margin}"
            outcome = _withdrawn(outcome, Reason.ERROR, detail)
            self.closed.add(number)
        elif outcome.verdict is Verdict.UNSAT and (detail := _unmodelled(self.queries[number], outcome)):
            outcome = _withdrawn(outcome, Reason.UNSUPPORTED, detail)
        elif outcome.margin is not None and math.isnan(outcome.margin):
            outcome = replace(outcome, margin=None)
        self.outcomes[number] = outcome
        if outcome.margin is not None:
            self.limits.tell({"margin": outcome.margin})
        if outcome.verdict is not Verdict.UNKNOWN:
            self.close(number)

    def close(self, number: int) -> None:
        """A query needs no answer any more."""
        self.closed.add(number)
        self.roots.drop(number)

    def _confirmed(self, query: Query, claim: Outcome) -> Outcome:
        """What a check makes of a claimed counterexample."""
        start = self.limits.clock()
        if query.network.arithmetic != "real":
            claim = replace(claim, witness=representable(query.property, claim.witness or ()))
        judged = confirm(query, claim.witness or ())
        spent = claim.seconds.get("confirm", 0.0) + self.limits.clock() - start
        claim = replace(claim, seconds={**claim.seconds, "confirm": spent})
        if not judged.confirmed or judged.replayed is None:
            return _withdrawn(claim, Reason.UNCONFIRMED, judged.detail)
        witness, judged = in_decimals(query, claim.witness or (), judged)
        assert judged.replayed is not None
        trust, outputs = Trust.EXACT if judged.exact else Trust.ROUNDED, tuple(judged.replayed.tolist())
        if judged.detail:
            claim = replace(claim, detail=judged.detail)
        return replace(claim, trust=trust, margin=judged.margin, witness=witness, outputs=outputs)


def _unmodelled(query: Query, claim: Outcome) -> str:
    """Why a claimed proof says nothing of the arithmetic in which the network runs; empty where it does."""
    network = query.network
    if not within(network, query.property, MOST_WHOLE, network.whole):
        return "whole numbers beyond 32 bits are possible, which a runtime does not hold"
    if network.arithmetic == "real":
        return ""
    if claim.trust is Trust.FLOAT:
        return f"{claim.method} does not account for rounding, and proves nothing of {network.arithmetic}"
    most = ARITHMETICS[network.arithmetic].largest
    if not within(network, query.property, most, range(len(network.nodes))):
        return f"values above {most:.3g} are possible, at which {network.arithmetic} may overflow"
    return ""


def _withdrawn(claim: Outcome, reason: Reason, detail: str) -> Outcome:
    return replace(claim, verdict=Verdict.UNKNOWN, reason=reason, trust=None, margin=None, detail=detail, proof=None)


def in_decimals(
    query: Query, point: Sequence[Fraction], judged: Confirmation
) -> tuple[tuple[Fraction, ...], Confirmation]:
    """A confirmed counterexample whose numbers finite decimals equal, near to a given one.

    Inputs that no decimal equals, such as 1/3, are moved to a decimal beside them, if the box has one and the new point
    is confirmed, too. Otherwise the given point is returned.

    Args:
        query: the query.
        point: a counterexample, in row-major order of the network's input.
        judged: its confirmation.

    Returns:
        The point and its confirmation.
    """
    given = tuple(point)
    others = [i for i, v in enumerate(given) if decimal_places(v) is None]
    if not others:
        return given, judged
    near = {i: decimal_near(given[i], *query.property.box.bounds(i)) for i in others}
    moved = tuple(near.get(i, v) for i, v in enumerate(given))
    again = confirm(query, moved)
    return (moved, again) if again.confirmed and again.replayed is not None else (given, judged)


@neutral()
def answers(verifier: Verifier, queries: Sequence[Query], limits: Limits = Limits()) -> list[Outcome]:  # noqa: B008
    """What a verifier finds of queries, which may be of different networks; counterexamples are confirmed.

    Args:
        verifier: the verifier.
        queries: the queries.
        limits: what the work may use; its ``seconds`` are what each query may cost.

    Returns:
        The outcomes, in the order of the queries.
    """
    docket = Docket(queries, limits)
    for _ in docket.ask(verifier):
        pass
    return [docket.outcomes[number] for number in docket.queries]
