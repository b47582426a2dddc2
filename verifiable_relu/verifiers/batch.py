"""Queries that are put to verifiers: what each may cost, what is known of it, and the verdict that claims make.

Claims of all methods come here once. A claimed counterexample becomes *sat* if exact evaluation and a replay in
onnxruntime confirm it, and what was claimed before is joined with what is claimed later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Protocol

from verifiable_relu.bounds.forward import within
from verifiable_relu.network.graph import Network
from verifiable_relu.rounding import ARITHMETICS, MOST_WHOLE
from verifiable_relu.settings import neutral
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.specfile import decimal_near, decimal_places
from verifiable_relu.supervisor.workers import processor_seconds
from verifiable_relu.trust.replay import Confirmation, confirm, representable
from verifiable_relu.verifiers.base import PATIENCE, Outcome, Reason, TimeBudget, Trust, Verdict, Witness, fault
from verifiable_relu.verifiers.root_bounds import NO_BOUNDS, BoundsCache


@dataclass(eq=False)
class Account:
    """Time charged to queries that share one time limit.

    Attributes:
        limit: the seconds that they may cost together.
        spent: seconds so far.
        processor: seconds of processor time so far.
    """

    limit: float
    spent: float = 0.0
    processor: float = 0.0


class QueryBatch:
    """Queries that are put to a verifier, by number.

    Args:
        queries: by number, or in the order of their numbers.
        budget: what work on them may use; without ``accounts``, its ``seconds`` are what each query may cost.
        accounts: by the number of a query, to which its time is charged. Queries can share one, as the boxes of one
            VNN-LIB file do, which have one time limit together.
        progress: told of stages: the name, and how many of how many queries have been through it.
        bounds_cache: what is known of the queries before they are split, and room for more.

    Attributes:
        queries, budget, bounds_cache: the arguments.
        outcomes: what has become of queries so far.
        closed: the queries that need no answer any more.
    """

    def __init__(
        self,
        queries: Mapping[int, Query] | Sequence[Query],
        budget: TimeBudget = TimeBudget(),  # noqa: B008 -- frozen
        accounts: Mapping[int, Account] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        bounds_cache: BoundsCache = NO_BOUNDS,
    ) -> None:
        self.queries = dict(queries if isinstance(queries, Mapping) else enumerate(queries))
        self.budget = budget
        self.bounds_cache = bounds_cache
        self.outcomes: dict[int, Outcome] = {}
        self.closed: set[int] = set()
        self._accounts = accounts or {number: Account(budget.seconds) for number in self.queries}
        # The parts of accounts that may be spent here: a part of a batch has less than the whole.
        self._most = {account: account.limit for account in self._accounts.values()}
        self._progress = progress

    def part(
        self,
        numbers: Sequence[int],
        share: float = 1.0,
        bounds_cache: BoundsCache | None = None,
        queries: Mapping[int, Query] | None = None,
    ) -> QueryBatch:
        """Return the batch of some of the queries, which shares their time and outcomes with this one.

        Args:
            numbers: of the queries.
            share: the part of the time that is left to each of them which they may spend there.
            bounds_cache: another cache than this one.
            queries: to be asked in place of those with these numbers; their outcomes are none of this batch's, and
                nothing is known of them.
        """
        chosen = {number: (queries or self.queries)[number] for number in numbers}
        # Bounds go by number: what is known of a query says nothing of another one in its place.
        kept = NO_BOUNDS if queries is not None else self.bounds_cache
        accounts = {number: self._accounts[number] for number in numbers}
        part = QueryBatch(chosen, self.budget, accounts, self._progress, kept if bounds_cache is None else bounds_cache)
        for account in part._most:
            most = self._most[account]
            part._most[account] = most if share == 1 else account.spent + share * max(0.0, most - account.spent)
        if queries is None:
            part.outcomes, part.closed = self.outcomes, self.closed
        return part

    def batches(self, size: Callable[[Network, TimeBudget], int]) -> Iterator[QueryBatch]:
        """Yield parts of one network each, in the order in which the networks first appear.

        Args:
            size: returns the most queries of a network in one part.
        """
        groups: dict[str, list[int]] = {}
        for number, query in self.queries.items():
            groups.setdefault(query.network.digest, []).append(number)
        for members in groups.values():
            most = size(self.queries[members[0]].network, self.budget)
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
            if number not in self.closed and (number not in self.outcomes or self.left([number]) > 0)
        ]

    def left(self, numbers: Sequence[int]) -> float:
        """Return the seconds that are left for queries together, never negative."""
        return sum(max(0.0, self._most[account] - account.spent) for account in self._of(numbers))

    def processor(self, number: int) -> float:
        """Return the processor seconds that a query, and those it shares an account with, have cost."""
        return self._accounts[number].processor

    def _of(self, numbers: Sequence[int]) -> list[Account]:
        """Return the accounts of queries, each once."""
        return list(dict.fromkeys(self._accounts[number] for number in numbers))

    def charge(self, numbers: Sequence[int], seconds: float, processor: float = 0.0) -> None:
        """Charge seconds, and seconds of processor time, to queries, in equal shares."""
        for number in numbers:
            self._accounts[number].spent += seconds / len(numbers)
            self._accounts[number].processor += processor / len(numbers)

    @contextmanager
    def work(self, numbers: Sequence[int]) -> Iterator[TimeBudget]:
        """A block of work for queries with its budget; its time is charged to them in equal shares."""
        left = self.left(numbers)
        # What the whole has beyond a part is spare, in which a step that has begun may end.
        whole = sum(max(0.0, account.limit - account.spent) for account in self._of(numbers))
        spare = 0.0 if whole == math.inf else whole - left
        begun = replace(self.budget.begun(left), patience=PATIENCE + spare)
        used = processor_seconds()
        try:
            yield begun
        finally:
            self.charge(numbers, begun.elapsed(), processor_seconds() - used)

    def stage(self, name: str, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` queries have been through the stage ``name``."""
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
            self.budget.report_progress({"margin": outcome.margin})
        if outcome.verdict is not Verdict.UNKNOWN:
            self.close(number)

    def close(self, number: int) -> None:
        """Note that a query needs no answer any more."""
        self.closed.add(number)
        self.bounds_cache.drop(number)

    def _confirmed(self, query: Query, claim: Outcome) -> Outcome:
        """Return what a check makes of a claimed counterexample."""
        start = self.budget.clock()
        if query.network.arithmetic != "real":
            claim = replace(claim, witness=representable(query.property, claim.witness or ()))
        judged = confirm(query, claim.witness or ())
        spent = claim.seconds.get("confirm", 0.0) + self.budget.clock() - start
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
    """Say why a claimed proof proves nothing of the arithmetic in which the network runs; empty where it does."""
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


