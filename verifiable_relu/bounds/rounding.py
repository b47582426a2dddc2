"""What rounding may change in bounds, and how far bounds are moved outward for it.

Verdicts are about real arithmetic on the stored weights; bounds are computed in floating point. Each function bounds
the rounding error of one named step of bound propagation. The bounds of errors are larger than needed by small constant
factors, so that they cover the rounding of their own few operations, too.

**The model.** ``verifiable_relu.rounding`` has it, with its units, γ and what may underflow. A convolution is a sum of
products where it is computed directly or as a matrix product, as torch's kernels for CPUs do; transformed algorithms
(Winograd, FFT) are not covered.

**Coverage.** Where torch computes as the standard model of floating point says, so that rounding errors are accounted
for.

**Rows.** The rounding errors of rows of coefficients on their way back through a network, about a point of every node.

``slack`` says how rows are propagated: a row A of a node's value v is A·v̂, for the node's point v̂, plus A·(v − v̂),
which is pulled back. Errors are given as *the error of one unit of |A|*: neuron by neuron, what one unit of a
coefficient's absolute value adds to the error of the row. In what follows x̂, ŷ, ẑ are the points of x, y, z.

**Intervals.** The rounding errors of interval arithmetic: of boxes on their way forward through a network.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds.activations import image, row, within_range
from verifiable_relu.bounds.operators import Operator
from verifiable_relu.bounds.tuning import Bounds, Lines
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Affine, Conv2d, Relu, Scale
from verifiable_relu.rounding import OWN, epsilon, gamma, inflated, tiny, unit_roundoff


def weight_share(node: Affine) -> float:
    """What the unknown part of stored weights (``Affine.weight_error``) may change in W·x, as a part of |W|·|x|.

    It is counted twice: W·x may be off by it, and so may |W|, which is computed from the stored weights.
    """
    return 2 * node.weight_error


_SHORTENS = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "MKL_BLAS_COMPUTE_MODE")
"""Environment variables that tell a library to compute in float32 with fewer digits."""

_EMULATES = "CUBLAS_EMULAT"
"""How the environment variables begin that have cuBLAS compute products in other types."""

_DIRECT = ("x86_64", "AMD64")
"""The processors on which oneDNN is known to sum convolutions directly."""


def covers(network: Network, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether the rounding of a network's bounds is accounted for, in a dtype on a device.

    It is in float64, in which convolutions are sums of products on every device (``Conv2d``); some of the sums in
    between may still be in float32, where ``float32_is_plain`` says so. In float32 it is for networks without
    convolutions, since a library may choose a transformed algorithm, and does not tell. It is not where torch, or a
    library, was told to compute products with fewer digits, or to emulate float64.
    """
    kind = torch.device(device).type
    if kind == "cuda" and any(name.startswith(_EMULATES) for name in os.environ):
        return False
    if dtype == torch.float64:
        return True
    return _all_digits(kind) and not any(isinstance(node, Conv2d) for node in network.nodes)


def keeps_activations(network: Network, converted: Network) -> bool:
    """Whether the parameters of activations (slopes, λ) are the same numbers after a change of dtype.

    What a narrower dtype changes in an affine map is counted in its ``weight_error``; for an activation nothing counts
    it.

    Args:
        network: as it was.
        converted: the same network in another dtype.
    """
    pairs = ((network.nodes[i], converted.nodes[i]) for i in network.activations)
    return all(
        torch.equal(getattr(before, f.name).cpu().double(), getattr(after, f.name).cpu().double())
        for before, after in pairs
        for f in fields(before)
        if isinstance(getattr(before, f.name), Tensor)
    )


def float32_is_plain(like: Tensor) -> bool:
    """Whether sums may be in float32 where bounds have the dtype and the device of a tensor.

    That is so in float64 on a CPU that sums convolutions directly, unless torch, or its library for convolutions, was
    told to compute in float32 with fewer digits. (Which maps allow such sums, ``Operator.fits32`` says.)
    """
    if like.dtype != torch.float64 or like.device.type != "cpu" or platform.machine() not in _DIRECT:
        return False
    return _all_digits("cpu")


def _all_digits(kind: str) -> bool:
    """Whether, on a kind of device, torch and the libraries that it calls compute float32 products with all digits."""
    library: Any = torch.backends.mkldnn
    settings = [torch.backends.cuda.matmul] if kind == "cuda" else [library.matmul, library.conv]
    plain = all(of.fp32_precision in ("none", "ieee") for of in settings)
    return plain and not torch.is_autocast_enabled(kind) and not any(os.environ.get(name) for name in _SHORTENS)


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


