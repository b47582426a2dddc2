"""The loop that trainings and hardenings share, with its schedules and checkpoints, and the training of every arm.

In an arm's training, weights and λ are learned, and then λ is annealed or the activation replaced by ReLU.
"""

from __future__ import annotations

import io
import math
import pickle
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verifiable_relu.command_line import imported
from verifiable_relu.data import Dataset
from verifiable_relu.errors import InputError
from verifiable_relu.files import write_whole
from verifiable_relu.nn import Normalize, cnn, fixed, gates, mlp, substitute_relu
from verifiable_relu.nn.gates import SUPREMUM, Hardness
from verifiable_relu.train.batches import Batch, SubstitutionEffect, at, measure
from verifiable_relu.train.losses import attacked, augment, objective
from verifiable_relu.train.options import ARMS, LARGEST_LAM, SCHEDULES, Options, Schedule, flag

RISE = 0.2  # The fraction of the training over which the learning rate rises
MOMENTUM = 0.9  # Of SGD


class Diverged(InputError):
    """The loss of a training became infinite or NaN."""


@dataclass(frozen=True)
class TrainingStep:
    """The state of a training or a hardening after ``step`` of ``steps`` steps, as callbacks see it.

    ``loss`` is that of the step's batch, ``lam`` λ of each gate; callbacks must leave ``model`` in training mode.
    """

    step: int
    steps: int
    loss: float
    lam: list[float]
    model: nn.Module

    def __str__(self) -> str:
        return f"loss {self.loss:.3f}" + (f", λ {min(self.lam):.1f}" if self.lam else "")


Callback = Callable[[TrainingStep], object]  # Called after every step


@dataclass(frozen=True)
class Epoch:
    """A pass over the data: the loss of each step, and the seconds that it took."""

    losses: list[float]
    seconds: float


def lambdas(model: nn.Module) -> list[float]:
    """Return λ of each gate of a model."""
    return [module.lam.item() for module in model.modules() if isinstance(module, Hardness)]


@dataclass(frozen=True)
class Checkpoint:
    """The file from which a training or a hardening goes on after its last complete epoch.

    The ``options`` of the training have to be the same when it goes on. It consists of ``parts``, by name: objects with
    a ``state_dict``, generators and lists, whose states are loaded in this order, and None. Without a path, nothing is
    saved.
    """

    path: Path | None
    options: Mapping[str, Any]
    parts: Mapping[str, Any]

    def save(self, epochs: int) -> None:
        """Write the state after a number of epochs."""
        if self.path is None:
            return
        state: dict[str, Any] = {"options": {**self.options}, "epochs": epochs}
        for name, part in self.parts.items():
            is_generator, is_plain = isinstance(part, torch.Generator), isinstance(part, list | None)
            state[name] = part if is_plain else part.get_state() if is_generator else part.state_dict()
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_whole(self.path, buffer.getvalue())

    def restore(self) -> int:
        """Load the state that was saved last; returns the number of epochs done, 0 without a file.

        Raises an InputError if it is damaged, or of a training with another value of an option, which the error names.
        """
        if self.path is None or not self.path.is_file():
            return 0
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            before, epochs, parts = state["options"], int(state["epochs"]), [state[name] for name in self.parts]
        except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
            raise InputError(f"not a readable checkpoint ({error}); delete it to start anew", path=self.path) from error
        for name, value in self.options.items():
            if before.get(name) != value:
                raise InputError(
                    f"the checkpoint belongs to a training with {flag(name)} {before.get(name)}, not {value}; "
                    "delete it to start anew, or choose another --out",
                    path=self.path,
                )
        for part, held in zip(self.parts.values(), parts, strict=True):
            if isinstance(part, list):
                part[:] = held
            elif isinstance(part, torch.Generator):
                part.set_state(held)
            elif part is not None:
                part.load_state_dict(held)
        return epochs


def fit(
    model: nn.Module,
    epochs: int,
    begin: Callable[[int], Collection[Batch]],
    loss: Callable[[nn.Module, Batch], Tensor],
    optimizer: torch.optim.Optimizer,
    before: Callable[[int], None] = lambda step: None,
    callbacks: Sequence[Callback] = (),
    checkpoint: Checkpoint = Checkpoint(None, {}, {}),
) -> Iterator[Epoch]:
    """Train a model for a number of epochs, and yield at the end of each.

    ``begin`` is called at the start of each epoch with its number from 0, and returns its batches. ``before`` is called
    before each step with the number of steps taken so far, to set λ and learning rates, and ``callbacks`` after it; the
    time of these is not the epoch's. The checkpoint is restored at the start, and saved after each epoch once the
    caller asks for the next one.

    Raises:
        Diverged: if the loss becomes infinite or NaN.
        InputError: if the loss is no number that depends on the model's parameters, or for a bad checkpoint.
        DataError: if the model does not take a batch; the error names the batch.
    """
    for epoch in range(checkpoint.restore(), epochs):
        began, losses = time.monotonic(), []
        batches = begin(epoch)
        for index, batch in enumerate(batches):
            step = epoch * len(batches) + index
            model.train()
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
            losses.append(found.item())
            stepped = time.monotonic()
            if callbacks:
                state = TrainingStep(step + 1, epochs * len(batches), losses[-1], lambdas(model), model)
                for callback in callbacks:
                    callback(state)
            began += time.monotonic() - stepped
        yield Epoch(losses, time.monotonic() - began)
        checkpoint.save(epoch + 1)


