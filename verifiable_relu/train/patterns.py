"""Activation patterns on a batch of images: their diversity, their change during training, and unstable neurons."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verifiable_relu.bounds import interval_bounds, unstable
from verifiable_relu.network import from_torch
from verifiable_relu.nn import HardnessGate, substitute_relu
from verifiable_relu.train.arms import ARMS
from verifiable_relu.train.losses import ball

ACTIVATIONS: tuple[type[nn.Module], ...] = (
    HardnessGate,
    nn.ReLU,
    *(getattr(nn, arm.activation) for arm in ARMS.values() if arm.hardness == "none"),
)
"""The classes of the activations that arms train, and of ReLU, which replaces them."""


@torch.no_grad()
def patterns(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The active neurons of each activation layer: those with a positive pre-activation.

    Args:
        model: a model whose activations are modules of ``ACTIVATIONS``.
        images: (images, …).

    Returns:
        A bool tensor (images, neurons) for each layer, in the order in which the model computes the layers.
    """
    found: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].flatten(1) > 0))
        for module in model.modules()
        if isinstance(module, ACTIVATIONS)
    ]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def overlap_index(layers: list[Tensor]) -> float:
    """The overlap index (OUI) of activation patterns, in [0, 1].

    The index is the mean, over layers and pairs of images, of min(H, ⌊N/2⌋)/⌊N/2⌋, where H is the Hamming distance of
    the two images' patterns in a layer of N neurons. It is 0 if all images have the same pattern, and 1 if any two
    images' patterns differ in half of each layer's neurons or more. For a layer of one neuron, ⌊N/2⌋ is taken as 1.

    Args:
        layers: for each layer a bool tensor (images, N), of at least two images (``patterns``).
    """
    indices = []
    for active in layers:
        on = active.double()
        distance = on @ (1 - on).T + (1 - on) @ on.T
        half = max(1, active.shape[1] // 2)
        first, second = torch.triu_indices(len(on), len(on), 1)
        indices.append((distance[first, second].clamp(max=half) / half).mean().item())
    return sum(indices) / len(indices)


def changed(before: list[Tensor], after: list[Tensor]) -> float:
    """The fraction of all neurons' states, over all images, in which two results of ``patterns`` differ."""
    flips = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    return flips / sum(a.numel() for a in before)


@torch.no_grad()
def relative_change(before: Tensor, after: Tensor) -> float:
    """The relative change ‖after − before‖/‖before‖ of a vector of weights."""
    return ((after - before).norm() / before.norm()).item()


def weights(model: nn.Module) -> Tensor:
    """A copy of all matrices and kernels of a model as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters() if parameter.ndim > 1])


@torch.no_grad()
def unstable_neurons(model: nn.Module, images: Tensor, eps: float) -> float:
    """The mean number per image of neurons that are unstable in the image's L∞ ball by interval bounds.

    The neurons are those of the network that is exported, with ReLU in place of smooth activations.

    Args:
        model: the model.
        images: (n, …) in [0, 1].
        eps: the radius of the balls, which are clipped to [0, 1].
    """
    network = from_torch(substitute_relu(model), tuple(images.shape[1:]))
    total = 0
    for x in images.split(100):
        values = interval_bounds(network, ball(x, eps))
        for index in network.activations:
            node = network.nodes[index]
            total += int(unstable(node, values[node.inputs[0]]).sum())
    return total / len(images)
