"""Numbers and slopes as certificates have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from verifiable_relu.errors import UnsupportedError

if TYPE_CHECKING:
    from verifiable_relu.proof.numbering import Numbering

Array = np.ndarray[Any, Any]

Record = dict[str, Any]


class NotToldError(UnsupportedError):
    """Error: the proof of a query was not told to its recorder; another search may tell it."""


SLOPE, FINE = -24, -40
"""Slopes that are searched for are multiples of 2 to the power of this; the second, those that a whole tree shares."""


def numbers(values: ArrayLike, step: int) -> list[int]:
    """Return [e, m, …] of the multiples m·2^e of 2^step that are next to some values.

    Raises:
        UnsupportedError: if one is not finite, or has too many digits.
    """
    scaled = np.rint(np.ldexp(np.asarray(values, np.float64), -step))
    if not bool((np.abs(scaled) <= 2.0**53).all()):
        raise UnsupportedError("a number of the proof is not finite, or numbers differ too much in size")
    whole = scaled.astype(np.int64)
    shared = int(np.bitwise_or.reduce(np.abs(whole), initial=0))
    if not shared:
        return [0, *whole.tolist()]
    shift = (shared & -shared).bit_length() - 1
    return [step + shift, *(whole >> shift).tolist()]


def step_of(values: ArrayLike, digits: int) -> int:
    """Return the exponent of the unit with which the largest of some values has this number of binary digits."""
    largest = float(np.abs(np.asarray(values)).max(initial=0))
    return 0 if not largest else math.frexp(largest)[1] - digits


def binary(value: float) -> tuple[int, int]:
    """Return the mantissa and the exponent of a number, exactly.

    Raises:
        UnsupportedError: if it is not finite.
    """
    if not math.isfinite(value):
        raise UnsupportedError("a number of the proof is not finite")
    mantissa, exponent = numbers(np.array([value]), step_of(np.array([value]), 53))[::-1]
    return mantissa, exponent


@dataclass(eq=False)
class SlopeTable:
    """Slopes t⁺ ("lower") and t⁻ ("upper") of elementwise ops, by number and kind: neurons and (…, neurons) values."""

    values: dict[tuple[int, str], tuple[Array, Array]]

    def row(self, at: int) -> SlopeTable:
        """Return the slopes of one row."""
        return SlopeTable({key: (neurons, values[at]) for key, (neurons, values) in self.values.items()})

    def records(self, numbering: Numbering, step: int = SLOPE) -> list[list[Any]]:
        """Return the slopes of one row as a record has them."""
        found = []
        for (op, kind), (neurons, values) in self.values.items():
            if len(neurons):
                place = numbering[op]
                at, which = place.positions(neurons)
                given = np.asarray(values, np.float64)[which]
                least = max(step, step_of(given, 53))
                found.append([place.number, at.tolist(), numbers(given, least), kind])
        return found


Numbers = Callable[[Any, bool], "Numbering"]
"""Returns the numbers of a search's network: of (network, whether maxima are tournaments for the records before)."""
