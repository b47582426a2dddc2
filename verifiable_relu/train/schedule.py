"""How the learning rate, ε and λ move during a training, as functions of the number of steps taken."""

from __future__ import annotations

import math

from verifiable_relu.train.options import Fall, Options, Schedule


def annealing_progress(step: int, steps_per_epoch: int, first: int, epochs: int) -> float:
    """How much of the annealing's way is made after ``step`` + 1 steps: 0 until epoch ``first`` begins, 1 at the end.

    At the end of epoch e it is (e − first + 1)/(E − first), the paper's value for that epoch; it grows within the
    epoch too, so that no single step has to bear a whole epoch's change.
    """
    start = first * steps_per_epoch
    return max(0.0, (step + 1 - start) / (epochs * steps_per_epoch - start))


def hardness(schedule: Schedule, start: float, target: float, progress: float) -> float:
    """λ at ``progress`` in [0, 1] of the way from ``start`` ≥ 1 to ``target`` ≥ 1.

    Linear in λ, 90 % of the distance to ReLU (which is proportional to 1/λ) is gone in the first 6 % of the way;
    linear in 1/λ that distance falls evenly; linear in log λ lies between them.
    """
    if schedule == "linear":
        return start + (target - start) * progress
    if schedule == "log":
        return start * (target / start) ** progress
    return 1 / (1 / start + (1 / target - 1 / start) * progress)


def learning_rate(highest: float, rise: float, step: int, steps: int, fall: Fall = "cosine") -> float:
    """One cycle: from ``highest``/25 up to ``highest`` over the first ``rise``·``steps``, then down by ``fall``."""
    peak = rise * steps
    if step < peak:
        return highest * (1 / 25 + (1 - 1 / 25) * step / peak)
    if fall == "none":
        return highest
    return highest * (1 + math.cos(math.pi * (step - peak + 1) / (steps - peak + 1))) / 2


def rate_at(options: Options, step: int, steps_per_epoch: int) -> float:
    """η at ``step``: one cycle over the training, and a cosine over the epochs of fine-tuning beyond it."""
    steps = options.epochs * steps_per_epoch
    if step < steps:
        return learning_rate(options.rate, options.rise, step, steps, options.fall)
    extra = options.finetune_extra * steps_per_epoch
    return learning_rate(options.finetune_rate * options.rate, 0, step - steps, extra)


def warmup(step: int, steps: int) -> float:
    """From 0 to 1 over ``steps``, and 1 from there on (always, for ``steps`` = 0)."""
    return min(1.0, step / steps) if steps else 1.0


def hardening(step: int, steps_per_epoch: int, first: int, epochs: int) -> float:
    """From 0 to 1 over the first half of the annealing that begins with epoch ``first``, and 1 from there on."""
    return min(1.0, 2 * annealing_progress(step, steps_per_epoch, first, epochs))
