"""The cells of a study: one training each, with its name and its files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verifiable_relu.study.variants import architecture, changed
from verifiable_relu.train.options import Options


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

    def checkpoint(self, cell: Cell) -> Path:
        """The checkpoint, from which a training that was interrupted resumes."""
        return self.networks / f"{cell.name}.checkpoint"

    def property(self, cell: Cell, eps: str, image: int) -> Path:
        """The property file of the ball of radius ``eps`` around a test image of a cell's data."""
        data = Path(cell.options.data).stem
        return self.folder / "properties" / data / f"eps-{eps.replace('/', '_')}" / f"{image}.vnnlib.gz"
