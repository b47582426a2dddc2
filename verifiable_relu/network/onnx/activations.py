"""Element-wise activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verifiable_relu.network.nodes import Gelu, LeakyRelu, Relu, Sigmoid, Tanh
from verifiable_relu.network.onnx.call import Call, Value, converts
from verifiable_relu.network.transient import Erf


def _activation(call: Call, kind: type[Any], **parameters: Tensor) -> Value:
    x = call.value()
    return Value(call.build.activation(x.index, kind, call.name, **parameters), x.leading)


@converts("Relu", 6, 13, 14)
def _relu(call: Call) -> Value:
    return _activation(call, Relu)


@converts("LeakyRelu", 6, 16)
def _leaky_relu(call: Call) -> Value:
    return _activation(call, LeakyRelu, slope=torch.tensor(call.get("alpha", 0.01), dtype=torch.float32))


@converts("PRelu", 7, 9, 16)
def _prelu(call: Call) -> Value:
    return _activation(call, LeakyRelu, slope=call.beside(call.constant(1), call.value()))


@converts("Sigmoid", 6, 13)
def _sigmoid(call: Call) -> Value:
    return _activation(call, Sigmoid)


@converts("Tanh", 6, 13)
def _tanh(call: Call) -> Value:
    return _activation(call, Tanh)


@converts("Gelu", 20)
def _gelu(call: Call) -> Value:
    call.refuse(approximate=b"none")
    return _activation(call, Gelu, lam=torch.tensor(1.0))


@converts("Erf", 9, 13)
def _erf(call: Call) -> Value:
    x = call.value()
    return Value(call.build.append(Erf(name=call.name, inputs=(x.index,), shape=call.build.shape(x.index))), x.leading)
