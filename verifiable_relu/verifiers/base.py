"""The protocol of verifiers, and the outcomes, budgets and batches that all verifiers share.

A verifier is a frozen dataclass of options with one method, which answers a batch of queries. It *claims* an
:class:`Outcome` for each. The campaign, which records results, first checks a claimed counterexample by exact
evaluation and replay: no verdict *sat* is recorded on a verifier's claim alone.
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
from verifiable_relu.trust.certificate import Cover, Proof
from verifiable_relu.verifiers.root import NONE, Roots

Witness = tuple[Fraction, ...]
"""An exact point of a property's box, in row-major order of the network's input."""


class Verdict(StrEnum):
    """The answer to a query: *sat* if a counterexample exists, *unsat* if none does (verified), else *unknown*."""

    SAT = "sat"
    UNSAT = "unsat"
    UNKNOWN = "unknown"


class Reason(StrEnum):
    """The reason why the work on a query ended.

    PROVED goes with *unsat* and REFUTED with *sat*. The others go with *unknown*: the method ended without deciding
    (INCOMPLETE), the time budget or the memory did not suffice (TIMEOUT, MEMORY), the method does not take the network
    or the property (UNSUPPORTED), a claimed counterexample failed its check (UNCONFIRMED), the user interrupted
    (INTERRUPTED), or the input or the program was at fault (ERROR).
    """

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
    """How far a verdict can be trusted.

    FLOAT: as far as floating-point arithmetic whose rounding is not accounted for; ROUNDED: every rounding error is
    accounted for; EXACT: the arithmetic is rational and exact;
    CHECKED: the independent checker has accepted a certificate.
    """

    FLOAT = "float"
    ROUNDED = "rounded"
    EXACT = "exact"
    CHECKED = "checked"


@dataclass(frozen=True)
class Outcome:
    """A verifier's claim about one query.

    Attributes:
        verdict: the claimed verdict.
        reason: why the work ended.
        method: the method that decided, such as ``crown``; for a portfolio the member's name.
        trust: how far the claim can be trusted; None for *unknown*.
        margin: for *unsat* a proven lower bound of the margin over the box, for *sat* the margin at the witness, for
            *unknown* the best lower bound known; None where the method has no bound.
        witness: the counterexample, an exact point of the box, for *sat*; None otherwise.
        detail: a sentence for the user, such as why the verdict is *unknown*.
        seconds: the time charged to this query, by stage; a stage that worked on several queries at once charges each
            an equal share.
        unstable: the number of unstable neurons under the bounds used; None where it was not computed.
        subproblems: the number of sub-problems that the query was split into and that were bounded; 0 where bounds or
            an attack ended the work before any split; None where the method does not count.
        proof: what a certificate of *unsat* needs, if the verifier recorded it; None otherwise.
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
    subproblems: int | None = None
    proof: Proof | Cover | None = field(default=None, repr=False)

    @staticmethod
    def unknown(reason: Reason, method: str, detail: str = "", **known: object) -> Outcome:
        """An *unknown* with its reason; ``known`` are further fields of the outcome."""
        return Outcome(Verdict.UNKNOWN, reason, method, detail=detail, **known)  # type: ignore[arg-type]


