"""Interval arithmetic for each kind of node, rounded outward: the box of a node's value over boxes of its inputs.

Source of the intervals: Gowal et al., On the Effectiveness of Interval Bound Propagation for Training Verifiably Robust
Models, arXiv 1810.12715, section 3.1 (centre and radius through an affine map).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.operators import Operator
from verifiable_relu.bounds.tuning import Bounds
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Affine,
    Beside,
    Extreme,
    Input,
    Linear,
    MatMul,
    Maximum,
    Permute,
    Product,
    Reshape,
    Scale,
    Sparse,
)

_HUGE = 1e37
"""Sums of up to this size do not overflow in float32, nor on the way."""


def affine_image(
    operator: Operator[Affine],
    box: Bounds,
    about: tuple[Tensor, Tensor] | None = None,
    float32: bool | None = None,
) -> Bounds:
    """The box of W·x + b over a box of x, shaped (batch, *shape).

    Args:
        operator: of the affine map.
        box: of x.
        about: the box's centre, and W·x + b there, if known.
        float32: whether sums may be in float32 (``rounding.float32_is_plain``), if known.
    """
    node = operator.node
    if isinstance(node, Scale):
        return _scaled(node, operator, box)
    if isinstance(node, Sparse) and node.moves:
        # A whole number stays one: within the least error it could jump.
        return Bounds(node.forward(box.lower), node.forward(box.upper))
    center, radius = rounding.ball(box, None if about is None else about[0])
    middle, terms = None if about is None else about[1], _float32_terms(operator, radius, float32)
    rows = operator.one_sign
    if rows is not None and rows.all and not terms and bool((box.lower >= 0).all()):
        return _by_ends(operator, box, rows.rising)
    narrow = center.float() if terms else center
    size, radius = narrow.abs(), radius.to(narrow)
    if terms and middle is None and _bearable(operator, size.flatten(1).sum(1), radius.flatten(1).sum(1)):
        middle = operator.forward32(narrow)
        radius = rounding.interval_single(size, radius, operator.terms32[0])
    if middle is None:
        middle = operator.forward(center)
    radius, growth, extra = rounding.interval_affine(operator, size, radius, middle, terms)
    spread = torch.add(extra, operator.absolute32(radius) if terms else operator.absolute(radius), alpha=growth)
    if rows is None:
        return Bounds(middle - spread, spread.add_(middle))
    found = Bounds(middle - spread, middle + spread)
    near = (torch.minimum(found.lower.abs(), found.upper.abs()) <= _NEAR * spread) & rows.any | rows.constant
    if not bool(near.any()):
        return found
    ends = _by_ends(operator, box, rows.rising)
    return Bounds(torch.where(near, ends.lower, found.lower), torch.where(near, ends.upper, found.upper))


def _scaled(node: Scale, operator: Operator[Affine], box: Bounds) -> Bounds:
    """The box of s·x + b, element by element: its ends are the values at the ends of the box of x."""
    low, high = box.lower, box.upper
    rising = operator.once("rising", lambda: node.scale >= 0)
    if not operator.once("increasing", lambda: bool(rising.all())):
        low, high = torch.where(rising, low, high), torch.where(rising, high, low)
    if not operator.careful:
        error = rounding.interval_end(operator, 2 * operator.row_sums * rounding.size(box))
        return Bounds(
            torch.addcmul(operator.offset - error, node.scale, low),
            torch.addcmul(operator.offset + error, node.scale, high),
        )
    least, most = node.scale * low, node.scale * high
    lost = [rounding.interval_end(operator, 2 * part.abs()) for part in (least, most)]
    if operator.once("copies", lambda: not node.weight_error and bool((node.scale.abs() == 1).all())):
        # The sum of a number and its negative is 0, without an error: 1 − x at x = 1.
        known = operator.once("offset range", lambda: rounding.offset_range(operator))
        minus = torch.where(known.lower == known.upper, -operator.offset, torch.nan)
        lost = [off.masked_fill(part == minus, 0) for off, part in zip(lost, (least, most), strict=True)]
    found = Bounds(least + operator.offset - lost[0], most + operator.offset + lost[1])
    sign = operator.once("sign", node.scale.sign)
    return _beyond_offset(operator, found, sign * low >= 0, sign * high <= 0)


def _beyond_offset(operator: Operator[Affine], box: Bounds, positive: Tensor, negative: Tensor) -> Bounds:
    """The box of W·x + b cut where no term of W·x is negative, or none is positive (``rounding.offset_range``)."""
    offset = operator.once("offset range", lambda: rounding.offset_range(operator))
    return Bounds(
        torch.where(positive, torch.maximum(box.lower, offset.lower), box.lower),
        torch.where(negative, torch.minimum(box.upper, offset.upper), box.upper),
    )


_NEAR = 2.0**-10
"""Up to this part of a box's radius an end is near zero: centre ± radius leaves it few digits."""


