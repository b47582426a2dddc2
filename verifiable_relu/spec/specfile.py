"""What reading a property file gives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verifiable_relu.spec.property import Property


@dataclass(frozen=True)
class Variable:
    """The input or the output as a file declares it; shape () is a scalar."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def element(self, index: int, version: str) -> str:
        """The name of an element by its row-major index: X_0, X_1 … in 1.0; X[0,0], X[0,1] … in 2.0."""
        if version == "1.0":
            return f"{self.name}_{index}"
        if not self.shape:
            return self.name
        indices: list[str] = []
        for extent in reversed(self.shape):
            index, last = divmod(index, extent)
            indices.append(str(last))
        return f"{self.name}[{','.join(reversed(indices))}]"

    def elements(self, version: str) -> Iterator[str]:
        """The names of all elements in row-major order."""
        return (self.element(index, version) for index in range(self.size))


@dataclass(frozen=True)
class SpecFile:
    """A property file as read.

    Attributes:
        path: the file.
        version: "1.0" or "2.0".
        properties: at least one; their answers join: any sat is sat, all unsat is unsat.
        inputs: the declared input.
        outputs: the declared output.
        networks: the names of the declared networks (2.0; none in 1.0).
        network: what a ``; network: file.onnx`` comment names, relative to the file's folder; None without one.
    """

    path: Path
    version: str
    properties: tuple[Property, ...]
    inputs: Variable
    outputs: Variable
    networks: tuple[str, ...] = ()
    network: str | None = None


def stem(path: Path | str) -> str:
    """A file's name without folder, ``.gz`` and last extension."""
    return Path(Path(path).name.removesuffix(".gz")).stem