@contextmanager
def progress_bar(wanted: bool, steps: int) -> Iterator[Callable[[int, str], None]]:
    """Yield a function that shows the number of steps taken, of ``steps``, and a text on stderr, if it is wanted."""
    if not wanted:
        yield lambda taken, text: None
        return
    # Imported here, because the bar alone needs the library rich.
    from rich import progress
    from rich.console import Console

    said = progress.TextColumn("{task.description}", markup=False)
    columns = progress.MofNCompleteColumn(), progress.BarColumn(), said
    times = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
    with progress.Progress(*columns, *times, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=steps)
        yield lambda taken, text: bar.update(task, completed=taken, description=text)


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
        model: a model with λ-gates (``hardening.soften``), the attribute ``gates``.
        steps: T ≥ 1, the number of steps over which λ grows; ``taken`` is the number so far.
        target: λ at the end, at least 1; the paper's is 160. ``start`` is λ of each gate at the beginning.
        schedule: ``linear`` in λ, in ``log`` λ or in 1/λ (``inverse``), see ``hardness``.

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
        self.start = lambdas(model)
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


def learning_rate(highest: float, step: int, steps: int) -> float:
    """Return the learning rate of a one-cycle schedule.

    It rises linearly from ``highest``/25 to ``highest`` over the first ``RISE``·``steps`` steps, then falls as a cosine
    to nearly 0.
    """
    peak = RISE * steps
    if step < peak:
        return highest * (1 / 25 + (1 - 1 / 25) * step / peak)
    return highest * (1 + math.cos(math.pi * (step - peak + 1) / (steps - peak + 1))) / 2


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """Make AdamW or SGD over a model's parameters, with a rate of its own for the s of each λ = 1 + softplus(s/t).

    Adam moves every parameter by about its learning rate whatever the size of its gradient, and SGD by a multiple of
    the gradient, in which the chain rule puts a factor 1/t for s. For the learning rate η of the weights, that of s is
    thus c·t·η with Adam and c·t²·η with SGD: c is a step of λ divided by a step of a weight, but for the softplus's
    slope. (The plain c·η of arXiv 2603.21991, with t = 0.1, is that of Adam for ten times the c.) The parameter s gets
    no weight decay, which would pull λ to 1 + ln 2, an arbitrary value.

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


def activation(options: Options) -> nn.Module:
    """Make the activation that the options' arm trains."""
    arm = ARMS[options.arm]
    made: nn.Module = getattr(gates, arm.activation)(options.lam_init) if arm.anneals else getattr(nn, arm.activation)()
    return made


def build(options: Options, data: Dataset) -> nn.Module:
    """Make the untrained network for the images of a data set; equal seeds give equal weights, whatever the arm.

    Raises an InputError if the architecture does not fit the images, or if a module of the user's cannot be made.
    """
    normalize = Normalize(data.mean, data.std) if options.inputs == "standardised" else None
    shape = channels, height, width = data.images.shape[1:]
    make = partial(activation, options)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(options.seed)
        try:
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
                    return fixed(options.model, shape, data.classes, make, normalize)
        except InputError:
            raise
        except ValueError as error:
            raise InputError(str(error), place=flag("model")) from error


def train(
    options: Options,
    data: Dataset,
    saved: Path | None = None,
    callback: Callback | None = None,
    test: Dataset | None = None,
    device: str = "cpu",
) -> Training:
    """Train a network, resuming from its checkpoint if there is one.

    A training that was interrupted and resumed gives, bit for bit, the same network as one that was not: the order of
    the images, the augmentation and the attacks of an epoch depend on the seed and the epoch's number alone.

    Args:
        saved: the path of the checkpoint, which is written after each epoch; None writes none.
        callback: called after every step; its time does not count as that of the training.
        test: the images on which a replacement by ReLU at the switch is measured; None takes those of ``data``.
        device: a torch device, on which all of ``data`` is held; the trained model is on the CPU.

    Raises: InputError: if the network does not fit the images, for a bad checkpoint, or (Diverged) a loss that is not
    finite.
    """
    run = Training(options, data, data if test is None else test, device)
    parts = {"training": run, "history": run.history, "model": run.model, "optimizer": run.optimizer}
    parts |= {"random": torch.default_generator}
    kept, watching = Checkpoint(saved, asdict(options), parts), () if callback is None else (callback,)
    for epoch in fit(run.model, options.epochs, run.begin, run.loss, run.optimizer, run.before, watching, kept):
        run.end(epoch)
    run.model.cpu()
    return run


