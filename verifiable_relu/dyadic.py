"""Exact arithmetic on arrays of dyadic rationals, the numbers that floats are.

Claims (the encodings of ``verifiers``) and their check (``trust``) both calculate with it, so that a fault in it could
not be seen by comparing the two: it has a differential test of its own, against ``fractions.Fraction``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Dyadic:
    """An array of dyadic rationals numbers·2^exponent.

    Sums, differences and products are exact and broadcast as numpy's do. The encoding in float64 uses the same class
    with floats for ``numbers`` and the exponent 0; its results are rounded as floats are.

    Attributes:
        numbers: an object array of Python integers, of any shape.
        exponent: of two, the same for all entries.
    """

    numbers: np.ndarray
    exponent: int

    @classmethod
    def of(cls, array: np.ndarray) -> Dyadic:
        """The exact value of a float array, with the largest exponent of at most 0 that leaves integers.

        Args:
            array: finite floats, of any shape.
        """
        mantissa, exponent = np.frexp(array.astype(np.float64))
        integer = (mantissa * 2.0**53).astype(np.int64)
        trailing = np.frexp((integer & -integer).astype(np.float64))[1] - 1
        used = integer != 0
        exponent = np.where(used, exponent - 53 + trailing, 0)
        integer = np.where(used, integer >> np.maximum(trailing, 0), 0)
        least = int(exponent[used].min(initial=0))
        numbers = integer.astype(object) << np.where(used, exponent - least, 0).astype(object)
        # Arithmetic on arrays without axes gives scalars, which would not stay Python integers.
        return cls(np.asarray(numbers, dtype=object), least)

    def at(self, exponent: int) -> np.ndarray:
        """The integers that stand for the same values over a smaller or equal exponent."""
        return self.numbers << (self.exponent - exponent) if self.exponent != exponent else self.numbers

    def __add__(self, other: Dyadic) -> Dyadic:
        least = min(self.exponent, other.exponent)
        return Dyadic(self.at(least) + other.at(least), least)

    def __sub__(self, other: Dyadic) -> Dyadic:
        return self + Dyadic(-other.numbers, other.exponent)

    def __mul__(self, other: Dyadic) -> Dyadic:
        return Dyadic(self.numbers * other.numbers, self.exponent + other.exponent)
