"""Outward slack for the rounding of bounds: the only place that adds an epsilon.

Verdicts are about real arithmetic on the stored weights. Each function bounds the rounding error of one named
step of bound propagation, from the standard model fl(a∘b) = (a∘b)(1 + δ), |δ| ≤ u, and

    |fl(Σ_n a_i·b_i) − Σ a_i·b_i| ≤ γ_n · Σ |a_i|·|b_i|,   γ_n = n·u / (1 − n·u),

which holds for every order of summation, with and without fused multiply-add (N. J. Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., SIAM 2002, section 3.1). Convolutions are sums of that kind where
they are computed directly or as a matrix product, as torch's CPU kernels do; transformed algorithms (Winograd,
FFT) are not covered. The functions are generous by small constant factors, so that the rounding of their own
few operations is covered too.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds.activations import row
from verifiable_relu.bounds.operators import Operator
from verifiable_relu.bounds.types import Bounds, Lines
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Affine, Conv2d


def covers(network: Network, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether the analysis covers how bounds of the network are computed: convolutions in float64 on a CPU.

    Elsewhere a library may choose a transformed algorithm for a convolution, and does not tell. (There sums may be
    taken in float32 on the way, where ``float32_is_plain`` allows that.) Products in float32 are covered unless torch
    was told to compute them with fewer digits.
    """
    kind = torch.device(device).type
    if dtype == torch.float32 and not _all_digits(kind):
        return False
    plain = dtype == torch.float64 and kind == "cpu"
    return plain or not any(isinstance(node, Conv2d) for node in network.nodes)


def keeps_activations(network: Network, converted: Network) -> bool:
    """Whether slopes and λ of activations are the same numbers in a network of another dtype.

    What narrowing changes in an affine map is counted in its ``weight_error``; nothing counts it for an activation.

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


def unit_roundoff(dtype: torch.dtype) -> float:
    """u of the standard model: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def gamma(terms: int, dtype: torch.dtype) -> float:
    """γ_n for a sum of ``terms`` products.

    Raises:
        OverflowError: if n·u reaches 1/2, where the analysis says nothing.
    """
    product = terms * unit_roundoff(dtype)
    if product >= 0.5:
        raise OverflowError(f"a sum of {terms} terms has no rounding bound in {dtype}")
    return product / (1 - product)


@cache
def _tiny(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).tiny


def float32_is_plain(like: Tensor) -> bool:
    """Whether sums may be taken in float32, in bounds typed like a tensor, of maps that allow it (``Operator.fits32``).

    That needs float32 to be what it says: torch, and its library for convolutions, may be told to compute with fewer
    digits, and on other processors than these the library is not known to sum directly.
    """
    if like.dtype != torch.float64 or like.device.type != "cpu" or platform.machine() not in _DIRECT:
        return False
    return _all_digits("cpu")


def _all_digits(kind: str) -> bool:
    """Whether torch, and the libraries that it asks, compute in float32 what is in float32, on a kind of device."""
    library: Any = torch.backends.mkldnn
    settings = [torch.backends.cuda.matmul] if kind == "cuda" else [library.matmul, library.conv]
    plain = all(of.fp32_precision in ("none", "ieee") for of in settings)
    return plain and not torch.is_autocast_enabled(kind) and not any(os.environ.get(name) for name in _SHORTENS)


_SHORTENS = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "MKL_BLAS_COMPUTE_MODE")
_DIRECT = ("x86_64", "AMD64")


