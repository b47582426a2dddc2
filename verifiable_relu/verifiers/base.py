"""What a verifier is: options in a frozen dataclass, and one method that answers a batch of queries.

A verifier *claims* an :class:`Outcome`. Whoever records results (the campaign) checks a claimed counterexample
by exact evaluation and replay first; a verifier's word alone is never recorded as *sat*.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Protocol

import torch

from verifiable_relu.errors import CallFailed, OutOfTime, UnsupportedError
from verifiable_relu.network.graph import Network
from verifiable_relu.spec.property import Query
from verifiable_relu.trust.certificate import Proof
from verifiable_relu.verifiers.root import NONE, Roots

Witness = tuple[Fraction, ...]
"""An exact point of a property's box, in row-major order of the network's input."""


class Verdict(StrEnum):
    """What was found out; *sat*: a counterexample exists, *unsat*: none does (verified)."""

    SAT = "sat"
    UNSAT = "unsat"
    UNKNOWN = "unknown"


class Reason(StrEnum):
    """Why the work ended."""

    PROVED = "proved"
    REFUTED = "refuted"
    INCOMPLETE = "incomplete"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    UNSUPPORTED = "unsupported"
    UNCONFIRMED = "unconfirmed"
    INTERRUPTED = "interrupted"
    ERROR = "error"


class Trust(StrEnum):
    """How far a verdict can be trusted: floating point as it comes, rounding accounted for, exact arithmetic; or a
    certificate that the independent checker has accepted."""

    FLOAT = "float"
    ROUNDED = "rounded"
    EXACT = "exact"
    CHECKED = "checked"


@dataclass(frozen=True)
class Outcome:
    """A verifier's claim about one query.

    Attributes:
        verdict: what it claims.
        reason: why it stopped.
        trust: how far the claim can be trusted; None while the verdict is unknown.
        margin: for unsat a proven lower bound of the margin over the box, for sat the margin at the witness, for
            unknown the best lower bound known; None where the method has none.
        witness: an exact point of the box, for sat.
        method: the method that decided (``crown``; for a portfolio the member's name).
        detail: a sentence that a person can act on.
        seconds: time charged to this query, by stage name; stages that ran in batch charge each query its share.
        unstable: number of unstable neurons under the bounds used, None where not computed.
        proof: what a certificate of unsat needs, if it was to be recorded.
    """

    verdict: Verdict
    reason: Reason
    method: str
    trust: Trust | None = None
    margin: float | None = None
    witness: Witness | None = None
    detail: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    unstable: int | None = None
    proof: Proof | None = field(default=None, repr=False)

    @staticmethod
    def unknown(reason: Reason, method: str, detail: str = "", **known: object) -> Outcome:
        """An *unknown* with its reason."""
        return Outcome(Verdict.UNKNOWN, reason, method, detail=detail, **known)  # type: ignore[arg-type]


class Budget:
    """How many seconds of work each query of a batch may still cost.

    Queries can share a purse (the boxes of one VNN-LIB file have one time limit between them). Work done for
    several queries at once is charged to them in equal shares.

    Args:
        purses: seconds in each purse; ``math.inf`` for no limit.
        owner: for each query the index of its purse; by default one purse per query.
    """

    def __init__(self, purses: Sequence[float], owner: Sequence[int] | None = None) -> None:
        self._purses = list(purses)
        self._owner = list(range(len(purses))) if owner is None else list(owner)
        self._whole: tuple[Budget, list[int]] | None = None

    @classmethod
    def each(cls, seconds: float, queries: int) -> Budget:
        """The same number of seconds for each of ``queries`` queries."""
        return cls([seconds] * queries)

    def __len__(self) -> int:
        return len(self._owner)

    def remaining(self, query: int) -> float:
        """Seconds left for one query, never negative."""
        own = max(0.0, self._purses[self._owner[query]])
        if self._whole is None:
            return own
        whole, numbers = self._whole
        return min(own, whole.remaining(numbers[query]))

    def total(self) -> float:
        """Seconds left for all queries together."""
        one_of_each = {purse: query for query, purse in enumerate(self._owner)}
        return sum(self.remaining(query) for query in one_of_each.values())

    def charge(self, queries: Sequence[int], seconds: float) -> None:
        """Take ``seconds`` from the purses of ``queries``, in equal shares."""
        for query in queries:
            self._purses[self._owner[query]] -= seconds / len(queries)
        if self._whole is not None:
            whole, numbers = self._whole
            whole.charge([numbers[query] for query in queries], seconds)

    @contextmanager
    def charging(self, queries: Sequence[int]) -> Iterator[Callable[[], float]]:
        """Charge the wall-clock time of a block to ``queries``; yields a function: seconds since its start."""
        start = time.perf_counter()
        try:
            yield lambda: time.perf_counter() - start
        finally:
            if queries:
                self.charge(queries, time.perf_counter() - start)

    def subset(self, queries: Sequence[int], share: float = 1.0) -> Budget:
        """A budget for some of the queries, drawing on the same purses, up to a share of what is left in each."""
        part = Budget([max(0.0, purse) * share for purse in self._purses], [self._owner[i] for i in queries])
        part._whole = (self, list(queries))
        return part


PATIENCE = 0.5
"""Seconds that are given to work that is told to stop, so that it can make something of what it has."""


def deadline(elapsed: Callable[[], float], allowance: float) -> Callable[[], bool]:
    """A function for work to ask whether it should stop.

    It says so once ``elapsed()`` is beyond ``allowance`` seconds, and raises ``OutOfTime`` half a second later.
    """

    def stop() -> bool:
        late = elapsed() - allowance
        if late > PATIENCE:
            raise OutOfTime
        return late > 0

    return stop


class Progress(Protocol):
    """Where a verifier reports while it works. The default reports to nobody."""

    def stage(self, name: str, done: int, total: int) -> None:
        """``done`` of ``total`` queries have been through the stage ``name``."""

    def finish(self, query: int, outcome: Outcome) -> None:
        """The outcome of query number ``query`` is final; called once for each, as soon as it is known."""


class Silent:
    """Progress that goes nowhere."""

    def stage(self, name: str, done: int, total: int) -> None:
        pass

    def finish(self, query: int, outcome: Outcome) -> None:
        pass


SILENT = Silent()


class Verifier(Protocol):
    """A method. Implementations are frozen dataclasses: fields are options, ``repr`` is the cache key."""

    @property
    def name(self) -> str:
        """The name on the command line and in tables."""

    def verify(
        self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT, roots: Roots = NONE
    ) -> list[Outcome]:
        """Answer a batch; the outcomes are in the order of the queries.

        What others have proven of the queries is in ``roots``; a verifier that bounds whole boxes starts from there
        and adds what it proves itself.

        Queries may speak of different networks. The budget is honoured to within a second, or to within one step
        where a large network makes it longer (``deadline``); Ctrl-C raises ``KeyboardInterrupt`` after what was
        decided has been reported to ``progress``. A fault in one query is that query's outcome (``Reason.ERROR``),
        never an exception.
        """


def by_network(queries: Sequence[Query]) -> list[tuple[Network, list[int]]]:
    """The queries' indices grouped by what their network computes, in order of first appearance."""
    groups: dict[str, tuple[Network, list[int]]] = {}
    for index, query in enumerate(queries):
        groups.setdefault(query.network.digest, (query.network, []))[1].append(index)
    return list(groups.values())


def in_batches(
    name: str,
    queries: Sequence[Query],
    progress: Progress,
    size: Callable[[Network], int],
    answer: Callable[[Network, list[int]], Sequence[Outcome]],
) -> list[Outcome]:
    """A verifier's ``verify`` where a batch is answered at once: each batch speaks of one network.

    Args:
        name: the stage reported to ``progress``.
        queries: all of them.
        progress: told of every outcome as it comes.
        size: the most queries of a network in a batch.
        answer: the outcomes of the queries with these numbers, in their order.
    """
    outcomes: dict[int, Outcome] = {}
    for network, members in by_network(queries):
        most = size(network)
        for start in range(0, len(members), most):
            part = members[start : start + most]
            for index, outcome in zip(part, answer(network, part), strict=True):
                outcomes[index] = outcome
                progress.finish(index, outcome)
            progress.stage(name, len(outcomes), len(queries))
    return [outcomes[i] for i in range(len(queries))]


def batch_size(network: Network, most: int, memory: int) -> int:
    """How many boxes a network is bounded over at once: at most ``most``, by an estimate within ``memory`` bytes."""
    neurons = sum(node.size for node in network.nodes)
    return max(1, min(most, memory // (neurons * 8 * 16)))


def fault(error: BaseException, method: str) -> Outcome:
    """What an exception in one query is recorded as: unsupported, out of time or memory, or an error of ours."""
    match error:
        case UnsupportedError():
            return Outcome.unknown(Reason.UNSUPPORTED, method, str(error))
        case OutOfTime():
            return Outcome.unknown(Reason.TIMEOUT, method, "the budget ran out")
        case MemoryError():
            return Outcome.unknown(Reason.MEMORY, method, str(error) or "out of memory")
        case torch.OutOfMemoryError():
            return Outcome.unknown(Reason.MEMORY, method, "out of memory")
        case CallFailed():
            return Outcome.unknown(Reason.ERROR, method, str(error))
        case RecursionError():
            return Outcome.unknown(
                Reason.UNSUPPORTED, method, "more nodes after one another than the method can follow"
            )
        # torch has no class for it on a CPU.
        case RuntimeError() if "allocate memory" in str(error):
            return Outcome.unknown(Reason.MEMORY, method, "out of memory")
    return Outcome.unknown(Reason.ERROR, method, f"{type(error).__name__}: {error}")
