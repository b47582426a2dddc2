"""The loss of a training step: plain, attacked or certified by bounds; and the augmentation of images."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.command_line import imported
from verifiable_relu.ir.interval import Interval
from verifiable_relu.nn import LambdaSwish
from verifiable_relu.train.options import Options

if TYPE_CHECKING:
    from verifiable_relu.bounds.backward import Relaxation

SMALL_BOX = 0.4  # The radius τ of SABR's box, as a fraction of ε


def objective(
    model: nn.Module, x: Tensor, y: Tensor, options: Options, fraction: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the loss of one batch of images x (batch, …) in [0, 1], and the logits (batch, classes) at its points.

    The points are the images, or attacked images in their L∞ balls. The loss is (1 − w)·(``options.loss`` at the
    points) + w·(cross-entropy of the worst logits) + stability, with w = ``options.certified``. ε and the weights of
    the last two terms count by ``fraction``, in [0, 1]. The worst logits come, by ``options.certified_by``, from

    * ``ibp``: interval bounds over the ball (Gowal et al., arXiv 1810.12715);
    * ``crown-ibp``: their weighted mean with CROWN-IBP's linear bounds (Zhang et al., arXiv 1906.06316), whose weight
      falls from 1 to 0 as ε grows;
    * ``sabr``: interval bounds over a box of radius τ around a point that was attacked within ε − τ, so that the box
      lies in the ball (SABR, Müller et al., arXiv 2210.04871).
    """
    eps, certified, stability = (weight * fraction for weight in (options.eps, options.certified, options.stability))
    small = SMALL_BOX * eps if certified and options.certified_by == "sabr" else 0.0
    point = x
    if options.attack_steps and eps > 0:
        point = attacked(model, x, y, eps - small, options.attack_steps, generator)
    # With w = 1 the loss is made of the worst logits alone, and the points' logits are only reported.
    with torch.set_grad_enabled(certified < 1):
        logits: Tensor = model(point)
        own = imported(options.loss, "--loss") if ":" in options.loss else F.cross_entropy
        loss: Tensor = own(logits, y)
    if stability or (certified and not small):
        whole = bounded(model, ball(x, eps))
    if certified:
        bounds = bounded(model, ball(point, small)) if small else whole
        linear = 1 - fraction if options.certified_by == "crown-ibp" else 0.0
        loss = torch.lerp(loss, F.cross_entropy(worst_logits(bounds, y, linear), y), certified)
    if stability:
        loss = loss + stability * instability(preactivations(whole))
    return loss, logits


UNBOUNDED = (LambdaSwish, nn.SiLU)  # Smooth activations that are bounded as the ReLU that replaces them at the end


def ball(x: Tensor, eps: float) -> Interval:
    """Return the L∞ balls of radius ``eps`` around the images x, clipped to [0, 1]."""
    return Interval((x - eps).clamp_min(0), (x + eps).clamp_max(1))


def attacked(model: nn.Module, x: Tensor, y: Tensor, eps: float, steps: int, generator: torch.Generator) -> Tensor:
    """Find images of high cross-entropy in the L∞ balls of radius ``eps`` around images x, clipped to [0, 1].

    Projected gradient ascent from a uniform random start, with steps of 2.5·ε/steps along the gradient's sign (Madry et
    al., arXiv 1706.06083). The model's parameters get no gradient.
    """
    lb, ub = (x - eps).clamp_min(0), (x + eps).clamp_max(1)
    point = lb + (ub - lb) * torch.rand(x.shape, generator=generator).to(x.device)
    for _ in range(steps):
        point.requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(point), y), point)
        point = torch.clamp(point.detach() + 2.5 * eps / steps * gradient.sign(), lb, ub)
    return point.detach()


def bounded(model: nn.Module, box: Interval) -> Relaxation:
    """Return interval bounds of all ops over boxes (batch, *input shape), differentiable in the weights and λ.

    Activations are bounded in their present state, but for those of ``UNBOUNDED``, and batch normalisations with their
    running means and variances, although a training step computes with those of the batch. Raises an UnsupportedError
    if the model has a layer or an activation without bounds.
    """
    # Imported here: a training without a term of bounds loads neither the bounds nor the reader of modules.
    from verifiable_relu.bounds.backward import Relaxation
    from verifiable_relu.readers import from_torch

    replaced = {id(module): nn.ReLU() for module in model.modules() if isinstance(module, UNBOUNDED)}
    if replaced:
        # deepcopy does not copy what its memo has: the copy shares the model's parameters, which get the gradients.
        shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        model = deepcopy(model, {**shared, **replaced})
    # This is called for the same module at each step. The comparison with the module is made once, on export.
    network = from_torch(model, tuple(box.lower.shape[1:]), compared=False)
    return Relaxation(network, Interval(box.lower.flatten(1), box.upper.flatten(1)), rounded=False).advance()


def preactivations(relaxation: Relaxation) -> list[Interval]:
    """Return the intervals of the inputs of all activations, (batch, n) each."""
    ops = relaxation.network.ops
    return [relaxation.bounds[ops[index].inputs[0]].interval for index in relaxation.network.activations]


def worst_logits(relaxation: Relaxation, y: Tensor, linear: float = 0.0) -> Tensor:
    """Return upper bounds (batch, classes) of output k − output y over a relaxation's boxes, which are 0 for k = y.

    Each difference of outputs is one row, merged into the last affine map. The row is bounded by the intervals of that
    map's input (Gowal et al., arXiv 1810.12715, section 3.2), by linear bounds propagated back to the network's input
    over the intervals (CROWN-IBP, Zhang et al., arXiv 1906.06316, section 3), or by a mean of both in which the linear
    bounds have the weight ``linear``.
    """
    from verifiable_relu.ir.network import Affine

    output, last = relaxation.network.ops[-1], len(relaxation.network.ops) - 1
    one = torch.eye(output.size).to(relaxation.bounds[0].point)
    rows = one[y].unsqueeze(1) - one
    lower = relaxation.lower(last, rows, until=output.inputs[0] if isinstance(output, Affine) else last).value
    if linear != 0:
        lower = torch.lerp(lower, relaxation.lower(last, rows).value, linear)
    return -lower.to(rows)


def instability(pre: Iterable[Interval]) -> Tensor:
    """Return the mean of −tanh(1 + l·u) over bounds l, u of all activations' inputs, small where most are stable.

    Source: Xiao et al., Training for Faster Adversarial Robustness Verification via Inducing ReLU Stability,
    arXiv 1809.03008. The paper takes the sum; with the mean, the term's weight does not depend on the network's size.
    """
    return -torch.cat([torch.tanh(1 + each.lower * each.upper).flatten() for each in pre]).mean()


def augment(images: Tensor, crop: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Mirror images (n, channels, height, width) with probability ½, and crop them after ``crop`` pixels of padding."""
    n, _, height, width = images.shape
    if flip:
        mirrored = (torch.rand(n, generator=generator) < 0.5).to(images.device)
        images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    if crop:
        padded = F.pad(images, (crop, crop, crop, crop)).permute(0, 2, 3, 1)
        top, left = torch.randint(0, 2 * crop + 1, (2, n), generator=generator)
        rows = top[:, None] + torch.arange(height)
        columns = left[:, None] + torch.arange(width)
        at = torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]
        cut = padded[tuple(index.to(images.device) for index in at)]
        images = cut.permute(0, 3, 1, 2).contiguous()
    return images