def ball(box: Bounds, center: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Centre, if not known, and radius of a box, up to rounding, which ``interval_affine`` accounts for."""
    if center is None:
        center = torch.lerp(box.lower, box.upper, 0.5)
    return center, box.upper - center


def interval_affine(operator: Operator[Affine], largest: Tensor, terms: int = 0) -> tuple[float, Tensor]:
    """How much W·c + b ∓ |W|·r, computed of a box's ``ball``, is to be widened.

    |W|·r, of terms that are not negative, is off by at most γ of itself. W·c + b is off by at most γ·(|W|·|c| + |b|),
    and r by six units of roundoff of ``largest`` ≥ |x|: all that is at most γ·(largest·(sum of |W|'s row) + |b|).

    Args:
        operator: the affine map.
        largest: (batch,).
        terms: of |W|·r, where its sums are in float32 (``Operator.absolute32``).

    Returns:
        A factor for |W|·r, and what is to be added to the product, (batch, *shape) or broadcastable to it: infinite or
        NaN where sums might overflow, perhaps on the way alone.
    """
    node, dtype = operator.node, largest.dtype
    # What γ says of the rows' sums, which are computed, too, is the second factor.
    relative = gamma(node.terms + 16, dtype) * (1 + 2 * gamma(node.terms, dtype)) + 2 * node.weight_error
    growth = 1 + relative + (1.01 * gamma(terms + 4, torch.float32) if terms else 0)
    least, offset, row = operator.once(("interval", terms), lambda: _interval(operator, dtype, terms))
    reach = torch.addcmul(offset, largest.reshape(-1, *[1] * len(node.shape)), row)
    return growth, torch.add(least, reach, alpha=relative / 2)


def _interval(operator: Operator[Affine], dtype: torch.dtype, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    """For ``interval_affine``: what underflow may change, and 2|b| and twice the sums of |W|'s rows.

    Doubled, their sum overflows before any other may.
    """
    info, few = torch.finfo(dtype), torch.finfo(torch.float32)
    smallest, lost = (4 * few.tiny, 16 * few.tiny) if terms else (info.tiny / info.eps, 8 * info.tiny)
    sums = operator.row_sums
    return smallest * sums + operator.node.terms * lost, 2 * operator.offset_magnitude, 2 * sums


def interval_single(size: Tensor, radius: Tensor, terms: int) -> Tensor:
    """A radius so large that |W|·it covers sums in float32 for W·centre, too, which are off by γ·|W|·|centre| at most.

    Args:
        size: |centre|, in float32.
        radius: of the ball.
        terms: how many products are summed. Sums must not overflow.
    """
    return torch.add(radius, size, alpha=share_single(terms))


def reach_single(size: Tensor, radius: Tensor, terms: int) -> Tensor:
    """(batch,) ≥ |x| of a ball, in float64, of the sums of so many |centre| and of its radius, computed in float32."""
    relative = _inflated(terms, torch.float32)
    return torch.add(16 * terms * _tiny(torch.float32), size.double() + radius, alpha=1 + relative)


def share_single(terms: int) -> float:
    """By what part of |centre| ``interval_single`` makes a radius larger."""
    return 1.01 * gamma(terms + 4, torch.float32)


def interval_rows(operator: Operator[Affine] | None, largest: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """How much C·ŷ − |C·W|·r, computed of a ball of x, is to be lowered, for rows C of y = W·x + b and ŷ = W·c + b.

    Errors in ŷ, in C·ŷ, in C·W and in r, six units of roundoff of ``largest``, are those of ``backward_affine``, which
    has room for them: no ReLU follows. For |C·W|·r there is ``concretise``.

    Args:
        operator: the affine map; None for y = x.
        largest: (batch,) ≥ |x|.
        size: of x.

    Returns:
        The error of one unit of |C|, (batch, outputs), and what is lost to underflow, (batch,).
    """
    if operator is None:
        none = torch.full_like(largest, 16 * size * _tiny(largest.dtype))
        return value(size, largest, 1).expand(-1, size), none
    return backward_affine(operator, largest, 1), lost(operator, largest, max(size, operator.node.size), largest.dtype)


def interval_sum(largest: Tensor) -> Tensor:
    """How much the sum of two boxes, at most ``largest`` in size as computed, is to be widened: (batch,)."""
    return 4 * unit_roundoff(largest.dtype) * largest + _tiny(largest.dtype)


def widen(bounds: Bounds, ulps: int) -> Bounds:
    """Bounds moved outward by ``ulps`` units of u relative to their magnitude."""
    relative = 2 * ulps * unit_roundoff(bounds.lower.dtype)
    tiny = _tiny(bounds.lower.dtype)
    return Bounds(
        bounds.lower - relative * bounds.lower.abs() - tiny, bounds.upper + relative * bounds.upper.abs() + tiny
    )


def interval_activation(node: Activation, image: Bounds) -> Bounds:
    """The image of an activation, outward; max(x, 0) is computed without error."""
    if node.op == "Relu":
        return image
    known = row(node)
    outward = widen(image, known.ulps)
    absolute = 2 * unit_roundoff(image.lower.dtype) * known.absolute(node)
    return Bounds(outward.lower - absolute, outward.upper + absolute)


def radius(box: Bounds, point: Tensor) -> Tensor:
    """The largest |x − point| in a box, up to a unit of roundoff, for which those have room whom it is given to."""
    return torch.maximum(box.upper - point, point - box.lower)


def value(size: int, reach: Tensor, sums: int) -> Tensor:
    """The error of one unit of |A| in A·v̂ over ``size`` numbers, and of a ReLU's lines there.

    Args:
        size: how many there are.
        reach: (batch,) ≥ |v|, |v̂|.
        sums: how many additions what is computed with them takes part in (``backward_affine``).

    Returns:
        (batch, 1).
    """
    dtype = reach.dtype
    relative = 2 * gamma(size + 8, dtype) + (_LINES + 2 * sums) * unit_roundoff(dtype)
    return (relative * reach + 8 * size * _tiny(dtype))[:, None]


_LINES = 24
"""How many u of |z|, |ẑ| a ReLU's lines and what is computed with them may be off by: 8 its offsets, 2 its lower line
there, 6 how far its upper line lies above that, 8 the new coefficients, of z − ẑ."""


def backward_affine(operator: Operator[Affine], reach: Tensor, sums: int) -> Tensor:
    """The error of one unit of |A| in pulling rows A back through y = W·x + b, about a point x̂.

    With ŷ = fl(W·x̂ + b), A·(y − ŷ) is A′·(x − x̂) with A′ = fl(A·W) but for (A·W − A′)·(x − x̂), at most
    γ·|A|·|W|·|x − x̂|, and A·(W·x̂ + b − ŷ), at most γ·|A|·(|W|·|x̂| + |b|). Both together are at most
    3γ·|A|·m, m = reach·(sums of |W|'s rows) + |b| being an upper bound of |y| and of |ŷ|, too. Two more γ·|A|·m cover
    the sum A⁻·(upper − lower line) at a ReLU of y, whose lines are no further apart than 2m at ŷ, or A·ŷ where rows
    begin; ``_LINES`` the lines themselves. A row's value is a running sum of A·ŷ and of such sums A⁻·(upper − lower
    line), each at most 2|A|·m: every addition, but for the last, errs by at most u times all of them. What there is of
    A·(lower line − x̂) is accounted for in ``outward``.

    Args:
        operator: the affine map.
        reach: (batch,) ≥ |x|, |x̂|.
        sums: how many such additions there are at most.

    Returns:
        (batch, *shape), or broadcastable to it.
    """
    node, dtype = operator.node, reach.dtype
    lines = (_LINES + 2 * sums) * unit_roundoff(dtype)
    relative = 5 * gamma(max(node.terms, node.size) + 2, dtype) + lines + 2 * node.weight_error
    tiny = 8 * node.size * _tiny(dtype)
    least = operator.once(("least error", sums), lambda: relative * operator.offset_magnitude + tiny)
    slope = operator.once(("error slope", sums), lambda: relative * operator.row_sums)
    return torch.addcmul(least, slope, reach.reshape(-1, *[1] * len(node.shape)))


_SLOPES = 4
"""How many u of float32 coefficients of z, of one unit of |A|, may be off by at a ReLU of z: 2·low + 2·|up − low| + up
at most, for slopes low, up in [0, 1] of the lower and of the upper line. That is 3·up, or 4·low − up."""

_ANY_SLOPES = 7
"""The same for other activations, with slopes of any sign: so many u of the larger slope."""


def backward_single(reach: Tensor, terms: int | Tensor = 0, operator: Operator[Affine] | None = None) -> Tensor:
    """What ``backward_affine`` grows by where A is taken in float32: |W|·(γ·|x − x̂|) with γ of float32.

    Weights lose nothing there (``Operator.fits32``). Slopes of a ReLU's lines are rounded, their products with A, and
    the sum of two of these (``_SLOPES``), of |y − ŷ|, which is at most |W|·|x − x̂|. Rows that come from float64 are
    rounded once, before the map or after it; then no ReLU in float32 follows. Products and sums are about the point:
    magnitudes don't count.

    Args:
        reach: ≥ |x − x̂|, (batch, *shape of x); without ``operator`` ≥ |W|·|x − x̂|, or ≥ |y − ŷ| where y comes from
            no map, (batch, *shape of y).
        terms: how many products that are not zero a coefficient is the sum of: of all, or like ``reach``.
        operator: the affine map.

    Returns:
        (batch, *shape of y).
    """
    single = torch.float32
    most = (
        terms if isinstance(terms, int) else operator.node.terms if operator is not None else math.prod(reach.shape[1:])
    )
    # Of γ the denominator that is smallest.
    unit = 1.01 * gamma(most + _SLOPES, single) / (most + _SLOPES)
    error = reach * (unit * (most + _SLOPES) if isinstance(terms, int) else torch.add(terms, _SLOPES).mul_(unit))
    return torch.add(error if operator is None else operator.absolute(error), 8 * _tiny(single))


def backward_activation(
    node: Activation, reach: Tensor, image: Tensor, lines: Lines, sums: int, radius: Tensor | None = None
) -> Tensor:
    """The error of one unit of |A| in replacing an activation by its lines, beside that of ``backward_affine``.

    Covers the rounding in the lines themselves (their offsets are computed from slopes and end points), in the
    products slope·A and offset·A, and in summing the latter: A⁺·lower + A⁻·upper is computed as A·lower +
    A⁻·(upper − lower), of which no part is larger than three times the result may be. In float32, what slopes may be
    off by beyond what ``backward_single`` grants. For a ReLU, whose slopes are in [0, 1] and offsets at most |z|,
    ``backward_affine``, ``backward_single`` and ``value`` cover all that.

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
    # Of running sums ``backward_affine`` covers what slopes have to do with.
    line = (known.ulps + _LINES) * size + 2 * sums * offset + 2 * known.absolute(node) + 8 * image[:, None]
    # The last part is that of numbers, slopes among them, too small for float32.
    tiny = 8 * node.size * _tiny(dtype) + 8 * _tiny(torch.float32) * (1 + reach[:, None])
    error = unit_roundoff(dtype) * line + 3 * gamma(node.size + 8, dtype) * size + tiny
    if radius is not None:
        error = torch.addcmul(error, slope, radius, value=1.01 * gamma(_ANY_SLOPES, torch.float32))
    return error


def outward(top: Tensor, floor: Tensor, error: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """Lines of an activation moved outward, by the error of one unit of |A| below and above.

    With a lower line ``floor`` and an upper one ``top`` above it, A⁺·lower + A⁻·(lower + top) is computed as
    A·floor + A⁻·top: lowered by |A|·error that is A·(floor − error) + A⁻·(top + 2·error).

    Args:
        top: how far the upper line lies above the lower one, at the point.
        floor: how far the lower line lies above the point of the output, there.
        error: of one unit of |A|.
        terms: how many sums a product takes part in.

    Returns:
        ``top`` and ``floor``, moved.
    """
    relative = 5 * gamma(terms + 8, error.dtype)
    error = torch.add(error, floor.abs(), alpha=relative)
    return torch.add(top, error, alpha=2 * (1 + relative)), torch.sub(floor, error, alpha=1 + relative)


def summed_single(top: Tensor, floor: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """The ``top`` and ``floor`` of ``outward``, so far out that A·floor + A⁻·top, summed in float32, is not too high.

    Args:
        top: moved outward.
        floor: moved outward.
        terms: how many sums a product takes part in.
    """
    relative = _inflated(terms, torch.float32)
    lowered = torch.sub(floor, floor.abs(), alpha=relative)
    raised = torch.add(top, floor - lowered, alpha=2)
    return torch.add(raised, raised.abs(), alpha=relative), lowered


def weighed_single(found: Tensor, terms: int) -> Tensor:
    """A sum of products that are not negative, computed in float32, so large that it is not too low.

    Args:
        found: as computed, but for underflow (``lost``).
        terms: how many sums a product takes part in.
    """
    return found * (1 + _inflated(terms, torch.float32))


def _inflated(terms: int, dtype: torch.dtype) -> float:
    """1/(1 − γ) − 1 and a little more: numbers larger by that have a computed sum of products that is no smaller."""
    error = gamma(terms + 4, dtype)
    return 1.01 * error / (1 - error)


def concretise(radius: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """A radius so large that −|A|·radius, summed in ``dtype``, is not too high, but for underflow (``lost``)."""
    return torch.add(4 * _tiny(dtype), radius, alpha=1 + _inflated(terms, dtype))


def accumulate(radius: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of one unit of |A| in adding two rows of which A is the sum, about a point."""
    return 2 * unit_roundoff(dtype) * radius


def point(reach: Tensor) -> Tensor:
    """The error of one unit of |A| in the sum of two points, both with their sum within ``reach``: (batch, 1)."""
    return 2 * unit_roundoff(reach.dtype) * reach[:, None]


def lost(operator: Operator[Affine] | None, reach: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """What underflow may change in a row that is pulled back through a node, however small ‖A‖₁ is: (batch,).

    Every product that makes a coefficient of its input may be off by the smallest number of ``dtype``, that of float32
    by the smallest normal one, where libraries may flush the others to zero; and so may those of a row's sums. An
    affine map's part covers that of an activation after it, whose input is at most that map's bound.

    Args:
        operator: the node's, if it is an affine map.
        reach: (batch,) ≥ |x|, |x̂| of its input; its own where rows end.
        size: of the larger of its input and itself.
        dtype: of A before the node.
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
    """``found`` less ``lost``, of which a part is to spare, rounded down.

    Args:
        found: of a row: a sum whose partial sums' errors are accounted for (``backward_affine``), less |A|·radius, plus
            ``constant``.
        lost: what underflow may change.
        constant: the last of these terms, if there is one.
    """
    relative = 4 * unit_roundoff(found.dtype)
    error = torch.add(lost, found.abs(), alpha=relative)
    if constant is not None:
        error = torch.add(error, constant.abs(), alpha=relative)
    return found - error
