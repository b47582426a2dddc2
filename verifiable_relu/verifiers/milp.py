"""Mixed-integer programming with HiGHS: complete for piecewise-linear networks, in floating point.

One binary variable per unstable neuron (Tjeng, Xiao, Tedrake, Evaluating Robustness of Neural Networks with Mixed
Integer Programming, arXiv 1711.07356, section 4), and nothing at all for stable ones (``encoding``). For each
polytope of the unsafe set the largest row is minimised over the box, under the restriction that it is at most a
small positive ``slack``: *infeasible* then means that no point comes near the polytope, and a point on the way whose
margin is not positive ends the search. Between the two, and on any other status, the answer is unknown.

The rows are loosened by what rounding may change in them (``encoding``), so that every input of the box with the
values that the network has there is a solution of the program as it is written down. That HiGHS sees it is not proved:
its tolerances are absolute, so ``mixed_integer`` scales all variables and rows to their ranges and loosens them by far
more than these. HiGHS hands out no proof, so an *infeasible* is proved again by branch and bound (``bab``), whose
bounds account for rounding. Where that does not succeed in a part of the time left, *unsat* is HiGHS's word, and
labelled ``Trust.FLOAT``.

The bounds before neurons are what the program is scaled to and what its big-M rows consist of: slopes are searched for
them, which made HiGHS up to six times faster and one of four queries decidable. No starting point is given: a point
that is none of the unsafe set is no solution of the program, and one that is ends the search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from verifiable_relu.bounds import Ascent
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.settings import neutral
from verifiable_relu.spec.property import Polytope, Property, Query
from verifiable_relu.verifiers.attack import claim
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
from verifiable_relu.verifiers.mixed_integer import SMALL, Model
from verifiable_relu.verifiers.root import NONE, Roots
from verifiable_relu.verifiers.solvers.highs import HIGHS, Solved, Task
from verifiable_relu.verifiers.solving import INTERMEDIATE, Problem, solve_each


@dataclass(frozen=True)
class Milp:
    """Verification by HiGHS.

    Attributes:
        slack: an unsafe polytope is excluded only if no point satisfies its rows loosened by this much, relative
            to the largest change that one variable makes in a row.
        loose: so much, likewise relative, all rows are loosened, those of neurons too.
        feasibility: the solver's feasibility tolerance, for constraints and for integrality.
        intermediate: the search for bounds of the neurons that CROWN leaves unstable; None for none.
        again: the part of the time left that may be spent on proving again what HiGHS found infeasible.
        threads: of the solver.
        seed: of the solver.
        process_memory: most bytes that the solver's process may have resident, its libraries included; None for half
            of the machine's memory.
    """

    slack: float = 1e-6
    loose: float = 1e-8
    feasibility: float = 1e-9
    intermediate: Ascent | None = INTERMEDIATE
    again: float = 0.5
    threads: int = 1
    seed: int = 0
    process_memory: int | None = None

    name: ClassVar[str] = "milp"

    @neutral()
    def verify(
        self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT, roots: Roots = NONE
    ) -> list[Outcome]:
        given = (self.name, queries, budget, progress, roots, self._solve, HIGHS)
        return solve_each(*given, exact=False, bounds=True, intermediate=self.intermediate)

    def _solve(self, problem: Problem, left: Callable[[], float]) -> Outcome:
        # What is beyond float64 is found by looking for it.
        with np.errstate(over="ignore", invalid="ignore"):
            outcome = self._excluded(problem, Model(problem, left), left)
        return self._proved(problem, outcome, left) if outcome.verdict is Verdict.UNSAT else outcome

    def _proved(self, problem: Problem, claimed: Outcome, left: Callable[[], float]) -> Outcome:
        """What HiGHS claims, proved again or labelled; branch and bound may refute it, too."""
        # Most queries that get here need little of it, and most do not get here.
        from verifiable_relu.verifiers.bab import Bab

        (found,) = Bab().verify([problem.query], Budget([max(0.0, self.again * left())]))
        if found.verdict is Verdict.SAT:
            return replace(found, method=self.name, detail="a counterexample to what HiGHS called infeasible")
        if found.verdict is Verdict.UNSAT:
            return replace(
                claimed,
                trust=found.trust,
                margin=found.margin,
                detail="HiGHS's claim, proved again by bab",
            )
        return replace(claimed, detail="it is HiGHS's word: bab did not prove it again")

    def _excluded(self, problem: Problem, model: Model, left: Callable[[], float]) -> Outcome:
        """Go through the open polytopes; sat ends the search, unsat needs all of them excluded."""
        undecided: Outcome | None = None
        for polytope in problem.open:
            outcome = self._reach(problem, model, polytope, left, self.loose)
            if outcome.reason is Reason.INCOMPLETE:
                # Loose rows have solutions beside the network's own. The rows as they are exclude nothing for certain.
                exactly = self._reach(problem, model, polytope, left, None)
                outcome = exactly if exactly.verdict is Verdict.SAT else outcome
            if outcome.verdict is Verdict.SAT or outcome.reason is Reason.TIMEOUT:
                return outcome
            if outcome.verdict is Verdict.UNKNOWN:
                undecided = undecided or outcome
        return undecided or Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT, max(problem.margin, 0.0))

    def _reach(
        self, problem: Problem, model: Model, polytope: Polytope, left: Callable[[], float], loose: float | None
    ) -> Outcome:
        """Look for a point whose output lies in one polytope; unsat if there is none near it."""
        query, part = problem.query, replace(problem.query.property, unsafe=(polytope,))
        candidates = _Candidates(query, part, problem.query.property, model)
        if not polytope:
            return candidates.at(query.property.box.lower, self.name) or _unknown(
                Reason.UNCONFIRMED, "any point should do"
            )
        program, seconds = model.program(polytope, self.slack, loose), left()
        if seconds <= 0:
            return _unknown(Reason.TIMEOUT, "the budget ran out")
        solved: Solved | Outcome
        try:
            solved = HIGHS.call(
                Task(program, self._options(), seconds),
                seconds + PATIENCE,
                self.process_memory,
                lambda values: candidates.take(values, self.name) is not None,
            )
        except (OutOfTime, MemoryError, CallFailed) as error:
            solved = fault(error, self.name)
        # A counterexample that was met on the way stands, however the search ended.
        return candidates.found or (solved if isinstance(solved, Outcome) else self._read(solved, candidates))

    def _options(self) -> dict[str, bool | int | float]:
        """HiGHS's options, by its names."""
        return {
            "output_flag": False,
            "log_to_console": False,
            "threads": self.threads,
            "random_seed": self.seed,
            "small_matrix_value": SMALL,
            "primal_feasibility_tolerance": self.feasibility,
            "dual_feasibility_tolerance": self.feasibility,
            "mip_feasibility_tolerance": self.feasibility,
            "mip_rel_gap": 0.0,
            "mip_abs_gap": 0.0,
        }

    def _read(self, solved: Solved, candidates: _Candidates) -> Outcome:
        """What HiGHS's own status says; only *infeasible* excludes a polytope."""
        match solved.status:
            case status if excludes(status):
                return Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT)
            case "kTimeLimit" | "kInterrupt":
                return _unknown(Reason.TIMEOUT, "the budget ran out")
            case "kMemoryLimit":
                return _unknown(Reason.MEMORY, "HiGHS ran out of memory")
            case "kOptimal":
                found = candidates.take(solved.values, self.name)
                detail = f"the least margin is within HiGHS's tolerances of zero ({solved.objective:.3g})"
                return found or _unknown(Reason.INCOMPLETE, detail)
            case status:
                return _unknown(Reason.INCOMPLETE, f"HiGHS failed: it ended with the status '{status}'")


