"""Exact arithmetic on arrays of dyadic rationals m·2^e, the numbers that finite floats are.

The encodings of verifiers, which make claims, and the checker of claims (``trust``) both calculate with this module.
Comparing the two could therefore not show a fault of it, and it is tested against ``fractions.Fraction`` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Dyadic:
    """An array of the dyadic rationals numbers·2^exponent, ``numbers`` being an object array of Python integers.

    Sums, differences and products are exact and broadcast as numpy's do. The encoding of a network in float64 uses this
    class with an array of floats as ``numbers`` and the exponent 0; its results are rounded as floats are.
    """

    numbers: np.ndarray
    exponent: int

    @classmethod
    def from_floats(cls, array: np.ndarray) -> Dyadic:
        """Return the exact values of an array of finite floats, of any shape.

        The exponent is the largest one of at most 0 for which all ``numbers`` are integers.
        """
        integer, shift, least = odd_parts(array)
        # Arithmetic on an array without axes gives a scalar rather than an array of Python integers.
        return cls(np.asarray(integer.astype(object) << shift.astype(object), dtype=object), least)

    def at(self, exponent: int) -> np.ndarray:
        """Return the integers m with the same values m·2^exponent; ``exponent`` is at most this array's own."""
        return self.numbers << (self.exponent - exponent) if self.exponent != exponent else self.numbers

    def __add__(self, other: Dyadic) -> Dyadic:
        least = min(self.exponent, other.exponent)
        return Dyadic(self.at(least) + other.at(least), least)

    def __sub__(self, other: Dyadic) -> Dyadic:
        return self + Dyadic(-other.numbers, other.exponent)

    def __mul__(self, other: Dyadic) -> Dyadic:
        return Dyadic(self.numbers * other.numbers, self.exponent + other.exponent)

    def weighed(
        self, weights: np.ndarray, terms: int, product: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> Dyadic:
        """Return the exact products of finite float weights with these numbers: sums of at most ``terms`` products.

        Both are cut into digits of so few bits that float64 holds every sum of products of digits exactly, in whatever
        order it is summed, and ``product``, a bilinear function of arrays of float64, may do it with the library's
        matrix products.
        """
        bits = (53 - terms.bit_length()) // 2
        integer, shift, least = odd_parts(weights)
        # Odd numbers of at most 53 bits are shifted within 64 bits where they stay there.
        fits = int((np.frexp(integer.astype(np.float64))[1] + shift).max(initial=0)) < 63
        whole = integer << shift if fits else integer.astype(object) << shift.astype(object)
        total: np.ndarray | int = 0
        others = _digits(self.numbers, bits)
        for i, first in enumerate(_digits(whole, bits)):
            for j, second in enumerate(others):
                total += product(first, second).astype(np.int64).astype(object) << bits * (i + j)
        return Dyadic(np.asarray(total, dtype=object), least + self.exponent)


def odd_parts(array: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return odd integers m and shifts s ≥ 0, int64, and the exponent e ≤ 0 for which finite floats are m·2^(s+e)."""
    mantissa, exponent = np.frexp(array.astype(np.float64))
    integer = (mantissa * 2.0**53).astype(np.int64)
    trailing = np.frexp((integer & -integer).astype(np.float64))[1] - 1
    used = integer != 0
    exponent = np.where(used, exponent - 53 + trailing, 0)
    least = int(exponent[used].min(initial=0))
    return (
        np.where(used, integer >> np.maximum(trailing, 0), 0),
        np.where(used, exponent - least, 0).astype(np.int64),
        least,
    )


def _digits(whole: np.ndarray, bits: int) -> list[np.ndarray]:
    """Float64 arrays d_0, d_1, … of integers of magnitude at most 2^bits whose sum of d_i·2^(bits·i) integers are."""
    found = []
    while ((whole < -(1 << bits)) | (whole > 1 << bits)).any():
        found.append((whole & ((1 << bits) - 1)).astype(np.float64))
        whole = whole >> bits
    return [*found, whole.astype(np.float64)]
