"""Piecewise-linear activations: those with one kink, at zero, f(x) = max(x, 0) + s·min(x, 0).

A neuron of such an activation is in one of two phases, *active* (x ≥ 0, f(x) = x) and *inactive* (x ≤ 0, f(x) = s·x). A
network of such activations has exact rational values, and a finite case distinction decides every property of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.nodes import Activation, Gelu, Hardened, Identity, LeakyRelu, Relu, Sigmoid, Smooth, Tanh

_NO_PHASES = Refusal("only piecewise-linear activations can be split into phases")

SLOPES: Table[Callable[[Any], Tensor]] = Table(
    "the case distinction by phases",
    {
        Relu: lambda node: torch.zeros(()),
        LeakyRelu: lambda node: node.slope,
        **dict.fromkeys((Sigmoid, Tanh, Gelu, Hardened, Identity, Smooth), _NO_PHASES),
    },
    group=Activation,
)
"""The slope s of each kind of activation below zero, broadcastable to the node's shape."""
