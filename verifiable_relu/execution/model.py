"""The network that a query is about: as its file means it, or as a runtime computes it.

Operators of the file are noted as their rounding depends on them, while the file is read node by node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import torch

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.execution.rounded import Operator, with_rounding
from verifiable_relu.ir.enclosure import sample_points
from verifiable_relu.ir.families import harden
from verifiable_relu.ir.network import Network, live
from verifiable_relu.readers.builder import Value
from verifiable_relu.readers.derived import Derived
from verifiable_relu.readers.onnx.compare import compare_at
from verifiable_relu.readers.onnx.model import load_model
from verifiable_relu.readers.onnx.read import Reading
from verifiable_relu.readers.onnx.write import write_onnx
from verifiable_relu.readers.simplify import finished
from verifiable_relu.rounding import ARITHMETICS, SAME_SCALE, SPARE
from verifiable_relu.settings import default_settings

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


_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})

_MOVES = frozenset({
    "Cast", "Dropout", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators that onnxruntime may take away between two others."""

_COPIES = EXACT | _MOVES

_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}
"""The constants with which it takes away these."""

_FOLDED = frozenset({"BatchNormalization", *_NEUTRAL})
"""Operators that it may make a part of float weights and their bias, where the other operand is stored."""


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
        self._requantised = Requantised()
        # The names of constants that are rounded, since the file stores them as whole numbers.
        self._rounded: set[str] = set()
        # By name of a tensor that sums numbers of whole ones, Σ 2·N_i·s_i of these (``rounding.tie``).
        self._spans: dict[str, Fraction] = {}

    def __call__(self, reading: Reading, node: onnx.NodeProto, first: int) -> None:
        """Note a node that was read as the ops from number ``first`` on.

        Raises:
            UnsupportedError: if its rounding is not modelled.
        """
        if node.op_type in CONSTANTS:
            return
        place = f"node '{reading.build.name}' ({node.op_type})"
        try:
            self._requantised.take(node, reading.tensors)
            operator = self._operator(reading, node, place)
        except UnsupportedError as error:
            raise UnsupportedError(error.message, place=place) from None
        if operator is not None:
            self.operators |= dict.fromkeys(range(first, len(reading.build.ops)), operator)

    def _operator(self, reading: Reading, node: onnx.NodeProto, place: str) -> Operator | None:
        """Return the operator that a node is; None for a conversion and for what is stored as whole numbers."""
        found = [reading.tensors[name] for name in node.output if name in reading.tensors]
        kind, computed = node.op_type, any(isinstance(f, Value) for f in found)
        if kind == "Cast":
            to = {attribute.i for attribute in node.attribute if attribute.name == "to"}
            if computed and (to != {onnx.TensorProto.FLOAT} or node.input[0] in reading.counted):
                raise UnsupportedError("rounding to another type is not modelled")
            return None
        stored = kind == "DequantizeLinear" and not computed
        if given := self._rounded.intersection(node.input):
            # They are operands that the file has in more digits than float32 (``rounding.SPARE``), where they multiply.
            stored = stored or (kind in EXACT and not computed)
            if not stored and not (kind in SUMS and computed):
                raise UnsupportedError(f"the rounding of '{min(given)}' is not modelled here")
        numbers, span = self._spanned(reading, node)
        if stored:
            self._rounded.update(node.output)
            return None
        scales = quantises(kind)
        rounds = kind in SUMS or scales
        floats = any(isinstance(f, Derived) or (isinstance(f, np.ndarray) and f.dtype.kind == "f") for f in found)
        if not (rounds or kind in EXACT) or (floats and rounds):
            raise UnsupportedError(f"the rounding of this operator {'of constants ' * floats}is not modelled")
        if kind in ("Sum", "Mean") and len(node.input) > SPARE // 2:
            raise UnsupportedError(f"more than {SPARE // 2} inputs, whose rounding is not modelled")
        factors = {a.f for a in node.attribute if kind == "Gemm" and a.name in ("alpha", "beta")}
        computes_stored = kind in DERIVED or bool(factors - {1.0}) or scales
        return Operator(kind, place, rounds, scales, numbers, span, computes_stored)

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
            return _numbers(reading, (*node.input, output)), before if kind == "QuantizeLinear" else Fraction(0)
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


