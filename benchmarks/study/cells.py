"""The cells of a study, one training each: the variants that are compared, the names of cells and their files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from verifiable_relu.data import VALIDATION
from verifiable_relu.errors import InputError
from verifiable_relu.train.options import ARMS, Options

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


def architecture(options: Mapping[str, Any]) -> str:
    """The name of a training's architecture in tables, such as "MLP 2×128", "CNN 16,32 + 1×100" or "CNN3, width 2"."""
    if ":" in options["model"]:
        return str(options["model"])
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


@dataclass(frozen=True)
class Cell:
    """One training of a study.

    Attributes:
        network: the name of its setting, an architecture on a data set.
        arm: the name of its variant.
        objective: the name of its objective.
        weight: the objective's weight; 0 for an objective without one.
        options: the options of the training.
        source: the data, a name or the path of a file.
    """

    network: str
    arm: str
    objective: str
    weight: float
    options: Options
    source: str

    @property
    def name(self) -> str:
        """The name of the cell, and, without suffix, of its files; cells with different options have different names.

        The digest in the name leaves out options at their defaults: a cell keeps its name when a later version has a
        new option.
        """
        digest = hashlib.sha256(json.dumps(changed(self.options), sort_keys=True).encode()).hexdigest()[:8]
        aim = f"{self.objective}-{self.weight:g}" if self.weight else self.objective
        return f"{self.network}_{self.arm}_{aim}_seed{self.options.seed}_{digest}"

    @property
    def record(self) -> dict[str, Any]:
        """The fields with which the record of the cell's training begins."""
        options = asdict(self.options)
        return {
            "cell": self.name,
            "network": self.network,
            "data": self.options.data,
            "architecture": architecture(options),
            "arm": self.arm,
            "objective": self.objective,
            "weight": self.weight,
            "seed": self.options.seed,
        }


@dataclass(frozen=True)
class Places:
    """The folder of a study.

    Attributes:
        folder: the folder.
    """

    folder: Path

    @property
    def resolved(self) -> Places:
        """The same folder by its absolute path, under which processes elsewhere find it too."""
        return Places(self.folder.resolve())

    @property
    def networks(self) -> Path:
        """The folder of the trained networks and of the checkpoints."""
        return self.folder / "networks"

    def network(self, cell: Cell) -> Path:
        """The network that a cell's training ends in."""
        return self.networks / f"{cell.name}.onnx"

    def smooth(self, cell: Cell) -> Path:
        """The network before ReLU takes the place of its activation at the end of the training."""
        return self.networks / f"{cell.name}-smooth.onnx"

    def int8(self, cell: Cell) -> Path:
        """The int8 network that is made of a cell's network."""
        return self.networks / f"{cell.name}.int8.onnx"

    def checkpoint(self, cell: Cell) -> Path:
        """The checkpoint, from which a training that was interrupted resumes."""
        return self.networks / f"{cell.name}.checkpoint"

    def property(self, cell: Cell, eps: str, image: int) -> Path:
        """The property file of the ball of radius ``eps`` around a test image of a cell's data."""
        plain = cell.options.data.removesuffix(VALIDATION)
        data = Path(plain).stem + ("" if plain == cell.options.data else "-validation")
        return self.folder / "properties" / data / f"eps-{eps.replace('/', '_')}" / f"{image}.vnnlib.gz"
