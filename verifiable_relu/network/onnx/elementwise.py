"""Element-wise affine operators: sums, products with constants, batch normalisation."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.derived import deviations
from verifiable_relu.network.nodes import curve
from verifiable_relu.network.onnx.call import Call, Result, Value, converts, tensor
from verifiable_relu.network.onnx.moves import expanded


@converts("BatchNormalization", 7, 9, 14, 15)
def _batch_normalization(call: Call) -> Value:
    call.refuse(training_mode=0, spatial=1)
    x = call.value()
    gamma, beta, mean, variance = (tensor(call.constant(i)) for i in (1, 2, 3, 4))
    # An attribute is a float32 number, its default too.
    scale, error = deviations(gamma, variance, call.get("epsilon", float(np.float32(1e-5))))
    channels = (-1, *(1,) * (len(call.shape(x)) - 2))
    index = call.build.scale(
        x.index,
        call.name,
        center=mean.reshape(channels),
        scale=scale.reshape(channels),
        shift=beta.reshape(channels),
        error=error,
    )
    return Value(index, x.leading)


Operands = tuple[Value | Tensor, Value | Tensor]


def _operands(call: Call) -> Operands:
    """The operands of a binary operator (``broadcast``)."""
    return broadcast(call, call.inputs[0], call.inputs[1])


def broadcast(call: Call, left: Result | None, right: Result | None) -> Operands:
    """Two operands, of which one is computed at least, in one shape; a constant may be smaller where it broadcasts.

    Raises:
        InputError: if their shapes do not fit.
    """
    if left is None or right is None:
        raise UnsupportedError("an operand is missing")
    try:
        shape = np.broadcast_shapes(call.shape(left), call.shape(right))
    except ValueError:
        raise InputError(f"broadcasts {call.shape(left)} against {call.shape(right)}") from None
    x, y = (expanded(call, given, shape) if isinstance(given, Value) else given for given in (left, right))
    if isinstance(x, Value):
        return x, (y if isinstance(y, Value) else call.beside(y, x))
    assert isinstance(y, Value)
    return call.beside(x, y), y


def added(call: Call, left: Result | None, right: Result | None, *, error: float = 0.0) -> Value:
    """The sum of two operands of which one is computed at least; ``error``: relative, of a constant."""
    x, y = broadcast(call, left, right)
    if isinstance(x, Value) and isinstance(y, Value):
        return Value(call.build.add(x.index, y.index, call.name), x.leading)
    value, constant = (x, y) if isinstance(x, Value) else (y, x)
    assert isinstance(value, Value) and isinstance(constant, Tensor)
    return Value(call.build.scale(value.index, call.name, shift=constant, error=error), value.leading)


def negative(call: Call, x: Value) -> Value:
    """−x."""
    return Value(call.build.scale(x.index, call.name, scale=torch.tensor(-1.0)), x.leading)


@converts("Add", 7, 13, 14)
def _add(call: Call) -> Value:
    return added(call, *call.inputs)


@converts("Sum", 6, 8, 13)
def _sum(call: Call) -> Result:
    # Constants first, so that all that is computed comes after.
    return functools.reduce(lambda x, y: added(call, x, y), sorted(call.given(), key=_is_constant))


def _is_constant(given: Result) -> bool:
    return not isinstance(given, Value)


@converts("Mean", 6, 8, 13)
def _mean(call: Call) -> Value:
    total, count = _sum(call), len(call.inputs)
    assert isinstance(total, Value)
    return divided(call, total, torch.tensor(float(count)))


@converts("Sub", 7, 13, 14)
def _sub(call: Call) -> Value:
    x, y = _operands(call)
    if isinstance(x, Value) and isinstance(y, Value):
        return Value(call.build.add(x.index, negative(call, y).index, call.name), x.leading)
    if isinstance(x, Value):
        assert isinstance(y, Tensor)
        return Value(call.build.scale(x.index, call.name, center=y), x.leading)
    assert isinstance(y, Value)
    return Value(call.build.scale(y.index, call.name, scale=-torch.ones_like(x), shift=x), y.leading)


@converts("Neg", 6, 13)
def _neg(call: Call) -> Value:
    return negative(call, call.value())


@converts("Mul", 7, 13, 14)
def _mul(call: Call) -> Value:
    return times(call, *call.inputs)


def times(call: Call, left: Result | None, right: Result | None) -> Value:
    """The product of two operands of which one is computed at least."""
    x, y = broadcast(call, left, right)
    if isinstance(x, Value) and isinstance(y, Value):
        return Value(call.build.product(x.index, y.index, call.name), x.leading)
    value, constant = (x, y) if isinstance(x, Value) else (y, x)
    assert isinstance(value, Value) and isinstance(constant, Tensor)
    return Value(call.build.scale(value.index, call.name, scale=constant), value.leading)


@converts("Div", 7, 13, 14)
def _div(call: Call) -> Value:
    x, y = _operands(call)
    if isinstance(y, Value):
        inverse = reciprocal(call, y)
        if isinstance(x, Value):
            return Value(call.build.product(x.index, inverse, call.name), x.leading)
        return Value(call.build.scale(inverse, call.name, scale=x), y.leading)
    assert isinstance(x, Value)
    return divided(call, x, y)


def reciprocal(call: Call, x: Value) -> int:
    """1/x as a node."""
    return call.build.append(curve("Reciprocal", call.name, (x.index,), call.build.shape(x.index)))


@converts("IsNaN", 9, 13, 20)
def _is_nan(call: Call) -> np.ndarray:
    # Of what is no number nothing is proved, whatever a file does about it.
    return np.zeros(call.shape(call.value()), np.bool_)


def divided(call: Call, x: Value, by: Tensor) -> Value:
    """x/by, ``by`` being broadcastable to the shape of x.

    Raises:
        InputError: for a division by zero.
        UnsupportedError: if a reciprocal is beyond float64's normal range.
    """
    return Value(call.build.quotient(x.index, call.name, by), x.leading)
