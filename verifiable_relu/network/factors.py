"""Where bounds of the factors of products are taken: at nodes of the kind ``Identity``.

The bounds of a product are those of its factors. An activation's input is bounded by rows of coefficients, any other
node by intervals alone. So an ``Identity`` is put behind every node that is multiplied with another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from verifiable_relu.network.nodes import Activation, Bilinear, Identity, Input, Node, Permute, Reshape, Scale, Sparse
from verifiable_relu.network.simplify import Graph


def bounded_factors(nodes: Sequence[Node], output: int) -> Graph:
    """Put an ``Identity`` behind each node whose numbers, perhaps moved, repeated or scaled, are factors of a product.

    Inputs and activations have none: their boxes are as good as they can be.
    """
    wanted = {_origin(nodes, source) for node in nodes if isinstance(node, Bilinear) for source in node.inputs}
    made: list[Node] = []
    at: list[int] = []
    for index, node in enumerate(nodes):
        made.append(replace(node, inputs=tuple(at[i] for i in node.inputs)))
        if index in wanted and not isinstance(node, Activation | Input):
            made.append(Identity(name=node.name, inputs=(len(made) - 1,), shape=node.shape))
        at.append(len(made) - 1)
    return made, at[output]


def _origin(nodes: Sequence[Node], index: int) -> int:
    """The node whose numbers node ``index`` has, moved, repeated or scaled one by one."""
    while isinstance(node := nodes[index], Scale | Reshape | Permute) or (
        isinstance(node, Sparse) and bool(((node.weight != 0).sum(1) <= 1).all())
    ):
        index = node.inputs[0]
    return index