class Requantised:
    """Uses of quantised numbers in whose place a session of onnxruntime with default options computes other numbers.

    Between DequantizeLinear and QuantizeLinear, onnxruntime replaces operators by kernels of whole numbers. Most of
    these compute what the file says, but for rounding (``execution.rounded``). These do not:

    - The bias of a Conv, ConvTranspose or Gemm, or what is added to a MatMul, becomes a whole number times s_x·s_w, the
      scales of its operands, whatever the file says; and so do weights that the file does not quantise.
    - Of a product with quantised weights, an operand that is not quantised is quantised, too, in blocks.
    - A QuantizeLinear of numbers that a DequantizeLinear of another scale has just made becomes one with it.

    Files that have these are refused, whether or not a fusion takes place in the version at hand.
    """

    def __init__(self) -> None:
        # The nodes that have been read, so that one can be traced back.
        self._tensors: Mapping[str, Any] = {}
        self._made: dict[str, onnx.NodeProto] = {}

    def take(self, node: onnx.NodeProto, tensors: Mapping[str, Any]) -> None:
        """Take note of a node, given what the names of the file stand for so far.

        Raises:
            UnsupportedError: if a default session computes another number in its place.
        """
        self._tensors = tensors
        self._made |= dict.fromkeys(filter(None, node.output), node)
        if node.op_type == "QuantizeLinear" and self._is_computed(node.input[0]):
            self._require_kept(node)
        elif (found := self._product(node)) is not None:
            self._require_scales(*found)

    def _is_computed(self, name: str) -> bool:
        return isinstance(self._tensors.get(name), Value)

    def _source(self, name: str, through: Set[str]) -> onnx.NodeProto | None:
        """Return the node from which a tensor comes through some operators, and through those that change nothing."""
        node = self._made.get(name)
        if node is None or node.op_type not in through | _NEUTRAL.keys():
            return node
        if node.op_type not in _NEUTRAL:
            return self._source(node.input[0], through)
        for other, stored in (node.input, node.input[::-1]):
            number = self._tensors.get(stored)
            is_neutral = isinstance(number, np.ndarray) and (number == _NEUTRAL[node.op_type]).all()
            if is_neutral or (node.op_type in through and not self._is_computed(stored)):
                return self._source(other, through)
        return node

    def _scale(self, name: str, through: Set[str]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return scale and zero point of the DequantizeLinear from which a tensor comes, if it is one."""
        node = self._source(name, through)
        return self._scale_of(node) if node is not None and node.op_type == "DequantizeLinear" else None

    def _scale_of(self, node: onnx.NodeProto) -> tuple[np.ndarray, np.ndarray]:
        zero = self._tensors[node.input[2]] if len(node.input) > 2 and node.input[2] else np.zeros((), np.uint8)
        return self._tensors[node.input[1]], zero

    def _product(self, node: onnx.NodeProto) -> tuple[onnx.NodeProto, str] | None:
        """Return a product of numbers quantised with one scale, and the name of its bias, by the node that adds it."""
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
        of_x, of_weight, of_bias = (self._scale(name, _COPIES) for name in (x, weight, bias))
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

    def _require_kept(self, node: onnx.NodeProto) -> None:
        """Require that what is quantised is no product of float numbers, and not quantised already."""
        for through in (_COPIES, _COPIES | _FOLDED):
            source = self._source(node.input[0], through)
            if source is None or (found := self._product(source)) is None or self._is_computed(found[0].input[1]):
                continue
            of_x, *others = (self._scale(name, _COPIES) for name in (*found[0].input[:2], found[1]) if name)
            if of_x is not None and of_x[0].size == 1 and None in others:
                raise UnsupportedError(
                    f"by default onnxruntime quantises more of '{node.input[0]}': quantise its weights and its bias in "
                    "the file, the bias as int32 of the scale s_x·s_w"
                )
        before, (scale, zero) = self._scale(node.input[0], _MOVES), self._scale_of(node)
        if before is not None and not (
            np.array_equal(before[0], scale) and np.array_equal(before[1], zero) and before[1].dtype == zero.dtype
        ):
            raise UnsupportedError(
                "by default onnxruntime makes it one with the DequantizeLinear before, of another scale or zero point: "
                "quantise once"
            )


@default_settings()
def as_executed(network: Network, arithmetic: str) -> Network:
    """Return a network as its ONNX file is computed in an arithmetic.

    Args:
        network: read from an ONNX file, or one that can be written as such a file, which is then what is meant.
        arithmetic: ``real``, which leaves the network as it is, or one of ``rounding.ARITHMETICS``.

    Raises:
        InputError: for another name, or if onnxruntime computes something else than the operators of a quantised file.
        UnsupportedError: if the file has an operator, or a use of one, whose rounding is not modelled; names the node.
    """
    if arithmetic == "real":
        return network
    if arithmetic not in ARITHMETICS:
        raise InputError(f"unknown arithmetic '{arithmetic}'; there are real, {', '.join(ARITHMETICS)}")
    data = write_onnx(network)
    model, _, _ = load_model(data, None, Reading)
    log = OperatorLog()
    reading = Reading(model, log)
    if any(tensor.type.tensor_type.elem_type != onnx.TensorProto.FLOAT for tensor in model.graph.input):
        raise UnsupportedError(f"the input of the network '{network.name}' is not declared as float32")
    try:
        ops, output = with_rounding(*finished(reading.build, reading.output), log.operators, ARITHMETICS[arithmetic])
    except OverflowError as error:
        raise UnsupportedError(f"the network '{network.name}': {error}") from None
    source = replace(network.source, onnx=data, run=None, batched=reading.batched)
    found = replace(network, ops=live(ops, output)[0], arithmetic=arithmetic, source=source)
    if any(operator.quantises for operator in log.operators.values()):
        compare_at(found, sample_points((found.input_size,), torch.float64).numpy())
    return found


def execution_model(
    network: Network, arithmetic: str = "real", family: float | Sequence[float] | bool | None = None
) -> Network:
    """Return the network as it runs (``as_executed``), and with ``family`` the family of networks around it.

    Every op has the error of its rounding, and every function is any of its family: what bounds prove of the result
    holds for each λ'-GELU network with λ' ≥ λ, for the ReLU network, in real numbers, and for every evaluation of its
    file. (An error of zero is within each error, and ReLU rounds nothing.)

    Args:
        network, arithmetic: as there.
        family: λ, as ``harden`` takes it; True for that of the network's own λ-GELUs, None or False for none.

    Raises:
        InputError: as ``as_executed`` and ``harden`` do; and for a family in an arithmetic that rounds weights.
    """
    found = as_executed(network, arithmetic)
    if family is None or family is False:
        return found
    # Members in real arithmetic have the stored weights, and bounds are those of rounded ones.
    if arithmetic != "real" and ARITHMETICS[arithmetic].result:
        raise InputError(f"there are no families in {arithmetic}, which rounds weights: use real or float32")
    lam = None if family is True else family
    members = harden(network, lam)
    return members if found is network else harden(found, lam)
