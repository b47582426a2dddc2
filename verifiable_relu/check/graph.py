"""A network as the checker sees it: affine maps of flat vectors, functions of their entries, and maxima.

While an ONNX file is read, a tensor is a node of the graph and an array of places in it: what only moves numbers
(Reshape, Transpose, Slice, …) moves places, and what computes makes a node. No weight is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from scipy import sparse

from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.functions import CheckedFunction, Kinked, family
from verifiable_relu.check.numbers import Matrix, Number


@dataclass(eq=False)
class Node:
    """A flat vector of ``size`` numbers, made of the values of the nodes ``sources``; the input is of none."""

    sources: tuple[int, ...]
    size: int

    @property
    def source(self) -> int:
        return self.sources[0]


@dataclass(eq=False)
class AffineNode(Node):
    """v = Σ matrix·(value of source) + bias, in float64 numbers that hold the file's own weights without rounding.

    Attributes:
        matrices: one for each source.
        relative: where the operator's true coefficients are no binary numbers, or where what runs it rounds, a bound
            of the relative error of every entry of the matrices and of the bias; otherwise 0.
        lost: what else the value may be off by, (size,) or one number.
        is_inexact_factor: whether it multiplies by one number, known but for rounding, as a batch normalisation may.
        moves: whether it only picks entries, for the operator that follows.
    """

    matrices: list[Matrix]
    bias: Number
    relative: float = 0.0
    lost: Number | float = 0.0
    is_inexact_factor: bool = False
    moves: bool = False

    @property
    def terms(self) -> list[tuple[int, Matrix]]:
        return list(zip(self.sources, self.matrices, strict=True))

    @cached_property
    def absolute(self) -> list[Matrix]:
        return [abs(matrix) for matrix in self.matrices]

    @cached_property
    def products(self) -> int:
        """The most products other than zero in a sum along a row of the matrices."""
        return sum(_longest(matrix, 1) for matrix in self.matrices)

    @cached_property
    def longest(self) -> int:
        """The most products in a sum along a row or along a column."""
        return max(self.products, *(_longest(matrix, 0) for matrix in self.matrices))

    @cached_property
    def sums(self) -> Number:
        """Σ |w| of each entry."""
        return np.sum([part if part.ndim == 1 else np.asarray(part.sum(1)).ravel() for part in self.absolute], 0)


def _longest(matrix: Matrix, axis: int) -> int:
    return 1 if matrix.ndim == 1 else int(np.max((matrix != 0).sum(axis), initial=0))


def affine(terms: Iterable[tuple[int, Matrix]], bias: Number, relative: float = 0.0, lost: Any = 0.0) -> AffineNode:
    """Return the node of terms."""
    sources, matrices = zip(*terms, strict=True)
    return AffineNode(sources, len(bias), list(matrices), bias, relative, lost)


@dataclass(eq=False)
class Activation(Node):
    """A function of every entry of the source's value."""

    function: CheckedFunction

    @property
    def rectifies(self) -> bool:
        """Return True if it is ReLU or GELU, or a family of them."""
        relu = isinstance(self.function, Kinked) and not self.function.slope.any()
        return relu or self.function.kind in ("Gelu", "family")


@dataclass(eq=False)
class MaximumNode(Node):
    """The largest of some entries of the source's value.

    ``rivals``: (most, size) the numbers of these entries, the first one repeated where there are fewer.
    """

    rivals: Number


class Ordered(Node):
    """Numbers that compare with each other as the entries of the source's value do; nothing else is known."""


class DifferenceNode(Node):
    """The value of source ``second``, which is also the sum of source ``first`` and of the activation ``change``.

    For a pair of activations ``change`` is their difference; its function follows from the bounds of their inputs.
    """


