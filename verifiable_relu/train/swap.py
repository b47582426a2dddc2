"""The effect of replacing smooth activations by ReLU on a network's outputs: measured on data, and bounded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verifiable_relu.bounds.change import substitution_change
from verifiable_relu.bounds.tuning import Bounds
from verifiable_relu.errors import InputError
from verifiable_relu.network import from_torch


@dataclass(frozen=True)
class Swap:
    """The effect of a replacement by ReLU.

    Attributes:
        epoch: the number of epochs trained before the replacement.
        images: the number of images on which the effect was measured.
        clean_before: the accuracy of the smooth network, in [0, 1].
        clean_after: the accuracy of the ReLU network, in [0, 1].
        mean_change: the mean of |ReLU network's logit − smooth network's logit| over images and classes.
        worst_change: the maximum of the same over images and classes.
        flipped: the number of images for which the two networks predict different classes.
        proven_change: an upper bound of the change of any logit over all images of [0, 1]ⁿ; NaN for activations without
            such a bound (λ-Swish).
    """

    epoch: int
    images: int
    clean_before: float
    clean_after: float
    mean_change: float
    worst_change: float
    flipped: int
    proven_change: float


@torch.no_grad()
def measure(smooth: nn.Module, hard: nn.Module, images: Tensor, labels: Tensor, epoch: int) -> Swap:
    """Compare a smooth network with its ReLU network.

    Args:
        smooth: the network with smooth activations.
        hard: the same network with ReLU in their place.
        images: (n, …), the images on which the networks are compared.
        labels: (n,), the true classes of ``images``.
        epoch: the number of epochs trained.
    """
    before, after = (torch.cat([model(x) for x in images.split(1000)]) for model in (smooth, hard))
    change = (after.double() - before.double()).abs()
    was, now = before.argmax(1), after.argmax(1)
    return Swap(
        epoch=epoch,
        images=len(images),
        clean_before=int((was == labels).sum()) / len(labels),
        clean_after=int((now == labels).sum()) / len(labels),
        mean_change=change.mean().item(),
        worst_change=change.max().item(),
        flipped=int((was != now).sum()),
        proven_change=proven_change(smooth, tuple(images.shape[1:])),
    )


def proven_change(smooth: nn.Module, input_shape: tuple[int, ...]) -> float:
    """An upper bound of the change of any logit over all images in [0, 1]ⁿ (``bounds.change.substitution_change``).

    The result is NaN if the network has an activation without such a bound.
    """
    zeros = torch.zeros(1, *input_shape, dtype=torch.float64)
    try:
        network = from_torch(smooth, input_shape).to(torch.float64)
        found = substitution_change(network, Bounds(zeros, zeros + 1))
    except InputError:
        return math.nan
    return torch.maximum(-found.lower, found.upper).max().item()
