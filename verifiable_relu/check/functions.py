"""Functions of one variable, neuron by neuron: f − t·z between its least and its largest value over an interval.

Of smooth functions: on a part [a, b] of an interval where h(z) = f(z) − t·z is concave, h is at least the smaller of
h(a) and h(b); where it is convex, it is at least h(m) + h′(m)·(z − m), for any m of the part. How well m is chosen
changes how tight a bound is, and not whether it is right, so that m alone is found by functions that nobody has checked
(scipy's). Exponentials and error functions are this module's own: sums, products and quotients of float64 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy import special

from verifiable_relu.check.numbers import OWN, TINY, UNIT, Number

MODERATE = 2.0**-40, 2.0**40
"""Scales of a GELU in this range make no number below 2³⁰⁰ overflow, and none above 2⁻⁹⁸² vanish."""

KNOT = 2.0**-40
"""How far, relative to itself, a point may lie from where a curvature changes its sign, as computed in a few roundings.

Between the points on both sides of it, nothing is taken to be convex or concave.
"""

_LN2_HIGH, _LN2_LOW = 0.693147180601954460144043, -4.2009150964757e-11
"""ln 2 = high + low; high has 32 bits, so that its products with integers of 11 bits are exact."""

_TERMS, _NEAR, _MOST = 80, 2.0, 30.0
"""Terms of erf's series and of erfc's fraction; the |h| up to which the first is used; from which on erfc is 0 here."""

Valued = tuple[Number, Number]
"""Numbers, and how far they are off, at most."""


class CheckedFunction:
    """Base of all functions; as such, the one of a difference whose ends are not known yet.

    Attributes:
        kind: ONNX's name of the function, "family", or "Difference".
    """

    kind = ""

    def is_open(self, low: Number, high: Number) -> Number:
        """Return where it is not one linear function over [low, high]."""
        return np.ones(np.shape(low), bool)

    def corners(self, low: Number, high: Number, sign: int) -> list[tuple[Number, Number]]:
        """Return points z and values; over [low, high], sign·f(z) − t·z is at least the least of value − t·z."""
        raise NotImplementedError

    def least(self, t: Number, low: Number, high: Number, sign: int = 1) -> Number:
        """Return a lower bound of sign·f(z) − t·z over low ≤ z ≤ high."""
        found, size = np.inf, 0.0
        for z, value in self.corners(low, high, sign):
            product = t * z
            found, size = np.minimum(found, value - product), np.maximum(size, np.abs(value) + np.abs(product))
        return found - np.where(t == 0, 0.0, 16 * UNIT * size + TINY)

    def most(self, t: Number, low: Number, high: Number) -> Number:
        """Return an upper bound of f(z) − t·z over low ≤ z ≤ high."""
        return np.asarray(-self.least(-t, low, high, -1))

    def slopes(self, low: Number, high: Number) -> tuple[Number, Number]:
        """Return the default slopes of a lower and of an upper line over [low, high]."""
        raise NotImplementedError

    def range(self, low: Number, high: Number) -> tuple[Number, Number]:
        """Return numbers between which f(z) lies, rounding included."""
        none = np.zeros_like(low)
        return self.least(none, low, high), self.most(none, low, high)


@dataclass(frozen=True, eq=False)
class Kinked(CheckedFunction):
    """z where z ≥ 0, and slope·z where z ≤ 0; ``slope`` has a number for each neuron."""

    slope: Number
    kind = "Kinked"

    def is_open(self, low: Number, high: Number) -> Number:
        return np.asarray((low < 0) & (high > 0))

    def corners(self, low: Number, high: Number, sign: int) -> list[tuple[Number, Number]]:
        points = low, high, np.minimum(np.maximum(low, 0), high)
        values = [(z, sign * np.where(z >= 0, z, self.slope * z)) for z in points]
        # Products with slopes are rounded, but for those with 0 and ±1.
        rounded = (self.slope != 0) & (np.abs(self.slope) != 1)
        if not rounded.any():
            return values
        return [(z, np.where(rounded & (z < 0), np.nextafter(value, -np.inf), value)) for z, value in values]

    def slopes(self, low: Number, high: Number) -> tuple[Number, Number]:
        free = self.is_open(low, high)
        middle = np.where(np.where(free, high > -low, low >= 0), 1.0, self.slope)
        chord = np.where(free, (high - self.slope * low) / np.where(high > low, high - low, 1.0), middle)
        convex = self.slope <= 1
        return np.where(convex, middle, chord), np.where(convex, chord, middle)


class Rounded(CheckedFunction):
    """The whole number next to z, of two the even one; f(−z) = −f(z).

    Less t·z it is linear where it is one number k. At the right end of each such piece, k + 1/2, it is k·(1 − t) − t/2,
    which is least for the first or the last k, and greater at the left ends k + 1/2 of the pieces behind.
    """

    kind = "Round"

    def corners(self, low: Number, high: Number, sign: int) -> list[tuple[Number, Number]]:
        low, high = (low, high) if sign > 0 else (-high, -low)
        first, last = np.rint(low), np.rint(high)
        jumps = [(np.clip(at, low, high), value) for at, value in ((first + 0.5, first), (last - 0.5, last - 1))]
        return [(sign * z, np.maximum(first, value)) for z, value in ((low, first), *jumps, (high, last))]

    def slopes(self, low: Number, high: Number) -> tuple[Number, Number]:
        middle = 0.5 * low + 0.5 * high
        return np.where(middle > np.rint(low) + 0.5, 1.0, 0.0), np.where(middle < np.rint(high) - 0.5, 1.0, 0.0)


class Signs(CheckedFunction):
    """−1 below 0, 0 at 0 and 1 above it: less t·z linear on either side, where it is least at an end or next to 0."""

    kind = "Sign"

    def corners(self, low: Number, high: Number, sign: int) -> list[tuple[Number, Number]]:
        low, high = (low, high) if sign > 0 else (-high, -low)
        middle = np.minimum(np.maximum(low, 0.0), high)
        below = np.where((middle == 0) & (low < 0), -1.0, np.sign(middle))
        return [(sign * z, value) for z, value in ((low, np.sign(low)), (high, np.sign(high)), (middle, below))]

    def slopes(self, low: Number, high: Number) -> tuple[Number, Number]:
        rise, middle = np.sign(high) - np.sign(low), 0.5 * low + 0.5 * high
        right, left = np.maximum(low, high), -np.minimum(low, high)
        return rise / np.where(middle > 0, right, np.inf), rise / np.where(middle < 0, left, np.inf)


@dataclass(frozen=True, eq=False)
class Difference(CheckedFunction):
    """g(z + d) − f(z) of d, for ReLU or λ-GELU: s·d + e with low ≤ s ≤ high, each 0 or 1, and −under ≤ e ≤ over.

    The least of low·d and high·d is concave in d, and the largest convex: less t·d both are extreme at an end.
    """

    low_slope: Number
    high_slope: Number
    under: Number
    over: Number
    kind = "Difference"

    def corners(self, low: Number, high: Number, sign: int) -> list[tuple[Number, Number]]:
        off = self.under if sign > 0 else self.over
        values = [np.minimum(sign * self.low_slope * d, sign * self.high_slope * d) - off for d in (low, high)]
        # The difference is rounded, where there is one.
        exact = off == 0
        return [(d, np.where(exact, v, np.nextafter(v, -np.inf))) for d, v in zip((low, high), values, strict=True)]

    def slopes(self, low: Number, high: Number) -> tuple[Number, Number]:
        ends = [np.maximum(self.low_slope * d, self.high_slope * d) for d in (low, high)]
        chord = (ends[1] - ends[0]) / np.where(high > low, high - low, 1.0)
        return np.where(high > -low, self.high_slope, self.low_slope), chord


def exponential(x: Number) -> Number:
    """Return e^x for x ≤ 0, off by 16 units of its own size (and ``TINY``) at most.

    x = k·ln 2 + r with |r| < 0.35, off by less than one unit u = 2⁻⁵³; Taylor's series of e^r up to r¹⁴ leaves less
    than 2⁻⁶² of it, and its sum, in which every term is below 0.42 of the one before it, rounds by less than 4·u.
    """
    x = np.maximum(x, -800.0)
    k = np.rint(x * 1.4426950408889634)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    total = np.ones_like(r)
    for n in range(14, 0, -1):
        total = 1 + total * r / n
    return np.asarray(np.ldexp(total, k.astype(np.int64)))


def normal(h: Number) -> tuple[Number, Number, Number, Number]:
    """Return (1 + erf h)/2 and its error, at most; e^(−h²)/√π and the part of itself that it is off; |h| ≤ ``_MOST``.

    Where |h| ≤ 2, erf h = 2/√π·e^(−h²)·Σ 2ⁿ·h^(2n+1)/(1·3·…·(2n+1)) (NIST Handbook, 7.6.2), whose terms have one sign.
    The relative error of the n-th term is below (4n + 4)·u, and terms beyond n = 4·h² are negligible by comparison.
    Elsewhere erfc |h| = e^(−h²)/√π/(|h| + (1/2)/(|h| + (2/2)/(|h| + (3/2)/(|h| + …)))) (ibid., 7.9), whose terms are
    positive: rounding changes it by less than 16·u of itself, and what is left out is less than u of it.

    h may be off by 5·u of itself, and h² by 11·u, which changes e^(−h²), and erfc |h|, by less than (5 + 11·h²)·u of
    them.
    """
    size, square = np.abs(h), h * h
    bell = 0.5641895835477563 * exponential(-square)
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
class Shape:
    """A smooth function of one variable.

    Attributes:
        values: its values, and its slopes, at points.
        guess: its slopes, roughly.
        knots: where its second derivative changes its sign, each as an interval that holds the place.
        convex: of the parts between the knots, whether they are convex.
        steepest: a finite bound of |slope| within the knots, and nowhere else: any number where all knots are points.
    """

    values: Callable[[Number], tuple[Valued, Valued]]
    guess: Callable[[Number], Number]
    knots: tuple[tuple[float, float], ...]
    convex: tuple[bool, ...]
    steepest: float

    def least(self, t: Number, low: Number, high: Number, sign: int = 1) -> Number:
        """Return a lower bound of sign·f(z) − t·z over low ≤ z ≤ high; all shapes are broadcast."""
        t, low, high = np.broadcast_arrays(t, low, high)
        found = np.full(t.shape, np.inf)
        edges = [-np.inf, *(edge for knot in self.knots for edge in knot), np.inf]
        for number, (left, right) in enumerate(pairwise(edges)):
            there = np.nonzero(np.maximum(low, left) <= np.minimum(high, right))
            if not len(there[0]):
                continue
            part, a, b = t[there], np.maximum(low[there], left), np.minimum(high[there], right)
            if number % 2:
                # Between the ends of a knot nothing is known but how steep the function is.
                (value, error), _ = self.values(a)
                bound = sign * value - part * a - error - (b - a) * (self.steepest + np.abs(part)) * OWN
                size = np.abs(value) + np.abs(part * a)
            elif self.convex[number // 2] == (sign > 0):
                bound, size = self._tangent(a, b, part, sign)
            else:
                bound, size = np.full_like(part, np.inf), np.zeros_like(part)
                for end in (a, b):
                    (value, error), _ = self.values(end)
                    bound = np.minimum(bound, sign * value - part * end - error)
                    size = np.maximum(size, np.abs(value) + np.abs(part * end))
            found[there] = np.minimum(found[there], bound - 16 * UNIT * size - TINY)
        # Nothing is known of an empty interval.
        return np.where(low > high, np.nan, found)

    def slopes(self, low: Number, high: Number) -> tuple[Number, Number]:
        """Return the slopes of a line below and of one above: the chord, and the tangent in the middle."""
        middle, wide = 0.5 * low + 0.5 * high, high > low
        (at_low, _), (at_high, _), (at, _) = (self.values(z)[0] for z in (low, high, middle))
        tangent = self.guess(middle)
        chord = np.where(wide, (at_high - at_low) / np.where(wide, high - low, 1.0), tangent)
        bulges = at >= 0.5 * at_low + 0.5 * at_high
        return np.where(bulges, chord, tangent), np.where(bulges, tangent, chord)

    def _tangent(self, a: Number, b: Number, t: Number, sign: int) -> tuple[Number, Number]:
        """Return a lower bound over a ≤ z ≤ b, where sign·f is convex; and the size of the numbers it is made of."""
        low, high = a, b
        for _ in range(52):
            middle = 0.5 * low + 0.5 * high
            falling = sign * self.guess(middle) < t
            low, high = np.where(falling, middle, low), np.where(falling, high, middle)
        m = np.clip(0.5 * low + 0.5 * high, a, b)
        (value, error), (slope, off) = self.values(m)
        rise, spread = sign * slope - t, off + 2 * UNIT * (np.abs(slope) + np.abs(t))
        # Where the tangent rises, it is least at a, and where it falls, at b.
        lost = np.maximum(np.maximum(rise + spread, 0) * (m - a), np.maximum(spread - rise, 0) * (b - m))
        return sign * value - t * m - error - OWN * lost, np.abs(value) + np.abs(t * m)


@dataclass(frozen=True)
class Curve(CheckedFunction):
    """Set of functions of an activation: all that are nowhere below ``lower`` and nowhere above ``upper``."""

    lower: Shape
    upper: Shape | Kinked
    kind: str = ""

    def least(self, t: Number, low: Number, high: Number, sign: int = 1) -> Number:
        return (self.lower if sign > 0 else self.upper).least(t, low, high, sign)

    def slopes(self, low: Number, high: Number) -> tuple[Number, Number]:
        return self.lower.slopes(low, high)[0], self.upper.slopes(low, high)[1]


def _sigmoid(z: Number) -> tuple[Valued, Valued]:
    e = exponential(-np.abs(z))
    small = e / (1 + e)
    value, slope = np.where(z >= 0, 1 / (1 + e), small), small / (1 + e)
    return (value, 32 * UNIT * value + TINY), (slope, 64 * UNIT * slope + TINY)


def _tanh(z: Number) -> tuple[Valued, Valued]:
    """Return 2·sigmoid(2·z) − 1."""
    (value, error), (slope, off) = _sigmoid(2 * z)
    return (2 * value - 1, 2 * error + 2 * UNIT), (4 * slope, 4 * off)


def _gelu(scale: float) -> Shape:
    """Return z·(1 + erf(k·z))/2 with any k that differs from ``scale`` > 0 by 4 units of its size at most.

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

    near, far = (1 - KNOT) / scale, (1 + KNOT) / scale
    return Shape(values, guess, ((-far, -near), (near, far)), (False, True, False), 1.13)


_FLAT = ((0.0, 0.0),)
_EXPIT = Shape(_sigmoid, lambda z: special.expit(z) * special.expit(-z), _FLAT, (True, False), 0.25)
_TANH = Shape(_tanh, lambda z: 1 - np.tanh(z) ** 2, _FLAT, (True, False), 1.0)
SIGMOID, TANH = Curve(_EXPIT, _EXPIT, "Sigmoid"), Curve(_TANH, _TANH, "Tanh")


def gelu(scale: float) -> Curve:
    """Return z·(1 + erf(k·z))/2, where k may be off by 4 units of ``scale``."""
    return Curve(_gelu(scale), _gelu(scale), "Gelu")


def family(hardness: float) -> Curve:
    """Return ReLU and all λ-GELUs with λ ≥ ``hardness``: x·Φ(λx) grows with λ at every x, and towards ReLU."""
    return Curve(_gelu(hardness * 0.7071067811865476), Kinked(np.zeros(1)), "family")
