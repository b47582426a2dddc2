"""Marabou (Wu et al., Marabou 2.0: A Versatile Formal Analyzer of Neural Networks, arXiv 2401.14461) as a verifier.

It is told the bounds of unstable neurons that this package has found, and nothing of stable ones, which are folded away
(``encoding``). Its arithmetic is floating point with tolerances, and what it says comes without a proof that is checked
here: *unsat* is labelled ``Trust.FLOAT``. The unsafe rows are loosened a little, so that its tolerances are less
likely to exclude a point. A *sat* is claimed only where float64 confirms the point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from scipy import sparse

from verifiable_relu.bounds import Ascent
from verifiable_relu.errors import CallFailed, OutOfTime, UnsupportedError
from verifiable_relu.settings import neutral
from verifiable_relu.spec.property import Polytope, Query
from verifiable_relu.spec.row_batch import RowBatch
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
from verifiable_relu.verifiers.encoding import Forms
from verifiable_relu.verifiers.root import NONE, Roots
from verifiable_relu.verifiers.solvers.marabou import MARABOU, Rows, Solved, Task
from verifiable_relu.verifiers.solving import INTERMEDIATE, Problem, solve_each


@dataclass(frozen=True)
class Marabou:
    """Verification by Marabou, which is an optional dependency.

    Attributes:
        loose: by this part of the largest coefficient, or of the bound, unsafe rows are loosened.
        deep: by this part they are tightened where a point was found that float64 does not confirm.
        intermediate: the search for bounds of the neurons that CROWN leaves unstable; None for none.
        process_memory: most bytes that Marabou's process may have resident, its libraries included; None for half of
            the machine's memory.
    """

    loose: float = 1e-6
    deep: float = 1e-4
    intermediate: Ascent | None = INTERMEDIATE
    process_memory: int | None = None

    name: ClassVar[str] = "marabou"

    @neutral()
    def verify(
        self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT, roots: Roots = NONE
    ) -> list[Outcome]:
        """As ``Verifier.verify``."""
        given = (self.name, queries, budget, progress, roots, self._solve, MARABOU)
        return solve_each(*given, exact=False, bounds=True, intermediate=self.intermediate)

    def _solve(self, problem: Problem, left: Callable[[], float]) -> Outcome:
        """Go through the open polytopes; sat ends the search, unsat needs all of them excluded."""
        undecided: Outcome | None = None
        # What is beyond float64 is found by looking for it.
        with np.errstate(over="ignore", invalid="ignore"):
            system = _System(problem, left)
            nodes = 0
            for polytope in problem.open:
                outcome, visited = self._reach(problem, system, polytope, self.loose, left)
                nodes += visited
                if outcome.reason is Reason.INCOMPLETE:
                    # A point that is just feasible lies on the boundary, give or take its tolerances.
                    deeper, visited = self._reach(problem, system, polytope, -self.deep, left)
                    nodes += visited
                    outcome = deeper if deeper.verdict is Verdict.SAT else outcome
                if outcome.verdict is Verdict.SAT or outcome.reason is Reason.TIMEOUT:
                    return replace(
                        outcome, detail=f"{outcome.detail} after {nodes} sub-problems".strip(), subproblems=nodes
                    )
                if outcome.verdict is Verdict.UNKNOWN:
                    undecided = undecided or outcome
        proved = Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT, max(problem.margin, 0.0))
        proved = replace(proved, detail=f"it is Marabou's word after {nodes} sub-problems")
        return replace(undecided or proved, subproblems=nodes)

    def _reach(
        self, problem: Problem, system: _System, polytope: Polytope, loose: float, left: Callable[[], float]
    ) -> tuple[Outcome, int]:
        """Look for a point whose output lies in one polytope; also how many nodes that took."""
        query = problem.query
        if not polytope:
            found = claim(query.network, query.property, query.property.box.lower, self.name, {})
            return found or Outcome.unknown(Reason.UNCONFIRMED, self.name, "any point should do"), 0
        most = system.unsafe(polytope, loose)
        seconds = left()
        if seconds <= 0:
            return Outcome.unknown(Reason.TIMEOUT, self.name, "the budget ran out"), 0
        # It takes whole seconds, and 0 for no limit.
        task = system.task(most, max(1, math.ceil(seconds)))
        try:
            solved: Solved = MARABOU.call(task, seconds + PATIENCE, self.process_memory)
        except (OutOfTime, MemoryError, CallFailed) as error:
            return fault(error, self.name), 0
        return self._read(solved, query, system.inputs), solved.nodes

    def _read(self, solved: Solved, query: Query, inputs: int) -> Outcome:
        match solved.answer:
            case "unsat":
                return Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT)
            case "sat":
                found = claim(query.network, query.property, solved.values[:inputs], self.name, {})
                detail = "Marabou's point is within its tolerances of the boundary, on the safe side"
                return found or Outcome.unknown(Reason.INCOMPLETE, self.name, detail)
            case "TIMEOUT":
                return Outcome.unknown(Reason.TIMEOUT, self.name, "the budget ran out")
            case answer:
                return Outcome.unknown(Reason.ERROR, self.name, f"Marabou ended with '{answer}'")


class _System:
    """The constraints that all polytopes share. Variables: inputs, then all unstable neurons' pre-activations, then
    their values.

    Args:
        problem: with finite bounds of every value.
        left: the seconds left.

    Raises:
        UnsupportedError: if bounds are not finite, or a slope below zero is not in [0, 1).
        OutOfTime: if the budget runs out.
    """

    def __init__(self, problem: Problem, left: Callable[[], float]) -> None:
        self._problem = problem
        box = problem.query.property.box
        self.inputs = box.size
        self._column: dict[int, np.ndarray] = {}
        lower, upper, slopes = [], [], []
        at = 0
        for index, phase in problem.phases.items():
            chosen = phase.unstable
            self._column[index] = np.where(chosen, at + np.cumsum(chosen) - 1, -1)
            at += int(chosen.sum())
            lower.append(phase.lower[chosen])
            upper.append(phase.upper[chosen])
            slopes.append(np.asarray(problem.folding.slopes(index).numbers, np.float64)[chosen])
        self.unstable = at
        none = np.zeros(0)
        before = np.concatenate([*lower, none]), np.concatenate([*upper, none])
        self._slopes = np.concatenate([*slopes, none])
        if not ((self._slopes >= 0) & (self._slopes < 1)).all():
            raise UnsupportedError("Marabou takes ReLUs with slopes below zero from 0 to 1 alone")
        after = self._slopes * before[0], before[1]
        self._lower, self._upper = (
            np.concatenate([np.asarray(end, np.float64), b, a])
            for end, b, a in zip((box.lower, box.upper), before, after, strict=True)
        )
        if not (np.isfinite(self._lower) & np.isfinite(self._upper)).all():
            raise UnsupportedError("the bounds of inputs or pre-activations are not finite")
        blocks, numbers = [sparse.csr_array((0, self._columns))], [none]
        for index, chosen_, forms in problem.folding.neurons(problem.phases, problem.sizes):
            if left() <= 0:
                raise OutOfTime
            own = self._column[index][chosen_]
            rows = np.arange(len(own))
            minus = sparse.csr_array((-np.ones(len(own)), (rows, self.inputs + own)), shape=(len(own), self._columns))
            matrix, constant = self._over_variables(forms)
            blocks.append(matrix + minus)
            numbers.append(-constant)
        self._equal = _rows(sparse.vstack(blocks, format="csr"), np.concatenate(numbers))

    @property
    def _columns(self) -> int:
        return self.inputs + 2 * self.unstable

    def _over_variables(self, forms: Forms) -> tuple[sparse.csr_array, np.ndarray]:
        """The coefficients of forms, and their constants."""
        constant = np.asarray(forms.constant.numbers, np.float64)
        matrix = sparse.lil_array((len(constant), self._columns))
        for index, term in forms.terms.items():
            a = np.asarray(term.numbers, np.float64)
            if index == 0:
                matrix[:, : self.inputs] = a
                continue
            chosen = np.flatnonzero(self._problem.phases[index].unstable)
            matrix[:, self.inputs + self.unstable + self._column[index][chosen]] = a[:, chosen]
        return matrix.tocsr(), constant

    def unsafe(self, polytope: Polytope, loose: float) -> Rows:
        """The rows of a polytope, loosened.

        Raises:
            UnsupportedError: if float64 does not hold the rows' numbers.
        """
        query = self._problem.query
        batch = RowBatch.of([replace(query.property, unsafe=(polytope,))], query.network.output_size)
        # Parts that stand for what float64 does not hold of a coefficient are in half-spaces of their own.
        if len(batch.owner) > 1:
            raise UnsupportedError("coefficients of the property have more digits than float64")
        if not len(batch.bound):
            raise UnsupportedError("the numbers of the property are beyond float64")
        folding = self._problem.folding
        rows = folding.number(batch.matrix.numpy())
        last = len(query.network.nodes) - 1
        matrix, constant = self._over_variables(
            folding.pull_back(last, rows, self._problem.phases, self._problem.sizes)
        )
        bound = batch.bound.numpy() - constant
        size = np.maximum(abs(matrix).max(axis=1).toarray().ravel(), np.abs(bound))
        if not np.isfinite(size).all():
            raise UnsupportedError("the numbers of the property are beyond float64")
        return _rows(matrix, bound + loose * size)

    def task(self, most: Rows, seconds: int) -> Task:
        """What Marabou is asked about the rows of one polytope."""
        before = self.inputs + np.arange(self.unstable)
        relus = np.stack([before, before + self.unstable], 1)
        return Task(self._lower, self._upper, self.inputs, self._equal, most, relus, self._slopes, seconds)


def _rows(matrix: sparse.csr_array, numbers: np.ndarray) -> Rows:
    return Rows(matrix.indptr, matrix.indices, matrix.data, numbers)
