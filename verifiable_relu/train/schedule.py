"""The schedules of λ, of learning rates and of ε by the number of steps taken, and the optimizers.

The optimizer is Adam or SGD, with a learning rate of its own for the parameter s of each λ = 1 + softplus(s/t). Adam
moves every parameter by about its learning rate whatever the size of its gradient, and SGD by a multiple of the
gradient, in which the chain rule puts a factor 1/t for s. For the learning rate η of the weights, that of s is thus
c·t·η with Adam and c·t²·η with SGD: c is a step of λ divided by a step of a weight, but for the softplus's slope. (The
plain c·η of arXiv 2603.21991, with t = 0.1, is that of Adam for ten times the c.) The parameter s gets no weight decay,
which would pull λ to 1 + ln 2, an arbitrary value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from verifiable_relu.errors import InputError
from verifiable_relu.nn.gates import SUPREMUM, Hardness
from verifiable_relu.train.options import LARGEST_LAM, SCHEDULES, Options, Schedule

RISE = 0.2
"""The fraction of the training over which the learning rate rises."""

MOMENTUM = 0.9
"""The momentum of SGD."""


def hardness(schedule: Schedule, start: float, target: float, progress: float) -> float:
    """Return λ after the fraction ``progress`` of the annealing from ``start`` ≥ 1 to ``target`` ≥ 1.

    The distance of λ-GELU to ReLU is proportional to 1/λ. A schedule linear in λ removes 90 % of this distance in the
    first 6 % of the annealing, one linear in 1/λ reduces it evenly, and one linear in log λ lies between the two.
    """
    if progress >= 1:
        return target
    if schedule == "linear":
        return start + (target - start) * progress
    if schedule == "log":
        return start * (target / start) ** progress
    return 1 / (1 / start + (1 / target - 1 / start) * progress)


class Annealing:
    """The growth of λ over the steps of a training.

    λ of each gate starts where it is, and is frozen: λ follows the schedule alone. At the end, every gate's largest
    distance to ReLU is that of λ-GELU with the target λ, 0.16997120748/λ: a SiLU gate ends at 1.638 times the target.
    After t of T steps the progress is t/T, so that at the end of an epoch it is that of arXiv 2603.21991, and λ does
    not jump between epochs.

    Args:
        model: a model with λ-gates (``hardening.soften``).
        steps: T, the number of steps over which λ grows; at least 1.
        target: λ at the end, at least 1; the paper's is 160.
        schedule: ``linear`` in λ, in ``log`` λ or in 1/λ (``inverse``), see ``hardness``.

    Attributes:
        gates, start, taken: the λ-gates, λ of each when the growth began, and the number of steps so far.

    Raises:
        InputError: if the model has no gate, or for a bad number or schedule.
    """

    def __init__(self, model: nn.Module, steps: int, target: float = 160.0, schedule: Schedule = "log") -> None:
        self.gates = [module for module in model.modules() if isinstance(module, Hardness)]
        if not self.gates:
            raise InputError("the model has no λ-gates: soften it first")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise InputError(f"λ grows over a positive number of steps, not {steps!r:.40}")
        if not isinstance(target, int | float) or isinstance(target, bool) or not 1 <= target <= LARGEST_LAM:
            raise InputError(f"the target of λ is a number from 1 to {LARGEST_LAM:g}, not {target!r:.40}")
        if not isinstance(schedule, str) or schedule not in SCHEDULES:
            raise InputError(f"there is no schedule {schedule!r:.40}; there are {', '.join(SCHEDULES)}")
        self.steps, self.schedule, self.taken = steps, schedule, 0
        self.start = self.lam
        self._target = [max(1.0, target * gate.supremum / SUPREMUM) for gate in self.gates]
        for gate in self.gates:
            gate.freeze()

    def step(self) -> None:
        """Let λ grow by one step; call it once before or after each step of the optimizer."""
        self.taken += 1
        for gate, start, target in zip(self.gates, self.start, self._target, strict=True):
            gate.set_lam(max(1.0, hardness(self.schedule, start, target, self.taken / self.steps)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers and text; the values of λ are the model's own."""
        return {name: value for name, value in vars(self).items() if name != "gates"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another growth of as many gates was when its ``state_dict`` was taken."""
        if state.keys() != self.state_dict().keys() or len(state["start"]) != len(self.gates):
            raise InputError(f"the state is not one of an Annealing of {len(self.gates)} λ-gates")
        vars(self).update(state)

    @property
    def lam(self) -> list[float]:
        return [gate.lam.item() for gate in self.gates]


def learning_rate(highest: float, step: int, steps: int) -> float:
    """Return the learning rate of a one-cycle schedule.

    It rises linearly from ``highest``/25 to ``highest`` over the first ``RISE``·``steps`` steps, and then falls as a
    cosine to nearly 0.
    """
    peak = RISE * steps
    if step < peak:
        return highest * (1 / 25 + (1 - 1 / 25) * step / peak)
    return highest * (1 + math.cos(math.pi * (step - peak + 1) / (steps - peak + 1))) / 2


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """Make AdamW or SGD over a model's parameters.

    Its groups are the matrices and kernels, which are decayed, all other parameters but λ's, and for each temperature t
    the parameters s of the gates that have it.
    """
    gates = [module for module in model.modules() if isinstance(module, Hardness)]
    own = {id(gate.s) for gate in gates}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in own]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": options.decay, "temperature": None},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0, "temperature": None},
    ]
    for temperature in dict.fromkeys(gate.temperature for gate in gates):
        alike = [gate.s for gate in gates if gate.temperature == temperature]
        groups.append({"params": alike, "weight_decay": 0.0, "temperature": temperature})
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.rate, momentum=MOMENTUM)
    return torch.optim.AdamW(groups, lr=options.rate, fused=True)


def set_rates(optimizer: torch.optim.Optimizer, rate: float, options: Options) -> None:
    """Set the learning rate of every group of ``make_optimizer``, for the learning rate η = ``rate`` of the weights."""
    power = 2 if options.optimizer == "sgd" else 1
    for group in optimizer.param_groups:
        scaled = group["temperature"] is not None
        group["lr"] = options.lam_factor * rate * group["temperature"] ** power if scaled else rate
