"""The training loop of every arm: weights and λ are learned, then λ is annealed or the activation replaced by ReLU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verifiable_relu import nn as smooth
from verifiable_relu.data import Dataset
from verifiable_relu.errors import InputError
from verifiable_relu.nn import (
    HardnessGate,
    Normalize,
    cnn,
    cnn3,
    cnn5,
    cnn7,
    mlp,
    resnet,
    substitute_relu,
)
from verifiable_relu.train import checkpoint, losses, schedule
from verifiable_relu.train.arms import ARMS
from verifiable_relu.train.augment import augment
from verifiable_relu.train.monitor import Monitor
from verifiable_relu.train.objective import initialise, objective
from verifiable_relu.train.optimizer import make_optimizer, set_rates
from verifiable_relu.train.options import Options, flag
from verifiable_relu.train.swap import Swap, measure

Progress = Callable[[int, str], None]
"""A function that is called after every step, with the number of steps taken so far and a line of figures."""


class Diverged(InputError):
    """The loss of a training became infinite or NaN."""


@dataclass(frozen=True)
class Trained:
    """A trained model and the history of its training.

    Attributes:
        model: the model after the last step, with every λ at its target in arms with a λ, and with ReLU in arms that
            replace the activation at the switch.
        history: for each epoch ``lam`` (each layer's λ at the epoch's end), ``loss`` and ``accuracy`` (means over the
            epoch; the accuracy is that on the possibly augmented and attacked images trained on), ``steps`` and
            ``seconds``.
        monitor: the measurements during the training, one dict for each moment (``Monitor.points``).
        learned: each layer's λ when the annealing began.
        swap: the effect of the replacement by ReLU, if the replacement was at the switch; None otherwise.
    """

    model: nn.Sequential
    history: list[dict[str, Any]]
    monitor: list[dict[str, Any]] = field(default_factory=list)
    learned: list[float] = field(default_factory=list)
    swap: Swap | None = None


def activation(options: Options) -> nn.Module:
    """A new module of the activation that the options' arm trains."""
    arm = ARMS[options.arm]
    if arm.hardness == "none":
        return getattr(nn, arm.activation)()
    gate: HardnessGate = getattr(smooth, arm.activation)(options.lam_init, options.lam_temperature)
    if arm.hardness == "frozen":
        gate.freeze()
    return gate


