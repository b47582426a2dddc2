"""The tensors of an ONNX file while it is read, and the uses of operators that make them.

A tensor of the file is a node of the graph and an array of places in it: what only moves numbers (Reshape, Transpose,
Slice, …) moves places, and what computes makes a node. No weight is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from scipy import sparse

from verifiable_relu.check.errors import BadInput
from verifiable_relu.check.functions import Function
from verifiable_relu.check.graph import Activation, Affine, Node, pick
from verifiable_relu.check.numbers import Matrix, Number

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
    """scale·erf(x) + offset, entry by entry: what GELU multiplies with a multiple of x."""

    x: Tensor
    scale: Fraction = Fraction(1)
    offset: Fraction = Fraction(0)

    @property
    def index(self) -> Number:
        return self.x.index


Value = Tensor | Gate | Number


@dataclass
class Multiple:
    """A tensor as factor·x."""

    x: Tensor
    factor: Fraction = Fraction(1)


class Builder:
    """The nodes of a graph that is being read.

    Attributes:
        multiples: of nodes that are a number times a tensor, both.
        whole: of nodes whose values are quantised numbers, their type; what adds such numbers may wrap around.
        stored: what becomes of stored numbers where operators are taken as what runs them computes them; else None.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.multiples: dict[int, Multiple] = {}
        self.whole: dict[int, str] = {}
        self.stored: Callable[[Number], Number] | None = None

    def traced(self, tensor: Tensor) -> list[Multiple]:
        """The tensor as a multiple of itself, and of each tensor before it that it is a multiple of."""
        found = [Multiple(tensor)]
        while (step := self.multiples.get(found[-1].x.node)) is not None:
            last, source = found[-1], self.nodes[step.x.node]
            if isinstance(source, Activation) and source.function.kind in ("Round", "Sign"):
                # Whole numbers are what is made of them.
                break
            x = Tensor(step.x.node, step.x.index.ravel()[last.x.index])
            found.append(Multiple(x, last.factor * step.factor))
        return found

    def computed(self, node: Node, shape: Sequence[int]) -> Tensor:
        """The value of a new node as a tensor."""
        self.nodes.append(node)
        return Tensor(len(self.nodes) - 1, np.arange(node.size).reshape(shape))

    def at(self, node: int, index: Number) -> Tensor:
        """Entries of a node as a tensor; no tensor names an entry twice, or matrices would add its weights."""
        found = Tensor(node, index)
        if len(np.unique(index)) == index.size:
            return found
        return Tensor(self.settled(found), np.arange(index.size).reshape(index.shape))

    def term(self, x: Tensor, matrix: Matrix) -> tuple[int, Matrix]:
        """A matrix of a tensor's entries as one of those of a node."""
        index, size = x.index.ravel(), self.nodes[x.node].size
        if self._is_all(x):
            return x.node, matrix
        if matrix.ndim == 1:
            return x.node, sparse.csr_array((matrix, (np.arange(len(index)), index)), shape=(len(index), size))
        if len(np.unique(index)) < len(index):
            return self.settled(x), matrix
        if sparse.issparse(matrix):
            parts = matrix.data, index[matrix.indices], matrix.indptr
            return x.node, sparse.csr_array(parts, shape=(matrix.shape[0], size))
        found = np.zeros((len(matrix), size))
        found[:, index] = matrix
        return x.node, found

    def _is_all(self, x: Tensor) -> bool:
        return np.array_equal(x.index.ravel(), np.arange(self.nodes[x.node].size))

    def settled(self, x: Tensor) -> int:
        """The number of a node whose value is the tensor."""
        if self._is_all(x):
            return x.node
        self.nodes.append(
            Affine([(x.node, pick(x.index, self.nodes[x.node].size))], np.zeros(x.index.size), moves=True)
        )
        if x.node in self.whole:
            self.whole[len(self.nodes) - 1] = self.whole[x.node]
        return len(self.nodes) - 1


@dataclass
class Call:
    """A use of an operator: node ``node`` of the file, with its inputs and attributes."""

    build: Builder
    node: Any
    inputs: list[Value | None]
    attributes: dict[str, Any]
    opset: int

    def get(self, name: str, default: Any) -> Any:
        """An attribute; the default for an empty list, too."""
        found = self.attributes.get(name, default)
        return default if found == [] else found

    def tensor(self, at: int = 0) -> Tensor:
        value = self.inputs[at]
        if not isinstance(value, Tensor):
            raise BadInput(f"input {at} is expected to depend on the network's input")
        return value

    def given(self, at: int) -> bool:
        return len(self.inputs) > at and self.inputs[at] is not None

    def numbers(self, at: int) -> Number:
        """A constant input, floating point, in float64."""
        value = self.inputs[at]
        if not isinstance(value, np.ndarray) or value.dtype not in (np.float16, np.float32, np.float64):
            raise BadInput(f"input {at} is expected to be a constant of floating-point numbers")
        return (value if self.build.stored is None else self.build.stored(value)).astype(np.float64)

    def integers(self, name: str, at: int) -> list[int] | None:
        """Integers that are an attribute in some operator sets and an input in others."""
        if self.given(at):
            value = self.inputs[at]
            if not isinstance(value, np.ndarray) or value.dtype.kind != "i" or value.ndim != 1:
                raise BadInput(f"input {at} is expected to be a list of constant integers")
            return [int(v) for v in value]
        return self.attributes.get(name)

    def axis(self, rank: int, default: int = 1) -> int:
        """The attribute of this name."""
        axis = self.attributes.get("axis", default)
        BadInput.when(not -rank <= axis < rank, "there is no such axis")
        return int(axis) % rank

    def activation(self, x: Tensor, function: Function, own: bool = True) -> Tensor:
        """A function of every entry of a tensor."""
        return self.build.computed(Activation(self.build.settled(x), x.index.size, function, own), x.shape)

    def affine(self, x: Tensor, matrix: Matrix, bias: Number, shape: Sequence[int], relative: float = 0.0) -> Tensor:
        """matrix·x + bias as a tensor of the shape."""
        node = Affine([self.build.term(x, matrix)], np.ascontiguousarray(bias, np.float64), relative)
        sizes = np.abs(matrix.data if sparse.issparse(matrix) else matrix)
        BadInput.when(not (np.isfinite(sizes).all() and np.isfinite(node.bias).all()), "weights are not finite")
        return self.build.computed(node, shape)

    def scaled(self, factor: Number, bias: Number, relative: float = 0.0, exact: Fraction | None = None) -> Tensor:
        """factor·x + bias of the one computed input x; ``exact``: the number that a factor is but for ``relative``."""
        x = next(value for value in self.inputs if isinstance(value, Tensor))
        shape = spread(x.shape, factor.shape, bias.shape)
        source = Tensor(x.node, np.broadcast_to(x.index, shape))
        diagonal = np.broadcast_to(factor, shape).ravel()
        made = self.affine(source, diagonal, np.broadcast_to(bias, shape).ravel(), shape, relative)
        if factor.size == 1 and not relative:
            exact = Fraction(float(factor.item()))
        if exact is not None and not bias.any():
            self.build.multiples[made.node] = Multiple(source, exact)
        return made


def spread(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that shapes are broadcast to."""
    found = np.broadcast_shapes(*map(tuple, shapes))
    BadInput.when(np.prod(found, dtype=float) > LARGEST, "it is too large for this checker")
    return found
