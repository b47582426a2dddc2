"""Differential bounds of two networks: g(z′) as f(z) + (g(z′) − f(z)), from bounds of z, z′ and d = z′ − z.

For ReLU, and by the mean value theorem for a smooth function that both networks have,

    g(z + d) − g(z) = s·d,   s a slope of g between z and z + d.

A gated function f lies below ReLU by at most δ ≤ −f(−|z|) (``Function.gated``; for λ-GELU δ is the maximum of
|z|·Φ(−λ|z|), arXiv 2603.21991), so that for two of ReLU and such functions

    g(z + d) − f(z) = s·d + e,   s ∈ [0, 1],   e ∈ [−δ of g, δ of f],

and s is 1 or 0 where the bounds of z and z′ are on one side of zero. Over a ≤ d ≤ b, min(s·d) is concave in d and
max(s·d) convex: a line is below, or above, where it is so at both ends, whatever its slope. The chords are the closest
ones. A term that depends on z would not tighten them: the plane over max(s·d) that is least at the middle of a box of
(z, d) that holds z = 0 and z + d = 0 does not depend on z.

In rows of coefficients g(z′) becomes f(z) + (linear bound in d), and d goes back to z′ and z. What the networks have in
common cancels, number by number; the rest of a difference of their outputs is due to what differs. Sources of
such bounds: Paulsen et al., ReluDiff, ICSE 2020, and NeuroDiff, ASE 2020; with zonotopes Teuber et al., arXiv
2410.20207. Where d is as large as z and z′ themselves, the separate linear bounds of f and g are closer
together than those of d: such a neuron is bounded alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verifiable_relu.bounds.neuron_bounds import BASE, NeuronBounds
from verifiable_relu.bounds.rows import Rows, SampleVectors
from verifiable_relu.bounds.steps import FunctionStep, OpBounds, Step, Stepped
from verifiable_relu.ir.functions.function import Function, LinearRelaxation
from verifiable_relu.ir.functions.smooth import Hardened
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Elementwise, Pair
from verifiable_relu.rounding import divisor, negligible, unit_roundoff


@dataclass(frozen=True, eq=False)
class Secants:
    """Slopes s and gaps e with g(z + d) − f(z) = s·d + e for each neuron, (batch, n) each.

    Attributes:
        slope: bounds of s.
        gap: bounds of e, the lower ones not above and the upper ones not below 0.
    """

    slope: Interval
    gap: Interval

    @staticmethod
    def from_functions(f: Function, g: Function, z: Interval, moved: Interval) -> Secants:
        """Return the secants for f over bounds ``z`` of z and g over bounds ``moved`` of z′."""
        zero = torch.zeros_like(z.lower)
        both = Interval(torch.minimum(z.lower, moved.lower), torch.maximum(z.upper, moved.upper))
        if f.is_same(g) and not isinstance(f, Hardened):
            return Secants(g.derivative_range(both), Interval(zero, zero))
        slope = Interval((both.lower >= 0).to(zero), (~(both.upper <= 0)).to(zero))
        return Secants(slope, Interval(-_below_relu(g, moved), _below_relu(f, z)))

    @property
    def is_free(self) -> Tensor:
        """True where s is not known exactly, (batch, n) bool."""
        return self.slope.lower != self.slope.upper

    def relaxation(self, d: Interval, dtype: torch.dtype) -> LinearRelaxation:
        """Return the closest linear bounds with slopes of a dtype, over an interval of d.

        An offset sums two products and a gap: four roundings of numbers that are together at most
        |s·d| + |slope·d| + |e|.
        """
        ends = torch.stack([d.lower, d.upper])
        products = torch.stack([self.slope.lower * ends, self.slope.upper * ends])
        least, most = products.amin(0), products.amax(0)
        width, share = divisor(d.upper - d.lower), 16 * unit_roundoff(ends.dtype)

        def line(heights: Tensor, gap: Tensor, sign: int) -> tuple[Tensor, Tensor]:
            slope = ((heights[1] - heights[0]) / width).to(dtype).to(BASE)
            left = slope * ends
            size = (heights.abs() + left.abs()).amax(0) + gap.abs()
            offset = sign * (sign * (heights - left)).amax(0) + gap
            return slope, offset + sign * (share * size + negligible(BASE))

        return LinearRelaxation(*line(least, self.gap.lower, -1), *line(most, self.gap.upper, 1))


def _below_relu(f: Function, z: Interval) -> Tensor:
    """Return an upper bound of ReLU(z) − f(z) over an interval: 0 for ReLU, −f(−|z|) for a gated function."""
    if f.kind == "Relu":
        return torch.zeros_like(z.lower)
    near = torch.maximum(z.lower, -z.upper).clamp(min=0)
    far = torch.maximum(-z.lower, z.upper)
    return -f.image(Interval(-far, -near)).lower.clamp(max=0)


@dataclass(frozen=True, eq=False)
class ComparedOp:
    """Op f(z) with which another op g(z′) is compared.

    Attributes:
        op: f.
        mine, z, apart: bounds of its value, of z, and of z′ − z.
    """

    op: Elementwise
    mine: NeuronBounds
    z: NeuronBounds
    apart: NeuronBounds


class DifferenceStep(Step):
    """A·(y − y₀) = A·(x − x₀) + A·(y′ − (y₀ − x₀)), y = x + y′ being g(z′), x = f(z) and y′ bounded by lines of d.

    Neurons that are bounded alone have A·(y − y₀) bounded by lines of z′, as in ``FunctionStep``; either part
    is 0 where the other is not. The point of y′ is y₀ − x₀ as computed, off by one of the roundings that
    ``FunctionStep`` charges for. Merging is charged by the part of g alone, for all neurons.

    Args:
        pair: the ops' numbers.
        compared: f(z).
        relaxation: of g alone.
    """

    op: Elementwise

    def __init__(
        self, op: Elementwise, bounds: OpBounds, *, pair: Pair, compared: ComparedOp, relaxation: LinearRelaxation
    ) -> None:
        super().__init__(op, bounds)
        mine, inputs, dtype = bounds.mine, bounds.inputs, bounds.dtype
        f, x, z, d = compared.op.function, compared.mine, compared.z, compared.apart
        secants = Secants.from_functions(f, op.function, z.interval, inputs[0].interval)
        lines = secants.relaxation(d.interval, dtype)
        f_lines = f.relaxation(z.interval, *f.slopes(z.interval, z.by_rows))
        alone = _width(f_lines, z) + _width(relaxation, inputs[0])
        # Where s is known, d goes back as it is. What is no number is said of no difference.
        known = torch.stack([part.isfinite() for part in (*vars(lines).values(), d.radius, x.radius)]).all(0)
        near = known & (~secants.is_free | (_width(lines, d) <= alone))
        own = replace(mine, point=mine.point.masked_fill(near, 0))
        moved = replace(mine, point=(mine.point - x.point).masked_fill(~near, 0))
        of_difference = replace(op, inputs=(pair.apart,))
        lines = _masked(lines, ~near)
        self._own = FunctionStep(op, replace(bounds, mine=own), relaxation=_masked(relaxation, near))
        self._apart = FunctionStep(of_difference, replace(bounds, mine=moved, inputs=[d], uses=1), relaxation=lines)
        self._near, self._first = SampleVectors(near.to(dtype)), pair.first

    def back(self, rows: Rows, sample: Tensor | None) -> Stepped:
        own, apart = self._own.back(rows, sample), self._apart.back(rows, sample)
        (near,) = rows.pick(self._near, sample)
        given = [*own.given, *apart.given, (self._first, rows.replace(rows.values * near))]
        return Stepped(given, [*own.constants, *apart.constants])

    def forward(self, values: Sequence[Tensor], rows: Tensor, sample: Tensor | None) -> Tensor:
        moved, apart, first = values
        (near,) = (part.squeeze(1) for part in self._near.dense(sample))
        return self._own.forward([moved], rows, sample) + self._apart.forward([apart], rows, sample) + near * first


def _width(lines: LinearRelaxation, x: NeuronBounds) -> Tensor:
    """Return the distance of the upper from the lower linear bound in the middle of an interval."""
    middle = torch.lerp(x.interval.lower, x.interval.upper, 0.5)
    return (lines.upper_slope - lines.lower_slope) * middle + (lines.upper_offset - lines.lower_offset)


def _masked(lines: LinearRelaxation, where: Tensor) -> LinearRelaxation:
    return LinearRelaxation(*(part.masked_fill(where, 0) for part in vars(lines).values()))
