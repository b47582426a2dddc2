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

import os
import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds.activations import row
from verifiable_relu.bounds.types import Bounds, Lines
from verifiable_relu.network.graph import Activation, Affine, Conv2d, Network, Node, kept


def covers(network: Network, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether the analysis covers how bounds of the network are computed: convolutions in float64 on a CPU.

    Elsewhere a library may choose a transformed algorithm for a convolution, and does not tell. (There sums may be
    taken in float32 on the way, where ``single`` allows that.) Products in float32 are covered unless torch was told
    to compute them with fewer digits.
    """
    kind = torch.device(device).type
    if dtype == torch.float32 and not _all_digits(kind):
        return False
    plain = dtype == torch.float64 and kind == "cpu"
    return plain or not any(isinstance(node, Conv2d) for node in network.nodes)


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


def _tiny(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).tiny


def single(node: Node, like: Tensor) -> bool:
    """Whether sums of a convolution may be taken in float32, in bounds typed like a tensor.

    That needs float32 to be what it says: torch, and its library for convolutions, may be told to compute with fewer
    digits, and on other processors than these the library is not known to sum directly.
    """
    if not isinstance(node, Conv2d) or like.dtype != torch.float64 or like.device.type != "cpu":
        return False
    return _all_digits("cpu") and platform.machine() in _DIRECT and node.single


def _all_digits(kind: str) -> bool:
    """Whether torch, and the libraries that it asks, compute in float32 what is in float32, on a kind of device."""
    library: Any = torch.backends.mkldnn
    settings = [torch.backends.cuda.matmul] if kind == "cuda" else [library.matmul, library.conv]
    plain = all(of.fp32_precision in ("none", "ieee") for of in settings)
    return plain and not torch.is_autocast_enabled(kind) and not any(os.environ.get(name) for name in _SHORTENS)


_SHORTENS = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
_DIRECT = ("x86_64", "AMD64")


def ball(box: Bounds) -> tuple[Tensor, Tensor]:
    """Centre and radius of a box, up to rounding, which ``interval_affine`` accounts for."""
    center = torch.lerp(box.lower, box.upper, 0.5)
    return center, box.upper - center


def interval_affine(node: Affine, largest: Tensor, terms: int = 0) -> tuple[float, Tensor]:
    """How much W·c + b ∓ |W|·r, computed of a box's ``ball``, is to be widened.

    |W|·r, of terms that are not negative, is off by at most γ of itself. W·c + b is off by at most γ·(|W|·|c| + |b|),
    and r by six units of roundoff of ``largest`` ≥ |x|: all that is at most γ·(largest·(sum of |W|'s row) + |b|).

    Args:
        node: the affine map.
        largest: (batch,).
        terms: of |W|·r, where its sums are in float32 (``single``).

    Returns:
        A factor for |W|·r, and what is to be added to the product, (batch, *shape) or broadcastable to it: infinite or
        NaN where sums might overflow, perhaps on the way alone.
    """
    dtype = largest.dtype
    info, few = torch.finfo(dtype), torch.finfo(torch.float32)
    relative = gamma(2 * node.terms + 24, dtype) + 2 * node.weight_error
    growth, smallest, lost = relative, info.tiny / info.eps, 8 * node.terms * info.tiny
    if terms:
        growth, smallest, lost = growth + 1.01 * gamma(terms + 4, torch.float32), 2 * few.tiny, 8 * terms * few.tiny
    # Doubled, this sum overflows before any other may.
    offset = kept(node, "_twice_offset", lambda: 2 * node.offset_magnitude())
    reach = torch.addcmul(offset, 2 * largest.reshape(-1, *[1] * len(node.shape)), node.row_sums)
    least = kept(node, f"_least{terms}", lambda: smallest * node.row_sums + lost)
    return 1 + growth, torch.add(least, reach, alpha=relative / 2)


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


def backward_affine(node: Affine, largest: Tensor) -> Tensor:
    """Per sample, the error of one unit of ‖A‖₁ in pulling rows A back through y = W·x + b.

    A row's new coefficients fl(Wᵀ·A) are off by at most γ·|W|ᵀ·|A|, which moves the row's value by at most
    γ·|A|·(|W|·|x|); its constant gains fl(A·b), off by at most γ·|A|·|b|. With ``largest`` ≥ |x| of shape (batch,),
    both are at most γ·‖A‖₁·(the largest sum of |W|'s rows, times ``largest``, plus |b|). Returns (batch,).
    """
    dtype = largest.dtype
    relative = 2 * gamma(max(node.terms, node.size) + 8, dtype) + 2 * node.weight_error
    reach = largest * node.row_sums.amax() + node.offset_magnitude().amax()
    return relative * reach + 8 * node.size * _tiny(dtype)


def radius(box: Bounds, center: Tensor) -> Tensor:
    """An upper bound of |x − center| in a box, the centre being its middle up to rounding."""
    size = torch.maximum(box.upper.abs(), box.lower.abs())
    return (
        torch.maximum(box.upper - center, center - box.lower) + 4 * unit_roundoff(size.dtype) * size + _tiny(size.dtype)
    )


def backward_single(node: Conv2d, spread: Tensor, largest: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """Errors beside ``backward_affine`` of pulling rows A back in float32, about the centre c of a box of radius r.

    With A′ what float32 makes of A·W, a row's value A·y is A′·(x − c) + A·(W·c + b) but for (A·W − A′)·(x − c). A is
    rounded once, and weights not at all (``Conv2d.single``): that is at most γ·|A|·|W|·r, with γ of float32 and of the
    terms of one entry. The constant A·(W·c + b) − A′·c is three more sums in the dtype of the bounds, each as far off
    as the one that ``backward_affine`` counts; A′·c at most by twice that. Underflow loses at most the smallest normal
    number of each entry of A and of each product.

    Args:
        node: the convolution.
        spread: |W|·r, (batch, *shape).
        largest: (batch,) ≥ |x|.
        inputs: how many there are.

    Returns:
        The error of one unit of |A|, (batch, *shape), and that of any row, (batch,).
    """
    dtype = spread.dtype
    reach = largest * node.row_sums.amax() + node.offset_magnitude().amax()
    further = 4 * gamma(max(node.terms, node.size, inputs) + 8, dtype) * reach + 8 * inputs * _tiny(dtype)
    lost = spread.flatten(1).sum(1) + 2 * node.adjoint_terms * inputs * largest
    rough = 1.01 * gamma(node.adjoint_terms + 4, torch.float32) * spread
    return rough + further[:, None, None, None], 8 * _tiny(torch.float32) * lost


def backward_activation(node: Activation, pre: Bounds, lines: Lines) -> Tensor:
    """Per sample, the error of one unit of ‖A‖₁ in replacing an activation by its lines.

    Covers the rounding in the lines themselves (their offsets are computed from slopes and end points), in the
    products slope·A and offset·A, and in summing the latter: A⁺·lower + A⁻·upper is computed as A·lower +
    A⁻·(upper − lower), of which no part is larger than three times the result may be. Returns (batch,).
    """
    dtype = pre.lower.dtype
    reach = torch.maximum(pre.lower.abs(), pre.upper.abs())
    slope = torch.maximum(lines.lower_slope.abs(), lines.upper_slope.abs())
    offset = torch.maximum(lines.lower_offset.abs(), lines.upper_offset.abs())
    known = row(node)
    # Ten more for the products.
    line = unit_roundoff(dtype) * ((known.ulps + 10) * (slope * reach + offset) + 2 * known.absolute(node))
    total = 4 * gamma(node.size + 8, dtype) * offset
    return (line + total).flatten(1).amax(1) + 8 * node.size * _tiny(dtype)


def underflow(node: Node, largest: Tensor) -> Tensor:
    """Per sample, what underflow of the coefficients may change when rows are pulled back through a node.

    Every product that makes a coefficient of its input, |x| ≤ ``largest``, may be off by the smallest subnormal number,
    however small ‖A‖₁ is.
    """
    info = torch.finfo(largest.dtype)
    terms = node.terms if isinstance(node, Affine) else 4
    return 8 * terms * node.size * info.tiny * info.eps * largest


def accumulate(largest: Tensor) -> Tensor:
    """Per sample, the error of one unit of ‖A‖₁ in adding two rows' coefficients at a node of values ≤ ``largest``."""
    return 4 * unit_roundoff(largest.dtype) * largest + _tiny(largest.dtype)


def concretise(size: int, largest: Tensor) -> Tensor:
    """Per sample, the error of one unit of ‖A‖₁ in A·c − |A|·r + constants, of a ball of values ≤ ``largest``.

    What the computed c and r miss of the ball is a few units of roundoff of ``largest``, and covered.
    """
    dtype = largest.dtype
    return 4 * gamma(size + 16, dtype) * largest + 8 * size * _tiny(dtype)


def total(terms: Tensor, errors: Sequence[Tensor]) -> Tensor:
    """The sum of ``terms`` (n, …) less that of their ``errors``, rounded down."""
    relative = 2 * (len(terms) + len(errors) + 4) * unit_roundoff(terms.dtype)
    value, scale = terms.sum(0), terms.abs().sum(0)
    error = torch.stack([relative * scale, *errors]).sum(0)
    return value - (1 + relative) * error - _tiny(value.dtype)
