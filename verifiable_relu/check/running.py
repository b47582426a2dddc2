"""The arithmetic of what runs a network (docs/certificates.md): every operator that rounds has errors in its node.

While a file is read, each affine map that an operator computes as a sum of products gets the relative error θ of its
products and its bias, and what it may lose to numbers below the smallest normal one; the result of another operator
that rounds is followed by a node of its own, which only has the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from scipy import sparse

from verifiable_relu.check.bounds import State
from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.graph import Activation, Affine, Graph, Input
from verifiable_relu.check.numbers import OWN, Number, outward
from verifiable_relu.check.tensors import Builder, Tensor, Value

SPARE = 16
"""Roundings granted to every sum beyond its own."""

LEAST = 2.0**-126
"""The smallest normal number of float32."""

CURVE = 2.0**-18
"""The error of Sigmoid and Tanh, and of Gelu as a part of its argument."""

SUMS, ROUNDED, EXACT, DERIVED = (set(names.split()) for names in (
    "Add AveragePool BatchNormalization Conv ConvTranspose DequantizeLinear Div Gemm GlobalAveragePool MatMul Mul Sub",
    "Gelu LeakyRelu PRelu Sigmoid Tanh",
    "Abs Dropout Flatten Identity MaxPool Relu Reshape Squeeze Transpose Unsqueeze",
    "AveragePool BatchNormalization DequantizeLinear Div GlobalAveragePool LeakyRelu QuantizeLinear",
))  # fmt: skip
"""Operators that are sums of products; others whose result is rounded; those whose result is made of numbers of their
inputs; and those with other numbers than the file stores, which are not known where these are rounded."""


def _bfloat16(values: Number) -> Number:
    """Numbers of float32 rounded to bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@dataclass(frozen=True)
class RoundingModel:
    """One row of the page's table.

    Attributes:
        operand, unit, result: relative errors of an operand, of an operation of a sum, and of a result.
        least: half of the least positive number of results, where these are not float32.
        largest: what no value may exceed, nor any sum of the sizes of terms.
        stored: what becomes of the numbers that a file stores.
    """

    operand: Fraction
    unit: Fraction
    result: Fraction = Fraction(0)
    least: float = 0.0
    largest: float = 2.0**60
    stored: Callable[[Number], Number] = np.asarray

    def relative(self, terms: int) -> float:
        """θ of a sum of so many products."""
        spread = (terms + 1 + SPARE) * self.unit
        BadInput.when(spread >= Fraction(1, 2), "a sum is too long for its rounding to be bounded")
        return outward((1 + self.operand) ** 2 / (1 - spread) - 1, np.inf)

    def lost(self, terms: int, row: Number, small: bool = False) -> Number:
        """What sums of so many products lose below the smallest normal number; ``row``: the sizes of their weights.

        ``small``: whether a weight other than zero, or its product with those of fused operators, may be smaller.
        """
        sizes = 2 * (terms + 1 + SPARE) + 2 * row + (terms * self.largest if small else 0.0)
        return np.asarray(OWN * (2 * LEAST * sizes + self.least))


_NONE, _UNIT = Fraction(0), Fraction(1, 2**23)
ARITHMETICS = {
    "float32": RoundingModel(_NONE, Fraction(1, 2**24)),
    "tf32": RoundingModel(Fraction(1, 2**10), _UNIT),
    "bfloat16": RoundingModel(_NONE, _UNIT, Fraction(1, 2**8), stored=_bfloat16),
    "float16": RoundingModel(_NONE, _UNIT, Fraction(1, 2**11), 2.0**-25, 2.0**15, lambda v: v.astype(np.float16)),
}
"""By name. In float32 every operation is rounded to nearest; in tf32 operands are cut to 10 bits behind the first; in
types of 16 bits results are rounded to 8 and 11 bits; their sums may be cut off. A product takes part in K additions,
at most, of a sum of K products and a bias: with the operands' errors, and ``SPARE`` roundings more, it is off by
(1 + o)²·(1 + s)ⁿ − 1 ≤ (1 + o)²/(1 − n·s) − 1 of itself, n = K + 1 + ``SPARE`` (Higham, section 3.1).
"""


