"""The tensors of an ONNX file while it is read, and the uses of operators that make them.

A tensor of the file is a node of the graph and an array of places in it: what only moves numbers (Reshape, Transpose,
Flatten, …) moves places, and what computes makes a node. Nothing is merged and no weight is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from scipy import sparse

from verifiable_relu.check.arithmetic import Matrix, Number
from verifiable_relu.check.curves import FunctionBand, Rounded, Signs
from verifiable_relu.check.errors import BadInput
from verifiable_relu.check.graph import AffineNode, SmoothNode, pick

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
    """A tensor as factor·x."""

    x: Tensor
    factor: Fraction = Fraction(1)


class GraphBuilder:
    """The nodes of a graph that is being read.

    Attributes:
        stored: what becomes of stored numbers where operators are taken as what runs them computes them; else None.
        whole: of nodes whose values are quantised numbers, their type; what adds such numbers may wrap around.
    """

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.multiples: dict[int, Multiple] = {}
        self.whole: dict[int, str] = {}
        self.stored: Callable[[Number], Number] | None = None

    def traced(self, tensor: Tensor) -> list[Multiple]:
        """The tensor as a multiple of itself, and of each tensor before it that it is a multiple of."""
        found = [Multiple(tensor)]
        while (step := self.multiples.get(found[-1].x.node)) is not None:
            last, source = found[-1], self.nodes[step.x.node]
            if isinstance(source, SmoothNode) and source.kind in ("Round", "Sign"):
                # Whole numbers are what is made of them.
                break
            x = Tensor(step.x.node, step.x.index.ravel()[last.x.index])
            found.append(Multiple(x, last.factor * step.factor))
        return found

    def settled(self, tensor: Tensor) -> int:
        """The number of a node whose value is the tensor, flat."""
        index, size = tensor.index.ravel(), self.nodes[tensor.node].size
        if len(index) == size and (index == np.arange(size)).all():
            return tensor.node
        self.nodes.append(AffineNode([(tensor.node, pick(index, size))], np.zeros(len(index)), moves=True))
        return len(self.nodes) - 1

    def computed(self, node: Any, shape: tuple[int, ...]) -> Tensor:
        """A new node as a tensor."""
        self.nodes.append(node)
        return Tensor(len(self.nodes) - 1, np.arange(node.size).reshape(shape))


@dataclass
class OperatorCall:
    """One use of an operator."""

    build: GraphBuilder
    name: str
    inputs: list[Value | None]
    attributes: dict[str, Any]
    opset: int

    def tensor(self, at: int = 0) -> Tensor:
        value = self.inputs[at]
        if not isinstance(value, Tensor):
            raise BadInput(f"input {at} is expected to depend on the network's input")
        return value

    def numbers(self, at: int) -> Number:
        """A constant input, floating point, in float64."""
        value = self.inputs[at]
        if not isinstance(value, np.ndarray) or value.dtype not in (np.float16, np.float32, np.float64):
            raise BadInput(f"input {at} is expected to be a constant of floating-point numbers")
        return (value if self.build.stored is None else self.build.stored(value)).astype(np.float64)

    def curve(self, x: Tensor, name: str, kind: str, curve: FunctionBand | Rounded | Signs) -> Tensor:
        """A curve of every entry of a tensor."""
        return self.build.computed(SmoothNode(self.build.settled(x), x.index.size, name, kind, curve), x.shape)

    def given(self, at: int) -> bool:
        return len(self.inputs) > at and self.inputs[at] is not None

    def integers(self, name: str, at: int) -> list[int] | None:
        """Integers that are an attribute in some operator sets and an input in others."""
        if self.given(at):
            value = self.inputs[at]
            if not isinstance(value, np.ndarray) or value.dtype.kind != "i" or value.ndim != 1:
                raise BadInput(f"input {at} is expected to be a list of constant integers")
            return [int(v) for v in value]
        return self.attributes.get(name)

    def affine(self, source: Tensor, matrix: Matrix, bias: Number, shape: tuple[int, ...], rel: float = 0.0) -> Tensor:
        """matrix·source + bias as a tensor of the shape."""
        node = AffineNode([(self.build.settled(source), matrix)], np.ascontiguousarray(bias, np.float64), rel)
        sizes = np.abs(matrix.data if sparse.issparse(matrix) else matrix)
        if not (np.isfinite(sizes).all() and np.isfinite(node.bias).all()):
            raise BadInput("weights are not finite")
        return self.build.computed(node, shape)

    def scaled(self, factor: Number, bias: Number, rel: float = 0.0, exact: Fraction | None = None) -> Tensor:
        """factor·x + bias, entry by entry, of the one computed input; ``exact``: a factor that is off by ``rel``."""
        x = next(value for value in self.inputs if isinstance(value, Tensor))
        shape = spread(x.shape, factor.shape, bias.shape)
        source = Tensor(x.node, np.broadcast_to(x.index, shape))
        diagonal = np.broadcast_to(factor, shape).ravel()
        matrix = sparse.dia_array((diagonal[None], [0]), shape=(len(diagonal), len(diagonal))).tocsr()
        made = self.affine(source, matrix, np.broadcast_to(bias, shape).ravel(), shape, rel)
        if factor.size == 1 and not rel:
            exact = Fraction(float(factor.item()))
        if exact is not None and not bias.any():
            self.build.multiples[made.node] = Multiple(source, exact)
        return made


def spread(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that shapes are broadcast to."""
    found = np.broadcast_shapes(*map(tuple, shapes))
    if np.prod(found, dtype=float) > LARGEST:
        raise BadInput("it is too large for this checker")
    return found
