"""Uses of quantised numbers in whose place onnxruntime computes other numbers by default (docs/arithmetic.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verifiable_relu.check.errors import BadInput
from verifiable_relu.check.numbers import Number
from verifiable_relu.check.tensors import Value

PRODUCTS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}

MOVES = {"Cast", "Dropout", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}

EXACT = MOVES | {"Abs", "Concat", "Gather", "MaxPool", "Relu"}

NEUTRAL = {"Add": 0, "Div": 1, "Mul": 1, "Sub": 0}
"""Operators that change nothing with these constants."""

FOLDED = EXACT | {"BatchNormalization", *NEUTRAL}
"""Operators that, with stored numbers, may become a part of float weights."""

SAME_SCALE = 2.0**-23
"""The part of itself by which s_x·s_w may differ from a scale that is their product, rounded twice to float32."""

Steps = tuple[Number, Number]
"""A scale and a zero point."""


class Uses:
    """The nodes of a file, in order, and its tensors by name."""

    def __init__(self, tensors: Mapping[str, Value | None]) -> None:
        self._tensors = tensors
        self._makers: dict[str, Any] = {}

    def require_kept(self, node: Any) -> None:
        """Require that a default session makes of the next node what the file says.

        Raises:
            BadInput: if it does not.
        """
        self._makers |= dict.fromkeys(node.output, node)
        if node.op_type == "QuantizeLinear":
            for through in (EXACT, FOLDED):
                _, _, (x, *others) = self._product(self._maker(node.input[0], through))
                if x is not None and x[0].size == 1 and None in others:
                    raise BadInput("by default float weights, or a float bias, of what it quantises are quantised, too")
            twice, own = self._dequantized(node.input[0], MOVES), self._steps(node)
            if twice and not all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(twice, own, strict=True)):
                raise BadInput("by default it is one with the DequantizeLinear before it, of another scale")
            return
        operator, source, (x, *others) = self._product(node)
        weight = others[0] if others else None
        if weight is not None:
            if operator in ("MatMul", "Gemm") and (source is None or source.op_type != "DequantizeLinear"):
                raise BadInput("by default what its quantised weights are multiplied with is quantised, too")
            one = x if x is not None and x[0].size == 1 else None
            if any(bias and one and not _is_product(bias, one, weight) for bias in others[1:]):
                raise BadInput("by default the scale of its bias is the product of the scales of its operands")

    def _maker(self, name: str, through: set[str]) -> Any:
        """The node from which a tensor comes through some operators, and through those that change nothing."""
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

    def _product(self, node: Any) -> tuple[str, Any, list[Steps | None]]:
        """A product's operator, what makes its first input, and the scales of its inputs; also of one with an Add.

        The scales are None where an input comes from no DequantizeLinear; of another node there is None alone.
        """
        names = [name for name in node.input if name] if node else []
        if node and node.op_type == "Add":
            for summed, added in (names, names[::-1]):
                before = self._maker(summed, MOVES)
                if before and before.op_type in PRODUCTS and isinstance(self._tensors[added], np.ndarray):
                    node, names = before, [*before.input[:2], added]
        if not node or node.op_type not in PRODUCTS or isinstance(self._tensors[names[0]], np.ndarray):
            return "", None, [None]
        turned = any(a.name == "transB" and a.i for a in node.attribute)
        scales = [self._dequantized(name, EXACT) for name in names]
        return ("turned " if turned else "") + node.op_type, self._makers.get(names[0]), scales

    def _dequantized(self, name: str, through: set[str]) -> Steps | None:
        """The scale and zero point of the DequantizeLinear from which a tensor comes, if it comes from one."""
        node = self._maker(name, through)
        return self._steps(node) if node and node.op_type == "DequantizeLinear" else None

    def _steps(self, node: Any) -> Steps:
        found = [self._tensors[name] for name in node.input[1:] if name]
        scale, zero = (*found, np.zeros((), np.uint8))[:2]
        assert isinstance(scale, np.ndarray) and isinstance(zero, np.ndarray)
        return scale, zero


def _is_product(bias: Steps, x: Steps, weight: Steps) -> bool:
    """Return True if the scale of a bias is s_x·s_w, but for two roundings."""
    expected, own = (x[0].astype(np.float64) * weight[0]).ravel(), bias[0].ravel()
    fits = own.size in (1, expected.size) and not bias[1].any()
    return fits and bool((np.abs(own - expected) <= SAME_SCALE * expected).all())
