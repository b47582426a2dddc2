"""A batch of queries for a method: time limits, known bounds, and the verdicts that claims become.

All claims of methods are judged here. A claimed counterexample becomes *sat* if exact evaluation and a replay in
onnxruntime confirm it; claims of several methods about one query are joined.

A method that bounds the whole box of a query starts from the bounds that are known (``RootBounds``), tightens them, and
hands on the result (``BoundsCache``). So the steps of ``auto`` compute CROWN's bounds of a query once, and a later one
has the tighter bounds of every earlier one. All of it is proven, with rounding accounted for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.neuron_bounds import BASE
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Affine, Network
from verifiable_relu.rounding import ARITHMETICS, MOST_WHOLE, sum_error
from verifiable_relu.search.budget import OVERTIME_S, TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict, fault
from verifiable_relu.search.property_rows import input_box
from verifiable_relu.settings import default_settings
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.spec.specfile import decimal_near, decimal_places
from verifiable_relu.supervisor.workers import processor_seconds
from verifiable_relu.trust.confirmation import confirm, representable

ProofObserver = Callable[[Sequence[int], object], None]
"""Learns what is proven of the queries with some numbers, at the moment it is proven: an event of ``search.bounding``,
``search.split.bounding`` or ``search.bab.loop``."""

Claims = Iterator[tuple[int, Outcome]]
"""Numbers of queries, and what is claimed of them."""


@dataclass(frozen=True, eq=False)
class RootBounds:
    """Bounds proven for one query over its whole box; tensors are in float64 on the CPU."""

    intervals: Mapping[int, Interval]  # Of what feeds nonlinear ops, by op, (1, size); infinite where nothing is known
    # (polytopes,) lower bounds of the largest row of each polytope of the unsafe set, in the units of the property, as
    # ``PropertyRows`` counts polytopes; −inf where nothing is proven
    lower: Tensor
    reached: float = -1  # CROWN has bounded every unstable neuron before the ops up to this one; infinite for all
    searched: int = 0  # Steps of the search for slopes for the bounds of every neuron that CROWN left unstable
    has_rows: bool = False  # ``lower`` is CROWN's over these intervals

    @property
    def bytes(self) -> int:
        return self.lower.nbytes + sum(x.lower.nbytes + x.upper.nbytes for x in self.intervals.values())

    def joined(self, other: RootBounds) -> RootBounds:
        """Return the intersection of these bounds with others of the same query."""
        intervals = {index: x.intersect(other.intervals[index]) for index, x in self.intervals.items()}
        # Of sound bounds over the same box, which has points: one of them is of another query.
        if any(bool((x.lower > x.upper).any()) for x in intervals.values()):
            raise RuntimeError("two bounds of one query exclude each other")
        reached, searched = max(self.reached, other.reached), max(self.searched, other.searched)
        lower = torch.maximum(self.lower, other.lower)
        return RootBounds(intervals, lower, reached, searched, self.has_rows or other.has_rows)


class BoundsCache:
    """Bounds of the queries of a batch, by their numbers.

    All may take ``memory`` bytes together. Bounds for which there is no room are not kept: since every step goes
    through all queries in the same order, dropping the oldest ones would leave each step with those that it needs last.
    """

    def __init__(self, memory: int = 0) -> None:
        self._free = memory
        self._kept: dict[int, RootBounds] = {}

    def get(self, number: int) -> RootBounds | None:
        return self._kept.get(number)

    def drop(self, number: int) -> None:
        """Drop the bounds of a query that is decided."""
        if (root := self._kept.pop(number, None)) is not None:
            self._free += root.bytes

    def known(self, numbers: Sequence[int], device: torch.device) -> RootBounds | None:
        """Return the known bounds of some queries of one network, as one batch on a device, without ``lower``."""
        roots = [self.get(number) for number in numbers]
        given = [root for root in roots if root is not None]
        if not given:
            return None
        intervals = {}
        for index, some in given[0].intervals.items():
            nothing = Interval(torch.full_like(some.lower, -math.inf), torch.full_like(some.upper, math.inf))
            found = [nothing if root is None else root.intervals[index] for root in roots]
            lower, upper = torch.cat([x.lower for x in found]), torch.cat([x.upper for x in found])
            intervals[index] = Interval(lower.to(device), upper.to(device))
        known = [root or RootBounds({}, torch.zeros(0)) for root in roots]
        reached, searched = min(root.reached for root in known), min(root.searched for root in known)
        return RootBounds(intervals, torch.zeros(0), reached, searched, all(root.has_rows for root in known))

    def learn(self, number: int, found: RootBounds) -> Tensor:
        """Add bounds proven over a query's box; returns the best known ``lower``."""
        before = self.get(number)
        found = found if before is None else found.joined(before)
        self.drop(number)
        # Of a query that is decided nobody needs bounds any more.
        if found.bytes <= self._free and not bool((found.lower > 0).all()):
            self._free -= found.bytes
            self._kept[number] = found
        return found.lower

    def prove(self, number: int, lower: Mapping[int, float]) -> None:
        """Take proven lower bounds of some polytopes' largest rows, by the polytopes' numbers."""
        if (root := self.get(number)) is not None:
            best = root.lower.clone()
            for polytope, value in lower.items():
                best[polytope] = max(float(best[polytope]), value)
            self._kept[number] = replace(root, lower=best)


