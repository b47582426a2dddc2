"""Smooth activations between bounds: how far they are from lines, in float64 with bounds of all rounding.

A curve lies between two functions, which are the same but for a family of networks. Of each it is known where it is
convex and where it is concave, and at any point its value and its slope are known up to an error. On a part [a, b] of
an interval where g(z) = f(z) − t·z is convex, g is at most the larger of g(a) and g(b), and at every z at least
g(m) + g′(m)·(z − m), for any m of the part; where g is concave, it is the other way round. How well m is chosen
changes how tight a bound is, and not whether it is right, so that m alone is found by functions that nobody has checked
(scipy's). Exponentials and error functions are this module's own: sums, products and quotients of float64 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy import special

from verifiable_relu.check.arithmetic import BESIDE, OWN, TINY, UNIT, Number

_LN2_HIGH, _LN2_LOW = 0.693147180601954460144043, -4.2009150964757e-11
"""ln 2 = high + low; high has 32 bits, so that its products with integers of 11 bits are exact."""

_TERMS, _NEAR, _MOST = 80, 2.0, 30.0
"""Terms of erf's series and of erfc's fraction; the |h| up to which the first is used; from which on erfc is 0 here."""

Valued = tuple[Number, Number]
"""Numbers, and how far they are off, at most."""


def exponential(x: Number) -> Valued:
    """e^x for x ≤ 0, off by 16 units of its own size at most.

    x = k·ln 2 + r with |r| < 0.35, off by less than one unit u = 2⁻⁵³; Taylor's series of e^r up to r¹⁴ leaves less
    than 2⁻⁶² of it, and its sum, in which every term is below 0.42 of the one before it, rounds by less than 4·u.
    """
    x = np.maximum(x, -800.0)
    k = np.rint(x * 1.4426950408889634)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    total = np.ones_like(r)
    for n in range(14, 0, -1):
        total = 1 + total * r / n
    value = np.ldexp(total, k.astype(np.int64))
    return value, 16 * UNIT * value + TINY


def normal(h: Number) -> tuple[Number, Number, Number, Number]:
    """(1 + erf h)/2 and by how much it is off, at most; e^(−h²)/√π and by what part of itself; for |h| ≤ ``_MOST``.

    Where |h| ≤ 2, erf h = 2/√π·e^(−h²)·Σ 2ⁿ·h^(2n+1)/(1·3·…·(2n+1)) (NIST Handbook, 7.6.2), whose terms have one sign.
    The relative error of the n-th term is below (4n + 4)·u, and terms beyond n = 4·h² are nothing beside the others.
    Elsewhere erfc |h| = e^(−h²)/√π/(|h| + (1/2)/(|h| + (2/2)/(|h| + (3/2)/(|h| + …)))) (ibid., 7.9), whose terms are
    positive: rounding changes it by less than 16·u of itself, and what is left out is less than u of it.

    h may be off by 5·u of itself, and h² by 11·u, which changes e^(−h²), and erfc |h|, by less than (5 + 11·h²)·u of
    them.
    """
    size, square = np.abs(h), h * h
    bell = 0.5641895835477563 * exponential(-square)[0]
    lost = 48 * (1 + square) * UNIT
    near, far = np.clip(h, -_NEAR, _NEAR), np.maximum(size, _NEAR)
    term = total = near
    below = far
    for n in range(1, _TERMS):
        term = term * (2 * near * near) / (2 * n + 1)
        total = total + term
        below = far + 0.5 * (_TERMS - n) / below
    tail = 0.5 * bell / below
    value = np.where(size <= _NEAR, 0.5 + bell * total, np.where(h > 0, 1 - tail, tail))
    error = np.where(size <= _NEAR, lost, lost * tail + np.where(h > 0, 2 * UNIT, 0)) + TINY
    return value, error, bell, lost


@dataclass(frozen=True)
class CurvedFunction:
    """A function of one variable.

    Attributes:
        values: its values, and its slopes, at points.
        guess: its slopes, roughly.
        knots: where its second derivative changes its sign, each as an interval that holds the place.
        convex: of the parts between the knots, whether they are convex.
        steepest: its slope is at most so large.
        range: its values are between these.
        sign: 1 where f(z) has the sign of z, −1 where −f(z) has it, 0 where neither is so.
    """

    values: Callable[[Number], tuple[Valued, Valued]]
    guess: Callable[[Number], Number]
    knots: tuple[tuple[float, float], ...]
    convex: tuple[bool, ...]
    steepest: float
    range: tuple[float, float] = (-np.inf, np.inf)
    sign: int = 0

    def least(self, low: Number, high: Number, t: Number) -> Number:
        """A lower bound of f(z) − t·z over low ≤ z ≤ high; t is shaped (…, neurons), the result like it."""
        found = np.full(np.broadcast_shapes(low.shape, t.shape), np.inf)
        ends = [-np.inf, *(end for knot in self.knots for end in knot), np.inf]
        for number, (left, right) in enumerate(pairwise(ends)):
            a, b = np.maximum(low, left), np.minimum(high, right)
            there = a <= b
            a, b = np.where(there, a, low), np.where(there, b, low)
            if number % 2:
                # Between the ends of a knot nothing is known but how steep the function is.
                (value, error), _ = self.values(a)
                bound = value - t * a - error - (b - a) * (self.steepest + np.abs(t)) * OWN
                size = np.abs(value) + np.abs(t * a)
            elif self.convex[number // 2]:
                bound, size = self._tangent(a, b, t)
            else:
                bound, size = np.full_like(found, np.inf), np.zeros_like(found)
                for end in (a, b):
                    (value, error), _ = self.values(end)
                    bound = np.minimum(bound, value - t * end - error)
                    size = np.maximum(size, np.abs(value) + np.abs(t * end))
            found = np.where(there, np.minimum(found, bound - 16 * UNIT * size - TINY), found)
        # No rounding takes the function itself out of its range, or over zero.
        positive = low >= 0 if self.sign > 0 else (high <= 0) & (self.sign < 0)
        floor = np.where(positive, 0.0, self.range[0])
        return np.where(t == 0, np.maximum(found, floor), found)

    def _tangent(self, a: Number, b: Number, t: Number) -> tuple[Number, Number]:
        """A lower bound of f(z) − t·z over a ≤ z ≤ b, where f is convex; and the size of the numbers it is made of."""
        low, high = np.broadcast_arrays(a + 0 * t, b + 0 * t)
        for _ in range(52):
            middle = 0.5 * low + 0.5 * high
            falling = self.guess(middle) < t
            low, high = np.where(falling, middle, low), np.where(falling, high, middle)
        m = np.clip(0.5 * low + 0.5 * high, a, b)
        (value, error), (slope, off) = self.values(m)
        rise, spread = slope - t, off + 2 * UNIT * (np.abs(slope) + np.abs(t))
        # Where the tangent rises, it is least at a, and where it falls, at b.
        lost = np.maximum(np.maximum(rise + spread, 0) * (m - a), np.maximum(spread - rise, 0) * (b - m))
        return value - t * m - error - OWN * lost, np.abs(value) + np.abs(t * m)

    def mirrored(self) -> CurvedFunction:
        """−f."""

        def values(z: Number) -> tuple[Valued, Valued]:
            (value, error), (slope, off) = self.values(z)
            return (-value, error), (-slope, off)

        convex = tuple(not part for part in self.convex)
        least, most = self.range
        return CurvedFunction(
            values, lambda z: -self.guess(z), self.knots, convex, self.steepest, (-most, -least), -self.sign
        )


@dataclass(frozen=True)
class FunctionBand:
    """What an activation may be: any function that is nowhere below ``lower`` and nowhere above ``upper``."""

    lower: CurvedFunction
    upper: CurvedFunction

    @property
    def steepest(self) -> float:
        """No slope of it is larger."""
        return max(self.lower.steepest, self.upper.steepest)

    def least(self, low: Number, high: Number, t: Number) -> Number:
        """A lower bound of r − t·z."""
        return self.lower.least(low, high, t)

    def most(self, low: Number, high: Number, t: Number) -> Number:
        """An upper bound of r − t·z."""
        return -self.upper.mirrored().least(low, high, -t)


class Rounded:
    """The whole number next to z, of two the even one: it never falls, and lies between z − 1/2 and z + 1/2.

    Over low ≤ z ≤ high it is at least max(round(low), z − 1/2), which less t·z is least at an end or at the corner.
    """

    steepest = 1.0

    def least(self, low: Number, high: Number, t: Number) -> Number:
        """As that of ``FunctionBand``."""
        first = np.rint(low)
        found = np.full(np.broadcast_shapes(low.shape, t.shape), np.inf)
        for z in (low, np.clip(first + 0.5, low, high), high):
            value = np.maximum(first, z - 0.5)
            found = np.minimum(found, value - t * z - 16 * UNIT * (np.abs(value) + np.abs(t * z)) - TINY)
        # Whole numbers are exact.
        return np.where(t == 0, first, found)

    def most(self, low: Number, high: Number, t: Number) -> Number:
        """As that of ``FunctionBand``; of −z the whole number is the negative one."""
        return -self.least(-high, -low, t)


class Signs:
    """−1 below 0, 0 at 0 and 1 above it: less t·z linear on either side, where it is least at an end or beside 0."""

    steepest = 2.0**20

    def least(self, low: Number, high: Number, t: Number) -> Number:
        """As that of ``FunctionBand``."""
        found = np.full(np.broadcast_shapes(low.shape, t.shape), np.inf)
        for z in (low, high):
            value = np.sign(z)
            found = np.minimum(found, value - t * z - 16 * UNIT * (np.abs(value) + np.abs(t * z)) - TINY)
        # Of what 0 lies between, or at whose end it is, the least value beside it or at it.
        beside = np.where(low < 0, -1.0, 0.0)
        found = np.where((low <= 0) & (high >= 0), np.minimum(found, beside), found)
        # −1, 0 and 1 are exact.
        return np.where(t == 0, np.sign(low), found)

    def most(self, low: Number, high: Number, t: Number) -> Number:
        """As that of ``FunctionBand``; of −z the sign is the negative one."""
        return -self.least(-high, -low, t)


@dataclass(frozen=True)
class DifferenceSlopes:
    """g(z + d) − f(z) of ReLU or λ-GELU, s·d + e: ``low`` ≤ s ≤ ``high``, each 0 or 1, and −``under`` ≤ e ≤ ``over``.

    The least of low·d and high·d is concave in d, and the largest convex: less t·d both are extreme at an end.
    """

    low: Number
    high: Number
    under: Number
    over: Number
    steepest = 1.0

    def least(self, low: Number, high: Number, t: Number) -> Number:
        """As that of ``FunctionBand``, d being the variable; of all neurons."""
        return self._least(low, high, t, self.low, self.high, self.under)

    def most(self, low: Number, high: Number, t: Number) -> Number:
        """As that of ``FunctionBand``."""
        return -self._least(low, high, -t, -self.low, -self.high, self.over)

    @staticmethod
    def _least(low: Number, high: Number, t: Number, one: Number, other: Number, beyond: Number) -> Number:
        found = np.full(np.broadcast_shapes(low.shape, t.shape), np.inf)
        for d in (low, high):
            value = np.minimum(one * d, other * d)
            slack = 16 * UNIT * (np.abs(value) + np.abs(t * d) + beyond) + TINY
            found = np.minimum(found, value - t * d - beyond - slack)
        return found


def _sigmoid(z: Number) -> tuple[Valued, Valued]:
    e, _ = exponential(-np.abs(z))
    small = e / (1 + e)
    value, slope = np.where(z >= 0, 1 / (1 + e), small), small / (1 + e)
    return (value, 32 * UNIT * value + TINY), (slope, 64 * UNIT * slope + TINY)


def _tanh(z: Number) -> tuple[Valued, Valued]:
    """Near 0 by Lambert's continued fraction, whose terms are positive and leave less than 10⁻³⁰ of it."""
    e, _ = exponential(-2 * np.abs(z))
    near = np.clip(z, -0.5, 0.5)
    below = np.full_like(near, 25.0)
    for n in range(23, 0, -2):
        below = n + near * near / below
    value = np.where(np.abs(z) < 0.5, near / below, np.sign(z) * (1 - e) / (1 + e))
    slope = 4 * e / ((1 + e) * (1 + e))
    return (value, 64 * UNIT * np.abs(value) + TINY), (slope, 64 * UNIT * slope + TINY)


