"""Uses of quantised numbers in whose place a session of onnxruntime with default options computes other numbers.

Between DequantizeLinear and QuantizeLinear, onnxruntime replaces operators by kernels of whole numbers. Most of these
compute what the file says, but for rounding (``rounded``). These do not:

- The bias of a Conv, ConvTranspose or Gemm, or what is added to a MatMul, becomes a whole number times s_x·s_w, the
  scales of its operands, whatever the file says; and so do weights that the file does not quantise.
- Of a product with quantised weights, an operand that is not quantised is quantised, too, in blocks.
- A QuantizeLinear of numbers that a DequantizeLinear of another scale has just made becomes one with it.

Files that have these are refused, whether or not a fusion takes place in the version at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import onnx

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.readers.builder import Value
from verifiable_relu.rounding import SAME_SCALE

_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})

_MOVES = frozenset({
    "Cast", "Dropout", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators that onnxruntime may take away between two others."""

_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}
"""The constants with which it takes away these."""

_FOLDED = frozenset({"BatchNormalization", *_NEUTRAL})
"""Operators that it may make a part of float weights and their bias, where the other operand is stored."""


class Requantised:
    """The nodes of a file that have been read, in order, so that a node can be traced back."""

    def __init__(self, tensors: Mapping[str, Any], exact: frozenset[str]) -> None:
        self._tensors, self._exact = tensors, exact | _MOVES
        self._made: dict[str, onnx.NodeProto] = {}

    def take(self, node: onnx.NodeProto) -> None:
        """Take note of a node.

        Raises:
            UnsupportedError: if a default session computes another number in its place.
        """
        self._made |= dict.fromkeys(filter(None, node.output), node)
        if node.op_type == "QuantizeLinear" and self._is_computed(node.input[0]):
            self._require_kept(node)
        elif (found := self._product(node)) is not None:
            self._require_scales(*found)

    def _is_computed(self, name: str) -> bool:
        return isinstance(self._tensors.get(name), Value)

    def _source(self, name: str, through: Set[str]) -> onnx.NodeProto | None:
        """The node from which a tensor comes through some operators, and through those that change nothing."""
        node = self._made.get(name)
        if node is None or (node.op_type not in through and node.op_type not in _NEUTRAL):
            return node
        if node.op_type not in _NEUTRAL:
            return self._source(node.input[0], through)
        for other, stored in (node.input, node.input[::-1]):
            number = self._tensors.get(stored)
            neutral = isinstance(number, np.ndarray) and (number == _NEUTRAL[node.op_type]).all()
            if neutral or (node.op_type in through and not self._is_computed(stored)):
                return self._source(other, through)
        return node

    def _dequantized(self, name: str, through: Set[str]) -> tuple[np.ndarray, np.ndarray] | None:
        """Scale and zero point of the DequantizeLinear from which a tensor comes, if it is one."""
        node = self._source(name, through)
        return self._step(node) if node is not None and node.op_type == "DequantizeLinear" else None

    def _step(self, node: onnx.NodeProto) -> tuple[np.ndarray, np.ndarray]:
        zero = self._tensors[node.input[2]] if len(node.input) > 2 and node.input[2] else np.zeros((), np.uint8)
        scale = self._tensors[node.input[1]]
        assert isinstance(scale, np.ndarray) and isinstance(zero, np.ndarray)
        return scale, zero

    def _product(self, node: onnx.NodeProto) -> tuple[onnx.NodeProto, str] | None:
        """A product of numbers quantised with one scale, and the name of its bias, by the node that adds it."""
        product, bias = node, "".join(node.input[2:3])
        if node.op_type == "Add":
            for summed, added in (node.input, node.input[::-1]):
                found = self._source(summed, _MOVES)
                if found is not None and found.op_type in _PRODUCTS and not self._is_computed(added):
                    product, bias = found, added
        return (product, bias) if product.op_type in _PRODUCTS and self._is_computed(product.input[0]) else None

    def _require_scales(self, product: onnx.NodeProto, bias: str) -> None:
        """Require that a product with quantised weights is one of quantised numbers, and its bias one of s_x·s_w."""
        x, weight = product.input[:2]
        of_x, of_weight, of_bias = (self._dequantized(name, self._exact) for name in (x, weight, bias))
        transposed = any(a.name == "transB" and a.i for a in product.attribute)
        if of_weight is None:
            return
        if product.op_type in ("Gemm", "MatMul") and not transposed and self._made[x].op_type != "DequantizeLinear":
            raise UnsupportedError(
                "by default onnxruntime quantises what its quantised weights are multiplied with: quantise that in the "
                "file, or store the weights as float32"
            )
        if of_x is None or of_x[0].size != 1 or of_bias is None:
            return
        expected = of_x[0].astype(np.float64).reshape(()) * of_weight[0].astype(np.float64).ravel()
        fits = of_bias[0].size in (1, expected.size) and not of_bias[1].any()
        if not fits or (np.abs(of_bias[0].ravel() - expected) > SAME_SCALE * expected).any():
            raise UnsupportedError(
                f"by default onnxruntime takes the scale of its bias '{bias}' for s_x·s_w, the product of those of its "
                "operands: give the bias that scale"
            )

    def _is_loose(self, product: onnx.NodeProto, bias: str) -> bool:
        """Return True if a product of quantised numbers has stored weights or a bias that are not quantised."""
        of_x, *others = (self._dequantized(name, self._exact) for name in (*product.input[:2], bias) if name)
        return of_x is not None and of_x[0].size == 1 and None in others and not self._is_computed(product.input[1])

    def _require_kept(self, node: onnx.NodeProto) -> None:
        """Require that what is quantised is no product of float numbers, and not quantised already."""
        for through in (self._exact, self._exact | _FOLDED):
            source = self._source(node.input[0], through)
            if source is not None and (found := self._product(source)) is not None and self._is_loose(*found):
                raise UnsupportedError(
                    f"by default onnxruntime quantises more of '{node.input[0]}': quantise its weights and its bias in "
                    "the file, the bias as int32 of the scale s_x·s_w"
                )
        before, (scale, zero) = self._dequantized(node.input[0], _MOVES), self._step(node)
        if before is not None and not (
            np.array_equal(before[0], scale) and np.array_equal(before[1], zero) and before[1].dtype == zero.dtype
        ):
            raise UnsupportedError(
                "by default onnxruntime makes it one with the DequantizeLinear before, of another scale or zero point: "
                "quantise once"
            )
