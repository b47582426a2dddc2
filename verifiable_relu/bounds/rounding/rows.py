"""The rounding errors of rows of coefficients on their way back through a network, about a point of every node.

``slack`` says how rows are propagated: a row A of a node's value v is A·v̂, for the node's point v̂, plus A·(v − v̂),
which is pulled back. Errors are given as *the error of one unit of |A|*: neuron by neuron, what one unit of a
coefficient's absolute value adds to the error of the row. In what follows x̂, ŷ, ẑ are the points of x, y, z.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verifiable_relu.bounds.activations import row
from verifiable_relu.bounds.operators import Operator
from verifiable_relu.bounds.rounding.model import gamma, inflated, tiny, unit_roundoff, weight_share
from verifiable_relu.bounds.types import Bounds, Lines
from verifiable_relu.network.nodes import Activation, Affine

_LINES = 24
"""By how many u of |z| and |ẑ| a ReLU's lines, and what is computed with them, may be off.

8 for the lines' offsets, 2 for the lower line at ẑ, 6 for how far the upper line lies above it there, and 8 for the new
coefficients, which multiply z − ẑ.
"""

_SLOPES = 4
"""By how many u, in float32, the coefficient of z may be off that one unit of |A| becomes at a ReLU of z.

With slopes low and up in [0, 1] of the lower and the upper line, that is at most 2·low + 2·|up − low| + up: either 3·up
or 4·low − up.
"""

_ANY_SLOPES = 7
"""The same at other activations, whose slopes may have any sign: in units of the larger slope's size."""


def radius(box: Bounds, point: Tensor) -> Tensor:
    """The largest |x − point| in a box, up to a unit of roundoff, which the errors that are made of it cover."""
    return torch.maximum(box.upper - point, point - box.lower)


def value(size: int, reach: Tensor, sums: int) -> Tensor:
    """The error of one unit of |A| in the value A·v̂ of a row, and in the lines of a ReLU of v.

    Args:
        size: how many numbers v has.
        reach: (batch,) ≥ |v|, |v̂|.
        sums: how many additions a row's value takes part in (``backward_affine``).

    Returns:
        (batch, 1).
    """
    dtype = reach.dtype
    relative = 2 * gamma(size + 8, dtype) + (_LINES + 2 * sums) * unit_roundoff(dtype)
    return (relative * reach + 8 * size * tiny(dtype))[:, None]


def backward_affine(operator: Operator[Affine], reach: Tensor, sums: int) -> Tensor:
    """The error of one unit of |A| in pulling rows A back through y = W·x + b.

    ŷ is computed as fl(W·x̂ + b), and the new row as A′ = fl(A·W). A·(y − ŷ) differs from A′·(x − x̂) in two ways: by
    (A·W − A′)·(x − x̂), at most γ·|A|·|W|·|x − x̂|, and by A·(W·x̂ + b − ŷ), at most γ·|A|·(|W|·|x̂| + |b|). With
    m = reach·(sums of |W|'s rows) + |b|, which is an upper bound of |y| and |ŷ|, both are at most 3γ·|A|·m together.

    Besides, this error covers

    * 2γ·|A|·m: where rows begin, the sum A·ŷ; at a ReLU of y, the sum A⁻·(upper line − lower line), whose lines are no
      further apart than 2m at ŷ;
    * ``_LINES``·u: the lines of that ReLU themselves;
    * 2·``sums``·u: the additions of such sums to a row's value, each at most 2|A|·m; every addition but the last errs
      by at most u times all of them.

    The sum of A·(lower line − x̂) at an activation is covered by ``outward``.

    Args:
        operator: the affine map.
        reach: (batch,) ≥ |x|, |x̂|.
        sums: how many additions to a row's value there are at most.

    Returns:
        (batch, *shape), or broadcastable to it.
    """
    node, dtype = operator.node, reach.dtype
    lines = (_LINES + 2 * sums) * unit_roundoff(dtype)
    relative = 5 * gamma(max(node.terms, node.size) + 2, dtype) + lines + weight_share(node)
    smallest = 8 * node.size * tiny(dtype)
    least = operator.once(("least error", sums), lambda: relative * operator.offset_magnitude + smallest)
    slope = operator.once(("error slope", sums), lambda: relative * operator.row_sums)
    return torch.addcmul(least, slope, reach.reshape(-1, *[1] * len(node.shape)))


