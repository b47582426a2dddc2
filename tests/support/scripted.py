"""A verifier whose answers a test scripts, and queries about a network of one neuron."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from tests.support.flat_nets import relu_layers
from verifiable_relu.campaign import Case
from verifiable_relu.ir.network import Network
from verifiable_relu.search.batch import QueryBatch
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict
from verifiable_relu.spec import Box, Property, Query, Row


def tiny(slope: float = 1.0) -> Network:
    """The network y = slope·relu(x) with one input and one output."""
    return relu_layers(([[1.0]], [0.0]), ([[slope]], [0.0]))


NETWORK = tiny()


def at_least(threshold: float, lower: float = 0.0, upper: float = 1.0) -> Query:
    """The query whether relu reaches ``threshold`` from [lower, upper]."""
    row = Row(((0, Fraction(-1)),), Fraction(-threshold))
    return Query(NETWORK, Property(Box(np.array([lower]), np.array([upper])), ((row,),)))


def case(*thresholds: float, name: str = "p", timeout: float = 10.0) -> Case:
    return Case("n.onnx", name, tuple(at_least(t) for t in thresholds), timeout)


def truth(query: Query) -> Outcome:
    """The correct outcome of such a query, with its margin or witness."""
    (((row,),), box) = query.property.unsafe, query.property.box
    margin = -float(row.bound) - max(box.upper[0], 0.0)
    seconds = {"look": 0.001}
    if margin > 0:
        return Outcome(Verdict.UNSAT, Reason.PROVED, "look", Trust.EXACT, margin, seconds=seconds, unstable=0)
    return Outcome(Verdict.SAT, Reason.REFUTED, "look", Trust.FLOAT, margin, (box.bounds(0)[1],), seconds=seconds)


Answer = Callable[[Query], Outcome]


@dataclass(frozen=True)
class Scripted:
    """A verifier that answers one query after the other by a function; records the queries and what they may cost."""

    answer: Answer = field(default=truth, repr=False)
    asked: list[Sequence[Query]] = field(default_factory=list, repr=False)
    left: list[list[float]] = field(default_factory=list, repr=False)
    batches: list[QueryBatch] = field(default_factory=list, repr=False)

    label: str = ""

    name = "scripted"

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        self.batches.append(batch)
        self.asked.append(list(batch.queries.values()))
        self.left.append([batch.left([number]) for number in batch.queries])
        for done, (number, query) in enumerate(batch.queries.items(), start=1):
            claim = self.answer(query)
            batch.stage("look", done, len(batch.queries))
            yield number, claim
