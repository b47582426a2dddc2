"""The convex and the concave envelope of a smooth activation on an interval: their slopes.

The convex envelope of f on [l, u] is f itself in a part where f is convex; elsewhere it consists of lines that are
tangent to f at a contact point of that part and end at l or u, or it is the chord of [l, u]. So its slope at p in
[l, u] is f'(p), or the slope of the line between two contact points. The concave envelope mirrors that.

A contact point inside the interval is a tangent point, at which the slope of the line is stationary as a function of
the point. An error δ of the point changes the slope by O(δ²), and the point may be taken for a constant where the slope
is differentiated. So points are found roughly, by a fixed number of steps, and slopes are still good to all digits.
Soundness rests on neither (``activations``).

GELU is g(t) = t·Φ(t) = t/2 + k(t) with the even function k(t) = t·(Φ(t) − ½), so that it is enough to know one side of
0. With the density φ of the standard normal distribution, k'(t) = Φ(t) − ½ + t·φ(t) and k''(t) = (2 − t²)·φ(t): k is
convex for |t| < √2 and concave outside.

All functions work element by element, in the dtype of their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

DIP = -0.7517915246935645
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

    Args:
        value: f.
        derivative: f'.
        point: at which the slope is wanted.
        a: where the line begins.
        b: where the line ends.
    """
    narrow = torch.finfo(point.dtype).eps ** (1 / 3) * (1 + point.detach().abs())
    joined = (a <= point) & (point <= b) & (b - a > narrow)
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
    slope = slope.clamp(torch.finfo(slope.dtype).tiny, 1)
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
        step = (target - _even_slope(t)) / curvature.clamp(min=torch.finfo(t.dtype).eps)
        t = (t + step).clamp(0, _INFLECTION)
    return torch.where(centred < 0, -t, t)


def gelu_ridge(slope: Tensor) -> Tensor:
    """The t at which |t| ≥ √2 and g'(t) = slope, which is below 0 or above 1; for other slopes a t far out.

    With r = max(−slope, slope − 1), |t| is the root of t·φ(t) − Φ(−t) = r. It is found by Newton's method on the
    logarithms of both sides, which are nearly quadratic in t, with Φ(−t) = φ(t)·√(π/2)·erfcx(t/√2).
    """
    peak = _STEEPEST - 0.5
    rest = torch.maximum(-slope, slope - 1).clamp(torch.finfo(slope.dtype).tiny, peak)
    depth = torch.log(peak / rest).clamp(min=0)
    t = torch.sqrt(2 + 2 * depth + 2.2 * torch.sqrt(depth))
    for _ in range(6):
        gap = t - math.sqrt(math.pi / 2) * torch.special.erfcx(t / _INFLECTION)
        surplus = torch.log(gap * _DENSITY) - torch.log(rest) - 0.5 * t * t
        fall = ((t * t - 2) / gap).clamp(min=torch.finfo(t.dtype).eps)
        t = (t + surplus / fall).clamp(min=_INFLECTION)
    return torch.where(slope < 0.5, -t, t)
