"""Functions of one variable as ``docs/certificates.md`` has them: ranges, default slopes, and least values of rule 1.

Written from that page alone. Curves are mpmath's with 60 digits, of which 40 are trusted; between the points where they
bend otherwise, a tangent bounds them on one side and their ends on the other. Results are rounded outward.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise

import mpmath

ZERO, ONE, HALF = Fraction(0), Fraction(1), Fraction(1, 2)
GRID = 1 << 130

Slopes = tuple[Fraction, Fraction]
"""Slopes for a coefficient that is not negative, and for one that is."""


def down(value: Fraction) -> Fraction:
    """Return a number with a short denominator that is not above a number, and near it."""
    return Fraction(value.numerator * GRID // value.denominator, GRID)


def up(value: Fraction) -> Fraction:
    return -down(-value)


@dataclass(frozen=True)
class Kinked:
    """z where z ≥ 0, slope·z where z ≤ 0."""

    slope: Fraction

    def value(self, z: Fraction) -> Fraction:
        return z if z >= 0 else self.slope * z

    def least(self, low: Fraction, high: Fraction, k: Fraction, lam: Fraction) -> Fraction:
        """Return a lower bound of k·f(z) − lam·z over [low, high]."""
        return min(k * self.value(z) - lam * z for z in (low, high, *([ZERO] if low < 0 < high else [])))

    def fixed(self, low: Fraction, high: Fraction) -> Fraction | None:
        """Return the slope where the function is linear."""
        return ONE if low >= 0 else self.slope if high <= 0 else None

    def is_open(self, low: Fraction, high: Fraction) -> bool:
        return low < 0 < high

    def slopes(self, low: Fraction, high: Fraction) -> Slopes:
        chord = down((high - self.slope * low) / (high - low))
        middle = ONE if high > -low else self.slope
        return (chord, middle) if self.slope > 1 else (middle, chord)


@dataclass(frozen=True)
class Smooth:
    """Sigmoid, Tanh, or GELU, z·(1 + erf(k·z))/2."""

    kind: str
    k: Fraction = ONE

    def least(self, low: Fraction, high: Fraction, k: Fraction, lam: Fraction) -> Fraction:
        """Return a lower bound of k·f(z) − lam·z over [low, high]."""
        if not k:
            return min(-lam * low, -lam * high)
        return abs(k) * _least(self, low, high, lam / k, 1 if k > 0 else -1)

    def fixed(self, low: Fraction, high: Fraction) -> Fraction | None:
        return None

    def is_open(self, low: Fraction, high: Fraction) -> bool:
        return True

    def slopes(self, low: Fraction, high: Fraction) -> Slopes:
        if low == high:
            return ZERO, ZERO
        ends, (value, slope) = [at(self, z)[0] for z in (low, high)], at(self, (low + high) / 2)
        chord, slope = down((ends[1] - ends[0]) / (high - low)), down(slope)
        return (chord, slope) if value > sum(ends) / 2 else (slope, chord)


@cache
def _least(curve: Smooth, low: Fraction, high: Fraction, t: Fraction, sign: int) -> Fraction:
    """Return a lower bound of sign·(f(z) − t·z) over [low, high]."""
    bend = 1 / curve.k
    places, convex = ([-bend, bend], [False, True, False]) if curve.kind == "Gelu" else ([ZERO], [True, False])
    cuts = [low, *(z for z in places if low < z < high), high]
    found = []
    for first, last in pairwise(cuts):
        found += _piece(curve, first, last, t, sign, convex[sum(z <= first for z in places)] == (sign > 0))
    return down(min(found) - Fraction(1, 10**40) * (1 + abs(low) + abs(high)) * (1 + abs(t)))


def _piece(curve: Smooth, low: Fraction, high: Fraction, t: Fraction, sign: int, convex: bool) -> list[Fraction]:
    """Return numbers, the least of which is no more than sign·(f(z) − t·z) is between the ends."""
    if not convex:
        return [sign * (at(curve, z)[0] - t * z) for z in (low, high)]
    a, b = low, high
    for _ in range(60):
        middle = down((a + b) / 2)
        if not a < middle < b:
            break
        a, b = (middle, b) if sign * (at(curve, middle)[1] - t) < 0 else (a, middle)
    touching = b if sign * (at(curve, low)[1] - t) < 0 else low
    value, slope = at(curve, touching)
    return [sign * (value - t * touching + (slope - t) * (z - touching)) for z in (low, high)]


@cache
def at(curve: Smooth, z: Fraction) -> tuple[Fraction, Fraction]:
    """Return the value and the derivative, with 60 digits."""
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


def root(value: Fraction) -> Fraction:
    """Return a square root, exactly if it is rational, else with 60 digits."""
    with mpmath.workdps(80):
        near = _exact(mpmath.sqrt(_mpf(value)))
    short = near.limit_denominator(1 << 80)
    return short if short * short == value else near


def _mpf(value: Fraction) -> mpmath.mpf:
    return mpmath.mpf(value.numerator) / value.denominator


def _exact(value: mpmath.mpf) -> Fraction:
    sign, mantissa, exponent, _ = value._mpf_
    if exponent < -20_000:  # next to nothing, and too long to write out
        return ZERO
    return (-1 if sign else 1) * Fraction(int(mantissa)) * Fraction(2) ** int(exponent)
