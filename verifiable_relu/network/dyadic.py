"""Arrays of dyadic rationals, which binary floating-point numbers are: sums and products of them are exact.

Both who claims a verdict in exact arithmetic and who checks it compute with these numbers, so that
``tests/unit/test_dyadic.py`` holds them against Python's fractions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Dyadic:
    """An array of dyadic rationals numbers·2^exponent; ``numbers`` is an object array of Python integers."""

    numbers: np.ndarray
    exponent: int

    @classmethod
    def of(cls, array: np.ndarray) -> Dyadic:
        """The exact value of a float array, with the largest exponent that leaves integers."""
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
        """The integers over a smaller or equal exponent."""
        return self.numbers << (self.exponent - exponent) if self.exponent != exponent else self.numbers

    def __add__(self, other: Dyadic) -> Dyadic:
        least = min(self.exponent, other.exponent)
        return Dyadic(self.at(least) + other.at(least), least)

    def __sub__(self, other: Dyadic) -> Dyadic:
        return self + Dyadic(-other.numbers, other.exponent)

    def __mul__(self, other: Dyadic) -> Dyadic:
        return Dyadic(self.numbers * other.numbers, self.exponent + other.exponent)
