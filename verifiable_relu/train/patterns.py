"""Activation patterns on a fixed batch of images: how varied they are, and how fast they settle."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verifiable_relu.nn import HardnessGate

ACTIVATIONS = (HardnessGate, nn.GELU, nn.ReLU, nn.PReLU)


@torch.no_grad()
def patterns(model: nn.Sequential, images: Tensor) -> list[Tensor]:
    """For each activation layer which neurons are active, bool (images, neurons): whose pre-activation is positive."""
    found = []
    x = images
    for module in model:
        if isinstance(module, ACTIVATIONS):
            found.append(x.flatten(1) > 0)
        x = module(x)
    return found


def overlap_index(layers: list[Tensor]) -> float:
    """OUI: the mean over layers and pairs of images of min(H, ⌊N/2⌋)/⌊N/2⌋, H the Hamming distance of their patterns.

    It is 0 where all images have the same pattern and 1 where any two differ in half of a layer's N neurons or more.

    Args:
        layers: bool (images, N), at least two images and N ≥ 2 in each.
    """
    indices = []
    for active in layers:
        on = active.double()
        distance = on @ (1 - on).T + (1 - on) @ on.T
        half = active.shape[1] // 2
        first, second = torch.triu_indices(len(on), len(on), 1)
        indices.append((distance[first, second].clamp(max=half) / half).mean().item())
    return sum(indices) / len(indices)


def changed(before: list[Tensor], after: list[Tensor]) -> float:
    """The part of all neurons, over the images, whose state is another."""
    flips = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    return flips / sum(a.numel() for a in before)


@torch.no_grad()
def relative_change(before: Tensor, after: Tensor) -> float:
    """‖after − before‖/‖before‖ of two vectors of weights."""
    return ((after - before).norm() / before.norm()).item()


def weights(model: nn.Module) -> Tensor:
    """A copy of all matrices and kernels as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters() if parameter.ndim > 1])