def backward_single(reach: Tensor, terms: int | Tensor = 0, operator: Operator[Affine] | None = None) -> Tensor:
    """What the error of ``backward_affine`` grows by where A is in float32: |W|·(γ·|x − x̂|), with float32's γ.

    Rows that are in float32 already may come from a ReLU of y: then ``_SLOPES`` covers the rounding of the slopes of
    its lines, of their products with A, and of the sum of two of these. Rows that are in float64 are rounded to float32
    once, before the map or after it, and come from no such ReLU. All that counts by |y − ŷ|, at most |W|·|x − x̂|, and
    not by how large y is, since all products and sums are about the point. The weights are float32 numbers and lose
    nothing (``Operator.fits32``).

    Args:
        reach: with ``operator`` ≥ |x − x̂|, (batch, *shape of x). Without, ≥ |W|·|x − x̂|, or ≥ |y − ŷ| where y comes
            from no map, (batch, *shape of y).
        terms: how many products that are not zero a coefficient is the sum of: one number, or shaped like ``reach``.
        operator: the affine map.

    Returns:
        (batch, *shape of y).
    """
    single = torch.float32
    products = math.prod(reach.shape[1:]) if operator is None else operator.node.terms
    most = terms if isinstance(terms, int) else products
    # γ_n/n grows with n: that of the largest sum serves all.
    unit = 1.01 * gamma(most + _SLOPES, single) / (most + _SLOPES)
    error = reach * (unit * (most + _SLOPES) if isinstance(terms, int) else torch.add(terms, _SLOPES).mul_(unit))
    return torch.add(error if operator is None else operator.absolute(error), 8 * tiny(single))


def backward_activation(
    node: Activation, reach: Tensor, image: Tensor, lines: Lines, sums: int, radius: Tensor | None = None
) -> Tensor:
    """What replacing an activation by its lines adds to the error of one unit of |A| that ``backward_affine`` bounds.

    It covers the rounding of the lines' offsets, which are computed from slopes and end points, of the products
    slope·A and offset·A, and of the sums of the latter: A⁺·lower + A⁻·upper is computed as
    A·lower + A⁻·(upper − lower), of which neither part is larger than three times the largest value of the whole. In
    float32 it covers what slopes may be off by beyond what ``backward_single`` covers.

    A ReLU needs none of it: its slopes are in [0, 1] and its offsets at most |z|, so that ``backward_affine``,
    ``backward_single`` and ``value`` cover all of its rounding.

    Args:
        node: the activation.
        reach: (batch,) ≥ |z|, |ẑ|.
        image: (batch,) ≥ |x̂|, of the output.
        lines: over the bounds of z, (rows, neurons).
        sums: as in ``backward_affine``.
        radius: ≥ |z − ẑ|, (rows, neurons), where A is in float32.

    Returns:
        (rows, neurons).
    """
    dtype = reach.dtype
    slope = torch.maximum(lines.lower_slope.abs(), lines.upper_slope.abs())
    offset = torch.maximum(lines.lower_offset.abs(), lines.upper_offset.abs())
    known = row(node)
    size = slope * reach[:, None] + offset
    # The part of the additions to a row's value that grows with slopes is in ``backward_affine``.
    line = (known.ulps + _LINES) * size + 2 * sums * offset + 2 * known.absolute(node) + 8 * image[:, None]
    # Numbers too small for float32 may be lost, slopes among them.
    smallest = 8 * node.size * tiny(dtype) + 8 * tiny(torch.float32) * (1 + reach[:, None])
    error = unit_roundoff(dtype) * line + 3 * gamma(node.size + 8, dtype) * size + smallest
    if radius is not None:
        error = torch.addcmul(error, slope, radius, value=1.01 * gamma(_ANY_SLOPES, torch.float32))
    return error


def bilinear(reach: Tensor, size: Tensor, terms: int, sums: int) -> Tensor:
    """The error of one unit of |A| in pulling rows A back through a product y = x₁∘x₂, the nonlinear part included.

    With x₁ = x̂₁ + d₁, x₂ = x̂₂ + d₂ and ŷ = fl(x̂₁∘x̂₂),

        y − ŷ = d₁∘x̂₂ + x̂₁∘d₂ + d₁∘d₂ + (x̂₁∘x̂₂ − ŷ).

    The first two terms become rows of x₁ and of x₂; each coefficient is off by at most γ of the products that it sums,
    and counts by |d₁| ≤ r₁ or |d₂| ≤ r₂. The third is at most r₁∘r₂: these are the lines halfway between those of
    McCormick (Computability of Global Solutions to Factorable Nonconvex Programs, Math. Program. 10, 1976).

    Args:
        reach: r₁∘r₂ as computed.
        size: (|x̂₁| + r₁)∘(|x̂₂| + r₂) as computed, like ``reach``.
        terms: how many products an output, or a coefficient, sums.
        sums: how many additions to a row's value there are at most, those within the sum |A|·reach included.
    """
    dtype = reach.dtype
    error = reach + 4 * gamma(terms + 8, dtype) * size + 8 * terms * tiny(dtype)
    return error * (1 + 5 * gamma(terms + sums + 8, dtype))


