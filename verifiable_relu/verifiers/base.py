"""Claims of verifiers, the budget of their work, and how large a batch of boxes may be.

A verifier is a frozen dataclass of options with one method, ``claims``: a generator of claimed outcomes of the queries
of a :class:`~verifiable_relu.verifiers.batch.QueryBatch`. Verdicts are made of claims there, and only there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction

import torch

from verifiable_relu.bounds import MEMORY
from verifiable_relu.errors import CallFailed, OutOfTime, UnsupportedError
from verifiable_relu.network.graph import Network
from verifiable_relu.trust.certificate import Cover, Proof

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
        verdict, reason: the claimed verdict, and why the work ended.
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
        outputs: what onnxruntime computes at a confirmed counterexample, flat.
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
    outputs: tuple[float, ...] | None = None

    @staticmethod
    def unknown(reason: Reason, method: str, detail: str = "", **known: object) -> Outcome:
        """An *unknown* with its reason; ``known`` are further fields of the outcome."""
        return Outcome(Verdict.UNKNOWN, reason, method, detail=detail, **known)  # type: ignore[arg-type]

    def after(self, before: Outcome | None) -> Outcome:
        """Join this outcome with that of a method that was asked before and claimed an *unknown*."""
        if before is None:
            return self
        kept, margins = self, [margin for margin in (before.margin, self.margin) if margin is not None]
        counts = [count for count in (before.subproblems, self.subproblems) if count is not None]
        if self.verdict is Verdict.UNKNOWN:
            # That a counterexample was claimed tells more than what later methods did not find.
            kept = before if before.reason is Reason.UNCONFIRMED else self
            kept = replace(kept, margin=max(margins, default=None))
        stages = {**before.seconds, **self.seconds}
        seconds = {name: before.seconds.get(name, 0.0) + self.seconds.get(name, 0.0) for name in stages}
        unstable = before.unstable if self.unstable is None else self.unstable
        return replace(kept, seconds=seconds, unstable=unstable, subproblems=sum(counts) if counts else None)


SearchProgress = Mapping[str, float]
"""Progress of the work on a query: the best lower bound of its ``margin``, how many ``sub-problems`` have been bounded
and which part of them is ``closed``, or some of these."""


def ignore_progress(progress: SearchProgress) -> None:
    """Drop a report of progress."""


SOLO_WORK = 3e9
"""Work of some tenths of a second; to make copies of a process takes some hundredths."""

PATIENCE = 0.5
"""The seconds after its time limit in which work may still return a result, at least, before it is broken off."""


@dataclass(frozen=True)
class TimeBudget:
    """Time, memory, device and processes that work may use, handed down to the innermost loop.

    Attributes:
        seconds: from ``start`` on; infinite for no limit.
        memory: the bytes that bounds, boxes and trees may hold at once, approximately.
        device: the torch device of bounds and attacks, for methods that can choose.
        processes: how many processes may share the work on a query, where it takes long and the operating system can
            copy processes (Linux). The process that asks should have no other threads at work then.
        clock: returns the present time in seconds, by which work is charged: wall-clock time by default.
        start: when the work began, by the clock.
        patience: the seconds after its time in which the work may still return a result: more where others have time
            left that it belongs to.
        solo_work: the work of branch and bound (``loop.TreeProgress``) that one process does before others share it.
        report_progress: told now and then where the work stands, in the process that was asked.
        named: those of these limits by which records tell methods apart (``described``).
    """

    seconds: float = math.inf
    memory: int = MEMORY
    device: str = "cpu"
    processes: int = 1
    clock: Callable[[], float] = time.perf_counter
    start: float = 0.0
    patience: float = PATIENCE
    solo_work: float = SOLO_WORK
    report_progress: Callable[[SearchProgress], None] = field(default=ignore_progress, repr=False, compare=False)
    named: tuple[str, ...] = ()

    def begun(self, seconds: float) -> TimeBudget:
        """Return the budget of work that begins now and may take some seconds."""
        return replace(self, seconds=seconds, start=self.clock())

    def share(self, part: float) -> TimeBudget:
        """Return the budget of work that begins now and may take a part of the time that is left."""
        return self.begun(part * self.left())

    def elapsed(self) -> float:
        """Return the seconds since the work began."""
        return self.clock() - self.start

    def left(self) -> float:
        """Return the seconds that are left; negative once they are spent."""
        return self.seconds - self.elapsed()

    def over(self) -> bool:
        """Return True if no time is left."""
        return self.left() <= 0

    def stop(self) -> bool:
        """Return True if no time is left, for work to ask between its steps.

        Raises:
            OutOfTime: once the work has gone on for ``patience`` beyond that.
        """
        left = self.left()
        if left < -self.patience:
            raise OutOfTime
        return left <= 0


def batch_size(network: Network, most: int, memory: int) -> int:
    """Return the number of boxes, at most ``most``, over which a network is bounded at once.

    Each box is estimated to take 16 float64 numbers for each neuron, of ``memory`` bytes.
    """
    neurons = sum(node.size for node in network.nodes)
    return max(1, min(most, memory // (neurons * 8 * 16)))


def fault(error: BaseException, method: str) -> Outcome:
    """Return the *unknown* for an exception in the work on a query."""
    reason, detail = Reason.ERROR, f"{type(error).__name__}: {error}"
    match error:
        case UnsupportedError():
            reason, detail = Reason.UNSUPPORTED, str(error)
        case OutOfTime():
            reason, detail = Reason.TIMEOUT, "the budget ran out"
        case CallFailed():
            detail = str(error)
        case MemoryError():
            reason, detail = Reason.MEMORY, str(error) or "out of memory"
        # On a CPU, torch raises a plain RuntimeError for want of memory.
        case RuntimeError() if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            reason, detail = Reason.MEMORY, "out of memory"
        case RecursionError():
            reason, detail = Reason.UNSUPPORTED, "the network is deeper than the method can follow"
    return Outcome.unknown(reason, method, detail)
