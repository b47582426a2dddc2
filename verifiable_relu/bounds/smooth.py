"""Images and lines of any smooth function of which the bends are known: lines of any slope, with the right offset.

The offset of a line of slope s is the least or the largest value of f(x) − s·x on [l, u]. That is at an end, at a bend,
or where f′(x) = s, and between two neighbouring bends f′ only rises or only falls: there is at most one such point,
which is found by halving. It is found to the last digit but for rounding in f′, and f(x) − s·x is flat about it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verifiable_relu.bounds.types import Bounds, Lines
from verifiable_relu.network.nodes import FUNCTIONS, Smooth

_HALVINGS = {torch.float64: 60, torch.float32: 32}
"""How often an interval is halved until nothing of it is left."""


def image(node: Smooth, bounds: Bounds) -> Bounds:
    """The least and the largest value on [l, u]: at an end or where the function turns."""
    points = [bounds.lower, bounds.upper, *_within(node, bounds, FUNCTIONS[node.function].turns)]
    values = torch.stack([node.forward(x) for x in points])
    found = Bounds(values.amin(0), values.amax(0))
    return _beyond_a_period(node, bounds, found)


def _beyond_a_period(node: Smooth, bounds: Bounds, found: Bounds) -> Bounds:
    """Over a whole period, sine and cosine have every value from −1 to 1."""
    period = FUNCTIONS[node.function].period
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
    near = (bounds.upper - bounds.lower < period) & (reach < torch.finfo(reach.dtype).eps ** -0.5)
    return ~near


def _within(node: Smooth, bounds: Bounds, points: tuple[float, ...]) -> list[Tensor]:
    """Points of the function, in order, each moved to the nearest of [l, u]: those of all periods that matter."""
    period = FUNCTIONS[node.function].period
    like = bounds.lower.detach()
    if period is None:
        return [torch.full_like(like, point).clamp(like, bounds.upper.detach()) for point in points]
    first = torch.floor(like / period)
    moved = [point + (first + k) * period for k in range(3) for point in points]
    return [point.clamp(like, bounds.upper.detach()) for point in moved]


def _extrema(node: Smooth, bounds: Bounds, slope: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest value of f(x) − slope·x on [l, u].

    Differentiable in the slope and the bounds: where the extremum lies is no part of its derivative.

    Args:
        node: f.
        bounds: of x.
        slope: like the bounds, or with further axes in front.
    """
    function, parameter = FUNCTIONS[node.function], node.parameter
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
    return values.amin(0), values.amax(0)


def lines(node: Smooth, bounds: Bounds, low: Tensor, high: Tensor) -> Lines:
    """The lines of given slopes."""
    floor, top = _extrema(node, bounds, low)[0], _extrema(node, bounds, high)[1]
    period = FUNCTIONS[node.function].period
    if period is not None:
        whole = _is_whole(bounds, period)
        low, high = (torch.where(whole, 0 * slope, slope) for slope in (low, high))
        floor, top = torch.where(whole, 0 * floor - 1, floor), torch.where(whole, 0 * top + 1, top)
    return Lines(low, floor, high, top)


def slopes(node: Smooth, bounds: Bounds, ends: bool) -> tuple[Tensor, ...]:
    """Slopes of the lower and the upper line, best at the midpoint of some; or (``ends``) two between which others lie.

    Candidates are the chord's and those of the function at the ends and the midpoint, and any slope is sound.
    """
    function, parameter = FUNCTIONS[node.function], node.parameter
    with torch.no_grad():
        lb, ub = bounds.lower.detach(), bounds.upper.detach()
        middle, width = lb / 2 + ub / 2, ub - lb
        at = [function.slope(x, parameter) for x in (lb, middle, ub)]
        narrow = width <= torch.finfo(lb.dtype).eps ** (1 / 3) * (1 + middle.abs())
        rise = function.value(ub, parameter) - function.value(lb, parameter)
        chord = torch.where(narrow, at[1], rise / torch.where(narrow, 1, width))
        candidates = torch.stack([chord, *at])
        candidates = torch.where(torch.isfinite(candidates), candidates, 0.0)
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


def slope_range(node: Smooth, bounds: Bounds) -> Bounds:
    """The least and the largest slope of f on [l, u], moved outward by rounding.

    Between two neighbouring bends the slope only rises or only falls, so that it is extreme at an end or next to a
    bend, where it may jump. Where f is not defined on all of [l, u], as a reciprocal at 0 or a logarithm below it, or
    is not finite, its slopes are unknown: NaN.
    """
    function, parameter = FUNCTIONS[node.function], node.parameter
    points = [bounds.lower, bounds.upper]
    for bend in _within(node, bounds, function.bends):
        points += [bend, *(torch.nextafter(bend, bend.new_tensor(end)) for end in (-torch.inf, torch.inf))]
    slopes = torch.stack([function.slope(x, parameter) for x in points])
    values = image(node, bounds)
    unknown = ~(torch.isfinite(values.lower) & torch.isfinite(values.upper))
    lower, upper = slopes.amin(0), slopes.amax(0)
    if function.period is not None:
        whole = _is_whole(bounds, function.period)
        lower = torch.where(whole, -function.steepest, lower)
        upper = torch.where(whole, function.steepest, upper)
    # A bounded slope is a sum of numbers of about 1, which may cancel.
    unit = torch.finfo(lower.dtype).eps
    absolute = 256 * unit * parameter.clamp(min=1) if function.steepest < torch.inf else torch.finfo(lower.dtype).tiny
    lower, upper = (ends.masked_fill(unknown, torch.nan) for ends in (lower, upper))
    relative = 64 * unit
    return Bounds(lower - relative * lower.abs() - absolute, upper + relative * upper.abs() + absolute)
