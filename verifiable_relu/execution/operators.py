"""Operators of an ONNX file as their rounding depends on them, noted while the file is read node by node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
import onnx

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.execution.requantised import Requantised
from verifiable_relu.execution.rounded import Operator
from verifiable_relu.readers.builder import Value
from verifiable_relu.readers.derived import Derived
from verifiable_relu.readers.onnx.read import Reading
from verifiable_relu.rounding import SPARE

SUMS = frozenset({
    "Add", "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "Div", "Erf", "Exp", "Gelu", "Gemm",
    "GlobalAveragePool", "HardSigmoid", "LeakyRelu", "MatMul", "Mean", "Mul", "PRelu", "ReduceMean", "ReduceSum",
    "Sigmoid", "Softmax", "Sub", "Sum", "Tanh",
})  # fmt: skip
"""Operators whose result is rounded."""

EXACT = frozenset({
    "Abs", "Clip", "Concat", "ConvInteger", "DepthToSpace", "Dropout", "Expand", "Flatten", "Gather", "GlobalMaxPool",
    "Identity", "MatMulInteger", "Max", "MaxPool", "Min", "Neg", "Pad", "ReduceMax", "ReduceMin", "Relu", "Reshape",
    "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators whose result is made of numbers of their inputs, of negatives of these, and of constants."""

ADDING = frozenset({"Add", "Sub", "Sum", "Mean"})
"""Operators that a runtime may fuse with the quantising of their operands and of their result."""

DERIVED = frozenset({"BatchNormalization", "Div", "HardSigmoid", "LeakyRelu"})
"""Operators that compute with other numbers than those that the file stores."""

CONSTANTS = frozenset({"Constant", "ConstantOfShape", "Shape", "Size"})
"""Operators that compute nothing."""


def quantises(kind: str) -> bool:
    """Return True if an operator multiplies or divides by scales, beyond what it does with whole numbers."""
    return kind in ("DequantizeLinear", "QGemm", "QuantizeLinear") or kind.startswith("QLinear")


class OperatorLog:
    """The operators of a file: an observer of its reading, which refuses a node whose rounding is not modelled.

    Attributes:
        operators: by the number of each op that was made for one.
    """

    def __init__(self) -> None:
        self.operators: dict[int, Operator] = {}
        self._requantised: Requantised | None = None
        # The names of constants that are rounded, since the file stores them as whole numbers.
        self._rounded: set[str] = set()
        # By name of a tensor that sums numbers of whole ones, Σ 2·N_i·s_i of these (``rounding.tie``).
        self._spans: dict[str, Fraction] = {}

    def __call__(self, reading: Reading, node: onnx.NodeProto, first: int) -> None:
        """Note a node of which the ops from number ``first`` on were made.

        Raises:
            UnsupportedError: if its rounding is not modelled.
        """
        found = [reading.tensors[name] for name in node.output if name in reading.tensors]
        if node.op_type in CONSTANTS:
            return
        if self._requantised is None:
            self._requantised = Requantised(reading.tensors, EXACT)
        place = f"node '{reading.build.name}' ({node.op_type})"
        try:
            self._requantised.take(node)
            self._note(reading, node, first, found)
        except UnsupportedError as error:
            raise UnsupportedError(error.message, place=place) from None

    def _note(self, reading: Reading, node: onnx.NodeProto, first: int, found: Sequence[object]) -> None:
        kind, computed = node.op_type, any(isinstance(f, Value) for f in found)
        if kind == "Cast":
            to = {attribute.i for attribute in node.attribute if attribute.name == "to"}
            if computed and (to != {onnx.TensorProto.FLOAT} or node.input[0] in reading.counted):
                raise UnsupportedError("rounding to another type is not modelled")
            return
        stored = kind == "DequantizeLinear" and not computed
        if given := self._rounded.intersection(node.input):
            # They are operands that the file has in more digits than float32 (``rounding.SPARE``), where they multiply.
            stored = stored or (kind in EXACT and not computed)
            if not stored and not (kind in SUMS and computed):
                raise UnsupportedError(f"the rounding of '{min(given)}' is not modelled here")
        numbers, span = self._spanned(reading, node)
        if stored:
            self._rounded.update(node.output)
            return
        rounds = kind in SUMS or quantises(kind)
        floats = any(isinstance(f, Derived) or (isinstance(f, np.ndarray) and f.dtype.kind == "f") for f in found)
        if not (rounds or kind in EXACT) or (floats and rounds):
            raise UnsupportedError(f"the rounding of this operator {'of constants ' * floats}is not modelled")
        if kind in ("Sum", "Mean") and len(node.input) > SPARE // 2:
            raise UnsupportedError(f"more than {SPARE // 2} inputs, whose rounding is not modelled")
        factors = {a.f for a in node.attribute if kind == "Gemm" and a.name in ("alpha", "beta")}
        computes_stored = kind in DERIVED or bool(factors - {1.0}) or quantises(kind)
        operator = Operator(kind, reading.build.name, rounds, quantises(kind), numbers, span, computes_stored)
        self.operators.update((index, operator) for index in range(first, len(reading.build.ops)))

    def _spanned(self, reading: Reading, node: onnx.NodeProto) -> tuple[int, Fraction]:
        """Note how large the terms of sums of quantised numbers may be.

        Returns:
            How many numbers the type of a quantising operator's result has, and the span of what it quantises.
        """
        kind, output = node.op_type, node.output[0]
        before = sum((self._spans.get(name, Fraction(0)) for name in node.input), Fraction(0))

        def span(numbers: str, scale: str, *zero: str) -> Fraction:
            scales = reading.tensors[scale]
            assert isinstance(scales, np.ndarray)
            return 2 * _numbers(reading, (numbers, *zero)) * Fraction(float(np.abs(scales).max()))

        if kind == "DequantizeLinear":
            self._spans[output] = span(*node.input[:3])
        elif kind == "QLinearAdd":
            return _numbers(reading, node.input), span(*node.input[:3]) + span(*node.input[3:6])
        elif quantises(kind):
            # All others multiply, or move numbers.
            summed = before if kind == "QuantizeLinear" else Fraction(0)
            return _numbers(reading, (*node.input, output)), summed
        elif kind in ADDING or kind in EXACT:
            self._spans[output] = before
        return 0, Fraction(0)


def _numbers(reading: Reading, names: Iterable[str]) -> int:
    """Return how many numbers the largest type of quantised ones has that is among those of some tensors."""
    found = []
    for name in filter(None, names):
        tensor, kind = reading.tensors.get(name), reading.types.get(name, 0)
        dtype = tensor.dtype if isinstance(tensor, np.ndarray) else None
        if dtype is None and kind:
            dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))
        bits = str(dtype).rpartition("int")[2]
        if bits.isdigit() and int(bits) <= 16:
            found.append(2 ** int(bits))
    return max(found, default=2**16)
