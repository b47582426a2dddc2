"""Two activations beside each other: what g(z′) − f(z) is, given bounds of z, of z′ and of d = z′ − z.

For ReLU, and by the mean value theorem for a smooth function that both networks have,

    g(z + d) − g(z) = s·d,   s a slope of g between z and z + d.

λ-GELU is below ReLU by at most δ, the maximum of |z|·Φ(−λ|z|) over the bounds of z (arXiv 2603.21991), so that for two
of ReLU and λ-GELU, f and g, or of other functions that are ``gated``,

    g(z + d) − f(z) = s·d + e,   s ∈ [0, 1],   e ∈ [−δ of g, δ of f],

and s is 1 or 0 where the bounds of z and z′ are on one side of zero. Over a ≤ d ≤ b, min(s·d) is concave in d and
max(s·d) convex, so that their chords bound them: lines of d alone. A term that depends on z would not tighten them: the
plane over max(s·d) that is least at the middle of a box of (z, d) that holds z = 0 and z + d = 0 does not depend on z.

In rows of coefficients the value g(z′) of the second network is then f(z) + (a line of d), and d goes back to z′ and z.
What the two networks have in common cancels, number by number, and what is left of a difference of their outputs is due
to what differs. Source of such bounds: Paulsen et al., ReluDiff, ICSE 2020, and NeuroDiff, ASE 2020; with zonotopes
Teuber et al., Revisiting Differential Verification, arXiv 2410.20207. Where d is as large as z and z′ themselves, the
lines of f and g, each by itself, are closer together than those of d: such a neuron is taken by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding, sums
from verifiable_relu.bounds.activations import slope_range
from verifiable_relu.bounds.forward import NodeBounds
from verifiable_relu.bounds.kinds import of_samples
from verifiable_relu.bounds.tuning import Bounds, Lines
from verifiable_relu.network.nodes import Activation, Beside, Identity, Relu, gated, same
from verifiable_relu.rounding import divisor


def gap(node: Activation, pre: Bounds) -> Tensor:
    """δ of ReLU or λ-GELU, rounded up: −|z|·Φ(−λ|z|) is λ-GELU at −|z|, so that δ is minus the least value there.

    Of any other function that is ``gated`` that is not below δ.
    """
    if isinstance(node, Relu):
        return torch.zeros_like(pre.lower)
    near = torch.maximum(pre.lower, -pre.upper).clamp(min=0)
    far = torch.maximum(-pre.lower, pre.upper)
    return -rounding.interval_activation(node, Bounds(-far, -near)).lower


@dataclass(frozen=True)
class Secants:
    """g(z + d) − f(z) = s·d + e, neuron by neuron: (batch, *shape) each.

    Attributes:
        slopes: of s.
        gaps: of e, the lower ones not above and the upper ones not below 0.
    """

    slopes: Bounds
    gaps: Bounds

    @staticmethod
    def of(f: Activation, g: Activation, first: Bounds, second: Bounds) -> Secants:
        """Of activations of two networks over bounds of z and of z′.

        Raises:
            UnsupportedError: for activations of which that is not known.
        """
        one, zero = torch.ones_like(first.lower), torch.zeros_like(first.lower)
        none = Bounds(zero, zero)
        both = Bounds(torch.minimum(first.lower, second.lower), torch.maximum(first.upper, second.upper))
        if isinstance(g, Identity):
            return Secants(Bounds(one, one), none)
        if gated(f) and gated(g) and not same(f, g):
            slopes = Bounds((both.lower >= 0).to(zero), (~(both.upper <= 0)).to(zero))
            return Secants(slopes, Bounds(-gap(g, second), gap(f, first)))
        return Secants(slope_range(g, both), none)

    @property
    def free(self) -> Tensor:
        """For which neurons s is not known exactly, (batch, *shape) bool."""
        return self.slopes.lower != self.slopes.upper

    def moved(self, d: Tensor) -> Bounds:
        """The least and the greatest s·d, (batch, *shape)."""
        ends = self.slopes.lower * d, self.slopes.upper * d
        return Bounds(torch.minimum(*ends), torch.maximum(*ends))

    def image(self, d: Bounds) -> Bounds:
        """The box of s·d + e over that of d, outward."""
        left, right = self.moved(d.lower), self.moved(d.upper)
        # min(s·d) is concave in d and max(s·d) convex: both are extreme at the ends.
        least, most = torch.minimum(left.lower, right.lower), torch.maximum(left.upper, right.upper)
        return rounding.widen(Bounds(least + self.gaps.lower, most + self.gaps.upper), 3)

    def lines(self, d: Bounds) -> Lines:
        """The chord of the concave min(s·d), the chord of the convex max(s·d), and the gaps beyond them."""
        left, right = self.moved(d.lower), self.moved(d.upper)
        width = divisor(d.upper - d.lower)
        low, high = (right.lower - left.lower) / width, (right.upper - left.upper) / width
        # Offsets last, from both ends: they are sound whatever the slopes became in floating point.
        under = torch.minimum(left.lower - low * d.lower, right.lower - low * d.upper)
        over = torch.maximum(left.upper - high * d.lower, right.upper - high * d.upper)
        return Lines(low, under + self.gaps.lower, high, over + self.gaps.upper)


def secants(bounds: NodeBounds, node: Beside) -> Secants:
    """Those of a node, over the bounds of both activations' inputs."""
    f, g = (bounds.network.nodes[i] for i in node.inputs[1:])
    assert isinstance(f, Activation) and isinstance(g, Activation)
    first, second = (bounds.of(each.inputs[0]) for each in (f, g))
    return Secants.of(f, g, first, second)


