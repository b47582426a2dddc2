"""The schedules of λ, of learning rates and of ε by the number of steps taken, and the optimizers.

The optimizer is Adam or SGD, with a learning rate of its own for the parameter s of each λ:

λ = 1 + softplus(s/t), so dλ/ds = σ(s/t)/t with σ the logistic function. Adam moves every parameter by about its
learning rate whatever the size of its gradient; a step η_s on s therefore moves λ by about η_s·σ/t. SGD's step is
proportional to the gradient, so that the chain rule enters twice: λ moves by η_s·(σ/t)²·∂L/∂λ. At the paper's t = 0.1
the plain η would move λ five times (Adam) or 25 times (SGD) as far as a weight at s = 0, and hardly at all near λ = 1.

             Adam                      SGD
    raw      c·η                       c·η                        the rate of arXiv 2603.21991
    matched  c·t·η                     c·t²·η                     the chain rule's powers of 1/t are taken out
    natural  c·t·η/max(σ, 0.05)        c·t²·η/max(σ, 0.05)²       λ moves as a weight would, times c, but near λ = 1

The parameter s gets no weight decay, which would pull λ to 1 + ln 2, an arbitrary value.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from verifiable_relu.errors import InputError
from verifiable_relu.nn import HardnessGate
from verifiable_relu.nn.gates import SUPREMUM, Hardness
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

    def state_dict(self) -> dict[str, Any]:
        """The state of the growth, as numbers and text; the values of λ are the model's own."""
        return {name: value for name, value in vars(self).items() if name != "gates"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another growth was when its ``state_dict`` was taken.

        Raises:
            InputError: if that is the state of no growth, or of one of another number of gates.
        """
        if state.keys() != self.state_dict().keys() or len(state["start"]) != len(self.gates):
            raise InputError(f"the state is not one of an Annealing of {len(self.gates)} λ-gates")
        vars(self).update(state)

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


LEAST_SLOPE = 0.05
"""The least σ by which a natural rate is divided."""


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """AdamW or SGD over a model's parameters.

    The groups of parameters are the matrices and kernels, which are decayed, all other parameters but λ's, and for each
    learning rate the λs that have it.
    """
    gates = [module for module in model.modules() if isinstance(module, HardnessGate)]
    own = {id(gate.s) for gate in gates}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in own]
    # Each group costs a call in every step, so that λs of equal learning rates share one group.
    together: dict[Any, list[int]] = defaultdict(list)
    for index, gate in enumerate(gates):
        together[index if options.lam_rate == "natural" else gate.temperature].append(index)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": options.decay, "gate": None},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0, "gate": None},
        *({"params": [gates[i].s for i in same], "weight_decay": 0.0, "gate": same[0]} for same in together.values()),
    ]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.rate, momentum=options.momentum)
    return torch.optim.AdamW(groups, lr=options.rate, betas=(options.beta1, options.beta2), fused=True)


def set_rates(optimizer: torch.optim.Optimizer, model: nn.Module, rate: float, options: Options) -> None:
    """Set the learning rate of every group, for the learning rate η = ``rate`` of the weights."""
    gates = [module for module in model.modules() if isinstance(module, HardnessGate)]
    for group in optimizer.param_groups:
        gate = group["gate"]
        group["lr"] = rate if gate is None else rate_of_s(gates[gate], rate, options)


def rate_of_s(gate: HardnessGate, rate: float, options: Options) -> float:
    """The learning rate η_s of the parameter s of a gate, for the learning rate η = ``rate`` of the weights."""
    raw = options.lam_factor * rate
    if options.lam_rate == "raw":
        return raw
    power = 2 if options.optimizer == "sgd" else 1
    matched = raw * gate.temperature**power
    if options.lam_rate == "matched":
        return matched
    return matched / max(float(torch.sigmoid(gate.s.detach() / gate.temperature)), LEAST_SLOPE) ** power
