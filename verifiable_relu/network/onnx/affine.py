"""Affine operators: products with constants, sums, convolutions, averages, normalisations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.onnx.call import Call, Value, converts, tensor
from verifiable_relu.network.transient import Product

_UNIT = 2.0**-53


@converts("Gemm", 7, 9, 11, 13)
def _gemm(call: Call) -> Value:
    call.refuse(transA=0)
    x = call.value()
    weight = tensor(call.constant(1) if call.get("transB", 0) else call.constant(1).T)
    bias = None if (c := call.optional(2)) is None else tensor(c)
    if (alpha := call.get("alpha", 1.0)) != 1.0:
        weight = _exact_product(weight, alpha)
    if bias is not None and (beta := call.get("beta", 1.0)) != 1.0:
        bias = _exact_product(bias, beta)
    return Value(call.build.linear(x.index, weight, bias, call.name), x.leading)


def _exact_product(weight: Tensor, factor: float) -> Tensor:
    """weight·factor in float64, where the product of two float32 numbers is exact.

    Raises:
        UnsupportedError: if the weight is in float64.
    """
    if weight.dtype == torch.float64:
        raise UnsupportedError("scales weights in float64, which would round them")
    return weight.double() * factor


@converts("MatMul", 1, 9, 13)
def _matmul(call: Call) -> Value:
    if isinstance(call.inputs[0], Value):
        x, weight = call.value(0), call.constant(1)
        if weight.ndim > max(2, len(call.shape(x))):
            raise UnsupportedError(f"a weight of shape {weight.shape} enlarges a value of shape {call.shape(x)}")
        while weight.ndim > 2 and weight.shape[0] == 1:
            weight = weight[0]
        if weight.ndim != 2:
            raise UnsupportedError(f"a weight of shape {call.constant(1).shape}")
        return Value(call.build.linear(x.index, tensor(weight.T), None, call.name), x.leading)
    weight, x = call.constant(0), call.value(1)
    shape = call.build.shape(x.index)
    if weight.ndim != 2:
        raise UnsupportedError(f"a weight of shape {weight.shape}")
    if len(shape) == 1 and not x.leading:
        return Value(call.build.linear(x.index, tensor(weight), None, call.name), False)
    if len(shape) < 2:
        raise UnsupportedError("multiplies the batch axis")
    swap = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    columns = call.build.permute(x.index, swap, call.name)
    product = call.build.linear(columns, tensor(weight), None, call.name)
    found = Value(call.build.permute(product, swap, call.name), x.leading)
    return call.reshaped(found, call.shape(found))


@converts("Conv", 1, 11, 22)
def _conv(call: Call) -> Value:
    x, weight = call.value(), call.constant(1)
    if weight.ndim != 4:
        raise UnsupportedError(f"a kernel of shape {weight.shape}: only two-dimensional convolutions are supported")
    if not x.leading:
        raise UnsupportedError("an input without a batch axis")
    kernel = weight.shape[2:]
    if tuple(call.get("kernel_shape", kernel)) != kernel:
        raise InputError(f"its attribute kernel_shape = {call.get('kernel_shape', None)}, but its kernel is {kernel}")
    dilation = _pair(call, "dilations")
    stride, padding = _window(call, x, kernel, dilation)
    bias = None if (b := call.optional(2)) is None else tensor(b)
    index = call.build.conv2d(
        x.index,
        tensor(weight),
        bias,
        call.name,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=call.get("group", 1),
    )
    return Value(index, True)


def _pair(call: Call, attribute: str) -> tuple[int, int]:
    """An attribute of two positive integers, 1 and 1 by default.

    Raises:
        InputError: if it is anything else.
    """
    sizes = tuple(int(size) for size in call.get(attribute, (1, 1)))
    if len(sizes) != 2 or min(sizes) < 1:
        raise InputError(f"its attribute {attribute} = {list(sizes)}")
    return sizes[0], sizes[1]


def _window(
    call: Call, x: Value, kernel: Sequence[int], dilation: Sequence[int] = (1, 1)
) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """Strides and pads (top, left, bottom, right) of a node with a sliding window.

    Raises:
        InputError: if they are malformed, or pads stand beside an ``auto_pad`` that makes them.
        UnsupportedError: for an unknown ``auto_pad``.
    """
    stride = _pair(call, "strides")
    pads = tuple(int(size) for size in call.get("pads", (0, 0, 0, 0)))
    if len(pads) != 4 or min(pads) < 0:
        raise InputError(f"its attribute pads = {list(pads)}")
    mode = call.get("auto_pad", b"NOTSET")
    if mode == b"NOTSET":
        return stride, (pads[0], pads[1], pads[2], pads[3])
    if any(pads):
        raise InputError(f"its attribute pads = {list(pads)} beside auto_pad = {mode!r}")
    if mode == b"VALID":
        return stride, (0, 0, 0, 0)
    if mode not in (b"SAME_UPPER", b"SAME_LOWER"):
        raise UnsupportedError(f"its attribute auto_pad = {mode!r}")
    before, after = [], []
    for length, size, s, d in zip(call.build.shape(x.index)[1:], kernel, stride, dilation, strict=True):
        total = max(0, (-(-length // s) - 1) * s + d * (size - 1) + 1 - length)
        less, more = total // 2, total - total // 2
        before.append(less if mode == b"SAME_UPPER" else more)
        after.append(more if mode == b"SAME_UPPER" else less)
    return stride, (before[0], before[1], after[0], after[1])


@converts("AveragePool", 7, 10, 11, 19, 22)
def _average_pool(call: Call) -> Value:
    x = call.value()
    call.refuse(ceil_mode=0, dilations=[1, 1])
    shape = call.build.shape(x.index)
    if len(shape) != 3 or not x.leading:
        raise UnsupportedError("only two-dimensional pooling is supported")
    kernel = _pair(call, "kernel_shape")
    stride, padding = _window(call, x, kernel)
    if any(padding) and not call.get("count_include_pad", 0):
        raise UnsupportedError("pads that are left out of the mean (count_include_pad = 0)")
    if kernel[0] > shape[1] + padding[0] + padding[2] or kernel[1] > shape[2] + padding[1] + padding[3]:
        raise InputError(f"a window of {kernel} is larger than the padded inputs {shape}")
    return Value(call.build.average_pool(x.index, kernel, stride, padding, call.name), True)


@converts("GlobalAveragePool", 1, 22)
def _global_average_pool(call: Call) -> Value:
    x = call.value()
    shape = call.build.shape(x.index)
    if len(shape) != 3 or not x.leading:
        raise UnsupportedError("only two-dimensional pooling is supported")
    return Value(call.build.average_pool(x.index, (shape[1], shape[2]), (1, 1), (0, 0, 0, 0), call.name), True)


@converts("BatchNormalization", 7, 9, 14, 15)
def _batch_normalization(call: Call) -> Value:
    call.refuse(training_mode=0, spatial=1)
    x = call.value()
    if not x.leading:
        raise UnsupportedError("an input without a batch axis")
    gamma, beta, mean, variance = (tensor(call.constant(i)) for i in (1, 2, 3, 4))
    # An attribute is a float32 number, its default too.
    spread = variance.double() + call.get("epsilon", float(np.float32(1e-5)))
    if not bool((spread > 0).all()):
        raise InputError("its variance plus epsilon is not positive")
    channels = (-1, *(1,) * (len(call.build.shape(x.index)) - 1))
    # The sum, the root and the quotient each round once: half of 2⁻⁵³ passes the root, two more follow.
    scale = _normal(gamma.double() / spread.sqrt()).reshape(channels)
    center, shift = mean.reshape(channels), beta.reshape(channels)
    index = call.build.scale(x.index, call.name, center=center, scale=scale, shift=shift, error=3 * _UNIT)
    return Value(index, True)


def _normal(quotient: Tensor) -> Tensor:
    """A quotient in float64 whose relative rounding error is at most 2⁻⁵³.

    Raises:
        UnsupportedError: if one of its numbers is so small that its error may be larger.
    """
    if bool(((quotient != 0) & (quotient.abs() < torch.finfo(torch.float64).tiny)).any()):
        raise UnsupportedError("a factor below the range of float64")
    return quotient


def _with_constant(call: Call) -> tuple[Value, np.ndarray, bool]:
    """The operands of a binary operator of which one is constant, and whether the constant comes first."""
    left, right = call.inputs
    if isinstance(left, Value) and isinstance(right, np.ndarray):
        return left, right, False
    if isinstance(right, Value) and isinstance(left, np.ndarray):
        return right, left, True
    raise UnsupportedError("an operand is missing")


def _both_computed(call: Call) -> tuple[Value, Value] | None:
    """The operands of a binary operator if none is constant.

    Raises:
        UnsupportedError: if their shapes differ.
    """
    x, y = call.inputs
    if not (isinstance(x, Value) and isinstance(y, Value)):
        return None
    if call.shape(x) != call.shape(y):
        raise UnsupportedError(f"broadcasts computed values of shapes {call.shape(x)} and {call.shape(y)}")
    return x, y


@converts("Add", 7, 13, 14)
def _add(call: Call) -> Value:
    if pair := _both_computed(call):
        x, y = pair
        return Value(call.build.add(x.index, y.index, call.name), x.leading)
    x, constant, _ = _with_constant(call)
    return Value(call.build.scale(x.index, call.name, shift=call.beside(constant, x)), x.leading)


@converts("Sub", 7, 13, 14)
def _sub(call: Call) -> Value:
    if pair := _both_computed(call):
        x, y = pair
        negative = call.build.scale(y.index, call.name, scale=torch.tensor(-1.0))
        return Value(call.build.add(x.index, negative, call.name), x.leading)
    x, constant, first = _with_constant(call)
    number = call.beside(constant, x)
    if first:
        minus = -torch.ones_like(number)
        return Value(call.build.scale(x.index, call.name, scale=minus, shift=number), x.leading)
    return Value(call.build.scale(x.index, call.name, center=number), x.leading)


@converts("Neg", 6, 13)
def _neg(call: Call) -> Value:
    x = call.value()
    return Value(call.build.scale(x.index, call.name, scale=torch.tensor(-1.0)), x.leading)


@converts("Mul", 7, 13, 14)
def _mul(call: Call) -> Value:
    if pair := _both_computed(call):
        x, y = pair
        shape = call.build.shape(x.index)
        return Value(call.build.append(Product(name=call.name, inputs=(x.index, y.index), shape=shape)), x.leading)
    x, constant, _ = _with_constant(call)
    return Value(call.build.scale(x.index, call.name, scale=call.beside(constant, x)), x.leading)


@converts("Div", 7, 13, 14)
def _div(call: Call) -> Value:
    if _both_computed(call):
        raise UnsupportedError("divides by a computed value")
    x, constant, first = _with_constant(call)
    if first:
        raise UnsupportedError("divides by a computed value")
    divisor = call.beside(constant, x).double()
    if not bool(divisor.all()):
        raise InputError("divides by zero")
    exact = bool((torch.frexp(divisor).mantissa.abs() == 0.5).all())
    factor = _normal(1 / divisor)
    return Value(call.build.scale(x.index, call.name, scale=factor, error=0.0 if exact else _UNIT), x.leading)
