"""Interval arithmetic about points: bounds of each op's value over a batch of boxes.

Every op v has a *point* v₀, any vector of float64 numbers. Rows of coefficients are propagated as A·(v − v₀)
(``backward``), so that an error in A counts by the *radius* ≥ |v − v₀|, not by how large v is. The point of the inputs
and of a function's output is the centre of its interval; that of another op is its value, as computed, at its inputs'
points.

An affine map y = W·x + b takes a ball about x₀ to a ball about y₀ (Gowal et al., arXiv 1810.12715, section 3.1):

    |y − y₀| ≤ |W|·radius(x) + |W·x₀ + b − y₀| = ``reach`` + ``off``.

Both terms are bounded in real arithmetic; a backward step through the map charges both (``steps``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verifiable_relu.bounds.rows import Columns
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Convolution, Diagonal, Gather
from verifiable_relu.ir.network import Affine, Elementwise, Maximum, Op, Product, Sum
from verifiable_relu.rounding import above, below, negligible, sum_error, unit_roundoff

BASE = torch.float64
"""The dtype of intervals, points, constants and errors; coefficients of rows may be in float32."""

_UNIT = unit_roundoff(BASE)


@dataclass(frozen=True, eq=False)
class NeuronBounds:
    """Bounds of one op's value v; tensors are (batch, n) in float64.

    Attributes:
        interval: of v.
        point: v₀.
        radius: ≥ |v − v₀|.
        reach: of an affine op, ≥ |W|·|x − x₀|.
        off: of an affine op, ≥ |W·x₀ + b − y₀|.
        by_rows: bounds of v by rows alone; None if there are none.
        columns: the neurons that may have more than one value in some sample; None for all.
    """

    interval: Interval
    point: Tensor
    radius: Tensor
    reach: Tensor | None = None
    off: Tensor | None = None
    by_rows: Interval | None = None
    columns: Columns | None = None

    @staticmethod
    def centred(interval: Interval) -> NeuronBounds:
        """Return bounds about the centre of an interval."""
        point = torch.lerp(interval.lower, interval.upper, 0.5)
        return NeuronBounds(interval, point, radius_about(point, interval))

    @property
    def batch(self) -> int:
        return self.point.shape[0]

    def pick(self, sample: Tensor | None) -> NeuronBounds:
        """Return the bounds of the samples with these numbers, (count,), without ``reach`` and ``off``.

        The bounds of a single box stay: all rows share them.
        """
        if sample is None or self.batch == 1:
            return self
        interval = self.interval.pick(sample)
        return NeuronBounds(interval, self.point.index_select(0, sample), self.radius.index_select(0, sample))

    def tightened(self, interval: Interval, by_rows: Interval | None = None) -> NeuronBounds:
        """Return these bounds with a tighter interval about the same point."""
        return replace(self, interval=interval, radius=radius_about(self.point, interval), by_rows=by_rows)


def radius_about(point: Tensor, interval: Interval) -> Tensor:
    """Return at least |v − point| for all v of an interval: the differences are rounded once."""
    reach = torch.maximum(interval.upper - point, point - interval.lower)
    return reach.mul(1 + 4 * _UNIT).add(negligible(BASE))


def propagate(
    op: Op, inputs: Sequence[NeuronBounds], reach_dtype: torch.dtype = BASE, rounded: bool = True
) -> NeuronBounds:
    """Return the bounds of an op by interval arithmetic.

    Args:
        op: the op.
        inputs: the bounds of its inputs.
        reach_dtype: in which |W|·radius is computed for convolutions.
        rounded: whether rounding is accounted for. If not, numbers are in the dtype of the inputs' bounds, and have
            gradients.
    """
    x = inputs[0]
    match op:
        case Affine() if not rounded:
            point, radius = op.value(x.point), op.map.abs_apply(x.radius)
            return NeuronBounds(Interval(point - radius, point + radius), point, radius)
        case Product() if not rounded:
            ends = [(each.interval.lower, each.interval.upper) for each in inputs]
            corners = torch.stack([a * b for a in ends[0] for b in ends[1]])
            return NeuronBounds.centred(Interval(corners.amin(0), corners.amax(0)))
        case Affine():
            return _affine(op, x, reach_dtype)
        case Elementwise():
            return NeuronBounds.centred(op.function.image(x.interval))
        case Sum():
            return _sum(op, inputs)
        case Product():
            return _product(op, inputs)
        case Maximum():
            candidates = op.candidates.to(x.point.device)
            lower, upper = (end[:, candidates].amax(1) for end in (x.interval.lower, x.interval.upper))
            return NeuronBounds.centred(Interval(lower, upper))
    raise TypeError(f"no interval arithmetic for {op.place}")


def _affine(op: Affine, x: NeuronBounds, dtype: torch.dtype) -> NeuronBounds:
    """Ball arithmetic; see the module's head.

    With γ of t = the map's products, each computed sum of |W|·r is at least (1 − γ_t)(1 − c) of the true one, where
    c is the relative error of weights and radii in ``dtype``. W·x₀ + b as computed is off by γ_{t+2}·(|W|·|x₀| + |b|).
    What the file means may differ from the stored numbers by ``weight_error`` and ``bias_error``. The ends y₀ ∓ radius
    round once more by u·(|y₀| + radius), |y₀| ≤ (1 + γ)·(|W|·|x₀| + |b|): for that, γ has some terms more.
    """
    linear, exact = op.map, op.is_exact
    if isinstance(linear, Gather) and exact and op.bias is None:
        parts = (linear.apply(t) for t in (x.interval.lower, x.interval.upper, x.point, x.radius))
        lower, upper, point, radius = parts
        return NeuronBounds(Interval(lower, upper), point, radius, radius, torch.zeros_like(radius))
    point = op.value(x.point)
    dtype = dtype if isinstance(linear, Convolution) else BASE
    share = sum_error(linear.terms + 4, dtype) + (0.0 if dtype == BASE else linear.conversion_error(dtype))
    sizes = linear.abs_apply(torch.cat([x.radius, x.point.abs()]).to(dtype)).to(BASE)
    sizes = sizes * (1 + 2 * share) + 4 * linear.terms * negligible(dtype)
    reach, size = sizes[: x.batch] * (1 + op.weight_error), sizes[x.batch :]
    bias = op.bias_as(size)
    magnitude = size if bias is None else size + bias.abs()
    off = 2 * sum_error(linear.terms + 8, BASE) * magnitude + 4 * linear.terms * negligible(BASE)
    if not exact:
        off = off + 2 * op.weight_error * size
        off = off if op.bias_error is None else off + op.bias_error.to(off)
    radius = (reach + off) * (1 + 4 * _UNIT)
    interval = Interval(point - radius, point + radius)
    return NeuronBounds(_kept_sign(op, x, interval), point, radius, reach, off)


def _kept_sign(op: Affine, x: NeuronBounds, interval: Interval) -> Interval:
    """Cut the interval of W·x + b where W ≥ 0 and x ≥ 0.

    There y is not below b, and the sum of the lower ends keeps its digits.

    A root, a logarithm or a quotient that follows needs an end of exactly 0, not one slightly below.
    """
    linear = op.map
    if op.weight_error or not bool(linear.cached(("nonnegative",), lambda: (linear.weight >= 0).all())):
        return interval
    low = x.interval.lower
    positive = low >= 0 if isinstance(linear, Diagonal) else (low >= 0).all(1, keepdim=True)
    ends = linear.apply(low.clamp(min=0)) * (1 - 2 * sum_error(linear.terms + 4, BASE))
    bias = op.bias_as(ends)
    if bias is not None:
        bias = bias if op.bias_error is None else below(bias - op.bias_error.to(ends))
        total = ends + bias
        ends = torch.where(ends > 0, below(total - 2 * _UNIT * (ends + bias.abs())), bias)
    lower = torch.where(positive, torch.maximum(interval.lower, ends), interval.lower)
    return Interval(lower, interval.upper)


def _sum(op: Sum, inputs: Sequence[NeuronBounds]) -> NeuronBounds:
    """Return the sums of the ends, moved outward by γ of their terms' sizes; a common sign of all terms is kept."""
    lowers, uppers = ([getattr(x.interval, end) for x in inputs] for end in ("lower", "upper"))
    lower, upper = torch.stack(lowers), torch.stack(uppers)
    share = sum_error(len(inputs) + 2, BASE)
    low = lower.sum(0) - share * lower.abs().sum(0)
    high = upper.sum(0) + share * upper.abs().sum(0)
    interval, point = Interval(low, high), op.value(*(x.point for x in inputs))
    return NeuronBounds(interval, point, radius_about(point, interval))


def _product(op: Product, inputs: Sequence[NeuronBounds]) -> NeuronBounds:
    """Return the least and the largest product of ends, each rounded once; a known sign is kept."""
    (a, b), (c, d) = ((x.interval.lower, x.interval.upper) for x in inputs)
    corners = torch.stack([a * c, a * d, b * c, b * d])
    low, high = below(corners.amin(0)) - negligible(BASE), above(corners.amax(0)) + negligible(BASE)
    alike = ((a >= 0) & (c >= 0)) | ((b <= 0) & (d <= 0))
    unlike = ((a >= 0) & (d <= 0)) | ((b <= 0) & (c >= 0))
    interval = Interval(torch.where(alike, low.clamp(min=0), low), torch.where(unlike, high.clamp(max=0), high))
    point = op.value(*(x.point for x in inputs))
    return NeuronBounds(interval, point, radius_about(point, interval))
