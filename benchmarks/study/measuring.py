"""Measurements of a study's trainings that the trainer does not make, during a training and of its network.

During a training, at equally spaced moments: activation patterns and their overlap index (OUI), unstable neurons, and
the movement of patterns and weights. Of the network: the change by the swap that is proven, and its accuracy once it is
compressed, by pruning or by static int8 quantisation.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verifiable_relu.bounds import interval_bounds, unstable
from verifiable_relu.data import Dataset
from verifiable_relu.hardening.proven import with_proof
from verifiable_relu.network import from_torch
from verifiable_relu.nn import HardnessGate, substitute_relu
from verifiable_relu.train.export import CALIBRATED, finish, measure_int8, quantize, written
from verifiable_relu.train.loop import Trained, TrainingStep, accuracy, build, measure_swap, train
from verifiable_relu.train.losses import ball
from verifiable_relu.train.options import ARMS, Arm, Options

# GELU that stays is an arm of studies alone: what verifies ReLU networks cannot verify it as well.
ARMS["gelu"] = Arm("GELU", swap="never")

MOMENTS = 20
"""The number of equal parts into which the moments divide a training; the first moment is the training's beginning."""

PROBED = 200
"""The number of training images, the first ones, whose activation patterns are measured."""

SPARSITIES = (0.5, 0.7, 0.9)
"""The fractions of the weights that are pruned."""


def train_and_measure(
    options: Options, training: Dataset, test: Dataset, checkpoint: Path
) -> tuple[Trained, nn.Module, dict[str, Any]]:
    """Train a network, resuming from its checkpoint if there is one, and make all measurements.

    Returns:
        The training, the network in the form in which it is exported, and the trainer's record
        (``train.export.finish``) with these further ``results``:

        * ``monitor``: ``Monitor.points``; ``patterns_settled`` and ``weights_settled``: see ``settled``;
        * ``proven_logit_change``: the proven bound of the change by the swap; None if there is none;
        * ``int8`` and ``int8_per_tensor``: ``Quantized`` on the test set, with a scale per channel or tensor;
        * ``pruned``: the accuracy on the test set by sparsity, for each of ``SPARSITIES``.

    Raises:
        Diverged: if the loss becomes infinite or NaN.
        InputError: for data or a checkpoint that cannot be used.
    """
    steps = options.epochs * -(-len(training) // options.batch)
    moments = checkpoint.with_suffix(".moments")
    if not checkpoint.is_file():
        moments.unlink(missing_ok=True)
    monitor = Monitor(torch.from_numpy(training.images), options.eps, steps, moments)
    monitor.look(build(options, training), 0)
    trained = train(options, training, checkpoint, monitor, test)
    hard, record = finish(trained, options, training, test)
    results, model = record["results"], trained.model.eval()
    results["monitor"] = monitor.points
    for name in ("patterns", "weights"):
        results[f"{name}_settled"] = settled(monitor.points, f"{name}_changed")
    shape, images, labels = test.images.shape[1:], torch.from_numpy(test.images), torch.from_numpy(test.labels)
    if ARMS[options.arm].swap == "end":
        effect = replace(measure_swap(model, hard, test), region=(0.0, 1.0))
        results["proven_logit_change"] = with_proof(effect, model, hard, shape, math.inf).proven
    network = written(hard, shape)
    for name, per_channel in (("int8", True), ("int8_per_tensor", False)):
        quantized = quantize(network, training.images[:CALIBRATED], per_channel)
        results[name] = asdict(measure_int8(hard, quantized, images, labels))
    results["pruned"] = {str(sparsity): accuracy(prune(hard, sparsity), images, labels) for sparsity in SPARSITIES}
    return trained, hard, record


class Monitor:
    """The measurements of one training at ``MOMENTS`` + 1 moments; a callback of ``train``.

    Args:
        images: the training images; the first ``PROBED`` are measured.
        eps: the radius for which unstable neurons are counted; 0 counts none.
        steps: the number of steps of the whole training.
        saved: the file that keeps the measurements for a training that is interrupted and resumed.

    Attributes:
        points: a dict for each moment that has passed: ``step`` (the steps taken), ``part`` (the same as a fraction of
            all steps), ``oui`` (``overlap_index``), ``oui_batch`` (``balance_index`` of the last layer),
            ``patterns_changed`` (the fraction of neurons' states that changed since the moment before),
            ``weights_changed`` (the change of the weights since then, relative to their norm), ``lam`` (each layer's
            λ), and where ε > 0 ``unstable`` (``unstable_neurons``). Both changes are 0 at the first moment.
    """

    def __init__(self, images: Tensor, eps: float, steps: int, saved: Path | None = None) -> None:
        self.images, self.eps, self.steps, self.saved = images[:PROBED], eps, steps, saved
        self.moments = {-(-part * steps // MOMENTS) for part in range(MOMENTS + 1)}
        self.points: list[dict[str, Any]] = []
        self.patterns: list[Tensor] = []
        self.weights = torch.zeros(0)
        if saved is not None and saved.is_file():
            self.points, self.patterns, self.weights = torch.load(saved, weights_only=True)

    def __call__(self, state: TrainingStep) -> None:
        self.look(state.model, state.step)

    def look(self, model: nn.Module, step: int) -> None:
        """Measure the model if ``step``, the number of steps taken, is a moment that has not been measured.

        A model that was measured is left in training mode.
        """
        if step not in self.moments or (self.points and self.points[-1]["step"] >= step):
            return
        model.eval()
        now = [active.cpu() for active in patterns(model, self.images)]
        weights = torch.cat([p.detach().flatten() for p in model.parameters() if p.ndim > 1]).cpu()
        alike = [each.shape for each in self.patterns] == [each.shape for each in now]
        point = {
            "step": step,
            "part": step / self.steps,
            "oui": overlap_index(now),
            "oui_batch": balance_index(now[-1]),
            "patterns_changed": changed(self.patterns, now) if self.points and alike else 0.0,
            "weights_changed": relative_change(self.weights, weights) if self.points else 0.0,
            "lam": [module.lam.item() for module in model.modules() if isinstance(module, HardnessGate)],
        }
        if self.eps:
            point["unstable"] = unstable_neurons(model, self.images, self.eps)
        self.points.append(point)
        self.patterns, self.weights = now, weights
        if self.saved is not None:
            torch.save((self.points, now, weights), self.saved)
        model.train()


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
    *(getattr(nn, arm.activation) for arm in ARMS.values() if not arm.anneals),
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


@torch.no_grad()
def prune(model: nn.Module, sparsity: float) -> nn.Module:
    """A copy of a model in which the weights of least magnitude are 0; nothing is retrained.

    Args:
        model: any module. Its matrices and kernels are pruned together; parameters with fewer than two axes (biases, λ,
            the slopes of PReLU) are kept.
        sparsity: the fraction of the weights that become 0, in [0, 1], rounded to a whole number of weights.
    """
    copy = deepcopy(model)
    kernels = [parameter for parameter in copy.parameters() if parameter.ndim > 1]
    order = torch.cat([kernel.abs().flatten() for kernel in kernels]).argsort(stable=True)
    kept = torch.ones(len(order), dtype=torch.bool)
    kept[order[: round(sparsity * len(order))]] = False
    for kernel, mask in zip(kernels, kept.split([kernel.numel() for kernel in kernels]), strict=True):
        kernel.masked_fill_(~mask.view_as(kernel), 0)
    return copy
