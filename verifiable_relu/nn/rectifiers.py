"""The smooth activations that λ can harden to ReLU: G with G(λx)/λ → ReLU(x) as λ grows.

|G(λx)/λ − ReLU(x)| is at most max |G − ReLU|/λ (``Hardness.supremum``). A module or function is
recognised by what it computes, not by its name: it is one of ``RECTIFIERS`` if it computes that activation's values on
a grid of points. So the many spellings of GELU, such as those of Hugging Face's ``transformers``, are known at once.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.nn.gates import Hardness, LambdaGELU, LambdaSwish, Sharpened

SIGMOID_GELU = 1.702
"""The factor c of x·σ(cx), an approximation of GELU (Hendrycks and Gimpel, arXiv 1606.08415)."""


@dataclass(frozen=True)
class Rectifier:
    """A smooth activation that tends to ReLU when λ grows.

    Attributes:
        name: how the user names the activation.
        value: G.
        gate: makes the activation G(λx)/λ, with a λ slightly above 1 (``gates.LEAST_GAP``).
        hidden: True if the activation is made for hidden layers alone, and is hardened wherever it occurs. The others,
            such as Softplus, which also makes outputs positive, are hardened if the user names them.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    gate: Callable[[], Hardness]
    hidden: bool = True


def _sigmoid_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(SIGMOID_GELU * x)


_GELU_TANH = partial(F.gelu, approximate="tanh")

RECTIFIERS = {
    each.name: each
    for each in (
        Rectifier("gelu", F.gelu, LambdaGELU),
        Rectifier("gelu-tanh", _GELU_TANH, partial(LambdaGELU, approximate="tanh")),
        Rectifier("gelu-sigmoid", _sigmoid_gelu, partial(LambdaSwish, scale=SIGMOID_GELU)),
        Rectifier("silu", F.silu, partial(LambdaSwish, scale=1.0)),
        Rectifier("mish", F.mish, partial(Sharpened, F.mish, 0.308844)),
        Rectifier("hardswish", F.hardswish, partial(Sharpened, F.hardswish, 0.375)),
        Rectifier("elu", F.elu, partial(Sharpened, F.elu, 1.0), hidden=False),
        Rectifier("softplus", F.softplus, partial(Sharpened, F.softplus, 0.693148), hidden=False),
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
