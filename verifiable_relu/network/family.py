"""One network for many: the ReLU network together with all the smooth ones that it can have come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from verifiable_relu.errors import InputError
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Curve, Gelu, Hardened, Node, Relu, same


def _member(node: Node) -> bool:
    """Whether a family has ``Hardened`` in the place of a node; other nodes are the same in all of its members."""
    return isinstance(node, Relu | Gelu | Hardened)


def least_hardness(network: Network) -> list[float]:
    """The least λ' of each layer of a set of networks, as ``hardened`` makes it; empty for a single network."""
    return [float(node.lam) for node in network.nodes if isinstance(node, Hardened)]


def beside_family(network: Network) -> list[str]:
    """What the activations of a family are called that are the same in all of its members."""
    return [
        "a maximum" if index in network.spared else getattr(network.nodes[index], "function", network.nodes[index].op)
        for index in network.activations
        if not isinstance(network.nodes[index], Hardened)
    ]


def hardened(network: Network, lam: float | Sequence[float] | None = None) -> Network:
    """The set of networks with λ'-GELU, λ' ≥ ``lam``, or ReLU in place of its ReLUs and λ-GELUs.

    What bounds prove of it holds for all of them, each layer with a λ' of its own.

    Args:
        network: with ReLU or λ-GELU activations.
        lam: ≥ 1; one number, or one for each layer of such activations. None takes the λ of the network's own
            λ-GELUs, and leaves its ReLUs as they are.

    Raises:
        InputError: if the network has no activation to replace, no λ-GELU where ``lam`` is None, or ``lam`` does not
            fit.
    """
    # Maxima are the same in all members.
    places = [i for i in network.activations if _member(network.nodes[i]) and i not in network.spared]
    if not places:
        raise InputError(f"the network '{network.name}' has neither ReLU nor λ-GELU activations")
    if lam is None:
        own = {index: getattr(network.nodes[index], "lam", None) for index in places}
        # A ReLU beside λ-GELUs, such as those by which a normalisation is clipped, is one in all members.
        places = [index for index in places if own[index] is not None]
        values = [value for value in own.values() if value is not None]
        if not values:
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
    return replace(network, nodes=tuple(nodes), onnx=None, run=None)


def swapped(smooth: Network, hard: Network) -> Network:
    """The set of networks between a smooth one and the one with ReLU in place of some of its activations.

    What bounds prove of it holds for both, and for those with G(λx)/λ, λ ≥ 1, in place of each such activation G.

    Args:
        smooth: with activations that are ``gated``.
        hard: the network that a swap made of it. Which activations were swapped is seen from both networks' activations
            in their order; whether all else is the same is for the caller to find out.

    Raises:
        InputError: if the activations are not those of a swap, or none was swapped.
    """
    if len(smooth.activations) != len(hard.activations):
        raise InputError("the swap changes more of the network than activations")
    nodes: list[Node] = list(smooth.nodes)
    for index, other in zip(smooth.activations, hard.activations, strict=True):
        f, g = nodes[index], hard.nodes[other]
        assert isinstance(f, Activation) and isinstance(g, Activation)
        if isinstance(f, Curve) and f.known.gated and isinstance(g, Relu):
            lam = f.parameter
            nodes[index] = Hardened(name=f.name, inputs=f.inputs, shape=f.shape, lam=lam, function=f.function)
        elif f.op != g.op or f.shape != g.shape or (isinstance(f, Curve) and not same(f, g)):
            raise InputError(f"the change is not bounded where '{g.name}' ({g.op}) takes the place of {f.place}")
    if not any(isinstance(node, Hardened) for node in nodes):
        raise InputError("no activation was swapped")
    return replace(smooth, nodes=tuple(nodes), onnx=None, run=None)
