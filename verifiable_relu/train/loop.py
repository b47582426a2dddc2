"""Trainings: the loop over batches that trainings and hardenings share, and the training of every arm.

In an arm's training, weights and λ are learned, and then λ is annealed or the activation replaced by ReLU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verifiable_relu import nn as smooth
from verifiable_relu.data import Dataset
from verifiable_relu.errors import InputError
from verifiable_relu.nn import HardnessGate, Normalize, cnn, fixed, mlp, substitute_relu
from verifiable_relu.train import checkpoint, losses, schedule
from verifiable_relu.train.arms import ARMS
from verifiable_relu.train.augment import augment
from verifiable_relu.train.batches import Batch
from verifiable_relu.train.monitor import Monitor
from verifiable_relu.train.objective import initialise, objective
from verifiable_relu.train.optimizer import make_optimizer, set_rates
from verifiable_relu.train.options import Options, flag
from verifiable_relu.train.schedule import Annealing
from verifiable_relu.train.swap import Change, measure

Progress = Callable[[int, str], None]
"""A function that is called after every step, with the number of steps taken so far and a line of figures."""


class Diverged(InputError):
    """The loss of a training became infinite or NaN."""


def descend(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Callable[[nn.Module, Batch], Tensor],
    optimizer: torch.optim.Optimizer,
    before: Callable[[], None],
    epoch: int,
) -> Iterator[float]:
    """Take one step of an optimizer for each batch, and yield its loss once the step is taken.

    Args:
        model: the model, which is put into training mode before each step.
        batches: the batches.
        loss: what is to become small, for the model and a batch.
        optimizer: the optimizer of the model's parameters.
        before: called before each step, to set λ and learning rates.
        epoch: the number of the pass over the data, for messages.

    Raises:
        Diverged: if the loss becomes infinite or NaN.
        InputError: if the loss is no number that depends on the model's parameters.
    """
    for batch in batches:
        model.train()
        before()
        value = loss(model, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InputError("the loss is not a tensor of one number")
        if not torch.isfinite(value):
            raise Diverged("the loss is infinite or NaN; a lower learning rate may help", place=f"epoch {epoch}")
        if not value.requires_grad:
            raise InputError("the loss does not depend on the model's parameters")
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        yield value.item()


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
        swapped: the number of epochs after which ReLU replaced the activation at the switch; None in other arms.
        swap: the effect of that replacement; None in other arms.
    """

    model: nn.Sequential
    history: list[dict[str, Any]]
    monitor: list[dict[str, Any]] = field(default_factory=list)
    learned: list[float] = field(default_factory=list)
    swapped: int | None = None
    swap: Change | None = None


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
            return fixed(options.model, shape, data.classes, make, normalize, options.width)


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
    images, labels = _tensors(data, device)
    model = build(options, data).to(device)
    if len(images) % options.batch == 1 and any(isinstance(module, nn.BatchNorm1d) for module in model.modules()):
        message = "the last step of an epoch has one image, which a batch normalisation cannot normalise"
        raise InputError(message, place=flag("batch"))
    gates = [module for module in model.modules() if isinstance(module, HardnessGate)]
    optimizer = make_optimizer(model, options)
    history: list[dict[str, Any]] = []
    learned: list[float] = []
    swap: Change | None = None
    annealing: Annealing | None = None
    per_epoch = math.ceil(len(images) / options.batch)
    annealed = per_epoch * (options.epochs - options.first_annealed)
    monitor = Monitor(images, options.eps, per_epoch * options.total_epochs)
    state = checkpoint.restore(saved, options) if saved is not None else None
    if state is not None:
        history, learned = state["history"], state["learned"]
        if state["swap"] is not None:
            swap = _restored(state["swap"])
            substitute_relu(model, inplace=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        monitor.restore(state["monitor"])

    generator, step, right = torch.Generator(), 0, 0

    def before() -> None:
        if annealing is not None:
            annealing.step()
        # The natural rate of s depends on λ.
        set_rates(optimizer, model, schedule.rate_at(options, step, per_epoch), options)

    def loss(model: nn.Module, chosen: Tensor) -> Tensor:
        nonlocal right
        x, y = augment(images[chosen], options.crop, options.flip, generator), labels[chosen]
        of_eps = of_terms = schedule.warmup(step, options.warmup * per_epoch)
        if options.terms_grow == "ramp":
            of_terms = schedule.hardening(step, per_epoch, options.first_annealed, options.epochs)
        value, logits = objective(model, x, y, options, of_eps, of_terms, generator)
        right += int((logits.argmax(1) == y).sum())
        return value

    monitor.look(model, 0)
    for epoch in range(len(history), options.total_epochs):
        began = time.monotonic()
        generator = torch.Generator().manual_seed(1_000_003 * options.seed + epoch)
        step = epoch * per_epoch
        if gates and annealing is None and epoch >= options.first_annealed:
            annealing = Annealing(
                model,
                annealed,
                options.target,
                options.schedule,
                learning=options.ramp == "learning",
                start=learned or None,
                taken=step - options.first_annealed * per_epoch,
            )
            learned = annealing.start
        if epoch >= options.swapped_from and swap is None:
            swap = measure_swap(model.eval(), substitute_relu(model), data if test is None else test, device)
            substitute_relu(model, inplace=True)
        total, right = 0.0, 0
        order = torch.randperm(len(images), generator=generator).split(options.batch)
        for chosen, value in zip(order, descend(model, order, loss, optimizer, before, epoch), strict=True):
            step += 1
            total += value * len(chosen)
            if annealing is not None and annealing.taken == annealed:
                annealing.settle()
            looked = time.monotonic()
            monitor.look(model, step)
            # The time of the monitor's measurements does not count as time of the step.
            began += time.monotonic() - looked
            if progress is not None:
                progress(step, f"loss {value:.3f}" + _least(gates))
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
    return Trained(model.cpu(), history, monitor.points, learned, None if swap is None else options.swapped_from, swap)


_BEFORE = {
    "images": "samples",
    "clean_before": "accuracy_smooth",
    "clean_after": "accuracy",
    "mean_change": "mean",
    "worst_change": "worst",
    "flipped": "flipped",
    "proven_change": "proven",
}
"""What versions before 0.3 call the fields of ``Change`` in checkpoints; NaN stands for what is not proven."""


def _restored(state: Mapping[str, Any]) -> Change:
    """The measurements of a swap from a checkpoint."""
    if "clean_before" not in state:
        return Change(**state)
    found = {new: state[old] for old, new in _BEFORE.items()}
    if math.isnan(found["proven"]):
        found["proven"] = None
    return Change(accuracy_before=None, region=(0.0, 1.0), **found)


def measure_swap(smooth: nn.Module, hard: nn.Module, data: Dataset, device: str = "cpu") -> Change:
    """What the replacement by ReLU changes for a data set's images, and a bound of the change over all of [0, 1]ⁿ."""

    def outputs(model: nn.Module, batch: Batch) -> Tensor:
        return torch.cat([model(x) for x in batch[0].split(1000)])

    return measure(smooth, hard, [_tensors(data, device)], outputs=outputs, region=(0.0, 1.0))


def _tensors(data: Dataset, device: str) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(data.images).to(device), torch.from_numpy(data.labels).to(device)


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
