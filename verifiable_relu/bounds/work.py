"""How much work a row of coefficients is: how many values of earlier nodes a neuron depends on."""

from __future__ import annotations

import itertools
import math

from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Add, Conv2d, Scale, Shape

_FAR = 64
"""From so many nodes back on, whatever a neuron depends on is counted as whole nodes."""


def receptive(network: Network) -> tuple[int, ...]:
    """On about how many values of all earlier nodes together a neuron of each node depends, in node order.

    Windows that meet are taken for one within the other: where they only overlap, there are more.
    """

    def count() -> tuple[int, ...]:
        earlier = (0, *itertools.accumulate(node.size for node in network.nodes))
        return tuple(_receptive(network, index, earlier) for index in range(len(network.nodes)))

    return network.once(receptive, count)


def _receptive(network: Network, index: int, earlier: tuple[int, ...]) -> int:
    """The same of one node: within an image by the windows that convolutions see, else by whole nodes.

    ``earlier``: how many values all nodes before each have. From a node on that is seen as a whole, and from
    ``_FAR`` nodes back on, all of them count, so that networks of any depth are walked in linear time.
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
