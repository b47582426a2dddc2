"""A network as the checker sees it: affine maps of flat vectors, functions of their entries, and maxima."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
from scipy import sparse

from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.functions import Function, Kinked, family
from verifiable_relu.check.numbers import Matrix, Number


@dataclass(eq=False)
class Input:
    """The input, a flat vector."""

    size: int
    sources: tuple[int, ...] = ()


@dataclass(eq=False)
class Affine:
    """v = Σ matrix·(value of node) + bias, in float64 numbers that hold the file's own weights without rounding.

    Attributes:
        terms: the number of a node, and a matrix; no node is named twice.
        bias: (size,).
        relative: where the operator's true coefficients are no binary numbers, or where what runs it rounds, a bound
            of the relative error of every entry of the matrices and of the bias; otherwise 0.
        lost: what else the value may be off by, (size,) or one number.
        is_inexact_factor: whether it multiplies by one number, known but for rounding, as a batch normalisation may.
        moves: whether it only picks entries, for the operator that follows.
    """

    terms: list[tuple[int, Matrix]]
    bias: Number
    relative: float = 0.0
    lost: Number | float = 0.0
    is_inexact_factor: bool = False
    moves: bool = False
    sources: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.sources = tuple(source for source, _ in self.terms)

    @property
    def size(self) -> int:
        return len(self.bias)

    @cached_property
    def absolute(self) -> list[Matrix]:
        return [abs(matrix) for _, matrix in self.terms]

    def _count(self, axis: int) -> list[int]:
        """How many products other than zero a sum along a row (1) or a column (0) of each matrix has, at most."""
        counts = (1 if m.ndim == 1 else np.max((m != 0).sum(axis), initial=0) for _, m in self.terms)
        return [int(count) for count in counts]

    @cached_property
    def products(self) -> int:
        """How many products other than zero a sum along a row of the matrices has, at most."""
        return sum(self._count(1))

    @cached_property
    def longest(self) -> int:
        """How many products a sum along a row or along a column has, at most."""
        return max(self.products, *self._count(0))


@dataclass(eq=False)
class Activation:
    """A function of every entry of the value of node ``source``.

    Attributes:
        own: whether the file has it as an activation; otherwise an operator is made of it.
    """

    source: int
    size: int
    function: Function
    own: bool = True

    @property
    def sources(self) -> tuple[int, ...]:
        return (self.source,)

    @property
    def rectifies(self) -> bool:
        """Whether it is ReLU or GELU, or a family of them."""
        relu = isinstance(self.function, Kinked) and self.own and self.function.is_relu
        return relu or self.function.kind in ("Gelu", "family")


@dataclass(eq=False)
class Maximum:
    """The largest of some entries of the value of node ``source``; node ``rounds`` makes the same of ReLUs.

    Attributes:
        rivals: (most, size) the numbers of these entries, the first one repeated where there are fewer.
    """

    source: int
    rounds: int
    rivals: Number

    @property
    def size(self) -> int:
        return int(self.rivals.shape[1])

    @property
    def sources(self) -> tuple[int, ...]:
        return (self.source, self.rounds)


@dataclass(eq=False)
class Ordered:
    """Numbers that compare with each other as the entries of the value of node ``source`` do; nothing else is known."""

    source: int
    size: int

    @property
    def sources(self) -> tuple[int, ...]:
        return (self.source,)


@dataclass(eq=False)
class Beside:
    """The value of node ``second``, which is also the value of ``first`` and that of the activation ``change``.

    The function of ``change``, of the difference of the inputs of both, follows from what is known of these.
    """

    first: int
    second: int
    change: int
    size: int

    @property
    def sources(self) -> tuple[int, ...]:
        return (self.first, self.second, self.change)


Node = Input | Affine | Activation | Maximum | Ordered | Beside


@dataclass(eq=False)
class Graph:
    """Nodes, each behind those that it reads; the first is the input.

    Attributes:
        output: the number of the node that is the network's output.
        second: the number of the first node of the second one of two networks; None where there is one network.
    """

    nodes: list[Node]
    output: int
    second: int | None = None

    @cached_property
    def order(self) -> list[int]:
        """The numbers of the nodes that the output depends on, itself included, in order."""
        needed = {0, self.output}
        for number in range(self.output, -1, -1):
            if number in needed:
                needed.update(self.nodes[number].sources)
        return sorted(needed)

    @cached_property
    def activations(self) -> list[int]:
        """The numbers of the activations and maxima that the output depends on, in order."""
        return [number for number in self.order if isinstance(self.nodes[number], Activation | Maximum)]

    @cached_property
    def widest(self) -> int:
        return max(self.nodes[number].size for number in self.order)

    @cached_property
    def work(self) -> int:
        """How many coefficients all matrices have."""
        maps = [matrix for number in self.order if isinstance(n := self.nodes[number], Affine) for _, matrix in n.terms]
        return sum(int(matrix.nnz) if sparse.issparse(matrix) else matrix.size for matrix in maps)

    @cached_property
    def exact(self) -> bool:
        """Whether rational arithmetic knows all of its functions."""
        nodes = (self.nodes[number] for number in self.order)
        return all(node.function.exact for node in nodes if isinstance(node, Activation))

    def asked(self, comparing: bool) -> Graph:
        """The network that rows of outputs are rows of: without its head, if they do no more than compare outputs.

        Raises:
            BadInput: if nothing but the order is known of some value on the way to the output.
        """
        output = self.output
        while comparing and _keeps_order(node := self.nodes[output]):
            output = node.sources[0]
        found = self if output == self.output else Graph(self.nodes, output, self.second)
        if any(isinstance(self.nodes[number], Ordered) for number in found.order):
            raise BadInput("of a softmax, or a function like it, nothing is known but which output is the larger one")
        return found

    def hardened(self, hardness: Sequence[Fraction], runs: bool = False) -> Graph:
        """All networks that have, in the place of each ReLU or λ-GELU, ReLU or a λ'-GELU with λ' ≥ its ``hardness``.

        A head of the network stays what it is.

        Args:
            hardness: of each activation.
            runs: whether the network itself, of which GELU is an operator, is to be one of them.

        Raises:
            Refused: if these are not as many, or other activations are among them, or the network is none of them.
        """
        nodes, places = list(self.nodes), self.asked(comparing=True).activations
        if any(isinstance(node, Affine) and node.is_inexact_factor for node in nodes):
            raise Refused("behind a batch normalisation that only multiplies by one number no λ is known")
        if len(hardness) != len(places) or not all(1 <= value <= 1 << 40 for value in hardness):
            raise Refused(f"a hardness from 1 on for each of {len(places)} activations is expected")
        for place, value in zip(places, hardness, strict=True):
            node = nodes[place]
            if not isinstance(node, Activation) or not node.rectifies:
                raise Refused("a family is one of networks with ReLU or GELU alone")
            if runs and not isinstance(node.function, Kinked) and value != 1:
                raise Refused("a GELU that runs is no member of its family")
            nodes[place] = replace(node, function=family(float(value)))
        return Graph(nodes, self.output)


def _keeps_order(node: Node) -> bool:
    increasing = isinstance(node, Activation) and node.function.kind in ("Sigmoid", "Tanh")
    return isinstance(node, Ordered) or increasing


def pick(index: Number, size: int) -> Matrix:
    """The matrix that picks entries ``index`` of a vector of ``size`` numbers; nothing, that is 0, where it is −1."""
    rows = np.flatnonzero(index.ravel() >= 0)
    return sparse.csr_array((np.ones(len(rows)), (rows, index.ravel()[rows])), shape=(index.size, size))


def added(terms: Sequence[tuple[int, Matrix]]) -> list[tuple[int, Matrix]]:
    """Terms of which each node is named once, with the sum of its matrices."""
    found: dict[int, Matrix] = {}
    for source, matrix in terms:
        if source in found:
            both = [part if part.ndim == 2 else sparse.diags_array(part) for part in (found[source], matrix)]
            found[source] = sparse.csr_array(both[0] + both[1])
        else:
            found[source] = matrix
    return list(found.items())


def joined(first: Graph, second: Graph, pairs: list[tuple[int, int]]) -> Graph:
    """Two networks at the same input, with the outputs of the first one and then those of the second.

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
        match node:
            case Affine():
                nodes.append(replace(node, terms=[(place[source], matrix) for source, matrix in node.terms]))
            case Maximum():
                nodes.append(replace(node, source=place[node.source], rounds=place[node.rounds]))
            case Activation() | Ordered():
                nodes.append(replace(node, source=place[node.source]))
        place[number] = len(nodes) - 1
        if number not in partner:
            continue
        f, g = nodes[partner[number]], nodes[-1]
        activations = isinstance(f, Activation) and isinstance(g, Activation) and f.rectifies and g.rectifies
        Refused.when(not (activations and f.size == g.size), "activations of a pair are as many ReLUs or GELUs each")
        # Both may be activations of the input: then z′ − z is 0. What the difference's function is depends on what is
        # known of z and z′ (bounds).
        one, ends = np.ones(g.size), (g.sources[0], f.sources[0])
        terms = [(ends[0], one), (ends[1], -one)] if ends[0] != ends[1] else [(ends[0], 0 * one)]
        nodes.append(Affine(terms, np.zeros(g.size)))
        nodes.append(Activation(len(nodes) - 1, g.size, Function(), own=False))
        nodes.append(Beside(partner[number], place[number], len(nodes) - 1, g.size))
        place[number] = len(nodes) - 1
    ends = first.output, place[second.output]
    sizes = [nodes[end].size for end in ends]
    index = np.arange(sum(sizes))
    terms = [(ends[0], pick(np.where(index < sizes[0], index, -1), sizes[0]))]
    terms.append((ends[1], pick(np.maximum(index - sizes[0], -1), sizes[1])))
    nodes.append(Affine(added(terms), np.zeros(sum(sizes))))
    return Graph(nodes, len(nodes) - 1, len(first.nodes))
