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
smallest normal numbers. Nothing here is widened for that: ``bounds.rounding`` is the place. NaN bounds give NaN lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds.types import Bounds, Lines
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.graph import Activation, LeakyRelu, Relu


@dataclass(frozen=True)
class Row:
    """What is known of one activation.

    Args:
        image: the interval image (see ``image``).
        relax: the linear relaxation (see ``relax``).
        ulps: relative rounding error of an image's ends and of a line, in units of the unit roundoff.
        absolute: absolute rounding error of the same, in the same units, for a node.
    """

    image: Callable[[Any, Bounds], Bounds]
    relax: Callable[[Any, Bounds, Tensor | None], Lines]
    ulps: int
    absolute: Callable[[Any], Tensor | float] = lambda node: 0.0


def row(node: Activation) -> Row:
    """The table's row for a node.

    Raises:
        UnsupportedError: if the activation is not in the table.
    """
    try:
        return TABLE[type(node)]
    except KeyError:
        raise UnsupportedError(
            "no bounds are known for this activation", place=f"node '{node.name}' ({node.op})"
        ) from None


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
        slope: values in [0, 1], broadcastable to the bounds: which of the supporting lines of the envelope to take
            instead of the one at the midpoint, from the one that touches furthest left (0) to the one furthest
            right (1). For ReLU this is α-CROWN's α, the slope of the lower line (Xu et al., arXiv 2011.13824).

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
    through the kink with a slope between ``left`` and 1 is sound on the whole axis.
    """
    lb, ub = bounds.lower, bounds.upper
    one, zero = torch.ones_like(lb), torch.zeros_like(lb)
    stable = (lb >= 0) | (ub <= 0)
    side = torch.where(lb >= 0, one, left.expand_as(lb))

    adaptive = torch.where(ub > -lb, one, zero) if alpha is None else alpha
    kink = torch.where(stable, side, left + adaptive * (1 - left))

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


def _relu_lines(node: Relu, bounds: Bounds, slope: Tensor | None) -> Lines:
    return _kinked(bounds.lower.new_zeros(()), bounds, slope)


def _leaky_lines(node: LeakyRelu, bounds: Bounds, slope: Tensor | None) -> Lines:
    return _kinked(node.slope, bounds, slope)


TABLE: dict[type[Activation], Row] = {
    Relu: Row(_relu_image, _relu_lines, ulps=4),
    LeakyRelu: Row(_leaky_image, _leaky_lines, ulps=8),
}