def outward(top: Tensor, floor: Tensor, error: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """Lines of an activation moved outward, so that rows are lower by |A|·error.

    With a lower line ``floor`` and an upper line ``top`` above it, A⁺·lower + A⁻·upper is A·floor + A⁻·top. Lowered by
    |A|·error, that is A·(floor − error) + A⁻·(top + 2·error).

    Args:
        top: how far the upper line lies above the lower one, at the point.
        floor: how far the lower line at the point of the input lies above the point of the output.
        error: of one unit of |A|.
        terms: how many sums a product takes part in.

    Returns:
        ``top`` and ``floor``, moved; the rounding of A·floor is covered, too.
    """
    relative = 5 * gamma(terms + 8, error.dtype)
    error = torch.add(error, floor.abs(), alpha=relative)
    return torch.add(top, error, alpha=2 * (1 + relative)), torch.sub(floor, error, alpha=1 + relative)


def summed_single(top: Tensor, floor: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """The ``top`` and ``floor`` of ``outward`` moved further, so that A·floor + A⁻·top in float32 is not too high.

    Args:
        top: moved outward.
        floor: moved outward.
        terms: how many sums a product takes part in.
    """
    relative = inflated(terms, torch.float32)
    lowered = torch.sub(floor, floor.abs(), alpha=relative)
    raised = torch.add(top, floor - lowered, alpha=2)
    return torch.add(raised, raised.abs(), alpha=relative), lowered


def weighed_single(found: Tensor, terms: int) -> Tensor:
    """A sum of products that are not negative, which was taken in float32, enlarged so that it is not too low.

    Args:
        found: the sum as computed. What underflow took from it is in ``lost``.
        terms: how many sums a product takes part in.
    """
    return found * (1 + inflated(terms, torch.float32))


def concretise(radius: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """A radius enlarged so that −|A|·radius, summed in ``dtype``, is not too high; what underflows is in ``lost``."""
    return torch.add(4 * tiny(dtype), radius, alpha=1 + inflated(terms, dtype))


def accumulate(radius: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of one unit of |A| in the sum A of two rows, where |v − v̂| ≤ ``radius``."""
    return 2 * unit_roundoff(dtype) * radius


def point(reach: Tensor) -> Tensor:
    """The error of one unit of |A| in the sum of two points, (batch, 1); neither they nor the sum exceed ``reach``."""
    return 2 * unit_roundoff(reach.dtype) * reach[:, None]


def lost(operator: Operator[Affine] | None, reach: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """What underflow may change in the value of a row that is pulled back through a node, however small |A| is.

    Each product that is part of a coefficient of the node's input, and each of a row's sums, may be off by the smallest
    number of its dtype; in float32 by the smallest normal number, since a library may take smaller ones for zero. What
    an affine map loses covers an activation after it, whose input is at most what bounds the map's output.

    Args:
        operator: of the node, if it is an affine map.
        reach: (batch,) ≥ |x|, |x̂| of the node's input; where rows end, of the node itself.
        size: of the node or of its input, whichever is larger.
        dtype: of A before the node.

    Returns:
        (batch,).
    """
    info = torch.finfo(dtype)
    each = 8 * size * info.tiny * (info.eps if dtype == reach.dtype else 1)
    if operator is None:
        return 4 * each * (1 + reach)
    terms = operator.node.terms
    slope = operator.once(("lost slope", dtype), lambda: each * (terms + 5 * operator.row_sums.amax()))
    offset = operator.once(("lost offset", dtype), lambda: each * (terms + 4 + 5 * operator.offset_magnitude.amax()))
    return torch.addcmul(offset, slope, reach)


def total(found: Tensor, lost: Tensor, constant: Tensor | None = None) -> Tensor:
    """The values of rows, lowered by what underflow and the last additions may have changed in them.

    Args:
        found: the sum, as computed, of what rows begin with (``backward_affine`` covers the errors of its partial
            sums), of −|A|·radius where they end, and of ``constant``.
        lost: what underflow may change, a part of which is to spare.
        constant: the last of these terms, if there is one.
    """
    relative = 4 * unit_roundoff(found.dtype)
    error = torch.add(lost, found.abs(), alpha=relative)
    if constant is not None:
        error = torch.add(error, constant.abs(), alpha=relative)
    return found - error
