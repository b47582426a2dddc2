"""Trainings: the loop that trainings and hardenings share, its checkpoints, and the training of every arm.

In an arm's training, weights and λ are learned, and then λ is annealed or the activation replaced by ReLU.
"""

from __future__ import annotations

import io
import math
import pickle
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verifiable_relu.arguments import imported
from verifiable_relu.data import Dataset
from verifiable_relu.errors import InputError
from verifiable_relu.files import write_whole
from verifiable_relu.nn import HardnessGate, Normalize, cnn, fixed, gates, mlp, substitute_relu
from verifiable_relu.train.batches import Batch, at
from verifiable_relu.train.losses import attacked, augment, initialise, objective
from verifiable_relu.train.monitor import Monitor
from verifiable_relu.train.options import ARMS, Options, flag
from verifiable_relu.train.schedule import Annealing, hardening, make_optimizer, rate_at, set_rates, warmup
from verifiable_relu.train.swap import Change, measure

Progress = Callable[[int, str], None]
"""A function that is called after every step, with the number of steps taken so far and a line of figures."""


class Diverged(InputError):
    """The loss of a training became infinite or NaN."""


@dataclass(frozen=True)
class Epoch:
    """A pass over the data: the loss of each step, the seconds that it took, and λ of each gate at its end."""

    losses: list[float]
    seconds: float
    lam: list[float]


def fit(
    model: nn.Module,
    epochs: Iterable[int],
    begin: Callable[[int], Collection[Batch]],
    loss: Callable[[nn.Module, Batch], Tensor],
    optimizer: torch.optim.Optimizer,
    before: Callable[[int], None] | None = None,
    after: Callable[[int, float], None] | None = None,
    progress: Progress | None = None,
) -> Iterator[Epoch]:
    """Train a model, and yield at the end of each epoch.

    Args:
        model: the model, which is put into training mode before each step.
        epochs: the numbers of the passes over the data, from 0.
        begin: called at the start of each, with its number; returns its batches.
        loss: what is to become small, for the model and a batch.
        optimizer: the optimizer of the model's parameters.
        before: called before each step with the number of steps taken so far, to set λ and learning rates.
        after: called after each step with that number, now one larger, and the loss. Its time does not count as that of
            the epoch.
        progress: called after each step.

    Raises:
        Diverged: if the loss becomes infinite or NaN.
        InputError: if the loss is no number that depends on the model's parameters.
        DataError: if the model does not take a batch; the error names the batch.
    """
    hardened = [module for module in model.modules() if isinstance(module, gates.Hardness)]
    for epoch in epochs:
        began, losses = time.monotonic(), []
        batches = begin(epoch)
        for index, batch in enumerate(batches):
            step = epoch * len(batches) + index
            model.train()
            if before is not None:
                before(step)
            with at(f"batch {index}"):
                found = loss(model, batch)
            if not isinstance(found, Tensor) or found.numel() != 1:
                raise InputError("the loss is not a tensor of one number")
            if not torch.isfinite(found):
                raise Diverged("the loss is infinite or NaN; a lower learning rate may help", place=f"epoch {epoch}")
            if not found.requires_grad:
                raise InputError("the loss does not depend on the model's parameters")
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            value = found.item()
            losses.append(value)
            stepped = time.monotonic()
            if after is not None:
                after(step + 1, value)
            began += time.monotonic() - stepped
            if progress is not None:
                least = f", λ {min(gate.lam.item() for gate in hardened):.1f}" if hardened else ""
                progress(step + 1, f"loss {value:.3f}{least}")
        yield Epoch(losses, time.monotonic() - began, [gate.lam.item() for gate in hardened])


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

    model: nn.Module
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
    gate: HardnessGate = getattr(gates, arm.activation)(options.lam_init, options.lam_temperature)
    if arm.hardness == "frozen":
        gate.freeze()
    return gate


