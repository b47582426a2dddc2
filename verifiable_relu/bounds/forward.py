"""Bounds of every node, from the inputs on, and the point of every node about which rows are propagated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.interval import affine_image, intersect, largest, node_image
from verifiable_relu.bounds.operators import Operators, prepared
from verifiable_relu.bounds.rules import Rules
from verifiable_relu.bounds.tuning import Tuning
from verifiable_relu.bounds.types import Bounds
from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Add, Affine, Bilinear, Input, Node, Permute, Relu, Reshape, Scale

Tighten = Callable[[int, Bounds], Bounds]
"""Better bounds of an activation's input, of (the activation's index, the bounds so far); both (batch, *shape)."""


def input_box_node(network: Network) -> int:
    """The last node up to which a network only scales, shifts and reorders its inputs, so that a box stays a box."""
    index = 0
    while index + 1 < len(network.nodes) and network.uses[index] == 1:
        after = network.nodes[index + 1]
        if after.inputs != (index,) or not KINDS[after].keeps_box:
            break
        index += 1
    return index


class NodeBounds:
    """Bounds of a network's nodes over a batch of boxes, node after node.

    Every node has a point v̂, about which rows of coefficients of its value v are propagated (``slack``). The point of
    the inputs, and of an activation's output, is the centre of the box; that of any other node is its value at its
    inputs' points.

    Args:
        network: in the dtype and on the device of ``box``.
        box: the inputs, (batch, *input_shape).
        rules: what activations are taken for.
        tuning: which sums are in float32.
        known: bounds of activations' inputs, by the activation's index, with which the nodes' own are intersected.

    Attributes:
        network: as given.
        operators: its affine maps, ready for products.
        start: the node at which rows end (``input_box_node``).
        samples: the size of the batch.
        values: the bounds of the nodes so far, in node order.
        pre: the bounds of activations' inputs so far, by the activation's index.
    """

    def __init__(
        self, network: Network, box: Bounds, rules: Rules, tuning: Tuning, known: Mapping[int, Bounds] | None = None
    ) -> None:
        self.network = network
        self.operators: Operators = prepared(network, tuning)
        self.rules = rules
        self.start = input_box_node(network)
        self.samples = len(box.lower)
        self.values: list[Bounds] = [box]
        self.pre: dict[int, Bounds] = {}
        self._known = known or {}
        # Sums in float32 have no derivative in float64.
        plain = tuning.float32 and rounding.float32_is_plain(box.lower)
        self.float32 = plain and not (box.lower.requires_grad or box.upper.requires_grad)
        self._intervals: dict[int, Bounds] = {}
        self._largest: dict[int, Tensor] = {}
        self._points: dict[int, Tensor] = {}
        self._magnitudes: dict[int, Tensor] = {}
        self._radii: dict[int, Tensor] = {}
        self._possibly_active: dict[int, Tensor] = {}

    def advance(self, index: int, tighten: Tighten | None = None) -> None:
        """Bound all nodes up to ``index`` that have no bounds yet.

        Args:
            index: the last of these nodes.
            tighten: asked for better bounds of the input of each activation that is passed.
        """
        for current in range(len(self.values), index + 1):
            node = self.network.nodes[current]
            self.values.append(KINDS[node].box(self, current, node, tighten))

    def box_of_activation(self, index: int, node: Activation, tighten: Tighten | None) -> Bounds:
        """The box of activation ``index`` over the best bounds of its input, which are kept."""
        source = node.inputs[0]
        box = before = self.values[source]
        if index in self._known:
            box = intersect(box, self._known[index])
        if tighten is not None:
            box = tighten(index, box)
        if box is not before:
            self._intervals.setdefault(source, before)
            self.values[source] = box
        self.pre[index] = box
        return self.rules.image(index, node, box)

    def box_of_map(self, index: int, node: Affine, tighten: Tighten | None) -> Bounds:
        """The box of the affine map ``index`` by intervals."""
        source, about, most = node.inputs[0], None, None
        # Rows of coefficients, where there will be any, need the nodes' points and sizes anyway.
        rows = tighten is not None or bool(self._known)
        if rows and self.is_centred(source):
            about = self.point(source), self.point(index)
        if rows or KINDS[self.network.nodes[source]].nonnegative:
            most = self.largest(source)
        return affine_image(self.operators[index], self.values[source], most, about, self.float32)

    def box_by_intervals(self, index: int, node: Node, tighten: Tighten | None) -> Bounds:
        """The box of any other node ``index`` by intervals."""
        return node_image(node, index, self.operators, [self.values[i] for i in node.inputs])

    def of(self, index: int) -> Bounds:
        """The bounds of node ``index``, (batch, *shape)."""
        self.advance(index)
        return self.values[index]

    def interval(self, index: int) -> Bounds:
        """The box of node ``index`` by intervals, over the bounds of the nodes before it: before it was tightened."""
        return self._intervals.get(index, self.of(index))

    def empty(self) -> Tensor:
        """(batch,) whether the bounds of some activation's input so far exclude every value: no input is in the box."""
        found = torch.zeros(self.samples, dtype=torch.bool, device=self.values[0].lower.device)
        for box in self.pre.values():
            found |= (box.lower > box.upper).flatten(1).any(1)
        return found

    def largest(self, index: int) -> Tensor:
        """(batch,) the largest absolute value that node ``index`` may have."""
        if index not in self._largest:
            node = self.network.nodes[index]
            if KINDS[node].moves:
                self._largest[index] = self.largest(node.inputs[0])
            elif KINDS[node].nonnegative:
                self._largest[index] = self.of(index).upper.flatten(1).amax(1)
            else:
                self._largest[index] = largest(self.of(index))
        return self._largest[index]

    def point(self, index: int) -> Tensor:
        """v̂ of node ``index``, (batch, *shape)."""
        if index not in self._points:
            node = self.network.nodes[index]
            point = NodeBounds.point_of_box if index == self.start else KINDS[node].point
            self._points[index] = point(self, index, node)
        return self._points[index]

    def point_of_box(self, index: int, node: Node) -> Tensor:
        """The centre of the box of node ``index``."""
        box = self.of(index)
        return torch.lerp(box.lower, box.upper, 0.5)

    def point_of_map(self, index: int, node: Affine) -> Tensor:
        """The value of the affine map ``index`` at its input's point."""
        return self.operators[index].forward(self.point(node.inputs[0]))

    def point_of_values(self, index: int, node: Node) -> Tensor:
        """The value of any other node at its inputs' points."""
        return node.forward(*(self.point(i) for i in node.inputs))

    def is_centred(self, index: int) -> bool:
        """Whether v̂ is the centre of the node's box: not of a box that was tightened after its point was taken."""
        if index == self.start:
            return True
        if self.interval(index) is not self.of(index):
            return False
        node = self.network.nodes[index]
        kind = KINDS[node]
        return kind.centred or (kind.moves and self.is_centred(node.inputs[0]))

    def magnitude(self, index: int) -> Tensor:
        """(batch,) ≥ |v|, |v̂| of node ``index``."""
        if self.is_centred(index):
            return self.largest(index)
        if index not in self._magnitudes:
            size = self.point(index).flatten(1).abs().amax(1)
            self._magnitudes[index] = torch.maximum(self.largest(index), size)
        return self._magnitudes[index]

    def radius(self, index: int) -> Tensor:
        """≥ |v − v̂| of node ``index``, but for rounding (``rounding.radius``); (batch, *shape)."""
        if index not in self._radii:
            self._radii[index] = rounding.radius(self.of(index), self.point(index))
        return self._radii[index]

    def reach(self, index: int) -> Tensor:
        """≥ |W|·|x − x̂| of the affine map ``index`` whose input x is centred; (batch, *shape)."""
        return rounding.radius(self.interval(index), self.point(index))

    def ball(self, index: int) -> tuple[Tensor, Tensor]:
        """Centre and radius of the box of node ``index``: (batch, neurons) each."""
        box = self.of(index).flat()
        return torch.lerp(box.lower, box.upper, 0.5), (box.upper - box.lower) / 2

    def possibly_active(self, index: int) -> Tensor:
        """Which neurons of the ReLU ``index`` are not known to be inactive: (batch, neurons) bool."""
        if index not in self._possibly_active:
            # An upper bound of 0 leaves the value 0 alone, so that the point is 0, too. A bound of NaN says nothing.
            self._possibly_active[index] = self.interval(index).upper.flatten(1) != 0
        return self._possibly_active[index]


