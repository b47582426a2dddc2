"""The mixed-integer program of a query, scaled to HiGHS's absolute tolerances and loosened by what rounding may change.

``milp`` says what the program is for and what its solutions mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse

from verifiable_relu.errors import OutOfTime, UnsupportedError
from verifiable_relu.spec.property import Polytope
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.verifiers.encoding import Forms
from verifiable_relu.verifiers.solvers.highs import Program
from verifiable_relu.verifiers.solving import Problem

SMALL = 1e-12
"""Coefficients below are left out (HiGHS ignores them at the latest here), and their rows loosened instead."""

_FAR = 1e15
"""Ends of rows beyond are set to this: from 1e20 on HiGHS would take them for none."""

_ROUNDING = 2.0**-51
"""Twice the unit roundoff for two operations."""


class Model:
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
        self.problem = problem
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
        self._radius = exponent(np.maximum(below, above))
        self._parts = exponent(parts)
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
            chosen = np.flatnonzero(self.problem.phases[index].unstable)
            which = self._column[index][chosen]
            a = term.numbers[:, chosen]
            add(a, self.inputs + which, positive[which])
            below = -a * self.problem.folding.slopes(index).numbers[chosen]
            error = error + _ROUNDING * (np.abs(below) @ np.ldexp(1.0, negative[which]))
            add(below, self.inputs + self.unstable + which, negative[which])
        if own is not None:
            rows = np.arange(count)
            blocks.append((rows, self.inputs + own, -np.ldexp(1.0, positive[own])))
            blocks.append((rows, self.inputs + self.unstable + own, np.ldexp(1.0, negative[own])))
        row, column, value = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        largest = np.zeros(count)
        np.maximum.at(largest, row, np.abs(value))
        scale = exponent(largest)
        value = np.ldexp(value, -scale[row])
        small = np.abs(value) <= SMALL
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
        for index, chosen, forms in self.problem.folding.neurons(self.problem.phases, self.problem.sizes):
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

    def program(self, polytope: Polytope, slack: float, loose: float | None) -> Program:
        """Minimise t in [−1, slack], where A·y − b ≤ t for every row of the polytope, divided by its scale.

        All rows are loosened by ``loose``, and by what rounding may change in them; None leaves them as they are.
        """
        network, problem = self.problem.query.network, self.problem
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
        integral = np.zeros(self.columns + 1, dtype=bool)
        integral[self.columns - self.unstable : self.columns] = True
        return Program(
            cost=np.append(np.zeros(self.columns), 1.0),
            lower=np.concatenate([-self._below, np.zeros(3 * self.unstable), [-1.0]]),
            upper=np.concatenate([self._above, self._positive, self._negative, np.ones(self.unstable), [slack]]),
            row_lower=within(lower),
            row_upper=within(upper),
            starts=matrix.indptr,
            columns=matrix.indices,
            entries=matrix.data,
            integral=integral,
        )


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


def exponent(sizes: np.ndarray) -> np.ndarray:
    """k of the least power of two 2^k above each size; 0 for a size of 0."""
    return np.frexp(sizes)[1]


def within(ends: np.ndarray) -> np.ndarray:
    """Row ends that HiGHS takes for finite numbers: rows themselves are sums of numbers of size 1 at most."""
    return np.where(np.isinf(ends), ends, np.clip(ends, -_FAR, _FAR))
