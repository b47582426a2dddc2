"""One network for many: the ReLU network together with all the smooth ones that it can have come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from verifiable_relu.errors import InputError
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Gelu, Hardened, Relu


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
    places = [i for i, node in enumerate(network.nodes) if isinstance(node, Relu | Gelu | Hardened)]
    if not places:
        raise InputError(f"the network '{network.name}' has neither ReLU nor λ-GELU activations")
    if lam is None:
        own = [network.nodes[i] for i in places]
        if not all(isinstance(node, Gelu | Hardened) for node in own):
            raise InputError(f"the ReLUs of the network '{network.name}' do not tell which λ they come from")
        values = [node.lam for node in own if isinstance(node, Gelu | Hardened)]
    else:
        numbers = [float(lam)] * len(places) if isinstance(lam, int | float) else [float(value) for value in lam]
        if len(numbers) != len(places):
            raise InputError(f"{len(numbers)} values of λ for {len(places)} layers of activations")
        if not all(1 <= value < float("inf") for value in numbers):
            raise InputError(f"λ must be a finite number of at least 1, got {numbers}")
        values = [torch.tensor(value, dtype=torch.float64) for value in numbers]
    nodes = list(network.nodes)
    for index, value in zip(places, values, strict=True):
        node = nodes[index]
        nodes[index] = Hardened(name=node.name, inputs=node.inputs, shape=node.shape, lam=value)
    return replace(network, nodes=tuple(nodes), onnx=None)
