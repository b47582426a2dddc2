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

Hardness = Literal["none", "learned", "frozen"]
Swap = Literal["never", "switch", "end"]


@dataclass(frozen=True)
class Arm:
    """The activation of a training, and the time at which ReLU replaces it.

    Attributes:
        activation: the name of the activation's class, in ``verifiable_relu.nn`` if the activation has a hardness λ and
            in ``torch.nn`` otherwise.
        about: a line about the arm for the user.
        hardness: ``none`` for an activation without λ. Otherwise λ is annealed from the switch on, and until then
            ``learned``, or ``frozen`` from the start.
        swap: the time at which ReLU replaces the activation: ``never``, at the ``switch`` (the rest of the training
            then fine-tunes the ReLU network), or at the ``end`` of the training.
    """

    activation: str
    about: str
    hardness: Hardness = "none"
    swap: Swap = "end"

    @property
    def ends_in_relu(self) -> bool:
        """Whether the trained network, as it is exported, has ReLU as its activation."""
        return self.activation == "ReLU" or self.swap != "never"


ARMS = {
    "lambda-gelu": Arm("LambdaGELU", "λ-GELU; λ is learned, annealed after the switch; ReLU at the end", "learned"),
    "lambda-gelu-frozen": Arm("LambdaGELU", "λ-GELU; λ is annealed after the switch, never learned", "frozen"),
    "lambda-gelu-kept": Arm("LambdaGELU", "as lambda-gelu, never replaced", "learned", "never"),
    "swish": Arm("LambdaSwish", "as lambda-gelu, with Swish at the same distance to ReLU", "learned"),
    "gelu": Arm("GELU", "GELU, never replaced", swap="never"),
    "gelu-swap": Arm("GELU", "GELU; ReLU at the end"),
    "gelu-swap-finetune": Arm("GELU", "GELU until the switch, then ReLU", swap="switch"),
    "relu": Arm("ReLU", "ReLU from the start", swap="never"),
    "prelu": Arm("PReLU", "PReLU, never replaced", swap="never"),
}
"""The arms by name, in the order of the tables. With equal seeds, all arms start from the same weights and see the same
data in the same order."""

Model = Literal["mlp", "cnn", "cnn3", "cnn5", "cnn7", "resnet"]
Schedule = Literal["linear", "log", "inverse"]
Rate = Literal["raw", "matched", "natural"]
Ramp = Literal["frozen", "learning"]
Distance = Literal["gate", "function", "supremum"]
Optimizer = Literal["adamw", "sgd"]
Certified = Literal["ibp", "crown-ibp", "sabr"]
Growth = Literal["warmup", "ramp"]
Initialisation = Literal["default", "ibp"]
Fall = Literal["cosine", "none"]
Inputs = Literal["standardised", "raw"]

_LARGEST = 1_000_000
"""The largest count, size or weight of a term of the loss that is accepted; a larger one is taken for a mistake."""

LARGEST_LAM = 1e6
"""The largest λ at the end; f(x; λ) in float32 is no better than ReLU beyond."""

_WIDEST = 100
"""The largest factor of the layers' sizes."""

_DEEPEST = 100
"""The most hidden layers, and the most convolutions."""

_LARGEST_CROP = 64
"""The largest padding of random crops, in pixels."""


