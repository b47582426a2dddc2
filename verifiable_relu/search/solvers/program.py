"""The mixed-integer program of a reduced system, for HiGHS.

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
from verifiable_relu.search.bab.forms import AffineForms
from verifiable_relu.search.bab.system import ReducedSystem
from verifiable_relu.search.question import slopes_below
from verifiable_relu.search.solvers.highs import SMALL, MixedIntegerProgram

_FAR = 1e15
"""Ends of rows beyond are set to this: from 1e20 on HiGHS would take them for none."""


def system_slopes(system: ReducedSystem) -> Tensor:
    """Return the slopes below 0 of all neurons of a piecewise-linear system, (m,)."""
    slopes = (slopes_below(block.function, block.end - block.start) for block in system.blocks)
    return torch.cat([system.lower[:0], *slopes])


def mixed_integer_program(
    system: ReducedSystem, rows: AffineForms, most: float, loose: float | None
) -> MixedIntegerProgram:
    """Minimise t in [−1, most], which all rows, each divided by its scale, are at most. Columns: e, p, q, d and t.

    The pre-activation of a neuron is p − q and its value p − slope·q, with p and q not negative; where the binary d
    is 1, the neuron is active, q = 0, and where it is 0, the neuron is inactive, p = 0.

    Args:
        system: on the CPU.
        rows: that are to be at most zero.
        most: the largest t.
        loose: by how much every row is loosened next to what its form may be off; None leaves all rows as they are.

    Raises:
        UnsupportedError: if a number is beyond float64.
    """
    n, m, count = system.inputs, system.size, len(rows)
    forms, own = AffineForms.cat([system.neurons, rows]), np.eye(m + count, m)
    lower, upper, neurons = system.lower.numpy(), system.upper.numpy(), forms.neurons.numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        width = np.concatenate([np.zeros(n, int), _exponent(upper), _exponent(-lower)])
        dense = np.hstack([forms.inputs.numpy(), neurons - own, own - neurons * system_slopes(system).numpy()])
        scaled = np.ldexp(dense, width)
        scale = _exponent(np.abs(scaled).max(axis=1, initial=0.0))
        scaled = np.ldexp(scaled, -scale[:, None])
        ends = np.ldexp(np.concatenate([upper, -lower]), -width[n:])
        constant, error = (np.ldexp(part.numpy(), -scale) for part in (-forms.constant, forms.error))
    # p ≤ u·d, and q ≤ −l·(1 − d).
    switch = sparse.vstack([sparse.diags_array(-ends[:m]), sparse.diags_array(ends[m:])])
    t = np.concatenate([np.zeros(m), -np.ones(count)])[:, None]
    matrix = sparse.block_array(
        [
            [sparse.csr_array(scaled[:, :n]), sparse.csr_array(scaled[:, n:]), None, sparse.csr_array(t)],
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

    def finite(ends: np.ndarray) -> np.ndarray:
        # Rows themselves are sums of numbers of size 1 at most.
        return np.where(np.isinf(ends), ends, np.clip(ends, -_FAR, _FAR))

    return MixedIntegerProgram(
        cost=np.append(np.zeros(n + 3 * m), 1.0),
        lower=np.concatenate([-np.ones(n), np.zeros(3 * m), [-1.0]]),
        upper=np.concatenate([np.ones(n), ends, np.ones(m), [most]]),
        row_lower=finite(row_lower),
        row_upper=finite(row_upper),
        starts=matrix.indptr,
        columns=matrix.indices,
        entries=matrix.data,
        integral=np.repeat([False, True, False], [n + 2 * m, m, 1]),
    )


def _leave_out_small(matrix: sparse.csr_array) -> np.ndarray:
    """Make coefficients 0 that HiGHS would ignore, and return the sum of their sizes in each row."""
    small = np.abs(matrix.data) <= SMALL
    lost = np.bincount(sparse.coo_array(matrix).coords[0][small], np.abs(matrix.data[small]), matrix.shape[0])
    matrix.data[small] = 0.0
    matrix.eliminate_zeros()
    return lost


def _exponent(sizes: np.ndarray) -> np.ndarray:
    """Return k of the least power of two 2^k above each size; 0 for a size of 0."""
    return np.frexp(sizes)[1]