NO_BOUNDS = BoundsCache()  # For methods that are asked by themselves: nothing is known, and nothing is kept


@dataclass(eq=False)
class Account:
    """Queries' common time limit in seconds, and the seconds and processor seconds that they have spent."""

    limit: float
    spent: float = 0.0
    processor: float = 0.0


class QueryBatch:
    """Queries for a method, by number, with their time, outcomes and known bounds.

    Args:
        queries: by number, or in the order of their numbers.
        budget: what work on them may use; without ``accounts``, its ``seconds`` are what each query may cost.
        accounts: by the number of a query, to which its time is charged. Queries can share one, as the boxes of one
            VNN-LIB file do, which have one time limit together.
        progress: told of stages: the name, and how many of how many queries have been through it.
        bounds_cache: what is known of the queries before they are split, and room for more.
        observer: told what is proven, at that moment; None for none.

    Attributes:
        outcomes: of the queries so far.
        closed: the queries that need no further answer.
    """

    def __init__(
        self,
        queries: Mapping[int, Query] | Sequence[Query],
        budget: TimeBudget = TimeBudget(),  # noqa: B008 -- frozen
        accounts: Mapping[int, Account] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        bounds_cache: BoundsCache = NO_BOUNDS,
        observer: ProofObserver | None = None,
    ) -> None:
        self.queries = dict(queries if isinstance(queries, Mapping) else enumerate(queries))
        self.budget, self.bounds_cache, self.observer = budget, bounds_cache, observer
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
            queries: to be asked in place of those with these numbers; their outcomes do not count for this batch, and
                nothing is known of them.
        """
        chosen = {number: (queries or self.queries)[number] for number in numbers}
        # Bounds go by number: what is known of a query says nothing of another one in its place.
        kept = bounds_cache or (self.bounds_cache if queries is None else NO_BOUNDS)
        accounts = {number: self._accounts[number] for number in numbers}
        part = QueryBatch(chosen, self.budget, accounts, self._progress, kept, self.observer)
        for account in part._most:
            most = self._most[account]
            part._most[account] = most if share == 1 else account.spent + share * max(0.0, most - account.spent)
        if queries is None:
            part.outcomes, part.closed = self.outcomes, self.closed
        return part

    def batches(self, size: Callable[[Network, TimeBudget], int]) -> Iterator[QueryBatch]:
        """Yield parts of one network and at most ``size`` queries, in the order in which networks first appear."""
        groups: dict[str, list[int]] = {}
        for number, query in self.queries.items():
            groups.setdefault(query.network.digest, []).append(number)
        for members in groups.values():
            most = size(self.queries[members[0]].network, self.budget)
            for start in range(0, len(members), most):
                yield self.part(members[start : start + most])

    @property
    def network(self) -> Network:
        return next(iter(self.queries.values())).network

    @property
    def properties(self) -> list[Property]:
        return [query.property for query in self.queries.values()]

    @property
    def open(self) -> list[int]:
        """The queries still to be answered: not yet asked, or undecided with time left."""
        rest = (number for number in self.queries if number not in self.closed)
        return [number for number in rest if number not in self.outcomes or self.left([number]) > 0]

    def left(self, numbers: Sequence[int]) -> float:
        """Return the seconds that are left for queries together, never negative."""
        accounts = dict.fromkeys(self._accounts[number] for number in numbers)
        return sum(max(0.0, self._most[account] - account.spent) for account in accounts)

    def processor(self, number: int) -> float:
        """Return the processor seconds that a query, and those it shares an account with, have cost."""
        return self._accounts[number].processor

    def charge(self, numbers: Sequence[int], seconds: float, processor: float = 0.0) -> None:
        """Charge seconds, and seconds of processor time, to queries, in equal shares."""
        for number in numbers:
            self._accounts[number].spent += seconds / len(numbers)
            self._accounts[number].processor += processor / len(numbers)

    @contextmanager
    def work(self) -> Iterator[TimeBudget]:
        """Run a block of work for all queries with its budget; its time is charged to them in equal shares."""
        left, numbers = self.left(list(self.queries)), list(self.queries)
        # What the whole has beyond a part is spare, in which a step that has begun may end.
        whole = sum(max(0.0, account.limit - account.spent) for account in self._most)
        spare = 0.0 if whole == math.inf else whole - left
        begun = replace(self.budget.begun(left), overtime_s=OVERTIME_S + spare)
        used = processor_seconds()
        try:
            yield begun
        finally:
            self.charge(numbers, begun.elapsed(), processor_seconds() - used)

    def stage(self, name: str, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` queries have been through the stage ``name``."""
        if self._progress is not None:
            self._progress(name, done, total)

    def ask(self, method: Verifier) -> Iterator[int]:
        """Put the queries to a method; yields the number of each as soon as its outcome is known.

        Raises:
            RuntimeError: if the method leaves a query out.
        """
        missing = dict.fromkeys(self.queries)
        self.stage(method.name, 0, len(self.queries))
        for number, claim in method.claims(self):
            missing.pop(number, None)
            # An outcome that is held here was judged where a method asked others.
            if claim is not self.outcomes.get(number):
                if number in self.closed:
                    continue
                self.judge(number, claim)
            yield number
        if missing.keys() - self.closed:
            raise RuntimeError(f"{method.name} has not answered every query")

    def judge(self, number: int, claim: Outcome) -> None:
        """Record the outcome of a claim about a query, joined with earlier ones; decided queries keep theirs."""
        query, outcome = self.queries[number], claim.after(self.outcomes.get(number))
        is_unsat = outcome.verdict is Verdict.UNSAT
        if outcome.verdict is Verdict.SAT:
            outcome = self._confirmed(query, outcome)
        elif partial := query.property.partial:
            if is_unsat:
                outcome = replace(outcome, reason=Reason.INCOMPLETE)
                partial += "; in a part of the inputs there is no counterexample"
                self.closed.add(number)
            outcome = outcome.withdrawn(outcome.reason, partial)
        elif is_unsat and outcome.margin is not None and not outcome.margin >= 0:
            told = f"{outcome.method} claimed unsat with the margin {outcome.margin}"
            outcome = outcome.withdrawn(Reason.ERROR, told)
            self.closed.add(number)
        elif is_unsat and (detail := _unmodelled(query, outcome)):
            outcome = outcome.withdrawn(Reason.UNSUPPORTED, detail)
        elif outcome.margin is not None and math.isnan(outcome.margin):
            outcome = replace(outcome, margin=None)
        self.outcomes[number] = outcome
        if outcome.margin is not None:
            self.budget.report_progress({"margin": outcome.margin})
        if outcome.verdict is not Verdict.UNKNOWN:
            self.close(number)

    def close(self, number: int) -> None:
        """Mark a query as needing no further answer."""
        self.closed.add(number)
        self.bounds_cache.drop(number)

    def _confirmed(self, query: Query, claim: Outcome) -> Outcome:
        """Return the outcome of checking a claimed counterexample by exact evaluation and a replay.

        Inputs such as 1/3 are replaced by nearby decimals of the box if the new point is confirmed, too.
        """
        start, witness, prop = self.budget.clock(), claim.witness or (), query.property
        if query.network.arithmetic != "real":
            witness = representable(prop, witness)
        judged = confirm(query.network, prop, witness)
        spent = claim.seconds.get("confirm", 0.0) + self.budget.clock() - start
        claim = replace(claim, witness=witness, seconds={**claim.seconds, "confirm": spent})
        if not judged.confirmed or judged.replayed is None:
            return claim.withdrawn(Reason.UNCONFIRMED, judged.detail)
        if any(decimal_places(v) is None for v in witness):
            ends = (prop.box.bounds(i) for i in range(len(witness)))
            moved = [
                v if decimal_places(v) is not None else decimal_near(v, *e) for v, e in zip(witness, ends, strict=True)
            ]
            again = confirm(query.network, prop, moved)
            if again.confirmed and again.replayed is not None:
                witness, judged = tuple(moved), again
        assert judged.replayed is not None
        trust, outputs = Trust.EXACT if judged.exact else Trust.ROUNDED, tuple(judged.replayed.tolist())
        detail = judged.detail or claim.detail
        return replace(claim, detail=detail, trust=trust, margin=judged.margin, witness=witness, outputs=outputs)


