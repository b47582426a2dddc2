"""One network for many: the ReLU network together with all the smooth ones that it can have come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.errors import InputError
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Activation,
    Gelu,
    Hardened,
    Identity,
    LeakyRelu,
    Node,
    Relu,
    Sigmoid,
    Smooth,
    Tanh,
)

HARDNESS: Table[Callable[[Any], Tensor | None]] = Table(
    "a family of harder networks",
    {
        Relu: lambda node: None,
        Gelu: lambda node: node.lam,
        Hardened: lambda node: node.lam,
        **dict.fromkeys((Identity, LeakyRelu, Sigmoid, Smooth, Tanh), Refusal("is neither ReLU nor λ-GELU")),
    },
    group=Activation,
)
"""The λ of each kind of activation that a family has ``Hardened`` in place of; None where the node does not tell it.

Activations of kinds that are refused are the same in all members of a family.
"""


def hardened(network: Network, lam: float | Sequence[float] | None = None) -> Network:
    """The set of networks with λ'-GELU, λ' ≥ ``lam``, or ReLU in place of every ReLU and λ-GELU.

    What bounds prove of it holds for all of them, each layer with a λ' of its own.

    Args:
        network: with ReLU or λ-GELU activations.
        lam: ≥ 1; one number, or one for each layer of such activations. None takes the λ of the network's own
            λ-GELUs, and of nothing else.

    Raises:
        InputError: if the network has no activation to replace, ReLUs without a λ, or ``lam`` does not fit.
    """
    places = [i for i in network.activations if network.nodes[i] in HARDNESS]
    if not places:
        raise InputError(f"the network '{network.name}' has neither ReLU nor λ-GELU activations")
    if lam is None:
        own = [HARDNESS[node](node) for node in (network.nodes[i] for i in places)]
        values = [value for value in own if value is not None]
        if len(values) < len(own):
            raise InputError(f"the ReLUs of the network '{network.name}' do not tell which λ they come from")
    else:
        numbers = [float(lam)] * len(places) if isinstance(lam, int | float) else [float(value) for value in lam]
        if len(numbers) != len(places):
            raise InputError(f"{len(numbers)} values of λ for {len(places)} layers of activations")
        if not all(1 <= value < float("inf") for value in numbers):
            raise InputError(f"λ must be a finite number of at least 1, got {numbers}")
        values = [torch.tensor(value, dtype=torch.float64) for value in numbers]
    nodes: list[Node] = list(network.nodes)
    for index, value in zip(places, values, strict=True):
        node = nodes[index]
        nodes[index] = Hardened(name=node.name, inputs=node.inputs, shape=node.shape, lam=value)
    return replace(network, nodes=tuple(nodes), onnx=None)
