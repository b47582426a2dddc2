"""One network for many: the ReLU network together with all the smooth ones that it can have come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from verifiable_relu.errors import InputError
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Curve, Gelu, Hardened, Node, Relu, same
from verifiable_relu.network.simplify import argument
from verifiable_relu.rounding import MODERATE, not_above


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

    What bounds prove of it holds for all of them, each layer with a λ' of its own. λ of a GELU is that with respect to
    the x before all scalars around it (``simplify.argument``): GELU(c·x) is c times c-GELU of x. That of a ReLU is with
    respect to its argument.

    Args:
        network: with ReLU or λ-GELU activations, in real arithmetic or as it runs.
        lam: ≥ 1; one number, or one for each layer of such activations. None takes the λ of the network's own
            λ-GELUs, and leaves its ReLUs as they are.

    Raises:
        InputError: if the network has no activation to replace, no λ-GELU where ``lam`` is None, ``lam`` does not
            fit, some λ is not known, or the network runs and is none of them.
    """
    _require_whole_gelus(network)
    # Maxima are the same in all members.
    places = [i for i in network.activations if _member(network.nodes[i]) and i not in network.spared]
    if not places:
        raise InputError(f"the network '{network.name}' has neither ReLU nor λ-GELU activations")
    nodes, notes = list(network.nodes), list[str]()
    if lam is None:
        # A ReLU beside λ-GELUs, such as those by which a normalisation is clipped, is one in all members.
        least: dict[int, Tensor] = {i: node.lam for i in places if isinstance(node := nodes[i], Gelu | Hardened)}
        if not least:
            raise InputError(f"the ReLUs of the network '{network.name}' do not tell which λ they come from")
    else:
        numbers = [float(lam)] * len(places) if isinstance(lam, int | float) else [float(value) for value in lam]
        if len(numbers) != len(places):
            raise InputError(f"{len(numbers)} values of λ for {len(places)} layers of activations")
        if not all(1 <= value < float("inf") for value in numbers):
            raise InputError(f"λ must be a finite number of at least 1, got {numbers}")
        least = {}
        for index, number in zip(places, numbers, strict=True):
            factor, error = _factor(network, index)
            low = not_above(Fraction(number) / (factor * (1 + error)))
            least[index] = torch.tensor(low, dtype=torch.float64)
            notes += _outside(network, index, factor, number)
    for index, value in least.items():
        node = nodes[index]
        nodes[index] = Hardened(name=node.name, inputs=node.inputs, shape=node.shape, lam=value)
    return replace(network, nodes=tuple(nodes), onnx=None, run=None, mended=(*network.mended, *notes))


def _require_whole_gelus(network: Network) -> None:
    """Refuse a network with an error function, which may be a part of a GELU that has no λ in any family.

    Raises:
        InputError: naming the first one.
    """
    for node in network.nodes:
        if isinstance(node, Curve) and node.function == "Erf":
            said = "it may be a GELU's that is spelled out, of which no family is known here; write the operator Gelu"
            raise InputError(said, place=node.place)


def _factor(network: Network, index: int) -> tuple[Fraction, Fraction]:
    """The size of the factor of x in an activation's argument where λ is with respect to x, and its relative error.

    Raises:
        InputError: if the factor is not known, or beyond ``MODERATE``.
    """
    node = network.nodes[index]
    if not isinstance(node, Gelu):
        return Fraction(1), Fraction(0)
    found = argument(network.nodes, node.inputs[0])
    rounded = network.arithmetic != "real"
    if found.vague and not rounded:
        said = f"its λ is not known: '{found.vague}' before it is a GELU, too, or has several factors for its numbers"
        raise InputError(f"{said}; put a layer between", place=node.place)
    if not MODERATE[0] <= abs(found.factor) <= MODERATE[1]:
        said = f"the factor before it, {float(found.factor):g}, is too small or too large for a family"
        raise InputError(f"{said}; sizes from 2^-40 to 2^40 are known", place=node.place)
    # Errors of what runs are those of its rounding, and the file's numbers are exact.
    return abs(found.factor), Fraction(0) if rounded else found.error


def _outside(network: Network, index: int, factor: Fraction, least: float) -> list[str]:
    """A sentence if an activation of the network is none of those from λ = ``least`` on.

    Raises:
        InputError: if so, and the network is what runs: bounds of a family hold for no evaluation of it then.
    """
    node = network.nodes[index]
    if not isinstance(node, Gelu) or factor * Fraction(float(node.lam)) >= least:
        return []
    own = float(factor * Fraction(float(node.lam)))
    said = f"'{node.name}' has λ = {own:.9g}, which is none of the family from λ = {least:g} on"
    if network.arithmetic != "real":
        raise InputError(f"{said}: its evaluations in {network.arithmetic} are not bounded")
    return [f"{said}: nothing is said about the file itself"]


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