def excludes(status: str) -> bool:
    """Whether this status of HiGHS means that a program has no solution."""
    return status == "kInfeasible"


def _unknown(reason: Reason, detail: str) -> Outcome:
    return Outcome.unknown(reason, Milp.name, detail)


class _Candidates:
    """Points that the solver comes across; the first true counterexample is kept."""

    def __init__(self, query: Query, part: Property, whole: Property, model: Model) -> None:
        self._query = query
        self._part = part
        self._model = model
        # A point at a strict bound is none: such rows are held to a negative margin.
        self._strict = bool(whole.box.open_lower or whole.box.open_upper) or any(
            row.strict for polytope in part.unsafe for row in polytope
        )
        self.found: Outcome | None = None

    def take(self, solution: np.ndarray, name: str) -> Outcome | None:
        """Judge the inputs of one solution in float64."""
        return self.at(self._model.point(np.asarray(solution)), name)

    def at(self, point: np.ndarray, name: str) -> Outcome | None:
        """Judge an input in float64."""
        claimed = claim(self._query.network, self._part, point, name, {})
        if claimed is not None and claimed.witness is not None:
            inside = self._query.property.box.contains(claimed.witness)
            if inside and (not self._strict or (claimed.margin is not None and claimed.margin < 0)):
                self.found = claimed
        return self.found
