"""``milp``: mixed-integer programming with HiGHS, complete for piecewise-linear networks, in floating point.

The program is that of the folded system (``bab.program``), with one binary variable per unstable neuron and nothing at
all for stable ones. For each polytope of the unsafe set the largest row is minimised over the box, under the
restriction that it is at most a small positive ``slack``: *infeasible* then means that no point comes near the
polytope, and a point on the way whose margin is not positive ends the search. Between the two, and on any other status,
the answer is unknown.

The rows are loosened by what rounding may change in them, so that every input of the box with the network's values
there is a solution of the program. That HiGHS sees it is not proved: its tolerances are absolute, so that all variables
and rows are scaled to their ranges, and loosened by far more than these. HiGHS hands out no proof, so an *infeasible*
is proved again by the trees of branch and bound over the same system, whose bounds account for rounding. Where that
does not succeed in a part of the time left, *unsat* is HiGHS's word, and labelled ``Trust.FLOAT``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch

from verifiable_relu.bounds import Ascent
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.search.solvers.highs import HIGHS, HighsResult, HighsTask
from verifiable_relu.verifiers.bab.program import SMALL, Program
from verifiable_relu.verifiers.bab.query import FoldedQuery
from verifiable_relu.verifiers.bab.search import QuerySearch, Schedule, WitnessCheck
from verifiable_relu.verifiers.bab.slopes import Slopes
from verifiable_relu.verifiers.bab.tree import Branching
from verifiable_relu.verifiers.bab.verifier import BoundedBoxes, Decider
from verifiable_relu.verifiers.base import PATIENCE, Outcome, Reason, TimeBudget, Trust, Verdict, fault

_OPTIONS = {
    "output_flag": False,
    "log_to_console": False,
    "threads": 1,
    "random_seed": 0,
    "small_matrix_value": SMALL,
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 0.0,
}


@dataclass(frozen=True)
class Milp(Decider):
    """Verification by HiGHS.

    Attributes:
        intermediate: the search for bounds of unstable neurons: each that becomes stable halves the solver's work.
        slopes: the search for the slopes of each relaxation, over which trees are searched.
        slack: an unsafe polytope is excluded only if no point satisfies its rows loosened by this, relative to the
            largest change that one variable makes in a row.
        loose: all rows, those of neurons too, are loosened by this in the same way.
        tolerance: HiGHS's own, of feasibility.
        again: the part of the time left that may be spent on proving again what HiGHS found infeasible.
        process_memory: the most bytes of resident memory of the solver's process; None for half of the machine's.
    """

    intermediate: Ascent = Ascent(steps=6)  # noqa: RUF009 -- frozen
    slopes: Slopes = field(default_factory=Slopes, repr=False)
    slack: float = 1e-6
    loose: float = 1e-8
    tolerance: float = 1e-9
    again: float = 0.5
    process_memory: int | None = None

    name: ClassVar[str] = "milp"

    def start(self) -> None:
        HIGHS.start()

    def decide(self, bounds: BoundedBoxes, number: int, work: TimeBudget) -> Outcome:
        candidates = WitnessCheck(bounds.queries[number], self.name)
        with torch.no_grad():
            system = bounds.system(number, self.slopes, work)
            if system is None:
                return candidates.anywhere()
            outcome = self._excluded(system, candidates, work)
            if outcome.verdict is not Verdict.UNSAT:
                return outcome
            within = replace(work.share(self.again), memory=work.memory // 2, processes=1)
            found = QuerySearch(system, candidates, Branching(), Schedule(), within).run()
        bounds.prove(number, found.lower)
        if candidates.found is not None:
            return replace(candidates.found, detail="a counterexample to what HiGHS called infeasible")
        margin = bounds.margin(number)
        if margin > 0:
            return replace(outcome, trust=bounds.trust, margin=margin, detail="HiGHS's claim, proved again by bab")
        return replace(outcome, margin=0.0, detail="it is HiGHS's word: bab did not prove it again")

    def _excluded(self, system: FoldedQuery, candidates: WitnessCheck, work: TimeBudget) -> Outcome:
        """Go through the open polytopes; sat ends the search, unsat needs all of them excluded."""
        result = Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT)
        for part in system.parts.values():
            program = Program(system.folded, part.rows)
            outcome = self._reach(system, program, candidates, work, self.loose)
            if outcome.reason is Reason.INCOMPLETE:
                # Loose rows have solutions beside the network's own. The rows as they are exclude nothing for certain.
                exactly = self._reach(system, program, candidates, work, None)
                outcome = exactly if exactly.verdict is Verdict.SAT else outcome
            if outcome.verdict is Verdict.SAT or outcome.reason is Reason.TIMEOUT:
                return outcome
            if outcome.verdict is Verdict.UNKNOWN and result.verdict is Verdict.UNSAT:
                result = outcome
        return result

    def _reach(
        self, system: FoldedQuery, program: Program, candidates: WitnessCheck, work: TimeBudget, loose: float | None
    ) -> Outcome:
        """Look for a point whose output lies in one polytope; unsat if there is none near it."""
        mixed, seconds = program.mixed(self.slack, loose), work.left()
        if seconds <= 0:
            return Outcome.unknown(Reason.TIMEOUT, self.name, "the budget ran out")

        def judge(values: np.ndarray) -> bool:
            return candidates.near(system.folded.point(program.inputs(values)))

        try:
            kinds = ("primal", "dual", "mip")
            options = _OPTIONS | {f"{kind}_feasibility_tolerance": self.tolerance for kind in kinds}
            task = HighsTask(mixed, options, seconds)
            solved: HighsResult = HIGHS.call(task, seconds + PATIENCE, self.process_memory, judge)
        except (OutOfTime, MemoryError, CallFailed) as error:
            # A counterexample that was met on the way stands, however the search ended.
            return candidates.found or fault(error, self.name)
        if solved.status == "kOptimal":
            judge(solved.values)
        return candidates.found or self._read(solved)

    def _read(self, solved: HighsResult) -> Outcome:
        # Only *infeasible* excludes a polytope.
        reason, detail = Reason.INCOMPLETE, f"HiGHS failed: it ended with the status '{solved.status}'"
        match solved.status:
            case "kInfeasible":
                return Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT)
            case "kTimeLimit" | "kInterrupt":
                reason, detail = Reason.TIMEOUT, "the budget ran out"
            case "kMemoryLimit":
                reason, detail = Reason.MEMORY, "HiGHS ran out of memory"
            case "kOptimal":
                detail = f"the least margin is within HiGHS's tolerances of zero ({solved.objective:.3g})"
        return Outcome.unknown(reason, self.name, detail)