class Training:
    """The training of an arm, as ``fit`` asks for its parts, and afterwards its result.

    Attributes:
        model: the model, after the last step with every λ at its target, or with ReLU in arms that swap at the switch.
        history: for each epoch ``lam`` (of each layer, at the end), ``loss`` and ``accuracy`` (means over the possibly
            augmented and attacked images trained on) and ``seconds``.
        learned: each layer's λ when the annealing began.
        swap: the effect of the replacement by ReLU at the switch; None in other arms.
    """

    def __init__(self, options: Options, data: Dataset, test: Dataset, device: str) -> None:
        self.options, self.test, self.device = options, test, device
        self.images, self.labels = (torch.from_numpy(each).to(device) for each in (data.images, data.labels))
        self.model = build(options, data).to(device)
        single = len(self.images) % options.batch == 1
        if single and any(isinstance(module, nn.BatchNorm1d) for module in self.model.modules()):
            message = "the last step of an epoch has one image, which a batch normalisation cannot normalise"
            raise InputError(message, place=flag("batch"))
        self.optimizer = make_optimizer(self.model, options)
        self.per_epoch = math.ceil(len(self.images) / options.batch)
        self.history: list[dict[str, Any]] = []
        self.swap: SubstitutionEffect | None = None
        self.annealing: Annealing | None = None

    @property
    def learned(self) -> list[float]:
        return [] if self.annealing is None else self.annealing.start

    def state_dict(self) -> dict[str, Any]:
        return {
            "annealing": None if self.annealing is None else self.annealing.state_dict(),
            "swap": None if self.swap is None else asdict(self.swap),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["swap"] is not None:
            self.swap = SubstitutionEffect(**state["swap"])
            substitute_relu(self.model, inplace=True)
        if state["annealing"] is not None:
            self.anneal().load_state_dict(state["annealing"])

    def anneal(self) -> Annealing:
        steps = self.per_epoch * (self.options.epochs - self.options.switch_epoch)
        self.annealing = Annealing(self.model, steps, self.options.lam_target, self.options.schedule)
        return self.annealing

    def begin(self, epoch: int) -> tuple[Tensor, ...]:
        """Begin an epoch, with the annealing or the replacement that is due; returns the indices of each batch."""
        arm = ARMS[self.options.arm]
        self.generator = torch.Generator().manual_seed(1_000_003 * self.options.seed + epoch)
        self.right = 0
        if epoch >= self.options.switch_epoch:
            if arm.anneals and self.annealing is None:
                self.anneal()
            if arm.swap == "switch" and self.swap is None:
                self.swap = measure_swap(self.model.eval(), substitute_relu(self.model), self.test, self.device)
                substitute_relu(self.model, inplace=True)
        self.order = torch.randperm(len(self.images), generator=self.generator).split(self.options.batch)
        return self.order

    def before(self, step: int) -> None:
        options, growing = self.options, self.options.warmup * self.per_epoch
        self.fraction = min(1.0, step / growing) if growing else 1.0
        if self.annealing is not None:
            self.annealing.step()
        set_rates(self.optimizer, learning_rate(options.rate, step, self.per_epoch * options.epochs), options)

    def loss(self, model: nn.Module, chosen: Tensor) -> Tensor:
        options = self.options
        x, y = augment(self.images[chosen], options.crop, options.flip, self.generator), self.labels[chosen]
        value, logits = objective(model, x, y, options, self.fraction, self.generator)
        self.right += int((logits.argmax(1) == y).sum())
        return value

    def end(self, epoch: Epoch) -> None:
        """Add an epoch to the history."""
        total = sum(value * len(chosen) for value, chosen in zip(epoch.losses, self.order, strict=True))
        count = len(self.images)
        means = {"loss": total / count, "accuracy": self.right / count}
        self.history.append({"lam": lambdas(self.model), **means, "seconds": round(epoch.seconds, 3)})


def measure_swap(smooth: nn.Module, hard: nn.Module, data: Dataset, device: str = "cpu") -> SubstitutionEffect:
    """Measure the replacement by ReLU on the images of a data set."""
    images, labels = (torch.from_numpy(each).to(device) for each in (data.images, data.labels))
    return measure(smooth, hard, list(zip(images.split(1000), labels.split(1000), strict=True)))


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of the images that a model classifies correctly."""
    pairs = zip(images.split(1000), labels.split(1000), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs) / len(labels)


def not_refuted(model: nn.Module, images: Tensor, labels: Tensor, eps: float, seed: int) -> float:
    """Return the fraction of images classified correctly that a 40-step attack of radius ``eps`` leaves so."""
    generator = torch.Generator().manual_seed(seed)
    right = 0
    for x, y in zip(images.split(500), labels.split(500), strict=True):
        with torch.no_grad():
            stands = model(x).argmax(1) == y
        point = attacked(model, x, y, eps, 40, generator)
        with torch.no_grad():
            right += int((stands & (model(point).argmax(1) == y)).sum())
    return right / len(labels)
