"""The arithmetic of what runs a network (docs/certificates.md): every operator that rounds has errors in its node.

While a file is read, each affine map that an operator computes as a sum of products gets the relative error θ of its
products and its bias, and what it may lose to numbers below the smallest normal one; the result of another operator
that rounds is followed by a node of its own, which only has the errors. Quantised numbers are refused: in their place
onnxruntime computes other numbers by default (docs/arithmetic.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from verifiable_relu.check.bounds import State
from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.graph import Activation, AffineNode, Builder, Tensor, Value, affine
from verifiable_relu.check.numbers import OWN, Number, outward

SPARE = 16
"""Roundings granted to every sum beyond its own."""

LEAST = 2.0**-126
"""The smallest normal number of float32."""

CURVE = 2.0**-18
"""The error of Sigmoid and Tanh, and of Gelu as a part of its argument."""

SUMS, ROUNDED, EXACT, DERIVED = (set(names.split()) for names in (
    "Add AveragePool BatchNormalization Conv ConvTranspose Div Gemm GlobalAveragePool MatMul Mul Sub",
    "Gelu LeakyRelu PRelu Sigmoid Tanh",
    "Abs Dropout Flatten Identity MaxPool Relu Reshape Squeeze Transpose Unsqueeze",
    "AveragePool BatchNormalization Div GlobalAveragePool LeakyRelu",
))  # fmt: skip
"""Operators that are sums of products; others whose result is rounded; those whose result is made of numbers of their
inputs; and those with other numbers than the file stores, which are not known where these are rounded."""


def _bfloat16(values: Number) -> Number:
    """Return numbers of float32 rounded to bfloat16, ties to even."""
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
        """Return θ of a sum of ``count`` products."""
        spread = (terms + 1 + SPARE) * self.unit
        BadInput.when(spread >= Fraction(1, 2), "a sum is too long for its rounding to be bounded")
        return outward((1 + self.operand) ** 2 / (1 - spread) - 1, np.inf)

    def lost(self, terms: int, row: Number) -> Number:
        """Return what sums of products lose below the smallest normal number; ``row``: sizes of their weights.

        A weight, or its product with those of fused operators, may be below that number, too, and vanish.
        """
        sizes = 2 * (terms + 1 + SPARE) + 2 * row + terms * self.largest
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
        # For each node, how many products its sums have with those before that may be fused.
        self._terms: list[int] = []
        build.stored = by.stored

    def operator(self, kind: str, found: Value) -> Tensor:
        """Return what a runtime makes of the result of an operator, whose nodes are the last ones.

        Raises:
            BadInput: if its rounding is not known.
        """
        by, build = self._by, self._build
        BadInput.when(by.result and kind in DERIVED, "numbers made of stored ones are not known in this arithmetic")
        if kind not in SUMS | ROUNDED | EXACT or not isinstance(found, Tensor):
            raise BadInput("its rounding is not known")
        self._count(kind in SUMS)
        if kind in EXACT:
            return found
        if kind == "Gelu":
            # r + x·(1 + δ) − x, where |δ| ≤ CURVE.
            curve = build.nodes[found.node]
            BadInput.when(not isinstance(curve, Activation), "the rounding of a GELU with a factor is not known")
            one = np.ones(curve.size)
            off = self._add([(curve.source, one)], CURVE)
            found = Tensor(self._add([(curve.source, -one), (found.node, one), (off, one)]), found.index)
        if kind in ROUNDED:
            lost = by.lost(1, np.ones(1)) + CURVE * (kind in ("Sigmoid", "Tanh"))
            found = self._noise(found, by.relative(1), lost)
        return self.result(found)

    def result(self, found: Tensor) -> Tensor:
        """Return a tensor, the input or an operator's result, as numbers of the arithmetic."""
        if not self._by.result:
            return found
        return self._noise(found, float(self._by.result), self._by.lost(1, np.ones(1)))

    def output(self, found: Tensor) -> Tensor:
        """Return the output: a number of the input that passes through may be taken for zero below ``LEAST``."""
        return self._noise(found, 0.0, np.array(2 * LEAST))

    def _noise(self, found: Tensor, relative: float, lost: Number) -> Tensor:
        one = np.ones(self._build.nodes[found.node].size)
        return Tensor(self._add([(found.node, one)], relative, lost), found.index)

    def _add(self, terms: list[tuple[int, Number]], relative: float = 0.0, lost: Any = 0.0) -> int:
        self._build.nodes.append(affine(terms, np.zeros(len(terms[0][1])), relative, lost))
        self._count(False)
        return len(self._terms) - 1

    def _count(self, rounded: bool) -> None:
        """Go on to the newest nodes; those that compute are sums that are rounded, or none."""
        for node in self._build.nodes[len(self._terms) :]:
            if not isinstance(node, AffineNode):
                self._terms.append(0)
                continue
            own = node.products if rounded and not node.moves else 0
            self._terms.append(max(self._terms[source] for source in node.sources) + own)
            if own:
                node.lost = self._by.lost(self._terms[-1], node.sums)
                node.relative = OWN * (self._by.relative(self._terms[-1]) + node.relative)


def require_moderate(state: State, largest: float) -> None:
    """Require that no value, and no sum of the sizes of its terms, can be so large over a box that it may overflow."""
    for number in state.graph.order:
        node, size = state.graph.nodes[number], state.size(number)
        if isinstance(node, AffineNode):
            size = np.maximum(size, OWN * (state.sums(number) + np.abs(node.bias)))
        Refused.when(not (size <= largest).all(), "values are possible at which the arithmetic may overflow")