def build(options: Options, data: Dataset) -> nn.Sequential:
    """The untrained network for the images of a data set, its normalisation included.

    Equal seeds give equal weights, whatever the arm.

    Raises:
        InputError: if the architecture does not fit the images.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(options.seed)
        try:
            model = _network(options, data)
        except ValueError as error:
            raise InputError(str(error), place=flag("model")) from error
        if options.initialisation == "ibp":
            initialise(model)
        return model


def _network(options: Options, data: Dataset) -> nn.Sequential:
    normalize = Normalize(data.mean, data.std) if options.inputs == "standardised" else None
    shape = channels, height, width = data.images.shape[1:]
    make = partial(activation, options)
    match options.model:
        case "mlp":
            return mlp([channels * height * width, *options.hidden, data.classes], make, normalize)
        case "cnn":
            return cnn(shape, options.channels, options.hidden, data.classes, make, normalize)
        case _:
            fixed = {"cnn3": cnn3, "cnn5": cnn5, "cnn7": cnn7, "resnet": resnet}
            return fixed[options.model](shape, data.classes, make, normalize, options.width)


def train(
    options: Options,
    data: Dataset,
    saved: Path | None = None,
    progress: Progress | None = None,
    test: Dataset | None = None,
    device: str = "cpu",
    epoch_done: Callable[[int, Mapping[str, Any]], None] | None = None,
) -> Trained:
    """Train a network, resuming from its checkpoint if there is one.

    A training that was interrupted and resumed gives, bit for bit, the same network as one that was not: the order of
    the images, the augmentation and the attacks of an epoch depend on the seed and the epoch's number alone.

    Args:
        options: the options of the training.
        data: the images to train on.
        saved: the path of the checkpoint, which is written after each epoch; None writes no checkpoint.
        progress: called after every step.
        test: the images on which a replacement by ReLU at the switch is measured; None takes those of ``data``.
        device: a torch device, on which all of ``data`` is held. A training may be resumed on another device, which
            computes other bits.
        epoch_done: called after every epoch with its number, from 1, and its entry of ``Trained.history``.

    Returns:
        The trained model, on the CPU, and the history of its training.

    Raises:
        InputError: if the network does not fit the images, or if the checkpoint is damaged or belongs to another
            training.
        Diverged: if the loss becomes infinite or NaN.
    """
    images, labels = (torch.from_numpy(array).to(device) for array in (data.images, data.labels))
    model = build(options, data).to(device)
    if len(images) % options.batch == 1 and any(isinstance(module, nn.BatchNorm1d) for module in model.modules()):
        message = "the last step of an epoch has one image, which a batch normalisation cannot normalise"
        raise InputError(message, place=flag("batch"))
    gates = [module for module in model.modules() if isinstance(module, HardnessGate)]
    optimizer = make_optimizer(model, options)
    history: list[dict[str, Any]] = []
    learned: list[float] = []
    swap: Swap | None = None
    per_epoch = ceil(len(images) / options.batch)
    annealed = per_epoch * options.epochs
    monitor = Monitor(images, options.eps, per_epoch * options.total_epochs)
    state = checkpoint.restore(saved, options) if saved is not None else None
    if state is not None:
        history, learned = state["history"], state["learned"]
        if state["swap"] is not None:
            swap = Swap(**state["swap"])
            substitute_relu(model, inplace=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        monitor.restore(state["monitor"])

    monitor.look(model, 0)
    for epoch in range(len(history), options.total_epochs):
        began = time.monotonic()
        generator = torch.Generator().manual_seed(1_000_003 * options.seed + epoch)
        if epoch >= options.first_annealed and not learned:
            learned = [gate.lam.item() for gate in gates]
        for gate in gates if learned and options.ramp == "frozen" else ():
            gate.freeze()
        if epoch >= options.swapped_from and swap is None:
            over = data if test is None else test
            hard = substitute_relu(model.eval())
            x, y = (torch.from_numpy(array).to(device) for array in (over.images, over.labels))
            swap = measure(model, hard, x, y, epoch)
            substitute_relu(model, inplace=True).train()
        order = torch.randperm(len(images), generator=generator)
        total, right = 0.0, 0
        for position, chosen in enumerate(order.split(options.batch)):
            step = epoch * per_epoch + position
            for gate, start in zip(gates, learned, strict=False):
                done = schedule.annealing_progress(step, per_epoch, options.first_annealed, options.epochs)
                if options.ramp == "learning":
                    # λ moves from its learned value by an equal part of the remaining way in each remaining step.
                    start, done = gate.lam.item(), 1 / (annealed - step)
                gate.set_lam(schedule.hardness(options.schedule, start, options.target, done))
            set_rates(optimizer, model, schedule.rate_at(options, step, per_epoch), options)
            x, y = augment(images[chosen], options.crop, options.flip, generator), labels[chosen]
            of_eps = of_terms = schedule.warmup(step, options.warmup * per_epoch)
            if options.terms_grow == "ramp":
                of_terms = schedule.hardening(step, per_epoch, options.first_annealed, options.epochs)
            loss, logits = objective(model, x, y, options, of_eps, of_terms, generator)
            if not torch.isfinite(loss):
                raise Diverged("the loss is infinite or NaN; a lower --rate may help", place=f"epoch {epoch}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
            right += int((logits.argmax(1) == y).sum())
            if step + 1 == annealed:
                for gate in gates:
                    gate.set_lam(options.target)
            looked = time.monotonic()
            monitor.look(model, step + 1)
            # The time of the monitor's measurements does not count as time of the step.
            began += time.monotonic() - looked
            if progress is not None:
                progress(step + 1, f"loss {loss.item():.3f}" + _least(gates))
        history.append(
            {
                "lam": [gate.lam.item() for gate in gates],
                "loss": total / len(images),
                "accuracy": right / len(images),
                "steps": per_epoch,
                "seconds": round(time.monotonic() - began, 3),
            }
        )
        if epoch_done is not None:
            epoch_done(epoch + 1, history[-1])
        if saved is not None:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "history": history,
                "monitor": monitor.state(),
                "learned": learned,
                "swap": None if swap is None else asdict(swap),
            }
            checkpoint.save(saved, options, state)
    return Trained(model.cpu(), history, monitor.points, learned, swap)


def _least(gates: list[HardnessGate]) -> str:
    return f", λ {min(gate.lam.item() for gate in gates):.1f}" if gates else ""


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The fraction of the images that a model classifies correctly."""
    pairs = zip(images.split(1000), labels.split(1000), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs) / len(labels)


def attacked_accuracy(model: nn.Module, images: Tensor, labels: Tensor, eps: float, seed: int) -> float:
    """The fraction of the images that a model classifies correctly, also under a 40-step attack of radius ``eps``."""
    generator = torch.Generator().manual_seed(seed)
    right = 0
    for x, y in zip(images.split(500), labels.split(500), strict=True):
        with torch.no_grad():
            stands = model(x).argmax(1) == y
        point = losses.attacked(model, x, y, eps, 40, generator)
        with torch.no_grad():
            right += int((stands & (model(point).argmax(1) == y)).sum())
    return right / len(labels)