def _unmodelled(query: Query, claim: Outcome) -> str:
    """Say why a claimed proof does not hold in the arithmetic in which the network runs; empty if it does."""
    network = query.network
    if not stays_within(network, query.property, MOST_WHOLE, network.whole):
        return "whole numbers beyond 32 bits are possible, which a runtime does not hold"
    if network.arithmetic == "real":
        return ""
    if claim.trust is Trust.FLOAT:
        return f"{claim.method} does not account for rounding, and proves nothing of {network.arithmetic}"
    most = ARITHMETICS[network.arithmetic].largest
    if not stays_within(network, query.property, most, range(len(network.ops))):
        return f"values above {most:.3g} are possible, at which {network.arithmetic} may overflow"
    return ""


def stays_within(network: Network, prop: Property, most: float, ops: Collection[int]) -> bool:
    """Return True if over the box no value of some ops, nor the sum of its terms' magnitudes, exceeds ``most``."""
    if not ops:
        return True
    with default_settings(), torch.no_grad():
        relaxation = Relaxation(network, input_box([prop], BASE, "cpu")).advance()
        reach = [torch.maximum(-x.interval.lower, x.interval.upper) for x in relaxation.bounds]
        sizes = [reach[index] for index in ops]
        for op in (network.ops[index] for index in ops):
            if isinstance(op, Affine):
                total = op.map.abs_apply(reach[op.inputs[0]])
                total = total if (bias := op.bias_as(total)) is None else total + bias.abs()
                sizes.append(total * (1 + 2 * sum_error(op.map.terms + 4, BASE)))
        # What is not a number is not within either.
        return all(bool((size <= most).all()) for size in sizes)


