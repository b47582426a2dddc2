"""The arithmetic of what runs a network (docs/certificates.md): every operator that rounds has errors in its node.

While a file is read, each affine map that an operator computes as a sum of products gets the relative error θ of its
products and its bias, and what it may lose to numbers below the smallest normal one; the result of another operator
that rounds is followed by a node of its own, which only has the errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from scipy import sparse

from verifiable_relu.check.arithmetic import CURVE, LEAST, OWN, Number, RoundingModel, tie
from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.graph import ActivationNode, AffineNode, Graph, InputNode, SmoothNode, sources
from verifiable_relu.check.lines import CheckedRelaxation
from verifiable_relu.check.tensors import GraphBuilder, Tensor, Value

SUMS = {
    "Add", "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DequantizeLinear", "Div", "Gemm",
    "GlobalAveragePool", "MatMul", "Mul", "Sub",
}  # fmt: skip
"""Operators that are sums of products."""

ROUNDED = {"Gelu", "LeakyRelu", "PRelu", "Sigmoid", "Tanh"}
"""Other operators whose result is rounded."""

EXACT = {
    "Abs", "Dropout", "Flatten", "Identity", "MaxPool", "Relu", "Reshape", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators whose result is made of numbers of their inputs."""

DERIVED = {
    "AveragePool", "BatchNormalization", "DequantizeLinear", "Div", "GlobalAveragePool", "LeakyRelu", "QuantizeLinear",
}  # fmt: skip
"""Operators with other numbers than those that the file stores, which are not known where these are rounded."""


