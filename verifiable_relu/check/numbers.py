"""Two arithmetics for one computation: float64 with a bound of its rounding, and exact rational numbers.

With u = 2⁻⁵³, a sum of n products, added in any order, is off by at most γ(n) = 2·n·u times the sum of their absolute
values (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1, with γ rounded up), and
by n·2⁻¹⁰⁷⁴ where products underflow. Values of a network are at most ``LARGE``, so that all that underflow loses
in a walk is below 2⁴⁸·2⁻¹⁰⁷⁴·LARGE < ``TINY``. Bounds of errors are sums of numbers that are not negative, which
float64 adds up itself: ``OWN`` covers what that loses. What overflows ends as an infinity or as no number, which proves
nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from scipy import sparse

from verifiable_relu.check.errors import BadInput

Number = np.ndarray[Any, Any]
"""An array of float64, or of ``Fraction`` as objects."""

Matrix = Any
"""A matrix: two dimensions, a ``csr_array``, or one dimension, which stands for a diagonal."""

UNIT = 2.0**-53
"""u: the result of an operation is off by this part of itself, at most."""

TINY = 2.0**-500
"""More than all that underflow may change of a row's bound."""

LARGE = 2.0**300
"""No value of a network whose bounds are known may be larger."""

OWN = 1 + 2.0**-10
"""A factor for bounds of errors: a sum of fewer than 2⁴² numbers, none negative, loses less than 2⁻¹¹ of itself."""

SPARSE = 8
"""Rows are multiplied as sparse ones where at most one entry of so many is not zero."""


def outward(value: Any, towards: float) -> float:
    """Return the nearest float64 number on one side of a rational one, at most ``LARGE``."""
    BadInput.when(abs(value) > LARGE, "a number is beyond ±2³⁰⁰")
    found = float(value)
    return float(np.nextafter(found, towards)) if (found < value if towards > 0 else found > value) else found


@dataclass(frozen=True)
class Arithmetic:
    """Floating point, with γ of the sums of sizes to charge, or fractions, nothing of which is rounded."""

    exact: bool

    def of(self, values: Number) -> Number:
        """Return numbers as those of this arithmetic."""
        if not self.exact:
            return values
        made = np.empty(np.shape(values), dtype=object)
        made.reshape(-1)[:] = [v if isinstance(v, Fraction) else Fraction(float(v)) for v in np.ravel(values)]
        return made

    def gamma(self, terms: int) -> float:
        return 0.0 if self.exact else 2 * terms * UNIT

    def pull(self, rows: Number, matrix: Matrix) -> Number:
        """Return rows·matrix; exactly, by sums of integers over one denominator for each row and a power of two."""
        if matrix.ndim == 1:
            return np.asarray(rows * self.of(matrix))
        if not self.exact:
            found = sparse.csr_array(rows) @ matrix if SPARSE * np.count_nonzero(rows) < rows.size else rows @ matrix
            return np.asarray(found.toarray() if sparse.issparse(found) else found)
        entries = sparse.coo_array(matrix)
        mantissas, exponents = np.frexp(entries.data)
        least = int(exponents.min(initial=0)) - 53
        shifts = (exponents - 53 - least).tolist()
        whole = np.array([int(m) << e for m, e in zip(np.ldexp(mantissas, 53), shifts, strict=True)], object)
        found = np.empty((len(rows), matrix.shape[1]), dtype=object)
        for row, into in zip(rows, found, strict=True):
            scale = math.lcm(1, *(value.denominator for value in row))
            sums = np.zeros(matrix.shape[1], dtype=object)
            np.add.at(sums, entries.col, np.array([int(value * scale) for value in row], object)[entries.row] * whole)
            into[:] = [Fraction(int(total), scale) * Fraction(2) ** least for total in sums]
        return found


FLOAT, EXACT = Arithmetic(False), Arithmetic(True)


def apply(matrix: Matrix, x: Number) -> Number:
    """Return matrix·x of vectors x, (…, inputs), in float64."""
    return np.asarray(x * matrix if matrix.ndim == 1 else x @ matrix.T)
