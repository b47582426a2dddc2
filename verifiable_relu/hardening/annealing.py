"""The two halves of hardening, for training loops of the user's own: λ-gates in a model, and their growing λ."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from verifiable_relu.errors import InputError
from verifiable_relu.nn.activation import SUPREMUM
from verifiable_relu.nn.hardness import Hardness
from verifiable_relu.nn.places import Place, replace_smooth
from verifiable_relu.nn.rectifiers import HIDDEN, Rectifier
from verifiable_relu.train.options import Schedule
from verifiable_relu.train.schedule import hardness

LARGEST = 1e6
"""The largest target of λ; G(λx) in float32 is no better than ReLU beyond."""

SCHEDULES: tuple[Schedule, ...] = ("linear", "log", "inverse")
"""The names of the schedules: λ grows linearly in λ, in log λ or in 1/λ (``train.schedule.hardness``)."""


def soften(model: nn.Module, activations: Sequence[str] = HIDDEN) -> tuple[nn.Module, list[Place]]:
    """Put a λ-gate with λ = 1 in the place of each smooth activation, in place; the model still computes the same.

    Gates that the model has already keep their λ. No λ is learned: ``Annealing`` sets it.

    Args:
        model: the model.
        activations: the names of the activations to harden (``nn.rectifiers.RECTIFIERS``).

    Returns:
        The model, and its smooth activations with what became of them.

    Raises:
        InputError: if the model has no activation to harden.
        UnsupportedError: as ``nn.places.replace_smooth``.
    """
    softened, places = replace_smooth(model, _gate, activations)
    if not any(place.became for place in places):
        found = f"; found were {', '.join(map(str, places))}" if places else ""
        raise InputError(f"the model has no activation to harden ({', '.join(activations)}){found}")
    return softened, places


def _gate(found: Rectifier | Hardness) -> Hardness:
    if isinstance(found, Rectifier):
        gate = found.gate()
        gate.set_lam(1.0)
    else:
        gate = found
    gate.freeze()
    return gate


class Annealing:
    """The growth of λ over the steps of a training.

    λ of each gate starts where it is. At the end, every gate's largest distance to ReLU is that of λ-GELU with the
    target λ, 0.16997120748/λ: a SiLU gate ends at 1.638 times the target.

    Args:
        model: a model with λ-gates (``soften``).
        steps: the number of steps over which λ grows; at least 1.
        target: λ at the end, at least 1; the paper's is 160 (arXiv 2603.21991).
        schedule: one of ``SCHEDULES``.

    Attributes:
        gates: the model's λ-gates.
        taken: the number of steps so far.

    Raises:
        InputError: if the model has no gate, or for a bad number or schedule.
    """

    def __init__(self, model: nn.Module, steps: int, target: float = 160.0, schedule: Schedule = "log") -> None:
        self.gates = [module for module in model.modules() if isinstance(module, Hardness)]
        if not self.gates:
            raise InputError("the model has no λ-gates: soften it first")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise InputError(f"λ grows over a positive number of steps, not {steps!r:.40}")
        if not isinstance(target, int | float) or isinstance(target, bool) or not 1 <= target <= LARGEST:
            raise InputError(f"the target of λ is a number from 1 to {LARGEST:g}, not {target!r:.40}")
        if not isinstance(schedule, str) or schedule not in SCHEDULES:
            raise InputError(f"there is no schedule {schedule!r:.40}; there are {', '.join(SCHEDULES)}")
        self.steps, self.schedule, self.taken = steps, schedule, 0
        self._start = [gate.lam.item() for gate in self.gates]
        self._target = [max(1.0, target * gate.supremum / SUPREMUM) for gate in self.gates]

    def step(self) -> None:
        """Let λ grow by one step; call it once before or after each step of the optimizer."""
        self.taken += 1
        progress = min(1.0, self.taken / self.steps)
        for gate, start, target in zip(self.gates, self._start, self._target, strict=True):
            gate.set_lam(max(1.0, hardness(self.schedule, start, target, progress)))

    @property
    def lam(self) -> list[float]:
        """λ of each gate."""
        return [gate.lam.item() for gate in self.gates]
