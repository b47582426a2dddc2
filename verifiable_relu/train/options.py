"""The arms of a comparison of trainings, and the options of a training in one frozen record.

An arm says which activation is trained, and when ReLU takes its place. A new arm is a row of ``ARMS``, and a new option
a field of ``Options``, from which the trainer, the commands, studies and benchmarks take what they need. The module
does not import torch, so that ``--help`` stays quick.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from verifiable_relu.arguments import fraction
from verifiable_relu.errors import InputError

Swap = Literal["never", "switch", "end"]


@dataclass(frozen=True)
class Arm:
    """The activation of a training, and the time at which ReLU replaces it.

    Attributes:
        activation: the name of the activation's class, in ``verifiable_relu.nn`` if the activation has a hardness λ and
            in ``torch.nn`` otherwise.
        anneals: True for an activation with a hardness λ, which is learned until the switch and annealed after it.
        swap: the time at which ReLU replaces the activation: ``never``, at the ``switch`` (the rest of the training
            then fine-tunes the ReLU network), or at the ``end`` of the training.
    """

    activation: str
    anneals: bool = False
    swap: Swap = "end"


ARMS = {
    "lambda-gelu": Arm("LambdaGELU", anneals=True),
    # λ-Swish with the same λ is as far from ReLU.
    "swish": Arm("LambdaSwish", anneals=True),
    "gelu": Arm("GELU", swap="never"),
    "gelu-swap": Arm("GELU"),
    "gelu-swap-finetune": Arm("GELU", swap="switch"),
    "relu": Arm("ReLU", swap="never"),
    "prelu": Arm("PReLU", swap="never"),
}
"""The arms by name, in the order of the tables. With equal seeds, all arms start from the same weights and see the same
data in the same order."""

Model = Literal["mlp", "cnn", "cnn3", "cnn5", "cnn7", "resnet"]
Schedule = Literal["linear", "log", "inverse"]
Optimizer = Literal["adamw", "sgd"]
Certified = Literal["ibp", "crown-ibp", "sabr"]
Inputs = Literal["standardised", "raw"]

LARGEST_LAM = 1e6
"""The largest λ at the end; f(x; λ) in float32 is no better than ReLU beyond."""

_LARGEST = 1_000_000
"""The largest count, size or weight of a term of the loss that is accepted; a larger one is taken for a mistake."""

_DEEPEST = 100
"""The most hidden layers, and the most convolutions."""

_RANGES: dict[str, tuple[float, float]] = {
    "epochs": (1, _LARGEST),
    "batch": (1, _LARGEST),
    "warmup": (0, _LARGEST),
    "attack_steps": (0, _LARGEST),
    "rate": (0, _LARGEST),
    "decay": (0, _LARGEST),
    "eps": (0, 1),
    "certified": (0, 1),
    "stability": (0, _LARGEST),
    "switch": (0, 1),
    "crop": (0, 64),
    "lam_init": (1, LARGEST_LAM),
    "lam_target": (1, LARGEST_LAM),
    "lam_factor": (0, _LARGEST),
    "seed": (0, 2**63 - 1),
}
"""The least and the greatest value of each option that is a number."""


@dataclass(frozen=True)
class Options:
    """The options of one training; on one machine, two trainings with equal options give equal networks.

    The text beside each option is the command's help.
    """

    data: Annotated[str, "the data set"]
    model: Annotated[
        Model,
        "the architecture; those but mlp and cnn have fixed layers (nn.models), cnn7 batch normalisations; or "
        "PACKAGE:FUNCTION, which makes a module of (shape, classes, activation, normalize)",
    ] = "mlp"
    hidden: Annotated[
        tuple[int, ...],
        "sizes of the fully connected hidden layers, such as 100,100 (mlp, cnn)",
    ] = (100,)
    channels: Annotated[tuple[int, ...], "channels of the convolutions, such as 16,32 (cnn)"] = (16, 32)
    arm: Annotated[str, "the activation that is trained, and when ReLU takes its place (train.options)"] = "lambda-gelu"
    switch: Annotated[float, "fraction of the training after which λ is annealed or GELU replaced"] = 0.25
    epochs: Annotated[int, "epochs in all, including those in which λ is annealed"] = 20
    batch: Annotated[int, "images per step"] = 128
    optimizer: Annotated[Optimizer, "the optimizer of the weights and λ"] = "adamw"
    rate: Annotated[float, "highest learning rate η of the weights"] = 2e-3
    decay: Annotated[float, "decoupled weight decay of matrices and kernels"] = 1e-4
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
        "weight w of the certified loss, the cross-entropy of the worst logits by bounds, against 1 − w for the "
        "(attacked) cross-entropy",
    ] = 0.0
    certified_by: Annotated[
        Certified,
        "the bounds of the certified loss: intervals over the ball, their weighted mean with linear bounds, whose "
        "weight falls from 1 to 0 over --warmup, or intervals over a small box around an attacked point",
    ] = "ibp"
    stability: Annotated[float, "weight of the mean of −tanh(1 + l·u) over all pre-activation intervals [l, u]"] = 0.0
    inputs: Annotated[
        Inputs,
        "images as the first layer sees them: standardised by the data's mean and deviation, or raw, in [0, 1]",
    ] = "standardised"
    crop: Annotated[int, "zero padding of random crops in pixels; 0: no crops"] = 0
    flip: Annotated[bool, "mirror images at random"] = False
    lam_init: Annotated[float, "λ of every layer at the start; at 1 + ln 2, the parameter s is 0"] = 1 + math.log(2)
    lam_target: Annotated[float, "λ of every layer at the end"] = 160.0
    schedule: Annotated[
        Schedule, "the function of λ that changes by equal steps while λ is annealed: λ, log λ or 1/λ"
    ] = "log"
    lam_factor: Annotated[float, "c, a step of λ divided by a step of a weight"] = 9.0
    seed: Annotated[int, "seed of the initial weights, the order of the images, augmentation and attacks"] = 0

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            InputError: for options with which no network can be trained; the error names an option and its value.
        """
        for name, allowed in {**CHOICES, "arm": tuple(ARMS), "loss": ("cross_entropy",)}.items():
            own = name in ("model", "loss") and ":" in getattr(self, name)
            if not own and getattr(self, name) not in allowed:
                raise InputError(f"'{getattr(self, name)}' is none of {', '.join(allowed)}", place=flag(name))
        for name, (least, most) in _RANGES.items():
            self._require(name, least <= getattr(self, name) <= most, f"must be from {least} to {most:,.0f}")
        for name in ("rate", "lam_factor"):
            self._require(name, getattr(self, name) > 0, "must be a positive number")
        for name in ("eps", "switch"):
            self._require(name, getattr(self, name) < 1, "must be below 1")
        for name in ("attack_steps", "certified", "stability"):
            self._require(name, not getattr(self, name) or self.eps > 0, "needs an --eps above 0")
        self._require("certified_by", self.certified_by == "ibp" or self.certified > 0, "needs --certified")
        self._require("certified_by", self.certified_by != "crown-ibp" or self.warmup > 0, "needs --warmup")
        self._require("certified_by", self.certified_by != "sabr" or self.attack_steps > 0, "needs --attack-steps")
        for name in ("hidden", "channels"):
            fit = len(getattr(self, name)) <= _DEEPEST and all(0 < size <= _LARGEST for size in getattr(self, name))
            self._require(name, fit, f"must be at most {_DEEPEST} positive sizes up to {_LARGEST:,}")

    @property
    def anneals(self) -> bool:
        """Return True if the arm's activation has a λ."""
        return ARMS[self.arm].anneals

    @property
    def switch_epoch(self) -> int:
        """The epoch e₀ = ⌈switch·E⌉, counted from 0, in which λ is annealed or GELU replaced; at the latest the last.

        Source: arXiv 2603.21991, with switch = ¼.
        """
        return min(math.ceil(self.switch * self.epochs), self.epochs - 1)

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise InputError(f"{what}, got {getattr(self, name)}", place=flag(name))


