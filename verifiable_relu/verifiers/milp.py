"""Mixed-integer programming with HiGHS: complete for piecewise-linear networks, in floating point.

One binary variable per unstable neuron (Tjeng, Xiao, Tedrake, Evaluating Robustness of Neural Networks with Mixed
Integer Programming, arXiv 1711.07356, section 4), and nothing at all for stable ones (``encoding``). For each
polytope of the unsafe set the largest row is minimised over the box, under the restriction that it is at most a
small positive ``slack``: *infeasible* then means that no point comes near the polytope, and a point on the way whose
margin is not positive ends the search. Between the two, and on any other status, the answer is unknown.

The rows are loosened by what rounding may change in them (``encoding``), so that every input of the box with the
values that the network has there is a solution of the program as it is written down. That HiGHS sees it is not proved:
its tolerances are absolute, so all variables and rows are scaled to their ranges (``_Model``) and loosened by far more
than these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import highspy
import numpy as np
from highspy import HighsModelStatus as Status
from scipy import sparse

from verifiable_relu.errors import OutOfTime, UnsupportedError
from verifiable_relu.spec.property import Polytope, Property, Query, RowBatch
from verifiable_relu.verifiers.attack import claim
from verifiable_relu.verifiers.base import SILENT, Budget, Outcome, Progress, Reason, Trust, Verdict
from verifiable_relu.verifiers.encoding import Forms, Problem, solve_each, supervised
from verifiable_relu.verifiers.root import NONE, Roots

_SMALL = 1e-12
"""Coefficients below are left out (HiGHS ignores them at the latest here), and their rows loosened instead."""

_FAR = 1e15
"""Ends of rows beyond are set to this: from 1e20 on HiGHS would take them for none."""

_ROUNDING = 2.0**-51
"""Twice the unit roundoff for two operations."""


@dataclass(frozen=True)
class Milp:
    """Verification by HiGHS.

    Attributes:
        slack: an unsafe polytope is excluded only if no point satisfies its rows loosened by this much, relative
            to the largest change that one variable makes in a row.
        loose: so much, likewise relative, all rows are loosened, those of neurons too.
        feasibility: the solver's feasibility tolerance, for constraints and for integrality.
        threads: of the solver.
        seed: of the solver.
    """

    slack: float = 1e-6
    loose: float = 1e-8
    feasibility: float = 1e-9
    threads: int = 1
    seed: int = 0

    name: ClassVar[str] = "milp"

    def verify(
        self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT, roots: Roots = NONE
    ) -> list[Outcome]:
        return solve_each(self.name, queries, budget, progress, roots, self._solve, exact=False, bounds=True)

    def _solve(self, problem: Problem, left: Callable[[], float]) -> Outcome:
        # What is beyond float64 is found by looking for it.
        with np.errstate(over="ignore", invalid="ignore"):
            return self._excluded(problem, _Model(problem, left), left)

    def _excluded(self, problem: Problem, model: _Model, left: Callable[[], float]) -> Outcome:
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
        self, problem: Problem, model: _Model, polytope: Polytope, left: Callable[[], float], loose: float | None
    ) -> Outcome:
        """Look for a point whose output lies in one polytope; unsat if there is none near it."""
        query, part = problem.query, replace(problem.query.property, unsafe=(polytope,))
        candidates = _Candidates(query, part, problem.query.property, model)
        if not polytope:
            return candidates.at(query.property.box.lower, self.name) or _unknown(
                Reason.UNCONFIRMED, "any point should do"
            )
        solver = highspy.Highs()
        for option, value in self._options().items():
            if solver.setOptionValue(option, value) != highspy.HighsStatus.kOk:
                return _unknown(Reason.ERROR, f"HiGHS does not take {value!r} for its option '{option}'")
        if solver.passModel(model.program(polytope, self.slack, loose)) == highspy.HighsStatus.kError:
            return _unknown(Reason.ERROR, "HiGHS refuses the model")
        # The time is kept here alone: the clock that HiGHS goes by may be set while it runs.
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

    def _options(self) -> dict[str, bool | int | float]:
        """HiGHS's options, by its names."""
        return {
            "output_flag": False,
            "log_to_console": False,
            "threads": self.threads,
            "random_seed": self.seed,
            "small_matrix_value": _SMALL,
            "primal_feasibility_tolerance": self.feasibility,
            "dual_feasibility_tolerance": self.feasibility,
            "mip_feasibility_tolerance": self.feasibility,
            "mip_rel_gap": 0.0,
            "mip_abs_gap": 0.0,
        }

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

    def __init__(self, query: Query, part: Property, whole: Property, model: _Model) -> None:
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


