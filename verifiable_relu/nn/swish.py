"""λ-Swish, x·σ(βx) with β = κλ, where κ makes its distance to ReLU that of λ-GELU with the same λ.

ReLU(x) − x·σ(βx) = |x|·σ(−β|x|) is at most 0.2784645428/β: the maximum of t/(1 + eᵗ), which is W(1/e) with Lambert's W,
at t = 1.2784645. The distance of λ-GELU to ReLU is at most 0.1699712075/λ. Both are equal for β = 1.6383·λ.
Source of Swish: Ramachandran, Zoph, Le, Searching for Activation Functions, arXiv 1710.05941.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.nn.activation import SUPREMUM
from verifiable_relu.nn.hardness import HardnessGate, Kernel

_SWISH_SUPREMUM = 0.27846454276107380

MATCHED = _SWISH_SUPREMUM / SUPREMUM
"""The factor κ = β/λ."""


def _logistic_slope(u: Tensor) -> Tensor:
    return torch.sigmoid(u) * torch.sigmoid(-u)


def _backward(gradient: Tensor, u: Tensor) -> Tensor:
    # As in λ-GELU, so that modules can be pickled.
    found: Tensor = torch.ops.aten.silu_backward.default(gradient, u)
    return found


# exp(−800) is zero in float64 too.
KERNEL = Kernel(
    F.silu,
    _backward,
    _logistic_slope,
    saturated=800.0,
    supremum=_SWISH_SUPREMUM,
    scale=MATCHED,
)


class LambdaSwish(HardnessGate):
    """The activation x·σ(βx), β = κλ, with one learned λ = 1 + softplus(s/t) ≥ 1 for all of the layer.

    The parameter s is learned (``Hardness``).

    Args:
        init: the initial λ ≥ 1; values below 1 + ``hardness.LEAST_GAP`` are raised to that.
        temperature: t > 0.
        scale: κ > 0. With κ = 1, λ = 1 is SiLU; with κ = 1.702, λ = 1 is the approximation of GELU by a sigmoid.
    """

    def __init__(self, init: float = 1.0, temperature: float = 0.1, scale: float = MATCHED) -> None:
        super().__init__(replace(KERNEL, scale=scale), init, temperature)
