"""The schedules of λ, of the learning rate and of ε, by the number of steps taken."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from verifiable_relu.errors import InputError
from verifiable_relu.nn.activation import SUPREMUM
from verifiable_relu.nn.hardness import Hardness
from verifiable_relu.train.options import CHOICES, LARGEST_LAM, Fall, Options, Schedule


def hardness(schedule: Schedule, start: float, target: float, progress: float) -> float:
    """The value of λ after the fraction ``progress`` of the annealing from ``start`` ≥ 1 to ``target`` ≥ 1.

    The distance of λ-GELU to ReLU is proportional to 1/λ. A schedule linear in λ removes 90 % of this distance in the
    first 6 % of the annealing, one linear in 1/λ reduces it evenly, and one linear in log λ lies between the two.
    """
    if schedule == "linear":
        return start + (target - start) * progress
    if schedule == "log":
        return start * (target / start) ** progress
    return 1 / (1 / start + (1 / target - 1 / start) * progress)


class Annealing:
    """The growth of λ over the steps of a training.

    λ of each gate starts where it is. At the end, every gate's largest distance to ReLU is that of λ-GELU with the
    target λ, 0.16997120748/λ: a SiLU gate ends at 1.638 times the target. After t of T steps the progress is t/T, so
    that at the end of an epoch it is that of arXiv 2603.21991, and λ does not jump between epochs.

    Args:
        model: a model with λ-gates (``hardening.soften``).
        steps: T, the number of steps over which λ grows; at least 1.
        target: λ at the end, at least 1; the paper's is 160.
        schedule: ``linear`` in λ, in ``log`` λ or in 1/λ (``inverse``), see ``hardness``.
        learning: whether the optimizer moves λ besides. λ then moves from where it is by an equal part of the remaining
            way in each remaining step; otherwise the gates are frozen, and λ follows the schedule alone.
        start: λ of each gate when the growth began; None takes those that the gates have.
        taken: the number of steps taken since then.

    Attributes:
        gates: the model's λ-gates.
        start: λ of each gate when the growth began.
        taken: the number of steps so far.

    Raises:
        InputError: if the model has no gate, or for a bad number or schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        steps: int,
        target: float = 160.0,
        schedule: Schedule = "log",
        *,
        learning: bool = False,
        start: Sequence[float] | None = None,
        taken: int = 0,
    ) -> None:
        self.gates = [module for module in model.modules() if isinstance(module, Hardness)]
        if not self.gates:
            raise InputError("the model has no λ-gates: soften it first")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise InputError(f"λ grows over a positive number of steps, not {steps!r:.40}")
        if not isinstance(target, int | float) or isinstance(target, bool) or not 1 <= target <= LARGEST_LAM:
            raise InputError(f"the target of λ is a number from 1 to {LARGEST_LAM:g}, not {target!r:.40}")
        if not isinstance(schedule, str) or schedule not in CHOICES["schedule"]:
            raise InputError(f"there is no schedule {schedule!r:.40}; there are {', '.join(CHOICES['schedule'])}")
        self.steps, self.schedule, self.learning, self.taken = steps, schedule, learning, taken
        self.start = self.lam if start is None else list(start)
        self._target = [max(1.0, target * gate.supremum / SUPREMUM) for gate in self.gates]
        for gate in () if learning else self.gates:
            gate.freeze()

    def step(self) -> None:
        """Let λ grow by one step; call it once before or after each step of the optimizer."""
        left = max(1, self.steps - self.taken)
        self.taken += 1
        done = 1 / left if self.learning else min(1.0, self.taken / self.steps)
        starts = self.lam if self.learning else self.start
        for gate, start, target in zip(self.gates, starts, self._target, strict=True):
            gate.set_lam(max(1.0, hardness(self.schedule, start, target, done)))

    def settle(self) -> None:
        """Set λ to its target, from which the optimizer's last step and rounding may have moved it."""
        for gate, target in zip(self.gates, self._target, strict=True):
            gate.set_lam(target)

    @property
    def lam(self) -> list[float]:
        """λ of each gate."""
        return [gate.lam.item() for gate in self.gates]


def learning_rate(highest: float, rise: float, step: int, steps: int, fall: Fall = "cosine") -> float:
    """The learning rate at a step of a one-cycle schedule.

    The rate rises linearly from ``highest``/25 to ``highest`` over the first ``rise``·``steps`` steps, and then falls
    as a cosine to nearly 0, or stays at ``highest``, by ``fall``.
    """
    peak = rise * steps
    if step < peak:
        return highest * (1 / 25 + (1 - 1 / 25) * step / peak)
    if fall == "none":
        return highest
    return highest * (1 + math.cos(math.pi * (step - peak + 1) / (steps - peak + 1))) / 2


def rate_at(options: Options, step: int, steps_per_epoch: int) -> float:
    """The learning rate η at a step: one cycle over ``epochs``, and a cosine over the further epochs of fine-tuning."""
    steps = options.epochs * steps_per_epoch
    if step < steps:
        return learning_rate(options.rate, options.rise, step, steps, options.fall)
    extra = options.finetune_extra * steps_per_epoch
    return learning_rate(options.finetune_rate * options.rate, 0, step - steps, extra)


def warmup(step: int, steps: int) -> float:
    """A factor that grows linearly from 0 to 1 over ``steps`` steps and is 1 after them; always 1 if ``steps`` is 0."""
    return min(1.0, step / steps) if steps else 1.0


def hardening(step: int, steps_per_epoch: int, first: int, epochs: int) -> float:
    """A factor that grows linearly from 0 to 1 over the first half of the annealing, and is 1 after that.

    Args:
        step: the number of steps taken before this one.
        steps_per_epoch: the number of steps in an epoch.
        first: the epoch, from 0, in which the annealing begins.
        epochs: E, the number of epochs.
    """
    start = first * steps_per_epoch
    return min(1.0, 2 * max(0.0, (step + 1 - start) / (epochs * steps_per_epoch - start)))
