"""All that bound propagation knows of each activation: its image of an interval and its linear relaxation.

One row of a table per activation type. A linear relaxation is always built in the same way:

* the lower line supports the *convex envelope* of f on [l, u] at the interval's midpoint, which of all sound lines
  is the one with the least area between it and f (a line's mean over [l, u] is its value at the midpoint); the
  upper line supports the concave envelope there. For ReLU this is CROWN's adaptive choice (Zhang et al., arXiv
  1811.00866, section 3.4), for sigmoid and tanh their tangents and chords (ibid., table 2).
* whatever the slope s turned out to be in floating point, the offset is computed last, as the extremum of f(x) − s·x
  over every point of [l, u] that can be one. Slopes therefore carry no rounding error of their own: only offsets do.

A line's offset is then off by at most ``ulps``·u·(|slope|·max(|l|, |u|) + |offset|) + u·``absolute`` (``Row``), and an
end of an image by ulps·u·|end| + u·absolute, u being the unit roundoff of the dtype; underflow adds a few of its
smallest normal numbers, to a line's offset as often as 1 + max(|l|, |u|) says: where slopes are lost. Nothing here is
widened for that: ``bounds.rounding`` is the place. A NaN bound gives NaN, or lines that hold without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds import envelope, smooth
from verifiable_relu.bounds.types import Bounds, Lines
from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.nodes import (
    FUNCTIONS,
    Activation,
    Gelu,
    Hardened,
    LeakyRelu,
    Node,
    Relu,
    Sigmoid,
    Smooth,
    Tanh,
)


@dataclass(frozen=True)
class Row:
    """What is known of one activation.

    Args:
        image: the interval image (see ``image``).
        relax: the linear relaxation (see ``relax``).
        ulps: relative rounding error of an image's ends and of a line, in units of the unit roundoff.
        unstable: which neurons need a relaxation (see ``unstable``).
        absolute: absolute rounding error of the same, in the same units, for a node.
        curve: for smooth activations, how their lines are made; ``relax`` is its own.
    """

    image: Callable[[Any, Bounds], Bounds]
    relax: Callable[[Any, Bounds, Tensor | None], Lines]
    ulps: int
    unstable: Callable[[Any, Bounds], Tensor]
    absolute: Callable[[Any], Tensor | float] = lambda node: 0.0
    curve: Curve | None = None


@dataclass(frozen=True)
class Curve:
    """The two steps in which lines of a smooth activation are made.

    Args:
        slopes: the slopes of the lower and of the upper line: at the midpoint, or (True) at l and at u.
        lines: the lines of given slopes, whatever they are.
    """

    slopes: Callable[[Any, Bounds, bool], tuple[Tensor, ...]]
    lines: Callable[[Any, Bounds, Tensor, Tensor], Lines]

    def relax(self, node: Activation, bounds: Bounds, alpha: Tensor | None) -> Lines:
        """``relax`` of the table."""
        if alpha is None:
            low, high = self.slopes(node, bounds, False)
            return self.lines(node, bounds, low, high)
        return self.between(node, bounds, self.slopes(node, bounds, True), alpha)

    def between(self, node: Activation, bounds: Bounds, ends: tuple[Tensor, ...], alpha: Tensor) -> Lines:
        """Lines with slopes between those at the ends."""
        low_left, high_left, low_right, high_right = ends
        return self.lines(
            node, bounds, torch.lerp(low_left, low_right, alpha), torch.lerp(high_left, high_right, alpha)
        )


def row(node: Activation) -> Row:
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


def relax(node: Activation, bounds: Bounds, slope: Tensor | None = None) -> Lines:
    """Sound lines below and above f on [l, u], element by element.

    Differentiable in the bounds, in the node's parameters and in ``slope``, with finite gradients.

    Args:
        node: the activation.
        bounds: of its input, shaped (batch, *shape).
        slope: values α in [0, 1], broadcastable to the bounds: which of the supporting lines of the envelope to take
            instead of the one at the midpoint. Its slope is (1 − α) times the envelope's at l plus α times that at
            u. For ReLU this is α-CROWN's α, the slope of the lower line (Xu et al., arXiv 2011.13824).

    Raises:
        UnsupportedError: if the activation is not in the table.
    """
    return row(node).relax(node, bounds, slope)


def _relu_image(node: Relu, bounds: Bounds) -> Bounds:
    return Bounds(bounds.lower.clamp(min=0), bounds.upper.clamp(min=0))


def _leaky_image(node: LeakyRelu, bounds: Bounds) -> Bounds:
    """Monotone on either side of 0, so the extrema are at the ends and, for a negative slope, at 0."""
    ends = node.forward(bounds.lower), node.forward(bounds.upper)
    lower = torch.minimum(*ends)
    straddles = (bounds.lower < 0) & (bounds.upper > 0)
    return Bounds(torch.where(straddles, lower.clamp(max=0), lower), torch.maximum(*ends))


def _kinked(left: Tensor, bounds: Bounds, alpha: Tensor | None) -> Lines:
    """Lines of max(x, 0) + left·min(x, 0): one through the kink, the other the chord of [l, u].

    Convex for left ≤ 1 (kink line below, chord above), concave for left ≥ 1 (the other way round). Every line
    through the kink with a slope between ``left`` and 1 is sound on the whole axis, and none with any other slope:
    so the slope is rounded into that interval, which left + α·(1 − left) may leave by all of it (left = −1e16).
    """
    lb, ub = bounds.lower, bounds.upper
    one, zero = torch.ones_like(lb), torch.zeros_like(lb)
    stable = (lb >= 0) | (ub <= 0)
    side = torch.where(lb >= 0, one, left.expand_as(lb))

    adaptive = torch.where(ub > -lb, one, zero) if alpha is None else alpha
    between = torch.lerp(left.expand_as(lb), one, adaptive).clamp(left.clamp(max=1), left.clamp(min=1))
    kink = torch.where(stable, side, between)

    # Stable neurons get a harmless interval: the gradient of a quotient that is not used must be finite too.
    lo, hi = torch.where(stable, -one, lb), torch.where(stable, one, ub)
    # A floor under the width keeps it so where the interval is as good as a point; any slope is sound.
    bottom = left * lo
    chord = (hi - bottom) / (hi - lo).clamp(min=torch.finfo(lb.dtype).tiny ** 0.5)
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


def _relu_lines(node: Relu | Hardened, bounds: Bounds, slope: Tensor | None) -> Lines:
    """As ``_kinked`` makes them, of fewer operations: the chord joins (min(l, 0), 0) and (max(u, 0), max(u, 0)).

    Its slope is s = u/w, w = u − l, and its offset s·(w − u): at u it is s·w, at l no less than 0.
    """
    lo, hi = bounds.lower.clamp(max=0), bounds.upper.clamp(min=0)
    # A floor under the width keeps the gradient finite where the interval is as good as a point.
    width = (hi - lo).clamp(min=torch.finfo(lo.dtype).tiny ** 0.5)
    chord, beyond = hi / width, width - hi
    kink = (hi > beyond).to(lo)
    if slope is not None:
        kink = torch.where((lo < 0) & (hi > 0), slope.clamp(0, 1), kink)
    return Lines(kink, torch.zeros_like(lo), chord, chord * beyond)


def _leaky_lines(node: LeakyRelu, bounds: Bounds, slope: Tensor | None) -> Lines:
    return _kinked(node.slope, bounds, slope)


Slopes = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _at(of: Slopes, bounds: Bounds, ends: bool) -> tuple[Tensor, ...]:
    """Slopes of both envelopes at the midpoint, or at l and at u."""
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
    """The minimum or maximum of f(x) − slope·x over the ends and the one point inside where it may be stationary."""
    lb, ub = bounds.lower, bounds.upper
    at_lower, at_upper, at_turn = (value(x) - slope * x for x in (lb, ub, turn.detach().clamp(lb, ub)))
    return extremum(extremum(at_lower, at_upper), at_turn)


def _increasing_image(node: Sigmoid | Tanh, bounds: Bounds) -> Bounds:
    return Bounds(node.forward(bounds.lower), node.forward(bounds.upper))


def _tanh_slopes(node: Tanh, bounds: Bounds, ends: bool) -> tuple[Tensor, ...]:
    return _at(envelope.tanh_slopes, bounds, ends)


def _tanh_lines(node: Tanh, bounds: Bounds, low: Tensor, high: Tensor) -> Lines:
    """tanh is convex left of 0, so that f(x) − s·x has its one minimum inside there, and its maximum mirrored."""
    return Lines(
        low,
        _offset(torch.minimum, torch.tanh, bounds, low, -envelope.tanh_turn(low.detach())),
        high,
        _offset(torch.maximum, torch.tanh, bounds, high, envelope.tanh_turn(high.detach())),
    )


def _sigmoid_slopes(node: Sigmoid, bounds: Bounds, ends: bool) -> tuple[Tensor, ...]:
    """As for tanh: σ(x) = ½ + ½·tanh(x/2), which has a quarter of its slope at x/2."""
    return tuple(s / 4 for s in _at(envelope.tanh_slopes, Bounds(bounds.lower / 2, bounds.upper / 2), ends))


def _sigmoid_lines(node: Sigmoid, bounds: Bounds, low: Tensor, high: Tensor) -> Lines:
    return Lines(
        low,
        _offset(torch.minimum, torch.sigmoid, bounds, low, -2 * envelope.tanh_turn(4 * low.detach())),
        high,
        _offset(torch.maximum, torch.sigmoid, bounds, high, 2 * envelope.tanh_turn(4 * high.detach())),
    )


def _gelu(t: Tensor) -> Tensor:
    """t·Φ(t), which erfc keeps accurate for negative t, where 1 + erf is nothing but rounding."""
    return 0.5 * t * torch.special.erfc(t * -math.sqrt(0.5))


def _gelu_image(node: Gelu | Hardened, bounds: Bounds) -> Bounds:
    """x·Φ(λx) falls left of DIP/λ and rises right of it: smallest at the nearest point to it, largest at an end."""
    lb, ub = node.lam * bounds.lower, node.lam * bounds.upper
    lowest = torch.full_like(lb, envelope.DIP).clamp(lb, ub)
    return Bounds(_gelu(lowest) / node.lam, torch.maximum(_gelu(lb), _gelu(ub)) / node.lam)


def _scaled(node: Gelu | Hardened, bounds: Bounds) -> Bounds:
    return Bounds(node.lam * bounds.lower, node.lam * bounds.upper)


def _gelu_slopes(node: Gelu | Hardened, bounds: Bounds, ends: bool) -> tuple[Tensor, ...]:
    """x·Φ(λx) = g(λx)/λ with g(t) = t·Φ(t) has the slopes of g over λ·[l, u]."""
    return _at(envelope.gelu_slopes, _scaled(node, bounds), ends)


def _gelu_floor(node: Gelu | Hardened, bounds: Bounds, low: Tensor) -> Tensor:
    """The offset of the lower line of a slope."""
    return _offset(torch.minimum, _gelu, _scaled(node, bounds), low, envelope.gelu_valley(low.detach())) / node.lam


def _gelu_lines(node: Gelu, bounds: Bounds, low: Tensor, high: Tensor) -> Lines:
    ridge = envelope.gelu_ridge(high.detach())
    above = _offset(torch.maximum, _gelu, _scaled(node, bounds), high, ridge) / node.lam
    return Lines(low, _gelu_floor(node, bounds, low), high, above)


def _hardened_image(node: Hardened, bounds: Bounds) -> Bounds:
    return Bounds(_gelu_image(node, bounds).lower, bounds.upper.clamp(min=0))


def _hardened_lines(node: Hardened, bounds: Bounds, low: Tensor, high: Tensor) -> Lines:
    """Below every member lies λ-GELU at the least λ, above every member ReLU."""
    relu = _relu_lines(node, bounds, None)
    return Lines(low, _gelu_floor(node, bounds, low), relu.upper_slope, relu.upper_offset)


def unstable(node: Node, pre: Bounds) -> Tensor:
    """Which neurons need a relaxation, and tight bounds for it: (batch, *shape) bool."""
    return TABLE[node].unstable(node, pre)


def _straddles_zero(node: Activation, pre: Bounds) -> Tensor:
    """Of an activation with one kink, at zero; NaN is none."""
    return (pre.lower < 0) & (pre.upper > 0)


def _varies(node: Activation, pre: Bounds) -> Tensor:
    """Of an activation that is a line nowhere."""
    return ~(pre.lower >= pre.upper)


def _is_soft(node: Gelu | Hardened, pre: Bounds) -> Tensor:
    """Of λ-GELU, which is 0 or x up to |x|·Φ(−6) < 1e-9·|x| where |λx| ≥ 6."""
    hard = (node.lam * pre.lower >= _SATURATED) | (node.lam * pre.upper <= -_SATURATED)
    return _varies(node, pre) & ~hard


_SATURATED = 6.0
_SMOOTH_ULPS = 64
"""Granted to a library's exp, tanh, sigmoid and erfc and to the few operations around them; at most 2 were measured."""