def size(box: Bounds) -> Tensor:
    """The largest |x| in a box, element by element."""
    return torch.maximum(box.upper, -box.lower)


def radius(box: Bounds, point: Tensor) -> Tensor:
    """The largest |x − point| in a box, up to a unit of roundoff, which the errors that are made of it cover."""
    return torch.maximum(box.upper - point, point - box.lower)


def value(reach: Tensor, sums: int) -> Tensor:
    """The error of one unit of |A| in the value A·v̂ of a row, and in the lines of a ReLU of v.

    Args:
        reach: (batch, size) ≥ |v|, |v̂|.
        sums: how many additions a row's value takes part in (``backward_affine``).

    Returns:
        (batch, size).
    """
    dtype, many = reach.dtype, reach.shape[1]
    relative = 2 * gamma(many + 8, dtype) + (_LINES + 2 * sums) * unit_roundoff(dtype)
    return torch.add(8 * many * tiny(dtype), reach, alpha=relative)


def backward_affine(operator: Operator[Affine], reach: Tensor, sums: int) -> Tensor:
    """The error of one unit of |A| in pulling rows A back through y = W·x + b.

    ŷ is computed as fl(W·x̂ + b), and the new row as A′ = fl(A·W). A·(y − ŷ) differs from A′·(x − x̂) in two ways: by
    (A·W − A′)·(x − x̂), at most γ·|A|·|W|·|x − x̂|, and by A·(W·x̂ + b − ŷ), at most γ·|A|·(|W|·|x̂| + |b|). With
    m = |W|·reach + |b|, which is an upper bound of |y| and |ŷ|, both are at most 3γ·|A|·m together.

    Besides, this error covers

    * 2γ·|A|·m: where rows begin, the sum A·ŷ; at a ReLU of y, the sum A⁻·(upper line − lower line), whose lines are no
      further apart than 2m at ŷ;
    * ``_LINES``·u: the lines of that ReLU themselves;
    * 2·``sums``·u: the additions of such sums to a row's value, each at most 2|A|·m; every addition but the last errs
      by at most u times all of them.

    The sum of A·(lower line − x̂) at an activation is covered by ``outward``.

    Args:
        operator: the affine map.
        reach: (batch, *shape of x) ≥ |x|, |x̂|.
        sums: how many additions to a row's value there are at most.

    Returns:
        (batch, *shape).
    """
    node, dtype = operator.node, reach.dtype
    lines = (_LINES + 2 * sums) * unit_roundoff(dtype)
    relative = 5 * gamma(max(node.terms, node.size) + 2, dtype) + lines + weight_share(node)
    smallest = 8 * node.size * tiny(dtype)
    least = operator.once(("least error", sums), lambda: relative * operator.offset_magnitude + smallest)
    return torch.add(least, operator.absolute(reach), alpha=relative)


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
    unit = OWN * gamma(most + _SLOPES, single) / (most + _SLOPES)
    error = reach * (unit * (most + _SLOPES) if isinstance(terms, int) else torch.add(terms, _SLOPES).mul_(unit))
    return torch.add(error if operator is None else operator.absolute(error), 8 * tiny(single))


