"""The options of trainings and hardenings as frozen dataclasses, from which their command lines are made.

An arm says which activation is trained, and when ReLU takes its place. A new arm is a row of ``ARMS``, and a new option
a field of ``Options``. The module does not import torch, so that ``--help`` stays quick.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from verifiable_relu.command_line import add_debug, fraction
from verifiable_relu.data import DATASETS
from verifiable_relu.errors import InputError
from verifiable_relu.files import require_writable


@dataclass(frozen=True)
class Arm:
    """The activation of a training, and the time at which ReLU replaces it.

    The ``activation`` is a class of ``verifiable_relu.nn`` if it ``anneals``, that is, has a hardness λ, which is
    learned until the switch and annealed after it, else of ``torch.nn``. ReLU comes ``never``, at the ``switch`` (the
    rest of the training fine-tunes it), or at the ``end``.
    """

    activation: str
    anneals: bool = False
    swap: Literal["never", "switch", "end"] = "end"


ARMS = {
    "lambda-gelu": Arm("LambdaGELU", anneals=True),
    # λ-Swish with the same λ is as far from ReLU.
    "swish": Arm("LambdaSwish", anneals=True),
    "gelu-swap": Arm("GELU"),
    "gelu-swap-finetune": Arm("GELU", swap="switch"),
    "relu": Arm("ReLU", swap="never"),
    "prelu": Arm("PReLU", swap="never"),
}
"""The arms by name, in the order of the tables. With equal seeds, all arms start from the same weights and see the same
data in the same order."""

Model = Literal["mlp", "cnn", "cnn3", "cnn5", "cnn7", "resnet"]
Schedule = Literal["linear", "log", "inverse"]

SCHEDULES: tuple[str, ...] = get_args(Schedule)

LARGEST_LAM = 1e6  # The largest λ at the end; f(x; λ) in float32 is no better than ReLU beyond

_LARGEST = 1_000_000  # A larger count, size or weight of a term of the loss is taken for a mistake
_DEEPEST = 100  # The most hidden layers, and the most convolutions

RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("epochs", "batch", "samples", "images"), (1, _LARGEST)),
    **dict.fromkeys(("warmup", "attack_steps", "rate", "decay", "stability", "lam_factor"), (0, _LARGEST)),
    **dict.fromkeys(("change_timeout", "timeout"), (0, _LARGEST)),
    **dict.fromkeys(("eps", "certified", "switch"), (0, 1)),
    **dict.fromkeys(("lam_init", "lam_target", "target"), (1, LARGEST_LAM)),
    "crop": (0, 64),
    "seed": (0, 2**63 - 1),
}
"""The least and the greatest value of each option that is a number."""

POSITIVE = ("rate", "lam_factor", "timeout")
"""The options that are not 0, although their range begins there."""

DATA_HELP = f"{', '.join(DATASETS)}; or a FILE.npz with the arrays images, in [0, 1], and labels"

# The options that a training and a hardening have in common.
Epochs = Annotated[int, "passes over the data, including those in which λ is annealed"]
Growth = Annotated[Schedule, "λ grows by equal steps of λ, of log λ, or of 1/λ"]


@dataclass(frozen=True)
class Options:
    """The options of one training; on one machine, two trainings with equal options give equal networks.

    The text next to each option is the command's help; those without one are for Python alone: the optimizer, the
    weight ``decay`` of matrices and kernels, the bounds ``certified_by`` which the loss is certified
    (``losses.objective``), whether ``inputs`` are standardised by the data's mean and deviation, λ at the start
    (1 + ln 2 is s = 0), and c = ``lam_factor``, a step of λ divided by a step of a weight.
    """

    data: Annotated[str, f"{DATA_HELP} (test_images and test_labels too, else every tenth image is kept for the test)"]
    model: Annotated[
        Model,
        "the architecture; those but mlp and cnn have fixed layers (nn.models), cnn7 batch normalisations; or "
        "PACKAGE:FUNCTION, which makes a module of (shape, classes, activation, normalize)",
    ] = "mlp"
    hidden: Annotated[tuple[int, ...], "sizes of the fully connected hidden layers, such as 100,100 (mlp, cnn)"] = (
        100,
    )
    channels: Annotated[tuple[int, ...], "channels of the convolutions, such as 16,32 (cnn)"] = (16, 32)
    arm: Annotated[str, f"the activation that is trained, and when ReLU takes its place: {', '.join(ARMS)}"] = (
        "lambda-gelu"
    )
    switch: Annotated[float, "fraction of the training after which λ is annealed or GELU replaced"] = 0.25
    epochs: Epochs = 20
    batch: Annotated[int, "images per step"] = 128
    optimizer: Literal["adamw", "sgd"] = "adamw"
    rate: Annotated[float, "highest learning rate η of the weights"] = 2e-3
    decay: float = 1e-4
    loss: Annotated[
        str,
        "the loss at the images, or attacked ones: cross_entropy, or PACKAGE:FUNCTION of logits (n, classes) and "
        "classes (n,)",
    ] = "cross_entropy"
    eps: Annotated[
        float,
        "radius ε of the L∞ ball of the attack, of the intervals and of the attack whose accuracy is reported, such "
        "as 2/255; 0: images alone",
    ] = 0.0
    warmup: Annotated[int, "epochs over which ε grows from 0"] = 0
    attack_steps: Annotated[int, "steps of the attack in training; 0: no attack"] = 0
    certified: Annotated[
        float,
        "weight w of the certified loss, the cross-entropy of the worst logits by intervals, against 1 − w for the "
        "(attacked) cross-entropy",
    ] = 0.0
    certified_by: Literal["ibp", "crown-ibp", "sabr"] = "ibp"
    stability: Annotated[float, "weight of the mean of −tanh(1 + l·u) over all pre-activation intervals [l, u]"] = 0.0
    inputs: Literal["standardised", "raw"] = "standardised"
    crop: Annotated[int, "zero padding of random crops in pixels; 0: no crops"] = 0
    flip: Annotated[bool, "mirror images at random"] = False
    lam_init: float = 1 + math.log(2)
    lam_target: Annotated[float, "λ of every layer at the end"] = 160.0
    schedule: Growth = "log"
    lam_factor: float = 9.0
    seed: Annotated[int, "seed of the initial weights, the order of the images, augmentation and attacks"] = 0

    def __post_init__(self) -> None:
        """Raise an InputError for options with which no network can be trained; it names an option and its value."""
        require_allowed(self, arm=tuple(ARMS), loss=("cross_entropy",))
        for name in ("eps", "switch"):
            require(self, name, getattr(self, name) < 1, "must be below 1")
        for name in ("attack_steps", "certified", "stability"):
            require(self, name, not getattr(self, name) or self.eps > 0, "needs an --eps above 0")
        require(self, "certified_by", self.certified_by == "ibp" or self.certified > 0, "needs --certified")
        require(self, "certified_by", self.certified_by != "crown-ibp" or self.warmup > 0, "needs --warmup")
        require(self, "certified_by", self.certified_by != "sabr" or self.attack_steps > 0, "needs --attack-steps")
        for name in ("hidden", "channels"):
            fit = len(getattr(self, name)) <= _DEEPEST and all(0 < size <= _LARGEST for size in getattr(self, name))
            require(self, name, fit, f"must be at most {_DEEPEST} positive sizes up to {_LARGEST:,}")

    @property
    def switch_epoch(self) -> int:
        """The epoch e₀ = ⌈switch·E⌉, counted from 0, in which λ is annealed or GELU replaced; at the latest the last.

        Source: arXiv 2603.21991, with switch = ¼.
        """
        return min(math.ceil(self.switch * self.epochs), self.epochs - 1)


def require(options: object, name: str, holds: bool, what: str) -> None:
    """Raise an InputError that names an option and its value, unless a condition holds."""
    if not holds:
        raise InputError(f"{what}, got {getattr(options, name)}", place=flag(name))


def require_allowed(options: Any, **names: tuple[str, ...]) -> None:
    """Raise an InputError if options have values that their types, ``RANGES`` and ``names`` do not allow.

    None is always allowed; ``model`` and ``loss`` may be ``PACKAGE:NAME``.
    """
    kinds = get_type_hints(type(options))
    for name in (field.name for field in fields(options)):
        value = getattr(options, name)
        allowed = get_args(kinds[name]) if get_origin(kinds[name]) is Literal else names.get(name, ())
        if allowed and value not in allowed and not (name in ("model", "loss") and ":" in value):
            raise InputError(f"'{value}' is not one of {', '.join(allowed)}", place=flag(name))
        may_be_text = str in (kinds[name], *get_args(kinds[name]))
        if name in RANGES and value is not None and not (may_be_text and isinstance(value, str)):
            require(options, name, isinstance(value, int | float), "must be a number")
            least, most = RANGES[name]
            require(options, name, least <= value <= most, f"must be from {least} to {most:,.0f}")
            require(options, name, value > 0 or name not in POSITIVE, "must be a positive number")


def add_options(to: argparse.ArgumentParser, options: type, device: str) -> None:
    """Add to a command line the options of a dataclass, and what all trainings take.

    An option is a field hinted as ``Annotated[type, help]``; ``device`` is the default of ``--device``.
    """
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        if get_origin(hints[field.name]) is not Annotated:
            continue
        kind, about = get_args(hints[field.name])
        if kind is bool:
            to.add_argument(flag(field.name), action="store_true", help=about)
            continue
        names = get_args(kind) if get_origin(kind) is Literal else None
        # A model may be one of the user's.
        choices = None if field.name == "model" else names
        about += "" if names is None else f": {', '.join(names)}"
        if field.default is MISSING:
            to.add_argument(flag(field.name), required=True, help=about)
            continue
        value = field.default
        if value is not None:
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}" if kind is float else value
            about += f" ({shown})"
        readers: dict[Any, Callable[[str], Any]] = {float: number, int: int, Path: Path}
        plain = next(each for each in (*get_args(kind), kind) if each is not type(None))
        read = sizes if get_origin(kind) is tuple else readers.get(plain, str)
        to.add_argument(flag(field.name), type=read, choices=choices, default=value, help=about)
    to.add_argument("--device", default=device, help=f"a torch device; auto: a GPU if there is one ({device})")
    to.add_argument("--int8", action="store_true", help="also write the int8 network, as NAME.int8.onnx")
    to.add_argument("--out", type=Path, required=True, help="the ONNX file to write")
    add_debug(to)


def flag(name: str) -> str:
    """Return the command-line option of a field."""
    return "--" + name.replace("_", "-")


def number(text: str) -> float:
    """Return the float of a number, or of a fraction such as ``2/255``; raises ValueError for another text."""
    try:
        return float(fraction(text))
    except OverflowError:
        raise ValueError(f"'{text}' is beyond the range of float64") from None


def sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in a text such as ``16,32``; an empty text has none."""
    return tuple(int(part) for part in text.split(",") if part)


def int8_file(out: Path) -> Path:
    """Return the path of the int8 network that belongs to a float one."""
    return out.with_suffix(".int8.onnx")


def require_outputs(out: Path, int8: bool, *suffixes: str) -> None:
    """Raise an InputError, before a training, if ``out`` or its files with other suffixes cannot be written."""
    if out.suffix != ".onnx":
        raise InputError("the name of the output file must end in .onnx", path=out)
    for path in (out, *map(out.with_suffix, suffixes), *([int8_file(out)] if int8 else ())):
        require_writable(path)
