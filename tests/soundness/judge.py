"""What a method may say about a case, given what exact arithmetic knows of it."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from typing import Any

from tests.support.asking import claims
from tests.support.exact import DIGITS, exact_outputs, margin, violated
from verifiable_relu.ir.network import Network
from verifiable_relu.search.bab.verifier import Bab
from verifiable_relu.search.batch import BoundsCache, QueryBatch
from verifiable_relu.search.bounding import Crown
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict
from verifiable_relu.search.registry import make
from verifiable_relu.spec.property import Query

LIRPA = ("auto_lirpa-ibp", "auto_lirpa-crown", "auto_lirpa-alpha-crown")
"""The methods of a library without outward rounding, whose verdicts are labelled ``float``."""

FLOAT_SLACK = 1e-9
"""How far, relative to the outputs, such a verdict may be off; all other methods must be right to the last bit."""


@dataclass(frozen=True, eq=False)
class Case:
    """A query and a point of its box, at which exact arithmetic knows the margin.

    Attributes:
        true: the network that is meant, where the query's stands for it and for others: weights that are known up to
            their ``weight_error``, or a member of a family. By default the query's own, or its limit.
    """

    name: str
    query: Query
    point: tuple[Fraction, ...]
    true: Network | None = None

    @property
    def network(self) -> Network:
        """The network that exact arithmetic evaluates."""
        return self.query.network.limit if self.true is None else self.true

    @property
    def doubt(self) -> float:
        """How far, relatively, the exact evaluation may be off: 0, but for smooth activations."""
        return 0.0 if self.network.piecewise_linear else 10.0 ** (5 - DIGITS)

    @cached_property
    def outputs(self) -> list[Fraction]:
        """The exact outputs at the point."""
        return exact_outputs(self.network, self.point)

    @cached_property
    def margin(self) -> Fraction | float:
        """The exact margin at the point: no lower bound of the margin may exceed it."""
        return margin(self.query.property, self.outputs)

    @cached_property
    def truth(self) -> Verdict | None:
        """sat if the point is a counterexample, unsat if it is none and the only point, else None."""
        box = self.query.property.box
        assert box.contains(self.point)
        if self.doubt and abs(self.margin) <= self.doubt * scale(*self.outputs):
            return None
        if violated(self.query.property, self.outputs):
            return Verdict.SAT
        return Verdict.UNSAT if all(low == high for low, high in map(box.bounds, range(box.size))) else None


class Caught(Exception):
    """A report that stops at the first problem has its first problem."""


@dataclass
class Report:
    """What a kind of test found: ``problems`` are unsound or impossible answers, ``decided`` counts verdicts.

    Attributes:
        stop_at_first: whether the first problem raises ``Caught``.
        of: what is taken of the cases that there are.
    """

    stop_at_first: bool = False
    of: Callable[[Iterable[Any]], Iterable[Any]] = iter
    problems: list[str] = field(default_factory=list)
    decided: Counter[tuple[str, Verdict]] = field(default_factory=Counter)

    def note(self, where: str, what: str) -> None:
        self.problems.append(f"{where}: {what}")
        if self.stop_at_first:
            raise Caught(self.problems[0])

    def verdicts(self, method: str) -> set[Verdict]:
        """What a method decided, *unknown* left out."""
        return {verdict for name, verdict in self.decided if name == method} - {Verdict.UNKNOWN}


def nearest(value: Fraction | float) -> float:
    """The nearest finite float."""
    largest = sys.float_info.max
    return float(min(max(value, -largest), largest))


def scale(*values: Fraction | float) -> float:
    """max(1, |values|): what floating-point errors are relative to."""
    return max([1.0, *(abs(nearest(v)) for v in values)])


def judge(case: Case, method: str, outcome: Outcome, report: Report) -> Verdict | None:
    """Hold one answer against exact arithmetic; returns the verdict if it may be held against other methods'."""
    where, unrounded = f"{method} on {case.name}", method in LIRPA
    slack = (FLOAT_SLACK if unrounded else case.doubt) * scale(*case.outputs)
    limit = case.margin + Fraction(slack) if isinstance(case.margin, Fraction) else case.margin
    report.decided[method, outcome.verdict] += 1
    if outcome.reason is Reason.ERROR:
        report.note(where, f"failed: {outcome.detail}")
    if outcome.verdict is Verdict.UNKNOWN:
        if outcome.trust is not None or outcome.reason in (Reason.PROVED, Reason.REFUTED):
            report.note(where, f"unknown, and yet {outcome.reason} with trust {outcome.trust}")
    elif outcome.trust is None:
        report.note(where, f"{outcome.verdict} without saying how far it can be trusted")
    if outcome.verdict is Verdict.SAT:
        return _judge_witness(case, method, outcome, where, report)
    if outcome.margin is not None and not outcome.margin <= limit:
        report.note(
            where, f"lower bound {outcome.margin!r} of the margin, which is {nearest(case.margin)!r} at a point"
        )
    if outcome.verdict is Verdict.UNKNOWN:
        return None
    if outcome.margin is not None and not outcome.margin >= 0:
        report.note(where, f"unsat with margin {outcome.margin!r}")
    # What plain floating point says within its own error is no more than its label promises.
    if case.truth is Verdict.SAT and not (unrounded and -slack < case.margin < 0):
        report.note(where, f"unsat, but the margin is {nearest(case.margin)!r} at a point")
    return None if unrounded else outcome.verdict