@dataclass(eq=False)
class Graph:
    """Nodes, each behind those that it reads; the first is the input.

    Attributes:
        output: the number of the node that is the network's output.
        second: the number of the first node of the second one of two networks; None where there is one network.
        has_tournaments: whether maxima are tournaments, too.
    """

    nodes: list[Any]
    output: int
    second: int | None = None
    has_tournaments: bool = False

    @cached_property
    def order(self) -> list[int]:
        """The numbers of the nodes that the output depends on, itself included, in order."""
        return sorted(self.needed(self.output) | {0})

    def needed(self, output: int) -> set[int]:
        """Return the nodes that one depends on."""
        found, waiting = set[int](), [output]
        while waiting:
            if (number := waiting.pop()) not in found:
                found.add(number)
                waiting += self.nodes[number].sources
        return found

    @cached_property
    def activations(self) -> list[int]:
        """The numbers of the activations and maxima that the output depends on, in order."""
        return [number for number in self.order if isinstance(self.nodes[number], Activation | MaximumNode)]

    @cached_property
    def widest(self) -> int:
        return max(self.nodes[number].size for number in self.order)

    @cached_property
    def whole(self) -> set[int]:
        """The nodes of whole numbers: values of Round and Sign, and what keeps whole numbers whole."""
        found = set[int]()
        for number in self.order[1:]:
            node = self.nodes[number]
            keeps, numbers = isinstance(node, MaximumNode | DifferenceNode), list[Number]()
            if isinstance(node, AffineNode):
                keeps = not node.relative and not np.any(node.lost)
                numbers = [node.bias, *(part.data if sparse.issparse(part) else part for part in node.matrices)]
            elif isinstance(node, Activation) and isinstance(node.function, Kinked):
                keeps, numbers = True, [node.function.slope]
            makes = isinstance(node, Activation) and node.function.kind in ("Round", "Sign")
            if makes or (keeps and found.issuperset(node.sources) and not any((part % 1).any() for part in numbers)):
                found.add(number)
        return found

    @cached_property
    def reach(self) -> Number:
        """Σ |w| of each input in the affine nodes that read it."""
        found = np.zeros(self.nodes[0].size)
        for node in (self.nodes[number] for number in self.order):
            if isinstance(node, AffineNode):
                for source, part in zip(node.sources, node.absolute, strict=True):
                    if not source:
                        found += part if part.ndim == 1 else np.asarray(part.sum(0)).ravel()
        return found

    @cached_property
    def tournaments(self) -> tuple[Graph, dict[int, int]]:
        """The graph in which each maximum is also a tournament of ReLUs, and the number of each node's value there."""
        nodes, place = list[Any](), dict[int, int]()
        for number, node in enumerate(self.nodes):
            nodes.append(replace(node, sources=tuple(place[source] for source in node.sources)))
            if isinstance(node, MaximumNode):
                _play(nodes)
            place[number] = len(nodes) - 1
        second = None if self.second is None else place[self.second]
        return Graph(nodes, place[self.output], second, has_tournaments=True), place

    def asked(self, comparing: bool) -> Graph:
        """Return the network that rows of outputs speak of: without its head, if they only compare outputs.

        Raises:
            BadInput: if nothing but the order is known of some value on the way to the output.
        """
        output = self.output
        while comparing and isinstance(node := self.nodes[output], Ordered | Activation):
            if isinstance(node, Activation) and node.function.kind not in ("Sigmoid", "Tanh"):
                break
            output = node.source
        found = self if output == self.output else Graph(self.nodes, output, self.second)
        if any(isinstance(self.nodes[number], Ordered) for number in found.order):
            raise BadInput("of a softmax, or a function like it, nothing is known but which output is the larger one")
        return found

    def hardened(self, hardness: Sequence[Fraction], runs: bool = False) -> Graph:
        """Return all networks with ReLU or a λ'-GELU, λ' ≥ its ``hardness``, in the place of each ReLU or λ-GELU.

        A head of the network stays what it is.

        Args:
            hardness: of each activation.
            runs: whether the network itself, with its operator GELU, is to be one of them.

        Raises:
            Refused: if these are not as many, or other activations are among them, or the network is none of them.
        """
        nodes, places = list(self.nodes), self.asked(comparing=True).activations
        unknown = any(isinstance(node, AffineNode) and node.is_inexact_factor for node in nodes)
        Refused.when(unknown, "behind a batch normalisation that only multiplies by one number no λ is known")
        if len(hardness) != len(places) or not all(1 <= value <= 1 << 40 for value in hardness):
            raise Refused(f"a hardness from 1 on for each of {len(places)} activations is expected")
        for place, value in zip(places, hardness, strict=True):
            node = nodes[place]
            if not isinstance(node, Activation) or not node.rectifies:
                raise Refused("a family is one of networks with ReLU or GELU alone")
            outside = runs and not isinstance(node.function, Kinked) and value != 1
            Refused.when(outside, "a GELU that runs is no member of its family")
            nodes[place] = replace(node, function=family(float(value)))
        return Graph(nodes, self.output)


