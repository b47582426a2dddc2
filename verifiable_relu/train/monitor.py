"""What is looked at while a network trains: its activation patterns, weights and λ at equally spaced moments."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from verifiable_relu.nn import HardnessGate
from verifiable_relu.train import patterns

MOMENTS = 20
"""Into how many equal parts the moments divide a training; the second lies at its tenth."""

PROBED = 200
"""Training images, the first, that the patterns are those of."""


class Monitor:
    """The looks at one training, from its beginning to its end.

    Args:
        images: of the training; the first ``PROBED`` are the probe batch.
        eps: radius at which unstable neurons are counted; 0 counts none.
        steps: of the whole training.

    Attributes:
        points: a dict for each moment: ``step`` (how many had been taken), ``part`` (of all steps), ``oui``
            (``patterns.overlap_index``), ``patterns_changed`` and ``weights_changed`` (since the moment before: the
            part of the neurons' states, and relative to the weights' norm; 0 at the first), ``lam`` (of each layer)
            and where ε > 0 ``unstable`` (``patterns.unstable_neurons``).
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
        """Add a point if a moment has come, ``step`` steps having been taken, and none is there of it.

        ``model`` is left in training mode.
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
        """What ``restore`` needs to go on from here."""
        return {"points": self.points, "patterns": self.patterns, "weights": self.weights}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a ``state``."""
        self.points, self.patterns, self.weights = state["points"], state["patterns"], state["weights"]


def settled(points: list[dict[str, Any]], name: str, most: float = 0.9) -> float:
    """The part of a training after which ``most`` of all change had been made.

    All change is the length of the path, Σ of ``patterns_changed`` or ``weights_changed`` over the moments: the way
    there and back counts as twice the way. Between two moments it is taken to grow evenly. Of a rate that never
    falls the result is ``most``; the earlier the change comes, the smaller it is.

    Args:
        points: of a ``Monitor``.
        name: of the change.
        most: in (0, 1].

    Returns:
        The part, in [0, 1]; 0 if nothing ever changed.
    """
    path = list(accumulate(point[name] for point in points))
    for before, after, start, end in zip(path, path[1:], points, points[1:], strict=False):
        if after >= most * path[-1] > before:
            return float(start["part"] + (end["part"] - start["part"]) * (most * path[-1] - before) / (after - before))
    return 0.0