class Budget:
    """The seconds of work that each query of a batch may still cost.

    Each query draws on a purse. Queries can share one, as the boxes of one VNN-LIB file do, which have one time limit
    together. Work for several queries at once is charged to them in equal shares.

    Args:
        purses: the seconds in each purse; ``math.inf`` means no limit.
        owner: for each query the index of its purse; by default, each query has a purse of its own.
        clock: returns the present time in seconds, by which work is charged: wall-clock time by default.

    Attributes:
        clock: the argument.
    """

    def __init__(
        self,
        purses: Sequence[float],
        owner: Sequence[int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._purses = list(purses)
        self._owner = list(range(len(purses))) if owner is None else list(owner)
        self._whole: tuple[Budget, list[int]] | None = None

    @classmethod
    def each(cls, seconds: float, queries: int) -> Budget:
        """A budget of the same number of seconds for each of ``queries`` queries."""
        return cls([seconds] * queries)

    def __len__(self) -> int:
        return len(self._owner)

    def remaining(self, query: int) -> float:
        """The seconds left for one query, never negative."""
        own = max(0.0, self._purses[self._owner[query]])
        if self._whole is None:
            return own
        whole, numbers = self._whole
        return min(own, whole.remaining(numbers[query]))

    def total(self) -> float:
        """The seconds left for all queries together."""
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
        """Charge the time of a ``with`` block to ``queries``, in equal shares.

        Yields:
            A function that returns the seconds since the start of the block.
        """
        start = self.clock()
        try:
            yield lambda: self.clock() - start
        finally:
            if queries:
                self.charge(queries, self.clock() - start)

    def subset(self, queries: Sequence[int], share: float = 1.0) -> Budget:
        """A budget for some of the queries, which draws on the same purses.

        Args:
            queries: the numbers of the queries.
            share: the part, in [0, 1], of what each purse still has that the new budget may spend.
        """
        purses = [max(0.0, purse) * share for purse in self._purses]
        part = Budget(purses, [self._owner[i] for i in queries], self.clock)
        part._whole = (self, list(queries))
        return part


PATIENCE = 0.5
"""The seconds after its time limit in which work may still return a result before it is broken off."""


def deadline(elapsed: Callable[[], float], allowance: float) -> Callable[[], bool]:
    """The function that work calls between its steps to learn whether it should stop.

    The function returns True once ``elapsed()`` exceeds ``allowance``, and raises ``OutOfTime`` once it exceeds that by
    more than ``PATIENCE``.

    Args:
        elapsed: returns the seconds since the work began.
        allowance: the seconds that the work may take.
    """

    def stop() -> bool:
        late = elapsed() - allowance
        if late > PATIENCE:
            raise OutOfTime
        return late > 0

    return stop


class Progress(Protocol):
    """The object that a verifier reports to while it works."""

    def stage(self, name: str, done: int, total: int) -> None:
        """``done`` of ``total`` queries have been through the stage ``name``."""

    def finish(self, query: int, outcome: Outcome) -> None:
        """The outcome of query number ``query`` is final; called once for each, as soon as it is known."""


class Silent:
    """The progress that does nothing."""

    def stage(self, name: str, done: int, total: int) -> None:
        pass

    def finish(self, query: int, outcome: Outcome) -> None:
        pass


SILENT = Silent()


class Verifier(Protocol):
    """A method of verification.

    Implementations are frozen dataclasses whose fields are their options, so that their ``repr`` is a cache key.
    """

    @property
    def name(self) -> str:
        """The name on the command line and in tables."""

    def verify(
        self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT, roots: Roots = NONE
    ) -> list[Outcome]:
        """Answer a batch of queries, which may be of different networks.

        The work exceeds the budget by at most a second, or by one step where a large network makes a step longer
        (``deadline``). A fault in one query is that query's outcome (``Reason.ERROR``), never an exception.

        Args:
            queries: the queries.
            budget: the seconds that each query may cost.
            progress: told of stages, and of every outcome as soon as it is known.
            roots: the bounds that other verifiers have proven of the queries. A verifier that bounds whole boxes starts
                from them and adds its own.

        Returns:
            The outcomes, in the order of the queries.

        Raises:
            KeyboardInterrupt: if the user interrupts, after all outcomes known so far are reported to ``progress``.
        """


def by_network(queries: Sequence[Query]) -> list[tuple[Network, list[int]]]:
    """The indices of queries, grouped by the digest of their networks, in the order of first appearance."""
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
    """The outcomes of queries that are answered in batches of one network each; the body of a verifier's ``verify``.

    Args:
        name: the name of the stage that is reported to ``progress``.
        queries: all queries.
        progress: told of every outcome as soon as it is known.
        size: returns the largest number of a network's queries in one batch.
        answer: returns the outcomes of a batch, given by its network and the numbers of its queries, in their order.

    Returns:
        The outcomes, in the order of ``queries``.
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
    """The number of boxes over which a network is bounded at once.

    Args:
        network: the network.
        most: the largest number to return.
        memory: the bytes that the work may hold, by an estimate of 16 float64 numbers for each neuron and box.
    """
    neurons = sum(node.size for node in network.nodes)
    return max(1, min(most, memory // (neurons * 8 * 16)))


def fault(error: BaseException, method: str) -> Outcome:
    """The *unknown* for an exception in the work on a query: unsupported, out of time or memory, or an error."""
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
            return Outcome.unknown(Reason.UNSUPPORTED, method, "the network is deeper than the method can follow")
        # On a CPU, torch raises a plain RuntimeError for want of memory.
        case RuntimeError() if "allocate memory" in str(error):
            return Outcome.unknown(Reason.MEMORY, method, "out of memory")
    return Outcome.unknown(Reason.ERROR, method, f"{type(error).__name__}: {error}")
