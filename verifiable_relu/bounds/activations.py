"""What bound propagation knows of each activation f: its image of an interval, and its linear relaxation on one.

A table has one row for each kind of activation. A linear relaxation on [l, u] is always built in two steps:

* Slopes. The lower line supports the *convex envelope* of f on [l, u] at the interval's midpoint. The mean of a line
  over [l, u] is its value at the midpoint, so that no other sound line has less area between itself and f. The upper
  line supports the concave envelope at the midpoint. For ReLU this is CROWN's adaptive choice (Zhang et al., arXiv
  1811.00866, section 3.4), for sigmoid and tanh these are CROWN's tangents and chords (ibid., table 2).
* Offsets. The offset is computed for the slope s as it is in floating point: the least, or the greatest, value of
  f(x) − s·x over all points of [l, u] that can have it. So the rounding of a slope makes no line unsound, and only the
  rounding of offsets must be accounted for.

The offset of a line is off by at most ``ulps``·u·(|slope|·max(|l|, |u|) + |offset|) + u·``absolute``, and an end of an
image by at most ``ulps``·u·|end| + u·``absolute`` (``ActivationRow``), where u is the unit roundoff of the dtype.
Underflow adds a few of the smallest normal numbers of the dtype; to an offset 1 + max(|l|, |u|) times as many, since it
may take a slope. Nothing here is moved outward for all that: ``bounds.rounding`` does it. A bound that is NaN gives
NaN, or lines that hold without it.

**Envelopes.** The convex envelope of f on [l, u] is f itself in a part where f is convex; elsewhere it consists of
lines that are tangent to f at a contact point of that part and end at l or u, or it is the chord of [l, u]. So its
slope at p in [l, u] is f'(p), or the slope of the line between two contact points. The concave envelope mirrors that.

A contact point inside the interval is a tangent point, at which the slope of the line is stationary as a function of
the point. An error δ of the point changes the slope by O(δ²), and the point may be taken for a constant where the slope
is differentiated. So points are found roughly, by a fixed number of steps, and slopes are still good to all digits.
Soundness rests on neither.

GELU is g(t) = t·Φ(t) = t/2 + k(t) with the even function k(t) = t·(Φ(t) − ½), so that it is enough to know one side of
0. With the density φ of the standard normal distribution, k'(t) = Φ(t) − ½ + t·φ(t) and k''(t) = (2 − t²)·φ(t): k is
convex for |t| < √2 and concave outside.

**A function that jumps**, f, never falls. Where it jumps at 0 alone, it is at least f(l) and at most f(u), with the
jump between; where it jumps at every whole number or half, max(f(l), x − b) ≤ f(x) ≤ min(f(u), x + a) with the band
of its row. Either is a lower function that is flat and then rises, and an upper one that rises and then is flat: the
offset of a line of any slope is at l, at u or at the corner of these.

**Any smooth function of which the bends are known.** The offset of a line of slope s is the least or the largest value
of f(x) − s·x on [l, u]. That is at an end, at a bend, or where f′(x) = s, and between two neighbouring bends f′ only
rises or only falls: there is at most one such point, which is found by halving. It is found to the last digit but for
rounding in f′, and f(x) − s·x is flat about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds.tuning import Bounds, Lines
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.nodes import (
    FUNCTIONS,
    Activation,
    Beside,
    Curve,
    Gelu,
    Hardened,
    Identity,
    Kinked,
    LeakyRelu,
    Node,
    Relu,
    Sigmoid,
    Step,
    Tanh,
)
from verifiable_relu.rounding import above, below, coarse, epsilon, narrow, smooth_divisor, tiny

(DIP,) = FUNCTIONS["GELU"].turns
"""Where g(t) = t·Φ(t) is smallest: the root of Φ(t) + t·φ(t)."""

_INFLECTION = math.sqrt(2)
"""Where k is neither convex nor concave: k''(√2) = 0."""

_DENSITY = 1 / math.sqrt(2 * math.pi)
"""φ(0)."""

_STEEPEST = 0.5 * math.erf(1) + _INFLECTION * _DENSITY / math.e
"""k'(√2), the largest slope of k."""

_FLAT = 9.0
"""Beyond this point |k''| < 1e-15: where a line touches k beyond it does not show in the line's slope."""


def _density(t: Tensor) -> Tensor:
    """φ(t)."""
    return _DENSITY * torch.exp(-0.5 * t * t)


def _even(t: Tensor) -> Tensor:
    """k(t)."""
    return 0.5 * t * torch.erf(t / _INFLECTION)


def _even_slope(t: Tensor) -> Tensor:
    """k'(t)."""
    return 0.5 * torch.erf(t / _INFLECTION) + t * _density(t)


def _tanh_slope(x: Tensor) -> Tensor:
    """tanh'(x) = 1 − tanh(x)², without cancellation."""
    return 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x)


def _bisect(left_of_root: Callable[[Tensor], Tensor], lo: Tensor, hi: Tensor, steps: int) -> Tensor:
    """A root in [lo, hi], up to (hi − lo)/2^(steps + 1); ``left_of_root`` tells whether a point is left of the root."""
    for _ in range(steps):
        middle = lo + (hi - lo) / 2
        left = left_of_root(middle)
        lo, hi = torch.where(left, middle, lo), torch.where(left, hi, middle)
    return lo + (hi - lo) / 2


