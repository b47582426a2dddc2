"""Measurements of a study's trainings that the trainer does not make, during a training and of its network.

During a training, at equally spaced moments: activation patterns and their overlap index (OUI), and the movement of
patterns and weights. Of the network: the change by the swap that is proven, and its accuracy once it is
compressed, by pruning or by static int8 quantisation.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verifiable_relu.data import Dataset
from verifiable_relu.hardening.loop import with_proof
from verifiable_relu.nn import Hardness
from verifiable_relu.train.export import CALIBRATED, finish, measure_int8, quantize, written
from verifiable_relu.train.loop import Training, TrainingStep, accuracy, build, measure_swap, train
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
) -> tuple[Training, nn.Module, dict[str, Any]]:
    """Train a network, resuming from its checkpoint if there is one, and make all measurements.

    Returns:
        The training, the network that is exported, and the trainer's record (``train.export.finish``) with further
        ``results``: ``monitor`` (``Monitor.points``); ``patterns_settled`` and ``weights_settled``;
        ``proven_logit_change``, the proven bound of the change by the swap or None; ``int8`` (``measure_int8``); and
        ``pruned``, the accuracy on the test set by sparsity.
    """
    steps = options.epochs * -(-len(training) // options.batch)
    moments = checkpoint.with_suffix(".moments")
    if not checkpoint.is_file():
        moments.unlink(missing_ok=True)
    monitor = Monitor(torch.from_numpy(training.images), steps, moments)
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
    quantized = quantize(network, training.images[:CALIBRATED])
    results["int8"] = measure_int8(hard, quantized, images, labels)
    results["pruned"] = {str(sparsity): accuracy(prune(hard, sparsity), images, labels) for sparsity in SPARSITIES}
    return trained, hard, record


class Monitor:
    """The measurements of one training at ``MOMENTS`` + 1 moments; a callback of ``train``.

    Args:
        images: the training images; the first ``PROBED`` are measured.
        steps: the number of steps of the whole training.
        saved: the file that keeps the measurements for a training that is interrupted and resumed.

    Attributes:
        points: a dict for each moment that has passed: ``step`` (the steps taken), ``part`` (the same as a fraction of
            all steps), ``oui`` (``overlap_index``), ``oui_batch`` (``balance_index`` of the last layer),
            ``patterns_changed`` (the fraction of neurons' states that changed since the moment before) and
            ``weights_changed`` (the change of the weights since then, relative to their norm), both 0 at first.
    """

    def __init__(self, images: Tensor, steps: int, saved: Path | None = None) -> None:
        self.images, self.steps, self.saved = images[:PROBED], steps, saved
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
        }
        self.points.append(point)
        self.patterns, self.weights = now, weights
        if self.saved is not None:
            torch.save((self.points, now, weights), self.saved)
        model.train()


def settled(points: list[dict[str, Any]], name: str, most: float = 0.9) -> float:
    """Return the fraction of a training after which the fraction ``most`` of all change has happened.

    The change is the length of a path: the sum of a measurement over the moments (``patterns_changed`` or
    ``weights_changed``), so that a change that is undone counts twice. It grows linearly between two moments; the
    result is 0 if nothing ever changed.
    """
    path = list(accumulate(point[name] for point in points))
    for before, after, start, end in zip(path, path[1:], points, points[1:], strict=False):
        if after >= most * path[-1] > before:
            return float(start["part"] + (end["part"] - start["part"]) * (most * path[-1] - before) / (after - before))
    return 0.0


ACTIVATIONS: tuple[type[nn.Module], ...] = (
    Hardness,
    nn.ReLU,
    *(getattr(nn, arm.activation) for arm in ARMS.values() if not arm.anneals),
)
"""The classes of the activations that arms train, and of ReLU, which replaces them."""


@torch.no_grad()
def patterns(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return the active neurons of each activation layer of ``ACTIVATIONS``: those with a positive pre-activation.

    The result is a bool tensor (images, neurons) for each layer, in the order in which the model computes them.
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
    """Return the overlap index (OUI) of activation patterns of at least two images, in [0, 1].

    It is the mean, over layers and pairs of images, of min(H, ⌊N/2⌋)/⌊N/2⌋, where H is the Hamming distance of the two
    images' patterns in a layer of N neurons. For a layer of one neuron, ⌊N/2⌋ is taken as 1.
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
    """Return the overlap index (OUI) of one layer's activation patterns in its batch form, in [0, 1].

    With s_j of B ≥ 2 images for which neuron j is active, it is the mean over neurons of min(s_j, B − s_j)/⌊B/2⌋. Of a
    network, it is taken of the layer before the outputs (arXiv 2603.09950, in the form of its authors' code).
    """
    on = active.sum(0)
    return (torch.minimum(on, len(active) - on) / (len(active) // 2)).mean().item()


def changed(before: list[Tensor], after: list[Tensor]) -> float:
    """Return the fraction of all neurons' states, over all images, in which two results of ``patterns`` differ."""
    flips = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    return flips / sum(a.numel() for a in before)


@torch.no_grad()
def relative_change(before: Tensor, after: Tensor) -> float:
    """Return ‖after − before‖/‖before‖."""
    return ((after - before).norm() / before.norm()).item()


@torch.no_grad()
def prune(model: nn.Module, sparsity: float) -> nn.Module:
    """Copy a model with the given fraction of its weights, those of least magnitude, set to 0; nothing is retrained.

    Matrices and kernels are pruned together; parameters with fewer than two axes (biases, λ, slopes of PReLU) are kept.
    """
    copy = deepcopy(model)
    kernels = [parameter for parameter in copy.parameters() if parameter.ndim > 1]
    order = torch.cat([kernel.abs().flatten() for kernel in kernels]).argsort(stable=True)
    kept = torch.ones(len(order), dtype=torch.bool)
    kept[order[: round(sparsity * len(order))]] = False
    for kernel, mask in zip(kernels, kept.split([kernel.numel() for kernel in kernels]), strict=True):
        kernel.masked_fill_(~mask.view_as(kernel), 0)
    return copy
