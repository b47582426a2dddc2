"""Which coefficients of rows are taken in float32, in networks whose values are in float64.

Products in float32 take half the time and half the memory. An error in a coefficient counts by how far the node's value
may be from the node's point, so that at most of the first nodes float32 widens bounds by a small part of their width.
"""

from __future__ import annotations

from functools import cached_property

from verifiable_relu.bounds.forward import NodeBounds
from verifiable_relu.bounds.operators import ConvolutionOperator, Operators
from verifiable_relu.bounds.tuning import Tuning
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Add, Affine, Conv2d, Linear, Permute, Reshape


class Float32:
    """The nodes of a relaxation whose coefficients are in float32: all up to ``last_node``.

    Args:
        bounds: the nodes' bounds.
        tuning: how far float32 may go.
        everywhere: to go as far as sums in float32 are accounted for.
        never: to stay in float64.
    """

    def __init__(self, bounds: NodeBounds, tuning: Tuning, everywhere: bool = False, never: bool = False) -> None:
        self._network, self._operators, self._start = bounds.network, bounds.operators, bounds.start
        self._tuning, self._everywhere = tuning, everywhere
        self._allowed = bounds.float32 and not never

    @cached_property
    def last_node(self) -> int:
        """The last node whose coefficients are in float32; −1 if there is none."""
        if not self._allowed:
            return -1
        return last_float32_node(self._network, self._operators, self._start, self._everywhere, self._tuning)

    def holds(self, index: int) -> bool:
        """Whether the coefficients of node ``index`` are in float32."""
        return index <= self.last_node

    def sums(self, index: int) -> bool:
        """Whether sums of the affine map ``index`` may be taken in float32."""
        return self._allowed and isinstance(self._network.nodes[index], Affine) and self._operators[index].fits32

    def narrows(self, index: int) -> bool:
        """Whether rows of the dense layer ``index`` are taken in float32 before they are pulled back through it."""
        node = self._network.nodes[index]
        return isinstance(node, Linear) and self.holds(node.inputs[0]) and self.sums(index)


def last_float32_node(network: Network, operators: Operators, start: int, everywhere: bool, tuning: Tuning) -> int:
    """The last node up to which coefficients are in float32; −1 if there is none.

    By default the first convolutions of a network and what lies between them are in float32, and the inputs of a dense
    network if there are many. With ``everywhere`` all nodes are, up to the first whose sums may not be in float32.
    Rows pass from float64 to float32 only on their way through an affine map.
    """
    depth, last, nodes = 0, start, network.nodes
    for index in range(start + 1, len(nodes)):
        node = nodes[index]
        if isinstance(node, Conv2d) or (everywhere and isinstance(node, Linear)):
            operator = operators[index]
            if isinstance(operator, ConvolutionOperator) and not everywhere:
                depth += operator.adjoint_terms
            if depth > tuning.float32_depth or not operator.fits32:
                break
        elif not isinstance(node, Activation | Add | Reshape | Permute):
            break
        last = index
    while last >= start and any(
        not isinstance(node, Affine) and min(node.inputs) <= last for node in nodes[last + 1 :]
    ):
        last -= 1
    if everywhere or any(isinstance(node, Conv2d) for node in nodes[start + 1 : last + 1]):
        return last
    first = [(i, node) for i, node in enumerate(nodes) if node.inputs == (start,)]
    narrow = all(
        isinstance(node, Linear) and node.size <= tuning.float32_neurons and operators[i].fits32 for i, node in first
    )
    return start if last >= start and narrow and nodes[start].size >= tuning.float32_inputs else -1
