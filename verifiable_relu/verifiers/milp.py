"""``milp``: mixed-integer programming with HiGHS, complete for piecewise-linear networks, in floating point.

The program is that of the folded system (``bab.program``), with one binary variable per unstable neuron and nothing at
all for stable ones. For each polytope of the unsafe set the largest row is minimised over the box, under the
restriction that it is at most a small positive ``slack``: *infeasible* then means that no point comes near the
polytope, and a point on the way whose margin is not positive ends the search. Between the two, and on any other status,
the answer is unknown.

The rows are loosened by what rounding may change in them, so that every input of the box with the values that the
network has there is a solution of the program as it is written down. That HiGHS sees it is not proved: its tolerances
are absolute, so that all variables and rows are scaled to their ranges, and loosened by far more than these. HiGHS
hands out no proof, so an *infeasible* is proved again by the trees of branch and bound over the same system, whose
bounds account for rounding. Where that does not succeed in a part of the time left, *unsat* is HiGHS's word, and
labelled ``Trust.FLOAT``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch

from verifiable_relu.bounds import Ascent
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.verifiers.bab.program import SMALL, Program
from verifiable_relu.verifiers.bab.query import FoldedQuery
from verifiable_relu.verifiers.bab.search import QuerySearch, Schedule, WitnessCheck
from verifiable_relu.verifiers.bab.slopes import Slopes
from verifiable_relu.verifiers.bab.tree import Branching
from verifiable_relu.verifiers.bab.verifier import BoundedBoxes, Decider
from verifiable_relu.verifiers.base import PATIENCE, Outcome, Reason, TimeBudget, Trust, Verdict, fault
from verifiable_relu.verifiers.solvers.highs import HIGHS, HighsResult, HighsTask


@dataclass(frozen=True)
class Milp(Decider):
    """Verification by HiGHS.

    Attributes:
        slack: an unsafe polytope is excluded only if no point satisfies its rows loosened by this much, relative
            to the largest change that one variable makes in a row.
        loose: by this much, relative in the same way, all rows are loosened, those of neurons too.
        feasibility: the solver's feasibility tolerance, for constraints and for integrality.
        intermediate: the search for bounds of the neurons that CROWN leaves unstable: they are what the program is
            scaled to, and each neuron that becomes stable halves the solver's work.
        slopes: the search for the slopes of each relaxation, over which trees are searched.
        again: the part of the time left that may be spent on proving again what HiGHS found infeasible.
        threads: of the solver.
        seed: of the solver.
        process_memory: most bytes that the solver's process may have resident, its libraries included; None for half
            of the machine's memory.
    """

    slack: float = 1e-6
    loose: float = 1e-8
    feasibility: float = 1e-9
    intermediate: Ascent = Ascent(steps=6)  # noqa: RUF009 -- frozen
    slopes: Slopes = field(default_factory=Slopes, repr=False)
    again: float = 0.5
    threads: int = 1
    seed: int = 0
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
        undecided: Outcome | None = None
        for part in system.parts.values():
            program = Program(system.folded, part.rows)
            outcome = self._reach(system, program, candidates, work, self.loose)
            if outcome.reason is Reason.INCOMPLETE:
                # Loose rows have solutions beside the network's own. The rows as they are exclude nothing for certain.
                exactly = self._reach(system, program, candidates, work, None)
                outcome = exactly if exactly.verdict is Verdict.SAT else outcome
            if outcome.verdict is Verdict.SAT or outcome.reason is Reason.TIMEOUT:
                return outcome
            if outcome.verdict is Verdict.UNKNOWN:
                undecided = undecided or outcome
        return undecided or Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT)

    def _reach(
        self,
        system: FoldedQuery,
        program: Program,
        candidates: WitnessCheck,
        work: TimeBudget,
        loose: float | None,
    ) -> Outcome:
        """Look for a point whose output lies in one polytope; unsat if there is none near it."""
        mixed, seconds = program.mixed(self.slack, loose), work.left()
        if seconds <= 0:
            return _unknown(Reason.TIMEOUT, "the budget ran out")

        def judge(values: np.ndarray) -> bool:
            return candidates.near(system.folded.point(program.inputs(values)))

        try:
            task = HighsTask(mixed, self._options(), seconds)
            solved: HighsResult = HIGHS.call(task, seconds + PATIENCE, self.process_memory, judge)
        except (OutOfTime, MemoryError, CallFailed) as error:
            # A counterexample that was met on the way stands, however the search ended.
            return candidates.found or fault(error, self.name)
        if solved.status == "kOptimal":
            judge(solved.values)
        return candidates.found or self._read(solved)

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

    def _read(self, solved: HighsResult) -> Outcome:
        """What HiGHS's own status says; only *infeasible* excludes a polytope."""
        match solved.status:
            case status if excludes(status):
                return Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT)
            case "kTimeLimit" | "kInterrupt":
                return _unknown(Reason.TIMEOUT, "the budget ran out")
            case "kMemoryLimit":
                return _unknown(Reason.MEMORY, "HiGHS ran out of memory")
            case "kOptimal":
                detail = f"the least margin is within HiGHS's tolerances of zero ({solved.objective:.3g})"
                return _unknown(Reason.INCOMPLETE, detail)
            case status:
                return _unknown(Reason.INCOMPLETE, f"HiGHS failed: it ended with the status '{status}'")


def excludes(status: str) -> bool:
    """Whether this status of HiGHS means that a program has no solution."""
    return status == "kInfeasible"


def _unknown(reason: Reason, detail: str) -> Outcome:
    return Outcome.unknown(reason, Milp.name, detail)
