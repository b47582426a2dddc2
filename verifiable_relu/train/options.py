"""The options of a training in one frozen record, and how the command line spells them.

The module does not import torch, so that ``--help`` stays quick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from verifiable_relu.arguments import fraction
from verifiable_relu.errors import InputError
from verifiable_relu.train.arms import ARMS

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

_WIDEST = 100
"""The largest factor of the layers' sizes."""

_DEEPEST = 100
"""The most hidden layers, and the most convolutions."""

_LARGEST_CROP = 64
"""The largest padding of random crops, in pixels."""

CHOICES: dict[str, tuple[str, ...]] = {
    "model": get_args(Model),
    "arm": tuple(ARMS),
    "schedule": get_args(Schedule),
    "ramp": get_args(Ramp),
    "tolerance_on": get_args(Distance),
    "lam_rate": get_args(Rate),
    "optimizer": get_args(Optimizer),
    "certified_by": get_args(Certified),
    "terms_grow": get_args(Growth),
    "initialisation": get_args(Initialisation),
    "fall": get_args(Fall),
    "inputs": get_args(Inputs),
}
"""The allowed values of those fields of ``Options`` that take a name."""


@dataclass(frozen=True)
class Options:
    """The options of one training; on one machine, two trainings with equal options give equal networks.

    Attributes:
        data: the name of a data set (``verifiable_relu.data.load``).
        model: the architecture: ``mlp``, ``cnn``, or one of fixed layers (``nn.models``), which are ``cnn3``, ``cnn5``,
            ``cnn7`` (with batch normalisations, for a GPU) and ``resnet``.
        hidden: the sizes of the fully connected hidden layers (``mlp`` and ``cnn`` only).
        channels: the channels of the convolutions (``cnn`` only).
        width: the factor of the layers' sizes (architectures of fixed layers only).
        arm: a row of ``train.arms.ARMS``: the activation that is trained, and the time at which ReLU replaces it.
        switch: the fraction of the training after which λ is annealed, or GELU is replaced by ReLU for fine-tuning.
        finetune_extra: the number of epochs of fine-tuning beyond ``epochs``, for arms that replace the activation at
            the switch. If it is positive, they replace the activation after ``epochs`` epochs; if it is 0, at the
            switch.
        finetune_rate: the learning rate at the start of these extra epochs, as a fraction of ``rate``; it then falls as
            a cosine.
        epochs: E, the number of epochs without those of ``finetune_extra``.
        batch: the number of images per step.
        optimizer: ``adamw`` or ``sgd``.
        momentum: the momentum of ``sgd``.
        beta1: the decay of ``adamw``'s mean of gradients.
        beta2: the decay of ``adamw``'s mean of squared gradients.
        rate: η, the highest learning rate of the weights. The learning rate rises to η over ``rise``·E epochs and then
            falls by ``fall``.
        rise: the fraction of the training over which the learning rate rises.
        fall: whether the learning rate falls as a ``cosine`` to nearly 0, or not at all (``none``).
        decay: the decoupled weight decay of matrices and kernels.
        l1: the factor of the sum of the absolute values of matrices and kernels in the loss.
        eps: ε, the radius of the L∞ ball for the attack, the intervals and the reported attacked accuracy; 0 trains on
            the images alone.
        warmup: the number of epochs over which ε grows from 0.
        attack_steps: the number of steps of the attack in training; 0 leaves the attack out.
        certified: the weight w of the certified loss, the cross-entropy of the worst logits by bounds, against 1 − w
            for the (attacked) cross-entropy.
        certified_by: the bounds of the certified loss (``train.objective``): ``ibp``, intervals over the ball;
            ``crown-ibp``, their weighted mean with linear bounds, whose weight falls from 1 to 0 over ``warmup``;
            ``sabr``, intervals over a small box around an attacked point.
        small_box: τ/ε, the radius of ``sabr``'s box as a fraction of ε.
        stability: the weight of the mean of −tanh(1 + l·u) over all pre-activation intervals [l, u].
        terms_grow: the time over which the weights ``certified`` and ``stability`` grow from 0. ``warmup``: together
            with ε. ``ramp``: over the first half of the time in which λ is annealed (in arms without λ too), so that
            neurons become stable while their activation is still smooth.
        initialisation: the distribution of the initial weights: torch's ``default``, or ``ibp``, under which intervals
            keep their width (``train.objective.initialise``).
        inputs: whether the network first subtracts the data's mean and divides by its deviation (``standardised``), or
            takes images in [0, 1] as they are (``raw``).
        crop: the pixels of zero padding for random crops; 0 crops nothing.
        flip: whether images are mirrored at random.
        lam_init: λ of every layer at the start; at 1 + ln 2, the parameter s is 0.
        lam_temperature: t in λ = 1 + softplus(s/t).
        lam_target: λ of every layer at the end, if ``tolerance`` is 0.
        tolerance: the distance of the activation to ReLU at the end, from which λ at the end follows (``target``); 0
            leaves it to ``lam_target``.
        tolerance_on: the distance: ∫|gate − step| (``gate``), ∫|activation − ReLU| (``function``) or
            max |activation − ReLU| (``supremum``).
        ramp: whether λ follows the schedule alone while it is annealed (``frozen``), or is learned further besides
            (``learning``).
        schedule: the quantity in which the annealing is linear: λ (``linear``), log λ (``log``) or 1/λ (``inverse``).
        lam_rate: how the learning rate of the parameter s follows from the weights' (``train.optimizer``).
        lam_factor: c, a step of λ divided by a step of a weight.
        seed: the seed of the initial weights, the order of the images, the augmentation and the attacks.
    """

    data: str
    model: Model = "mlp"
    hidden: tuple[int, ...] = (100,)
    channels: tuple[int, ...] = (16, 32)
    width: float = 1.0
    arm: str = "lambda-gelu"
    switch: float = 0.25
    finetune_extra: int = 0
    finetune_rate: float = 0.1
    epochs: int = 20
    batch: int = 128
    optimizer: Optimizer = "adamw"
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    rate: float = 2e-3
    rise: float = 0.2
    fall: Fall = "cosine"
    decay: float = 1e-4
    l1: float = 0.0
    eps: float = 0.0
    warmup: int = 0
    attack_steps: int = 0
    certified: float = 0.0
    certified_by: Certified = "ibp"
    small_box: float = 0.4
    stability: float = 0.0
    terms_grow: Growth = "warmup"
    initialisation: Initialisation = "default"
    inputs: Inputs = "standardised"
    crop: int = 0
    flip: bool = False
    lam_init: float = 1 + math.log(2)
    lam_temperature: float = 0.1
    lam_target: float = 160.0
    tolerance: float = 0.0
    tolerance_on: Distance = "gate"
    ramp: Ramp = "frozen"
    schedule: Schedule = "log"
    lam_rate: Rate = "matched"
    lam_factor: float = 9.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            InputError: for options with which no network can be trained; the error names an option and its value.
        """
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"'{getattr(self, name)}' is none of {', '.join(allowed)}", place=flag(name))
        least = {"epochs": 1, "batch": 1}
        for name in (
            "epochs",
            "batch",
            "decay",
            "l1",
            "eps",
            "warmup",
            "attack_steps",
            "certified",
            "stability",
            "finetune_extra",
            "tolerance",
        ):
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


def flag(name: str) -> str:
    """The command-line option of a field of ``Options``."""
    return "--" + name.replace("_", "-")


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
