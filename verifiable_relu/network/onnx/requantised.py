"""Uses of quantised numbers in whose place a session of onnxruntime with default options computes other numbers.

Between DequantizeLinear and QuantizeLinear, onnxruntime replaces operators by kernels of whole numbers. Most of these
compute what the file says, but for rounding (``running``). These do not:

- The bias of a Conv, ConvTranspose or Gemm, or what is added to a MatMul, becomes a whole number times s_x·s_w, the
  scales of its operands, whatever the file says; and so do weights that the file does not quantise.
- Of a product with quantised weights, an operand that is not quantised is quantised, too, in blocks.
- A QuantizeLinear of numbers that a DequantizeLinear of another scale has just made becomes one with it.

Files that have these are refused, whether or not a fusion takes place in the version at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.onnx.call import Value

_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})

_MOVES = frozenset({"Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that onnxruntime may take away between a DequantizeLinear and a QuantizeLinear."""

_SAME = 2.0**-23
"""The relative difference of a bias's scale from s_x·s_w, which may have been rounded to float32 by other means.

It is two of the roundings that are granted to the bias (``rounding.SPARE``)."""


@dataclass(frozen=True)
class _Step:
    """The DequantizeLinear from which the numbers of a tensor come.

    Attributes:
        scale, zero: its own.
        direct, moved: whether the tensor is its result, and whether it is that in another order or shape.
    """

    scale: np.ndarray
    zero: np.ndarray
    direct: bool = True
    moved: bool = True

    def is_like(self, other: _Step) -> bool:
        same = np.array_equal(self.scale, other.scale) and np.array_equal(self.zero, other.zero)
        return same and self.zero.dtype == other.zero.dtype


class Requantised:
    """What has been read of a file, node by node in order, so far as it tells what a default session changes.

    Args:
        tensors: what each name of the file stands for.
        exact: the operators whose results are numbers of their first input.
    """

    def __init__(self, tensors: Mapping[str, Any], exact: frozenset[str]) -> None:
        self._tensors, self._exact = tensors, exact
        self._steps: dict[str, _Step] = {}
        # By the name of a product's result: s_x, and s_w where the weights are quantised.
        self._products: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
        # Of results that are other numbers once they are quantised: what is to be done.
        self._loose: dict[str, str] = {}

    def take(self, node: onnx.NodeProto) -> None:
        """Take note of a node.

        Raises:
            UnsupportedError: if a default session computes another number in its place.
        """
        name, kind = node.output[0], node.op_type
        if kind == "DequantizeLinear":
            self._steps[name] = self._step(node)
        elif kind == "QuantizeLinear":
            self._quantised(node)
        elif kind in _PRODUCTS:
            self._product(node)
        elif kind == "Add":
            for product, bias in (node.input, node.input[::-1]):
                if product in self._products and not self._is_computed(bias):
                    self._biased(name, bias, self._products[product])
        elif kind in self._exact:
            for known in (self._steps, self._loose):
                if node.input[0] in known:
                    known[name] = known[node.input[0]]  # type: ignore[index]
            if name in self._steps:
                step = self._steps[name]
                self._steps[name] = _Step(step.scale, step.zero, False, step.moved and kind in _MOVES)

    def _is_computed(self, name: str) -> bool:
        return isinstance(self._tensors.get(name), Value)

    def _step(self, node: onnx.NodeProto) -> _Step:
        zero = self._tensors[node.input[2]] if len(node.input) > 2 and node.input[2] else np.zeros((), np.uint8)
        scale = self._tensors[node.input[1]]
        assert isinstance(scale, np.ndarray) and isinstance(zero, np.ndarray)
        return _Step(scale, zero)

    def _quantised(self, node: onnx.NodeProto) -> None:
        source = node.input[0]
        if source in self._loose:
            raise UnsupportedError(f"by default onnxruntime quantises more of '{source}': {self._loose[source]}")
        step = self._steps.get(source)
        if step is not None and step.moved and self._is_computed(source) and not step.is_like(self._step(node)):
            raise UnsupportedError(
                "by default onnxruntime makes it one with the DequantizeLinear before, of another scale or zero point: "
                "quantise once"
            )

    def _product(self, node: onnx.NodeProto) -> None:
        (x, weight, *bias), name, kind = node.input, node.output[0], node.op_type
        step, of_weight = self._steps.get(x), self._steps.get(weight)
        transposed = any(a.name == "transB" and a.i for a in node.attribute)
        dense = kind in ("MatMul", "Gemm") and not transposed and self._is_computed(x)
        if dense and of_weight and not (step and step.direct):
            raise UnsupportedError(
                "by default onnxruntime quantises what its quantised weights are multiplied with: quantise that in the "
                "file, or store the weights as float32"
            )
        if step is None or step.scale.size != 1 or not self._is_computed(x):
            return
        self._products[name] = step.scale, None if of_weight is None else of_weight.scale
        if of_weight is None and kind != "MatMul":
            self._loose[name] = "quantise its weights in the file"
        for given in filter(None, bias):
            self._biased(name, given, self._products[name])

    def _biased(self, name: str, bias: str, scales: tuple[np.ndarray, np.ndarray | None]) -> None:
        """Take note of a product with a bias."""
        step, (of_x, of_weight) = self._steps.get(bias), scales
        if of_weight is None or step is None:
            self._loose[name] = "quantise its weights and its bias in the file, the bias as int32 of the scale s_x·s_w"
            return
        expected = of_x.astype(np.float64).reshape(()) * of_weight.astype(np.float64)
        fits = step.scale.size in (1, expected.size) and not step.zero.any()
        if not fits or (np.abs(step.scale.ravel() - expected.ravel()) > _SAME * expected.ravel()).any():
            raise UnsupportedError(
                f"by default onnxruntime takes the scale of its bias '{bias}' for s_x·s_w, the product of those of its "
                "operands: give the bias that scale"
            )
