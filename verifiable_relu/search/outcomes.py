"""Claims of methods about one query: verdict, reason, trust, and details for the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction

import numpy as np
import torch

from verifiable_relu.errors import CallFailed, OutOfTime, UnsupportedError
from verifiable_relu.ir.exact import evaluate_exact, is_evaluable
from verifiable_relu.ir.network import Network
from verifiable_relu.search.property_rows import PropertyRows
from verifiable_relu.spec.property import Property, nearest

Witness = tuple[Fraction, ...]
"""An exact point of a property's box, in row-major order of the network's input."""


class Verdict(StrEnum):
    """The answer to a query: *sat* if a counterexample exists, *unsat* if none does (verified), else *unknown*."""

    SAT = "sat"
    UNSAT = "unsat"
    UNKNOWN = "unknown"


class Reason(StrEnum):
    """The reason why work ended.

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
    """Trust that a verdict deserves.

    FLOAT: as much as floating-point arithmetic whose rounding is not accounted for; ROUNDED: every rounding error is
    accounted for; EXACT: the arithmetic is rational and exact; CHECKED: the independent checker has accepted a
    certificate.
    """

    FLOAT = "float"
    ROUNDED = "rounded"
    EXACT = "exact"
    CHECKED = "checked"


@dataclass(frozen=True)
class Outcome:
    """A method's claim about one query.

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
    outputs: tuple[float, ...] | None = None

    @staticmethod
    def unknown(reason: Reason, method: str, detail: str = "", **known: object) -> Outcome:
        """Return an *unknown* with its reason; ``known`` are further fields of the outcome."""
        return Outcome(Verdict.UNKNOWN, reason, method, detail=detail, **known)  # type: ignore[arg-type]

    def after(self, before: Outcome | None) -> Outcome:
        """Return this outcome joined with the *unknown* of a method that was asked before."""
        if before is None:
            return self
        kept = self
        if self.verdict is Verdict.UNKNOWN:
            # That a counterexample was claimed tells more than what later methods did not find.
            kept = before if before.reason is Reason.UNCONFIRMED else self
            margins = [margin for margin in (before.margin, self.margin) if margin is not None]
            kept = replace(kept, margin=max(margins, default=None))
        seconds = {n: before.seconds.get(n, 0.0) + self.seconds.get(n, 0.0) for n in {**before.seconds, **self.seconds}}
        unstable = before.unstable if self.unstable is None else self.unstable
        counts = [count for count in (before.subproblems, self.subproblems) if count is not None]
        return replace(kept, seconds=seconds, unstable=unstable, subproblems=sum(counts) if counts else None)

    def withdrawn(self, reason: Reason, detail: str) -> Outcome:
        """Return an *unknown* in place of a claim that does not hold."""
        return replace(self, verdict=Verdict.UNKNOWN, reason=reason, trust=None, margin=None, detail=detail)


def fault(error: BaseException, method: str) -> Outcome:
    """Return the *unknown* for an exception in the work on a query."""
    reason, detail = Reason.ERROR, f"{type(error).__name__}: {error}"
    match error:
        case UnsupportedError():
            reason, detail = Reason.UNSUPPORTED, str(error)
        case OutOfTime():
            reason, detail = Reason.TIMEOUT, "the time limit was reached"
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


def claim(network: Network, prop: Property, point: np.ndarray, method: str) -> Outcome | None:
    """Return a *sat* claim for the exact point of the box nearest to a point; None if its margin there is positive.

    Args:
        network: it is evaluated in float64, or in float32 where what runs it rounds.
        prop: the property.
        point: (inputs,), in or near the property's box.
        method: the method that claims.
    """
    witness = prop.box.witness(point)
    x = torch.tensor([[float(v) for v in witness]], dtype=torch.float64)
    with torch.no_grad():
        y = network(x if network.arithmetic == "real" else x.float()).double()
    rows = PropertyRows.from_properties([prop], network.output_size)
    margin = float(rows.margins(rows.values(y)))
    # An overflow to infinity or NaN says nothing of the true margin.
    if not (margin <= 0 and bool(torch.isfinite(y).all())):
        return None
    return Outcome(Verdict.SAT, Reason.REFUTED, method, Trust.FLOAT, margin, witness, subproblems=0)


def exact_claim(network: Network, prop: Property, point: np.ndarray, method: str) -> Outcome | None:
    """Return what ``claim`` does, judged in rational arithmetic where the network can be evaluated in it."""
    if not is_evaluable(network):
        return claim(network, prop, point, method)
    witness = prop.box.witness(point)
    outputs = evaluate_exact(network, witness)
    if not (prop.box.contains(witness) and prop.violated(outputs)):
        return None
    return Outcome(Verdict.SAT, Reason.REFUTED, method, Trust.EXACT, nearest(prop.margin(outputs)), witness)
