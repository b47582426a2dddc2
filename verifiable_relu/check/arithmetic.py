"""Two arithmetics for one computation: float64 with a bound of its rounding, and exact rational numbers.

In float64, u = 2⁻⁵³: the result of a product or a quotient is a·(1 + δ) + η, |δ| ≤ u, |η| ≤ 2⁻¹⁰⁷⁵ (η is an
underflow's; sums have none). A sum of n products, added in any order, is off by at most γ(n) = 2·n·u times the sum of
their absolute values (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1, with γ
rounded up), and by n·2⁻¹⁰⁷⁴. Bounds of errors are sums of numbers that are not negative, computed in float64
themselves: ``OWN`` covers what rounding makes of them, and with n < 2⁵⁰ ``TINY`` covers all η of a sum, its bound's
included.

An η may be multiplied afterwards, by a number a that is not small. So whatever is multiplied by some a later counts as
larger by ``SMALL``: γ·|a|·SMALL is above |a|·n·2⁻¹⁰⁷⁴, unless |a| is so small that TINY covers this.

Numbers that are made of the file's are exact (``Fraction``), or float64 with one relative error (``derived``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from scipy import sparse

from verifiable_relu.check.errors import BadInput

Number = np.ndarray[Any, Any]
"""An array of float64, or of ``Fraction`` as objects."""

Matrix = Any
"""A ``Number`` of two dimensions, or a ``scipy.sparse.csr_array``."""

UNIT = 2.0**-53
"""u: the result of an operation is off by this part of itself, at most."""

SAME_SCALE = 2.0**-23
"""The part of itself by which s_x·s_w may differ from a scale that is their product, rounded twice to float32."""

TINY = 2.0**-1000
"""More than all η of a sum and of its bound: fewer than 2⁵⁰ of 2⁻¹⁰⁷⁴ each, and what they are multiplied by."""

SMALL = 2.0**-900
"""What numbers that are multiplied later count as larger by: γ(n)·|a|·SMALL = n·2⁻⁹⁵²·|a| is above n·2⁻¹⁰⁷⁴·|a|."""

OWN = 1 + 2.0**-10
"""A factor for bounds of errors: a sum of fewer than 2⁴² numbers, none negative, loses less than 2⁻¹¹ of itself."""

MODERATE = 2.0**-40, 2.0**40
"""Scales of a GELU in this range make no number below 2⁵⁰⁰ overflow, and none above 2⁻⁹⁸² vanish."""

BESIDE = 2.0**-40
"""How far, relative to itself, a point may lie from where a curvature changes its sign, as computed in a few roundings.

Between the points on both sides of it, nothing is taken to be convex or concave.
"""


def gamma(terms: int) -> float:
    """The relative error of a sum of so many products, at most."""
    return 2 * terms * UNIT


def derived(found: Number, of: Number) -> Number:
    """Quotients and roots of the file's numbers, each off by a few units of its own size.

    Args:
        found: them as float64 has them.
        of: what they are multiples of: where that is zero they are.

    Raises:
        BadInput: if one is so small or so large that float64 has it with another error.
    """
    size = np.abs(found)
    if not np.where(of == 0, found == 0, (size >= 2.0**-1022) & (size < np.inf)).all():
        raise BadInput("a number that is made of the file's is too small or too large")
    return found


LONGEST = 128
"""Coefficients in rational numbers are rounded to so many bits, node by node, so that they do not grow."""


SPARSE = 8
"""Rows are multiplied as sparse ones where at most one entry of so many is not zero."""


class Float:
    """Floating point; every result counts as off by what the functions of this module say."""

    exact = False
    dtype: Any = np.float64

    def of(self, values: Number) -> Number:
        """Float64 numbers in this arithmetic."""
        return values

    def times(self, rows: Number, matrix: Matrix) -> Number:
        """rows·matrix."""
        if sparse.issparse(matrix) and SPARSE * np.count_nonzero(rows) < rows.size:
            return np.asarray((sparse.csr_array(rows) @ matrix).toarray())
        return np.asarray(rows @ matrix)


class Exact(Float):
    """Rational numbers: nothing is rounded but coefficients that are long (``shortened``), which counts as an error."""

    exact = True
    dtype = object

    def of(self, values: Number) -> Number:
        made = np.empty(np.shape(values), dtype=object)
        made.reshape(-1)[:] = [v if isinstance(v, Fraction) else Fraction(float(v)) for v in np.ravel(values)]
        return made

    def times(self, rows: Number, matrix: Matrix) -> Number:
        entries = sparse.coo_array(matrix)
        mantissas, exponents = np.frexp(entries.data)
        least = int(exponents.min(initial=0)) - 53
        shifts = (exponents - 53 - least).tolist()
        whole = np.empty(len(shifts), dtype=object)
        whole[:] = [int(m) << shift for m, shift in zip(np.ldexp(mantissas, 53).tolist(), shifts, strict=True)]
        found = self.of(np.zeros((len(rows), matrix.shape[1])))
        for row, into in zip(rows, found, strict=True):
            scale = math.lcm(*(value.denominator for value in row))
            sums = np.zeros(len(into), dtype=object)
            np.add.at(sums, entries.col, np.array([int(value * scale) for value in row], object)[entries.row] * whole)
            into[:] = [Fraction(total, scale) * Fraction(2) ** least for total in sums]
        return found

    def shortened(self, rows: Number) -> tuple[Number, Number]:
        """Rows rounded to ``LONGEST`` bits of their largest entries, and by how much each entry is off."""
        made = self.of(np.zeros(rows.shape))
        for row, into in zip(rows, made, strict=True):
            top = max((abs(value) for value in row), default=Fraction(0))
            step = Fraction(2) ** (top.numerator.bit_length() - top.denominator.bit_length() - LONGEST)
            into[:] = [value if value.denominator <= 1 / step else round(value / step) * step for value in row]
        return made, np.abs(rows - made)


def positive(values: Number) -> Number:
    """Which numbers are above zero, however little: numbers that are exact are not rounded before."""
    return np.asarray(values > 0, bool)


FLOAT = Float()
EXACT = Exact()


def above(values: Number) -> Number:
    """The next larger numbers: no smaller than the true results, where these were rounded once."""
    return np.nextafter(values, np.inf)


def outward(value: Any, towards: float) -> float:
    """The nearest float64 number on one side of a rational one.

    Raises:
        BadInput: if it is beyond ±2⁵⁰⁰.
    """
    if abs(value) > 1 << 500:
        raise BadInput("an end of the box is beyond ±2⁵⁰⁰")
    found = float(value)
    if (found < value) if towards > 0 else (found > value):
        found = float(np.nextafter(found, towards))
    return found


# What runs a network (``running``)

SPARE = 16
"""Roundings granted to every sum beyond its own."""

LEAST = 2.0**-126
"""The smallest normal number of float32."""

CURVE = 2.0**-18
"""What Sigmoid and Tanh are off by, and Gelu as a part of its argument."""


def _bfloat16(values: Number) -> Number:
    """Numbers of float32 rounded to bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@dataclass(frozen=True)
