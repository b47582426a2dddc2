"""The loss of a training step: plain, attacked or certified by bounds; and initial weights for certified training."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.train import losses
from verifiable_relu.train.options import Options


def objective(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    options: Options,
    of_eps: float,
    of_terms: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """The loss of one batch, and the logits at the batch's points.

    The points are the images, or attacked images in their L∞ balls. The loss is (1 − w)·(cross-entropy at the points)
    + w·(cross-entropy of the worst logits) + stability + L1, with w = ``options.certified``. The worst logits
    (``losses.worst_logits``) come, by ``options.certified_by``, from

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
        of_eps: the fraction of ε that counts in this step, in [0, 1].
        of_terms: the fraction of the weights of the certified and the stability term that counts, in [0, 1].
        generator: the source of the attack's random start.

    Returns:
        The loss, and the logits (batch, classes) at the points.
    """
    eps = options.eps * of_eps
    small = options.small_box * eps if options.certified and options.certified_by == "sabr" else 0.0
    certified, stability = (weight * of_terms * (eps > 0) for weight in (options.certified, options.stability))
    point = x
    if options.attack_steps and eps > 0:
        point = losses.attacked(model, x, y, eps - small, options.attack_steps, generator)
    # With w = 1 the loss is made of the worst logits alone, and the points' logits are only reported.
    with torch.set_grad_enabled(certified < 1):
        logits: Tensor = model(point)
        loss = F.cross_entropy(logits, y)
    if stability or (certified and not small):
        ball = losses.bounded(model, losses.ball(x, eps))
    if certified:
        bounds = losses.bounded(model, losses.ball(point, small)) if small else ball
        linear = 1 - of_eps if options.certified_by == "crown-ibp" else 0.0
        loss = torch.lerp(loss, F.cross_entropy(losses.worst_logits(bounds, y, linear), y), certified)
    if stability:
        loss = loss + stability * losses.instability(ball.pre.values())
    if options.l1:
        loss = loss + options.l1 * sum(p.abs().sum() for p in model.parameters() if p.ndim > 1)
    return loss, logits


def initialise(model: nn.Module) -> None:
    """Draw weights under which interval bounds neither grow nor shrink from layer to layer, from torch's generator.

    The weights of every matrix and kernel are normal with σ = √(2π)/(inputs of a neuron), and biases are 0. A radius r
    of a layer's inputs then becomes Σ|w|·r = 2r on average, and a ReLU that is active for half of its inputs leaves r
    of it. Source: Shi et al., Fast Certified Robust Training with Short Warmup, arXiv 2103.17245, section 3.1.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, std=math.sqrt(2 * math.pi) / module.weight[0].numel())
            if module.bias is not None:
                nn.init.zeros_(module.bias)
