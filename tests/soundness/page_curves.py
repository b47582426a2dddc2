"""Activations without a kink, as ``docs/certificates.md`` has them: bounds of what a line leaves of them.

Written from that page alone. Functions are mpmath's with 60 digits, of which 40 are believed; between the points where
they bend otherwise, a tangent bounds them on one side and their ends on the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise

import mpmath

ZERO, ONE, HALF = Fraction(0), Fraction(1), Fraction(1, 2)

Ends = tuple[Fraction, Fraction]
"""The ends of a pre-activation."""


class Curve:
    """A function of a pre-activation, or several between a lower and an upper one.

    Each has ``least`` and ``most``: a lower and an upper bound of f(z) − t·z over the ends.
    """

    least: Callable[[Ends, Fraction], Fraction]
    most: Callable[[Ends, Fraction], Fraction]

    def term(self, ends: Ends, K: Fraction, t: Fraction, w: Fraction = ZERO) -> Fraction:
        """A lower bound of K·(f(z) − t·z) − w·z over the ends."""
        if not K:
            return min(-w * z for z in ends)
        line = t + w / K
        return K * (self.least(ends, line) if K > 0 else self.most(ends, line))


class Round(Curve):
    """The next whole number."""

    def least(self, ends: Ends, t: Fraction) -> Fraction:
        first = Fraction(round(ends[0]))
        points = [z for z in (*ends, first + HALF) if ends[0] <= z <= ends[1]]
        return min(max(first, z - HALF) - t * z for z in points)

    def most(self, ends: Ends, t: Fraction) -> Fraction:
        last = Fraction(round(ends[1]))
        points = [z for z in (*ends, last - HALF) if ends[0] <= z <= ends[1]]
        return max(min(last, z + HALF) - t * z for z in points)


class Sign(Curve):
    """−1 below 0, 0 at 0, 1 above."""

    def _values(self, ends: Ends, t: Fraction) -> list[Fraction]:
        found = [(Fraction((z > 0) - (z < 0)) - t * z) for z in ends]
        if ends[0] <= 0 <= ends[1]:
            found += [ZERO, *([-ONE] if ends[0] < 0 else []), *([ONE] if ends[1] > 0 else [])]
        return found

    def least(self, ends: Ends, t: Fraction) -> Fraction:
        return min(self._values(ends, t))

    def most(self, ends: Ends, t: Fraction) -> Fraction:
        return max(self._values(ends, t))


@dataclass(frozen=True)
class Smooth(Curve):
    """Sigmoid, Tanh, or GELU: z·(1 + erf(k·z))/2."""

    kind: str
    k: Fraction = ONE

    def bends(self) -> tuple[list[Fraction], list[bool]]:
        """Where the second derivative changes its sign, and whether f is convex between these places."""
        if self.kind == "Gelu":
            return [-1 / self.k, 1 / self.k], [False, True, False]
        return [ZERO], [True, False]

    def least(self, ends: Ends, t: Fraction) -> Fraction:
        return _least(self, ends, t, ONE)

    def most(self, ends: Ends, t: Fraction) -> Fraction:
        return -_least(self, ends, t, -ONE)


class Family(Smooth):
    """All functions between that of one λ and ReLU."""

    def most(self, ends: Ends, t: Fraction) -> Fraction:
        return max(max(z, ZERO) - t * z for z in ends)


@cache
def _least(curve: Smooth, ends: Ends, t: Fraction, sign: Fraction) -> Fraction:
    """The least of sign·(f(z) − t·z)."""
    places, convex = curve.bends()
    cuts = [ends[0], *(z for z in places if ends[0] < z < ends[1]), ends[1]]
    found = []
    for low, high in pairwise(cuts):
        piece = sum(z <= low for z in places)
        found += _piece(curve, low, high, t, sign, convex[piece] == (sign > 0))
    unsure = Fraction(1, 10**40) * (1 + max(map(abs, ends))) * (1 + abs(t))
    return min(found, default=sign * (_at(curve, ends[0])[0] - t * ends[0])) - unsure


def _piece(curve: Smooth, low: Fraction, high: Fraction, t: Fraction, sign: Fraction, convex: bool) -> list[Fraction]:
    """Numbers of which the least is no more than the function is between the ends."""
    if not convex:
        return [sign * (_at(curve, z)[0] - t * z) for z in (low, high)]
    a, b = low, high
    for _ in range(50):
        middle = Fraction(round((a + b) / 2 * 2**120), 2**120)
        if not a < middle < b:
            break
        a, b = (middle, b) if sign * (_at(curve, middle)[1] - t) < 0 else (a, middle)
    touching = b if sign * (_at(curve, low)[1] - t) < 0 else low
    value, slope = _at(curve, touching)
    return [sign * (value - t * touching + (slope - t) * (z - touching)) for z in (low, high)]


def root(value: Fraction) -> Fraction:
    """A square root with 60 digits."""
    with mpmath.workdps(80):
        return _exact(mpmath.sqrt(_mpf(value)))


def gap(curve: Curve | None, ends: Ends) -> Fraction:
    """The most that ReLU is above a function (GELU, a family, or ReLU itself: None) over the ends."""
    if not isinstance(curve, Smooth):
        return ZERO
    low, high = ends
    nearest, farthest = max(low, -high, ZERO), max(-low, high)
    # Of z ≥ 0, z − z·Φ(λ·z) is |z|·Φ(−λ·|z|).
    return -curve.least((nearest, farthest), ONE)


@cache
def _at(curve: Smooth, z: Fraction) -> tuple[Fraction, Fraction]:
    """The value and the derivative."""
    with mpmath.workdps(60):
        x, scale = _mpf(z), _mpf(curve.k)
        if curve.kind == "Tanh":
            value = mpmath.tanh(x)
            return _exact(value), _exact(1 - value * value)
        if curve.kind == "Sigmoid":
            value = 1 / (1 + mpmath.exp(-x))
            return _exact(value), _exact(value * (1 - value))
        share = mpmath.erfc(-scale * x) / 2
        return _exact(x * share), _exact(share + scale * x * mpmath.exp(-((scale * x) ** 2)) / mpmath.sqrt(mpmath.pi))


def _mpf(value: Fraction) -> mpmath.mpf:
    return mpmath.mpf(value.numerator) / value.denominator


def _exact(value: mpmath.mpf) -> Fraction:
    sign, mantissa, exponent, _ = value._mpf_
    if exponent < -20_000:  # beside nothing, and too long to write out
        return ZERO
    return (-1 if sign else 1) * Fraction(int(mantissa)) * Fraction(2) ** int(exponent)
