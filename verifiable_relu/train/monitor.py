"""Measurements during a training, at equally spaced moments: activation patterns, weights and λ."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from verifiable_relu.nn import HardnessGate
from verifiable_relu.train import patterns

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
            all steps), ``oui`` (``patterns.overlap_index``), ``patterns_changed`` (the fraction of neurons' states that
            changed since the moment before), ``weights_changed`` (the change of the weights since then, relative to
            their norm), ``lam`` (each layer's λ), and where ε > 0 ``unstable`` (``patterns.unstable_neurons``). Both
            changes are 0 at the first moment.
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
        now = [active.cpu() for active in patterns.patterns(model, self.images)]
        weights = patterns.weights(model).cpu()
        point = {
            "step": step,
            "part": step / self.steps,
            "oui": patterns.overlap_index(now),
            "patterns_changed": 0.0 if self.patterns is None else patterns.changed(self.patterns, now),
            "weights_changed": 0.0 if self.weights is None else patterns.relative_change(self.weights, weights),
            "lam": [module.lam.item() for module in model.modules() if isinstance(module, HardnessGate)],
        }
        if self.eps:
            point["unstable"] = patterns.unstable_neurons(model, self.images, self.eps)
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
