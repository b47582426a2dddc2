"""Smooth activations f(x; λ) = G(κλx)/(κλ) with a learned hardness λ = 1 + softplus(s/t) per layer.

G(u) = u·P(u) is an activation with a gate P that rises from 0 to 1, and κ is a fixed factor. With u = κλx,

    ∂f/∂x = G'(u),        ∂f/∂λ = (u·G'(u) − G(u))/(κλ²) = u²·P'(u)/(κλ²).

The gradient of λ is a sum over all elements of a layer. Of G(κλx)/(κλ), torch computes it as a difference of two inner
products; as λ grows, they agree to more and more digits, until their difference is rounding noise of size ε·|g·x|/λ,
with the incoming gradient g, where u²·P'(u) is zero. From λ = ``EXACT_FROM`` on, a λ that is learned is learned from
x·P(κλx), which costs more.

λ-GELU is f(x; λ) = x·Φ(λx) = GELU(λx)/λ (Pérez-Corral et al., λ-GELU: Learning Gating Hardness for Controlled
ReLU-ization in Deep Networks, arXiv 2603.21991). Φ and φ are the standard normal distribution function and density:

    ∂f/∂x = Φ(u) + u·φ(u) = GELU'(u)                    in [−0.12890, 1.12890] for every λ,
    ∂f/∂λ = x²·φ(λx)                                    in [0, 0.29353/λ²], since t²·φ(t) ≤ φ(√2)·2,
    ReLU(x) − f = |x|·Φ(−λ|x|)                          in [0, 0.1699712075/λ], largest at |x| = 0.7517915/λ.

λ-GELU therefore tends to ReLU uniformly, at the rate 1/λ.

λ-Swish is x·σ(βx) with β = κλ (Ramachandran, Zoph, Le, Searching for Activation Functions, arXiv 1710.05941). As
ReLU(x) − x·σ(βx) = |x|·σ(−β|x|) is at most 0.2784645428/β, the maximum of t/(1 + eᵗ), which is W(1/e) with Lambert's W,
at t = 1.2784645, it is as far from ReLU as λ-GELU with the same λ for κ = 1.6383.

The smooth activations that λ can harden to ReLU are ``RECTIFIERS``: |G(λx)/λ − ReLU(x)| is at most max |G − ReLU|/λ.
A module or function is recognised by its values on a grid of points, not by its name: so all spellings of
GELU, such as those of Hugging Face's ``transformers``, are known at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from verifiable_relu.errors import UnsupportedError

Approximate = Literal["none", "tanh"]

LEAST_GAP = 0.01  # λ − 1 with which a layer of initial λ = 1 starts: near λ = 1 itself, the softplus has slope 0
EXACT_FROM = 8.0  # The λ from which on the gradient of λ is computed without cancellation

SUPREMUM = 0.16997120747990369
"""The maximum of t·Φ(−t). Divided by λ, it is the largest distance between λ-GELU and ReLU."""

_SWISH_SUPREMUM = 0.27846454276107380

MATCHED = _SWISH_SUPREMUM / SUPREMUM
"""The factor κ = β/λ with which λ-Swish is as far from ReLU as λ-GELU."""

_LEAST = -40.0
"""s/t of λ = 1: softplus(−40) = 4·10⁻¹⁸ adds nothing to 1 in float64. It is finite, so that averages of weights are."""


class Hardness(nn.Module):
    """The activation G(κλx)/(κλ) with one learned λ = 1 + softplus(s/t) ≥ 1 for all elements of the layer.

    The parameter s, a 0-dim tensor, must not be decayed, and needs a rate of its own (``train.loop.make_optimizer``).

    Args:
        function: G, an elementwise function; it must be differentiable where λ is learned.
        supremum: the maximum of |G − ReLU|. The attribute is divided by κ: λ times the largest distance to ReLU.
        init: the initial λ ≥ 1. Values below 1 + ``LEAST_GAP`` are raised to that.
        temperature: t > 0; the smaller t is, the faster λ changes with s.
        scale: κ.
        gate: P, if the function is u·P(u).

    Raises:
        ValueError: if ``init`` < 1 or ``temperature`` ≤ 0.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        supremum: float,
        init: float = 1.0,
        temperature: float = 0.1,
        scale: float = 1.0,
        gate: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"the temperature must be positive, got {temperature}")
        self.function, self.gate, self.supremum = function, gate, supremum / scale
        self.temperature, self.scale = temperature, scale
        self.s = nn.Parameter(torch.empty(()))
        self.set_lam(1 + LEAST_GAP if 1 <= init < 1 + LEAST_GAP else init)

    @property
    def lam(self) -> Tensor:
        """λ = 1 + softplus(s/t), a 0-dim tensor that is differentiable with respect to ``s``."""
        # With its default threshold of 20, torch's softplus would have an error visible in float64.
        return F.softplus(self.s / self.temperature, threshold=40) + 1

    @torch.no_grad()
    def set_lam(self, value: float) -> None:
        """Set λ to a number of at least 1, else ValueError; at 1, where the softplus is flat, it cannot be learned."""
        if not 1 <= value < math.inf:
            raise ValueError(f"λ must be a finite number of at least 1, got {value}")
        gap = value - 1
        # The inverse of softplus, accurate for tiny and huge gaps.
        z = max(_LEAST, gap + math.log(-math.expm1(-gap))) if gap else _LEAST
        self.s.fill_(self.temperature * z)

    def form(self) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """Return G and κλ."""
        return self.function, self.lam * self.scale

    def compute(self, x: Tensor) -> Tensor:
        """Return the activation of a tensor of torch that is not in float16."""
        value, factor = self.form()
        if torch.onnx.is_in_onnx_export():
            # A file has λ as a number, not what it is computed from.
            return value(x * factor.item()) / factor.item()
        if self.gate is not None and self.s.requires_grad:
            asked = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
            if asked or factor.item() >= EXACT_FROM * self.scale:
                # No part of this form's derivative by λ cancels another.
                return x * self.gate(x * factor)
        return value(x * factor) / factor

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to each element of a tensor of any shape.

        A tensor subclass with a ``__torch_function__`` sees one call, as it does for torch's own activations.
        """
        if has_torch_function_unary(x):
            of_subclass: Tensor = handle_torch_function(Hardness.forward, (x,), self, x)
            return of_subclass
        if x.dtype == torch.float16:
            # κλx may overflow where x does not.
            return self.forward(x.float()).half()
        return self.compute(x)

    def freeze(self) -> None:
        """Stop the learning of λ: ``s`` requires no gradient any more, and only ``set_lam`` changes it."""
        self.s.requires_grad_(False)

    def __prepare_scriptable__(self) -> NoReturn:
        raise UnsupportedError("TorchScript cannot compile a λ-gate: use torch.compile, or put ReLU in its place first")

    def extra_repr(self) -> str:
        return f"lam={self.lam.item():.6g}, temperature={self.temperature}"


def _normal(u: Tensor) -> Tensor:
    return 0.5 * torch.special.erfc(u * -math.sqrt(0.5))


def _tanh_gate(u: Tensor) -> Tensor:
    return 0.5 + 0.5 * torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))


_GELU_TANH = partial(F.gelu, approximate="tanh")


class LambdaGELU(Hardness):
    """The activation x·Φ(λx) with one learned λ; arguments as those of ``Hardness``.

    ``approximate`` is ``"none"`` for the exact Φ, or ``"tanh"`` for GELU's usual approximation, else ValueError.
    """

    def __init__(self, init: float = 1.0, temperature: float = 0.1, approximate: Approximate = "none") -> None:
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
        exact = approximate == "none"
        function, supremum, gate = (F.gelu, SUPREMUM, _normal) if exact else (_GELU_TANH, 0.170041, _tanh_gate)
        super().__init__(function, supremum, init, temperature, gate=gate)
        self.approximate: Approximate = approximate

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, approximate={self.approximate!r}"


class LambdaSwish(Hardness):
    """The activation x·σ(κλx) with one learned λ; arguments as those of ``Hardness``, and κ = ``scale`` > 0.

    With κ = 1, λ = 1 is SiLU; with κ = 1.702, λ = 1 is the approximation of GELU by a sigmoid.
    """

    def __init__(self, init: float = 1.0, temperature: float = 0.1, scale: float = MATCHED) -> None:
        super().__init__(F.silu, _SWISH_SUPREMUM, init, temperature, scale, torch.sigmoid)


SIGMOID_GELU = 1.702
"""The factor c of x·σ(cx), an approximation of GELU (Hendrycks and Gimpel, arXiv 1606.08415)."""


@dataclass(frozen=True)
class Rectifier:
    """A smooth activation G = ``value`` that tends to ReLU when λ grows, by the name that users give it.

    ``gate`` makes the activation G(λx)/λ, with a λ slightly above 1 (``LEAST_GAP``). One that is ``hidden`` is made for
    hidden layers alone, and is hardened wherever it occurs. The others, such as Softplus, which also makes outputs
    positive, are hardened if the user names them.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    gate: Callable[[], Hardness]
    hidden: bool = True