def _by_ends(operator: Operator[Affine], box: Bounds, rising: Tensor) -> Bounds:
    """The box of W·x + b as its values at the ends of the box of x, in rows whose weights have one sign.

    Let W_i ≥ 0. Over l ≤ x ≤ u the least value is W_i·l + b_i, which is off by γ·(W_i·|l| + |b_i|): an end that is
    small next to the width of the box keeps its digits. Where no term of W_i·l is negative, the value is not below
    b_i, which no rounding moves. W_i ≤ 0 mirrors that.

    Args:
        operator: of the affine map.
        box: of x.
        rising: the rows of W that are not negative; others are taken for rows that are not positive.
    """
    signed = bool((box.lower >= 0).all()) or bool((box.upper <= 0).all())
    ends = []
    for x in (box.lower, box.upper):
        part = operator.linear(x)
        size = 2 * part.abs() if signed else operator.absolute(2 * x.abs())
        ends.append((part + operator.offset, rounding.interval_end(operator, size)))
    (low, lost_low), (high, lost_high) = ends
    lower, upper = (
        torch.where(rising, low - lost_low, high - lost_high),
        torch.where(rising, high + lost_high, low + lost_low),
    )
    first, second = (_sees_none(operator, x) for x in (box.lower < 0, box.upper > 0))
    positive, negative = torch.where(rising, first, second), torch.where(rising, second, first)
    if operator.adds_up and bool((box.lower >= 0).all()):
        # A sum is not below any of its terms, whatever rounding makes of it.
        lower = torch.maximum(lower, box.lower.amax(-1, keepdim=True))
    return _beyond_offset(operator, Bounds(lower, upper), positive, negative)


def _sees_none(operator: Operator[Affine], inputs: Tensor) -> Tensor:
    """Where every weight at these inputs, (batch, *shape) bool, is 0."""
    if not bool(inputs.any()):
        return torch.ones_like(operator.offset, dtype=torch.bool)
    # By a factor that keeps products with the least weights from being taken for 0.
    return operator.absolute(inputs.to(operator.offset) * 2.0**60) == 0


def _float32_terms(operator: Operator[Affine], radius: Tensor, float32: bool | None) -> int:
    """In how many float32 additions a product of |W|·radius takes part; 0 where sums are in float64."""
    node, tuning, terms = operator.node, operator.tuning, operator.terms32
    if not tuning.float32 or len(radius) < tuning.interval_samples or not 0 < max(terms) <= tuning.interval_terms:
        return 0
    large = not isinstance(node, Linear) or len(radius) * node.weight.numel() >= tuning.interval_products
    if not large or not operator.fits32 or radius[0].numel() > tuning.interval_inputs:
        return 0
    return terms[1] if (rounding.float32_is_plain(radius) if float32 is None else float32) else 0


def _bearable(operator: Operator[Affine], size: Tensor, radius: Tensor) -> bool:
    """Whether W·centre, too, may be summed in float32: no sum overflows, and no sample's box is widened by much.

    Args:
        operator: of the affine map.
        size: (batch,) the sum of |centre|.
        radius: (batch,) the sum of the radius, to a share of which the widening is compared (``interval_widening``).
    """
    most = operator.once("largest row sum", lambda: float(operator.row_sums.amax().clamp(min=1)))
    part = rounding.share_single(operator.terms32[0])
    allowed = (radius * operator.tuning.interval_widening).clamp_(max=part * _HUGE / most)
    return bool((size * part <= allowed).all())


def _corners(x: Bounds, y: Bounds) -> Bounds:
    """The least and the largest product of numbers of two boxes, which are at corners; (batch, …) each."""
    products = [a * b for a in (x.lower, x.upper) for b in (y.lower, y.upper)]
    least, most = torch.minimum(*products[:2]), torch.maximum(*products[:2])
    for product in products[2:]:
        least, most = torch.minimum(least, product), torch.maximum(most, product)
    return Bounds(least, most)


