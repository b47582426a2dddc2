"""The mixed-integer program of a folded system, for HiGHS.

Variables are the inputs e, both parts of the pre-activations z of the unstable neurons, and for each neuron a binary d
that says which of its phases it is in (Tjeng, Xiao, Tedrake, Evaluating Robustness of Neural Networks with Mixed
Integer Programming, arXiv 1711.07356, section 4).

HiGHS's tolerances are absolute, and it takes no coefficients above 1e15. So columns are multiples of powers of two that
are about their largest values, and every row is divided by such a power that is about its largest coefficient: a
network whose layers are rescaled by powers of two makes the same program.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.rounding import OWN, SCALED_LOST
from verifiable_relu.search.solvers import highs
from verifiable_relu.verifiers.bab.folded import AffineForms, Folded

SMALL = 1e-12
"""Heuristic: coefficients below are left out, and their rows loosened instead; HiGHS would ignore them."""

_FAR = 1e15
"""Ends of rows beyond are set to this: from 1e20 on HiGHS would take them for none."""


class Program:
    """The program of one polytope.

    Args:
        folded: the system.
        rows: that are to be at most zero.
    """

    def __init__(self, folded: Folded, rows: AffineForms) -> None:
        self._inputs, self._neurons, self._rows = folded.inputs, folded.neurons, rows
        self._lower, self._upper, self._slope = folded.lower.numpy(), folded.upper.numpy(), folded.slope.numpy()

    def inputs(self, values: np.ndarray) -> Tensor:
        """Return the scaled inputs (1, n) of a solution."""
        return torch.from_numpy(values.astype(np.float64))[None, : self._inputs]

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
