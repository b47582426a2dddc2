"""``milp``: mixed-integer programming with HiGHS, complete for piecewise-linear networks, in floating point.

Variables are the inputs e, both parts of the pre-activations z of the unstable neurons, and for each neuron a binary d
that says which of its phases it is in (Tjeng, Xiao, Tedrake, Evaluating Robustness of Neural Networks with Mixed
Integer Programming, arXiv 1711.07356, section 4). For each polytope of the unsafe set the largest row is minimised over
the box, constrained to be at most ``exclusion_slack``: *infeasible* then means that no point
comes near the polytope, and a point on the way whose margin is not positive ends the search. Between the two, and on
any other status, the answer is unknown.

The rows are loosened by a bound of their rounding. Every input of the box with the network's values there
is then a solution of the program. That HiGHS sees it is not proved: its tolerances are absolute, and it takes no
coefficients above 1e15. So columns are multiples of powers of two that are about their largest values, every row is
divided by such a power that is about its largest coefficient, and rows are loosened by far more than the tolerances.
HiGHS hands out no proof, so an *infeasible* is proved again by the trees of branch and bound over the same system,
whose bounds account for rounding. Where that does not succeed in a part of the time left, *unsat* rests on HiGHS alone,
and is labelled ``Trust.FLOAT``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from scipy import sparse

from verifiable_relu.errors import CallFailed, OutOfTime, UnsupportedError
from verifiable_relu.rounding import OWN, SCALED_LOST
from verifiable_relu.search.bab.system import AffineForms, ReducedSystem
from verifiable_relu.search.bab.tree import Branching
from verifiable_relu.search.bab.verifier import QuerySearch, Schedule
from verifiable_relu.search.budget import OVERTIME_S, TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict, fault
from verifiable_relu.search.question import BoundedQuery, CompleteMethod, all_excluded
from verifiable_relu.search.solvers.workers import HIGHS, SMALL, HighsResult, HighsTask, MixedIntegerProgram
from verifiable_relu.search.witness import WitnessCheck

_FAR = 1e15  # Ends of rows beyond are set to this: from 1e20 on HiGHS would take them for none


@dataclass(frozen=True)
class Milp(CompleteMethod):
    """Verification by HiGHS."""

    # An unsafe polytope is excluded only if no point satisfies its rows loosened by this, relative to the largest
    # change that one variable makes in a row
    exclusion_slack: float = 1e-6
    row_slack: float = 1e-8  # All rows, those of neurons too, are loosened by this in the same way
    feasibility_tolerance: float = 1e-9  # HiGHS's own, of feasibility
    reproof_share: float = 0.5  # The part of the time left that proving again what HiGHS found infeasible may take
    ascent_steps: int = 6  # Each neuron that becomes stable halves the solver's work
    process_memory: int | None = None  # Most bytes of the solver's process; None for half of the machine's

    name: ClassVar[str] = "milp"

    def start(self) -> None:
        HIGHS.start()

    def decide(self, query: BoundedQuery, budget: TimeBudget) -> Outcome:
        witness = WitnessCheck(query.network, query.prop, self.name)
        with torch.no_grad():
            reduced = query.reduced(budget.over)
            if reduced is None:
                return witness.anywhere()
            parts = (self._excluded(reduced.system, part.rows, witness, budget) for part in reduced.parts.values())
            outcome = all_excluded(parts, Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT))
            if outcome.verdict is not Verdict.UNSAT:
                return outcome
            within = replace(budget.share(self.reproof_share), memory=budget.memory // 2, processes=1)
            found = QuerySearch(reduced, witness, Branching(), Schedule(), within).run()
        if witness.found is not None:
            return replace(witness.found, detail="a counterexample to what HiGHS called infeasible")
        margin = query.margin(found.lower)
        if margin > 0:
            return replace(outcome, trust=query.trust, margin=margin, detail="HiGHS's claim, proved again by bab")
        return replace(outcome, margin=0.0, detail="HiGHS's claim, not proved again by bab")

    def _excluded(self, system: ReducedSystem, rows: AffineForms, witness: WitnessCheck, budget: TimeBudget) -> Outcome:
        """Search for a point whose output lies in one polytope; *unsat* if there is none near it."""

        def judge(values: np.ndarray) -> bool:
            inputs = torch.from_numpy(values[: system.inputs].astype(np.float64))
            return witness.near(system.point(inputs[None]))

        def reach(loose: float | None) -> Outcome:
            program = mixed_integer_program(system, rows, self.exclusion_slack, loose)
            if (seconds := budget.left()) <= 0:
                return Outcome.unknown(Reason.TIMEOUT, self.name, "the time limit was reached")
            try:
                task = HighsTask(program, self.feasibility_tolerance, seconds)
                solved: HighsResult = HIGHS.call(task, seconds + OVERTIME_S, self.process_memory, judge)
            except (OutOfTime, MemoryError, CallFailed) as error:
                # A counterexample that was met on the way stands, however the search ended.
                return witness.found or fault(error, self.name)
            if solved.status == "kOptimal":
                judge(solved.values)
            return witness.found or self._read(solved)

        outcome = reach(self.row_slack)
        if outcome.reason is Reason.INCOMPLETE:
            # Loose rows have solutions that the network has not. The rows as they are exclude nothing for certain.
            exactly = reach(None)
            outcome = exactly if exactly.verdict is Verdict.SAT else outcome
        return outcome

    def _read(self, solved: HighsResult) -> Outcome:
        # Only *infeasible* excludes a polytope.
        reason, detail = Reason.INCOMPLETE, f"HiGHS failed: it ended with the status '{solved.status}'"
        match solved.status:
            case "kInfeasible":
                return Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT)
            case "kTimeLimit" | "kInterrupt":
                reason, detail = Reason.TIMEOUT, "the time limit was reached"
            case "kMemoryLimit":
                reason, detail = Reason.MEMORY, "HiGHS ran out of memory"
            case "kOptimal":
                detail = f"the least margin is within HiGHS's tolerances of zero ({solved.objective:.3g})"
        return Outcome.unknown(reason, self.name, detail)


def mixed_integer_program(
    system: ReducedSystem, rows: AffineForms, most: float, loose: float | None
) -> MixedIntegerProgram:
    """Minimise t in [−1, most], which all rows, each divided by its scale, are at most. Columns: e, p, q, d and t.

    The pre-activation of a neuron is p − q and its value p − slope·q, with p and q not negative; where the binary d
    is 1, the neuron is active, q = 0, and where it is 0, the neuron is inactive, p = 0.
    Every row is loosened by ``loose`` next to what its form may be off; None leaves all rows as they are. The system is
    on the CPU. Raises an ``UnsupportedError`` if a number is beyond float64.
    """
    n, m, count = system.inputs, system.size, len(rows)
    forms, own = AffineForms.cat([system.neurons, rows]), np.eye(m + count, m)
    lower, upper, neurons = system.lower.numpy(), system.upper.numpy(), forms.neurons.numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        width = np.concatenate([np.zeros(n, int), _exponent(upper), _exponent(-lower)])
        dense = np.hstack([forms.inputs.numpy(), neurons - own, own - neurons * system.slopes_below.numpy()])
        scaled = np.ldexp(dense, width)
        scale = _exponent(np.abs(scaled).max(axis=1, initial=0.0))
        scaled = np.ldexp(scaled, -scale[:, None])
        ends = np.ldexp(np.concatenate([upper, -lower]), -width[n:])
        constant, error = (np.ldexp(part.numpy(), -scale) for part in (-forms.constant, forms.error))
    # p ≤ u·d, and q ≤ −l·(1 − d).
    switch = sparse.vstack([sparse.diags_array(-ends[:m]), sparse.diags_array(ends[m:])])
    t = sparse.csr_array(np.concatenate([np.zeros(m), -np.ones(count)])[:, None])
    matrix = sparse.block_array(
        [
            [sparse.csr_array(scaled[:, :n]), sparse.csr_array(scaled[:, n:]), None, t],
            [None, sparse.eye_array(2 * m), switch, None],
        ],
        format="csr",
    )
    if not all(np.isfinite(part).all() for part in (matrix.data, constant, error, ends)):
        raise UnsupportedError("the numbers of the program are beyond float64")
    row_lower = np.concatenate([constant[:m], np.full(count + 2 * m, -np.inf)])
    row_upper = np.concatenate([constant, np.zeros(m), ends[m:]])
    lost = _leave_out_small(matrix)
    if loose is not None:
        outward = OWN * np.concatenate([error, np.zeros(2 * m)]) + 2 * lost + SCALED_LOST + loose
        row_lower, row_upper = row_lower - outward, row_upper + outward
    # Rows themselves are sums of numbers of size 1 at most.
    row_lower, row_upper = (
        np.where(np.isinf(ends), ends, np.clip(ends, -_FAR, _FAR)) for ends in (row_lower, row_upper)
    )
    return MixedIntegerProgram(
        cost=np.append(np.zeros(n + 3 * m), 1.0),
        lower=np.concatenate([-np.ones(n), np.zeros(3 * m), [-1.0]]),
        upper=np.concatenate([np.ones(n), ends, np.ones(m), [most]]),
        row_lower=row_lower,
        row_upper=row_upper,
        starts=matrix.indptr,
        columns=matrix.indices,
        entries=matrix.data,
        integral=np.repeat([False, True, False], [n + 2 * m, m, 1]),
    )


def _leave_out_small(matrix: sparse.csr_array) -> np.ndarray:
    """Set coefficients that HiGHS would ignore to 0, and return the sum of their magnitudes in each row."""
    small = np.abs(matrix.data) <= SMALL
    lost = np.bincount(sparse.coo_array(matrix).coords[0][small], np.abs(matrix.data[small]), matrix.shape[0])
    matrix.data[small] = 0.0
    matrix.eliminate_zeros()
    return lost


def _exponent(sizes: np.ndarray) -> np.ndarray:
    """Return k of the least power of two 2^k above each size; 0 for a size of 0."""
    return np.frexp(sizes)[1]
