"""``smt``: z3 as a lazy SMT solver over the phases of unstable neurons, complete for piecewise-linear networks.

The phases are z3's propositions; what they mean is known to a theory (``theory``) that z3 consults through its user
propagator. Every clause that the theory hands over is proved by bounds in float64 with rounding accounted for; the
linear programs of HiGHS only suggest multipliers. A sub-problem in which every phase is decided, and that is within
rounding of the boundary, is asked of z3 in exact arithmetic (``smt``), and then its clause is z3's word.

*Unsat* says that the clauses have no model. z3's search says so, with what its propagator did; its solver for
propositional formulas, other code, must say the same of the bare clauses. For that step the verdict rests on z3, unless
resolution of the theory's own clauses along its tree leaves the empty clause, which it mostly does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from verifiable_relu.bounds import MEMORY, Ascent
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.settings import neutral
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.verifiers.bab.forest import Candidates
from verifiable_relu.verifiers.bab.strip import Slopes, Strip
from verifiable_relu.verifiers.bab.system import System, tree_bytes
from verifiable_relu.verifiers.base import (
    PATIENCE,
    SILENT,
    Budget,
    Outcome,
    Progress,
    Reason,
    Trust,
    Verdict,
    fault,
)
from verifiable_relu.verifiers.lazy.theory import Bounding, Counts, Theory
from verifiable_relu.verifiers.root import NONE, Roots
from verifiable_relu.verifiers.smt import STOPPED, Smt, exact_claim
from verifiable_relu.verifiers.solvers.phases import PHASES, Searched, Task
from verifiable_relu.verifiers.solving import INTERMEDIATE, Boxes, Problem, solve_each


@dataclass(frozen=True)
class LazySmt:
    """Verification by z3 over phases, and bounds as their theory.

    Attributes:
        intermediate: the search for bounds of the neurons that CROWN leaves unstable.
        slopes: the search for the slopes of each relaxation.
        bounding: how sub-problems are bounded.
        memory: a limit in bytes on what the sub-problems of a query hold.
        seed: of z3.
        process_memory: most bytes that z3's process may have resident, its libraries included; None for half of the
            machine's memory.
    """

    intermediate: Ascent = INTERMEDIATE
    slopes: Slopes = field(default_factory=Slopes)
    bounding: Bounding = field(default_factory=Bounding)
    memory: int = MEMORY
    seed: int = 0
    process_memory: int | None = None

    name: ClassVar[str] = "smt"

    @neutral()
    def verify(
        self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT, roots: Roots = NONE
    ) -> list[Outcome]:
        given = (self.name, queries, budget, progress, roots, self._solve, PHASES)
        return solve_each(*given, exact=True, bounds=True, intermediate=self.intermediate)

    def _solve(self, problem: Problem, left: Callable[[], float]) -> Outcome:
        """Go through the open polytopes; sat ends the search, unsat needs all of them excluded."""
        boxes, query = problem.boxes, problem.query
        assert boxes is not None
        # Branch and bound takes smooth neurons, too, but they have no phases.
        query.network.require_piecewise_linear()
        candidates = Candidates(query, self.name)
        rows = RowBatch.of([query.property], query.network.output_size)
        numbers = [number for number, lower in enumerate(boxes.lower.tolist()) if not lower > 0]
        if any(bool((rows.polytope != number).all()) for number in numbers):
            return candidates.anywhere() or Outcome.unknown(Reason.UNCONFIRMED, self.name, "any point should do")
        varying = int((query.property.box.lower < query.property.box.upper).sum())
        if tree_bytes(varying, problem.unstable) > self.memory / 2:
            detail = f"a relaxation of {problem.unstable} unstable neurons takes too much memory"
            return Outcome.unknown(Reason.MEMORY, self.name, detail)
        with torch.no_grad():
            search = _Search(self, problem, boxes, candidates, numbers, rows.origin.tolist(), left)
            return search.run()


class _Search:
    """The search of one query: each polytope of the unsafe set in turn.

    Args:
        method: the options.
        problem: the query.
        boxes: its bounds.
        candidates: where points are judged.
        numbers: of the open polytopes, as ``RowBatch`` counts polytopes.
        origin: by such a number, which polytope of the property it is or is a part of.
        left: tells how many seconds are left.
    """

    def __init__(
        self,
        method: LazySmt,
        problem: Problem,
        boxes: Boxes,
        candidates: Candidates,
        numbers: list[int],
        origin: list[int],
        left: Callable[[], float],
    ) -> None:
        self._method, self._problem, self._candidates, self._origin = method, problem, candidates, origin
        self._left = left
        self._exact = Smt(seed=method.seed, process_memory=method.process_memory)
        self._system = System.of(
            problem.query, boxes.relaxation, boxes.sample, numbers, method.slopes, lambda: left() <= 0
        )
        self._counts: list[Counts] = []
        self._referred: Outcome | None = None
        self._alone = True

    def run(self) -> Outcome:
        """The outcome, with what the search has cost."""
        undecided: Outcome | None = None
        for number in self._system.parts:
            outcome = self._reach(number)
            if outcome.verdict is Verdict.SAT or outcome.reason is Reason.TIMEOUT:
                return self._told(outcome)
            if outcome.verdict is Verdict.UNKNOWN:
                undecided = undecided or outcome
        margin = max(self._problem.margin, 0.0)
        return self._told(undecided or Outcome(Verdict.UNSAT, Reason.PROVED, self._method.name, Trust.ROUNDED, margin))

    def _told(self, outcome: Outcome) -> Outcome:
        """The outcome with the statistics of the search in its detail."""
        total = Counts.sum(self._counts)
        parts = [outcome.detail, str(total)]
        if outcome.verdict is Verdict.UNSAT:
            words = []
            if not self._alone:
                words.append("that the clauses have no model")
            if total.exactly:
                words.append(f"what holds of {total.exactly} sub-problems within rounding of the boundary")
            if words:
                parts.append(f"it is z3's word {' and '.join(words)}")
        return replace(outcome, detail="; ".join(part for part in parts if part), subproblems=total.bounded)

    def _reach(self, number: int) -> Outcome:
        """Look for a point whose output lies in one polytope; unsat if there is none."""
        part, method, left = self._system.parts[number], self._method, self._left
        self._referred = None
        theory = Theory(
            Strip(self._system.folded, part.rows, part.slopes),
            part.rows,
            self._reached,
            lambda split: self._exactly(number, split),
            left,
            method.bounding,
            method.memory // 2,
        )
        self._counts.append(theory.counts)
        # What ends with the first bound needs no search.
        theory.consult(bytes(self._system.folded.size))
        searched: Searched | None = None
        if not theory.over and not theory.refuted:
            seconds = max(left(), 0.0)
            task = Task(self._system.folded.size, tuple(theory.proven), seconds, method.seed)
            try:
                searched = PHASES.call(task, seconds + PATIENCE, method.process_memory, theory.consult)
                theory.counts.decisions, theory.counts.conflicts = searched.decisions, searched.conflicts
            except (OutOfTime, MemoryError, CallFailed) as error:
                return self._found() or fault(error, method.name)
        return self._found() or self._read(theory, searched)

    def _reached(self, e: Tensor) -> bool:
        """Whether one of some scaled inputs (points, n) is a counterexample, judged exactly where that is possible."""
        if self._candidates.reached(self._system.folded.point(e)):
            found = self._candidates.found
            assert found is not None and found.witness is not None
            self._candidates.found = exact_claim(self._problem.query, found.witness, self._method.name)
        return self._candidates.found is not None

    def _found(self) -> Outcome | None:
        """A counterexample, or the exact one that is none in floating point, or None."""
        return self._candidates.found or self._referred

    def _read(self, theory: Theory, searched: Searched | None) -> Outcome:
        """What the end of a search says that has met no counterexample."""
        name = self._method.name
        if theory.refuted:
            return Outcome(Verdict.UNSAT, Reason.PROVED, name, Trust.ROUNDED)
        if theory.ended is Reason.MEMORY:
            return Outcome.unknown(Reason.MEMORY, name, "open sub-problems took too much memory")
        if theory.ended is Reason.INCOMPLETE:
            return Outcome.unknown(Reason.INCOMPLETE, name, "a sub-problem is within rounding of the boundary")
        if searched is not None and searched.answer == "unsat":
            return self._confirmed(theory)
        if self._left() <= 0 or theory.over or searched is None or searched.reason in STOPPED:
            return Outcome.unknown(Reason.TIMEOUT, name, "the budget ran out")
        return Outcome.unknown(Reason.ERROR, name, f"z3 gave up: {searched.reason or searched.answer}")

    def _confirmed(self, theory: Theory) -> Outcome:
        """Unsat if z3's propositional solver, too, finds no model of the clauses that were proved."""
        self._alone = False
        method, seconds = self._method, max(self._left(), 0.0)
        task = Task(self._system.folded.size, tuple(theory.proven), seconds, method.seed, advised=False)
        try:
            searched: Searched = PHASES.call(task, seconds + PATIENCE, method.process_memory)
        except (OutOfTime, MemoryError, CallFailed) as error:
            return fault(error, method.name)
        if searched.answer == "unsat":
            return Outcome(Verdict.UNSAT, Reason.PROVED, method.name, Trust.ROUNDED)
        if searched.answer == "sat":
            return Outcome.unknown(Reason.ERROR, method.name, "z3's refutation does not follow from the clauses")
        return Outcome.unknown(Reason.TIMEOUT, method.name, "the budget ran out before the refutation was confirmed")

    def _exactly(self, number: int, split: Tensor) -> bool | None:
        """Decide a sub-problem, every neuron's phase (m,) being given, in exact arithmetic (``Theory``)."""
        places, polytope = self._system.folded.places, self._problem.query.property.unsafe[self._origin[number]]
        active = {(i, j): sign > 0 for (i, j), sign in zip(map(tuple, places.tolist()), split.tolist(), strict=True)}
        outcome = self._exact.under(self._problem, polytope, active, self._left)
        if outcome.verdict is Verdict.UNSAT:
            return True
        if outcome.verdict is Verdict.SAT or outcome.reason is Reason.UNCONFIRMED:
            self._referred = replace(outcome, method=self._method.name)
            return False
        return None
