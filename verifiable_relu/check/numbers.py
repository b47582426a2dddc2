"""Float64 numbers, with bounds of their rounding.

With u = 2⁻⁵³, a sum of n products, added in any order, is off by at most γ(n) = 2·n·u times the sum of their absolute
values (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1, with γ rounded up), and
by n·2⁻¹⁰⁷⁴ where products underflow. Values of a network are at most ``LARGE``, so that all that underflow loses
in a walk is below 2⁴⁸·2⁻¹⁰⁷⁴·LARGE < ``TINY``. What is multiplied by a coefficient K of a row afterwards loses
|K|·``LOST`` at most. Bounds of errors are sums of numbers that are not negative, which
float64 adds up itself: ``OWN`` covers what that loses. What overflows ends as an infinity or as no number, which proves
nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from verifiable_relu.check.errors import BadInput

Number = np.ndarray[Any, Any]
"""An array, of float64 if nothing else is said."""

Matrix = Any
"""A matrix: two dimensions, a ``csr_array``, or one dimension, which stands for a diagonal."""

UNIT = 2.0**-53
"""u: the result of an operation is off by this part of itself, at most."""

TINY = 2.0**-500
"""More than all that underflow may change of a row's bound."""

LOST = 2.0**-1000
"""More than all that underflow may change of the numbers that a coefficient of a row is multiplied with."""

LARGE = 2.0**300
"""No value of a network whose bounds are known may be larger."""

OWN = 1 + 2.0**-10
"""A factor for bounds of errors: a sum of fewer than 2⁴² numbers, none negative, loses less than 2⁻¹¹ of itself."""

SPARSE = 8
"""Rows are multiplied as sparse ones where at most one entry in this number is not zero."""


def outward(value: Any, towards: float) -> float:
    """Return the nearest float64 number on one side of a rational one, at most ``LARGE``."""
    BadInput.when(abs(value) > LARGE, "a number is beyond ±2³⁰⁰")
    found = float(value)
    return float(np.nextafter(found, towards)) if (found < value if towards > 0 else found > value) else found


def gamma(terms: int) -> float:
    """Return γ(n): the part of the sum of the sizes of n products that their sum is off by, at most."""
    return 2 * terms * UNIT


def pulled(rows: Number, matrix: Matrix) -> Number:
    """Return rows·matrix."""
    if matrix.ndim == 1:
        return np.asarray(rows * matrix)
    found = sparse.csr_array(rows) @ matrix if SPARSE * np.count_nonzero(rows) < rows.size else rows @ matrix
    return np.asarray(found.toarray() if sparse.issparse(found) else found)


def apply(matrix: Matrix, x: Number) -> Number:
    """Return matrix·x of vectors x, (…, inputs), in float64."""
    return np.asarray(x * matrix if matrix.ndim == 1 else x @ matrix.T)
