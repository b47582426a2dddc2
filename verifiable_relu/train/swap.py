"""What the replacement of smooth activations by ReLU does to a network: measured over data, and proven."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verifiable_relu.bounds.change import substitution_change
from verifiable_relu.bounds.types import Bounds
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network import from_torch


@dataclass(frozen=True)
class Swap:
    """The measured disruption.

    Attributes:
        epoch: how many epochs had been trained.
        images: how many images it was measured over.
        clean_before, clean_after: accuracy, as parts of 1, of the smooth network and of the ReLU network.
        mean_change: mean of |logit of the ReLU network − logit of the smooth one| over images and classes.
        worst_change: the largest of these.
        flipped: images whose predicted class differs.
        proven_change: no logit changes by more for any image of [0, 1]ⁿ; NaN where nothing is proven (λ-Swish).
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
    """Compare ``smooth`` with ``hard`` over ``images`` (n, …) of right classes ``labels`` (n,)."""
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
    """The bound of ``bounds.substitution_change`` over all images in [0, 1]ⁿ; NaN for activations unknown to it."""
    try:
        network = from_torch(smooth, input_shape).to(torch.float64)
    except UnsupportedError:
        return math.nan
    zeros = torch.zeros(1, *input_shape, dtype=torch.float64)
    found = substitution_change(network, Bounds(zeros, zeros + 1))
    return torch.maximum(-found.lower, found.upper).max().item()
