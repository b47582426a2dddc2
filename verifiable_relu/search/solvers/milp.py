"""``milp``: mixed-integer programming with HiGHS, complete for piecewise-linear networks, in floating point.

The program is that of the reduced system (``program``), with one binary variable per unstable neuron and nothing at all
for stable ones. For each polytope of the unsafe set the largest row is minimised over the box, under the restriction
that it is at most a small positive ``slack``: *infeasible* then means that no point comes near the polytope, and a
point on the way whose margin is not positive ends the search. Between the two, and on any other status, the answer is
unknown.

The rows are loosened by what rounding may change in them, so that every input of the box with the network's values
there is a solution of the program. That HiGHS sees it is not proved: its tolerances are absolute, so that all variables
and rows are scaled to their ranges, and loosened by far more than these. HiGHS hands out no proof, so an *infeasible*
is proved again by the trees of branch and bound over the same system, whose bounds account for rounding. Where that
does not succeed in a part of the time left, *unsat* is HiGHS's word, and labelled ``Trust.FLOAT``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.search.bab.forms import AffineForms
from verifiable_relu.search.bab.query import ReducedQuery
from verifiable_relu.search.bab.search import QuerySearch, Schedule
from verifiable_relu.search.bab.tree import Branching
from verifiable_relu.search.bab.witness import WitnessCheck
from verifiable_relu.search.budget import PATIENCE, TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict, fault
from verifiable_relu.search.question import BoundedQuery, CompleteMethod, all_excluded
from verifiable_relu.search.solvers.highs import HIGHS, HighsResult, HighsTask
from verifiable_relu.search.solvers.program import mixed_integer_program


@dataclass(frozen=True)
class Milp(CompleteMethod):
    """Verification by HiGHS.

    Attributes:
        slack: an unsafe polytope is excluded only if no point satisfies its rows loosened by this, relative to the
            largest change that one variable makes in a row.
        loose: all rows, those of neurons too, are loosened by this in the same way.
        tolerance: HiGHS's own, of feasibility.
        again: the part of the time left that may be spent on proving again what HiGHS found infeasible.
        ascent_steps: as of ``CompleteMethod``: each neuron that becomes stable halves the solver's work.
        process_memory: the most bytes of resident memory of the solver's process; None for half of the machine's.
    """

    slack: float = 1e-6
    loose: float = 1e-8
    tolerance: float = 1e-9
    again: float = 0.5
    ascent_steps: int = 6
    process_memory: int | None = None

    name: ClassVar[str] = "milp"

    def start(self) -> None:
        HIGHS.start()

    def decide(self, query: BoundedQuery, budget: TimeBudget) -> Outcome:
        witness = WitnessCheck(query.network, query.prop, self.name)
        with torch.no_grad():
            system = query.reduced(budget.over)
            if system is None:
                return witness.anywhere()
            parts = (self._excluded(system, part.rows, witness, budget) for part in system.parts.values())
            outcome = all_excluded(parts, Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT))
            if outcome.verdict is not Verdict.UNSAT:
                return outcome
            within = replace(budget.share(self.again), memory=budget.memory // 2, processes=1)
            found = QuerySearch(system, witness, Branching(), Schedule(), within).run()
        if witness.found is not None:
            return replace(witness.found, detail="a counterexample to what HiGHS called infeasible")
        margin = query.margin(found.lower)
        if margin > 0:
            return replace(outcome, trust=query.trust, margin=margin, detail="HiGHS's claim, proved again by bab")
        return replace(outcome, margin=0.0, detail="it is HiGHS's word: bab did not prove it again")

    def _excluded(self, query: ReducedQuery, rows: AffineForms, witness: WitnessCheck, budget: TimeBudget) -> Outcome:
        outcome = self._reach(query, rows, witness, budget, self.loose)
        if outcome.reason is Reason.INCOMPLETE:
            # Loose rows have solutions that the network has not. The rows as they are exclude nothing for certain.
            exactly = self._reach(query, rows, witness, budget, None)
            outcome = exactly if exactly.verdict is Verdict.SAT else outcome
        return outcome

    def _reach(
        self, query: ReducedQuery, rows: AffineForms, witness: WitnessCheck, budget: TimeBudget, loose: float | None
    ) -> Outcome:
        """Look for a point whose output lies in one polytope; unsat if there is none near it."""
        system, program = query.system, mixed_integer_program(query.system, rows, self.slack, loose)
        if (seconds := budget.left()) <= 0:
            return Outcome.unknown(Reason.TIMEOUT, self.name, "the budget ran out")

        def judge(values: np.ndarray) -> bool:
            inputs = torch.from_numpy(values[: system.inputs].astype(np.float64))
            return witness.near(system.point(inputs[None]))

        try:
            task = HighsTask(program, self.tolerance, seconds)
            solved: HighsResult = HIGHS.call(task, seconds + PATIENCE, self.process_memory, judge)
        except (OutOfTime, MemoryError, CallFailed) as error:
            # A counterexample that was met on the way stands, however the search ended.
            return witness.found or fault(error, self.name)
        if solved.status == "kOptimal":
            judge(solved.values)
        return witness.found or self._read(solved)

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
