"""The variants that studies compare: the arms of the trainer, and these with extra epochs of fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from verifiable_relu.errors import InputError
from verifiable_relu.train.arms import ARMS
from verifiable_relu.train.options import Options

_EXTRA = "-extra"

VARIANTS: dict[str, str] = {
    name: arm for arm, row in ARMS.items() for name in ((arm, arm + _EXTRA) if row.swap == "switch" else (arm,))
}
"""The arm of each compared variant, by the variant's name, in the order of the tables. A variant whose name ends in
``-extra`` does not replace its activation at the switch, but fine-tunes after the training for as many epochs as other
arms anneal."""


def variant_options(variant: str, base: Options) -> Options:
    """The options of a variant, which are those of ``base`` but for the arm and the extra epochs.

    Raises:
        InputError: if ``VARIANTS`` has no such name.
    """
    if variant not in VARIANTS:
        raise InputError(f"'{variant}' is none of {', '.join(VARIANTS)}", place="--arms")
    extra = base.epochs - base.first_annealed if variant.endswith(_EXTRA) else 0
    return replace(base, arm=VARIANTS[variant], finetune_extra=extra)


def variant_name(options: Mapping[str, Any]) -> str:
    """The name of the variant that a training's options describe, given by the fields of ``Options``."""
    return str(options["arm"]) + (_EXTRA if options["finetune_extra"] else "")


def place(variant: str) -> int:
    """The position of a variant in the order of the tables."""
    return list(VARIANTS).index(variant)


def architecture(options: Mapping[str, Any]) -> str:
    """The name of a training's architecture in tables, such as "MLP 2×128", "CNN 16,32 + 1×100" or "CNN3, width 2"."""
    if options["model"] not in ("mlp", "cnn"):
        name = options["model"].replace("resnet", "ResNet").replace("cnn", "CNN")
        return name if options["width"] == 1 else f"{name}, width {options['width']:g}"
    hidden = [int(size) for size in options["hidden"]]
    equal = f"{len(hidden)}×{hidden[0]}" if hidden and len(set(hidden)) == 1 else ",".join(map(str, hidden))
    return f"MLP {equal}" if options["model"] == "mlp" else f"CNN {','.join(map(str, options['channels']))} + {equal}"


def changed(options: Options) -> dict[str, Any]:
    """The options that differ from their defaults, by name.

    A digest of these stays the same when a later version has a new option.
    """
    default = asdict(Options(options.data))
    return {name: value for name, value in asdict(options).items() if value != default[name]}
