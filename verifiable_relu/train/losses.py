"""The loss: cross-entropy at attacked points, and two terms that make the trained network easy to verify."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.nn import HardnessGate, Normalize


def attacked(model: nn.Module, x: Tensor, y: Tensor, eps: float, steps: int, generator: torch.Generator) -> Tensor:
    """Images of the L∞ ball of radius ``eps`` around x, clipped to [0, 1], with a high cross-entropy.

    Projected gradient ascent from a uniform random start with steps of 2.5·ε/steps along the gradient's sign
    (Madry et al., arXiv 1706.06083). The model's parameters get no gradient.
    """
    lb, ub = (x - eps).clamp_min(0), (x + eps).clamp_max(1)
    point = lb + (ub - lb) * torch.rand(x.shape, generator=generator)
    for _ in range(steps):
        point.requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(point), y), point)
        point = torch.clamp(point.detach() + 2.5 * eps / steps * gradient.sign(), lb, ub)
    return point.detach()


def intervals(model: nn.Sequential, lb: Tensor, ub: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Interval bounds of the network that ``model`` becomes: smooth activations are taken as ReLU.

    These are plain float bounds for a loss; nothing is proven by them.

    Returns:
        The (lower, upper) pre-activation bounds of each activation layer, and both bounds of the input of the last
        module, which is linear (so that differences of outputs can be bounded without loss).

    Raises:
        UnsupportedError: for a module other than Normalize, Linear, Conv2d, Flatten, λ-GELU and its rivals.
    """
    layers = []
    for module in list(model)[:-1]:
        if isinstance(module, nn.Linear | nn.Conv2d):
            middle, radius = module((lb + ub) / 2), (ub - lb) / 2
            if isinstance(module, nn.Linear):
                radius = F.linear(radius, module.weight.abs())
            else:
                radius = F.conv2d(radius, module.weight.abs(), None, module.stride, module.padding)
            lb, ub = middle - radius, middle + radius
        elif isinstance(module, HardnessGate | nn.GELU | nn.ReLU):
            layers.append((lb, ub))
            lb, ub = lb.relu(), ub.relu()
        elif isinstance(module, nn.PReLU):
            layers.append((lb, ub))
            # Of a function with one kink, at 0, the extremes lie at the ends or at 0, whatever the sign of the slope.
            corners = torch.stack([module(lb), module(ub), module(torch.zeros_like(lb).clamp(lb, ub))])
            lb, ub = corners.amin(0), corners.amax(0)
        elif isinstance(module, Normalize | nn.Flatten):
            lb, ub = module(lb), module(ub)
        else:
            raise UnsupportedError(f"no interval bounds for a module of type {type(module).__name__}")
    return layers, lb, ub


def worst_logits(last: nn.Linear, lb: Tensor, ub: Tensor, y: Tensor) -> Tensor:
    """For inputs of the linear layer ``last`` in [lb, ub], upper bounds (batch, classes) of output k − output y.

    The difference is bounded as one linear function; where k = y it is 0.
    """
    rows = last.weight - last.weight[y].unsqueeze(1)
    middle = torch.einsum("bkn,bn->bk", rows, (lb + ub) / 2) + last.bias - last.bias[y].unsqueeze(1)
    return middle + torch.einsum("bkn,bn->bk", rows.abs(), (ub - lb) / 2)


def instability(layers: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The mean of −tanh(1 + l·u) over all neurons: small where most intervals lie on one side of zero.

    Source: Xiao et al., Training for Faster Adversarial Robustness Verification via Inducing ReLU Stability,
    arXiv 1809.03008 (a sum there; a mean here, so that its weight does not depend on the network's size).
    """
    total = sum(torch.tanh(1 + lb * ub).sum() for lb, ub in layers)
    return -torch.as_tensor(total) / sum(lb.numel() for lb, _ in layers)
