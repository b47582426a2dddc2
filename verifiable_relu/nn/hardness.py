"""The base of smooth activations f(x; λ) = G(κλx)/(κλ) with a learned hardness λ = 1 + softplus(s/t) per layer.

G(u) = u·P(u) is an activation with a gate P that rises from 0 to 1, and κ is a fixed factor. With u = κλx,

    ∂f/∂x = G'(u),        ∂f/∂λ = (u·G'(u) − G(u))/(κλ²) = u²·P'(u)/(κλ²).

The gradient of λ is a sum over all elements of a layer, for which there are two forms. The first is a difference of two
inner products, (Σ g·x·∂f/∂x − Σ g·f)/λ with the incoming gradient g, and costs little. The second, by P', costs an
exponential for each element. As λ grows, the two inner products agree to more and more digits, until their difference
is rounding noise of size ε·|g·x|/λ where u²·P'(u) is zero. From λ = ``EXACT_FROM`` on, the second form is used.
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
"""The value of λ − 1 with which a layer of initial λ = 1 starts: at λ = 1 itself, the softplus has slope 0."""

EXACT_FROM = 8.0
"""The λ from which on the gradient of λ is computed without cancellation."""


@dataclass(frozen=True)
class Kernel:
    """An activation G(u) = u·P(u), given by elementwise functions.

    Attributes:
        value: G, which returns a new tensor.
        backward: the function (gradient, u) ↦ gradient·G'(u), which returns a new tensor.
        slope: P', which is exactly 0 for |u| ≥ ``saturated``.
        saturated: a number whose square does not overflow in float32.
        supremum: the maximum of |G − ReLU|.
        scale: κ.
    """

    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    saturated: float
    supremum: float
    scale: float = 1.0


def softplus_inverse(value: float) -> float:
    """The number z with softplus(z) = ln(1 + eᶻ) = ``value`` ≥ 0, accurate for tiny and huge values; −∞ for 0."""
    return -math.inf if value == 0 else value + math.log(-math.expm1(-value))


class _GateFunction(torch.autograd.Function):
    """The function f(x; λ(s)) with its gradients, in few operations on tensors and few passes over memory.

    Numbers are computed in Python, where they cost a tenth of an operation on a tensor. The backward pass keeps u in
    place of x, and y, which the next layer mostly keeps anyway: about as much memory as nn.GELU takes.
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
        # This check is cheaper than torch's once_differentiable, which enters a context on every call.
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


class Hardness(nn.Module):
    """The base of activations with one learned λ = 1 + softplus(s/t) ≥ 1 for all elements of the layer.

    Args:
        supremum: λ times the largest distance of the activation to ReLU.
        init: the initial λ ≥ 1. Values below 1 + ``LEAST_GAP`` are raised to that, because λ = 1 means s = −∞.
        temperature: t > 0; the smaller t is, the faster λ changes with s.

    Attributes:
        s: the learned parameter, a 0-dim tensor. It must not be decayed, and it needs a learning rate of its own
            (``verifiable_relu.train.optimizer``).

    Raises:
        ValueError: if ``init`` < 1 or ``temperature`` ≤ 0.
    """

    def __init__(self, supremum: float, init: float = 1.0, temperature: float = 0.1) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"the temperature must be positive, got {temperature}")
        if not 1 <= init < math.inf:
            raise ValueError(f"λ must be a finite number of at least 1, got {init}")
        self.supremum = supremum
        self.temperature = temperature
        self.s = nn.Parameter(torch.empty(()))
        self.set_lam(max(init, 1 + LEAST_GAP))

    @property
    def lam(self) -> Tensor:
        """λ = 1 + softplus(s/t), a 0-dim tensor that is differentiable with respect to ``s``."""
        # With its default threshold of 20, torch's softplus would have an error visible in float64.
        return F.softplus(self.s / self.temperature, threshold=40) + 1

    @torch.no_grad()
    def set_lam(self, value: float) -> None:
        """Set λ to a finite number of at least 1; at 1 itself, s is −∞ and cannot be learned.

        Raises:
            ValueError: if ``value`` is below 1, infinite or NaN.
        """
        if not 1 <= value < math.inf:
            raise ValueError(f"λ must be a finite number of at least 1, got {value}")
        self.s.fill_(self.temperature * softplus_inverse(value - 1))

    def freeze(self) -> None:
        """Stop the learning of λ: ``s`` requires no gradient any more, and only ``set_lam`` changes it."""
        self.s.requires_grad_(False)

    def extra_repr(self) -> str:
        return f"lam={self.lam.item():.6g}, temperature={self.temperature}"


class HardnessGate(Hardness):
    """The activation f(x; λ) = G(κλx)/(κλ) of a kernel G.

    Args:
        kernel: the activation G.
        init: as in ``Hardness``.
        temperature: as in ``Hardness``.

    Raises:
        ValueError: if ``init`` < 1 or ``temperature`` ≤ 0.
    """

    def __init__(self, kernel: Kernel, init: float = 1.0, temperature: float = 0.1) -> None:
        super().__init__(kernel.supremum / kernel.scale, init, temperature)
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        """Apply f to each element of a tensor of any shape.

        A tensor subclass with a ``__torch_function__`` sees one call, as it does for torch's own activations.
        """
        if has_torch_function_unary(x):
            of_subclass: Tensor = handle_torch_function(HardnessGate.forward, (x,), self, x)
            return of_subclass
        # self.s would run nn.Module.__getattr__, whose time is measurable in that of a step.
        y: Tensor = _GateFunction.apply(x, self._parameters["s"], self.temperature, self.kernel)  # type: ignore[no-untyped-call]
        return y
