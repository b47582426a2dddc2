"""Exact arithmetic on arrays of dyadic rationals m·2^e, the numbers that finite floats are.

The encodings of verifiers, which make claims, and the checker of claims (``trust``) both calculate with this module.
Comparing the two could therefore not show a fault of it, and it is tested against ``fractions.Fraction`` instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Dyadic:
    """An array of the dyadic rationals numbers·2^exponent.

    Sums, differences and products are exact and broadcast as numpy's do. The encoding of a network in float64 uses this
    class with an array of floats as ``numbers`` and the exponent 0; its results are rounded as floats are.

    Attributes:
        numbers: an object array of Python integers, of any shape.
        exponent: the exponent of two, the same for all entries.
    """

    numbers: np.ndarray
    exponent: int

    @classmethod
    def of(cls, array: np.ndarray) -> Dyadic:
        """The exact values of an array of finite floats, of any shape.

        The exponent is the largest one of at most 0 for which all ``numbers`` are integers.
        """
        mantissa, exponent = np.frexp(array.astype(np.float64))
        integer = (mantissa * 2.0**53).astype(np.int64)
        trailing = np.frexp((integer & -integer).astype(np.float64))[1] - 1
        used = integer != 0
        exponent = np.where(used, exponent - 53 + trailing, 0)
        integer = np.where(used, integer >> np.maximum(trailing, 0), 0)
        least = int(exponent[used].min(initial=0))
        numbers = integer.astype(object) << np.where(used, exponent - least, 0).astype(object)
        # Arithmetic on an array without axes gives a scalar rather than an array of Python integers.
        return cls(np.asarray(numbers, dtype=object), least)

    def at(self, exponent: int) -> np.ndarray:
        """The integers m for which m·2^exponent are the same values; ``exponent`` is at most this array's own."""
        return self.numbers << (self.exponent - exponent) if self.exponent != exponent else self.numbers

    def __add__(self, other: Dyadic) -> Dyadic:
        least = min(self.exponent, other.exponent)
        return Dyadic(self.at(least) + other.at(least), least)

    def __sub__(self, other: Dyadic) -> Dyadic:
        return self + Dyadic(-other.numbers, other.exponent)

    def __mul__(self, other: Dyadic) -> Dyadic:
        return Dyadic(self.numbers * other.numbers, self.exponent + other.exponent)
