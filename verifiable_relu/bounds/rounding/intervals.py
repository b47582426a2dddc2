"""The rounding errors of interval arithmetic: of boxes on their way forward through a network."""

from __future__ import annotations

import torch
from torch import Tensor

from verifiable_relu.bounds.activations import row
from verifiable_relu.bounds.operators import Operator
from verifiable_relu.bounds.rounding.model import gamma, inflated, tiny, unit_roundoff, weight_share
from verifiable_relu.bounds.rounding.rows import backward_affine, lost, value
from verifiable_relu.bounds.types import Bounds, Lines
from verifiable_relu.network.nodes import Activation, Affine


def ball(box: Bounds, center: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The centre of a box, unless it is given, and the radius, up to rounding, which ``interval_affine`` covers."""
    if center is None:
        center = torch.lerp(box.lower, box.upper, 0.5)
    return center, box.upper - center


def interval_affine(operator: Operator[Affine], largest: Tensor, terms: int = 0) -> tuple[float, Tensor]:
    """How far the box W·c + b ∓ |W|·r of y = W·x + b must be widened, c and r being the ``ball`` of x as computed.

    The terms of |W|·r are not negative, so that it is off by at most γ of itself. W·c + b is off by at most
    γ·(|W|·|c| + |b|), and r by six units of roundoff of ``largest`` ≥ |x|. The last two together are at most
    γ·(largest·(sum of |W|'s row) + |b|).

    Args:
        operator: the affine map.
        largest: (batch,) ≥ |x|.
        terms: how many products are summed in |W|·r if its sums are in float32 (``Operator.absolute32``); else 0.

    Returns:
        A factor for |W|·r, and what is to be added to the product, (batch, *shape) or broadcastable to it. The second
        is infinite or NaN where a sum may overflow, be it only on the way.
    """
    node, dtype = operator.node, largest.dtype
    # The rows' sums are computed, too: the second factor is what γ says of them.
    relative = gamma(node.terms + 16, dtype) * (1 + 2 * gamma(node.terms, dtype)) + weight_share(node)
    growth = 1 + relative + (share_single(terms) if terms else 0)
    least, offset, row = operator.once(("interval", terms), lambda: _interval(operator, dtype, terms))
    reach = torch.addcmul(offset, largest.reshape(-1, *[1] * len(node.shape)), row)
    return growth, torch.add(least, reach, alpha=relative / 2)


def _interval(operator: Operator[Affine], dtype: torch.dtype, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    """For ``interval_affine``: what underflow may change, 2|b|, and twice the sums of |W|'s rows.

    The last two are doubled so that their sum overflows before any other does.
    """
    info, few = torch.finfo(dtype), torch.finfo(torch.float32)
    smallest, lost = (4 * few.tiny, 16 * few.tiny) if terms else (info.tiny / info.eps, 8 * info.tiny)
    sums = operator.row_sums
    return smallest * sums + operator.node.terms * lost, 2 * operator.offset_magnitude, 2 * sums


def interval_single(size: Tensor, radius: Tensor, terms: int) -> Tensor:
    """A radius enlarged so that |W|·radius also covers the error of W·centre with sums in float32.

    That error is at most γ·|W|·|centre|, with the γ of float32.

    Args:
        size: |centre|, in float32.
        radius: of the ball.
        terms: how many products are summed. The sums must not overflow.
    """
    return torch.add(radius, size, alpha=share_single(terms))


def share_single(terms: int) -> float:
    """What part of the sum of so many absolute products rounding may change if the sum is in float32."""
    return 1.01 * gamma(terms + 4, torch.float32)


def reach_single(size: Tensor, radius: Tensor, terms: int) -> Tensor:
    """An upper bound of |x| in a ball, (batch,) in float64, from sums over its numbers that were taken in float32.

    Args:
        size: (batch,) the sum of |centre|.
        radius: (batch,) the sum of the radius.
        terms: how many numbers were summed.
    """
    relative = inflated(terms, torch.float32)
    return torch.add(16 * terms * tiny(torch.float32), size.double() + radius, alpha=1 + relative)


def interval_rows(operator: Operator[Affine] | None, largest: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """How far C·ŷ − |C·W|·r must be lowered to be a lower bound of C·y over a ball of x, where ŷ = W·c + b.

    The errors in ŷ, in C·ŷ, in C·W and in r (six units of roundoff of ``largest``) are those that ``backward_affine``
    bounds; what it grants to the lines of a ReLU is to spare, since none follows. The error of the sum |C·W|·r is
    covered by ``concretise``.

    Args:
        operator: the affine map y = W·x + b; None for y = x.
        largest: (batch,) ≥ |x|.
        size: how many numbers x has.

    Returns:
        The error of one unit of |C|, (batch, outputs), and what is lost to underflow, (batch,).
    """
    if operator is None:
        none = torch.full_like(largest, 16 * size * tiny(largest.dtype))
        return value(size, largest, 1).expand(-1, size), none
    return backward_affine(operator, largest, 1), lost(operator, largest, max(size, operator.node.size), largest.dtype)


def interval_sum(largest: Tensor) -> Tensor:
    """How far the sum of two boxes must be widened, (batch,); ``largest``: its computed ends are at most so large."""
    return 4 * unit_roundoff(largest.dtype) * largest + tiny(largest.dtype)


def interval_products(size: Tensor, terms: int) -> Tensor:
    """How far sums of products of two intervals must be widened.

    Args:
        size: the sums of the products' largest absolute values, as computed.
        terms: how many products are summed.
    """
    return 2 * gamma(terms + 2, size.dtype) * size + terms * tiny(size.dtype)


def widen(bounds: Bounds, ulps: int) -> Bounds:
    """Bounds moved outward by ``ulps`` units in the last place, each 2u of the bound's own magnitude."""
    relative = 2 * ulps * unit_roundoff(bounds.lower.dtype)
    least = tiny(bounds.lower.dtype)
    return Bounds(
        bounds.lower - relative * bounds.lower.abs() - least, bounds.upper + relative * bounds.upper.abs() + least
    )


def interval_activation(node: Activation, image: Bounds) -> Bounds:
    """The image of an activation as computed, moved outward; that of a ReLU is computed without error."""
    if node.op == "Relu":
        return image
    known = row(node)
    outward = widen(image, known.ulps)
    absolute = 2 * unit_roundoff(image.lower.dtype) * known.absolute(node)
    return Bounds(outward.lower - absolute, outward.upper + absolute)


def lines_outward(node: Activation, bounds: Bounds, lines: Lines) -> Lines:
    """Lines of an activation over bounds of its input, moved outward by what their computed offsets may be off by.

    ``bounds.activations`` says how much that is. It is counted twice, to cover the rounding of the sums here.
    """
    known, unit = row(node), unit_roundoff(bounds.lower.dtype)
    reach = torch.maximum(bounds.lower.abs(), bounds.upper.abs())
    least = 2 * unit * known.absolute(node) + 16 * tiny(bounds.lower.dtype) * (1 + reach)

    def error(slope: Tensor, offset: Tensor) -> Tensor:
        return 2 * unit * known.ulps * (slope.abs() * reach + offset.abs()) + least

    return Lines(
        lines.lower_slope,
        lines.lower_offset - error(lines.lower_slope, lines.lower_offset),
        lines.upper_slope,
        lines.upper_offset + error(lines.upper_slope, lines.upper_offset),
    )


def band_outward(node: Activation, bounds: Bounds, lines: Lines, slope: Tensor) -> Bounds:
    """Bounds of f(x) − slope·x over bounds of x, by a lower and an upper line of f as they were computed."""
    lines = lines_outward(node, bounds, lines)
    unit = unit_roundoff(bounds.lower.dtype)
    reach = torch.maximum(bounds.lower.abs(), bounds.upper.abs())

    def ends(line: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tilt = line - slope
        error = 4 * unit * ((line.abs() + slope.abs()) * reach + offset.abs()) + tiny(bounds.lower.dtype)
        # Where both slopes are the same nothing is rounded.
        error = torch.where(tilt == 0, 0.0, error)
        return offset + tilt * bounds.lower, offset + tilt * bounds.upper, error

    low, high, error = ends(lines.lower_slope, lines.lower_offset)
    lower = torch.minimum(low, high) - error
    low, high, error = ends(lines.upper_slope, lines.upper_offset)
    return Bounds(lower, torch.maximum(low, high) + error)