def backward_activation(
    node: Activation, reach: Tensor, image: Tensor, lines: Lines, sums: int, radius: Tensor | None = None
) -> Tensor:
    """What replacing an activation by its lines adds to the error of one unit of |A| that ``backward_affine`` bounds.

    It covers the rounding of the lines' offsets, which are computed from slopes and end points, of the products
    slope·A and offset·A, and of the sums of the latter: A⁺·lower + A⁻·upper is computed as
    A·lower + A⁻·(upper − lower), of which neither part is larger than three times the larger value of the whole. In
    float32 it covers what slopes may be off by beyond what ``backward_single`` covers.

    A ReLU needs none of it: its slopes are in [0, 1] and its offsets at most |z|, so that ``backward_affine``,
    ``backward_single`` and ``value`` cover all of its rounding.

    Args:
        node: the activation.
        reach: (rows, neurons) ≥ |z|, |ẑ|.
        image: (rows, neurons) ≥ |x̂|, of the output.
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
    size = slope * reach + offset
    # The part of the additions to a row's value that grows with slopes is in ``backward_affine``.
    line = (known.ulps + _LINES) * size + 2 * sums * offset + 2 * known.absolute(node) + 8 * image
    # Numbers too small for the dtype of A may be lost, slopes among them.
    least = tiny(dtype if radius is None else torch.float32)
    smallest = 8 * node.size * tiny(dtype) + 8 * least * (1 + reach)
    error = unit_roundoff(dtype) * line + 3 * gamma(node.size + 8, dtype) * size + smallest
    if radius is not None:
        error = torch.addcmul(error, slope, radius, value=OWN * gamma(_ANY_SLOPES, torch.float32))
    return error


def maxima(reach: Tensor, sums: int) -> Tensor:
    """The error of one unit of |A| in replacing maxima by lines of their candidates, about the nodes' points.

    With m = ``reach``: a line, and what it is at the point, is off by at most 16·u of m, and no larger than 4m. Their
    sums err by γ of that, and so does each of the ``sums`` additions to a row's value. A coefficient of a candidate
    sums at most two products for each maximum, and counts by at most 2m.

    Args:
        reach: (batch, maxima) ≥ the absolute values of a maximum and its candidates, and of their points.
        sums: how many additions to a row's value there are at most.

    Returns:
        (batch, maxima).
    """
    dtype, many = reach.dtype, reach.shape[1]
    return torch.add(16 * many * tiny(dtype), reach, alpha=16 * gamma(2 * many + sums + 16, dtype))


def bilinear(reach: Tensor, size: Tensor, terms: int, sums: int) -> Tensor:
    """The error of one unit of |A| in pulling rows A back through a product y = x₁∘x₂, the nonlinear part included.

    With x₁ = x̂₁ + d₁, x₂ = x̂₂ + d₂ and ŷ = fl(x̂₁∘x̂₂),

        y − ŷ = d₁∘x̂₂ + x̂₁∘d₂ + d₁∘d₂ + (x̂₁∘x̂₂ − ŷ).

    The first two terms become rows of x₁ and of x₂; each coefficient is off by at most γ of the products that it sums,
    and counts by |d₁| ≤ r₁ or |d₂| ≤ r₂. The third is at most r₁∘r₂: these are the lines halfway between those of
    McCormick (Computability of Global Solutions to Factorable Nonconvex Programs, Math. Program. 10, 1976).

    Other means of his planes have t·r₂∘d₁ and t·r₁∘d₂ besides, |t| ≤ 1, and the same constant. Each coefficient is then
    a sum of twice as many products, of size |x̂₁| + r₁ or |x̂₂| + r₂: both errors are at most 2γ of ``size`` together,
    and that of ŷ is γ of it. Where the true |d| is at most (1 + 2u)·r, the constant is (1 + 2u)²·r₁∘r₂.

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
    """The error of one unit of |A| in the sum of two points; the computed sum does not exceed ``reach``."""
    return 2 * unit_roundoff(reach.dtype) * reach


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
    each = 8 * size * tiny(dtype) * (epsilon(dtype) if dtype == reach.dtype else 1)
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