def _signed(box: Bounds, positive: Tensor, negative: Tensor) -> Bounds:
    """A box cut at 0 where its values are known not to be negative, or not to be positive."""
    return Bounds(
        torch.where(positive, box.lower.clamp(min=0), box.lower),
        torch.where(negative, box.upper.clamp(max=0), box.upper),
    )


def of_samples(values: Tensor, sample: Tensor | None) -> Tensor:
    """The values, (batch, …), of the samples named, one after another; by default of every sample."""
    if sample is None or values.shape[0] == 1 == sample.shape[0]:
        return values
    return values.index_select(0, sample)


def _affine(node: Affine, boxes: Sequence[Bounds], operator: Operator[Affine] | None) -> Bounds:
    assert operator is not None
    return affine_image(operator, boxes[0])


def _sum(node: Add, boxes: Sequence[Bounds], operator: None) -> Bounds:
    x, y = boxes
    total = rounding.widen(Bounds(x.lower + y.lower, x.upper + y.upper), 2)
    return _signed(total, torch.minimum(x.lower, y.lower) >= 0, torch.maximum(x.upper, y.upper) <= 0)


def _product(node: Product, boxes: Sequence[Bounds], operator: None) -> Bounds:
    x, y = boxes
    above, below = [b.lower >= 0 for b in boxes], [b.upper <= 0 for b in boxes]
    alike = (above[0] & above[1]) | (below[0] & below[1])
    return _signed(rounding.widen(_corners(x, y), 1), alike, (above[0] & below[1]) | (below[0] & above[1]))


def _matmul(node: MatMul, boxes: Sequence[Bounds], operator: None) -> Bounds:
    x, y = boxes
    lower = upper = low = high = torch.zeros((), dtype=x.lower.dtype, device=x.lower.device)
    for k in range(node.inner):
        column = Bounds(x.lower[..., k, None], x.upper[..., k, None])
        term = _corners(column, Bounds(y.lower[..., k, None, :], y.upper[..., k, None, :]))
        lower, upper = lower + term.lower, upper + term.upper
        low, high = low + term.lower.abs(), high + term.upper.abs()
    low, high = (rounding.interval_products(size, node.inner) for size in (low, high))
    above = [(x.lower >= 0).all(-1, keepdim=True), (y.lower >= 0).all(-2, keepdim=True)]
    below = [(x.upper <= 0).all(-1, keepdim=True), (y.upper <= 0).all(-2, keepdim=True)]
    alike, unlike = (above[0] & above[1]) | (below[0] & below[1]), (above[0] & below[1]) | (below[0] & above[1])
    return _signed(Bounds(lower - low, upper + high), alike, unlike)


def _maximum(node: Maximum, boxes: Sequence[Bounds], operator: None) -> Bounds:
    """The largest ends, and what is known of the tournament."""
    seen, made = boxes
    low, high = (node.seen(end, -torch.inf).amax(1).reshape(-1, *node.shape) for end in (seen.lower, seen.upper))
    return Bounds(torch.maximum(low, made.lower), torch.minimum(high, made.upper))


def _extreme(node: Extreme, boxes: Sequence[Bounds], operator: None) -> Bounds:
    """The larger, or for ``sign`` −1 the lesser ends of x and y, and what is known of x + relu(y − x)."""
    (x, y, made), of = boxes, torch.maximum if node.sign > 0 else torch.minimum
    low, high = of(x.lower, y.lower), of(x.upper, y.upper)
    return Bounds(torch.maximum(low, made.lower), torch.minimum(high, made.upper))


def _moved(node: Reshape | Permute, boxes: Sequence[Bounds], operator: None) -> Bounds:
    return Bounds(node.forward(boxes[0].lower), node.forward(boxes[0].upper))


IMAGES: Table[Callable[[Any, Sequence[Bounds], Any], Bounds]] = Table(
    "interval arithmetic",
    {
        Input: Refusal("the input's box is given"),
        Affine: _affine,
        Activation: lambda node, boxes, operator: rounding.interval_activation(node, boxes[0]),
        Add: _sum,
        Product: _product,
        MatMul: _matmul,
        Maximum: _maximum,
        Extreme: _extreme,
        Beside: lambda node, boxes, operator: boxes[2],
        Reshape: _moved,
        Permute: _moved,
    },
)
"""The box of a node's value, (batch, *shape), of (the node, the boxes of its inputs, an affine map's operator)."""
