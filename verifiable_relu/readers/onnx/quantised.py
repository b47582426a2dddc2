"""Quantised operators: whole numbers of few bits, each standing for itself less a zero point, times a scale.

QuantizeLinear is the whole number next to x/s (halves go to the even one) plus the zero point, kept within its type's
range: a division, a function that jumps, and two ReLUs. What computes with such numbers does so exactly, by its
definition in the standard: a product of matrices is one of whole numbers, its result is rescaled, rounded and clipped.
The forms of com.microsoft compute with the numbers that theirs stand for, and quantise the result, which is how
onnxruntime defines them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.linear import Diagonal
from verifiable_relu.ir.network import Affine
from verifiable_relu.readers.builder import Value, tensor
from verifiable_relu.readers.derived import exact_product
from verifiable_relu.readers.onnx.call import Call, Result, converts
from verifiable_relu.readers.onnx.constants import RUNTIME, along, limits

_SINCE_21 = (21, 23, 24, 25, 28)


@converts("QuantizeLinear", 10, 13, 19, *_SINCE_21, group="steps")
@converts(f"{RUNTIME}.QuantizeLinear", 1, group="steps")
def _quantize(call: Call) -> Value:
    _refuse_narrow(call, "precision")
    kind = call.get("output_dtype", 0)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind)) if kind else np.dtype(np.uint8)
    return _quantised(call, call.value(), call.constant(1), call.optional(2), dtype, call.attributes)


@converts("DequantizeLinear", 10, 13, 19, *_SINCE_21)
@converts(f"{RUNTIME}.DequantizeLinear", 1)
def _dequantize(call: Call) -> Result:
    _refuse_narrow(call, "output_dtype")
    return _dequantised(call, call.value(), call.constant(1), call.optional(2), call.attributes)


def _refuse_narrow(call: Call, attribute: str) -> None:
    if call.get(attribute, 0) not in (0, onnx.TensorProto.FLOAT):
        raise UnsupportedError(f"its attribute {attribute} = {call.get(attribute, 0)}")


def _quantised(
    call: Call,
    x: Value,
    scale: np.ndarray,
    zero: np.ndarray | None,
    dtype: np.dtype | None = None,
    attributes: dict[str, Any] | None = None,
) -> Value:
    """Return the whole numbers that stand for x.

    Args:
        call: the node that is read.
        x: the numbers.
        scale, zero: a number, or one for each place of an axis, or for each block of one.
        dtype: of the result, where there is no zero point.
        attributes: those that say which axis and which blocks.
    """
    low, high = limits(zero.dtype if zero is not None else dtype or np.dtype(np.uint8))
    build, given = call.build, attributes or {}
    at = build.function(build.divided(x, _tensor(along(scale, x.shape, given))), "Round")
    moved = np.zeros((), np.int32) if zero is None else along(zero, x.shape, given).astype(np.int32)
    # Kept above low − zero and below high − zero, and moved by zero: high − relu(high − low − relu(· − low + zero)).
    above = build.relu(build.scale(at, center=_tensor(low - moved)))
    within = build.relu(build.scale(above, -1.0, shift=float(high - low)))
    return build.scale(within, -1.0, shift=float(high))


def _dequantised(
    call: Call, x: Result, scale: np.ndarray, zero: np.ndarray | None, attributes: dict[str, Any] | None = None
) -> Result:
    """Return the numbers for which whole ones stand; the arguments are those of ``_quantised``."""
    scale = along(scale, x.shape, attributes or {})
    zero = None if zero is None else along(zero, x.shape, attributes or {})
    if not isinstance(x, Value):
        return _product(np.asarray(_centred(call, x, zero)), scale)
    build, op = call.build, call.build.ops[x.op]
    factor, center = _tensor(scale), _tensor(np.zeros((), np.int32) if zero is None else zero)
    turned = isinstance(op, Affine) and isinstance(op.map, Diagonal) and bool((op.map.weight == -1).all())
    if turned and x.index is None and isinstance(op, Affine) and op.is_exact:
        # high − r less the zero point is −(r − (high − zero)).
        high = 0.0 if op.bias is None else op.bias.reshape(x.shape)
        center, factor = high - build.constant(center, x.shape).reshape(x.shape), -factor
        x = Value(op.inputs[0], x.shape)
    # A whole number less another is exact: of what runs, the product with the scale alone is rounded.
    return build.scale(build.scale(x, center=center), factor)


def _centred(call: Call, x: Result | None, zero: np.ndarray | None) -> Result:
    """Return whole numbers less their zero point, which broadcasts against them."""
    if x is None:
        raise UnsupportedError("an operand is missing")
    if isinstance(x, Value):
        return x if zero is None or not zero.any() else call.build.scale(x, center=_tensor(zero))
    limits(x.dtype)
    return x.astype(np.int32) - (0 if zero is None else zero.astype(np.int32))


def _tensor(numbers: np.ndarray) -> Tensor:
    return tensor(np.asarray(numbers if numbers.dtype.kind in "fiu" else numbers.astype(np.int32)))


def _product(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the product of scales, or of whole numbers and a scale, which float64 must hold exactly."""
    whole = first.astype(np.int32) if first.dtype.kind in "iu" else first
    if whole.dtype.kind == "i" and np.abs(whole).max(initial=0) < 1 << 24:
        whole = whole.astype(np.float32)
    found = exact_product(whole, second)
    if found is None:
        raise UnsupportedError("a product of scales that is rounded")
    return found


