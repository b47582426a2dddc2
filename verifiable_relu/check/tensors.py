"""The tensors of an ONNX file while it is read: places in the nodes of the graph that is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from verifiable_relu.check.arithmetic import UNIT, Number
from verifiable_relu.check.graph import Affine, pick

LARGEST = 1 << 27
"""Most entries of a matrix that are kept."""


@dataclass
class Tensor:
    """A computed tensor: the entries ``index``, shaped like the tensor, of a node."""

    node: int
    index: Number

    @property
    def shape(self) -> tuple[int, ...]:
        return self.index.shape


@dataclass
class Gate:
    """scale·erf(x) + offset, entry by entry: what GELU multiplies with a multiple of x.

    Attributes:
        x: erf's argument.
        name: of erf's value.
    """

    x: Tensor
    name: str
    scale: Fraction = Fraction(1)
    offset: Fraction = Fraction(0)

    @property
    def index(self) -> Number:
        return self.x.index


Value = Tensor | Gate | Number


@dataclass
class Multiple:
    """A tensor as factor·x; ``relative`` bounds the relative error of the factor."""

    x: Tensor
    factor: float = 1.0
    relative: float = 0.0


class Builder:
    """The nodes of a graph that is being read."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.multiples: dict[int, Multiple] = {}

    def traced(self, tensor: Tensor) -> list[Multiple]:
        """The tensor as a multiple of itself, and of each tensor before it that it is a multiple of."""
        found = [Multiple(tensor)]
        while (step := self.multiples.get(found[-1].x.node)) is not None:
            last = found[-1]
            factor = last.factor * step.factor
            exact = Fraction(factor) == Fraction(last.factor) * Fraction(step.factor)
            relative = last.relative + step.relative + (0.0 if exact else UNIT)
            found.append(Multiple(Tensor(step.x.node, step.x.index.ravel()[last.x.index]), factor, relative))
        return found

    def settled(self, tensor: Tensor) -> int:
        """The number of a node whose value is the tensor, flat."""
        index, size = tensor.index.ravel(), self.nodes[tensor.node].size
        if len(index) == size and (index == np.arange(size)).all():
            return tensor.node
        self.nodes.append(Affine([(tensor.node, pick(index, size))], np.zeros(len(index))))
        return len(self.nodes) - 1

    def computed(self, node: Any, shape: tuple[int, ...]) -> Tensor:
        """A new node as a tensor."""
        self.nodes.append(node)
        return Tensor(len(self.nodes) - 1, np.arange(node.size).reshape(shape))