def _smooth(
    image: Callable[[Any, Bounds], Bounds],
    slopes: Callable[[Any, Bounds, bool], tuple[Tensor, ...]],
    lines: Callable[[Any, Bounds, Tensor, Tensor], Lines],
    absolute: Callable[[Any], Tensor | float] = lambda node: 0.0,
    unstable: Callable[[Any, Bounds], Tensor] = _varies,
) -> Row:
    curve = Curve(slopes, lines)
    return Row(image, curve.relax, _SMOOTH_ULPS, unstable, absolute, curve)


def _soft_error(node: Gelu | Hardened) -> Tensor:
    """An argument λx off by u moves f by u·|x·f'(x)| ≤ u·(|f(x)| + 0.294/λ), t²·φ(t) being at most 0.294."""
    return _SMOOTH_ULPS / node.lam


def _smooth_error(node: Smooth) -> float:
    return _SMOOTH_ULPS * FUNCTIONS[node.function].absolute


TABLE: Table[Row] = Table(
    "bound propagation",
    {
        Relu: Row(_relu_image, _relu_lines, ulps=4, unstable=_straddles_zero),
        LeakyRelu: Row(_leaky_image, _leaky_lines, ulps=8, unstable=_straddles_zero),
        Sigmoid: _smooth(_increasing_image, _sigmoid_slopes, _sigmoid_lines),
        Tanh: _smooth(_increasing_image, _tanh_slopes, _tanh_lines),
        Gelu: _smooth(_gelu_image, _gelu_slopes, _gelu_lines, _soft_error, _is_soft),
        Smooth: _smooth(smooth.image, smooth.slopes, smooth.lines, _smooth_error),
        Hardened: _smooth(_hardened_image, _gelu_slopes, _hardened_lines, _soft_error, _is_soft),
    },
    group=Activation,
)
