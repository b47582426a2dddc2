"""Devices and dtypes that the rounding analysis covers, and the choice of a backward pass's dtype."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.ir.linear import SUMS_FLOAT32_DIRECTLY, Convolution
from verifiable_relu.ir.network import Affine, Network

WIDENING = 4e-4
"""Coefficients are in float32 while rounding of maps costs no larger part of bounds' mean distance from points.

Measured on competition networks, outputs are wider by 0.005% to 0.08%; by up to 0.6% in a deep dense one.
"""

_SHORTENS = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "MKL_BLAS_COMPUTE_MODE")
"""Environment variables that tell a library to compute in float32 with fewer digits."""

_EMULATES = "CUBLAS_EMULAT"
"""How the environment variables begin that have cuBLAS compute products in other types."""


def is_covered(network: Network, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if torch computes sums of products of a dtype as the standard floating-point model says.

    It does in float64, unless cuBLAS emulates it. In float32 a library may be told to compute with fewer
    digits; and one for convolutions may transform sums, unless it is oneDNN on a processor on which it sums directly.
    """
    if device.type == "cuda" and any(name.startswith(_EMULATES) for name in os.environ):
        return False
    if dtype == torch.float64:
        return True
    library: Any = torch.backends.mkldnn
    settings = [torch.backends.cuda.matmul] if device.type == "cuda" else [library.matmul, library.conv]
    plain = all(of.fp32_precision in ("none", "ieee") for of in settings)
    if not plain or torch.is_autocast_enabled(device.type) or any(os.environ.get(name) for name in _SHORTENS):
        return False
    direct = device.type == "cpu" and SUMS_FLOAT32_DIRECTLY
    return direct or not any(isinstance(op, Affine) and isinstance(op.map, Convolution) for op in network.ops)


def holds_weights(network: Network, dtype: torch.dtype) -> bool:
    """Return True if no weight of a network is lost in a dtype."""
    return all(math.isfinite(op.map.conversion_error(dtype)) for op in network.ops if isinstance(op, Affine))


def widening(charge: Tensor, distance: Tensor) -> float:
    """Return the mean share of rounding in the distance of bounds from points; 0 if it is not a number.

    (The number is needed on the host: one synchronisation with the device for each layer that is bounded by rows.)
    """
    found = float(charge.sum() / distance.clamp(min=0).sum())
    return found if math.isfinite(found) else 0.0