def _sigmoid_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(SIGMOID_GELU * x)


RECTIFIERS = {
    each.name: each
    for each in (
        Rectifier("gelu", F.gelu, LambdaGELU),
        Rectifier("gelu-tanh", _GELU_TANH, partial(LambdaGELU, approximate="tanh")),
        Rectifier("gelu-sigmoid", _sigmoid_gelu, partial(LambdaSwish, scale=SIGMOID_GELU)),
        Rectifier("silu", F.silu, partial(LambdaSwish, scale=1.0)),
        Rectifier("mish", F.mish, partial(Hardness, F.mish, 0.308844)),
        Rectifier("hardswish", F.hardswish, partial(Hardness, F.hardswish, 0.375)),
        Rectifier("elu", F.elu, partial(Hardness, F.elu, 1.0), hidden=False),
        Rectifier("softplus", F.softplus, partial(Hardness, F.softplus, 0.693148), hidden=False),
    )
}
"""The activations by name."""

HIDDEN = tuple(name for name, each in RECTIFIERS.items() if each.hidden)
"""The names of the activations that are hardened unless the user says otherwise."""

FUNCTIONS: dict[Any, str] = {
    torch.ops.aten.gelu.default: "aten.gelu",
    torch.ops.aten.silu.default: "aten.silu",
    torch.ops.aten.mish.default: "aten.mish",
    torch.ops.aten.hardswish.default: "aten.hardswish",
    **{getattr(F, name): f"F.{name}" for name in ("gelu", "silu", "mish", "hardswish", "elu", "elu_", "softplus")},
}
"""The functions of torch that may compute a rectifier, with their names."""