def _slope(
    value: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor], point: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """The slope of an envelope of f at a point: for a ≤ point ≤ b that of the line from a to b, elsewhere f'(point).

    Over a narrow [a, b] the quotient of differences would be nothing but rounding errors. f'(point), which differs from
    the true quotient by less than these, is taken there, too.
    """
    least = narrow(point.detach())
    joined = (a <= point) & (point <= b) & (b - a > least)
    chord = (value(b) - value(a)) / torch.where(joined, b - a, 1)
    return torch.where(joined, chord, derivative(point))


def _tanh_convex(lower: Tensor, upper: Tensor, point: Tensor) -> Tensor:
    """The slope at ``point`` of the convex envelope of tanh, which is convex left of 0 and concave right of 0."""
    with torch.no_grad():
        # For large u the line through (u, tanh u) is tangent at about −log(2u)/2, which is never below −u.
        bottom = -upper.clamp(0, 50)
        value = torch.tanh(upper)
        contact = _bisect(
            lambda d: value - torch.tanh(d) > _tanh_slope(d) * (upper - d), bottom, torch.zeros_like(bottom), 22
        )
    start = torch.where(upper > 0, torch.maximum(contact, lower), upper)
    return _slope(torch.tanh, _tanh_slope, point, start, upper)


def tanh_slopes(lower: Tensor, upper: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes at ``point`` of the convex and the concave envelope of tanh on [lower, upper]."""
    return _tanh_convex(lower, upper, point), _tanh_convex(-upper, -lower, -point)


def tanh_turn(slope: Tensor) -> Tensor:
    """The x ≥ 0 at which tanh'(x) = slope, arcosh(slope^(−½)); for a slope beyond (0, 1) the x of the nearer end."""
    slope = slope.clamp(tiny(slope.dtype), 1)
    return torch.log1p(torch.sqrt(1 - slope)) - 0.5 * torch.log(slope)


def gelu_slopes(lower: Tensor, upper: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes at ``point`` of the convex and the concave envelope of GELU (λ = 1) on [lower, upper].

    They are derived for k in the place of GELU and for point ≥ 0; a negative point is mirrored, since k is even.

    * Convex: the line through (u, k(u)) with u > √2 is tangent at d ∈ (−DIP, √2), where k(u) − u·k'(d) + d²·φ(d) = 0.
      For l < −√2 there is another line, from l to the convex part, but it ends left of 0.
    * Concave: the line through (l, k(l)) is tangent at e ≥ √2, where l·k'(e) − e²·φ(e) − k(l) = 0. For l ≤ 0 no term is
      positive and there is no such e: the envelope is the chord.
    """
    mirrored = point < 0
    l, u = torch.where(mirrored, -upper, lower), torch.where(mirrored, -lower, upper)  # noqa: E741
    p = point.abs()

    with torch.no_grad():
        flat, steep = torch.full_like(p, -DIP), torch.full_like(p, _INFLECTION)
        far = u.clamp(min=_INFLECTION)
        height = 0.5 * torch.erf(far / _INFLECTION)
        tangent = _bisect(lambda d: height + d * d * _density(d) / far > _even_slope(d), flat, steep, 16)

        def beyond(e: Tensor) -> Tensor:
            return l * _even_slope(e) - e * e * _density(e) < _even(l)

        end = u.clamp(_INFLECTION, _FLAT)
        reached = _bisect(beyond, steep, end, 16)
        unreached = beyond(end)

    start = torch.where(u > _INFLECTION, torch.maximum(tangent, l), u)
    convex = _slope(_even, _even_slope, p, start, u)
    stop = torch.where(l >= _INFLECTION, l, torch.where(unreached | (u <= _INFLECTION), u, reached))
    concave = _slope(_even, _even_slope, p, l, stop)
    sign = torch.where(mirrored, -torch.ones_like(p), 1)
    return 0.5 + sign * convex, 0.5 + sign * concave


def gelu_valley(slope: Tensor) -> Tensor:
    """The t ∈ [−√2, √2] at which g'(t) = slope; for a slope that g' does not have there, the nearer end.

    It is found by Newton's method on [0, √2], where k' is concave, from a guess that is close at both ends.
    """
    centred = (slope - 0.5).clamp(-_STEEPEST, _STEEPEST)
    target = centred.abs()
    t = _INFLECTION * (1 - torch.sqrt(1 - target / _STEEPEST))
    for _ in range(6):
        curvature = (2 - t * t) * _density(t)
        step = (target - _even_slope(t)) / curvature.clamp(min=epsilon(t.dtype))
        t = (t + step).clamp(0, _INFLECTION)
    return torch.where(centred < 0, -t, t)


def gelu_ridge(slope: Tensor) -> Tensor:
    """The t at which |t| ≥ √2 and g'(t) = slope, which is below 0 or above 1; for other slopes a t far out.

    With r = max(−slope, slope − 1), |t| is the root of t·φ(t) − Φ(−t) = r. It is found by Newton's method on the
    logarithms of both sides, which are nearly quadratic in t, with Φ(−t) = φ(t)·√(π/2)·erfcx(t/√2).
    """
    peak = _STEEPEST - 0.5
    rest = torch.maximum(-slope, slope - 1).clamp(tiny(slope.dtype), peak)
    depth = torch.log(peak / rest).clamp(min=0)
    t = torch.sqrt(2 + 2 * depth + 2.2 * torch.sqrt(depth))
    for _ in range(6):
        gap = t - math.sqrt(math.pi / 2) * torch.special.erfcx(t / _INFLECTION)
        surplus = torch.log(gap * _DENSITY) - torch.log(rest) - 0.5 * t * t
        fall = ((t * t - 2) / gap).clamp(min=epsilon(t.dtype))
        t = (t + surplus / fall).clamp(min=_INFLECTION)
    return torch.where(slope < 0.5, -t, t)


_HALVINGS = {torch.float64: 60, torch.float32: 32}
"""How often an interval is halved until nothing of it is left."""


def _smooth_image(node: Curve, bounds: Bounds) -> Bounds:
    """The least and the largest value on [l, u]: at an end or where the function turns."""
    points = [bounds.lower, bounds.upper, *_within(node, bounds, node.known.turns)]
    values = torch.stack([node.forward(x) for x in points])
    # Of equal values the first one, which is at an end, has the derivative; a turn that was moved there has none.
    found = Bounds(values.min(0).values, values.max(0).values)
    return _beyond_a_period(node, bounds, found)


def _beyond_a_period(node: Curve, bounds: Bounds, found: Bounds) -> Bounds:
    """Over a whole period, sine and cosine have every value from −1 to 1."""
    period = node.known.period
    if period is None:
        return found
    whole = _is_whole(bounds, period)
    unknown = torch.isnan(bounds.lower) | torch.isnan(bounds.upper)
    one = torch.where(unknown, torch.nan, torch.ones_like(found.lower))
    return Bounds(torch.where(whole, -one, found.lower), torch.where(whole, one, found.upper))


def _is_whole(bounds: Bounds, period: float) -> Tensor:
    """Whether [l, u] is as long as a period, or so far out that numbers are too coarse to say where the function turns.

    Beyond the inverse root of the unit roundoff, an extremum between two numbers may exceed both by more than that.
    """
    reach = torch.maximum(bounds.lower.abs(), bounds.upper.abs())
    near = (bounds.upper - bounds.lower < period) & (reach < coarse(reach.dtype))
    return ~near


def _within(node: Curve, bounds: Bounds, points: tuple[float, ...]) -> list[Tensor]:
    """Points of the function, in order, each moved to the nearest of [l, u]: those of all periods that matter."""
    period = node.known.period
    like = bounds.lower.detach()
    if node.known.stretched:
        points = tuple(point / float(node.parameter) for point in points)
    if period is None:
        return [torch.full_like(like, point).clamp(like, bounds.upper.detach()) for point in points]
    first = torch.floor(like / period)
    moved = [point + (first + k) * period for k in range(3) for point in points]
    return [point.clamp(like, bounds.upper.detach()) for point in moved]


def _extrema(node: Curve, bounds: Bounds, slope: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest value of f(x) − slope·x on [l, u].

    Differentiable in the slope and the bounds: where the extremum lies is no part of its derivative.

    Args:
        node: f.
        bounds: of x.
        slope: like the bounds, or with further axes in front.
    """
    function, parameter = node.known, node.parameter
    lb, ub = bounds.lower, bounds.upper
    bends = _within(node, bounds, function.bends)
    with torch.no_grad():
        ends = torch.stack([lb.detach(), *bends, ub.detach()])
        steep = slope.detach()
        like = ends[1:].reshape(-1, *(1,) * (slope.ndim - lb.ndim), *lb.shape)
        # Of a period's bends there are those of several periods.
        pattern = function.rising[:1] + function.rising[1:] * (len(bends) // max(1, len(function.bends)))
        rising = torch.tensor(pattern, device=lb.device).reshape(-1, *(1,) * slope.ndim)
        lo = ends[:-1].reshape(like.shape).expand(len(like), *slope.shape)
        hi = like.expand(len(like), *slope.shape)
        for _ in range(_HALVINGS[lb.dtype]):
            middle = torch.lerp(lo, hi, 0.5)
            before = (function.slope(middle, parameter) < steep) == rising
            lo, hi = torch.where(before, middle, lo), torch.where(before, hi, middle)
    inner = torch.cat([lo, hi, *(bend.expand(1, *slope.shape) for bend in bends)])
    outer = [lb.expand(1, *slope.shape), ub.expand(1, *slope.shape)]
    x = torch.cat([*outer, inner])
    values = function.value(x, parameter) - slope * x
    # Of equal values the first one, at an end, has the derivative.
    return values.min(0).values, values.max(0).values


def _smooth_lines(node: Curve, bounds: Bounds, low: Tensor, high: Tensor) -> Lines:
    """The lines of given slopes."""
    floor, top = _extrema(node, bounds, low)[0], _extrema(node, bounds, high)[1]
    period = node.known.period
    if period is not None:
        whole = _is_whole(bounds, period)
        low, high = (torch.where(whole, 0 * slope, slope) for slope in (low, high))
        floor, top = torch.where(whole, 0 * floor - 1, floor), torch.where(whole, 0 * top + 1, top)
    return Lines(low, floor, high, top)


def _smooth_slopes(node: Curve, bounds: Bounds, ends: bool) -> tuple[Tensor, ...]:
    """Slopes of the lower and the upper line, best at the midpoint of some; or (``ends``) two between which others lie.

    Candidates are the chord's and those of the function at the ends and the midpoint, and any slope is sound.
    """
    function, parameter = node.known, node.parameter
    with torch.no_grad():
        lb, ub = bounds.lower.detach(), bounds.upper.detach()
        middle, width = lb / 2 + ub / 2, ub - lb
        at = [function.slope(x, parameter) for x in (lb, middle, ub)]
        short = width <= narrow(middle)
        rise = function.value(ub, parameter) - function.value(lb, parameter)
        chord = torch.where(short, at[1], rise / torch.where(short, 1, width))
        chord = torch.where(torch.isfinite(chord), chord, 0.0)
        # A function may be upright at an end.
        at = [torch.where(torch.isfinite(slope), slope, chord) for slope in at]
        candidates = torch.stack([chord, *at])
        floor, top = _extrema(node, bounds, candidates)
        heights = candidates * middle
        nearest = (heights + floor).nan_to_num(-torch.inf).argmax(0), (heights + top).nan_to_num(torch.inf).argmin(0)
        below, above = (candidates.gather(0, best[None])[0] for best in nearest)
        if not ends:
            return below, above
        bent = torch.zeros_like(lb, dtype=torch.bool)
        for bend in _within(node, bounds, function.bends):
            bent |= (bend > lb) & (bend < ub)
        convex, concave = ~bent & (at[2] >= at[0]), ~bent & (at[2] <= at[0])
        return (
            torch.where(convex, at[0], below),
            torch.where(concave, at[0], above),
            torch.where(convex, at[2], below),
            torch.where(concave, at[2], above),
        )


def slope_range(node: Activation, bounds: Bounds) -> Bounds:
    """The least and the largest slope of f on [l, u], moved outward by rounding; NaN where nothing is known.

    Between two neighbouring bends the slope only rises or only falls, so that it is extreme at an end or next to a
    bend, where it may jump. Where f is not defined on all of [l, u], as a reciprocal at 0 or a logarithm below it, or
    is not finite, its slopes are unknown.

    Raises:
        UnsupportedError: for an activation of which that is not known.
    """
    if isinstance(node, Kinked):
        ends = torch.stack([bounds.lower, bounds.upper])
        slopes = torch.where(ends.isnan(), ends, torch.where(ends > 0, 1.0, node.below))
        return Bounds(slopes.amin(0), slopes.amax(0))
    if not isinstance(node, Curve):
        raise UnsupportedError("the change is not bounded through this activation", place=node.place)
    function, parameter = node.known, node.parameter
    points = [bounds.lower, bounds.upper]
    for bend in _within(node, bounds, function.bends):
        points += [bend, below(bend), above(bend)]
    slopes = torch.stack([function.slope(x, parameter) for x in points])
    values = _smooth_image(node, bounds)
    unknown = ~(torch.isfinite(values.lower) & torch.isfinite(values.upper))
    lower, upper = slopes.amin(0), slopes.amax(0)
    if function.period is not None:
        whole = _is_whole(bounds, function.period)
        lower = torch.where(whole, -function.steepest, lower)
        upper = torch.where(whole, function.steepest, upper)
    # A bounded slope is a sum of numbers of about 1, which may cancel.
    unit = epsilon(lower.dtype)
    absolute = 256 * unit * parameter.clamp(min=1) if function.steepest < torch.inf else tiny(lower.dtype)
    lower, upper = (ends.masked_fill(unknown, torch.nan) for ends in (lower, upper))
    relative = 64 * unit
    return Bounds(lower - relative * lower.abs() - absolute, upper + relative * upper.abs() + absolute)


@dataclass(frozen=True)
class ActivationRow:
    """What is known of one activation.

    Args:
        image: the interval image (see ``image``).
        relax: the linear relaxation (see ``relax``).
        ulps: relative rounding error of an image's ends and of a line, in units of the unit roundoff.
        unstable: which neurons need a relaxation (see ``unstable``).
        absolute: absolute rounding error of the same, in the same units, for a node.
        curve: of a smooth activation, the two steps of its relaxation; ``relax`` is then that of the curve.
    """

    image: Callable[[Any, Bounds], Bounds]
    relax: Callable[[Any, Bounds, Tensor | None], Lines]
    ulps: int
    unstable: Callable[[Any, Bounds], Tensor]
    absolute: Callable[[Any], Tensor | float] = lambda node: 0.0
    curve: SmoothLines | None = None


@dataclass(frozen=True)
class SmoothLines:
    """The two steps in which the relaxation of a smooth activation is made.

    Args:
        slopes: of (node, bounds, ends): the slopes of the convex and of the concave envelope at the midpoint; with
            ``ends``, at l and then at u.
        lines: of (node, bounds, low, high): the lower line of slope ``low`` and the upper line of slope ``high``, which
            are sound for every slope.
    """

    slopes: Callable[[Any, Bounds, bool], tuple[Tensor, ...]]
    lines: Callable[[Any, Bounds, Tensor, Tensor], Lines]

    def relax(self, node: Activation, bounds: Bounds, alpha: Tensor | None) -> Lines:
        """The linear relaxation (see ``relax``)."""
        if alpha is None:
            low, high = self.slopes(node, bounds, False)
            return self.lines(node, bounds, low, high)
        return self.between(node, bounds, self.slopes(node, bounds, True), alpha)

    def between(self, node: Activation, bounds: Bounds, ends: tuple[Tensor, ...], alpha: Tensor) -> Lines:
        """Lines whose slopes are (1 − α) times the slopes at l plus α times those at u."""
        low_left, high_left, low_right, high_right = ends
        return self.lines(
            node, bounds, torch.lerp(low_left, low_right, alpha), torch.lerp(high_left, high_right, alpha)
        )


def row(node: Activation) -> ActivationRow:
    """The table's row for a node.

    Raises:
        UnsupportedError: if the activation is not in the table.
    """
    return TABLE[node]


def image(node: Activation, bounds: Bounds) -> Bounds:
    """The image f([l, u]) = {f(x) : l ≤ x ≤ u}, element by element, exact up to rounding.

    Args:
        node: the activation.
        bounds: of its input, shaped (batch, *shape).

    Raises:
        UnsupportedError: if the activation is not in the table.
    """
    return row(node).image(node, bounds)


def within_range(node: Activation, bounds: Bounds, image: Bounds) -> Bounds:
    """An image of bounds cut to the range of f, and at 0 where the sign of f is known; nothing of that is rounded."""
    least, most, zero = -math.inf, math.inf, None if isinstance(node, Beside) else 0.0
    if isinstance(node, Curve):
        least, most, zero = node.known.least, node.known.most, node.known.zero
    lower = image.lower if least == -math.inf else image.lower.clamp(min=least)
    upper = image.upper if most == math.inf else image.upper.clamp(max=most)
    if isinstance(node, Curve) and (start := node.known.one_from) is not None:
        lower = torch.where(bounds.lower >= start, lower.clamp(min=1), lower)
    if isinstance(node, Curve) and (start := node.known.one_to) is not None:
        upper = torch.where(bounds.lower >= start, upper.clamp(max=1), upper)
    if zero is None:
        return Bounds(lower, upper)
    positive, negative = bounds.lower >= zero, bounds.upper <= zero
    if isinstance(node, LeakyRelu):
        # With a negative slope f(x) has no sign but that of |x|.
        falls = node.slope <= 0
        positive, negative = positive | falls, negative & ~falls
    return Bounds(torch.where(positive, lower.clamp(min=0), lower), torch.where(negative, upper.clamp(max=0), upper))


def relax(node: Activation, bounds: Bounds, slope: Tensor | None = None) -> Lines:
    """Sound lines below and above f on [l, u], element by element.

    Differentiable in the bounds, in the node's parameters and in ``slope``, with finite gradients.

    Args:
        node: the activation.
        bounds: of its input, shaped (batch, *shape).
        slope: values α in [0, 1], broadcastable to the bounds, which choose another line than that of the midpoint: one
            whose slope is (1 − α) times the envelope's slope at l plus α times that at u. For ReLU this is α-CROWN's α,
            the slope of the lower line (Xu et al., arXiv 2011.13824).

    Raises:
        UnsupportedError: if the activation is not in the table.
    """
    return row(node).relax(node, bounds, slope)


def _relu_image(node: Relu, bounds: Bounds) -> Bounds:
    return Bounds(bounds.lower.clamp(min=0), bounds.upper.clamp(min=0))


def _identity_image(node: Identity, bounds: Bounds) -> Bounds:
    return bounds


def _identity_lines(node: Identity, bounds: Bounds, slope: Tensor | None) -> Lines:
    """x itself on both sides. Nothing is left to choose: the derivative by a choice of slopes is zero."""
    one, zero = torch.ones_like(bounds.lower), torch.zeros_like(bounds.lower)
    if slope is not None:
        one = one + 0 * slope
    return Lines(one, zero, one, zero)


def _leaky_image(node: LeakyRelu, bounds: Bounds) -> Bounds:
    """LeakyReLU is monotone on either side of 0: it is extreme at an end, or, with a negative slope, at 0."""
    ends = node.forward(bounds.lower), node.forward(bounds.upper)
    lower = torch.minimum(*ends)
    straddles = (bounds.lower < 0) & (bounds.upper > 0)
    return Bounds(torch.where(straddles, lower.clamp(max=0), lower), torch.maximum(*ends))


def _kinked(left: Tensor, bounds: Bounds, alpha: Tensor | None) -> Lines:
    """Lines of f(x) = max(x, 0) + left·min(x, 0): one line goes through the kink, the other is the chord of [l, u].

    For left ≤ 1 f is convex and the chord is the upper line; for left ≥ 1 f is concave and the chord is the lower one.
    """
    lb, ub = bounds.lower, bounds.upper
    one, zero = torch.ones_like(lb), torch.zeros_like(lb)
    stable = (lb >= 0) | (ub <= 0)
    side = torch.where(lb >= 0, one, left.expand_as(lb))

    adaptive = torch.where(ub > -lb, one, zero) if alpha is None else alpha
    kink = torch.where(stable, side, kink_slope(left, adaptive))

    # Stable neurons do not use the quotient below, but its gradient must be finite for them, too: they get [−1, 1].
    lo, hi = torch.where(stable, -one, lb), torch.where(stable, one, ub)
    # The least width keeps the gradient finite where the interval is next to a point; any slope is sound.
    bottom = left * lo
    chord = (hi - bottom) / smooth_divisor(hi - lo)
    at_ends = bottom - chord * lo, hi - chord * hi
    above = torch.where(stable, zero, torch.maximum(*at_ends))
    below = torch.where(stable, zero, torch.minimum(*at_ends))
    chord = torch.where(stable, side, chord)

    convex = left <= 1
    return Lines(
        lower_slope=torch.where(convex, kink, chord),
        lower_offset=torch.where(convex, zero, below),
        upper_slope=torch.where(convex, chord, kink),
        upper_offset=torch.where(convex, above, zero),
    )


def kink_slope(left: Tensor, weight: Tensor) -> Tensor:
    """The slope left + weight·(1 − left) of a line through the kink of max(x, 0) + left·min(x, 0), 0 ≤ weight ≤ 1.

    A line through the kink is sound on the whole axis if its slope lies between ``left`` and 1, and with no other
    slope. Rounding may take the sum out of that interval by as much as the interval's width (at left = −1e16), so the
    slope is moved to the nearer end of the interval.

    ``left`` and ``weight`` are broadcastable to each other.
    """
    slope = torch.lerp(left, torch.ones_like(left), weight)
    return slope.clamp(left.clamp(max=1), left.clamp(min=1))


def _relu_lines(node: Relu | Hardened, bounds: Bounds, slope: Tensor | None) -> Lines:
    """The lines of ReLU: those of ``_kinked`` by fewer operations.

    With min(l, 0) for l and max(u, 0) for u, the chord joins (l, 0) and (u, u). Its slope is s = u/w with w = u − l,
    and its offset is s·(w − u): its value at u is s·w, and at l no less than 0.
    """
    lo, hi = bounds.lower.clamp(max=0), bounds.upper.clamp(min=0)
    # The least width keeps the gradient finite where the interval is next to a point.
    width = smooth_divisor(hi - lo)
    chord, beyond = hi / width, width - hi
    kink = (hi > beyond).to(lo)
    if slope is not None:
        kink = torch.where((lo < 0) & (hi > 0), slope.clamp(0, 1), kink)
    return Lines(kink, torch.zeros_like(lo), chord, chord * beyond)


def _leaky_lines(node: LeakyRelu, bounds: Bounds, slope: Tensor | None) -> Lines:
    return _kinked(node.slope, bounds, slope)


Slopes = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _at(of: Slopes, bounds: Bounds, ends: bool) -> tuple[Tensor, ...]:
    """Slopes of both envelopes, which ``of`` gives: at the midpoint, or with ``ends`` at l and then at u."""
    lb, ub = bounds.lower, bounds.upper
    if ends:
        return *of(lb, ub, lb), *of(lb, ub, ub)
    # Halving first, since u − l may overflow.
    return of(lb, ub, lb / 2 + ub / 2)


def _offset(
    extremum: Callable[[Tensor, Tensor], Tensor],
    value: Callable[[Tensor], Tensor],
    bounds: Bounds,
    slope: Tensor,
    turn: Tensor,
) -> Tensor:
    """The offset of a line of f: the least or the greatest value of f(x) − slope·x over [l, u]."""
    lb, ub = bounds.lower, bounds.upper
    at_lower, at_upper, at_turn = (value(x) - slope * x for x in (lb, ub, turn.detach().clamp(lb, ub)))
    return extremum(extremum(at_lower, at_upper), at_turn)


def _increasing_image(node: Sigmoid | Tanh | Step, bounds: Bounds) -> Bounds:
    return Bounds(node.forward(bounds.lower), node.forward(bounds.upper))


def _tanh_slopes(node: Tanh, bounds: Bounds, ends: bool) -> tuple[Tensor, ...]:
    return _at(tanh_slopes, bounds, ends)


def _tanh_lines(node: Tanh, bounds: Bounds, low: Tensor, high: Tensor) -> Lines:
    """tanh is convex left of 0: only there f(x) − s·x may have a minimum inside, and only right of 0 a maximum."""
    return Lines(
        low,
        _offset(torch.minimum, torch.tanh, bounds, low, -tanh_turn(low.detach())),
        high,
        _offset(torch.maximum, torch.tanh, bounds, high, tanh_turn(high.detach())),
    )


def _sigmoid_slopes(node: Sigmoid, bounds: Bounds, ends: bool) -> tuple[Tensor, ...]:
    """By those of tanh: σ(x) = ½ + ½·tanh(x/2) has a quarter of the slope that tanh has at x/2."""
    return tuple(s / 4 for s in _at(tanh_slopes, Bounds(bounds.lower / 2, bounds.upper / 2), ends))


def _sigmoid_lines(node: Sigmoid, bounds: Bounds, low: Tensor, high: Tensor) -> Lines:
    return Lines(
        low,
        _offset(torch.minimum, torch.sigmoid, bounds, low, -2 * tanh_turn(4 * low.detach())),
        high,
        _offset(torch.maximum, torch.sigmoid, bounds, high, 2 * tanh_turn(4 * high.detach())),
    )


def _gelu(t: Tensor) -> Tensor:
    """GELU, t·Φ(t), by erfc: 1 + erf would leave nothing but rounding errors for negative t."""
    return 0.5 * t * torch.special.erfc(t * -math.sqrt(0.5))


def _gelu_image(node: Gelu | Hardened, bounds: Bounds) -> Bounds:
    """x·Φ(λx) falls up to DIP/λ and rises from there on: least at the point nearest to that, greatest at an end."""
    lb, ub = node.lam * bounds.lower, node.lam * bounds.upper
    lowest = torch.full_like(lb, DIP).clamp(lb, ub)
    return Bounds(_gelu(lowest) / node.lam, torch.maximum(_gelu(lb), _gelu(ub)) / node.lam)


def _scaled(node: Gelu | Hardened, bounds: Bounds) -> Bounds:
    return Bounds(node.lam * bounds.lower, node.lam * bounds.upper)


def _gelu_slopes(node: Gelu | Hardened, bounds: Bounds, ends: bool) -> tuple[Tensor, ...]:
    """The slopes of x·Φ(λx) over [l, u] are those of GELU, g(t) = t·Φ(t), over λ·[l, u], since it is g(λx)/λ."""
    return _at(gelu_slopes, _scaled(node, bounds), ends)


def _gelu_floor(node: Gelu | Hardened, bounds: Bounds, low: Tensor) -> Tensor:
    """The offset of the lower line of slope ``low``."""
    return _offset(torch.minimum, _gelu, _scaled(node, bounds), low, gelu_valley(low.detach())) / node.lam


def _gelu_lines(node: Gelu, bounds: Bounds, low: Tensor, high: Tensor) -> Lines:
    ridge = gelu_ridge(high.detach())
    above = _offset(torch.maximum, _gelu, _scaled(node, bounds), high, ridge) / node.lam
    return Lines(low, _gelu_floor(node, bounds, low), high, above)


def _hardened_image(node: Hardened, bounds: Bounds) -> Bounds:
    return Bounds(image(node.least, bounds).lower, bounds.upper.clamp(min=0))


def _hardened_slopes(node: Hardened, bounds: Bounds, ends: bool) -> tuple[Tensor, ...]:
    curve = row(node.least).curve
    assert curve is not None
    return curve.slopes(node.least, bounds, ends)


def _hardened_lines(node: Hardened, bounds: Bounds, low: Tensor, high: Tensor) -> Lines:
    """Every member of the set lies above the smooth function at the least λ and below ReLU."""
    relu = _relu_lines(node, bounds, None)
    gelu = node.function == "GELU"
    floor = _gelu_floor(node, bounds, low) if gelu else _extrema(node.least, bounds, low)[0]
    return Lines(low, floor, relu.upper_slope, relu.upper_offset)


def _corners_of_steps(node: Step, bounds: Bounds, image: Bounds) -> tuple[Tensor, Tensor]:
    """Where the lower function begins to rise, and where the upper one ends to."""
    if node.known.band is None:
        return 0 * image.lower, 0 * image.upper
    below_, above_ = node.known.band
    return image.lower + below_, image.upper - above_


def _step_slopes(node: Step, bounds: Bounds, ends: bool) -> tuple[Tensor, ...]:
    """Those of the lower and of the upper function: zero, and that with which they rise."""
    lb, ub, values = bounds.lower, bounds.upper, _increasing_image(node, bounds)
    zero, gap = torch.zeros_like(lb), values.upper - values.lower
    first, last = _corners_of_steps(node, bounds, values)
    low = high = torch.where(gap > 0, 1.0, zero)
    if node.known.band is None:
        low, high = (gap / smooth_divisor(side.clamp(min=0)) for side in (ub, -lb))
        # Where the jump is at an end, its line is upright.
        low, high = torch.where(ub > 0, low, zero), torch.where(lb < 0, high, zero)
    if ends:
        return torch.where(first > lb, zero, low), high, low, torch.where(last < ub, zero, high)
    middle = lb / 2 + ub / 2
    return torch.where(middle > first, low, zero), torch.where(middle < last, high, zero)


def _step_lines(node: Step, bounds: Bounds, low: Tensor, high: Tensor) -> Lines:
    lb, ub, values = bounds.lower, bounds.upper, _increasing_image(node, bounds)
    right, left = values.upper, values.lower
    if node.known.band is not None:
        below_, above_ = node.known.band
        right, left = torch.maximum(values.lower, ub - below_), torch.minimum(values.upper, lb + above_)
    first, last = (corner.clamp(lb, ub) for corner in _corners_of_steps(node, bounds, values))
    floors = values.lower - low * lb, values.lower - low * first, right - low * ub
    tops = values.upper - high * ub, values.upper - high * last, left - high * lb
    return Lines(low, torch.stack(floors).amin(0), high, torch.stack(tops).amax(0))


def unstable(node: Node, pre: Bounds) -> Tensor:
    """Which neurons are unstable, that is, need a relaxation and for it tight bounds ``pre``: (batch, *shape) bool."""
    return TABLE[node].unstable(node, pre)


def _straddles_zero(node: Activation, pre: Bounds) -> Tensor:
    """Whether zero, at which the activation has its one kink, is inside the bounds; not so where a bound is NaN."""
    return (pre.lower < 0) & (pre.upper > 0)


def _varies(node: Activation, pre: Bounds) -> Tensor:
    """Whether bounds leave more than one value: an activation that is nowhere a line needs a relaxation there."""
    return ~(pre.lower >= pre.upper)


def _is_soft(node: Gelu | Hardened, pre: Bounds) -> Tensor:
    """Whether λ-GELU may be neither 0 nor x within the bounds: where |λx| ≥ 6 it is one of both, up to 1e-9·|x|."""
    if node.function != "GELU":
        return _varies(node, pre)
    hard = (node.lam * pre.lower >= _SATURATED) | (node.lam * pre.upper <= -_SATURATED)
    return _varies(node, pre) & ~hard


def _jumps(node: Step, pre: Bounds) -> Tensor:
    """Whether the values at both ends differ; so where a bound is NaN."""
    return ~(node.known.value(pre.lower.detach()) >= node.known.value(pre.upper.detach()))


_SATURATED = 6.0
"""From this |λx| on λ-GELU counts as 0 or x, from which it differs by |x|·Φ(−6) < 1e-9·|x| at most."""

_SMOOTH_ULPS = 64
"""The relative error that is granted to a library's exp, tanh, sigmoid and erfc with the few operations around them.

At most 2 units were measured.
"""


def _smooth(
    image: Callable[[Any, Bounds], Bounds],
    slopes: Callable[[Any, Bounds, bool], tuple[Tensor, ...]],
    lines: Callable[[Any, Bounds, Tensor, Tensor], Lines],
    absolute: Callable[[Any], Tensor | float] = lambda node: 0.0,
    unstable: Callable[[Any, Bounds], Tensor] = _varies,
) -> ActivationRow:
    curve = SmoothLines(slopes, lines)
    return ActivationRow(image, curve.relax, _SMOOTH_ULPS, unstable, absolute, curve)


def _soft_error(node: Gelu | Hardened) -> Tensor:
    """The absolute error of λ-GELU, f(x) = x·Φ(λx), in units of the unit roundoff u.

    A relative error u of λx moves f by u·|x·f'(x)| ≤ u·(|f(x)| + 0.294/λ), since t²·φ(t) ≤ 0.294 for all t. Other
    functions have less: their λ is 1, and their own error is at most that of GELU.
    """
    return _SMOOTH_ULPS / node.lam


def _smooth_error(node: Curve) -> Tensor:
    """The absolute error of a function, of which the parameter may be a factor, or a divisor."""
    scale = 1 / node.parameter if node.known.stretched else node.parameter.clamp(min=1)
    return _SMOOTH_ULPS * node.known.absolute * scale


TABLE: Table[ActivationRow] = Table(
    "bound propagation",
    {
        Relu: ActivationRow(_relu_image, _relu_lines, ulps=4, unstable=_straddles_zero),
        LeakyRelu: ActivationRow(_leaky_image, _leaky_lines, ulps=8, unstable=_straddles_zero),
        Identity: ActivationRow(_identity_image, _identity_lines, ulps=0, unstable=_varies),
        # Of the difference of two activations' inputs, which bounds and rows take as it is.
        Beside: ActivationRow(_identity_image, _identity_lines, ulps=0, unstable=_varies),
        Sigmoid: _smooth(_increasing_image, _sigmoid_slopes, _sigmoid_lines),
        Tanh: _smooth(_increasing_image, _tanh_slopes, _tanh_lines),
        Gelu: _smooth(_gelu_image, _gelu_slopes, _gelu_lines, _soft_error, _is_soft),
        # Halves of a segment that meet in a jump both have its two sides: nothing is gained by splitting there.
        Step: ActivationRow(_increasing_image, SmoothLines(_step_slopes, _step_lines).relax, ulps=8, unstable=_jumps),
        Curve: _smooth(_smooth_image, _smooth_slopes, _smooth_lines, _smooth_error),
        Hardened: _smooth(_hardened_image, _hardened_slopes, _hardened_lines, _soft_error, _is_soft),
    },
    group=Activation,
)
