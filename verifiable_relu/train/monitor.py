"""Measurements during a training, at equally spaced moments: activation patterns, unstable neurons, weights and λ."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from verifiable_relu.bounds import interval_bounds, unstable
from verifiable_relu.network import from_torch
from verifiable_relu.nn import HardnessGate, substitute_relu
from verifiable_relu.train.losses import ball
from verifiable_relu.train.options import ARMS

MOMENTS = 20
"""The number of equal parts into which the moments divide a training; the first moment is the training's beginning."""

PROBED = 200
"""The number of training images, the first ones, whose activation patterns are measured."""


class Monitor:
    """The measurements of one training.

    Args:
        images: the training images; the first ``PROBED`` are measured.
        eps: the radius for which unstable neurons are counted; 0 counts none.
        steps: the number of steps of the whole training.

    Attributes:
        points: a dict for each moment that has passed: ``step`` (the steps taken), ``part`` (the same as a fraction of
            all steps), ``oui`` (``overlap_index``), ``oui_batch`` (``balance_index`` of the last layer),
            ``patterns_changed`` (the fraction of neurons' states that changed since the moment before),
            ``weights_changed`` (the change of the weights since then, relative to their norm), ``lam`` (each layer's
            λ), and where ε > 0 ``unstable`` (``unstable_neurons``). Both
            changes are 0 at the first moment, and the states' is where the number of neurons is another than before.
    """

    def __init__(self, images: Tensor, eps: float, steps: int) -> None:
        self.images = images[:PROBED]
        self.eps = eps
        self.steps = steps
        self.moments = {-(-part * steps // MOMENTS) for part in range(MOMENTS + 1)}
        self.points: list[dict[str, Any]] = []
        self.patterns: list[Tensor] | None = None
        self.weights: Tensor | None = None

    def look(self, model: nn.Module, step: int) -> None:
        """Measure the model if ``step``, the number of steps taken, is a moment that has not been measured.

        A model that was measured is left in training mode.
        """
        if step not in self.moments or (self.points and self.points[-1]["step"] >= step):
            return
        model.eval()
        now = [active.cpu() for active in patterns(model, self.images)]
        weights = _weights(model).cpu()
        point = {
            "step": step,
            "part": step / self.steps,
            "oui": overlap_index(now),
            "oui_batch": balance_index(now[-1]),
            "patterns_changed": changed(self.patterns, now) if _alike(self.patterns, now) else 0.0,
            "weights_changed": 0.0 if self.weights is None else relative_change(self.weights, weights),
            "lam": [module.lam.item() for module in model.modules() if isinstance(module, HardnessGate)],
        }
        if self.eps:
            point["unstable"] = unstable_neurons(model, self.images, self.eps)
        self.points.append(point)
        self.patterns, self.weights = now, weights
        model.train()

    def state(self) -> dict[str, Any]:
        """The present state, for a checkpoint."""
        return {"points": self.points, "patterns": self.patterns, "weights": self.weights}

    def restore(self, state: dict[str, Any]) -> None:
        """Set the state to one that ``state`` returned."""
        self.points, self.patterns, self.weights = state["points"], state["patterns"], state["weights"]


def settled(points: list[dict[str, Any]], name: str, most: float = 0.9) -> float:
    """The fraction of a training after which the fraction ``most`` of all change has happened.

    The change is the length of a path: the sum of ``patterns_changed`` or ``weights_changed`` over the moments, so that
    a change that is undone counts twice. It is taken to grow linearly between two moments. If the change is uniform
    over the training, the result is ``most``; the earlier the change happens, the smaller the result.

    Args:
        points: the ``points`` of a ``Monitor``.
        name: ``patterns_changed`` or ``weights_changed``.
        most: the fraction of the change, in (0, 1].

    Returns:
        The fraction of the training, in [0, 1]; 0 if nothing ever changed.
    """
    path = list(accumulate(point[name] for point in points))
    for before, after, start, end in zip(path, path[1:], points, points[1:], strict=False):
        if after >= most * path[-1] > before:
            return float(start["part"] + (end["part"] - start["part"]) * (most * path[-1] - before) / (after - before))
    return 0.0


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


def balance_index(active: Tensor) -> float:
    """The overlap index (OUI) of one layer's activation patterns in its batch form, in [0, 1].

    With s_j of B images for which neuron j is active, it is the mean over neurons of min(s_j, B − s_j)/⌊B/2⌋: 0 if no
    neuron tells images apart, and 1 if each is active for half of them. Of a network, it is taken of the layer before
    the outputs (arXiv 2603.09950, in the form of its authors' code).

    Args:
        active: bool (images, neurons), of at least two images (``patterns``).
    """
    on = active.sum(0)
    return (torch.minimum(on, len(active) - on) / (len(active) // 2)).mean().item()


def _alike(before: list[Tensor] | None, now: list[Tensor]) -> TypeGuard[list[Tensor]]:
    return before is not None and [layer.shape for layer in before] == [layer.shape for layer in now]


def changed(before: list[Tensor], after: list[Tensor]) -> float:
    """The fraction of all neurons' states, over all images, in which two results of ``patterns`` differ."""
    flips = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    return flips / sum(a.numel() for a in before)


@torch.no_grad()
def relative_change(before: Tensor, after: Tensor) -> float:
    """The relative change ‖after − before‖/‖before‖ of a vector of weights."""
    return ((after - before).norm() / before.norm()).item()


def _weights(model: nn.Module) -> Tensor:
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
    network = from_torch(substitute_relu(model), tuple(images.shape[1:])).to(images.dtype)
    total = 0
    for x in images.split(100):
        values = interval_bounds(network, ball(x, eps))
        for index in network.activations:
            node = network.nodes[index]
            total += int(unstable(node, values[node.inputs[0]]).sum())
    return total / len(images)