def width(lines: Lines, middle: Tensor) -> Tensor:
    """How far the upper line lies above the lower one at a point."""
    return (lines.upper_slope - lines.lower_slope) * middle + (lines.upper_offset - lines.lower_offset)


@dataclass(frozen=True)
class Aside:
    """x + low·d + floor ≤ y ≤ x + high·d + top, neuron by neuron, y being the value of a ``Beside``.

    Or so of their distances from their points; (batch, size) each. Where ``alone`` is 1, and not 0, it is y = g(z′).
    """

    low: Tensor
    high: Tensor
    floor: Tensor
    top: Tensor
    alone: Tensor

    @staticmethod
    def of(bounds: NodeBounds, index: int) -> Aside:
        """Over the bounds of the nodes before node ``index``, but for its own rounding."""
        node = bounds.network.nodes[index]
        assert isinstance(node, Beside)
        d, *others = node.inputs
        box, known = bounds.of(d), secants(bounds, node)
        found = known.lines(box)
        apart = width(found, bounds.center(d))
        each = torch.zeros_like(apart)
        for activation in others:
            f = bounds.network.nodes[activation]
            assert isinstance(f, Activation)
            lines = bounds.rules.lines(activation, f, bounds.pre[activation])
            each = each + width(lines, bounds.center(f.inputs[0]))
        # Where s is known, d goes back as it is. What is no number is said of no difference.
        near = ~known.free | (apart <= each)
        alone = ~(near & box.lower.isfinite() & box.upper.isfinite()).flatten(1)
        low, floor, high, top = (part.flatten(1).masked_fill(alone, 0.0) for part in found.parts())
        return Aside(low, high, floor, top, alone.to(low))

    def about(self, bounds: NodeBounds, index: int, sums: int) -> Aside:
        """The same of the distances from the nodes' points, moved outward by what rounding may change."""
        node = bounds.network.nodes[index]
        d, x, _ = node.inputs
        at, of, to = (bounds.point(i).flatten(1) for i in (d, x, index))
        steep = torch.maximum(self.low.abs(), self.high.abs()).clamp(min=1)
        most = torch.maximum(self.floor.abs(), self.top.abs())
        far, first, both = (bounds.size(i).flatten(1) for i in (d, x, index))
        error = rounding.maxima(first + both + steep * far + most, sums)
        floor = self.low * at + self.floor + of - to - error
        top = self.high * at + self.top + of - to + error
        alone = self.alone > 0
        return Aside(self.low, self.high, floor.masked_fill(alone, 0.0), top.masked_fill(alone, 0.0), self.alone)

    def to(self, dtype: torch.dtype) -> Aside:
        """The same in another dtype."""
        return Aside(*(part.to(dtype) for part in vars(self).values()))

    def of_samples(self, sample: Tensor | None) -> Aside:
        """Those of the samples named, one after another; by default of every sample."""
        return Aside(*(of_samples(part, sample) for part in vars(self).values()))

    def at(self, values: Sequence[Tensor | None], a: Tensor) -> Tensor:
        """(rows, size) what rows a, (rows, size), take for y at values of the inputs, (rows, …); None for no matter."""
        d, x, made = (value if value is None else value.flatten(1) for value in values)
        assert d is not None and x is not None
        beside = x + torch.where(a < 0, self.high * d + self.top, self.low * d + self.floor)
        return beside if made is None else torch.where(self.alone > 0, made, beside)

    def back(self, a: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Coefficients of d, x and g(z′) (None for none) of those of y, (groups, each, size), and their constants."""
        negative = a.clamp(max=0)
        positive = a - negative
        before = positive * self.low[:, None] + negative * self.high[:, None]
        constant = sums.dot(negative, self.top, (positive, self.floor))
        alone = self.alone[:, None]
        return before, a * (1 - alone), a * alone if bool(alone.any()) else None, constant