class Running:
    """The errors of the nodes of a graph that is being read."""

    def __init__(self, build: GraphBuilder, by: RoundingModel) -> None:
        self._build, self._by = build, by
        self._terms: list[int] = []
        self._least: list[float] = []
        # By the names of tensors that sum quantised numbers: twice how many numbers their types have, times scales.
        self._spans: dict[str, Fraction] = {}
        build.stored = by.stored

    def begun(self, source: Tensor) -> Tensor:
        """The input, as numbers of the arithmetic."""
        self._count(False)
        return self._noise(source, float(self._by.result)) if self._by.result else source

    def operator(
        self, kind: str, found: Value, name: str, names: Sequence[str], inputs: Sequence[Value | None]
    ) -> Value:
        """What a runtime makes of the result of an operator, whose nodes are the last ones.

        Raises:
            BadInput: if its rounding is not known.
        """
        if self._by.result and kind in DERIVED:
            raise BadInput("numbers that are computed from stored ones are not known in this arithmetic")
        before = sum((self._spans.get(tensor, Fraction(0)) for tensor in names), Fraction(0))
        if kind == "DequantizeLinear":
            scale = Fraction(float(np.max(_constant(inputs[1]))))
            self._spans[name] = 2 * max(self._numbers(value) for value in (inputs[0], *inputs[2:])) * scale
            if isinstance(found, np.ndarray):
                # An operand of products, with more digits than float32 has: of the roundings that are granted.
                return found
        elif kind in EXACT or kind in ("Add", "Sub"):
            self._spans[name] = before
        if kind not in SUMS | ROUNDED | EXACT | {"QuantizeLinear"} or not isinstance(found, Tensor):
            raise BadInput("its rounding is not known")
        if kind == "QuantizeLinear":
            self._divided(self._numbers(found), before / Fraction(float(np.min(_constant(inputs[1])))))
        self._count(kind in SUMS)
        if kind in EXACT or kind == "QuantizeLinear":
            return found
        if kind == "Gelu":
            found = self._with_part_of_argument(found)
        if kind in ROUNDED:
            absolute = CURVE if kind in ("Sigmoid", "Tanh") else 0.0
            found = self._noise(found, self._by.relative(1), absolute, kind in ("LeakyRelu", "PRelu"))
        return self._noise(found, float(self._by.result)) if self._by.result else found

    def _numbers(self, value: Value | None) -> int:
        """How many numbers the type of quantised ones has; that of a bias counts as one of 16 bits."""
        if isinstance(value, Tensor):
            kind = self._build.whole.get(value.node, "")
        else:
            kind = str(value.dtype) if isinstance(value, np.ndarray) else "uint8"
        return 1 << min(16, int(kind.rpartition("int")[2] or 16))

    def _divided(self, numbers: int, operands: Fraction) -> None:
        """Let the quotients that a QuantizeLinear rounds to whole numbers be off."""
        (curve,) = (node for node in self._build.nodes[len(self._terms) :] if isinstance(node, SmoothNode))
        node = self._build.nodes[curve.source]
        assert isinstance(node, AffineNode)
        row = np.asarray(node.absolute[0][1].sum(1)).ravel()
        node.lost = self._by.lost(1, row) + tie(numbers, operands)
        node.relative = OWN * (self._by.relative(1) + node.relative)

    def _count(self, rounded: bool) -> None:
        """Go on to the newest nodes; those that compute are sums that are rounded, or none."""
        for number, node in enumerate(self._build.nodes[len(self._terms) :], len(self._terms)):
            before = max((self._terms[source] for source in sources(node)), default=0)
            if not isinstance(node, AffineNode):
                self._terms.append(0)
                self._least.append(1.0)
                continue
            own = node.products if rounded and not node.moves and number not in self._build.whole else 0
            self._terms.append(before + own)
            self._least.append(node.least * min(1.0, *(self._least[source] for source in sources(node))))
            if own:
                self._charge(node, self._by.relative(before + own), before + own)

    def _charge(self, node: AffineNode, relative: float, terms: int) -> None:
        row = np.sum([np.asarray(absolute.sum(1)).ravel() for _, absolute in node.absolute], 0)
        node.lost = self._by.lost(terms, row, self._least[-1] < LEAST)
        node.relative = OWN * (relative + node.relative)

    def _noise(self, found: Tensor, relative: float, absolute: float = 0.0, small: bool = False) -> Tensor:
        size = self._build.nodes[found.node].size
        same = AffineNode([(found.node, sparse.eye_array(size, format="csr"))], np.zeros(size), relative)
        same.lost = self._by.lost(1, np.ones(size), small) + absolute
        return Tensor(self._add(same), found.index)

    def _with_part_of_argument(self, found: Tensor) -> Tensor:
        """r + x·(1 + δ) − x, where |δ| ≤ ``CURVE``."""
        node = self._build.nodes[found.node]
        if not isinstance(node, SmoothNode):
            raise BadInput("the rounding of a GELU with a factor is not known")
        one = sparse.eye_array(node.size, format="csr")
        off = self._add(AffineNode([(node.source, one)], np.zeros(node.size), CURVE))
        terms = [(node.source, -one), (found.node, one), (off, one)]
        return Tensor(self._add(AffineNode(terms, np.zeros(node.size))), found.index)

    def _add(self, node: AffineNode) -> int:
        self._build.nodes.append(node)
        self._terms.append(max(self._terms[source] for source in sources(node)))
        self._least.append(min(self._least[source] for source in sources(node)))
        return len(self._terms) - 1


def _constant(value: Value | None) -> Number:
    assert isinstance(value, np.ndarray)
    return value


def require_rounded(graph: Graph) -> None:
    """Require that no output is a number of the input as it was given.

    Raises:
        BadInput: if one is.
    """
    given = {0}
    for number in graph.needed:
        node = graph.nodes[number]
        rounds = isinstance(node, AffineNode) and node.relative
        if not isinstance(node, InputNode) and not rounds and given.intersection(sources(node)):
            given.add(number)
    if graph.output in given:
        raise BadInput("an output is a number of the input: what a runtime makes of it is not known")


def require_moderate(graph: Graph, lower: Number, upper: Number, largest: float) -> None:
    """Require that no value, and no sum of the sizes of its terms, can be so large over a box that it may overflow.

    Raises:
        Refused: if interval arithmetic does not show it.
    """
    relaxation = CheckedRelaxation(graph, lower, upper)
    for number in graph.needed:
        node: Any = graph.nodes[number]
        if isinstance(node, ActivationNode | SmoothNode):
            relaxation.claim(number, *relaxation.ends(node.source))
        size = relaxation.most(number)
        if isinstance(node, AffineNode):
            terms = (absolute @ relaxation.most(source) for source, absolute in node.absolute)
            size = np.maximum(size, OWN * (sum(terms) + np.abs(node.bias)))
        if not (size <= largest).all():
            raise Refused("values are possible at which the arithmetic may overflow")
