"""What bound propagation knows of each activation f: its image of an interval, and its linear relaxation on one.

A table has one row for each kind of activation. A linear relaxation on [l, u] is always built in two steps:

* Slopes. The lower line supports the *convex envelope* of f on [l, u] at the interval's midpoint. The mean of a line
  over [l, u] is its value at the midpoint, so that no other sound line has less area between itself and f. The upper
  line supports the concave envelope at the midpoint. For ReLU this is CROWN's adaptive choice (Zhang et al., arXiv
  1811.00866, section 3.4), for sigmoid and tanh these are CROWN's tangents and chords (ibid., table 2).
* Offsets. The offset is computed for the slope s as it is in floating point: the least, or the greatest, value of
  f(x) − s·x over all points of [l, u] that can have it. So the rounding of a slope makes no line unsound, and only the
  rounding of offsets must be accounted for.

The offset of a line is off by at most ``ulps``·u·(|slope|·max(|l|, |u|) + |offset|) + u·``absolute`` (``Row``), and an
end of an image by at most ``ulps``·u·|end| + u·``absolute``, where u is the unit roundoff of the dtype. Underflow adds
a few of the smallest normal numbers of the dtype; to an offset 1 + max(|l|, |u|) times as many, since it may take a
slope. Nothing here is moved outward for all that: ``bounds.rounding`` does it. A bound that is NaN gives NaN, or lines
that hold without it.
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
    Identity,
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
        curve: of a smooth activation, the two steps of its relaxation; ``relax`` is then that of the curve.
    """

    image: Callable[[Any, Bounds], Bounds]
    relax: Callable[[Any, Bounds, Tensor | None], Lines]
    ulps: int
    unstable: Callable[[Any, Bounds], Tensor]
    absolute: Callable[[Any], Tensor | float] = lambda node: 0.0
    curve: Curve | None = None


@dataclass(frozen=True)
class Curve:
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
        """Lines whose slopes are (1 − α) times the slopes at l plus α times those at u.

        Args:
            node: the activation.
            bounds: of its input.
            ends: the slopes at both ends, as ``slopes`` returns them.
            alpha: in [0, 1].
        """
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
    """The offset of a line of f: the least or the greatest value of f(x) − slope·x over [l, u].

    Args:
        extremum: ``torch.minimum`` or ``torch.maximum``.
        value: f.
        bounds: l and u.
        slope: of the line.
        turn: the one point inside [l, u] at which the difference may be stationary, if it is inside.
    """
    lb, ub = bounds.lower, bounds.upper
    at_lower, at_upper, at_turn = (value(x) - slope * x for x in (lb, ub, turn.detach().clamp(lb, ub)))
    return extremum(extremum(at_lower, at_upper), at_turn)


def _increasing_image(node: Sigmoid | Tanh, bounds: Bounds) -> Bounds:
    return Bounds(node.forward(bounds.lower), node.forward(bounds.upper))


def _tanh_slopes(node: Tanh, bounds: Bounds, ends: bool) -> tuple[Tensor, ...]:
    return _at(envelope.tanh_slopes, bounds, ends)


def _tanh_lines(node: Tanh, bounds: Bounds, low: Tensor, high: Tensor) -> Lines:
    """tanh is convex left of 0: only there f(x) − s·x may have a minimum inside, and only right of 0 a maximum."""
    return Lines(
        low,
        _offset(torch.minimum, torch.tanh, bounds, low, -envelope.tanh_turn(low.detach())),
        high,
        _offset(torch.maximum, torch.tanh, bounds, high, envelope.tanh_turn(high.detach())),
    )


def _sigmoid_slopes(node: Sigmoid, bounds: Bounds, ends: bool) -> tuple[Tensor, ...]:
    """By those of tanh: σ(x) = ½ + ½·tanh(x/2) has a quarter of the slope that tanh has at x/2."""
    return tuple(s / 4 for s in _at(envelope.tanh_slopes, Bounds(bounds.lower / 2, bounds.upper / 2), ends))


def _sigmoid_lines(node: Sigmoid, bounds: Bounds, low: Tensor, high: Tensor) -> Lines:
    return Lines(
        low,
        _offset(torch.minimum, torch.sigmoid, bounds, low, -2 * envelope.tanh_turn(4 * low.detach())),
        high,
        _offset(torch.maximum, torch.sigmoid, bounds, high, 2 * envelope.tanh_turn(4 * high.detach())),
    )


