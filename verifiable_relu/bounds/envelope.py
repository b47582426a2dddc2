"""Slopes of the convex and the concave envelope of a smooth activation on an interval, and where f' has a given value.

The convex envelope of f on [l, u] is f itself where f is convex and it can be reached, joined to the ends, where f is
concave, by lines that are tangent to the convex part (or by the one chord). Its slope at p in [l, u] is therefore
f'(p), or that of a line between two contact points. A contact point inside the interval is a tangent point, where
the line's slope is stationary: an error δ in it changes the slope by O(δ²), and it may be held constant under
differentiation. So points are found roughly, by a fixed number of steps, and slopes are good to all digits;
soundness rests on neither (``activations``).

GELU, g(t) = t·Φ(t), is t/2 plus the even function k(t) = t·(Φ(t) − ½), so that one side of 0 is enough. With φ the
standard normal density, k'(t) = Φ(t) − ½ + t·φ(t), k''(t) = (2 − t²)·φ(t): convex for |t| < √2, concave outside.
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
_DENSITY = 1 / math.sqrt(2 * math.pi)
_STEEPEST = 0.5 * math.erf(1) + _INFLECTION * _DENSITY / math.e
"""k'(√2), the largest slope of k."""
_FLAT = 9.0
"""Beyond this, k'' < 1e-15 and a line's contact point no longer shows in its slope."""


def _density(t: Tensor) -> Tensor:
    return _DENSITY * torch.exp(-0.5 * t * t)


def _even(t: Tensor) -> Tensor:
    """k(t)."""
    return 0.5 * t * torch.erf(t / _INFLECTION)


def _even_slope(t: Tensor) -> Tensor:
    """k'(t)."""
    return 0.5 * torch.erf(t / _INFLECTION) + t * _density(t)


def _tanh_slope(x: Tensor) -> Tensor:
    """1 − tanh(x)² without cancellation."""
    return 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x)


def _bisect(left_of_root: Callable[[Tensor], Tensor], lo: Tensor, hi: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        middle = lo + (hi - lo) / 2
        left = left_of_root(middle)
        lo, hi = torch.where(left, middle, lo), torch.where(left, hi, middle)
    return lo + (hi - lo) / 2


def _slope(
    value: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor], point: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """The envelope's slope at ``point``: that of the line from a to b for a ≤ point ≤ b, elsewhere f'(point).

    A quotient over a narrow [a, b] is nothing but rounding; there f' differs from it by less.
    """
    narrow = torch.finfo(point.dtype).eps ** (1 / 3) * (1 + point.detach().abs())
    joined = (a <= point) & (point <= b) & (b - a > narrow)
    chord = (value(b) - value(a)) / torch.where(joined, b - a, 1)
    return torch.where(joined, chord, derivative(point))


def _tanh_convex(lower: Tensor, upper: Tensor, point: Tensor) -> Tensor:
    """Slope at ``point`` of the convex envelope of tanh, which is convex left of 0 and concave right of it."""
    with torch.no_grad():
        # The tangent point of the line through (u, tanh u) goes down with u as −log(2u)/2.
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
    """The x ≥ 0 with tanh'(x) = slope: arcosh(slope^(−½)), for slopes beyond (0, 1) the end of the range."""
    slope = slope.clamp(torch.finfo(slope.dtype).tiny, 1)
    return torch.log1p(torch.sqrt(1 - slope)) - 0.5 * torch.log(slope)


def gelu_slopes(lower: Tensor, upper: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes at ``point`` of the convex and the concave envelope of GELU (λ = 1) on [lower, upper].

    Derived for k and point ≥ 0, to which evenness reduces the rest:

    * convex: a line through (u, k(u)), u > √2, is tangent at d ∈ (−DIP, √2) with k(u) − u·k'(d) + d²·φ(d) = 0;
      what leads from l < −√2 to the convex part ends left of 0.
    * concave: a line through (l, k(l)) is tangent at e ≥ √2 where l·k'(e) − e²·φ(e) − k(l) = 0. This has no
      solution for l ≤ 0, where every term is negative: the envelope is the chord.
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
    """The t ∈ [−√2, √2] with g'(t) = slope, for slopes beyond g' there the end of the range.

    Newton's method from a guess that has the right order at both ends of [0, √2], where k' is concave.
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
    """The t with |t| ≥ √2 and g'(t) = slope < 0 or > 1; for slopes within [0, 1], where there is none, far out.

    With r = max(−slope, slope − 1) it is, up to its sign, the root of t·φ(t) − Φ(−t) = r, found by Newton's method
    on the logarithms of both sides, which are nearly quadratic in t. Φ(−t) = φ(t)·√(π/2)·erfcx(t/√2).
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
