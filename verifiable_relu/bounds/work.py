"""How much work a row of coefficients is: on how many values of earlier nodes a neuron depends."""

from __future__ import annotations

import itertools
import math

from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Add, Conv2d, Scale, Shape

_FAR = 64
"""A neuron is taken to depend on all values of the nodes that are so many or more nodes before it."""


def receptive(network: Network) -> tuple[int, ...]:
    """On about how many values of all earlier nodes together a neuron of each node depends, in node order.

    Where two windows of one node are wanted, the larger one is counted, as if it held the other.
    """

    def count() -> tuple[int, ...]:
        earlier = (0, *itertools.accumulate(node.size for node in network.nodes))
        return tuple(_receptive(network, index, earlier) for index in range(len(network.nodes)))

    return network.once(receptive, count)


def _receptive(network: Network, index: int, earlier: tuple[int, ...]) -> int:
    """The same for one node, counted within images by the windows that convolutions see, elsewhere by whole nodes.

    ``earlier``: how many values all nodes before each node have. All of them are counted before a node that is seen as
    a whole, and ``_FAR`` nodes back, so that networks of any depth are walked in linear time.
    """
    windows: dict[int, Shape] = {index: (1,) * len(network.nodes[index].shape[1:])}
    count = 0
    for current in range(index, -1, -1):
        if current not in windows:
            continue
        node, window = network.nodes[current], windows.pop(current)
        if not windows and current < index and (window == node.shape[1:] or index - current >= _FAR):
            return count + earlier[current + 1]
        if current < index:
            count += min(node.size, math.prod((node.shape[0], *window)) if node.shape else 1)
        for source in node.inputs:
            before = network.nodes[source].shape[1:]
            if isinstance(node, Conv2d):
                sizes = zip(window, node.weight.shape[2:], node.stride, node.dilation, strict=True)
                before = tuple((n - 1) * s + d * (k - 1) + 1 for n, k, s, d in sizes)
            elif isinstance(node, Activation | Scale | Add):
                before = window
            known = windows.get(source, before)
            windows[source] = tuple(
                min(max(pair), whole)
                for *pair, whole in zip(known, before, network.nodes[source].shape[1:], strict=True)
            )
    return count