@dataclass(frozen=True)
class Kind:
    """What a kind of node means to the bounds of nodes.

    Attributes:
        box: the box of a node, (batch, *shape), of the bounds of the nodes before it, its index, itself, and what is
            asked for better bounds.
        point: the point of a node, (batch, *shape), of the bounds of the nodes before it, its index and itself.
        centred: whether the point is the centre of the box.
        moves: whether the node has the numbers of its input, perhaps in another order.
        keeps_box: whether, over a box of its input, its values fill a box.
        nonnegative: whether no value is below 0, so that the upper bounds alone tell the largest.
    """

    box: Callable[[NodeBounds, int, Any, Tighten | None], Bounds]
    point: Callable[[NodeBounds, int, Any], Tensor]
    centred: bool = False
    moves: bool = False
    keeps_box: bool = False
    nonnegative: bool = False


_MOVED = Kind(NodeBounds.box_by_intervals, NodeBounds.point_of_values, moves=True, keeps_box=True)

KINDS: Table[Kind] = Table(
    "bounds of nodes",
    {
        Input: Kind(NodeBounds.box_by_intervals, NodeBounds.point_of_values),
        Affine: Kind(NodeBounds.box_of_map, NodeBounds.point_of_map),
        Scale: Kind(NodeBounds.box_of_map, NodeBounds.point_of_map, keeps_box=True),
        Activation: Kind(NodeBounds.box_of_activation, NodeBounds.point_of_box, centred=True),
        Relu: Kind(NodeBounds.box_of_activation, NodeBounds.point_of_box, centred=True, nonnegative=True),
        Add: Kind(NodeBounds.box_by_intervals, NodeBounds.point_of_values),
        Bilinear: Kind(NodeBounds.box_by_intervals, NodeBounds.point_of_values),
        Reshape: _MOVED,
        Permute: _MOVED,
    },
)
