"""A property file as the readers return it and the writer takes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verifiable_relu.spec.property import Property


@dataclass(frozen=True)
class Variable:
    """The network's input or output as a property file declares it; the shape () is a scalar's."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def element(self, index: int, version: str) -> str:
        """The name of the element with a row-major index: X_0, X_1 … in 1.0; X[0,0], X[0,1] … in 2.0."""
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
    """The content of a property file.

    Attributes:
        path: the file.
        version: the VNN-LIB version, "1.0" or "2.0".
        properties: at least one; the file is *sat* if any of them is, and *unsat* if all are.
        inputs: the declared input.
        outputs: the declared output.
        networks: the names of the declared networks in 2.0; 1.0 declares none.
        network: the file that a comment ``; network: file.onnx`` names, relative to the folder of ``path``; None
            without such a comment.
    """

    path: Path
    version: str
    properties: tuple[Property, ...]
    inputs: Variable
    outputs: Variable
    networks: tuple[str, ...] = ()
    network: str | None = None


def stem(path: Path | str) -> str:
    """A file's name without its folder, without ``.gz`` and without its last extension before that."""
    return Path(Path(path).name.removesuffix(".gz")).stem