def build(options: Options, data: Dataset) -> nn.Module:
    """The untrained network for the images of a data set, its normalisation included.

    Equal seeds give equal weights, whatever the arm.

    Raises:
        InputError: if the architecture does not fit the images, or if a module of the user's cannot be made.
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


def _network(options: Options, data: Dataset) -> nn.Module:
    normalize = Normalize(data.mean, data.std) if options.inputs == "standardised" else None
    shape = channels, height, width = data.images.shape[1:]
    make = partial(activation, options)
    match options.model:
        case "mlp":
            return mlp([channels * height * width, *options.hidden, data.classes], make, normalize)
        case "cnn":
            return cnn(shape, options.channels, options.hidden, data.classes, make, normalize)
        case own if ":" in own:
            made = imported(own, flag("model"))(shape, data.classes, make, normalize)
            if not isinstance(made, nn.Module):
                raise InputError(f"'{own}' makes a {type(made).__name__}, not a module", place=flag("model"))
            return made
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
    run = _Training(options, data, data if test is None else test, device)
    if saved is not None and (state := restore(saved, options)) is not None:
        run.restore(state)
    run.monitor.look(run.model, 0)
    epochs = range(len(run.history), options.total_epochs)
    for epoch in fit(run.model, epochs, run.begin, run.loss, run.optimizer, run.before, run.after, progress):
        run.end(epoch)
        if epoch_done is not None:
            epoch_done(len(run.history), run.history[-1])
        if saved is not None:
            save(saved, options, run.state())
    swapped = None if run.swap is None else options.swapped_from
    return Trained(run.model.cpu(), run.history, run.monitor.points, run.learned, swapped, run.swap)


class _Training:
    """The training of an arm, as ``fit`` asks for its parts."""

    def __init__(self, options: Options, data: Dataset, test: Dataset, device: str) -> None:
        self.options, self.test, self.device = options, test, device
        self.images, self.labels = _tensors(data, device)
        self.model = build(options, data).to(device)
        single = len(self.images) % options.batch == 1
        if single and any(isinstance(module, nn.BatchNorm1d) for module in self.model.modules()):
            message = "the last step of an epoch has one image, which a batch normalisation cannot normalise"
            raise InputError(message, place=flag("batch"))
        self.optimizer = make_optimizer(self.model, options)
        self.per_epoch = math.ceil(len(self.images) / options.batch)
        self.annealed = self.per_epoch * (options.epochs - options.first_annealed)
        self.monitor = Monitor(self.images, options.eps, self.per_epoch * options.total_epochs)
        self.history: list[dict[str, Any]] = []
        self.learned: list[float] = []
        self.swap: Change | None = None
        self.annealing: Annealing | None = None
        self.generator, self.step, self.right = torch.Generator(), 0, 0
        self.order: tuple[Tensor, ...] = ()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was asked for."""
        self.history, self.learned = state["history"], state["learned"]
        if state["swap"] is not None:
            self.swap = _restored(state["swap"])
            substitute_relu(self.model, inplace=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.monitor.restore(state["monitor"])

    def state(self) -> dict[str, Any]:
        """The state after an epoch, for a checkpoint."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": self.history,
            "monitor": self.monitor.state(),
            "learned": self.learned,
            "swap": None if self.swap is None else asdict(self.swap),
        }

    def begin(self, epoch: int) -> tuple[Tensor, ...]:
        """Begin an epoch, with the annealing or the replacement that is due; returns the indices of each batch."""
        options = self.options
        self.generator = torch.Generator().manual_seed(1_000_003 * options.seed + epoch)
        self.right = 0
        if options.anneals and self.annealing is None and epoch >= options.first_annealed:
            self.annealing = Annealing(
                self.model,
                self.annealed,
                options.target,
                options.schedule,
                learning=options.ramp == "learning",
                start=self.learned or None,
                taken=(epoch - options.first_annealed) * self.per_epoch,
            )
            self.learned = self.annealing.start
        if epoch >= options.swapped_from and self.swap is None:
            self.swap = measure_swap(self.model.eval(), substitute_relu(self.model), self.test, self.device)
            substitute_relu(self.model, inplace=True)
        self.order = torch.randperm(len(self.images), generator=self.generator).split(options.batch)
        return self.order

    def before(self, step: int) -> None:
        self.step = step
        if self.annealing is not None:
            self.annealing.step()
        # The natural rate of s depends on λ.
        set_rates(self.optimizer, self.model, rate_at(self.options, step, self.per_epoch), self.options)

    def loss(self, model: nn.Module, chosen: Tensor) -> Tensor:
        options = self.options
        x, y = augment(self.images[chosen], options.crop, options.flip, self.generator), self.labels[chosen]
        of_eps = of_terms = warmup(self.step, options.warmup * self.per_epoch)
        if options.terms_grow == "ramp":
            of_terms = hardening(self.step, self.per_epoch, options.first_annealed, options.epochs)
        value, logits = objective(model, x, y, options, of_eps, of_terms, self.generator)
        self.right += int((logits.argmax(1) == y).sum())
        return value

    def after(self, step: int, value: float) -> None:
        if self.annealing is not None and self.annealing.taken == self.annealed:
            self.annealing.settle()
        self.monitor.look(self.model, step)

    def end(self, epoch: Epoch) -> None:
        """Add an epoch to the history."""
        total = sum(value * len(chosen) for value, chosen in zip(epoch.losses, self.order, strict=True))
        self.history.append(
            {
                "lam": epoch.lam,
                "loss": total / len(self.images),
                "accuracy": self.right / len(self.images),
                "steps": self.per_epoch,
                "seconds": round(epoch.seconds, 3),
            }
        )


def save(path: Path, options: Options, state: dict[str, Any]) -> None:
    """Write the state of a training together with its options."""
    buffer = io.BytesIO()
    torch.save({"options": asdict(options), "state": state}, buffer)
    write_whole(path, buffer.getvalue())


def restore(path: Path, options: Options) -> dict[str, Any] | None:
    """The state of a training that a checkpoint holds; None if there is no file at ``path``.

    Raises:
        InputError: if the file is damaged, or if it was written by a training with another value of an option, which
            the error names.
    """
    if not path.is_file():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        before, state = content["options"], content["state"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise InputError(f"not a readable checkpoint ({error}); delete it to start anew", path=path) from error
    for name, value in asdict(options).items():
        if before.get(name) != value:
            raise InputError(
                f"the checkpoint belongs to a training with {flag(name)} {before.get(name)}, not {value}; "
                "delete it to start anew, or choose another --out",
                path=path,
            )
    return dict(state)


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


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The fraction of the images that a model classifies correctly."""
    pairs = zip(images.split(1000), labels.split(1000), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs) / len(labels)


def not_refuted(model: nn.Module, images: Tensor, labels: Tensor, eps: float, seed: int) -> float:
    """The fraction of the images classified correctly that a 40-step attack of radius ``eps`` does not refute.

    It is a fraction of all images, those classified wrongly included.
    """
    generator = torch.Generator().manual_seed(seed)
    right = 0
    for x, y in zip(images.split(500), labels.split(500), strict=True):
        with torch.no_grad():
            stands = model(x).argmax(1) == y
        point = attacked(model, x, y, eps, 40, generator)
        with torch.no_grad():
            right += int((stands & (model(point).argmax(1) == y)).sum())
    return right / len(labels)