class _Model:
    """The constraints that all polytopes share, over variables between −1 and 1.

    HiGHS's tolerances are absolute. So an input is c + r·e, e being the variable, and the two parts of an unstable
    neuron are multiples of their upper bounds; every row is divided by its largest coefficient. All factors are powers
    of two, and a network whose layers are rescaled by such makes the same program. Columns: inputs, then for each
    unstable neuron positive, negative, binary.

    Args:
        problem: with finite bounds of every value.
        left: the seconds left.

    Raises:
        UnsupportedError: if bounds are not finite, so that nothing can be scaled to them.
        OutOfTime: if the budget runs out.
    """

    def __init__(self, problem: Problem, left: Callable[[], float]) -> None:
        self._problem = problem
        self._left = left
        box = problem.query.property.box
        self.inputs = box.size
        self._column: dict[int, np.ndarray] = {}
        positive, negative = [], []
        at = 0
        for index, phase in problem.phases.items():
            chosen = phase.unstable
            self._column[index] = np.where(chosen, at + np.cumsum(chosen) - 1, -1)
            at += int(chosen.sum())
            positive.append(phase.upper[chosen])
            negative.append(-phase.lower[chosen])
        self.unstable = at
        self._center = np.clip(box.lower / 2 + box.upper / 2, box.lower, box.upper)
        below, above = self._center - box.lower, box.upper - self._center
        parts = np.concatenate([*positive, *negative, np.zeros(0)])
        if not (np.isfinite(below + above).all() and np.isfinite(parts).all()):
            raise UnsupportedError("the bounds of inputs or pre-activations are not finite")
        self._radius = _exponent(np.maximum(below, above))
        self._parts = _exponent(parts)
        # Rounded up: the true ends may be half a unit further away.
        ends = (np.ldexp(np.nextafter(side, np.inf), -self._radius) for side in (below, above))
        self._below, self._above = (np.where(box.lower < box.upper, end, 0.0) for end in ends)
        self._positive, self._negative = np.split(np.ldexp(parts, -self._parts), 2)
        self._system = self._rows()

    @property
    def columns(self) -> int:
        """Number of variables without the objective's."""
        return self.inputs + 3 * self.unstable

    def point(self, solution: np.ndarray) -> np.ndarray:
        """The inputs of a solution."""
        return self._center + np.ldexp(solution[: self.inputs], self._radius)

    def _scaled(self, forms: Forms, own: np.ndarray | None) -> _Rows:
        """Forms over the columns, less the neuron that each is the pre-activation of, if there is one.

        Args:
            forms: the forms.
            own: (rows,) which unstable neuron a row's is.
        """
        count = len(forms.constant.numbers)
        error = np.asarray(forms.error.numbers, np.float64)
        constant = np.asarray(forms.constant.numbers, np.float64)
        blocks: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

        def add(a: np.ndarray, columns: np.ndarray, exponent: np.ndarray) -> None:
            row, column = np.nonzero(a)
            blocks.append((row, columns[column], np.ldexp(a[row, column], exponent[column])))

        positive, negative = np.split(self._parts, 2)
        for index, term in forms.terms.items():
            if index == 0:
                moved, size = term.numbers @ self._center, np.abs(term.numbers) @ np.abs(self._center)
                error = error + _ROUNDING * (self.inputs + 4) * (size + np.abs(constant))
                constant = constant + moved
                add(term.numbers, np.arange(self.inputs), self._radius)
                continue
            chosen = np.flatnonzero(self._problem.phases[index].unstable)
            which = self._column[index][chosen]
            a = term.numbers[:, chosen]
            add(a, self.inputs + which, positive[which])
            below = -a * self._problem.folding.slopes(index).numbers[chosen]
            error = error + _ROUNDING * (np.abs(below) @ np.ldexp(1.0, negative[which]))
            add(below, self.inputs + self.unstable + which, negative[which])
        if own is not None:
            rows = np.arange(count)
            blocks.append((rows, self.inputs + own, -np.ldexp(1.0, positive[own])))
            blocks.append((rows, self.inputs + self.unstable + own, np.ldexp(1.0, negative[own])))
        row, column, value = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        largest = np.zeros(count)
        np.maximum.at(largest, row, np.abs(value))
        scale = _exponent(largest)
        value = np.ldexp(value, -scale[row])
        small = np.abs(value) <= _SMALL
        lost = np.bincount(row[small], np.abs(value[small]), count)
        matrix = sparse.csr_array((value[~small], (row[~small], column[~small])), shape=(count, self.columns))
        # Numbers too small for float64 may have been lost on the way.
        slack = np.ldexp(error, -scale) + 2 * lost + np.ldexp(1e-300, -scale)
        found = _Rows(matrix, np.ldexp(constant, -scale), slack, scale)
        if not all(np.isfinite(part).all() for part in (value, found.constant, found.slack)):
            raise UnsupportedError("the numbers of the program are beyond float64")
        return found

    def _rows(self) -> _System:
        """One equation per unstable neuron, and two rows that let its binary choose a side."""
        eye = sparse.eye_array(self.unstable, format="csr")
        nothing = sparse.csr_array((self.unstable, self.inputs))
        zero = sparse.csr_array((self.unstable, self.unstable))
        blocks, constants, slacks = [sparse.csr_array((0, self.columns))], [np.zeros(0)], [np.zeros(0)]
        for index, chosen, forms in self._problem.folding.neurons(self._problem.phases, self._problem.sizes):
            if self._left() <= 0:
                raise OutOfTime
            rows = self._scaled(forms, self._column[index][chosen])
            blocks.append(rows.matrix)
            constants.append(rows.constant)
            slacks.append(rows.slack)
        # positive − upper·binary ≤ 0 and negative − (−lower)·(1 − binary) ≤ 0.
        on = sparse.hstack([nothing, eye, zero, -sparse.diags_array(self._positive)], format="csr")
        off = sparse.hstack([nothing, zero, eye, sparse.diags_array(self._negative)], format="csr")
        constant, none = np.concatenate(constants), np.zeros(self.unstable)
        return _System(
            sparse.vstack([*blocks, on, off], format="csr"),
            np.concatenate([-constant, np.full(2 * self.unstable, -np.inf)]),
            np.concatenate([-constant, none, self._negative]),
            np.concatenate([*slacks, none, none]),
        )

    def program(self, polytope: Polytope, slack: float, loose: float | None) -> highspy.HighsLp:
        """Minimise t in [−1, slack], where A·y − b ≤ t for every row of the polytope, divided by its scale.

        All rows are loosened by ``loose``, and by what rounding may change in them; None leaves them as they are.
        """
        network, problem = self._problem.query.network, self._problem
        batch = RowBatch.of([replace(problem.query.property, unsafe=(polytope,))], network.output_size)
        # Parts that stand for what float64 does not hold of a coefficient are in half-spaces of their own.
        if len(batch.owner) > 1:
            raise UnsupportedError("coefficients of the property have more digits than float64")
        if not len(batch.bound):
            raise UnsupportedError("the numbers of the property are beyond float64")
        last = len(network.nodes) - 1
        forms = problem.folding.pull_back(
            last, problem.folding.number(batch.matrix.numpy()), problem.phases, problem.sizes
        )
        rows = self._scaled(forms, None)
        bound = np.ldexp(batch.bound.numpy(), -rows.scale)
        rounding = _ROUNDING * (np.abs(bound) + np.abs(rows.constant))
        objective = sparse.csr_array(-np.ones((len(bound), 1)))
        matrix = sparse.vstack(
            [
                sparse.hstack([self._system.matrix, sparse.csr_array((len(self._system.lower), 1))]),
                sparse.hstack([rows.matrix, objective]),
            ],
            format="csr",
        )
        lower = np.concatenate([self._system.lower, np.full(len(bound), -np.inf)])
        upper = np.concatenate([self._system.upper, bound - rows.constant])
        if np.isnan(upper).any():
            raise UnsupportedError("the numbers of the program are beyond float64")
        if loose is not None:
            outward = np.concatenate([self._system.slack, rows.slack + rounding]) + loose
            lower, upper = lower - outward, upper + outward
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self.columns + 1, len(lower)
        lp.col_cost_ = np.concatenate([np.zeros(self.columns), [1.0]])
        lp.col_lower_ = np.concatenate([-self._below, np.zeros(3 * self.unstable), [-1.0]])
        lp.col_upper_ = np.concatenate([self._above, self._positive, self._negative, np.ones(self.unstable), [slack]])
        lp.row_lower_, lp.row_upper_ = _within(lower), _within(upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_, lp.a_matrix_.index_ = matrix.indptr, matrix.indices
        lp.a_matrix_.value_ = matrix.data
        integral, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        lp.integrality_ = [real] * (self.columns - self.unstable) + [integral] * self.unstable + [real]
        return lp


@dataclass(frozen=True, eq=False)
class _System:
    """lower ≤ matrix·columns ≤ upper, where each row may be off by ``slack``."""

    matrix: sparse.csr_array
    lower: np.ndarray
    upper: np.ndarray
    slack: np.ndarray


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows over the columns, divided by 2^scale: matrix·columns + constant, off by at most ``slack``."""

    matrix: sparse.csr_array
    constant: np.ndarray
    slack: np.ndarray
    scale: np.ndarray


def _exponent(sizes: np.ndarray) -> np.ndarray:
    """k of the least power of two 2^k above each size; 0 for a size of 0."""
    return np.frexp(sizes)[1]


def _within(ends: np.ndarray) -> np.ndarray:
    """Row ends that HiGHS takes for finite numbers: rows themselves are sums of numbers of size 1 at most."""
    return np.where(np.isinf(ends), ends, np.clip(ends, -_FAR, _FAR))
