"""A network as the checker sees it: affine maps of flat vectors, and activations neuron by neuron."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from scipy import sparse

from verifiable_relu.check.arithmetic import Matrix, Number, above
from verifiable_relu.check.curves import RELU, DifferenceSlopes, FunctionBand, Rounded, Signs, family, same
from verifiable_relu.check.errors import BadInput, Refused


@dataclass(eq=False)
class InputNode:
    """The input, a flat vector of so many variables."""

    size: int


@dataclass(eq=False)
class AffineNode:
    """v = Σ matrix·(value of node) + bias, in float64 numbers that hold the file's own weights without rounding.

    Attributes:
        terms: the number of a node, and a (size, size of that node) matrix; no node is named twice.
        bias: (size,).
        relative: where the operator's true coefficients are irrational or no binary numbers, or where what runs it
            rounds, a bound of the relative error of every entry of the matrices and of the bias; otherwise 0.
        is_inexact_factor: whether it multiplies by one number, known but for rounding, as a batch normalisation may.
        moves: whether it only picks entries, for the operator that follows.
        lost: (size,) what else the value may be off by.
    """

    terms: list[tuple[int, Matrix]]
    bias: Number
    relative: float = 0.0
    is_inexact_factor: bool = field(default=False, kw_only=True)
    moves: bool = False
    lost: Number = field(default_factory=lambda: np.zeros(()))
    absolute: list[tuple[int, Matrix]] = field(init=False)

    def __post_init__(self) -> None:
        self.absolute = [(source, abs(matrix)) for source, matrix in self.terms]
        self.lost = np.broadcast_to(self.lost, (self.size,))

    @property
    def size(self) -> int:
        return len(self.bias)

    @cached_property
    def products(self) -> int:
        """How many products other than zero a sum along a row of the matrices has, at most."""
        return sum(int((matrix != 0).sum(1).max()) for _, matrix in self.terms)

    @cached_property
    def least(self) -> float:
        """The size of the least coefficient other than zero; 1 where all are zero."""
        sizes = (matrix.data if sparse.issparse(matrix) else matrix for _, matrix in self.absolute)
        return min((float(part[part > 0].min()) for part in sizes if (part > 0).any()), default=1.0)

    @cached_property
    def signs(self) -> Number:
        """(2, size) where no coefficient of a row is below zero, and where none is above it."""
        least = [np.asarray([_dense(part.min(1)), -_dense(part.max(1))]) for _, part in self.terms]
        return np.minimum.reduce(least) >= 0

    @cached_property
    def count(self) -> int:
        """How many products other than zero a sum along a row or along a column of the matrices has, at most."""
        return max(self.products, *(int((matrix != 0).sum(0).max()) for _, matrix in self.terms))


@dataclass(eq=False)
class ActivationNode:
    """r = z where z ≥ 0 and slope·z where z ≤ 0, neuron by neuron, of the value z of node ``source``.

    Attributes:
        own: whether the file has it as an activation; otherwise an operator is made of it, a maximum, say.
    """

    source: int
    slope: Number
    name: str
    own: bool = True

    @property
    def size(self) -> int:
        return len(self.slope)

    def at(self, z: Number) -> tuple[Number, Number]:
        """Numbers between which r is at z: r itself, but where a product is rounded."""
        r = np.where(z >= 0, z, self.slope * z)
        exact = (z >= 0) | np.isin(self.slope, (-1, 0, 1))
        return np.where(exact, r, -above(-r)), np.where(exact, r, above(r))


@dataclass(eq=False)
class SmoothNode:
    """A curve of every entry of the value z of node ``source``.

    Attributes:
        kind: ONNX's name of the function; of a QuantizeLinear's "Round".
    """

    source: int
    size: int
    name: str
    kind: str
    curve: FunctionBand | Rounded | DifferenceSlopes | Signs


@dataclass(eq=False)
class Ordered:
    """Numbers that compare with each other as the entries of the value of node ``source`` do, entry by entry.

    That is all that is known of them: one is below another, or equal to it, where that is so of the entries.
    """

    source: int
    size: int


@dataclass(eq=False)
class MaximumNode:
    """The largest of some entries of the value of node ``source``; node ``made`` makes the same of activations.

    Attributes:
        rivals: (most, size) the numbers of these entries, each maximum's in order, and −1 behind them.
    """

    source: int
    made: int
    rivals: Number
    name: str

    @property
    def size(self) -> int:
        return int(self.rivals.shape[1])


@dataclass(eq=False)
class DifferenceNode(SmoothNode):
    """g(z′) − f(z) of activations ``first`` and ``second`` of two networks, of z′ − z, the value of node ``source``.

    Each is ReLU or λ-GELU; what the curve is follows from the bounds of z and z′ (``lines``).
    """

    first: int
    second: int


@dataclass(eq=False)
class Either:
    """The value of node ``second``, which is that of node ``first`` and that of the ``DifferenceNode`` node as well."""

    beside: int
    first: int
    second: int
    size: int


Node = InputNode | AffineNode | ActivationNode | SmoothNode | Ordered | MaximumNode | Either


@dataclass(eq=False)
class Graph:
    """Nodes, each behind those that it reads; the first is the input.

    Attributes:
        nodes: all of them.
        output: the number of the one that is the network's output.
    """

    nodes: list[Node]
    output: int

    def asked(self, comparing: bool) -> Graph:
        """The network that rows of outputs are rows of: without its head, if they do no more than compare outputs.

        A head is what increases with every output, and a softmax: before it the outputs compare as they do behind it.

        Raises:
            BadInput: if nothing but the order is known of some value on the way to the output.
        """
        output = self.output
        while comparing and isinstance(node := self.nodes[output], Ordered | SmoothNode) and _keeps_order(node):
            output = node.source
        found = Graph(self.nodes, output)
        if any(isinstance(self.nodes[number], Ordered) for number in found.needed):
            raise BadInput("of a softmax, or a function like it, nothing is known but which output is the larger one")
        return found

    @property
    def needed(self) -> list[int]:
        """The numbers of the nodes that the output depends on, itself included, in order."""
        needed = {self.output}
        for number in range(self.output, -1, -1):
            if number in needed:
                needed.update(sources(self.nodes[number]))
        return sorted(needed)

    @property
    def activations(self) -> list[int]:
        """The numbers of the activations that the output depends on, in order."""
        return [number for number in self.needed if isinstance(self.nodes[number], ActivationNode | SmoothNode)]

    @cached_property
    def first(self) -> dict[int, Number]:
        """Of each node that the output depends on, the least number of the inputs that each entry depends on.

        Entries with numbers close to each other see, through convolutions, much the same part of an image.
        """
        found: dict[int, Number] = {}
        for number in self.needed:
            node = self.nodes[number]
            if isinstance(node, InputNode):
                found[number] = np.arange(node.size)
            elif isinstance(node, AffineNode):
                seen = [_least_of(found[source], matrix) for source, matrix in node.terms]
                found[number] = np.minimum.reduce(seen)
            else:
                found[number] = found[sources(node)[-1]]
        return found

    def hardened(self, hardness: list[Fraction], runs: bool = False) -> Graph:
        """All networks that have, in the place of each ReLU or λ-GELU, ReLU or a λ'-GELU with λ' ≥ its ``hardness``.

        A head of the network stays what it is.

        Args:
            hardness: of each activation.
            runs: whether the network itself, of which GELU is an operator, is to be one of them.

        Raises:
            Refused: if these are not as many, or other activations are among them, or the network is none of them.
        """
        nodes, places = list(self.nodes), self.asked(comparing=True).activations
        if any(isinstance(node, AffineNode) and node.is_inexact_factor for node in nodes):
            raise Refused("behind a batch normalisation that only multiplies by one number no λ is known")
        if len(hardness) != len(places) or not all(1 <= value <= 1 << 40 for value in hardness):
            raise Refused(f"a hardness from 1 on for each of {len(places)} activations is expected")
        for place, value in zip(places, hardness, strict=True):
            node = nodes[place]
            relu = isinstance(node, ActivationNode) and node.own and not node.slope.any()
            if not relu and not (isinstance(node, SmoothNode) and node.kind == "Gelu"):
                raise Refused("a family is one of networks with ReLU or GELU alone")
            if runs and not relu and value != 1:
                raise Refused("a GELU that runs is no member of its family")
            assert isinstance(node, ActivationNode | SmoothNode)
            nodes[place] = SmoothNode(node.source, node.size, node.name, "family", family(float(value)))
        return Graph(nodes, self.output)


def sources(node: Node) -> list[int]:
    """The numbers of the nodes that a node reads."""
    if isinstance(node, AffineNode):
        return [source for source, _ in node.terms]
    if isinstance(node, MaximumNode):
        return [node.source, node.made]
    if isinstance(node, Either):
        return [node.beside, node.first, node.second]
    return [] if isinstance(node, InputNode) else [node.source]


def _least_of(numbers: Number, matrix: Matrix) -> Number:
    """(rows,) the least of the numbers in whose columns a row has coefficients; of a dense matrix, of all."""
    found = np.full(matrix.shape[0], numbers.min(initial=0))
    if sparse.issparse(matrix):
        some = np.flatnonzero(np.diff(matrix.indptr))
        if len(some):
            found[some] = np.minimum.reduceat(numbers[matrix.indices], matrix.indptr[some])
    return found


def _dense(column: Any) -> Number:
    """The numbers of a column, sparse or not."""
    return np.ravel(column.toarray() if sparse.issparse(column) else column)


def _keeps_order(node: Ordered | SmoothNode) -> bool:
    return isinstance(node, Ordered) or node.kind in ("Sigmoid", "Tanh")


def side_by_side(first: Graph, second: Graph, pairs: list[tuple[int, int]]) -> Graph:
    """Two networks at the same input, with the outputs of the first one and then those of the second.

    Args:
        first, second: the networks.
        pairs: an activation of the first one, by its number, and one of the second that is put beside it.

    Raises:
        Refused: if their inputs differ in size, or such a pair is none.
    """
    ones, twos = first.activations, second.activations
    if first.nodes[0].size != second.nodes[0].size:
        raise Refused("two networks with inputs of one size are expected")
    partner = {twos[j]: ones[i] for i, j in pairs}
    nodes, place = list(first.nodes), {0: 0}
    for number, node in enumerate(second.nodes[1:], 1):
        nodes.append(_moved(node, place))
        place[number] = len(nodes) - 1
        if number not in partner:
            continue
        f, g, mine = nodes[partner[number]], nodes[-1], place[number]
        if not (_rectifies(f) and _rectifies(g)) or f.size != g.size or not isinstance(g, ActivationNode | SmoothNode):
            raise Refused("activations beside each other are as many ReLUs or GELUs each")
        assert isinstance(f, ActivationNode | SmoothNode)
        one = sparse.eye_array(g.size, format="csr")
        # Both may be activations of the input: then z′ − z is 0.
        terms = [(g.source, one), (f.source, -one)] if f.source != g.source else [(g.source, 0 * one)]
        apart = AffineNode(terms, np.zeros(g.size))
        known = DifferenceNode(len(nodes), g.size, g.name, "Beside", same(RELU), partner[number], mine)
        nodes += [apart, known, Either(len(nodes) + 1, partner[number], mine, g.size)]
        place[number] = len(nodes) - 1
    ends = first.output, place[second.output]
    sizes = [nodes[end].size for end in ends]
    total, starts = sum(sizes), (0, sizes[0])
    placed = [sparse.eye_array(total, size, k=-start, format="csr") for size, start in zip(sizes, starts, strict=True)]
    nodes.append(AffineNode(list(zip(ends, placed, strict=True)), np.zeros(total)))
    return Graph(nodes, len(nodes) - 1)


def _rectifies(node: Node) -> bool:
    """Whether a node is ReLU or GELU, or a family of them."""
    relu = isinstance(node, ActivationNode) and node.own and not node.slope.any()
    return relu or (isinstance(node, SmoothNode) and node.kind in ("Gelu", "family"))


def _moved(node: Node, place: dict[int, int]) -> Node:
    """A node whose sources are elsewhere."""
    if isinstance(node, AffineNode):
        terms = [(place[source], matrix) for source, matrix in node.terms]
        return AffineNode(terms, node.bias, node.relative, lost=node.lost, is_inexact_factor=node.is_inexact_factor)
    if isinstance(node, MaximumNode):
        return replace(node, source=place[node.source], made=place[node.made])
    assert isinstance(node, ActivationNode | SmoothNode | Ordered)
    return replace(node, source=place[node.source])


def pick(index: Number, size: int) -> Matrix:
    """The matrix that picks entries ``index`` of a vector of ``size`` numbers."""
    rows = np.arange(len(index))
    return sparse.csr_array((np.ones(len(index)), (rows, index)), shape=(len(index), size))


def joined(nodes: list[Node], output: int) -> Graph:
    """The graph of nodes without those that nothing reads; a node that only adds a bias is part of the one before it.

    Entries are moved, and where one of two biases is zero nothing is rounded.
    """
    made: list[Node] = []
    place: dict[int, int] = {}
    readers = Counter(source for node in nodes for source in sources(node))
    readers[output] += 1
    for number, node in enumerate(nodes):
        if isinstance(node, AffineNode):
            given = [(place[source], matrix) for source, matrix in node.terms]
            bias, (source, matrix) = node.bias, given[0]
            before = made[source]
            alone = len(given) == 1 and readers[node.terms[0][0]] == 1 and not node.relative
            if alone and isinstance(before, AffineNode) and _picks(matrix) and not (bias.any() and before.bias.any()):
                given = [(other, part[matrix.indices]) for other, part in before.terms]
                lost = before.lost[matrix.indices]
                made[source] = AffineNode(
                    given,
                    before.bias[matrix.indices] + bias,
                    before.relative,
                    lost=lost,
                    is_inexact_factor=before.is_inexact_factor,
                )
                place[number] = source
                continue
        made.append(node if isinstance(node, InputNode) else _moved(node, place))
        place[number] = len(made) - 1
    return Graph(made, place[output])


def _picks(matrix: Matrix) -> bool:
    """Whether every entry of matrix·v is an entry of v."""
    return sparse.issparse(matrix) and bool((np.diff(matrix.indptr) == 1).all() and (matrix.data == 1).all())