def _judge_witness(case: Case, method: str, outcome: Outcome, where: str, report: Report) -> Verdict | None:
    prop = case.query.property
    if outcome.witness is None or not prop.box.contains(outcome.witness):
        report.note(where, "sat without a point of the box")
        return None
    # A counterexample speaks of a family's limit, whichever of its members the case is about.
    limit = case.query.network.limit
    y = exact_outputs(case.network if limit is case.query.network else limit, outcome.witness)
    at_witness, reached = margin(prop, y), violated(prop, y)
    # Only `auto` confirms its witnesses; what others claim in float64 is confirmed later (``QueryBatch.judge``), and
    # what is claimed of a network that stands for others need not hold for each of them.
    claimed = method != "auto" and outcome.trust is Trust.FLOAT
    allowed = ((1e-6 if case.true is None else math.inf) if claimed else case.doubt) * scale(*y)
    if not reached and not (allowed and at_witness <= allowed):
        report.note(where, f"sat with a witness of margin {nearest(at_witness)!r}, which is no counterexample")
    return Verdict.SAT if reached and (not case.doubt or at_witness < -case.doubt * scale(*y)) else None


PORTION = 16
"""The least number of cases that are put to a method as one batch."""


def portions(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Batches of at least ``PORTION`` cases of two networks or more, but for the last one; no network is in two."""
    batch: list[Case] = []
    for _, group in groupby(cases, lambda case: id(case.query.network)):
        several = bool(batch)
        batch += group
        if several and len(batch) >= PORTION:
            yield batch
            batch = []
    if batch:
        yield batch


class HandedOn:
    """``bab`` that starts from what CROWN has handed on of every query: ``auto`` decides most queries before that."""

    name = "crown, then bab"

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        """As ``Verifier.claims``."""
        known = batch.part(list(batch.queries), bounds_cache=BoundsCache(1 << 28))
        for _ in Crown().claims(known):
            pass
        yield from Bab().claims(known)


def ask(cases: Iterable[Case], methods: Mapping[str, float], report: Report) -> Report:
    """Put cases to each method, in batches; judge every answer, and the methods against each other.

    A report that stops at the first problem does so after the first batch that has one: a fault is soon caught.

    Args:
        cases: of any networks, those of one network in turn.
        methods: names, each with the seconds it has for each case.
        report: where problems and decisions are noted; returned.
    """
    for batch in portions(report.of(cases)):
        _ask(batch, methods, report)
    return report


def _ask(cases: Sequence[Case], methods: Mapping[str, float], report: Report) -> None:
    said: list[dict[Verdict, list[str]]] = [{} for _ in cases]
    for method, seconds in methods.items():
        asked = HandedOn() if method == HandedOn.name else make(method)
        for case, outcome, known in zip(
            cases, claims(asked, [case.query for case in cases], seconds), said, strict=True
        ):
            verdict = judge(case, method, outcome, report)
            if verdict is not None:
                known.setdefault(verdict, []).append(method)
    for case, known in zip(cases, said, strict=True):
        if len(known) > 1:
            report.note(case.name, f"methods contradict each other: {known}")