class Running:
    """The errors of the nodes of a graph that is being read."""

    def __init__(self, build: Builder, by: RoundingModel) -> None:
        self._build, self._by = build, by
        # Of each node, how many products its sums have with those before that may be fused, and the least factor.
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
        unknown = self._by.result and kind in DERIVED
        BadInput.when(unknown, "numbers that are computed from stored ones are not known in this arithmetic")
        before = sum((self._spans.get(tensor, Fraction(0)) for tensor in names), Fraction(0))
        if kind == "DequantizeLinear":
            scale = Fraction(float(np.max(np.asarray(inputs[1]))))
            self._spans[name] = 2 * max(self._numbers(value) for value in (inputs[0], *inputs[2:])) * scale
            if isinstance(found, np.ndarray):
                # An operand of products, with more digits than float32 has: of the roundings that are granted.
                return found
        elif kind in EXACT or kind in ("Add", "Sub"):
            self._spans[name] = before
        if kind not in SUMS | ROUNDED | EXACT | {"QuantizeLinear"} or not isinstance(found, Tensor):
            raise BadInput("its rounding is not known")
        if kind == "QuantizeLinear":
            self._divided(self._numbers(found), before / Fraction(float(np.min(np.asarray(inputs[1])))))
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
        """Let the quotients that a QuantizeLinear rounds to whole numbers be off.

        A kernel may add the result's zero point first, and sum the operands' whole numbers with theirs: terms whose
        sizes are ``numbers`` + ``operands`` together, in fewer than ``SPARE`` roundings.
        """
        fresh: list[Any] = self._build.nodes[len(self._terms) :]
        (curve,) = (node for node in fresh if isinstance(node, Activation) and node.function.kind == "Round")
        node: Any = self._build.nodes[curve.source]
        spread = SPARE * Fraction(1, 1 << 24)
        tie = outward(spread / (1 - spread) * (numbers + operands), np.inf)
        node.lost = self._by.lost(1, _sizes(node)) + tie
        node.relative = OWN * (self._by.relative(1) + node.relative)

    def _count(self, rounded: bool) -> None:
        """Go on to the newest nodes; those that compute are sums that are rounded, or none."""
        for number, node in enumerate(self._build.nodes[len(self._terms) :], len(self._terms)):
            if not isinstance(node, Affine):
                self._terms.append(0)
                self._least.append(1.0)
                continue
            own = node.products if rounded and not node.moves and number not in self._build.whole else 0
            self._terms.append(max(self._terms[source] for source in node.sources) + own)
            self._least.append(_least(node) * min(1.0, *(self._least[source] for source in node.sources)))
            if own:
                node.lost = self._by.lost(self._terms[-1], _sizes(node), self._least[-1] < LEAST)
                node.relative = OWN * (self._by.relative(self._terms[-1]) + node.relative)

    def _noise(self, found: Tensor, relative: float, absolute: float = 0.0, small: bool = False) -> Tensor:
        one = np.ones(self._build.nodes[found.node].size)
        same = Affine([(found.node, one)], 0 * one, relative, self._by.lost(1, one, small) + absolute)
        return Tensor(self._add(same), found.index)

    def _with_part_of_argument(self, found: Tensor) -> Tensor:
        """r + x·(1 + δ) − x, where |δ| ≤ ``CURVE``."""
        node = self._build.nodes[found.node]
        if not isinstance(node, Activation):
            raise BadInput("the rounding of a GELU with a factor is not known")
        one = np.ones(node.size)
        off = self._add(Affine([(node.source, one)], 0 * one, CURVE))
        return Tensor(self._add(Affine([(node.source, -one), (found.node, one), (off, one)], 0 * one)), found.index)

    def _add(self, node: Affine) -> int:
        self._build.nodes.append(node)
        self._terms.append(max(self._terms[source] for source in node.sources))
        self._least.append(min(self._least[source] for source in node.sources))
        return len(self._terms) - 1


def _least(node: Affine) -> float:
    """The size of the least coefficient other than zero; 1 where all are zero."""
    sizes = (matrix.data if sparse.issparse(matrix) else matrix for matrix in node.absolute)
    return min((float(part[part > 0].min()) for part in sizes if (part > 0).any()), default=1.0)


def _sizes(node: Affine) -> Number:
    """Σ |w| of each entry of a node."""
    return np.sum([part if part.ndim == 1 else np.asarray(part.sum(1)).ravel() for part in node.absolute], 0)


def require_rounded(graph: Graph) -> None:
    """Require that no output is a number of the input as it was given.

    Raises:
        BadInput: if one is.
    """
    given = {0}
    for number in graph.order:
        node = graph.nodes[number]
        rounds = isinstance(node, Input) or (isinstance(node, Affine) and node.relative)
        if not rounds and given.intersection(node.sources):
            given.add(number)
    unknown = graph.output in given
    BadInput.when(unknown, "an output is a number of the input: what a runtime makes of it is not known")


def require_moderate(state: State, largest: float) -> None:
    """Require that no value, and no sum of the sizes of its terms, can be so large over a box that it may overflow.

    Raises:
        Refused: if interval arithmetic does not show it.
    """
    for number in state.graph.order:
        node, size = state.graph.nodes[number], state.size(number)
        if isinstance(node, Affine):
            size = np.maximum(size, OWN * (state.sums(node) + np.abs(node.bias)))
        Refused.when(not (size <= largest).all(), "values are possible at which the arithmetic may overflow")
