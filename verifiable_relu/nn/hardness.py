"""What smooth activations of learned hardness share: f(x; λ) = G(κλx)/(κλ) with one λ = 1 + softplus(s/t) per layer.

G(u) = u·P(u) is an activation with a gate P that rises from 0 to 1, and κ is a fixed factor. With u = κλx,

    ∂f/∂x = G'(u),        ∂f/∂λ = (u·G'(u) − G(u))/(κλ²) = u²·P'(u)/(κλ²).

The gradient of λ is summed over a whole layer. Where λ is small it is taken as the difference of two inner products
that are nearly free, (Σ g·x·∂f/∂x − Σ g·f)/λ; the second form costs an exponential for each element. But the two sums
agree to more and more digits as the gate hardens, until noise of size ε·|g·x|/λ stands where u²·P'(u) is zero: past
``EXACT_FROM`` the second form is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

LEAST_GAP = 0.01
"""λ − 1 of a layer that starts at λ = 1: on the boundary itself the softplus has no slope left to learn with."""

EXACT_FROM = 8.0
"""The λ from which the gradient of λ is formed without cancellation."""


@dataclass(frozen=True)
class Kernel:
    """An activation G(u) = u·P(u), each function elementwise.

    Attributes:
        value: G, into a new tensor.
        backward: gradient·G'(u) from (gradient, u), into a new tensor.
        slope: P'; exactly 0 for |u| ≥ ``saturated``.
        saturated: a finite number whose square is far from overflow in float32.
        scale: κ.
    """

    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    saturated: float
    scale: float = 1.0


def softplus_inverse(value: float) -> float:
    """The z with softplus(z) = ln(1 + eᶻ) = value ≥ 0, accurate for tiny and huge values; −∞ for 0."""
    return -math.inf if value == 0 else value + math.log(-math.expm1(-value))


class _Hardened(torch.autograd.Function):
    """f(x; λ(s)) with few operations, which count on small layers, and few passes, which count on large ones.

    All that is a single number is computed in Python, where it costs a tenth of what an operation on a tensor does.
    u is kept for the backward pass in place of x, and y, which the next layer mostly keeps anyway: as much memory as
    for nn.GELU once x is released, and y for a little longer.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, s: Tensor, temperature: float, kernel: Kernel) -> Tensor:
        z = s.item() / temperature
        small = math.exp(-abs(z))
        lam = 1 + max(z, 0) + math.log1p(small)
        factor = kernel.scale * lam
        u = x * factor
        y = kernel.value(u).mul_(1 / factor)
        ctx.save_for_backward(u, y)
        ctx.numbers = kernel, lam, factor, (1 if z >= 0 else small) / (1 + small) / temperature
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        # Cheaper than torch's once_differentiable, which enters a context on every call.
        if torch.is_grad_enabled():
            raise RuntimeError("an activation of learned hardness has no second derivative: create_graph must be False")
        u, y = ctx.saved_tensors
        kernel, lam, factor, slope_of_lam = ctx.numbers
        of_x = kernel.backward(gradient, u)
        if not ctx.needs_input_grad[1]:
            return of_x, None, None, None
        if lam < EXACT_FROM:
            total = torch.dot(u.ravel(), of_x.ravel())
            of_lam = (total.item() / factor - torch.dot(gradient.ravel(), y.ravel()).item()) / lam
        else:
            near = u.ravel().clamp(-kernel.saturated, kernel.saturated)
            total = torch.dot(kernel.slope(near).mul_(near).mul_(near), gradient.ravel())
            of_lam = total.item() / (factor * lam)
        return of_x, total.fill_(of_lam * slope_of_lam), None, None


class HardnessGate(nn.Module):
    """f(x; λ) with one learned λ = 1 + softplus(s/t) ≥ 1 for all elements of the layer.

    Args:
        kernel: the activation that is hardened.
        init: the initial λ ≥ 1. Below 1 + ``LEAST_GAP``, λ starts at 1 + ``LEAST_GAP``: λ = 1 is s = −∞.
        temperature: t > 0; the smaller, the faster λ follows s.

    Attributes:
        s: the parameter that is learned (0-dim). It must not be decayed, and it needs a learning rate of its own
            (``verifiable_relu.train.optimizer``).

    Raises:
        ValueError: if ``init`` < 1 or ``temperature`` ≤ 0.
    """

    def __init__(self, kernel: Kernel, init: float = 1.0, temperature: float = 0.1) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"the temperature must be positive, got {temperature}")
        if not 1 <= init < math.inf:
            raise ValueError(f"λ must be a finite number of at least 1, got {init}")
        self.kernel = kernel
        self.temperature = temperature
        self.s = nn.Parameter(torch.empty(()))
        self.set_lam(max(init, 1 + LEAST_GAP))

    @property
    def lam(self) -> Tensor:
        """λ = 1 + softplus(s/t), a 0-dim tensor that is differentiable with respect to ``s``."""
        # At its default threshold of 20 torch's softplus would be off by what is seen in float64.
        return F.softplus(self.s / self.temperature, threshold=40) + 1

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
        """Apply f to each element of x, whatever its shape.

        To tensors with a ``__torch_function__`` it is one function, as torch's own activations are.
        """
        if has_torch_function_unary(x):
            of_subclass: Tensor = handle_torch_function(HardnessGate.forward, (x,), self, x)
            return of_subclass
        # Looking up self.s runs through nn.Module.__getattr__, which can be seen in the cost of a step.
        y: Tensor = _Hardened.apply(x, self._parameters["s"], self.temperature, self.kernel)  # type: ignore[no-untyped-call]
        return y

    def extra_repr(self) -> str:
        return f"lam={self.lam.item():.6g}, temperature={self.temperature}"