def _gelu(t: Tensor) -> Tensor:
    """GELU, t·Φ(t), by erfc: 1 + erf would leave nothing but rounding errors for negative t."""
    return 0.5 * t * torch.special.erfc(t * -math.sqrt(0.5))


def _gelu_image(node: Gelu | Hardened, bounds: Bounds) -> Bounds:
    """x·Φ(λx) falls up to DIP/λ and rises from there on: least at the point nearest to that, greatest at an end."""
    lb, ub = node.lam * bounds.lower, node.lam * bounds.upper
    lowest = torch.full_like(lb, envelope.DIP).clamp(lb, ub)
    return Bounds(_gelu(lowest) / node.lam, torch.maximum(_gelu(lb), _gelu(ub)) / node.lam)


def _scaled(node: Gelu | Hardened, bounds: Bounds) -> Bounds:
    return Bounds(node.lam * bounds.lower, node.lam * bounds.upper)


def _gelu_slopes(node: Gelu | Hardened, bounds: Bounds, ends: bool) -> tuple[Tensor, ...]:
    """The slopes of x·Φ(λx) over [l, u] are those of GELU, g(t) = t·Φ(t), over λ·[l, u], since it is g(λx)/λ."""
    return _at(envelope.gelu_slopes, _scaled(node, bounds), ends)


def _gelu_floor(node: Gelu | Hardened, bounds: Bounds, low: Tensor) -> Tensor:
    """The offset of the lower line of slope ``low``."""
    return _offset(torch.minimum, _gelu, _scaled(node, bounds), low, envelope.gelu_valley(low.detach())) / node.lam


def _gelu_lines(node: Gelu, bounds: Bounds, low: Tensor, high: Tensor) -> Lines:
    ridge = envelope.gelu_ridge(high.detach())
    above = _offset(torch.maximum, _gelu, _scaled(node, bounds), high, ridge) / node.lam
    return Lines(low, _gelu_floor(node, bounds, low), high, above)


def _hardened_image(node: Hardened, bounds: Bounds) -> Bounds:
    return Bounds(_gelu_image(node, bounds).lower, bounds.upper.clamp(min=0))


def _hardened_lines(node: Hardened, bounds: Bounds, low: Tensor, high: Tensor) -> Lines:
    """Every member of the set lies above λ-GELU at the least λ and below ReLU."""
    relu = _relu_lines(node, bounds, None)
    return Lines(low, _gelu_floor(node, bounds, low), relu.upper_slope, relu.upper_offset)


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
    hard = (node.lam * pre.lower >= _SATURATED) | (node.lam * pre.upper <= -_SATURATED)
    return _varies(node, pre) & ~hard


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
) -> Row:
    curve = Curve(slopes, lines)
    return Row(image, curve.relax, _SMOOTH_ULPS, unstable, absolute, curve)


def _soft_error(node: Gelu | Hardened) -> Tensor:
    """The absolute error of λ-GELU, f(x) = x·Φ(λx), in units of the unit roundoff u.

    A relative error u of λx moves f by u·|x·f'(x)| ≤ u·(|f(x)| + 0.294/λ), since t²·φ(t) ≤ 0.294 for all t.
    """
    return _SMOOTH_ULPS / node.lam


def _smooth_error(node: Smooth) -> Tensor:
    """The absolute error of a function, of which the parameter may be a factor."""
    return _SMOOTH_ULPS * FUNCTIONS[node.function].absolute * node.parameter.clamp(min=1)


TABLE: Table[Row] = Table(
    "bound propagation",
    {
        Relu: Row(_relu_image, _relu_lines, ulps=4, unstable=_straddles_zero),
        LeakyRelu: Row(_leaky_image, _leaky_lines, ulps=8, unstable=_straddles_zero),
        Identity: Row(_identity_image, _identity_lines, ulps=0, unstable=_varies),
        Sigmoid: _smooth(_increasing_image, _sigmoid_slopes, _sigmoid_lines),
        Tanh: _smooth(_increasing_image, _tanh_slopes, _tanh_lines),
        Gelu: _smooth(_gelu_image, _gelu_slopes, _gelu_lines, _soft_error, _is_soft),
        Smooth: _smooth(smooth.image, smooth.slopes, smooth.lines, _smooth_error),
        Hardened: _smooth(_hardened_image, _gelu_slopes, _hardened_lines, _soft_error, _is_soft),
    },
    group=Activation,
)