def _play(nodes: list[Any]) -> None:
    """Add the tournament of the maximum that is the last node: max(a, b) = a + relu(b − a).

    In each round the two halves of the rivals that are left meet; where they are odd, the middle one meets itself. The
    winners are a maximum of two, too: intervals bound it better than the sum.
    """
    last = len(nodes) - 1
    source, rivals = nodes[last].source, nodes[last].rivals
    while len(rivals) > 1:
        half = (len(rivals) + 1) // 2
        first, second = rivals[:half].ravel(), rivals[len(rivals) - half :].ravel()
        best, count, size = last, len(first), nodes[source].size
        if half > 1:
            nodes.append(MaximumNode((source,), count, np.stack([first, second])))
            best = len(nodes) - 1
        a, none = len(nodes), np.zeros(count)
        nodes.append(affine([(source, pick(first, size))], none))
        nodes.append(affine([(source, pick(second, size) - pick(first, size))], none))
        nodes.append(Activation((a + 1,), count, Kinked(none)))
        nodes.append(DifferenceNode((a, best, a + 2), count))
        source, rivals = a + 3, np.arange(count).reshape(half, -1)


def pick(index: Number, size: int) -> Matrix:
    """Return the matrix that picks entries ``index`` of ``size`` numbers; nothing, that is 0, where it is −1."""
    rows = np.flatnonzero(index.ravel() >= 0)
    return sparse.csr_array((np.ones(len(rows)), (rows, index.ravel()[rows])), shape=(index.size, size))


def joined(first: Graph, second: Graph, pairs: list[tuple[int, int]]) -> Graph:
    """Return two networks at the same input, with the outputs of the first one and then those of the second.

    Args:
        first, second: the networks.
        pairs: an activation of the first one, by its number, and one of the second that is put next to it.

    Raises:
        Refused: if their inputs differ in size, or such a pair is none.
    """
    Refused.when(first.nodes[0].size != second.nodes[0].size, "two networks with inputs of one size are expected")
    partner = {second.activations[j]: first.activations[i] for i, j in pairs}
    nodes, place = list(first.nodes), {0: 0}
    for number, node in enumerate(second.nodes[1:], 1):
        nodes.append(replace(node, sources=tuple(place[source] for source in node.sources)))
        place[number] = len(nodes) - 1
        if number not in partner:
            continue
        f, g = nodes[partner[number]], nodes[-1]
        activations = isinstance(f, Activation) and isinstance(g, Activation) and f.rectifies and g.rectifies
        Refused.when(not (activations and f.size == g.size), "activations of a pair are as many ReLUs or GELUs each")
        # Both may be activations of the input: then z′ − z is 0. What the difference's function is depends on what is
        # known of z and z′ (bounds).
        one = np.ones(g.size)
        terms = [(g.source, one), (f.source, -one)] if g.source != f.source else [(g.source, 0 * one)]
        nodes.append(affine(terms, np.zeros(g.size)))
        nodes.append(Activation((len(nodes) - 1,), g.size, CheckedFunction()))
        nodes.append(DifferenceNode((partner[number], place[number], len(nodes) - 1), g.size))
        place[number] = len(nodes) - 1
    ends = first.output, place[second.output]
    sizes = [nodes[end].size for end in ends]
    matrices = (sparse.eye_array(sum(sizes), n, k=k, format="csr") for n, k in zip(sizes, (0, -sizes[0]), strict=True))
    nodes.append(affine(zip(ends, matrices, strict=True), np.zeros(sum(sizes))))
    return Graph(nodes, len(nodes) - 1, len(first.nodes))


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
class Whole:
    """Quantised numbers of a type; what adds such numbers may wrap around."""

    x: Tensor
    kind: str


Value = Tensor | Whole | Number

Multiple = tuple[Tensor, Fraction]
"""A tensor as factor·x."""