def in_decimals(query: Query, point: Witness, judged: Confirmation) -> tuple[Witness, Confirmation]:
    """Return a confirmed counterexample, and its confirmation, whose numbers finite decimals equal.

    Inputs that no decimal equals, such as 1/3, are moved to a decimal beside them, if the box has one and the new point
    is confirmed, too. Otherwise the given point is returned.
    """
    others = [i for i, v in enumerate(point) if decimal_places(v) is None]
    if not others:
        return point, judged
    near = {i: decimal_near(point[i], *query.property.box.bounds(i)) for i in others}
    moved = tuple(near.get(i, v) for i, v in enumerate(point))
    again = confirm(query, moved)
    return (moved, again) if again.confirmed and again.replayed is not None else (point, judged)


@neutral()
def answers(verifier: Verifier, queries: Sequence[Query], budget: TimeBudget = TimeBudget()) -> list[Outcome]:  # noqa: B008
    """Return a verifier's outcomes of queries, in their order; counterexamples are confirmed.

    The ``seconds`` of the budget are what each query may cost.
    """
    batch = QueryBatch(queries, budget)
    for _ in batch.ask(verifier):
        pass
    return [batch.outcomes[number] for number in batch.queries]


class Verifier(Protocol):
    """A method of verification.

    Implementations are frozen dataclasses of options, which are the key of their records (``described``).
    """

    @property
    def name(self) -> str:
        """The name on the command line and in tables."""

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        """Answer the queries of a batch, which may be of different networks.

        The work exceeds what the queries may cost by at most a second, or by one step where a large network makes a
        step longer (``TimeBudget.stop``). A fault in one query is that query's outcome (``Reason.ERROR``), never an
        exception. What is known of a query already (``bounds_cache``) is where a verifier that bounds whole boxes
        starts, and it adds its own.

        Yields:
            The number of a query and what is claimed of it, once for each, as soon as it is known.
        """


class Batched:
    """The body of a method that answers queries of one network together.

    A method has ``name``, ``answer``, and ``size`` where a batch has more than one query.
    """

    name: ClassVar[str]

    def size(self, network: Network, budget: TimeBudget) -> int:
        """The most queries of a network that are answered at once."""
        return 1

    def answer(self, part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
        """The outcomes of queries of one network, in their order; their seconds need not be told."""
        raise NotImplementedError

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        """As ``Verifier.claims``."""
        done = 0
        for part in batch.batches(self.size):
            yield from zip(part.queries, attempted(part, self.name, self.answer), strict=True)
            done += len(part.queries)
            batch.stage(self.name, done, len(batch.queries))


def attempted(
    part: QueryBatch, name: str, answer: Callable[[QueryBatch, TimeBudget], Sequence[Outcome]]
) -> Sequence[Outcome]:
    """Return what a piece of work finds of the queries of a batch, which are charged equal shares of its time.

    Args:
        part: the queries.
        name: the method's, and that of the stage to which the time is charged.
        answer: the work: given ``part`` and what it may use.

    Returns:
        The outcomes in the order of the queries. An exception is the outcome of all of them, and where the time is
        over, what is *incomplete* is timed out.
    """
    numbers = list(part.queries)
    if part.left(numbers) <= 0:
        return [Outcome.unknown(Reason.TIMEOUT, name, "no time was left")] * len(numbers)
    with part.work(numbers) as work:
        try:
            with neutral():
                found = answer(part, work)
        except Exception as error:
            found = [fault(error, name)] * len(numbers)
        spent, late = {name: work.elapsed() / len(numbers)}, work.over()
    outcomes = []
    for outcome in found:
        if late and outcome.reason is Reason.INCOMPLETE:
            outcome = replace(outcome, reason=Reason.TIMEOUT, detail="the budget ran out")
        outcomes.append(replace(outcome, seconds={**spent, **outcome.seconds}))
    return outcomes


def described(verifier: Verifier, budget: TimeBudget) -> str:
    """Return the key by which records know a method: its name, and as JSON the options that are not the defaults.

    The limits of ``budget`` that are ``named`` are options, too. Who gives an option another name or meaning raises
    ``version``, or keeps the old key here.
    """
    limits = {name: getattr(budget, name) for name in budget.named}
    return f"{verifier.name}({json.dumps({'version': 1, **_options(verifier), **limits}, default=repr)})"


def _options(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that its ``repr`` shows and that differ from their defaults."""
    found = {}
    for each in fields(value):
        given = getattr(value, each.name)
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if each.repr and given != default:
            found[each.name] = _options(given) if is_dataclass(given) else given
    return found
