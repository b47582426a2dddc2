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
        n, m, others = folded.inputs, folded.size, len(rows.constant) - 1
        weights = sparse.csr_array(neurons.neurons.numpy())
        self._equations = sparse.hstack(
            [sparse.csr_array(neurons.inputs.numpy()), -sparse.eye_array(m), weights], format="csr"
        )
        behind = [rows.inputs[1:].numpy(), np.zeros((others, m)), rows.neurons[1:].numpy()]
        self._behind = sparse.csr_array(np.concatenate(behind, 1).reshape(others, n + 2 * m))

    def solve(self, split: Tensor, seconds: float) -> Hint:
        """The program of the node with these splits, (m,) int8."""
        solver = highspy.Highs()
        for option, value in {"output_flag": False, "threads": 1, "time_limit": max(seconds, 0.0)}.items():
            solver.setOptionValue(option, value)
        solver.passModel(self._model(split.numpy()))
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
        point = torch.tensor(solution.col_value, dtype=torch.float64)[: self._strip.folded.inputs]
        return Hint(w[None], mu[None], point[None])

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._strip.folded.size, len(self._rows.constant) - 1

    def _multipliers(self, dual: np.ndarray, objective: float) -> tuple[Tensor, Tensor]:
        """The multipliers of ``proof`` from those of the program's rows, the objective counted so many times.

        With y the multipliers of the equations z = (form of e and r), the coefficient of r_j is a_j, the sum over the
        objective, the rows and the equations, and a_j·r_j − y_j·z_j = a_j·q_j − (y_j − a_j·t_j)·z_j.
        """
        m, others = self._sizes
        y, mu = -torch.from_numpy(dual[:m].copy()), -torch.from_numpy(dual[m : m + others].copy())
        a = objective * self._rows.neurons[0] + mu @ self._rows.neurons[1:] + y @ self._neurons.neurons
        return y - self._strip.slopes * a, mu

    def _model(self, split: np.ndarray) -> highspy.HighsLp:
        """Rows: the equations, the rows behind the objective, then lines of every neuron."""
        n, (m, others) = self._strip.folded.inputs, self._sizes
        lower, upper, slope = self._lower, self._upper, self._slope
        lower, upper = np.where(split > 0, 0.0, lower), np.where(split < 0, 0.0, upper)
        is_open, every = np.flatnonzero(split == 0), np.arange(m)
        chord = (self._upper - self._slope * self._lower) / (self._upper - self._lower)

        def lines(which: np.ndarray, rate: np.ndarray) -> sparse.csr_array:
            """r − rate·z of some neurons, negated where the activation is concave."""
            at, sign = np.arange(len(which)), self._curvature[which]
            values = np.concatenate([sign, -sign * rate[which]])
            places = (np.concatenate([at, at]), np.concatenate([n + m + which, n + which]))
            return sparse.csr_array((values, places), shape=(len(which), n + 2 * m))

        one = np.ones(m)
        above, below, over = lines(is_open, one), lines(is_open, slope), lines(is_open, chord)
        decided = np.setdiff1d(every, is_open)
        equal = lines(decided, np.where(split > 0, one, slope))
        free, zero = np.full(len(is_open), np.inf), np.zeros(len(is_open))
        constant = -self._neurons.constant.numpy()
        top = (self._curvature * (slope - chord) * self._lower)[is_open]
        matrix = sparse.vstack([self._equations, self._behind, above, below, over, equal], format="csr")
        rows = np.concatenate([constant, np.full(others, -np.inf), zero, zero, -free, np.zeros(len(decided))])
        limits = -self._rows.constant[1:].numpy()
        ends = np.concatenate([constant, limits, free, free, top, np.zeros(len(decided))])
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = n + 2 * m, len(rows)
        lp.col_cost_ = np.concatenate([self._rows.inputs[0].numpy(), np.zeros(m), self._rows.neurons[0].numpy()])
        unbounded = np.full(m, np.inf)
        lp.col_lower_ = np.concatenate([-np.ones(n), lower, -unbounded])
        lp.col_upper_ = np.concatenate([np.ones(n), upper, unbounded])
        lp.row_lower_, lp.row_upper_ = rows, ends
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
        return lp
