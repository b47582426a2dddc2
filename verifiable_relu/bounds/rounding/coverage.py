"""Where torch computes as the standard model of floating point says, so that rounding errors are accounted for."""

from __future__ import annotations

import os
import platform
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Conv2d

_SHORTENS = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "MKL_BLAS_COMPUTE_MODE")
"""Environment variables that tell a library to compute in float32 with fewer digits."""

_DIRECT = ("x86_64", "AMD64")
"""The processors on which oneDNN is known to sum convolutions directly."""


def covers(network: Network, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether the rounding of a network's bounds is accounted for, in a dtype on a device.

    It is for convolutions in float64 on a CPU; elsewhere a library may choose a transformed algorithm, and does not
    tell. (Some of the sums in between may still be in float32, where ``float32_is_plain`` says so.) It is for networks
    without convolutions in float32, too, unless torch was told to compute products with fewer digits.
    """
    kind = torch.device(device).type
    if dtype == torch.float32 and not _all_digits(kind):
        return False
    plain = dtype == torch.float64 and kind == "cpu"
    return plain or not any(isinstance(node, Conv2d) for node in network.nodes)


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
