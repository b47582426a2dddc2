"""The linear program of one node, for nodes on which the ascent gets no further.

Variables are the inputs e, the pre-activations z and the values r of the unstable neurons; an open neuron lies in the
triangle that its bounds leave. The solver is asked for multipliers and for a point, and is believed neither: ``proof``
evaluates the multipliers, and the network the point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from verifiable_relu.verifiers.bab.folding import Rows
from verifiable_relu.verifiers.bab.strip import Strip

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
    """The linear programs of all nodes of a tree.

    Args:
        strip: the tree's relaxation.
        neurons: the pre-activations of the unstable neurons.
        rows: the objective, and rows that are to be at most zero.
    """

    def __init__(self, strip: Strip, neurons: Rows, rows: Rows) -> None:
        self._strip, self._neurons, self._rows = strip, neurons, rows
        folded = strip.folded
        self._lower, self._upper = folded.lower.numpy(), folded.upper.numpy()
        self._slope, self._curvature = folded.slope.numpy(), folded.curvature.numpy()
        m, count = folded.size, len(rows.constant)
        z = [-sparse.eye_array(m), sparse.csr_array((count, m))]
        t = [sparse.csr_array((m, 1)), sparse.csr_array(-np.ones((count, 1)))]
        blocks = [[f.inputs.numpy(), z[i], f.neurons.numpy(), t[i]] for i, f in enumerate((neurons, rows))]
        self._equations = sparse.csr_array(sparse.block_array(blocks))

    def deepest(self, split: Tensor, seconds: float) -> Tensor | None:
        """A point (1, n) of the node, relaxed, where the largest of the rows is least; None if none was found."""
        solver = _solver(seconds)
        solver.passModel(self._model(split.numpy(), deepest=True))
        solver.run()
        return self._point(solver)

    def _point(self, solver: highspy.Highs) -> Tensor | None:
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return torch.tensor(solver.getSolution().col_value, dtype=torch.float64)[None, : self._strip.folded.inputs]

    def solve(self, split: Tensor, seconds: float) -> Hint:
        """The program of the node with these splits, (m,) int8."""
        solver = _solver(seconds)
        solver.passModel(self._model(split.numpy(), deepest=False))
        solver.run()
        if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible and seconds > 0:
            # Presolving may find that out without a ray.
            solver.setOptionValue("presolve", "off")
            solver.run()
            untyped: Any = solver
            found, exists, ray = untyped.getDualRay()
            if exists and found == highspy.HighsStatus.kOk:
                w, mu = self._multipliers(np.asarray(ray), 0.0)
                signed = torch.cat([_MULTIPLES, -_MULTIPLES])[:, None]
                return Hint(signed * w, signed * mu, None)
        solution = solver.getSolution()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal or not solution.dual_valid:
            w, mu = (torch.zeros(0, size, dtype=torch.float64) for size in self._sizes)
            return Hint(w, mu, None)
        w, mu = self._multipliers(np.array(solution.row_dual), 1.0)
        return Hint(w[None], mu[None], self._point(solver))

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._strip.folded.size, len(self._rows.constant) - 1

    def _multipliers(self, dual: np.ndarray, objective: float) -> tuple[Tensor, Tensor]:
        """The multipliers of ``proof`` from those of the program's rows, the objective counted so many times.

        With y the multipliers of the equations z = (form of e and r), the coefficient of r_j is a_j, the sum over the
        objective, the rows and the equations, and a_j·r_j − y_j·z_j = a_j·q_j − (y_j − a_j·t_j)·z_j.
        """
        m, others = self._sizes
        y, mu = -torch.from_numpy(dual[:m].copy()), -torch.from_numpy(dual[m + 1 : m + 1 + others].copy())
        a = objective * self._rows.neurons[0] + mu @ self._rows.neurons[1:] + y @ self._neurons.neurons
        return y - self._strip.slopes * a, mu

    def _model(self, split: np.ndarray, *, deepest: bool) -> highspy.HighsLp:
        """Columns: e, z, r and t, which all rows are at most. Rows: the equations, these rows, lines of every neuron.

        The objective is the first row, and t is zero; or, with ``deepest``, it is t.
        """
        n, m = self._strip.folded.inputs, self._strip.folded.size
        lower, upper, slope = self._lower, self._upper, self._slope
        lower, upper = np.where(split > 0, 0.0, lower), np.where(split < 0, 0.0, upper)
        is_open, every = np.flatnonzero(split == 0), np.arange(m)
        chord = (self._upper - self._slope * self._lower) / (self._upper - self._lower)

        def lines(which: np.ndarray, rate: np.ndarray) -> sparse.csr_array:
            """r − rate·z of some neurons, negated where the activation is concave."""
            at, sign = np.arange(len(which)), self._curvature[which]
            values = np.concatenate([sign, -sign * rate[which]])
            places = (np.concatenate([at, at]), np.concatenate([n + m + which, n + which]))
            return sparse.csr_array((values, places), shape=(len(which), n + 2 * m + 1))

        one = np.ones(m)
        above, below, over = lines(is_open, one), lines(is_open, slope), lines(is_open, chord)
        decided = np.setdiff1d(every, is_open)
        equal = lines(decided, np.where(split > 0, one, slope))
        free, zero = np.full(len(is_open), np.inf), np.zeros(len(is_open))
        constant = -self._neurons.constant.numpy()
        top = (self._curvature * (slope - chord) * self._lower)[is_open]
        matrix = sparse.vstack([self._equations, above, below, over, equal], format="csr")
        none = np.zeros(len(decided))
        limits = -self._rows.constant.numpy()
        if not deepest:
            limits[0] = np.inf
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = matrix.shape[1], matrix.shape[0]
        if deepest:
            lp.col_cost_ = np.concatenate([np.zeros(n + 2 * m), [1.0]])
        else:
            lp.col_cost_ = np.concatenate(
                [self._rows.inputs[0].numpy(), np.zeros(m), self._rows.neurons[0].numpy(), [0.0]]
            )
        unbounded, end = np.full(m, np.inf), np.inf if deepest else 0.0
        lp.col_lower_ = np.concatenate([-np.ones(n), lower, -unbounded, [-end]])
        lp.col_upper_ = np.concatenate([np.ones(n), upper, unbounded, [end]])
        lp.row_lower_ = np.concatenate([constant, np.full(len(limits), -np.inf), zero, zero, -free, none])
        lp.row_upper_ = np.concatenate([constant, limits, free, free, top, none])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
        return lp


def _solver(seconds: float) -> highspy.Highs:
    solver = highspy.Highs()
    for option, value in {"output_flag": False, "threads": 1, "time_limit": max(seconds, 0.0)}.items():
        solver.setOptionValue(option, value)
    return solver