def _result(call: Call, whole: Value, scale: np.ndarray, start: int) -> Value:
    """Return whole numbers times a scale, quantised by the scale and the zero point from input ``start`` on, if any."""
    numbers = call.build.scale(whole, _tensor(scale))
    if len(call.inputs) <= start or call.inputs[start] is None:
        return numbers
    return _quantised(call, numbers, call.constant(start), call.optional(start + 1))


def _columns(numbers: np.ndarray | None) -> np.ndarray:
    """Return numbers for the columns of a matrix: one for all without axes, and zero where there are none."""
    found = np.zeros((), np.int32) if numbers is None else numbers
    return found.reshape(()) if found.size == 1 else found


def _rows(numbers: np.ndarray | None) -> np.ndarray:
    found = _columns(numbers)
    return found[:, None] if found.ndim == 1 else found


@converts("MatMulInteger", 10)
def _matmul_integer(call: Call) -> Value:
    left = _centred(call, call.inputs[0], _rows(call.optional(2)))
    right = _centred(call, call.inputs[1], _columns(call.optional(3)))
    return call.as_operator("MatMul", 13, (left, right))


@converts("QLinearMatMul", 10, 21, group="steps")
def _qlinear_matmul(call: Call) -> Value:
    left = _centred(call, call.inputs[0], _rows(call.constant(2)))
    right = _centred(call, call.inputs[3], _columns(call.constant(5)))
    scale = _product(_rows(call.constant(1)), _columns(call.constant(4)))
    return _result(call, call.as_operator("MatMul", 13, (left, right)), scale, 6)


@converts(f"{RUNTIME}.QGemm", 1, group="steps")
def _qgemm(call: Call) -> Value:
    # A row of the right matrix as it is stored is a column of the product only if it is transposed.
    rows, alpha = bool(call.get("transB", 0)), call.get("alpha", 1.0)
    zeros, scales = call.optional(5), call.constant(4)
    if call.constant(1).size != 1 or (zeros is not None and zeros.size != scales.size):
        raise UnsupportedError("several scales of its left operand, or other zero points than scales of its right one")
    left = _centred(call, call.inputs[0], call.optional(2))
    right = _centred(call, call.inputs[3], _rows(zeros) if rows else _columns(zeros))
    attributes = {**call.attributes, "alpha": 1.0, "beta": 1.0}
    whole = call.as_operator("Gemm", 13, (left, right, call.optional(6)), attributes)
    if alpha != 1:
        whole = call.build.scale(whole, alpha)
    return _result(call, whole, _product(call.constant(1).reshape(()), _columns(scales)), 7)


def _convolved(call: Call, kernel: int, zeros: tuple[int, int], bias: int) -> Value:
    """Return a convolution of whole numbers; the arguments are positions of inputs."""
    zero, off = (_columns(call.optional(position)) for position in zeros)
    weight = call.constant(kernel)
    centre = _centred(call, weight, off.reshape(-1, *(1,) * (weight.ndim - 1)))
    return call.as_operator("Conv", 11, (_centred(call, call.value(), zero), centre, call.optional(bias)))


@converts("ConvInteger", 10)
def _conv_integer(call: Call) -> Value:
    return _convolved(call, 1, (2, 3), 4)


@converts("QLinearConv", 10, group="steps")
def _qlinear_conv(call: Call) -> Value:
    whole = _convolved(call, 3, (2, 5), 8)
    scale = _product(call.constant(1).reshape(()), call.constant(4))
    return _result(call, whole, scale.reshape(-1, *(1,) * (len(whole.shape) - 2)), 6)


def _requantised(call: Call, operator: str, version: int, first: int, last: int | None, start: int) -> Value:
    """Read an operator of the standard on the numbers for which whole ones stand, and quantise its result.

    Its operands are triples of numbers, scale and zero point from input ``first`` to ``last``; the result's scale and
    zero point are the inputs from ``start`` on.
    """
    call.refuse(channels_last=0)
    inputs, operands = [], call.inputs[first:last]
    for x, scale, zero in zip(operands[0::3], operands[1::3], (*operands[2::3], None), strict=False):
        if x is None or not isinstance(scale, np.ndarray) or isinstance(zero, Value):
            raise UnsupportedError("a scale or a zero point that is not a constant")
        inputs.append(_dequantised(call, x, scale, zero))
    found = call.as_operator(operator, version, inputs)
    return _quantised(call, found, call.constant(start), call.optional(start + 1))


for _name, _version, _places, _group in (
    ("Add", 14, (0, 6, 6), "steps"),
    ("Mul", 14, (0, 6, 6), "products"),
    ("Sigmoid", 13, (0, 3, 3), "smooth"),
    ("LeakyRelu", 16, (0, 3, 3), "steps"),
    ("AveragePool", 11, (0, 3, 3), "steps"),
    ("GlobalAveragePool", 1, (0, 3, 3), "steps"),
    ("Concat", 13, (2, None, 0), "steps"),
):
    _first, _last, _start = _places
    converts(f"{RUNTIME}.QLinear{_name}", 1, group=_group)(
        functools.partial(_requantised, operator=_name, version=_version, first=_first, last=_last, start=_start)
    )
