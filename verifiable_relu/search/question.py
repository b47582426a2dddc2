"""A query whose box has been bounded, and the base of complete methods, which decide one such query at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from verifiable_relu.bounds.alpha import Ascent
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Network
from verifiable_relu.search.bab.query import ReducedQuery
from verifiable_relu.search.batch import Claims, QueryBatch, attempted, batch_size
from verifiable_relu.search.bounding import BoundedBoxes, Crown, RowsBounded
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict, fault
from verifiable_relu.search.piecewise_linear import (
    bound_differences,
    require_piecewise_linear,
    tournament_intervals,
    without_maxima,
)
from verifiable_relu.search.property_rows import PropertyRows
from verifiable_relu.spec.property import Property

_BATCH = 64  # Most queries bounded at once
_CURVED_STEPS = 6  # Of the search for bounds of neurons where some are smooth: there they are worth more than splits


@dataclass(frozen=True, eq=False)
class BoundedQuery:
    """A network, a property, and bounds proven over the property's box, in float64 on the CPU."""

    network: Network
    prop: Property
    intervals: Mapping[int, Interval]  # Of the ops that feed elementwise ops and maxima, by number, (1, size)
    lower: Tensor  # (polytopes,) of the largest row of each, as ``PropertyRows`` counts
    trust: Trust = Trust.ROUNDED  # In ``intervals`` and ``lower``
    learn: Callable[[dict[int, float]], None] = lambda lower: None  # Told of ``lower`` that are proven since
    observer: Callable[[object], None] | None = None  # Told of what is proven

    @cached_property
    def box(self) -> Interval:
        """The property's box, (1, inputs) in float64."""
        return Interval(*(torch.from_numpy(end)[None] for end in (self.prop.box.lower, self.prop.box.upper)))

    @cached_property
    def rows(self) -> PropertyRows:
        return PropertyRows.from_properties([self.prop], self.network.output_size)

    @cached_property
    def without_maxima(self) -> tuple[Network, Mapping[int, Interval]]:
        """The network with maxima as tournaments of ReLUs, and intervals by the numbers of its ops."""
        network, number = without_maxima(self.network)
        return network, tournament_intervals(network, number, self.intervals)

    def bounds(self, more: Mapping[int, float] | None = None) -> list[float]:
        """Return ``lower`` tightened by bounds, by polytope, that were proven since."""
        return [max(value, (more or {}).get(polytope, value)) for polytope, value in enumerate(self.lower.tolist())]

    def margin(self, more: Mapping[int, float] | None = None) -> float:
        """Return a proven lower bound of the margin: the least of ``bounds``."""
        return min(self.bounds(more), default=math.inf)

    def reduced(self, stop: Callable[[], bool], device: str = "cpu") -> ReducedQuery | None:
        """Return the reduced system with the open polytopes; None if one of these has no rows.

        All of it is on ``device``. Raises ``OutOfTime`` once ``stop`` says so.
        """
        is_open = [polytope for polytope, lower in enumerate(self.bounds()) if not lower > 0]
        counts = torch.bincount(self.rows.polytope[0], minlength=len(self.lower))
        if not bool(counts[is_open].all()):
            return None
        network, intervals = self.without_maxima
        box, intervals = self.box.to(device), {index: x.to(device) for index, x in intervals.items()}
        if network is not self.network:
            relaxation, first = bound_differences(network, box, intervals, stop)
            intervals = {index: x.intersect(relaxation.bounds[index].interval) for index, x in intervals.items()}
            if self.observer is not None:
                nothing = self.rows.bound.new_full(self.rows.bound.shape, -math.inf)
                none = torch.zeros(0, dtype=torch.long)
                self.observer(RowsBounded(relaxation, self.rows, nothing, none, {}, after=first))
        return ReducedQuery(network, box, intervals, self.rows, is_open, stop)


class CompleteMethod(Protocol):
    """Base of methods that decide one query at a time, starting from bounds over its box.

    By default it takes piecewise-linear networks alone.
    """

    @property
    def name(self) -> str: ...

    @property
    def ascent_steps(self) -> int:
        """Steps of α-CROWN for the intervals of neurons that CROWN leaves unstable."""

    def claims(self, batch: QueryBatch) -> Claims:
        return decide_one_by_one(self, batch)

    def require(self, network: Network) -> None:
        """Raise an ``UnsupportedError`` where the method does not take a network; it names the op."""
        require_piecewise_linear(network)

    def start(self) -> None:
        """Start what the method needs, such as a process, outside of any query's time; may raise ``CallFailed``."""
        return

    def decide(self, query: BoundedQuery, budget: TimeBudget) -> Outcome:
        """Return the claim about a query.

        Raises:
            OutOfTime: if the time limit was reached before anything was split or asked.
            UnsupportedError: if the method does not take the query; the error names the op.
        """


def all_excluded(outcomes: Iterable[Outcome], proved: Outcome) -> Outcome:
    """Return a query's outcome from those of its polytopes in turn: ``proved`` if all are excluded.

    The first *sat* and the first timeout end the search.
    """
    result = proved
    for outcome in outcomes:
        if outcome.verdict is Verdict.SAT or outcome.reason is Reason.TIMEOUT:
            return outcome
        if outcome.verdict is Verdict.UNKNOWN and result is proved:
            result = outcome
    return result


def decide_one_by_one(method: CompleteMethod, batch: QueryBatch) -> Claims:
    """Yield a method's claims: first bounds in batches, then ``decide`` for each query still open."""
    done = 0
    for part in batch.batches(batch_size(_BATCH)):
        bounds: list[BoundedBoxes] = []
        found = attempted(part, "bounds", partial(_bound, method, bounds))
        for number, outcome in zip(part.queries, found, strict=True):
            if not bounds:
                outcome = replace(outcome, method=method.name)
            elif outcome.verdict is Verdict.UNKNOWN:
                outcome = _decided(method, bounds[0], part.part([number]), number).after(outcome)
            yield number, outcome
            done += 1
            batch.stage(method.name, done, len(batch.queries))


def _bound(method: CompleteMethod, made: list[BoundedBoxes], part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
    """Return the outcomes by bounds of queries of one network; the bounds are appended to ``made``."""
    method.require(part.network)
    ascent = Ascent(steps=method.ascent_steps if part.network.piecewise_linear else _CURVED_STEPS)
    with torch.no_grad():
        made.append(BoundedBoxes(Crown(intermediate=ascent), part, work))
    return [made[0].outcome(number, method.name, decided="decided by bounds alone") for number in part.queries]


def _decided(method: CompleteMethod, bounds: BoundedBoxes, alone: QueryBatch, number: int) -> Outcome:
    try:
        method.start()
    except CallFailed as error:
        return fault(error, method.name)
    observer = None if alone.observer is None else partial(alone.observer, [number])
    known, learn = (bounds.intervals_of(number), bounds.lower[number]), partial(alone.bounds_cache.prove, number)
    query = BoundedQuery(alone.network, alone.properties[0], *known, bounds.trust, learn, observer)

    def decide(_: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
        try:
            return [method.decide(query, work)]
        except OutOfTime:
            return [Outcome.unknown(Reason.TIMEOUT, method.name, "the time limit was reached before a split")]

    return attempted(alone, method.name, decide)[0]
