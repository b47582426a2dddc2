"""λ-GELU, f(x; λ) = x·Φ(λx) = GELU(λx)/λ, with a learned hardness λ ≥ 1 per layer.

Source: Pérez-Corral et al., λ-GELU: Learning Gating Hardness for Controlled ReLU-ization in Deep Networks,
arXiv 2603.21991. Φ and φ are the standard normal distribution function and density.

With u = λx the identity f = GELU(u)/λ gives

    ∂f/∂x = Φ(u) + u·φ(u) = GELU'(u)                    in [−0.12890, 1.12890] for every λ,
    ∂f/∂λ = x²·φ(λx)                                    in [0, 0.29353/λ²], since t²·φ(t) ≤ φ(√2)·2,
    ReLU(x) − f = |x|·Φ(−λ|x|)                          in [0, 0.1699712075/λ], largest at |x| = 0.7517915/λ.

λ-GELU therefore tends to ReLU uniformly, at the rate 1/λ.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Approximate = Literal["none", "tanh"]

LEAST_GAP = 0.01
"""λ − 1 of a layer that starts at GELU: on the boundary itself the softplus has no slope left to learn with."""


def softplus_inverse(value: float) -> float:
    """The z with softplus(z) = ln(1 + eᶻ) = value ≥ 0, accurate for tiny and huge values; −∞ for 0."""
    return -math.inf if value == 0 else value + math.log(-math.expm1(-value))


def gate_slope(u: Tensor, approximate: Approximate = "none") -> Tensor:
    """The derivative of the gate at u: φ(u), or that of (1 + tanh(√(2/π)·(u + 0.044715·u³)))/2."""
    if approximate == "none":
        return torch.exp(-u * u / 2) / math.sqrt(2 * math.pi)
    k = math.sqrt(2 / math.pi)
    sech = 1 / torch.cosh(k * (u + 0.044715 * u**3))
    return sech * sech * (k / 2) * (1 + 3 * 0.044715 * u * u)


class _LambdaGelu(torch.autograd.Function):
    """The closed forms of both derivatives.

    Left to itself, autograd would form ∂f/∂λ as the difference GELU'(u)·x/λ − GELU(u)/λ² of two terms that agree
    to all digits once the gate is hard, so that noise of size ε·x/λ would stand where x²·φ(λx) is zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, lam: Tensor, approximate: Approximate) -> Tensor:
        ctx.save_for_backward(x, lam)
        ctx.approximate = approximate
        return F.gelu(lam * x, approximate=approximate) / lam

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, lam = ctx.saved_tensors
        u = lam * x
        of_x = of_lam = None
        if ctx.needs_input_grad[0]:
            of_x = torch.ops.aten.gelu_backward(gradient, u, approximate=ctx.approximate)
        if ctx.needs_input_grad[1]:
            # x² and u² overflow for large x; beyond |u| = 40 the slope is an exact zero, so nothing is cut off.
            u = u.clamp(-40, 40)
            of_lam = (gradient * (u * u * gate_slope(u, ctx.approximate))).sum().reshape(lam.shape) / (lam * lam)
        return of_x, of_lam, None


class LambdaGELU(nn.Module):
    """x·Φ(λx) with one learned λ = 1 + softplus(s/t) ≥ 1 for all elements of the layer.

    Args:
        init: the initial λ ≥ 1. Below 1 + ``LEAST_GAP``, λ starts at 1 + ``LEAST_GAP``: λ = 1 is s = −∞.
        temperature: t > 0; the smaller, the faster λ follows s.
        approximate: ``"none"`` for the exact Φ, ``"tanh"`` for GELU's usual approximation.

    Attributes:
        s: the parameter that is learned (0-dim). It must not be decayed, and it needs a learning rate of its own
            (``verifiable_relu.train.optimizer``).

    Raises:
        ValueError: if ``init`` < 1, ``temperature`` ≤ 0 or ``approximate`` is unknown.
    """

    def __init__(self, init: float = 1.0, temperature: float = 0.1, approximate: Approximate = "none") -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"the temperature must be positive, got {temperature}")
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
        if not 1 <= init < math.inf:
            raise ValueError(f"λ must be a finite number of at least 1, got {init}")
        self.temperature = temperature
        self.approximate: Approximate = approximate
        self.s = nn.Parameter(torch.empty(()))
        self.set_lam(max(init, 1 + LEAST_GAP))

    @property
    def lam(self) -> Tensor:
        """λ = 1 + softplus(s/t), a 0-dim tensor that is differentiable with respect to ``s``."""
        # torch's own softplus turns linear above a threshold; logaddexp is exact for every s.
        return 1 + torch.logaddexp(self.s / self.temperature, torch.zeros_like(self.s))

    @torch.no_grad()
    def set_lam(self, value: float) -> None:
        """Move λ to ``value``, a finite number of at least 1 (at 1 itself, s is −∞ and learns no more).

        Raises:
            ValueError: if ``value`` is no such number.
        """
        if not 1 <= value < math.inf:
            raise ValueError(f"λ must be a finite number of at least 1, got {value}")
        self.s.fill_(self.temperature * softplus_inverse(value - 1))

    def freeze(self) -> None:
        """Stop learning λ: ``s`` needs no gradient from here on, and keeps its value until ``set_lam``."""
        self.s.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply λ-GELU to each element of x, whatever its shape."""
        lam = self.lam
        if lam.requires_grad:
            y: Tensor = _LambdaGelu.apply(x, lam, self.approximate)  # type: ignore[no-untyped-call]
            return y
        return F.gelu(lam * x, approximate=self.approximate) / lam

    def extra_repr(self) -> str:
        return f"lam={self.lam.item():.6g}, temperature={self.temperature}, approximate={self.approximate!r}"