MODULES = (nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.ELU, nn.CELU, nn.Softplus)
"""The modules of torch that may compute a rectifier."""

OTHERS = (nn.SELU, nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softsign, nn.Hardsigmoid, nn.Softmax, nn.MultiheadAttention)
"""Smooth modules of torch that ReLU cannot replace."""

_GRID = torch.linspace(-12, 12, 96, dtype=torch.float64, device="cpu").reshape(8, 12)
_CLOSE = 1e-6


def recognise(function: Callable[[Tensor], Any]) -> Rectifier | None:
    """Return the rectifier that a function of one tensor computes on a grid of 96 points from −12 to 12, or None.

    The function must compute the same values for the points in another order, and for each row of the grid alone.
    """
    order = torch.randperm(_GRID.numel(), generator=torch.Generator().manual_seed(0))
    mixed = _GRID.flatten()[order].reshape(_GRID.shape)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            values, again, *rows = (function(x.clone()) for x in (_GRID, mixed, *_GRID.split(1)))
            # Vectorised kernels round otherwise at the end of a tensor.
            apart = (torch.cat(rows) - values).abs().max(), (values.flatten()[order] - again.flatten()).abs().max()
            if values.shape != _GRID.shape or not max(apart) <= _CLOSE:
                return None
            for each in RECTIFIERS.values():
                if (values.double() - each.value(_GRID)).abs().max() <= _CLOSE:
                    return each
    except Exception:  # A function of the user may do anything with a tensor that it was not made for.
        return None
    return None


def recognise_module(module: nn.Module) -> Rectifier | None:
    """Return the rectifier that a module without parameters and buffers computes in both modes, or None."""
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return None
    if type(module).__module__.startswith("torch.nn.") and not isinstance(module, MODULES):
        return None
    try:
        copy = deepcopy(module)
    except Exception:  # Not every module can be copied.
        return None
    found = recognise(copy.eval())
    return found if found is None or recognise(copy.train()) is found else None