class Verifier(Protocol):
    """A method of verification.

    Implementations are frozen dataclasses of options, which are the key of their records (``described``).
    """

    @property
    def name(self) -> str:
        """The name on the command line and in tables."""

    def claims(self, batch: QueryBatch) -> Claims:
        """Answer the queries of a batch, which may be of different networks.

        The work exceeds what the queries may cost by at most a second, or by one step where a large network makes a
        step longer (``TimeBudget.stop``). A fault in one query is that query's outcome (``Reason.ERROR``), never an
        exception. What is known of a query already (``bounds_cache``) is where a method that bounds whole boxes
        starts, and it adds its own.

        Yields:
            The number of a query and what is claimed of it, once for each, as soon as it is known.
        """


@default_settings()
def answers(method: Verifier, queries: Sequence[Query], budget: TimeBudget = TimeBudget()) -> list[Outcome]:  # noqa: B008
    """Return a method's outcomes of queries, in their order; counterexamples are confirmed.

    The ``seconds`` of the budget are what each query may cost.
    """
    batch = QueryBatch(queries, budget)
    for _ in batch.ask(method):
        pass
    return [batch.outcomes[number] for number in batch.queries]


Answer = Callable[[QueryBatch, TimeBudget], Sequence[Outcome]]
"""The work on queries of one network, given what it may use: their outcomes, in their order, without seconds."""


def answer_in_parts(name: str, batch: QueryBatch, size: Callable[[Network, TimeBudget], int], answer: Answer) -> Claims:
    """Yield the claims of a method that answers up to ``size`` queries of one network together."""
    done = 0
    for part in batch.batches(size):
        yield from zip(part.queries, attempted(part, name, answer), strict=True)
        done += len(part.queries)
        batch.stage(name, done, len(batch.queries))


def attempted(part: QueryBatch, name: str, answer: Answer) -> Sequence[Outcome]:
    """Return the outcomes that ``work`` finds for a batch, whose queries share its time as the stage ``name``.

    An exception becomes the outcome of all queries; once time is over, *incomplete* becomes *timeout*.
    """
    count = len(part.queries)
    if part.left(list(part.queries)) <= 0:
        return [Outcome.unknown(Reason.TIMEOUT, name, "the time limit was reached before it was asked")] * count
    with part.work() as work:
        try:
            with default_settings():
                found = answer(part, work)
        except Exception as error:
            found = [fault(error, name)] * count
        spent, late = {name: work.elapsed() / count}, work.over()
    outcomes = []
    for outcome in found:
        if late and outcome.reason is Reason.INCOMPLETE:
            outcome = replace(outcome, reason=Reason.TIMEOUT, detail="the time limit was reached")
        outcomes.append(replace(outcome, seconds={**spent, **outcome.seconds}))
    return outcomes


def batch_size(most: int) -> Callable[[Network, TimeBudget], int]:
    """Return a function of a network: the number of boxes, at most ``most``, that are bounded at once.

    Half of the memory is for boxes, which take about 16 float64 per neuron each, and half for rows that are bounded.
    """

    def size(network: Network, budget: TimeBudget) -> int:
        return max(1, min(most, budget.memory // 2 // (sum(op.size for op in network.ops) * 8 * 16)))

    return size


def described(method: Verifier, budget: TimeBudget) -> str:
    """Return the key by which records know a method: its name, and as JSON the options that are not the defaults.

    The limits of ``budget`` that are ``named`` are options, too. Who gives an option another name or meaning raises
    ``version``, or keeps the old key here.
    """
    limits = {name: getattr(budget, name) for name in budget.named}
    return f"{method.name}({json.dumps({'version': 1, **_options(method), **limits}, default=repr)})"


def _options(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that its ``repr`` shows and that differ from their defaults."""
    found = {}
    for each in fields(value):
        given = getattr(value, each.name)
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if each.repr and given != default:
            found[each.name] = _options(given) if is_dataclass(given) else given
    return found