class RoundingModel:
    """One row of the page's table.

    Attributes:
        operand, unit, result: relative errors of an operand, of an operation of a sum, and of a result.
        least: half of the least positive number of results, where these are not float32.
        largest: what no value may exceed, nor any sum of the sizes of terms.
        stored: what becomes of the numbers that a file stores.
    """

    operand: Fraction
    unit: Fraction
    result: Fraction = Fraction(0)
    least: float = 0.0
    largest: float = 2.0**60
    stored: Callable[[Number], Number] = np.asarray

    def relative(self, terms: int) -> float:
        """θ of a sum of so many products."""
        spread = (terms + 1 + SPARE) * self.unit
        if spread >= Fraction(1, 2):
            raise BadInput("a sum is too long for its rounding to be bounded")
        return outward((1 + self.operand) ** 2 / (1 - spread) - 1, np.inf)

    def lost(self, terms: int, row: Number, small: bool = False) -> Number:
        """What sums of so many products lose below the smallest normal number; ``row``: the sizes of their weights.

        ``small``: whether a weight other than zero, or its product with those of fused operators, may be smaller.
        """
        sizes = 2 * (terms + 1 + SPARE) + 2 * row + (terms * self.largest if small else 0.0)
        return np.asarray(OWN * (2 * LEAST * sizes + self.least))


def tie(numbers: int, operands: Fraction) -> float:
    """What a quotient that is rounded to a whole number is off by before, beside its own rounding.

    A kernel may add the result's zero point first, and sum the operands' whole numbers with theirs: terms whose sizes
    are M = ``numbers`` + ``operands`` together, in fewer than ``SPARE`` roundings.

    Args:
        numbers: how many numbers the result's type has.
        operands: Σ 2·N_i·s_i/s of the quantised numbers that are summed.
    """
    spread = SPARE * Fraction(1, 1 << 24)
    return outward(spread / (1 - spread) * (numbers + operands), np.inf)


ARITHMETICS = {
    "float32": RoundingModel(Fraction(0), Fraction(1, 2**24)),
    "tf32": RoundingModel(Fraction(1, 2**10), Fraction(1, 2**23)),
    "bfloat16": RoundingModel(Fraction(0), Fraction(1, 2**23), Fraction(1, 2**8), stored=_bfloat16),
    "float16": RoundingModel(
        Fraction(0), Fraction(1, 2**23), Fraction(1, 2**11), 2.0**-25, 2.0**15, lambda v: v.astype(np.float16)
    ),
}
"""By name. In float32 every operation is rounded to nearest; in tf32 operands are cut to 10 bits behind the first; in
types of 16 bits results are rounded to 8 and 11 bits; their sums may be cut off. A product takes part in K additions,
at most, of a sum of K products and a bias: with the operands' errors, and ``SPARE`` roundings more, it is off by
(1 + o)²·(1 + s)ⁿ − 1 ≤ (1 + o)²/(1 − n·s) − 1 of itself, n = K + 1 + ``SPARE`` (Higham, section 3.1).
"""