@dataclass
class Builder:
    """The nodes of a graph that is being read.

    Attributes:
        multiples: of nodes that are a number times a tensor, both.
        gates: of nodes that are scale·erf(x) + offset, what GELU multiplies with a multiple of x: all three.
        stored: what becomes of stored numbers where operators are taken as what runs them computes them; else None.
    """

    nodes: list[Any] = field(default_factory=list)
    multiples: dict[int, Multiple] = field(default_factory=dict)
    gates: dict[int, tuple[Tensor, Fraction, Fraction]] = field(default_factory=dict)
    stored: Callable[[Number], Number] | None = None

    def traced(self, tensor: Tensor) -> list[Multiple]:
        """Return the tensor as a multiple of itself, and of each tensor before it that it is a multiple of."""
        found = [(tensor, Fraction(1))]
        while (step := self.multiples.get(found[-1][0].node)) is not None:
            (x, factor), source = step, self.nodes[step[0].node]
            if isinstance(source, Activation) and source.function.kind in ("Round", "Sign"):
                # Whole numbers are what is made of them.
                break
            found.append((Tensor(x.node, x.index.ravel()[found[-1][0].index]), found[-1][1] * factor))
        return found

    def computed(self, node: Node, shape: Sequence[int]) -> Tensor:
        """Return the value of a new node as a tensor."""
        self.nodes.append(node)
        return Tensor(len(self.nodes) - 1, np.arange(node.size).reshape(shape))

    def settled(self, x: Tensor) -> int:
        """Return the number of a node whose value is the tensor."""
        size = self.nodes[x.node].size
        if np.array_equal(x.index.ravel(), np.arange(size)):
            return x.node
        moved = affine([(x.node, pick(x.index, size))], np.zeros(x.index.size))
        moved.moves = True
        self.nodes.append(moved)
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
        """Return an attribute; the default for an empty list, too."""
        found = self.attributes.get(name, default)
        return default if found == [] else found

    def tensor(self, at: int = 0) -> Tensor:
        value = self.inputs[at]
        if not isinstance(value, Tensor):
            raise BadInput(f"input {at} is expected to depend on the network's input")
        return value

    def given(self, at: int) -> bool:
        return len(self.inputs) > at and self.inputs[at] is not None

    def numbers(self, at: int, default: Number | None = None) -> Number:
        """Return a constant input, floating point, in float64; the default where there is none."""
        if default is not None and not self.given(at):
            return default
        value = self.inputs[at]
        if not isinstance(value, np.ndarray) or value.dtype not in (np.float16, np.float32, np.float64):
            raise BadInput(f"input {at} is expected to be a constant of floating-point numbers")
        return (value if self.build.stored is None else self.build.stored(value)).astype(np.float64)

    def integers(self, name: str, at: int) -> list[int] | None:
        """Return integers that are an attribute in some operator sets and an input in others."""
        if not self.given(at):
            return self.attributes.get(name)
        value = self.inputs[at]
        if not isinstance(value, np.ndarray) or value.dtype.kind != "i" or value.ndim != 1:
            raise BadInput(f"input {at} is expected to be a list of constant integers")
        return [int(v) for v in value]

    def axis(self, rank: int, default: int = 1) -> int:
        axis = self.attributes.get("axis", default)
        BadInput.when(not -rank <= axis < rank, "there is no such axis")
        return int(axis) % rank

    def activation(self, x: Tensor, function: CheckedFunction) -> Tensor:
        """Return a function of every entry of a tensor."""
        return self.build.computed(Activation((self.build.settled(x),), x.index.size, function), x.shape)

    def affine(self, x: Tensor, matrix: Matrix, bias: Number, shape: Sequence[int], relative: float = 0.0) -> Tensor:
        """Return matrix·x + bias as a tensor of the shape."""
        node = affine([(self.build.settled(x), matrix)], np.ascontiguousarray(bias, np.float64), relative)
        sizes = np.abs(matrix.data if sparse.issparse(matrix) else matrix)
        BadInput.when(not (np.isfinite(sizes).all() and np.isfinite(node.bias).all()), "weights are not finite")
        return self.build.computed(node, shape)

    def scaled(
        self, x: Tensor, factor: Number, bias: Number, relative: float = 0.0, exact: Fraction | None = None
    ) -> Tensor:
        """Return factor·x + bias; ``exact``: the true factor, for one that is off."""
        shape = spread(x.shape, factor.shape, bias.shape)
        source = Tensor(x.node, np.broadcast_to(x.index, shape))
        diagonal, added = (np.broadcast_to(part, shape).ravel() for part in (factor, bias))
        made = self.affine(source, diagonal, added, shape, relative)
        if factor.size == 1 and not relative:
            exact = Fraction(float(factor.item()))
        if exact is not None and not bias.any():
            self.build.multiples[made.node] = source, exact
        if exact is not None and bias.size == 1 and (gate := self.build.gates.get(x.node)):
            argument = Tensor(gate[0].node, gate[0].index.ravel()[source.index])
            self.build.gates[made.node] = argument, exact * gate[1], exact * gate[2] + Fraction(float(bias.item()))
        return made


def spread(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that shapes are broadcast to."""
    found = np.broadcast_shapes(*map(tuple, shapes))
    BadInput.when(np.prod(found, dtype=float) > LARGEST, "it is too large for this checker")
    return found
