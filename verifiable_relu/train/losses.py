"""The loss of a training step: plain, attacked or certified by bounds; and the augmentation of images."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import cache
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.arguments import imported
from verifiable_relu.bounds import Relaxation
from verifiable_relu.bounds.tuning import Bounds
from verifiable_relu.network import from_torch
from verifiable_relu.nn import LambdaSwish
from verifiable_relu.train.options import Options

SMALL_BOX = 0.4
"""The radius τ of SABR's box, as a fraction of ε."""


def objective(
    model: nn.Module, x: Tensor, y: Tensor, options: Options, fraction: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the loss of one batch, and the logits at the batch's points.

    The points are the images, or attacked images in their L∞ balls. The loss is (1 − w)·(``options.loss`` at the
    points) + w·(cross-entropy of the worst logits) + stability, with w = ``options.certified``. The worst logits
    (``worst_logits``) come, by ``options.certified_by``, from

    * ``ibp``: interval bounds over the ball (Gowal et al., arXiv 1810.12715);
    * ``crown-ibp``: their weighted mean with CROWN-IBP's linear bounds (Zhang et al., arXiv 1906.06316), whose weight
      falls from 1 to 0 as ε grows;
    * ``sabr``: interval bounds over a box of radius τ around a point that was attacked within ε − τ, so that the box
      lies in the ball (SABR, Müller et al., arXiv 2210.04871).

    Args:
        model: the network in training.
        x: images (batch, …) in [0, 1].
        y: (batch,), the true classes.
        options: the terms of the loss and their weights.
        fraction: the fraction of ε, and of the weights of the certified and the stability term, that counts in this
            step, in [0, 1].
        generator: the source of the attack's random start.

    Returns:
        The loss, and the logits (batch, classes) at the points.
    """
    eps, certified, stability = (weight * fraction for weight in (options.eps, options.certified, options.stability))
    small = SMALL_BOX * eps if certified and options.certified_by == "sabr" else 0.0
    point = x
    if options.attack_steps and eps > 0:
        point = attacked(model, x, y, eps - small, options.attack_steps, generator)
    # With w = 1 the loss is made of the worst logits alone, and the points' logits are only reported.
    with torch.set_grad_enabled(certified < 1):
        logits: Tensor = model(point)
        loss = own_loss(options.loss)(logits, y)
    if stability or (certified and not small):
        whole = bounded(model, ball(x, eps))
    if certified:
        bounds = bounded(model, ball(point, small)) if small else whole
        linear = 1 - fraction if options.certified_by == "crown-ibp" else 0.0
        loss = torch.lerp(loss, F.cross_entropy(worst_logits(bounds, y, linear), y), certified)
    if stability:
        loss = loss + stability * instability(whole.pre.values())
    return loss, logits


@cache
def own_loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a name: the function of a user that it names, or the cross-entropy."""
    found: Callable[[Tensor, Tensor], Tensor] = imported(name, "--loss") if ":" in name else F.cross_entropy
    return found


UNBOUNDED = (LambdaSwish, nn.SiLU)
"""The classes of smooth activations that losses bound as the ReLU which replaces them at the end."""


def ball(x: Tensor, eps: float) -> Bounds:
    """The L∞ balls of radius ``eps`` around the images x, clipped to [0, 1]."""
    return Bounds((x - eps).clamp_min(0), (x + eps).clamp_max(1))


def attacked(model: nn.Module, x: Tensor, y: Tensor, eps: float, steps: int, generator: torch.Generator) -> Tensor:
    """Images of high cross-entropy in the L∞ balls of radius ``eps`` around x, clipped to [0, 1].

    The images are found by projected gradient ascent from a uniform random start, with steps of 2.5·ε/steps along the
    gradient's sign (Madry et al., arXiv 1706.06083). The model's parameters get no gradient.

    Args:
        model: the classifier.
        x: images (batch, …) in [0, 1].
        y: (batch,), the true classes.
        eps: the radius of the balls.
        steps: the number of gradient steps.
        generator: the source of the random starts.
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
    """Interval bounds of all nodes of a model over boxes of images, differentiable in the weights and λ.

    The bounds are those of ``verifiable_relu.bounds``, for the activations in their present state. Activations of
    ``UNBOUNDED`` are bounded as the ReLU that replaces them at the end. Batch normalisations are bounded with their
    running means and variances, although a training step computes with those of the batch.

    Args:
        model: the network in training.
        box: the boxes, tensors shaped (batch, *input shape).

    Returns:
        The relaxation, advanced to the output. Its ``pre`` has the bounds of each activation's input.

    Raises:
        UnsupportedError: if the model has a layer or an activation without bounds.
    """
    # This is called for the same module at each step. The comparison with the module is made once, on export.
    network = from_torch(_with_bounded_activations(model), tuple(box.lower.shape[1:]), compared=False)
    relaxation = Relaxation(network, box)
    relaxation.advance(len(network.nodes) - 1)
    return relaxation


def _with_bounded_activations(model: nn.Module) -> nn.Module:
    """The model with ReLU in place of activations of ``UNBOUNDED``; the model itself if it has none of these."""
    replaced = {id(module): nn.ReLU() for module in model.modules() if isinstance(module, UNBOUNDED)}
    if not replaced:
        return model
    # deepcopy does not copy what its memo has: the copy shares the model's parameters, which thus get the gradients.
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return deepcopy(model, {**shared, **replaced})


def worst_logits(relaxation: Relaxation, y: Tensor, linear: float = 0.0) -> Tensor:
    """Upper bounds (batch, classes) of output k − output y over a relaxation's boxes, which are 0 for k = y.

    Each difference of outputs is one row, merged into the last affine map. The row is bounded by the intervals of that
    map's input (Gowal et al., arXiv 1810.12715, section 3.2), by linear bounds propagated back to the network's input
    over the intervals (CROWN-IBP, Zhang et al., arXiv 1906.06316, section 3), or by a weighted mean of both bounds.

    Args:
        relaxation: the relaxation of a network, advanced to the output (``bounded``).
        y: (batch,), the true classes.
        linear: β, the weight of the linear bounds, against 1 − β for the interval bounds. A weighted mean of sound
            bounds is sound.
    """
    last = len(relaxation.network.nodes) - 1
    one = torch.eye(relaxation.network.output_size).to(relaxation.box.lower)
    rows = (one[y].unsqueeze(1) - one).flatten(0, 1)
    lower = relaxation.by_intervals(rows, rounded=False)
    if linear != 0:
        lower = torch.lerp(lower, relaxation.lower(last, rows, rounded=False)[0], linear)
    return -lower.reshape(len(y), -1)


def instability(pre: Iterable[Bounds]) -> Tensor:
    """The mean of −tanh(1 + l·u) over all neurons, which is small where most intervals [l, u] do not contain zero.

    Source: Xiao et al., Training for Faster Adversarial Robustness Verification via Inducing ReLU Stability,
    arXiv 1809.03008. The paper takes the sum; with the mean, the term's weight does not depend on the network's size.

    Args:
        pre: the bounds l, u of each activation's input.
    """
    return -torch.cat([torch.tanh(1 + each.lower * each.upper).flatten() for each in pre]).mean()


def augment(images: Tensor, crop: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Images mirrored and cropped at random.

    Args:
        images: (n, channels, height, width).
        crop: the pixels of zero padding on each side of an image, from which a random part of the image's own size is
            cut; 0 crops nothing.
        flip: whether each image is mirrored left to right with probability ½.
        generator: the source of the random numbers.
    """
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
