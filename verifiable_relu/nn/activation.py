"""λ-GELU, f(x; λ) = x·Φ(λx) = GELU(λx)/λ, with a learned hardness λ ≥ 1 per layer.

Source: Pérez-Corral et al., λ-GELU: Learning Gating Hardness for Controlled ReLU-ization in Deep Networks,
arXiv 2603.21991. Φ and φ are the standard normal distribution function and density.

With u = λx,

    ∂f/∂x = Φ(u) + u·φ(u) = GELU'(u)                    in [−0.12890, 1.12890] for every λ,
    ∂f/∂λ = x²·φ(λx)                                    in [0, 0.29353/λ²], since t²·φ(t) ≤ φ(√2)·2,
    ReLU(x) − f = |x|·Φ(−λ|x|)                          in [0, 0.1699712075/λ], largest at |x| = 0.7517915/λ.

λ-GELU therefore tends to ReLU uniformly, at the rate 1/λ.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.nn.hardness import HardnessGate, Kernel

Approximate = Literal["none", "tanh"]

SUPREMUM = 0.16997120747990369
"""The maximum of t·Φ(−t). Divided by λ, it is the largest distance between λ-GELU and ReLU."""


def gate_slope(u: Tensor, approximate: Approximate = "none") -> Tensor:
    """The derivative at u of the gate, which is Φ(u) or its approximation (1 + tanh(√(2/π)·(u + 0.044715·u³)))/2."""
    if approximate == "none":
        return torch.exp(-u * u / 2) / math.sqrt(2 * math.pi)
    k = math.sqrt(2 / math.pi)
    sech = 1 / torch.cosh(k * (u + 0.044715 * u**3))
    return sech * sech * (k / 2) * (1 + 3 * 0.044715 * u * u)


def _backward(gradient: Tensor, u: Tensor, approximate: Approximate = "none") -> Tensor:
    # An operator of torch cannot be pickled, and with it no module that has one; a function of a module can.
    found: Tensor = torch.ops.aten.gelu_backward.default(gradient, u, approximate=approximate)
    return found


KERNELS = {
    "none": Kernel(F.gelu, _backward, gate_slope, saturated=40.0, supremum=SUPREMUM),
    "tanh": Kernel(
        partial(F.gelu, approximate="tanh"),
        partial(_backward, approximate="tanh"),
        partial(gate_slope, approximate="tanh"),
        saturated=40.0,
        supremum=0.170041,
    ),
}


class LambdaGELU(HardnessGate):
    """The activation x·Φ(λx) with one learned λ = 1 + softplus(s/t) ≥ 1 for all elements of the layer.

    The parameter s is learned (``HardnessGate``).

    Args:
        init: the initial λ ≥ 1; values below 1 + ``hardness.LEAST_GAP`` are raised to that.
        temperature: t > 0.
        approximate: ``"none"`` for the exact Φ, ``"tanh"`` for GELU's usual approximation.

    Raises:
        ValueError: if ``init`` < 1, ``temperature`` ≤ 0 or ``approximate`` is unknown.
    """

    def __init__(self, init: float = 1.0, temperature: float = 0.1, approximate: Approximate = "none") -> None:
        if approximate not in KERNELS:
            raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
        super().__init__(KERNELS[approximate], init, temperature)
        self.approximate: Approximate = approximate

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, approximate={self.approximate!r}"
