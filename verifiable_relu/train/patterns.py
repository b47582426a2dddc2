"""Activation patterns on a batch of images: how varied they are, how fast they change, and which can be turned."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verifiable_relu.bounds import Bounds, interval_bounds, unstable
from verifiable_relu.network import from_torch
from verifiable_relu.nn import HardnessGate, substitute_relu
from verifiable_relu.train.arms import ARMS

ACTIVATIONS: tuple[type[nn.Module], ...] = (
    HardnessGate,
    nn.ReLU,
    *(getattr(nn, arm.activation) for arm in ARMS.values() if arm.hardness == "none"),
)
"""What is trained in any arm, and what takes its place."""


@torch.no_grad()
def patterns(model: nn.Module, images: Tensor) -> list[Tensor]:
    """For each activation layer which neurons are active, bool (images, neurons): whose pre-activation is positive.

    Args:
        model: whose activations are modules; its layers come in the order in which it computes them.
        images: (images, …).
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
    """OUI: the mean over layers and pairs of images of min(H, ⌊N/2⌋)/⌊N/2⌋, H the Hamming distance of their patterns.

    It is 0 where all images have the same pattern and 1 where any two differ in half of a layer's N neurons or more.
    Of a single neuron, ⌊N/2⌋ is taken as 1.

    Args:
        layers: bool (images, N), of at least two images.
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


@torch.no_grad()
def unstable_neurons(model: nn.Module, images: Tensor, eps: float) -> float:
    """Mean number per image of neurons whose pre-activation has both signs in the ball of radius ``eps``.

    As far as interval bounds can tell, and in the network that ``model`` becomes: of ReLU for smooth activations.
    """
    network = from_torch(substitute_relu(model), tuple(images.shape[1:]))
    total = 0
    for x in images.split(100):
        values = interval_bounds(network, Bounds((x - eps).clamp_min(0), (x + eps).clamp_max(1)))
        for index in network.activations:
            node = network.nodes[index]
            total += int(unstable(node, values[node.inputs[0]]).sum())
    return total / len(images)
