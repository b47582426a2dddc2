"""Heads that keep the order of a network's outputs: what comes before them answers comparisons of outputs.

A head is a softmax or log softmax over all outputs, or an increasing function of each output alone. It is recognised by
the nodes that it was read as.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.build import as_network
from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Curve, Linear, Node, Reshape, Scale, Smooth, Sparse
from verifiable_relu.network.onnx.write import write_onnx


def headless(network: Network) -> Network | None:
    """The network without a head that keeps the order of its outputs; None if it has none.

    In real arithmetic its outputs compare as those of the network do. The result names the bytes of the whole network's
    file, in which counterexamples are replayed; None, too, where there is no file and none can be written.
    """
    last = len(network.nodes) - 1
    source = _before(network.nodes, last)
    # Below a softmax there may be another increasing function.
    while source is not None and (further := _before(network.nodes, source)) is not None:
        source = further
    if source is None:
        return None
    source = _unshaped(network.nodes, source)
    try:
        written = network.onnx is None and network.run is None
        onnx = write_onnx(network.limit, rounded=True) if written else network.onnx
    except UnsupportedError:
        return None
    found = as_network(network.nodes, source, name=network.name, onnx=onnx, batched=network.batched)
    return replace(found, run=network.run)


def _before(nodes: Sequence[Node], index: int) -> int | None:
    """The node before the head that ends at node ``index``; None if no head ends there."""
    index = _unshaped(nodes, index)
    node = nodes[index]
    return HEADS[node](nodes, node) if node in HEADS else None


def _unshaped(nodes: Sequence[Node], index: int) -> int:
    """The first of the nodes that have the numbers of a node in the same order."""
    while isinstance(nodes[index], Reshape):
        index = nodes[index].inputs[0]
    return index


def _difference_of_two(nodes: Sequence[Node], index: int, sign: float) -> int | None:
    """The node of the two x_i of sign·(x_i − the other), if a node is that."""
    node = nodes[_unshaped(nodes, index)]
    if isinstance(node, Linear) and node.shape[-1] == node.size == 2 and not node.weight_error:
        differences = torch.tensor([[sign, -sign], [-sign, sign]], dtype=torch.float64)
        if torch.equal(node.weight.cpu().double(), differences) and not bool(node.bias.any()):
            return node.inputs[0]
    return None


def _function(nodes: Sequence[Node], node: Curve) -> int | None:
    """Of two numbers, softmax is the sigmoid of their differences."""
    if node.function == "Reciprocal":
        return _exponentials(nodes, node.inputs[0])
    if node.function == "Sigmoid" and (found := _difference_of_two(nodes, node.inputs[0], 1.0)) is not None:
        return found
    return node.inputs[0] if node.known.increasing else None


def _scale(nodes: Sequence[Node], node: Scale) -> int | None:
    """Log softmax is minus the logarithm of the sums of exponentials; of two numbers minus a softplus."""
    index = _unshaped(nodes, node.inputs[0])
    exact = not (node.weight_error or bool(node.center.any() | node.shift.any()))
    plain = exact and bool((node.scale == -1).all())
    function = nodes[index]
    if not (plain and isinstance(function, Smooth)):
        return None
    if function.function == "Softplus":
        return _difference_of_two(nodes, function.inputs[0], -1.0)
    return _exponentials(nodes, function.inputs[0]) if function.function == "Log" else None


def _exponentials(nodes: Sequence[Node], index: int) -> int | None:
    """The node of the x_i of Σ_j exp(x_j − x_i), if a node is that over all of them."""
    total = nodes[_unshaped(nodes, index)]
    if not isinstance(total, Linear) or not bool((total.weight == 1).all()) or bool(total.bias.any()):
        return None
    powers = nodes[_unshaped(nodes, total.inputs[0])]
    if not isinstance(powers, Smooth) or powers.function != "Exp" or total.weight.shape != (1, total.size):
        return None
    differences = nodes[_unshaped(nodes, powers.inputs[0])]
    if not isinstance(differences, Sparse) or bool(differences.bias.any()) or differences.size != total.size**2:
        return None
    source, count = differences.inputs[0], total.size
    first, second = np.divmod(np.arange(count**2), count)
    pairs = torch.from_numpy(np.stack([second, first], 1))
    weight = torch.where(pairs[:, :1] == pairs[:, 1:], 0.0, torch.tensor([[1.0, -1.0]]).double())
    same = torch.equal(differences.index.cpu(), pairs) and torch.equal(differences.weight.cpu().double(), weight)
    same = same and not (differences.weight_error or total.weight_error)
    return source if same and nodes[source].size == count else None


HEADS: Table[Callable[[Sequence[Node], Any], int | None]] = Table(
    "the search for a head",
    {
        Curve: _function,
        Scale: _scale,
        Node: lambda nodes, node: None,
    },
)
"""The node before the head whose last node is given, of all nodes and that one; None if none ends there."""
