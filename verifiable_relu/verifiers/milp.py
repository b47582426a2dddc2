"""Mixed-integer programming with HiGHS: complete for piecewise-linear networks, in floating point.

One binary variable per unstable neuron (Tjeng, Xiao, Tedrake, Evaluating Robustness of Neural Networks with Mixed
Integer Programming, arXiv 1711.07356, section 4), and nothing at all for stable ones (``encoding``). For each
polytope of the unsafe set the largest row is minimised over the box, under the restriction that it is at most a
small positive ``slack``: *infeasible* then means that no point comes near the polytope, and a point on the way whose
margin is not positive ends the search. Between the two, and on any other status, the answer is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import highspy
import numpy as np
from highspy import HighsModelStatus as Status
from scipy import sparse

from verifiable_relu.spec.property import Polytope, Property, Query, RowBatch
from verifiable_relu.verifiers.attack import claim
from verifiable_relu.verifiers.base import SILENT, Budget, Outcome, Progress, Reason, Trust, Verdict
from verifiable_relu.verifiers.encoding import Forms, OutOfTime, Problem, solve_each, supervised

_SMALL = 1e-12
"""Coefficients below are left out (HiGHS ignores them at the latest here), and their rows loosened instead."""


@dataclass(frozen=True)
class Milp:
    """Verification by HiGHS.

    Attributes:
        slack: an unsafe polytope is excluded only if no point satisfies its rows loosened by this much, relative
            to a row's largest coefficient and bound.
        feasibility: the solver's feasibility tolerance, for constraints and for integrality.
        threads: of the solver.
        seed: of the solver.
    """

    slack: float = 1e-6
    feasibility: float = 1e-9
    threads: int = 1
    seed: int = 0

    name: ClassVar[str] = "milp"
    complete: ClassVar[bool] = True

    def verify(self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT) -> list[Outcome]:
        return solve_each(self.name, queries, budget, progress, self._solve, exact=False, bounds=True)

    def _solve(self, problem: Problem, left: Callable[[], float]) -> Outcome:
        """Go through the open polytopes; sat ends the search, unsat needs all of them excluded."""
        model = _Model(problem, left)
        undecided: Outcome | None = None
        for polytope in problem.open:
            outcome = self._reach(problem, model, polytope, left)
            if outcome.verdict is Verdict.SAT or outcome.reason is Reason.TIMEOUT:
                return outcome
            if outcome.verdict is Verdict.UNKNOWN:
                undecided = undecided or outcome
        return undecided or Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT, max(problem.margin, 0.0))

    def _reach(self, problem: Problem, model: _Model, polytope: Polytope, left: Callable[[], float]) -> Outcome:
        """Look for a point whose output lies in one polytope; unsat if there is none near it."""
        query, part = problem.query, replace(problem.query.property, unsafe=(polytope,))
        candidates = _Candidates(query, part, problem.query.property, model.inputs)
        if not polytope:
            return candidates.take(query.property.box.lower, self.name) or _unknown(
                Reason.UNCONFIRMED, "any point should do"
            )
        lp = model.program(polytope, self.slack)
        solver = highspy.Highs()
        for option, value in {
            "output_flag": False,
            "threads": self.threads,
            "random_seed": self.seed,
            "time_limit": left(),
            "small_matrix_value": _SMALL,
            "primal_feasibility_tolerance": self.feasibility,
            "dual_feasibility_tolerance": self.feasibility,
            "mip_feasibility_tolerance": self.feasibility,
            "mip_rel_gap": 0.0,
            "mip_abs_gap": 0.0,
        }.items():
            solver.setOptionValue(option, value)
        if solver.passModel(lp) == highspy.HighsStatus.kError:
            return _unknown(Reason.ERROR, "HiGHS refuses the model")
        stopped: list[bool] = []

        def improving(event: highspy.HighsCallbackEvent) -> None:
            candidates.take(np.array(event.data_out.mip_solution), self.name)

        def interrupt(event: highspy.HighsCallbackEvent) -> None:
            event.interrupt(bool(stopped or candidates.found))

        solver.cbMipImprovingSolution.subscribe(improving)
        solver.cbMipInterrupt.subscribe(interrupt)
        solver.cbSimplexInterrupt.subscribe(interrupt)
        answer = supervised(solver.run, lambda: stopped.append(True), left())
        if candidates.found:
            return candidates.found
        if answer is None or stopped:
            return _unknown(Reason.TIMEOUT, "the budget ran out")
        if answer == highspy.HighsStatus.kError:
            return _unknown(Reason.ERROR, "HiGHS failed")
        return self._read(solver, candidates)

    def _read(self, solver: highspy.Highs, candidates: _Candidates) -> Outcome:
        """What the status of a finished solver says; only *infeasible* excludes a polytope."""
        match solver.getModelStatus():
            case Status.kInfeasible:
                return Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT)
            case Status.kTimeLimit | Status.kInterrupt:
                return _unknown(Reason.TIMEOUT, "the budget ran out")
            case Status.kMemoryLimit:
                return _unknown(Reason.MEMORY, "HiGHS ran out of memory")
            case Status.kOptimal:
                found = candidates.take(np.array(solver.getSolution().col_value), self.name)
                detail = f"the least margin is within HiGHS's tolerances of zero ({solver.getObjectiveValue():.3g})"
                return found or _unknown(Reason.INCOMPLETE, detail)
            case status:
                return _unknown(Reason.ERROR, f"HiGHS ended with status '{solver.modelStatusToString(status)}'")


def _unknown(reason: Reason, detail: str) -> Outcome:
    return Outcome.unknown(reason, Milp.name, detail)


class _Candidates:
    """Points that the solver comes across; the first true counterexample is kept."""

    def __init__(self, query: Query, part: Property, whole: Property, inputs: int) -> None:
        self._query = query
        self._part = part
        self._inputs = inputs
        # A point at a strict bound is none: such rows are held to a negative margin.
        self._strict = bool(whole.box.open_lower or whole.box.open_upper) or any(
            row.strict for polytope in part.unsafe for row in polytope
        )
        self.found: Outcome | None = None

    def take(self, solution: np.ndarray, name: str) -> Outcome | None:
        """Judge the inputs of one solution in float64."""
        point = np.asarray(solution)[: self._inputs]
        claimed = claim(self._query.network, self._part, point, name, {})
        if claimed is not None and claimed.witness is not None:
            inside = self._query.property.box.contains(claimed.witness)
            if inside and (not self._strict or (claimed.margin is not None and claimed.margin < 0)):
                self.found = claimed
        return self.found


class _Model:
    """The constraints that all polytopes share: inputs, then for each unstable neuron positive, negative, binary."""

    def __init__(self, problem: Problem, left: Callable[[], float]) -> None:
        self._problem = problem
        self._left = left
        box = problem.query.property.box
        self.inputs = box.size
        self._magnitude = np.maximum(np.abs(box.lower), np.abs(box.upper))
        self._column: dict[int, np.ndarray] = {}
        positive, negative = [], []
        at = 0
        for index, phase in problem.phases.items():
            chosen = phase.unstable
            self._column[index] = np.where(chosen, at + np.cumsum(chosen) - 1, -1)
            at += int(chosen.sum())
            positive.append(phase.upper[chosen])
            negative.append(-phase.lower[chosen])
        self._positive = np.concatenate([np.zeros(0), *positive])
        self._negative = np.concatenate([np.zeros(0), *negative])
        if not (np.isfinite(self._positive).all() and np.isfinite(self._negative).all()):
            raise ArithmeticError("the bounds of a pre-activation are not finite")
        self.unstable = at
        self._matrix, self._lower, self._upper = self._rows()

    @property
    def columns(self) -> int:
        """Number of variables without the objective's."""
        return self.inputs + 3 * self.unstable

    def _sparse(self, forms: Forms) -> tuple[sparse.csr_array, np.ndarray]:
        """Forms over the columns, and for each row how much the coefficients left out may amount to."""
        count = len(forms.constant.numbers)
        dropped = np.zeros(count)
        blocks: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

        def add(a: np.ndarray, columns: np.ndarray, magnitude: np.ndarray) -> None:
            nonlocal dropped
            small = np.abs(a) <= _SMALL
            dropped = dropped + np.where(small, np.abs(a), 0.0) @ magnitude
            row, column = np.nonzero(~small)
            blocks.append((row, columns[column], a[row, column]))

        for index, term in forms.terms.items():
            if index == 0:
                add(term.numbers, np.arange(self.inputs), self._magnitude)
                continue
            chosen = np.flatnonzero(self._problem.phases[index].unstable)
            which = self._column[index][chosen]
            a = term.numbers[:, chosen]
            add(a, self.inputs + which, self._positive[which])
            slope = self._problem.folding.slopes(index).numbers[chosen]
            add(-a * slope, self.inputs + self.unstable + which, self._negative[which])
        row, column, value = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        return sparse.csr_array((value, (row, column)), shape=(count, self.columns)), dropped

    def _rows(self) -> tuple[sparse.csr_array, np.ndarray, np.ndarray]:
        """One equation per unstable neuron, and two rows that let its binary choose a side."""
        eye = sparse.eye_array(self.unstable, format="csr")
        nothing = sparse.csr_array((self.unstable, self.inputs))
        zero = sparse.csr_array((self.unstable, self.unstable))
        split = sparse.hstack([nothing, eye, -eye, zero], format="csr")
        blocks, constants, slacks = [sparse.csr_array((0, self.columns))], [np.zeros(0)], [np.zeros(0)]
        for _, _, forms in self._problem.folding.neurons(self._problem.phases):
            if self._left() <= 0:
                raise OutOfTime
            matrix, slack = self._sparse(forms)
            blocks.append(matrix)
            constants.append(forms.constant.numbers)
            slacks.append(slack)
        constant, slack = np.concatenate(constants), np.concatenate(slacks)
        # positive − upper·binary ≤ 0 and negative − (−lower)·(1 − binary) ≤ 0.
        on = sparse.hstack([nothing, eye, zero, -sparse.diags_array(self._positive)], format="csr")
        off = sparse.hstack([nothing, zero, eye, sparse.diags_array(self._negative)], format="csr")
        matrix = sparse.vstack([split - sparse.vstack(blocks), on, off], format="csr")
        free = np.full(2 * self.unstable, -np.inf)
        return (
            matrix,
            np.concatenate([constant - slack, free]),
            np.concatenate([constant + slack, np.zeros(self.unstable), self._negative]),
        )

    def program(self, polytope: Polytope, slack: float) -> highspy.HighsLp:
        """Minimise t in [−1, slack], where A·y − b ≤ t·scale for every row of the polytope."""
        network, box = self._problem.query.network, self._problem.query.property.box
        rows = RowBatch.of([replace(self._problem.query.property, unsafe=(polytope,))], network.output_size)
        folding = self._problem.folding
        a, bound = rows.matrix.numpy(), rows.bound.numpy()
        forms = folding.pull_back(len(network.nodes) - 1, folding.number(a), self._problem.phases)
        matrix, dropped = self._sparse(forms)
        scale = np.maximum(np.abs(a).max(1, initial=0.0), np.abs(bound))
        matrix = sparse.vstack(
            [
                sparse.hstack([self._matrix, sparse.csr_array((len(self._lower), 1))]),
                sparse.hstack([matrix, sparse.csr_array(-scale[:, None])]),
            ],
            format="csr",
        )
        limit = bound + dropped - forms.constant.numbers

        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self.columns + 1, len(self._lower) + len(bound)
        lp.col_cost_ = np.concatenate([np.zeros(self.columns), [1.0]])
        lp.col_lower_ = np.concatenate([box.lower, np.zeros(3 * self.unstable), [-1.0]])
        lp.col_upper_ = np.concatenate([box.upper, self._positive, self._negative, np.ones(self.unstable), [slack]])
        lp.row_lower_ = np.concatenate([self._lower, np.full(len(bound), -np.inf)])
        lp.row_upper_ = np.concatenate([self._upper, limit])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_, lp.a_matrix_.index_ = matrix.indptr, matrix.indices
        lp.a_matrix_.value_ = matrix.data
        integral, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        lp.integrality_ = [real] * (self.columns - self.unstable) + [integral] * self.unstable + [real]
        return lp
