"""What losses are made of: attacks, and differentiable bounds of the network as it is being trained."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.bounds import Relaxation
from verifiable_relu.bounds.types import Bounds
from verifiable_relu.network import from_torch
from verifiable_relu.nn import LambdaSwish


def ball(x: Tensor, eps: float) -> Bounds:
    """The L∞ ball of radius ``eps`` around each of the images x, clipped to [0, 1]."""
    return Bounds((x - eps).clamp_min(0), (x + eps).clamp_max(1))


def attacked(model: nn.Module, x: Tensor, y: Tensor, eps: float, steps: int, generator: torch.Generator) -> Tensor:
    """Images of the L∞ ball of radius ``eps`` around x, clipped to [0, 1], with a high cross-entropy.

    Projected gradient ascent from a uniform random start with steps of 2.5·ε/steps along the gradient's sign
    (Madry et al., arXiv 1706.06083). The model's parameters get no gradient.
    """
    within = ball(x, eps)
    lb, ub = within.lower, within.upper
    point = lb + (ub - lb) * torch.rand(x.shape, generator=generator).to(x.device)
    for _ in range(steps):
        point.requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(point), y), point)
        point = torch.clamp(point.detach() + 2.5 * eps / steps * gradient.sign(), lb, ub)
    return point.detach()


def bounded(model: nn.Module, box: Bounds) -> Relaxation:
    """Interval bounds of all that ``model`` computes of the images in ``box``, differentiable in weights and λ.

    They are the project's own (``bounds``), of the activations as they are at this moment of the training; for
    λ-Swish, which has none, of the ReLU network that it is to become. Batch normalisations are bounded with their
    running means and variances, also where the training step itself takes those of the batch.

    Returns:
        The relaxation, advanced to the output. ``pre`` holds each activation's input.

    Raises:
        UnsupportedError: if the model has a layer or an activation without bounds.
    """
    # At each step, this is asked of the same module; what is exported in the end is compared.
    network = from_torch(_with_relu_for_swish(model), tuple(box.lower.shape[1:]), compared=False)
    relaxation = Relaxation(network, box)
    relaxation.advance(len(network.nodes) - 1)
    return relaxation


def _with_relu_for_swish(model: nn.Module) -> nn.Module:
    replaced = {id(module): nn.ReLU() for module in model.modules() if isinstance(module, LambdaSwish)}
    if not replaced:
        return model
    # What the memo holds is not copied: the parameters stay the model's own, and get its gradients.
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return deepcopy(model, {**shared, **replaced})


def worst_logits(relaxation: Relaxation, y: Tensor, linear: float = 0.0) -> Tensor:
    """Upper bounds (batch, classes) of output k − output y over a relaxation's boxes; 0 where k = y.

    Each difference is bounded as one row, merged into the last affine map: by the intervals before that map
    (Gowal et al., arXiv 1810.12715, section 3.2), or by the linear bounds that follow from the intervals, all the way
    back to the input (CROWN-IBP, Zhang et al., arXiv 1906.06316, section 3), or both.

    Args:
        relaxation: advanced to the output (``bounded``).
        y: (batch,) the right classes.
        linear: β, the weight of the linear bounds beside 1 − β for the intervals: an average of sound bounds.
    """
    last = len(relaxation.network.nodes) - 1
    one = torch.eye(relaxation.network.output_size).to(relaxation.box.lower)
    rows = (one[y].unsqueeze(1) - one).flatten(0, 1)
    lower = relaxation.by_intervals(rows, rounded=False)
    if linear != 0:
        lower = torch.lerp(lower, relaxation.lower(last, rows, rounded=False)[0], linear)
    return -lower.reshape(len(y), -1)


def instability(pre: Iterable[Bounds]) -> Tensor:
    """The mean of −tanh(1 + l·u) over all neurons: small where most intervals lie on one side of zero.

    Source: Xiao et al., Training for Faster Adversarial Robustness Verification via Inducing ReLU Stability,
    arXiv 1809.03008 (a sum there; a mean here, so that its weight does not depend on the network's size).

    Args:
        pre: bounds of each activation's input.
    """
    return -torch.cat([torch.tanh(1 + each.lower * each.upper).flatten() for each in pre]).mean()
