"""Smooth functions and families of them: linear bounds from value, derivative and the points where f bends.

Between two neighbouring bends f is convex or concave (f′ only rises, or only falls): such a part is a *piece*. A row of
``curves.CURVES`` says that, and little more, of each function.

**Slopes.** The lower bound supports the convex envelope of f on [l, u] at the middle of the interval: its value there
is its mean, so that no other sound line leaves less area. The envelope at m is f itself, or a line between two points
p < m < q of f. These are found from p = l and q = u on: with s the slope of the line from p to q, a point d of [l, u]
where f(x) − s·x is least takes the place of p or q, whichever is on its side of m (for a fixed p or q this is
Dinkelbach's method, which converges quadratically). If f(m) lies below the line in the end, the slope is f′(m). The
upper bound mirrors that. Any slope is sound.

**Offsets.** h(x) = f(x) − s·x is least at l, at u, at a kink, or inside a piece on which it is convex. There it lies
above its tangent at any point d: with tilt h′(d) > 0, say, it is at least h(d) − h′(d)·r if its least point is not
further than r left of d. r is the distance from d to the piece's end or, where h′ changes sign between d and a point e
next to d, to e. A d with h′(d) = 0, given by a formula or a table, makes this exact; no proof rests on the formula.

**Rounding.** With u the unit roundoff, values of f are off by 16u·(|f(x)| + absolute), and those of f′ by 8u·(|f′(x)| +
½), at most, the ½ only between the bends of a rectifier, which are at most 6 apart (4 and 5 were measured). An offset t
is then off by 16u·(|f(d)| + absolute), by 4u·(|t| + |s|·r) for the few operations, r = max(|l|, |u|), and by the error
of h′ times the length of the piece, 8u·(|s| + ½)·2r; where |f′(d)| exceeds |s|, the excess is a part of the gap below
the tangent, which is enlarged. |f(d)| is at most |t| + |s|·r, which exceeds a quarter, or the length of the interval,
where the ½ counts. 2·ULPS·u·(|t| + |s|·r + absolute) covers all that. Far out, exp(−x²) errs by x²·u of itself: there
f′ is so small that 2⁻²⁶·r as a part of the absolute errors is enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.functions.curves import CURVES, SmoothCurve
from verifiable_relu.ir.functions.function import Function, SlopeRange
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.interval import Interval
from verifiable_relu.rounding import (
    ENCLOSE_OWN,
    ENCLOSE_TINY,
    ULPS,
    above,
    below,
    coarse,
    divisor,
    epsilon,
    largest,
    negligible,
    smooth_divisor,
    unit_roundoff,
)

_ROUNDS = 4
"""How often the points between which an envelope is a line are improved."""

_CELLS = 1 << 12
"""Of a table of points with a given slope."""

_LEAST_SHARE = 2.0**-100
"""From its limit to its largest distance from that, the least part of the way at which a slope is tabulated."""

_FAR = 2.0**40
"""Further out than where any slope is looked for."""

_INSIDE = 1e-3
"""Where ascents begin and end, in parts of the interval: at its very ends every steeper line supports f, too."""

_PARTS = 16
"""A segment is split at a multiple of its width divided by this number, or at 0."""


@dataclass(frozen=True, eq=False)
class Smooth(Function):
    """A function of ``CURVES`` with its parameter: α of ELU, λ of GELU, the exponent of a power; 1 for the others.

    Attributes:
        kind: its name there.
        parameter: the number.
        learned: the same as a tensor (), for gradients by it.
    """

    kind: str
    parameter: float = 1.0
    learned: Tensor | None = None
    increasing: bool = field(init=False)
    gated: bool = field(init=False)
    degree: int = field(init=False)
    wide: bool = field(init=False)

    def __post_init__(self) -> None:
        curve = self.curve
        known = {
            "increasing": curve.increasing,
            "gated": curve.gated,
            "degree": curve.power or 1,
            "wide": curve.wide,
        }
        for name, value in known.items():
            object.__setattr__(self, name, value)

    @property
    def curve(self) -> SmoothCurve:
        """The function's row of ``CURVES``."""
        return CURVES[self.kind]

    @property
    def parameters(self) -> Mapping[str, Any]:
        return {"parameter": self.parameter}

    @property
    def _number(self) -> Any:
        """The parameter, as a tensor where gradients by it are wanted."""
        return self.parameter if self.learned is None else self.learned

    @property
    def _scale(self) -> Any:
        return 1 / self._number if self.curve.stretched else 1.0

    # What it computes

    def value(self, x: Tensor) -> Tensor:
        return self.curve.value(x, self._number)

    def derivative(self, x: Tensor) -> Tensor:
        """Return f′(x); at a kink the derivative of the piece that is not linear."""
        return self.curve.derivative(x, self._number)

    def exact(self, x: Dyadic, denominator: int) -> Dyadic | None:
        power = self.curve.power
        return Dyadic(x.numbers**power, x.exponent * power) if power else None

    @torch.no_grad()
    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def enclose(self, x: np.ndarray, error: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
        curve = self.curve
        y = curve.numpy(x, self.parameter)
        low, high = below((x - error).astype(np.float64)), above((x + error).astype(np.float64))
        slopes = self.derivative_range(Interval(torch.from_numpy(low), torch.from_numpy(high)))
        moved = np.maximum(-slopes.lower.numpy(), slopes.upper.numpy()) * error
        found = np.where(error == 0, 0, moved) + ULPS * unit * (np.abs(y) + curve.error_scale(x))
        certain = (x == 0) & (error == 0) & (y == 0)
        return y, np.where(certain, 0, found * ENCLOSE_OWN + ENCLOSE_TINY)

    # What bounds need

    def image(self, x: Interval) -> Interval:
        """Return the image: f is extreme at an end or at a turn; a turn's error of u moves f by only u²."""
        curve = self.curve
        values = self.value(torch.stack([x.lower, x.upper, *self._within(x, curve.turns)]))
        error = self._error(values, 0.0, 0.0)
        lower, upper = (values - error).amin(0), (values + error).amax(0)
        if curve.period is not None:
            whole, unknown = self._is_whole(x), x.lower.isnan() | x.upper.isnan()
            lower, upper = (
                end.masked_fill(whole, sign).masked_fill(unknown, torch.nan) for end, sign in ((lower, -1), (upper, 1))
            )
        # The image is cut to the range of f, and at 0 and 1 where f is known to stay on one side.
        lower, upper = lower.clamp(min=curve.least), upper.clamp(max=curve.most)
        if curve.zero is not None:
            lower = torch.where(x.lower >= curve.zero, lower.clamp(min=0), lower)
            upper = torch.where(x.upper <= curve.zero, upper.clamp(max=0), upper)
        if curve.one_from is not None:
            lower = torch.where(x.lower >= curve.one_from, lower.clamp(min=1), lower)
        if curve.one_to is not None:
            upper = torch.where(x.lower >= curve.one_to, upper.clamp(max=1), upper)
        return Interval(lower, upper)

    def unstable(self, x: Interval) -> Tensor:
        varies, far = ~(x.lower >= x.upper), self.curve.saturated * self._scale
        return varies if math.isinf(far) else varies & ~((x.lower >= far) | (x.upper <= -far))

    def derivative_range(self, x: Interval) -> Interval:
        curve, values = self.curve, self.image(x)
        bends = self._within(x, curve.bends)
        slopes = self.derivative(torch.stack([x.lower, x.upper, *bends, *map(below, bends), *map(above, bends)]))
        lower, upper = slopes.amin(0), slopes.amax(0)
        unit, absolute = 2 * ULPS * unit_roundoff(slopes.dtype), curve.absolute * max(1.0, self.parameter) + curve.gated
        lower = lower - unit * (lower.abs() + absolute) - negligible(slopes.dtype)
        upper = upper + unit * (upper.abs() + absolute) + negligible(slopes.dtype)
        if curve.period is not None:
            whole = self._is_whole(x)
            lower, upper = lower.masked_fill(whole, -1), upper.masked_fill(whole, 1)
        unknown = ~(values.lower.isfinite() & values.upper.isfinite())
        return Interval(lower.masked_fill(unknown, torch.nan), upper.masked_fill(unknown, torch.nan))

    def slopes(self, x: Interval, chosen_by: Interval | None = None) -> tuple[Tensor, Tensor]:
        middle = x.lower / 2 + x.upper / 2
        return self._support(x, middle, True), self._support(x, middle, False)

    def slope_range(self, x: Interval) -> SlopeRange:
        ends = torch.stack([torch.lerp(x.lower, x.upper, t) for t in (_INSIDE, 1 - _INSIDE)])
        lower, upper = (self._support(x, ends, side) for side in (True, False))
        return SlopeRange(lower[0], lower[1], upper[0], upper[1])

    def floor(self, x: Interval, slope: Tensor) -> Tensor:
        return self._offset(x, slope, 1)

    def top(self, x: Interval, slope: Tensor) -> Tensor:
        return self._offset(x, slope, -1)

    def _error(self, value: Tensor, term: Tensor | float, reach: Tensor | float) -> Tensor:
        """Return a bound of the error of a value, or of an offset with a term |s|·reach (see the module)."""
        curve, unit = self.curve, 2 * ULPS * unit_roundoff(value.dtype)
        scale = self._scale if curve.stretched else max(1.0, self.parameter)
        size = value.abs() + term + curve.absolute * (scale + 2.0**-26 * reach)
        return unit * size + negligible(value.dtype) * (1 + reach)

    def _support(self, x: Interval, at: Tensor, convex: bool) -> Tensor:
        """Return the slope of the convex, or the concave, envelope of f on [l, u] at a point.

        A gradient is that of the line between the two points, which only moves with them where they are ends.
        """
        with torch.no_grad():
            p, q, of_p, of_q = self._support_points(x, at, convex)
        if torch.is_grad_enabled() and (x.lower.requires_grad or self.learned is not None):
            p, q = self._attached(x, p), self._attached(x, q)
            of_p, of_q = self.value(p), self.value(q)
        sign, slope = 1 if convex else -1, (of_q - of_p) / smooth_divisor(q - p)
        tangent, noise = self.derivative(at), 8 * epsilon(slope.dtype) * (of_p.abs() + of_q.abs())
        joined = (sign * (self.value(at) - of_p - slope * (at - p)) > noise) | ~tangent.isfinite()
        found = torch.where(joined, slope, tangent)
        return found.masked_fill(self._is_whole(x), 0) if self.curve.period is not None else found

    @staticmethod
    def _attached(x: Interval, point: Tensor) -> Tensor:
        """Return the points, attached to the gradients of the interval's ends where they coincide."""
        return torch.where(point == x.lower, x.lower, torch.where(point == x.upper, x.upper, point))

    def _support_points(self, x: Interval, at: Tensor, convex: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the points p ≤ ``at`` ≤ q between which the envelope is a line if f lies above it, and f there."""
        sign, pieces = 1 if convex else -1, self._pieces(x, convex)
        p, q = x.lower.expand_as(at), x.upper.expand_as(at)
        of_p, of_q = self.value(p), self.value(q)
        slope = (of_q - of_p) / divisor(q - p)
        kinks = self._within(x, self.curve.bends) if self.curve.kinked else []
        for _ in range(_ROUNDS if len(pieces[0]) or kinks else 0):
            least = sign * (of_p - slope * p)
            found = [*self._stationary(x, slope, convex, pieces, False)] if len(pieces[0]) else []
            for d in (*found, *(kink.expand_as(slope) for kink in kinks)):
                of_d = self.value(d)
                depth = sign * (of_d - slope * d)
                lower = depth < least
                left, right = lower & (d < at), lower & (d >= at)
                p, of_p = torch.where(left, d, p), torch.where(left, of_d, of_p)
                q, of_q = torch.where(right, d, q), torch.where(right, of_d, of_q)
                least = torch.minimum(least, depth)
            slope = (of_q - of_p) / divisor(q - p)
        return p, q, of_p, of_q

    def _offset(self, x: Interval, slope: Tensor, sign: int) -> Tensor:
        """Return ``floor`` for a sign of 1, and for −1 ``top``."""
        axes = (1,) * (slope.ndim - x.lower.ndim)
        ends = torch.stack([x.lower, x.upper, *(self._within(x, self.curve.bends) if self.curve.kinked else ())])
        heights = (self.value(ends) * sign).reshape(-1, *axes, *x.lower.shape)
        values = [heights - (sign * slope) * ends.reshape(heights.shape)]
        pieces = self._pieces(x, sign > 0)
        if len(pieces[0]):
            d, gap = self._tangent(x, slope.detach(), sign, pieces)
            d = self._attached(x, d) if torch.is_grad_enabled() and x.lower.requires_grad else d
            values.append(sign * (self.value(d) - slope * d) - gap)
        offset = sign * torch.cat(values).amin(0)
        if self.curve.period is not None:
            most = torch.maximum(sign * slope * x.lower, sign * slope * x.upper)
            offset = torch.where(self._is_whole(x), sign * (-1 - most), offset)
        return offset - sign * self._error(offset, slope.abs() * _reach(x), _reach(x))

    @torch.no_grad()
    def _tangent(self, x: Interval, slope: Tensor, sign: int, pieces: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return points of the pieces, and how far ±(f(x) − slope·x) falls below its value there at most."""
        d = self._stationary(x, slope, sign > 0, pieces, True)
        start, stop = (end.reshape(len(end), *(1,) * (slope.ndim - x.lower.ndim), *x.lower.shape) for end in pieces)
        tilt = sign * (self.derivative(d) - slope)
        near = self.curve.precision * (self._scale + d.abs())
        e = torch.where(tilt > 0, d - near, d + near)
        left = torch.where(tilt > 0, d - start, stop - d)
        # By the sign of the tilt: a product of two tiny numbers would be 0 though h′ does not change its sign.
        turns = sign * (self.derivative(e) - slope) * tilt.sign() <= 0
        left = torch.where(turns, torch.minimum(left, (d - e).abs()), left)
        # A function may be upright at an end, where nothing is left.
        return d, tilt.abs().clamp(max=largest(d.dtype)) * left * (1 + 2.0**-16)

    # Pieces and points

    def _is_whole(self, x: Interval) -> Tensor:
        """Return True where [l, u] is as long as a period, or too far out to locate f's turns."""
        near = (x.upper - x.lower < (self.curve.period or 0)) & (_reach(x) < coarse(x.lower.dtype))
        return ~near

    def _within(self, x: Interval, points: tuple[float, ...]) -> list[Tensor]:
        """Return points of f, in order, those of all periods that matter, each moved to the nearest of [l, u]."""
        lower, upper, period = x.lower, x.upper, self.curve.period
        if period is None:
            return [torch.maximum(upper.clamp(max=point * self._scale), lower) for point in points]
        first = torch.floor(lower / period)
        moved = [point + (first + k) * period for k in range(3) for point in points]
        return [point.clamp(lower, upper) for point in moved]

    def _pieces(self, x: Interval, convex: bool) -> tuple[Tensor, Tensor]:
        """Return the ends of the pieces of [l, u] on which f is convex, or concave: (pieces, batch, n) each."""
        curve = self.curve
        edges = [x.lower.detach(), *self._within(x, curve.bends), x.upper.detach()]
        rising = curve.rising if curve.period is None else (curve.rising[:2] * len(edges))[: len(edges) - 1]
        chosen = [i for i, rises in enumerate(rising) if rises is convex]
        if not chosen:
            return x.lower.new_empty(0), x.lower.new_empty(0)
        return torch.stack([edges[i] for i in chosen]), torch.stack([edges[i + 1] for i in chosen])

    def _stationary(
        self, x: Interval, slope: Tensor, convex: bool, pieces: tuple[Tensor, Tensor], fine: bool
    ) -> Tensor:
        """Return the point of each piece with the given slope, or its nearer end: (pieces, …, batch, n)."""
        curve, axes = self.curve, (1,) * (slope.ndim - x.lower.ndim)
        start, stop = (end.reshape(len(end), *axes, *x.lower.shape) for end in pieces)
        if curve.period is not None:
            # f′ is a sine of the distance to the middle of a whole piece.
            length = curve.period / 2
            middle = (
                torch.floor((start / 2 + stop / 2 - curve.bends[0]) / length) * length + curve.bends[0] + length / 2
            )
            found = middle + (1 if convex else -1) * torch.asin(slope.clamp(-1, 1))
        elif curve.point is not None:
            found = curve.point(slope, self.parameter)[None]
            # Of two points with this slope, one on either side of 0, the left one is in the first piece.
            found = -found if curve.mirrored and convex is curve.rising[0] else found
        else:
            chosen = (1,) if convex else (0, 2)
            found = torch.stack([_tables(self.kind).point(slope, piece, fine) for piece in chosen]) * self._scale
        return torch.minimum(torch.maximum(found, start), stop)

    # What branching needs

    def split_point(self, x: Interval) -> Tensor:
        """Return the split point, of a few candidates and 0, with the least area between f and both halves' chords."""
        shares = torch.arange(_PARTS + 1, dtype=x.lower.dtype, device=x.lower.device)
        points = torch.lerp(x.lower, x.upper, (shares / _PARTS).reshape(-1, *(1,) * x.lower.ndim))
        zero = points[_PARTS // 2].masked_fill((x.lower < 0) & (x.upper > 0), 0)
        points = torch.cat([points, zero[None]]).sort(0).values
        values = self.value(points)
        halves = [_area(points[: k + 1], values[: k + 1]) + _area(points[k:], values[k:]) for k in range(1, _PARTS + 1)]
        best = torch.stack(halves).nan_to_num(torch.inf).argmin(0) + 1
        return points.gather(0, best[None])[0]


class _PointTables:
    """Points with given slopes of a function that is concave, convex, concave, with the parameter 1."""

    def __init__(self, curve: SmoothCurve) -> None:
        self.curve = curve
        self._made: dict[Any, Tensor] = {}

    def point(self, slope: Tensor, piece: int, fine: bool) -> Tensor:
        """Return the point with a slope of piece 0, 1 or 2."""
        key = (piece, slope.dtype, slope.device)
        if key not in self._made:
            self._made[key] = self._tabulated(piece).to(slope)
        points, steps, rates = self._made[key]
        place = self._place(slope, piece) * _CELLS
        cell = place.nan_to_num(0).long().clamp_(0, _CELLS - 1)
        found = points[cell] + (place - cell) * steps[cell]
        return found - (self.curve.derivative(found, 1.0) - slope) * rates[cell] if fine else found

    def _place(self, slope: Tensor, piece: int) -> Tensor:
        """Return a number in [0, 1] for each slope of a piece; the point with this slope is a smooth function of it.

        About a bend the slope is a square, and towards the ends it falls like exp(−x²), or exp(−x), times x.
        """
        low, high = self._slopes_at_bends
        if piece == 1:
            return torch.acos(((low + high - 2 * slope) / (high - low)).clamp(-1, 1)) / math.pi
        limit, bend = (0.0, low) if piece == 0 else (1.0, high)
        share = ((slope - limit) / (bend - limit)).clamp(_LEAST_SHARE, 1)
        return torch.sqrt(torch.log(share) / math.log(_LEAST_SHARE))

    @cached_property
    def _slopes_at_bends(self) -> tuple[float, float]:
        low, high = self.curve.derivative(
            torch.tensor(self.curve.bends, dtype=torch.float64, device="cpu"), 1.0
        ).tolist()
        return low, high

    def _tabulated(self, piece: int) -> Tensor:
        """Return points of equally spaced places, their differences, and these divided by those of the slopes."""
        curve, (low, high) = self.curve, self._slopes_at_bends
        place = torch.linspace(0, 1, _CELLS + 1, dtype=torch.float64, device="cpu")
        # The slopes of these places, as ``_place`` has them, and by halving their points.
        limit, bend = (0.0, low) if piece == 0 else (1.0, high)
        slopes = limit + (bend - limit) * _LEAST_SHARE ** (place * place)
        first, last = (-_FAR, curve.bends[0]) if piece == 0 else (curve.bends[1], _FAR)
        if piece == 1:
            slopes = (low + high) / 2 - (high - low) / 2 * torch.cos(math.pi * place)
            first, last = curve.bends
        start, stop = (torch.full_like(place, end) for end in (first, last))
        for _ in range(100):
            middle = start / 2 + stop / 2
            before = (self.curve.derivative(middle, 1.0) < slopes) == bool(curve.rising[piece])
            start, stop = torch.where(before, middle, start), torch.where(before, stop, middle)
        steps = start.diff()
        return torch.stack([start[:-1], steps, (steps / slopes.diff()).nan_to_num(0, 0, 0)])


@cache
def _tables(kind: str) -> _PointTables:
    return _PointTables(CURVES[kind])


def _area(x: Tensor, y: Tensor) -> Tensor:
    """Return the area of the band about the chord of curves that holds all of their points, (points, …)."""
    width = x[-1] - x[0]
    rest = y - y[0] - (y[-1] - y[0]) / divisor(width) * (x - x[0])
    return (rest.amax(0) - rest.amin(0)) * width


def _reach(x: Interval) -> Tensor:
    return torch.maximum(x.lower.abs(), x.upper.abs())


_RELU = PiecewiseLinear()


@dataclass(frozen=True, eq=False)
class Hardened(Function):
    """ReLU and every x·P(λx) with λ ≥ 1, x·P(x) being a gated function: ``value`` is ReLU's.

    x·P(λx) never falls as λ grows, so that all members lie between that of λ = 1 and ReLU (arXiv 2603.21991). Of
    λ-GELU, ``least`` has the least λ. A counterexample speaks of the limit, ReLU.
    """

    least: Smooth
    kind = "Hardened"
    gated = True

    @property
    def parameters(self) -> Mapping[str, Any]:
        return {"function": self.least.kind, **self.least.parameters}

    @property
    def limit(self) -> Function:
        return _RELU

    def value(self, x: Tensor) -> Tensor:
        return x.relu()

    def enclose(self, x: np.ndarray, error: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
        raise UnsupportedError("stands for a set of activations, not for one value")

    def image(self, x: Interval) -> Interval:
        return Interval(self.least.image(x).lower, x.upper.relu())

    def unstable(self, x: Interval) -> Tensor:
        return self.least.unstable(x)

    def derivative_range(self, x: Interval) -> Interval:
        raise UnsupportedError("the change is not bounded through a set of activations")

    def slopes(self, x: Interval, chosen_by: Interval | None = None) -> tuple[Tensor, Tensor]:
        return self.least.slopes(x)[0], _RELU.slopes(x)[1]

    def slope_range(self, x: Interval) -> SlopeRange:
        smooth, chord = self.least.slope_range(x), _RELU.slopes(x)[1]
        return SlopeRange(smooth.lower_from, smooth.lower_to, chord, chord)

    def floor(self, x: Interval, slope: Tensor) -> Tensor:
        return self.least.floor(x, slope)

    def top(self, x: Interval, slope: Tensor) -> Tensor:
        return _RELU.top(x, slope)

    def split_point(self, x: Interval) -> Tensor:
        return _RELU.split_point(x)
