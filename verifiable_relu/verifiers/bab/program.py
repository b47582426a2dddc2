"""The linear and the mixed-integer program of a folded system, for HiGHS.

Variables are the inputs e, the pre-activations z and the values r of the unstable neurons. An open neuron lies in the
triangle that its bounds leave; in the mixed-integer program it has a binary d that says which of its phases it is in
(Tjeng, Xiao, Tedrake, Evaluating Robustness of Neural Networks with Mixed Integer Programming, arXiv 1711.07356,
section 4). The solver is asked for multipliers and for a point, and is believed neither: ``proof`` evaluates the
multipliers, and the network the point.

HiGHS's tolerances are absolute, and it takes no coefficients above 1e15. So z and r are multiples of powers of two that
are about their largest values, and every row is divided by such a power that is about its largest coefficient: a
network whose layers are rescaled by powers of two makes the same program.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from verifiable_relu.errors import OutOfTime, UnsupportedError
from verifiable_relu.rounding import OWN, SCALED_LOST
from verifiable_relu.verifiers.bab.folded import Folded, Rows
from verifiable_relu.verifiers.base import PATIENCE
from verifiable_relu.verifiers.solvers import highs

SMALL = 1e-12
"""Heuristic: coefficients below are left out, and their rows loosened instead; HiGHS would ignore them."""

_FAR = 1e15
"""Ends of rows beyond are set to this: from 1e20 on HiGHS would take them for none."""

_MULTIPLES = 2.0 ** torch.arange(-10, 60, dtype=torch.float64)
"""Multiples of a ray that are tried: far enough along the right one, the bound is as large as one likes."""


@dataclass(frozen=True, eq=False)
class Hint:
    """What the solver found.

    Attributes:
        w: (choices, m) multipliers worth trying, as ``Proofs.lower`` takes them; there may be none.
        mu: (choices, rows − 1) likewise.
        point: (1, n) scaled inputs at which the relaxation is least, or None.
    """

    w: Tensor
    mu: Tensor
    point: Tensor | None


class Program:
    """The programs of one polytope, and the linear ones of all nodes of its tree.

    Args:
        folded: the system.
        rows: the objective, and rows that are to be at most zero.
    """

    def __init__(self, folded: Folded, rows: Rows) -> None:
        neurons = folded.neurons
        self._inputs, self._neurons, self._rows = folded.inputs, neurons, rows
        self._lower, self._upper = folded.lower.numpy(), folded.upper.numpy()
        self._slope, self._curvature = folded.slope.numpy(), folded.curvature.numpy()
        m, count = folded.size, len(rows.constant)
        z = [-sparse.eye_array(m), sparse.csr_array((count, m))]
        # The columns of z, and those of r, are divided by two to the power of these; equations and rows likewise.
        self._of_z = exponent(np.maximum(-self._lower, self._upper))
        self._of_r = exponent(folded.reach.numpy())
        of_columns = np.concatenate([np.zeros(folded.inputs, int), self._of_z, self._of_r])
        forms = [[f.inputs.numpy(), z[i], f.neurons.numpy()] for i, f in enumerate((neurons, rows))]
        system = _times(sparse.csr_array(sparse.block_array(forms)), columns=of_columns)
        # Of a box of one point without unstable neurons, nothing varies.
        largest = abs(system).max(axis=1).toarray() if system.shape[1] else np.zeros(system.shape[0])
        self._of_rows = exponent(largest)
        t = sparse.csr_array(np.concatenate([np.zeros(m), -np.ones(count)])[:, None])
        self._equations = sparse.hstack([_times(system, rows=-self._of_rows), t], format="csr")
        self._constant = _ldexp(-np.concatenate([f.constant.numpy() for f in (neurons, rows)]), -self._of_rows)

    def deepest(self, split: Tensor, seconds: float) -> Tensor | None:
        """A point (1, n) of the node, relaxed, where the largest of the rows is least; None if none was found.

        Raises:
            MemoryError: if the solver takes too much memory.
            CallFailed: if it fails otherwise.
        """
        return self._point(_solved(self._model(split.numpy(), deepest=True), seconds, ray=False))

    def _point(self, solved: highs.HighsResult | None) -> Tensor | None:
        if solved is None or solved.status != "kOptimal":
            return None
        return self.inputs(solved.values)

    def inputs(self, values: np.ndarray) -> Tensor:
        """The scaled inputs (1, n) of a solution."""
        return torch.from_numpy(values.astype(np.float64))[None, : self._inputs]

    def solve(self, split: Tensor, slopes: Tensor, seconds: float) -> Hint:
        """The program of the node with these splits, (m,) int8, solved in at most so many seconds.

        The multipliers are those of a relaxation with these slopes, (m,).

        Raises:
            MemoryError: if the solver takes too much memory.
            CallFailed: if it fails otherwise.
        """
        solved = _solved(self._model(split.numpy(), deepest=False), seconds, ray=True)
        if solved is not None and solved.ray is not None:
            w, mu = self._multipliers(solved.ray, slopes, 0.0)
            signed = torch.cat([_MULTIPLES, -_MULTIPLES])[:, None]
            return Hint(signed * w, signed * mu, None)
        if solved is None or solved.status != "kOptimal" or not len(solved.duals):
            w, mu = (torch.zeros(0, size, dtype=torch.float64) for size in self._sizes)
            return Hint(w, mu, None)
        w, mu = self._multipliers(solved.duals, slopes, 1.0)
        return Hint(w[None], mu[None], self._point(solved))

    @property
    def _sizes(self) -> tuple[int, int]:
        return len(self._lower), len(self._rows.constant) - 1

    def _multipliers(self, dual: np.ndarray, slopes: Tensor, objective: float) -> tuple[Tensor, Tensor]:
        """The multipliers of ``proof`` from those of the program's rows, the objective counted so many times.

        With y the multipliers of the equations z = (form of e and r), the coefficient of r_j is a_j, the sum over the
        objective, the rows and the equations, and a_j·r_j − y_j·z_j = a_j·q_j − (y_j − a_j·t_j)·z_j.
        """
        m, others = self._sizes
        # The objective is divided by a power of two, too.
        dual = -_ldexp(dual[: m + 1 + others], self._of_rows[m] - self._of_rows)
        y, mu = torch.from_numpy(dual[:m]), torch.from_numpy(dual[m + 1 :])
        a = objective * self._rows.neurons[0] + mu @ self._rows.neurons[1:] + y @ self._neurons.neurons
        return y - slopes * a, mu

    def _model(self, split: np.ndarray, *, deepest: bool) -> highs.MixedIntegerProgram:
        """Columns: e, z, r and t, which all rows are at most. Rows: the equations, these rows, lines of every neuron.

        The objective is the first row, and t is zero; or, with ``deepest``, it is t.
        """
        n, m = self._inputs, len(self._lower)
        lower, upper, slope = self._lower, self._upper, self._slope
        chord = (upper - slope * lower) / (upper - lower)
        top = self._curvature * (slope - chord) * lower
        ends = np.where(split > 0, 0.0, lower), np.where(split < 0, 0.0, upper)
        is_open, decided = np.flatnonzero(split == 0), np.flatnonzero(split)

        one = np.ones(m)
        (above, _), (below, _), (over, by) = (self._lines(is_open, rate) for rate in (one, slope, chord))
        equal, _ = self._lines(decided, np.where(split > 0, one, slope))
        free, zero, none = np.full(len(is_open), np.inf), np.zeros(len(is_open)), np.zeros(len(decided))
        matrix = sparse.vstack([self._equations, above, below, over, equal], format="csr")
        constant, limits = self._constant[:m], self._constant[m:].copy()
        first = self._equations[[m]].toarray()[0]
        first[-1] = 0.0
        if not deepest:
            limits[0] = np.inf
        unbounded, end = np.full(m, np.inf), np.inf if deepest else 0.0
        return highs.MixedIntegerProgram(
            cost=np.append(np.zeros(n + 2 * m), 1.0) if deepest else first,
            lower=np.concatenate([-np.ones(n), _ldexp(ends[0], -self._of_z), -unbounded, [-end]]),
            upper=np.concatenate([np.ones(n), _ldexp(ends[1], -self._of_z), unbounded, [end]]),
            row_lower=within(np.concatenate([constant, np.full(len(limits), -np.inf), zero, zero, -free, none])),
            row_upper=within(np.concatenate([constant, limits, free, free, _ldexp(top[is_open], -by), none])),
            starts=matrix.indptr,
            columns=matrix.indices,
            entries=matrix.data,
            integral=np.zeros(n + 2 * m + 1, dtype=bool),
        )

    def mixed(self, most: float, loose: float | None) -> highs.MixedIntegerProgram:
        """Minimise t in [−1, most], which all rows, each divided by its scale, are at most. Columns: e, p, q, d and t.

        The pre-activation of a neuron is p − q and its value p − slope·q, with p and q not negative; where the binary d
        is 1, the neuron is active, q = 0, and where it is 0, the neuron is inactive, p = 0.

        Args:
            most: the largest t.
            loose: by how much every row is loosened beside what its form may be off; None leaves all rows as they are.

        Raises:
            UnsupportedError: if a number is beyond float64.
        """
        n, m, count = self._inputs, len(self._lower), len(self._rows.constant)
        of_p, of_q = exponent(self._upper), exponent(-self._lower)
        one, none = np.eye(m), np.zeros((count, m))
        forms = []
        for f, own in ((self._neurons, one), (self._rows, none)):
            a = f.neurons.numpy()
            forms.append([f.inputs.numpy(), a - own, own - a * self._slope])
        columns = np.concatenate([np.zeros(n, int), of_p, of_q])
        system = _times(sparse.csr_array(np.block(forms)), columns=columns)
        scale = exponent(abs(system).max(axis=1).toarray() if system.shape[1] else np.zeros(system.shape[0]))
        system = _times(system, rows=-scale)
        ends = np.concatenate([_ldexp(self._upper, -of_p), _ldexp(-self._lower, -of_q)])
        t = np.concatenate([np.zeros(m), -np.ones(count)])[:, None]
        # p ≤ u·d, and q ≤ −l·(1 − d).
        phases = sparse.hstack(
            [
                sparse.csr_array((2 * m, n)),
                sparse.eye_array(2 * m),
                sparse.vstack([sparse.diags_array(-ends[:m]), sparse.diags_array(ends[m:])]),
                sparse.csr_array((2 * m, 1)),
            ]
        )
        matrix = sparse.vstack(
            [sparse.hstack([system, sparse.csr_array((m + count, m)), sparse.csr_array(t)]), phases], format="csr"
        )
        constant = _ldexp(-np.concatenate([f.constant.numpy() for f in (self._neurons, self._rows)]), -scale)
        error = _ldexp(np.concatenate([f.error.numpy() for f in (self._neurons, self._rows)]), -scale)
        free = np.full(count + 2 * m, np.inf)
        lower = np.concatenate([constant[:m], -free])
        upper = np.concatenate([constant, np.zeros(m), ends[m:]])
        if not all(np.isfinite(part).all() for part in (matrix.data, constant, error, ends)):
            raise UnsupportedError("the numbers of the program are beyond float64")
        small = np.abs(matrix.data) <= SMALL
        lost = np.bincount(sparse.coo_array(matrix).coords[0][small], np.abs(matrix.data[small]), len(lower))
        matrix.data[small] = 0.0
        matrix.eliminate_zeros()
        if loose is not None:
            outward = OWN * np.concatenate([error, np.zeros(2 * m)]) + 2 * lost + SCALED_LOST + loose
            lower, upper = lower - outward, upper + outward
        zero = np.zeros(2 * m)
        return highs.MixedIntegerProgram(
            cost=np.append(np.zeros(n + 3 * m), 1.0),
            lower=np.concatenate([-np.ones(n), zero, np.zeros(m), [-1.0]]),
            upper=np.concatenate([np.ones(n), ends, np.ones(m), [most]]),
            row_lower=within(lower),
            row_upper=within(upper),
            starts=matrix.indptr,
            columns=matrix.indices,
            entries=matrix.data,
            integral=np.append(np.arange(n + 3 * m) >= n + 2 * m, False),
        )

    def _lines(self, which: np.ndarray, rate: np.ndarray) -> tuple[sparse.csr_array, np.ndarray]:
        """r − rate·z of some neurons, negated where the activation is concave; and what the rows are divided by."""
        n, m = self._inputs, len(self._lower)
        at, sign, rate = np.arange(len(which)), self._curvature[which], rate[which]
        of_r, of_z = self._of_r[which], self._of_z[which]
        by = np.maximum(of_r, of_z + exponent(rate))
        values = np.concatenate([_ldexp(sign, of_r - by), _ldexp(-sign * rate, of_z - by)])
        places = (np.concatenate([at, at]), np.concatenate([n + m + which, n + which]))
        return sparse.csr_array((values, places), shape=(len(which), n + 2 * m + 1)), by


def exponent(sizes: np.ndarray) -> np.ndarray:
    """k of the least power of two 2^k above each size; 0 for a size of 0."""
    return np.frexp(sizes)[1]


def within(ends: np.ndarray) -> np.ndarray:
    """Row ends that HiGHS takes for finite numbers: rows themselves are sums of numbers of size 1 at most."""
    return np.where(np.isinf(ends), ends, np.clip(ends, -_FAR, _FAR))


def _ldexp(values: np.ndarray, powers: np.ndarray) -> np.ndarray:
    """Values times powers of two, infinite where they are beyond float64."""
    with np.errstate(over="ignore"):
        return np.ldexp(values, powers)


def _times(
    matrix: sparse.csr_array, rows: np.ndarray | None = None, columns: np.ndarray | None = None
) -> sparse.csr_array:
    """A matrix whose rows or columns are multiplied by powers of two; entries that vanish are left out."""
    entries = sparse.coo_array(matrix)
    row, column = entries.coords
    by = np.zeros(len(row), int) + (0 if rows is None else rows[row]) + (0 if columns is None else columns[column])
    found = sparse.csr_array((_ldexp(entries.data, by), (row, column)), shape=matrix.shape)
    found.eliminate_zeros()
    return found


def _solved(program: highs.MixedIntegerProgram, seconds: float, *, ray: bool) -> highs.HighsResult | None:
    """What HiGHS makes of a program, None if it does not stop in time, or if numbers are beyond float64."""
    if not (np.isfinite(program.entries).all() and np.isfinite(program.cost).all()):
        return None
    if np.isnan(np.concatenate([program.row_lower, program.row_upper, program.lower, program.upper])).any():
        return None
    task = highs.HighsTask(program, {"output_flag": False, "threads": 1}, seconds, ray)
    try:
        solved: highs.HighsResult = highs.HIGHS.call(task, max(seconds, 0.0) + PATIENCE)
    except OutOfTime:
        return None
    return solved