def ball(box: Bounds, center: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The centre of a box, unless it is given, and the radius, up to rounding, which ``interval_affine`` covers."""
    if center is None:
        center = torch.lerp(box.lower, box.upper, 0.5)
    return center, box.upper - center


def interval_affine(
    operator: Operator[Affine], size: Tensor, radius: Tensor, middle: Tensor
) -> tuple[Tensor, float, Tensor]:
    """How the box W·c + b ∓ |W|·r of y = W·x + b must be widened, c and r being the ``ball`` of x as computed.

    The terms of |W|·r are not negative, so that it is off by at most γ of itself. W·c + b is off by at most
    γ·(|W|·|c| + |b|), and r by six units of roundoff of |c| + r. What is due to |c| becomes a part of the radius.

    Args:
        operator: the affine map.
        size: |c|, (batch, *shape of x).
        radius: r, likewise.
        middle: W·c + b as computed, (batch, *shape).

    Returns:
        In the place of r another radius, a factor for |W|·radius, and what is to be added to the product, (batch,
        *shape). The last is infinite or NaN where a sum overflowed, be it only on the way, so that W·c + b is neither
        the value nor below or above it.
    """
    dtype = middle.dtype
    relative = _interval_share(operator, dtype)
    growth = 1 + 2 * relative
    least = operator.once("interval", lambda: _interval_least(operator, dtype))
    more = torch.add(least, middle.detach().abs(), alpha=unit_roundoff(dtype))
    return torch.add(radius, size, alpha=relative), growth, more


def interval_end(operator: Operator[Affine], size: Tensor) -> Tensor:
    """How far W·x + b at one end x of a box may be off, as computed: at most γ·(|W|·|x| + |b|), and what underflows.

    Args:
        operator: of the map.
        size: (batch, *shape) 2·|W|·|x|, as computed: doubled, as |b| is, to overflow before any other sum does.

    Returns:
        (batch, *shape), infinite or NaN where a sum may overflow, be it only on the way.
    """
    least, offset = operator.once("end", lambda: (_smallest(operator, size.dtype), 2 * operator.offset_magnitude))
    return torch.add(least, offset + size, alpha=_interval_share(operator, size.dtype) / 2)


def offset_range(operator: Operator[Affine]) -> Bounds:
    """Ends of b that no rounding widens: y = W·x + b is at or beyond them where no term of W·x has the other sign.

    A stored b without an error is both of them, and so is s·c with s = ±1. One with a relative error keeps its sign.
    Nothing is known of one that is computed otherwise, or has an absolute error.
    """
    node, b = operator.node, operator.offset
    low, high = torch.full_like(b, -math.inf), torch.full_like(b, math.inf)
    if node.offset_terms or not node.weight_error < 1:
        return Bounds(low, high)
    if node.weight_error:
        low, high = low.masked_fill(b >= 0, 0), high.masked_fill(b <= 0, 0)
    else:
        low = high = b
    if isinstance(node, Scale):
        computed = (node.center != 0) & ~((node.shift == 0) & (node.scale.abs() == 1))
        low, high = low.masked_fill(computed, -math.inf), high.masked_fill(computed, math.inf)
    return Bounds(low, high)


def _interval_share(operator: Operator[Affine], dtype: torch.dtype) -> float:
    """What part of |W|·|x| + |b| an interval's end may be off by."""
    node = operator.node
    # What it multiplies is computed, too: the second factor is what γ says of that.
    return gamma(node.terms + 16, dtype) * (1 + 2 * gamma(node.terms, dtype)) + weight_share(node)


def _interval_least(operator: Operator[Affine], dtype: torch.dtype) -> Tensor:
    """For ``interval_affine``: what underflow and |b| may change."""
    return torch.add(_smallest(operator, dtype), operator.offset_magnitude, alpha=_interval_share(operator, dtype))


def _smallest(operator: Operator[Affine], dtype: torch.dtype) -> Tensor:
    """What underflow may change in |W|·r."""
    return tiny(dtype) / epsilon(dtype) * operator.row_sums + operator.node.terms * 8 * tiny(dtype)


def interval_rows(operator: Operator[Affine] | None, reach: Tensor) -> tuple[Tensor, Tensor]:
    """How far C·ŷ − |C·W|·r must be lowered to be a lower bound of C·y over a ball of x, where ŷ = W·c + b.

    The errors in ŷ, in C·ŷ, in C·W and in r (six units of roundoff of ``reach``) are those that ``backward_affine``
    bounds; what it grants to the lines of a ReLU is to spare, since none follows. The error of the sum |C·W|·r is
    covered by ``concretise``.

    Args:
        operator: the affine map y = W·x + b; None for y = x.
        reach: (batch, size of x) ≥ |x|.

    Returns:
        The error of one unit of |C|, (batch, outputs), and what is lost to underflow, (batch,).
    """
    most, many = reach.amax(1), reach.shape[1]
    if operator is None:
        return value(reach, 1), torch.full_like(most, 16 * many * tiny(reach.dtype))
    return backward_affine(operator, reach, 1), lost(operator, most, max(many, operator.node.size), reach.dtype)


def interval_products(size: Tensor, terms: int) -> Tensor:
    """How far ends of sums of products of two intervals must be moved.

    Args:
        size: the sums of the absolute values of the products at that end, as computed.
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


def interval_activation(node: Activation, bounds: Bounds) -> Bounds:
    """The image of an activation over bounds of its input, moved outward, but not out of its range (``within_range``).

    That of a ReLU, and of what copies its input, is computed without error.
    """
    known = row(node)
    found = image(node, bounds)
    if isinstance(node, Relu) or not known.ulps:
        return found
    outward = widen(found, known.ulps)
    absolute = 2 * unit_roundoff(found.lower.dtype) * known.absolute(node)
    return within_range(node, bounds, Bounds(outward.lower - absolute, outward.upper + absolute))


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
