"""The arithmetic of what runs a network (docs/certificates.md): every operator that rounds has errors in its node.

While a file is read, each affine map that an operator computes as a sum of products gets the relative error θ of its
products and its bias, and what it may lose to numbers below the smallest normal one; the result of another operator
that rounds is followed by a node of its own, which only has the errors. Refused are uses of quantised numbers in whose
place onnxruntime computes other numbers by default (docs/arithmetic.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from scipy import sparse

from verifiable_relu.check.bounds import State
from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.graph import Activation, Affine, Builder, Graph, Tensor, Value, affine
from verifiable_relu.check.numbers import OWN, Number, outward

SPARE = 16
"""Roundings granted to every sum beyond its own."""

LEAST = 2.0**-126
"""The smallest normal number of float32."""

CURVE = 2.0**-18
"""The error of Sigmoid and Tanh, and of Gelu as a part of its argument."""

SAME_SCALE = 2.0**-23
"""The part of itself by which s_x·s_w may differ from a scale that is their product, rounded twice to float32."""

SUMS, ROUNDED, EXACT, DERIVED, PRODUCTS, MOVES = (set(names.split()) for names in (
    "Add AveragePool BatchNormalization Conv ConvTranspose DequantizeLinear Div Gemm GlobalAveragePool MatMul Mul Sub",
    "Gelu LeakyRelu PRelu Sigmoid Tanh",
    "Abs Dropout Flatten Identity MaxPool Relu Reshape Squeeze Transpose Unsqueeze",
    "AveragePool BatchNormalization DequantizeLinear Div GlobalAveragePool LeakyRelu QuantizeLinear",
    "Conv ConvTranspose Gemm MatMul",
    "Cast Dropout Flatten Identity Reshape Slice Squeeze Transpose Unsqueeze",
))  # fmt: skip
"""Operators that are sums of products; others whose result is rounded; those whose result is made of numbers of their
inputs; those with other numbers than the file stores, which are not known where these are rounded; those that have
quantised forms; and those through which quantised numbers are traced."""

NEUTRAL = {"Add": 0, "Div": 1, "Mul": 1, "Sub": 0}
"""Operators that change nothing with these constants."""

KEPT = MOVES | {"Abs", "Concat", "Gather", "MaxPool", "Relu"}

FOLDED = KEPT | {"BatchNormalization", *NEUTRAL}
"""Operators that, with stored numbers, may become a part of float weights."""

Steps = tuple[Number, Number]
"""A scale and a zero point."""


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
        """Return θ of a sum of so many products."""
        spread = (terms + 1 + SPARE) * self.unit
        BadInput.when(spread >= Fraction(1, 2), "a sum is too long for its rounding to be bounded")
        return outward((1 + self.operand) ** 2 / (1 - spread) - 1, np.inf)

    def lost(self, terms: int, row: Number, small: bool = False) -> Number:
        """Return what sums of so many products lose below the smallest normal number; ``row``: sizes of their weights.

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
    """The errors of the nodes of a graph that is being read, whose tensors are known by name."""

    def __init__(self, build: Builder, by: RoundingModel, tensors: Mapping[str, Value | None]) -> None:
        self._build, self._by, self._tensors = build, by, tensors
        self._makers: dict[str, Any] = {}
        # Of each node, how many products its sums have with those before that may be fused, and the least factor.
        self._terms: list[int] = []
        self._least: list[float] = []
        # By the names of tensors that sum quantised numbers: twice how many numbers their types have, times scales.
        self._spans: dict[str, Fraction] = {}
        build.stored = by.stored

    def begun(self, source: Tensor) -> Tensor:
        """Return the input, as numbers of the arithmetic."""
        self._count(False)
        return self._result(source)

    def operator(self, node: Any, found: Value) -> Value:
        """Return what a runtime makes of the result of an operator, whose nodes are the last ones.

        Raises:
            BadInput: if its rounding is not known, or a default session makes of the node something else.
        """
        kind, name, by = node.op_type, node.output[0], self._by
        unknown = by.result and kind in DERIVED
        BadInput.when(unknown, "numbers that are computed from stored ones are not known in this arithmetic")
        inputs = [self._tensors[tensor] for tensor in node.input]
        before = sum((self._spans.get(tensor, _NONE) for tensor in node.input), _NONE)
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
            # r + x·(1 + δ) − x, where |δ| ≤ CURVE.
            curve = self._build.nodes[found.node]
            BadInput.when(not isinstance(curve, Activation), "the rounding of a GELU with a factor is not known")
            one = np.ones(curve.size)
            off = self._add(affine([(curve.source, one)], 0 * one, CURVE))
            terms = [(curve.source, -one), (found.node, one), (off, one)]
            found = Tensor(self._add(affine(terms, 0 * one)), found.index)
        if kind in ROUNDED:
            lost = by.lost(1, np.ones(1), kind in ("LeakyRelu", "PRelu")) + (
                CURVE if kind in ("Sigmoid", "Tanh") else 0
            )
            found = self._noise(found, by.relative(1), lost)
        return self._result(found)

    def _result(self, found: Tensor) -> Tensor:
        if not self._by.result:
            return found
        return self._noise(found, float(self._by.result), self._by.lost(1, np.ones(1)))

    def _noise(self, found: Tensor, relative: float, lost: Number) -> Tensor:
        one = np.ones(self._build.nodes[found.node].size)
        return Tensor(self._add(affine([(found.node, one)], 0 * one, relative, lost)), found.index)

    def _numbers(self, value: Value | None) -> int:
        """Return how many numbers the type of quantised ones has; that of a bias counts as one of 16 bits."""
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
        fresh = self._build.nodes[len(self._terms) :]
        (curve,) = (node for node in fresh if isinstance(node, Activation) and node.function.kind == "Round")
        node = self._build.nodes[curve.source]
        spread = SPARE * Fraction(1, 1 << 24)
        tie = outward(spread / (1 - spread) * (numbers + operands), np.inf)
        node.lost = self._by.lost(1, node.sums) + tie
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
                node.lost = self._by.lost(self._terms[-1], node.sums, self._least[-1] < LEAST)
                node.relative = OWN * (self._by.relative(self._terms[-1]) + node.relative)

    def _add(self, node: Affine) -> int:
        self._build.nodes.append(node)
        self._terms.append(max(self._terms[source] for source in node.sources))
        self._least.append(min(self._least[source] for source in node.sources))
        return len(self._terms) - 1

    def require_kept(self, node: Any) -> None:
        """Require that a default session makes of the next node what the file says.

        Raises:
            BadInput: if it does not.
        """
        self._makers |= dict.fromkeys(node.output, node)
        if node.op_type == "QuantizeLinear":
            for through in (KEPT, FOLDED):
                _, (x, *others) = self._product(self._maker(node.input[0], through))
                if x is not None and x[0].size == 1 and None in others:
                    raise BadInput("by default float weights, or a float bias, of what it quantises are quantised, too")
            twice, own = self._dequantized(node.input[0], MOVES), self._steps(node)
            if twice and not all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(twice, own, strict=True)):
                raise BadInput("by default it is one with the DequantizeLinear before it, of another scale")
            return
        alone, (x, *others) = self._product(node)
        weight = others[0] if others else None
        if weight is not None:
            BadInput.when(alone, "by default what its quantised weights are multiplied with is quantised, too")
            one = x if x is not None and x[0].size == 1 else None
            if any(bias and one and not _is_product(bias, one, weight) for bias in others[1:]):
                raise BadInput("by default the scale of its bias is the product of the scales of its operands")

    def _maker(self, name: str, through: set[str]) -> Any:
        """Return the node from which a tensor comes through some operators, and those that change nothing."""
        node = self._makers.get(name)
        if node is None or node.op_type not in through | set(NEUTRAL):
            return node
        if node.op_type not in NEUTRAL:
            return self._maker(node.input[0], through)
        for at, other in enumerate(node.input[1::-1]):
            number = self._tensors[other]
            if isinstance(number, np.ndarray) and (node.op_type in through or (number == NEUTRAL[node.op_type]).all()):
                return self._maker(node.input[at], through)
        return node

    def _product(self, node: Any) -> tuple[bool, list[Steps | None]]:
        """Return of a product, or of one with an Add, the scales of its inputs, None where there are none.

        Before them, return True if it is a matrix product, not transposed, of what is not quantised. Of another node
        there is None alone.
        """
        names = [name for name in node.input if name] if node else []
        if node and node.op_type == "Add":
            for summed, added in (names, names[::-1]):
                before = self._maker(summed, MOVES)
                if before and before.op_type in PRODUCTS and isinstance(self._tensors[added], np.ndarray):
                    node, names = before, [*before.input[:2], added]
        if not node or node.op_type not in PRODUCTS or isinstance(self._tensors[names[0]], np.ndarray):
            return False, [None]
        turned = any(a.name == "transB" and a.i for a in node.attribute)
        source = self._makers.get(names[0])
        alone = node.op_type in ("MatMul", "Gemm") and not (source and source.op_type == "DequantizeLinear")
        return alone and not turned, [self._dequantized(name, KEPT) for name in names]

    def _dequantized(self, name: str, through: set[str]) -> Steps | None:
        """Return the scale and zero point of the DequantizeLinear from which a tensor comes, if it comes from one."""
        node = self._maker(name, through)
        return self._steps(node) if node and node.op_type == "DequantizeLinear" else None

    def _steps(self, node: Any) -> Steps:
        found: list[Any] = [self._tensors[name] for name in node.input[1:] if name]
        scale, zero = (*found, np.zeros((), np.uint8))[:2]
        return scale, zero


