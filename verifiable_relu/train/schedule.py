"""The schedules of the learning rate, of ε and of λ, as functions of the number of steps taken."""

from __future__ import annotations

import math

from verifiable_relu.train.options import Fall, Options, Schedule


def annealing_progress(step: int, steps_per_epoch: int, first: int, epochs: int) -> float:
    """The progress of the annealing after ``step`` + 1 steps: 0 until epoch ``first`` begins, 1 at the training's end.

    At the end of epoch e the progress is (e − first + 1)/(E − first), as in arXiv 2603.21991 for that epoch. Within an
    epoch the progress grows linearly, so that λ does not jump between epochs.

    Args:
        step: the number of steps taken before this one.
        steps_per_epoch: the number of steps in an epoch.
        first: the epoch, from 0, in which the annealing begins.
        epochs: E, the number of epochs.
    """
    start = first * steps_per_epoch
    return max(0.0, (step + 1 - start) / (epochs * steps_per_epoch - start))


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

    The arguments are those of ``annealing_progress``.
    """
    return min(1.0, 2 * annealing_progress(step, steps_per_epoch, first, epochs))