def _relu(z: Number) -> tuple[Valued, Valued]:
    zero = np.zeros_like(z)
    return (np.maximum(z, 0), zero), (np.where(z > 0, 1.0, 0.0), zero)


def gelu(scale: float) -> CurvedFunction:
    """z·(1 + erf(k·z))/2 with any k that differs from ``scale`` > 0 by 4 units of its size at most.

    Its slope is (1 + erf h)/2 + h·e^(−h²)/√π, h = k·z, and its second derivative is that of a positive number times
    1 − h².
    """

    def values(z: Number) -> tuple[Valued, Valued]:
        h = np.clip(scale * z, -_MOST, _MOST)
        half, error, bell, part = normal(h)
        rest = h * bell
        off = error + part * np.abs(rest) + 4 * UNIT * (half + np.abs(rest))
        return (z * half, (error + 2 * UNIT * half) * np.abs(z) + TINY), (half + rest, off)

    def guess(z: Number) -> Number:
        h = scale * z
        return np.asarray(special.ndtr(np.sqrt(2) * h) + h * np.exp(-np.minimum(h * h, 700.0)) / np.sqrt(np.pi))

    near, far = (1 - BESIDE) / scale, (1 + BESIDE) / scale
    return CurvedFunction(values, guess, ((-far, -near), (near, far)), (False, True, False), 1.13, sign=1)


def same(function: CurvedFunction) -> FunctionBand:
    """A function by itself."""
    return FunctionBand(function, function)


_INFLECTION = ((0.0, 0.0),)
SIGMOID = same(
    CurvedFunction(
        _sigmoid, lambda z: special.expit(z) * special.expit(-z), _INFLECTION, (True, False), 0.25, (0.0, 1.0)
    )
)
TANH = same(CurvedFunction(_tanh, lambda z: 1 - np.tanh(z) ** 2, _INFLECTION, (True, False), 1.0, (-1.0, 1.0), 1))
ROUNDED, SIGNS = Rounded(), Signs()
RELU = CurvedFunction(_relu, lambda z: np.where(z > 0, 1.0, 0.0), (), (True,), 1.0, sign=1)


def family(hardness: float) -> FunctionBand:
    """ReLU and all λ-GELUs with λ ≥ ``hardness``: x·Φ(λx) grows with λ at every x, and towards ReLU."""
    return FunctionBand(gelu(hardness * 0.7071067811865476), RELU)