def _is_product(bias: Steps, x: Steps, weight: Steps) -> bool:
    """Return True if the scale of a bias is s_x·s_w, but for two roundings."""
    expected, own = (x[0].astype(np.float64) * weight[0]).ravel(), bias[0].ravel()
    fits = own.size in (1, expected.size) and not bias[1].any()
    return fits and bool((np.abs(own - expected) <= SAME_SCALE * expected).all())


def _least(node: Affine) -> float:
    """Return the size of the least coefficient other than zero; 1 where all are zero."""
    sizes = (matrix.data if sparse.issparse(matrix) else matrix for matrix in node.absolute)
    return min((float(part[part > 0].min()) for part in sizes if (part > 0).any()), default=1.0)


def require_rounded(graph: Graph) -> None:
    """Require that no output is a number of the input as it was given."""
    given = {0}
    for number in graph.order:
        node = graph.nodes[number]
        rounds = not node.sources or (isinstance(node, Affine) and node.relative)
        if not rounds and given.intersection(node.sources):
            given.add(number)
    unknown = graph.output in given
    BadInput.when(unknown, "an output is a number of the input: what a runtime makes of it is not known")


def require_moderate(state: State, largest: float) -> None:
    """Require that no value, and no sum of the sizes of its terms, can be so large over a box that it may overflow."""
    for number in state.graph.order:
        node, size = state.graph.nodes[number], state.size(number)
        if isinstance(node, Affine):
            size = np.maximum(size, OWN * (state.sums(number) + np.abs(node.bias)))
        Refused.when(not (size <= largest).all(), "values are possible at which the arithmetic may overflow")