CHOICES: dict[str, tuple[str, ...]] = {
    "arm": tuple(ARMS),
    **{name: get_args(hint) for name, hint in get_type_hints(Options).items() if get_origin(hint) is Literal},
}
"""The allowed values of those fields of ``Options`` that take a name."""

ABOUT: dict[str, str] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Options, include_extras=True).items()
}
"""The help of each field of ``Options``."""


def flag(name: str) -> str:
    """The command-line option of a field of ``Options``."""
    return "--" + name.replace("_", "-")


def reader(default: object) -> Callable[[str], Any]:
    """Return the function that reads an option from its text, by the kind of its default."""
    return sizes if isinstance(default, tuple) else number if isinstance(default, float) else type(default)


def number(text: str) -> float:
    """The value of a number, or of a fraction such as ``2/255``, as a float.

    Raises:
        ValueError: if the text is neither.
    """
    try:
        return float(fraction(text))
    except OverflowError:
        raise ValueError(f"'{text}' is beyond the range of float64") from None


def sizes(text: str) -> tuple[int, ...]:
    """The sizes in a text such as ``16,32``; an empty text has none.

    Raises:
        ValueError: if a size is no integer.
    """
    return tuple(int(part) for part in text.split(",") if part)


def int8_file(out: Path) -> Path:
    """The file of the int8 network beside that of the float one."""
    return out.with_suffix(".int8.onnx")