@dataclass(frozen=True)
class Options:
    """The options of one training; on one machine, two trainings with equal options give equal networks.

    What each option means is told beside it, which is also the command's help.
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
    width: Annotated[float, "factor of the layers' sizes (cnn3, cnn5, cnn7, resnet)"] = 1.0
    arm: Annotated[str, "the activation that is trained, and when ReLU takes its place (train.options)"] = "lambda-gelu"
    switch: Annotated[float, "fraction of the training after which λ is annealed or GELU replaced"] = 0.25
    finetune_extra: Annotated[
        int,
        "epochs of fine-tuning beyond --epochs, for arms that replace GELU at the switch, and then do so after "
        "--epochs",
    ] = 0
    finetune_rate: Annotated[
        float,
        "first learning rate of these epochs, as a fraction of --rate; it falls as a cosine",
    ] = 0.1
    epochs: Annotated[int, "epochs in all, including those in which λ is annealed"] = 20
    batch: Annotated[int, "images per step"] = 128
    optimizer: Annotated[Optimizer, "the optimizer of the weights and λ"] = "adamw"
    momentum: Annotated[float, "momentum of sgd"] = 0.9
    beta1: Annotated[float, "decay of adamw's mean of gradients"] = 0.9
    beta2: Annotated[float, "decay of adamw's mean of squared gradients"] = 0.999
    rate: Annotated[float, "highest learning rate η of the weights"] = 2e-3
    rise: Annotated[float, "fraction of the training over which the learning rate rises"] = 0.2
    fall: Annotated[Fall, "whether the learning rate falls as a cosine to nearly 0 after its rise"] = "cosine"
    decay: Annotated[float, "decoupled weight decay of matrices and kernels"] = 1e-4
    loss: Annotated[
        str,
        "the loss at the images, or attacked ones: cross_entropy, or PACKAGE:FUNCTION of logits (n, classes) and "
        "classes (n,)",
    ] = "cross_entropy"
    l1: Annotated[float, "factor of the sum of the weights' absolute values in the loss"] = 0.0
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
    small_box: Annotated[float, "radius of sabr's box, as a fraction of ε"] = 0.4
    stability: Annotated[float, "weight of the mean of −tanh(1 + l·u) over all pre-activation intervals [l, u]"] = 0.0
    terms_grow: Annotated[
        Growth,
        "when --certified and --stability grow from 0: with ε, or over the first half of the time in which λ is "
        "annealed (in arms without λ too)",
    ] = "warmup"
    initialisation: Annotated[
        Initialisation,
        "distribution of the initial weights; ibp: intervals keep their width",
    ] = "default"
    inputs: Annotated[
        Inputs,
        "whether the network first subtracts the data's mean and divides by its deviation, or takes images in [0, 1] "
        "as they are",
    ] = "standardised"
    crop: Annotated[int, "zero padding of random crops in pixels; 0: no crops"] = 0
    flip: Annotated[bool, "mirror images at random"] = False
    lam_init: Annotated[float, "λ of every layer at the start; at 1 + ln 2, the parameter s is 0"] = 1 + math.log(2)
    lam_temperature: Annotated[float, "t in λ = 1 + softplus(s/t)"] = 0.1
    lam_target: Annotated[float, "λ of every layer at the end, unless --tolerance says it"] = 160.0
    tolerance: Annotated[
        float,
        "distance to ReLU from which λ at the end follows, in place of --lam-target; 0: unused",
    ] = 0.0
    tolerance_on: Annotated[
        Distance,
        "the distance: ∫|gate − step|, ∫|activation − ReLU| or max |activation − ReLU|",
    ] = "gate"
    ramp: Annotated[
        Ramp,
        "whether λ follows the schedule alone while it is annealed, or is learned further besides",
    ] = "frozen"
    schedule: Annotated[Schedule, "whether the annealing is linear in λ, in log λ or in 1/λ (inverse)"] = "log"
    lam_rate: Annotated[
        Rate,
        "how the learning rate of λ's parameter s follows from the weights' (train.schedule)",
    ] = "matched"
    lam_factor: Annotated[float, "c, a step of λ divided by a step of a weight"] = 9.0
    seed: Annotated[int, "seed of the initial weights, the order of the images, augmentation and attacks"] = 0

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            InputError: for options with which no network can be trained; the error names an option and its value.
        """
        for name, allowed in {**CHOICES, "loss": ("cross_entropy",)}.items():
            own = name in ("model", "loss") and ":" in getattr(self, name)
            if not own and getattr(self, name) not in allowed:
                raise InputError(f"'{getattr(self, name)}' is none of {', '.join(allowed)}", place=flag(name))
        least = {"epochs": 1, "batch": 1}
        counts = "epochs", "batch", "warmup", "attack_steps", "finetune_extra"
        for name in (*counts, "decay", "l1", "eps", "certified", "stability", "tolerance"):
            self._require(name, getattr(self, name) >= least.get(name, 0), f"must be at least {least.get(name, 0)}")
            self._require(name, getattr(self, name) <= _LARGEST, f"must be at most {_LARGEST:,}")
        for name in ("rate", "lam_factor", "lam_temperature", "finetune_rate", "width"):
            self._require(name, 0 < getattr(self, name) < math.inf, "must be a positive number")
        for name in ("lam_init", "lam_target"):
            self._require(name, 1 <= getattr(self, name) < math.inf, "must be a finite number of at least 1")
        self._require("width", self.width <= _WIDEST, f"must be at most {_WIDEST:,}")
        self._require("seed", 0 <= self.seed < 2**63, "must be at least 0 and below 2^63")
        self._require("certified", self.certified <= 1, "must be at most 1")
        self._require("eps", self.eps < 1, "must be below 1: images lie in [0, 1]")
        for name in ("attack_steps", "certified", "stability"):
            self._require(name, not getattr(self, name) or self.eps > 0, "needs an --eps above 0")
        self._require("small_box", 0 < self.small_box <= 1, "must lie in (0, 1]")
        self._require("certified_by", self.certified_by == "ibp" or self.certified > 0, "needs --certified")
        self._require("certified_by", self.certified_by != "crown-ibp" or self.warmup > 0, "needs --warmup")
        self._require("certified_by", self.certified_by != "sabr" or self.attack_steps > 0, "needs --attack-steps")
        self._require("terms_grow", self.terms_grow == "warmup" or self._bounded, "needs --certified or --stability")
        for name in ("rise", "switch", "momentum", "beta1", "beta2"):
            self._require(name, 0 <= getattr(self, name) < 1, "must lie in [0, 1)")
        self._require("tolerance", self.tolerance == 0 or self.target >= 1, "asks for a λ below 1")
        name = "tolerance" if self.tolerance else "lam_target"
        self._require(name, self.target <= LARGEST_LAM, f"asks for a λ above {LARGEST_LAM:g}")
        if self.finetune_extra:
            tuned = ", ".join(name for name, arm in ARMS.items() if arm.swap == "switch")
            self._require("arm", ARMS[self.arm].swap == "switch", f"must be {tuned} for --finetune-extra")
        self._require("crop", 0 <= self.crop <= _LARGEST_CROP, f"must be at least 0 and at most {_LARGEST_CROP}")
        for name in ("hidden", "channels"):
            fit = len(getattr(self, name)) <= _DEEPEST and all(0 < size <= _LARGEST for size in getattr(self, name))
            self._require(name, fit, f"must be at most {_DEEPEST} positive sizes up to {_LARGEST:,}")

    @property
    def target(self) -> float:
        """The value of λ at the end: ``lam_target``, or the least λ at which the distance is at most ``tolerance``.

        For f(x) = x·Φ(λx) and the step function H: ∫|Φ(λx) − H(x)|dx = 2/(λ√(2π)), ∫|f − ReLU|dx = 1/(2λ²) and
        max |f − ReLU| = 0.1699712075/λ.
        """
        if self.tolerance == 0:
            return self.lam_target
        if self.tolerance_on == "gate":
            return math.sqrt(2 / math.pi) / self.tolerance
        if self.tolerance_on == "function":
            return math.sqrt(0.5 / self.tolerance)
        return 0.16997120747990369 / self.tolerance

    @property
    def anneals(self) -> bool:
        """Whether the arm's activation has a λ."""
        return ARMS[self.arm].hardness != "none"

    @property
    def total_epochs(self) -> int:
        """The number of epochs, including the extra epochs of fine-tuning."""
        return self.epochs + self.finetune_extra

    @property
    def first_annealed(self) -> int:
        """The epoch e₀ = ⌈switch·E⌉, counted from 0, in which the annealing of λ begins; at the latest the last epoch.

        Source: arXiv 2603.21991, with switch = ¼.
        """
        return min(math.ceil(self.switch * self.epochs), self.epochs - 1)

    @property
    def swapped_from(self) -> int:
        """The epoch, counted from 0, before which ReLU replaces the activation; ``total_epochs`` if after the last."""
        if ARMS[self.arm].swap != "switch":
            return self.total_epochs
        return self.epochs if self.finetune_extra else self.first_annealed

    @property
    def _bounded(self) -> bool:
        return self.certified > 0 or self.stability > 0

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
"""What each field of ``Options`` means."""


def flag(name: str) -> str:
    """The command-line option of a field of ``Options``."""
    return "--" + name.replace("_", "-")


def reader(default: object) -> Callable[[str], Any]:
    """What reads an option from its text, by the option's default."""
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
