"""A network's affine maps made ready for bound propagation, once per network, dtype and device."""

from __future__ import annotations

from verifiable_relu.bounds.operators.convolution import ConvolutionOperator
from verifiable_relu.bounds.operators.dense import DenseOperator
from verifiable_relu.bounds.operators.operator import Operator
from verifiable_relu.bounds.tuning import TUNING, Tuning
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Affine, Conv2d, Linear, Node

_KINDS: dict[type[Affine], type[Operator[Affine]]] = {Linear: DenseOperator, Conv2d: ConvolutionOperator}
"""The operators of kinds of affine map that have more than their own products."""


class Operators:
    """The operators of a network's affine nodes by the node's index, each made when it is first asked for."""

    def __init__(self, nodes: tuple[Node, ...], tuning: Tuning) -> None:
        # Not the network itself: it keeps this object, and a circle would wait for the garbage collector.
        self._nodes, self.tuning = nodes, tuning
        self._made: dict[int, Operator[Affine]] = {}

    def __getitem__(self, index: int) -> Operator[Affine]:
        if index not in self._made:
            node = self._nodes[index]
            assert isinstance(node, Affine)
            self._made[index] = _KINDS.get(type(node), Operator)(node, self.tuning)
        return self._made[index]

    def find(self, index: int) -> Operator[Affine] | None:
        """The operator of node ``index``; None if that is no affine map."""
        return self[index] if isinstance(self._nodes[index], Affine) else None


def prepared(network: Network, tuning: Tuning = TUNING) -> Operators:
    """The operators of a network, which the network keeps: another dtype or device is another network."""
    return network.once((Operators, tuning), lambda: Operators(network.nodes, tuning))
