"""Bounds of every node, from the inputs on: boxes from the boxes of the inputs, rounded outward.

Every node also has a point, about which rows are propagated (``slack``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.activations import relax
from verifiable_relu.bounds.kinds import IMAGES, affine_image
from verifiable_relu.bounds.operators import Operators, prepared
from verifiable_relu.bounds.tuning import TUNING, Bounds, Lines, Tuning
from verifiable_relu.errors import InputError
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Affine, Beside, Node, Permute, Reshape, Scale
from verifiable_relu.rounding import above, below
from verifiable_relu.spec.property import Property


def input_box(
    properties: Sequence[Property],
    network: Network,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Bounds:
    """The properties' boxes as one batch shaped (batch, *input_shape), rounded outward to ``dtype``."""
    shape = (len(properties), *network.input_shape)
    lower = torch.from_numpy(np.stack([p.box.lower for p in properties])).reshape(shape)
    upper = torch.from_numpy(np.stack([p.box.upper for p in properties])).reshape(shape)
    if dtype == torch.float64:
        return Bounds(lower.to(device), upper.to(device))
    low, high = lower.to(dtype), upper.to(dtype)
    low = torch.where(low > lower, below(low), low)
    high = torch.where(high < upper, above(high), high)
    return Bounds(low.to(device), high.to(device))


def rough(network: Network, device: torch.device | str = "cpu") -> tuple[Network, torch.dtype]:
    """A network for searches that prove nothing, and its dtype: float32, or float64 where that can't hold a weight."""
    for dtype in (torch.float32, torch.float64):
        try:
            return network.to(dtype, device), dtype
        except InputError:
            continue
    raise InputError(f"the network '{network.name}' has weights beyond float64")


def intersect(first: Bounds, second: Bounds) -> Bounds:
    """Both bounds at once; NaN in either stays NaN, so that nothing is ever proved from it."""
    return Bounds(torch.maximum(first.lower, second.lower), torch.minimum(first.upper, second.upper))


def interval_bounds(
    network: Network, box: Bounds, known: Mapping[int, Bounds] | None = None, tuning: Tuning = TUNING
) -> list[Bounds]:
    """Bounds of every node's value, in node order.

    Args:
        network: the network, in the dtype and on the device of ``box``.
        box: the inputs, shaped (batch, *input_shape).
        known: bounds of some activation nodes' *inputs*, by activation node index, to be used as well.
        tuning: of sums in float32.

    Raises:
        UnsupportedError: for an operator without an interval image.
    """
    operators = prepared(network, tuning)
    bounds: list[Bounds] = [box]
    for index, node in enumerate(network.nodes[1:], start=1):
        boxes = [bounds[i] for i in node.inputs]
        if known and index in known:
            boxes = [intersect(boxes[0], known[index])]
        bounds.append(IMAGES[node](node, boxes, operators.find(index)))
    return bounds


def within(network: Network, prop: Property, most: float, nodes: Collection[int]) -> bool:
    """Whether no value of some nodes, by index, and no sum of the sizes of its terms, exceeds ``most`` over a box."""
    if not nodes:
        return True
    network = network.to(torch.float64)
    reach = [torch.maximum(b.lower.abs(), b.upper.abs()) for b in interval_bounds(network, input_box([prop], network))]
    sizes = [reach[index] for index in nodes]
    for node in (network.nodes[index] for index in nodes):
        if isinstance(node, Affine):
            sizes.append(node.absolute(reach[node.inputs[0]]) + node.offset_magnitude())
    # What is not a number is not within either.
    return all(bool((size <= most).all()) for size in sizes)


class Rules:
    """The image and the lines of every activation: by default those of the function that the node names.

    A network of differences, whose activations are other functions of the same graph, has rules of its own
    (``change``).
    """

    def image(self, index: int, node: Activation, pre: Bounds) -> Bounds:
        """The box of the activation's output over that of its input, outward; (batch, *shape)."""
        return rounding.interval_activation(node, pre)

    def lines(self, index: int, node: Activation, pre: Bounds) -> Lines:
        """Lines below and above the activation over its input's box, (batch, *shape), but for their own rounding."""
        return relax(node, pre)


Tighten = Callable[[int, Bounds], Bounds]
"""Better bounds of an activation's input, of (the activation's index, the bounds so far); both (batch, *shape)."""


def input_box_node(network: Network) -> int:
    """The last node up to which a network only scales, shifts and reorders its inputs, so that a box stays a box."""
    index = 0
    while index + 1 < len(network.nodes) and network.uses[index] == 1:
        after = network.nodes[index + 1]
        if after.inputs != (index,) or not isinstance(after, Scale | Reshape | Permute):
            break
        index += 1
    return index


def _one_whole(box: Bounds) -> Tensor:
    """(batch,): whether every value of a box is one whole number."""
    return ((box.lower == box.upper) & (box.lower == box.lower.round())).flatten(1).all(1)


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
        known: as given.
        float32: whether sums may be in float32.
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
        self.known = known or {}
        # Sums in float32 have no derivative in float64.
        plain = tuning.float32 and rounding.float32_is_plain(box.lower)
        self.float32 = plain and not (box.lower.requires_grad or box.upper.requires_grad)
        self._intervals: dict[int, Bounds] = {}
        self._points: dict[int, Tensor] = {}
        self._magnitudes: dict[int, Tensor] = {}
        self._radii: dict[int, Tensor] = {}
        self._possibly_active: dict[int, Tensor] = {}
        # (batch,) of each node whether its values over a box are whole numbers, where the network counts.
        self._whole: dict[int, Tensor] = {0: _one_whole(box)} if network.counts else {}

    def advance(self, index: int, tighten: Tighten | None = None) -> None:
        """Bound all nodes up to ``index`` that have no bounds yet.

        Args:
            index: the last of these nodes.
            tighten: asked for better bounds of the input of each activation that is passed.
        """
        for current in range(len(self.values), index + 1):
            node = self.network.nodes[current]
            self.values.append(self._counted(current, self._box(current, node, tighten)))

    def _box(self, index: int, node: Node, tighten: Tighten | None) -> Bounds:
        """The box of node ``index`` from the bounds of the nodes before it, (batch, *shape)."""
        if isinstance(node, Activation):
            return self.rules.image(index, node, self.tightened(index, node.inputs[0], tighten))
        if isinstance(node, Beside):
            self.tightened(index, node.inputs[0], tighten)
            return self.values[node.inputs[2]]
        if isinstance(node, Affine):
            source, about = node.inputs[0], None
            # Rows of coefficients, where there will be any, need the nodes' points anyway.
            if (tighten is not None or self.known) and self.is_centred(source):
                about = self.point(source), self.point(index)
            return affine_image(self.operators[index], self.values[source], about, self.float32)
        return IMAGES[node](node, [self.values[i] for i in node.inputs], None)

    def _counted(self, index: int, box: Bounds) -> Bounds:
        """The box of node ``index``, its ends moved inward to whole numbers where its values are such.

        They are so in all of the network's inputs (``Network.whole``), or in those of these boxes: if the node makes
        whole numbers of whole numbers, and its inputs are such or have one value each, which is whole.
        """
        network = self.network
        if not network.counts:
            return box
        if index in network.whole:
            found = torch.ones(self.samples, dtype=torch.bool, device=box.lower.device)
        else:
            found = _one_whole(box)
            if index in network.keeping:
                found = found | torch.stack([self._whole[i] for i in network.nodes[index].inputs]).all(0)
        self._whole[index] = found
        chosen = found.reshape(-1, *[1] * len(network.nodes[index].shape))
        return Bounds(
            torch.where(chosen, box.lower.ceil(), box.lower), torch.where(chosen, box.upper.floor(), box.upper)
        )

    def tightened(self, index: int, source: int, tighten: Tighten | None) -> Bounds:
        """The best bounds of node ``source``, the input of activation ``index``; they are kept."""
        box = before = self.values[source]
        if index in self.known:
            box = intersect(box, self.known[index])
        if tighten is not None:
            box = tighten(index, box)
        if box is not before:
            self._intervals.setdefault(source, before)
            self.values[source] = box
        self.pre[index] = box
        return box

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

    def point(self, index: int) -> Tensor:
        """v̂ of node ``index``, (batch, *shape)."""
        if index not in self._points:
            node = self.network.nodes[index]
            if index == self.start or isinstance(node, Activation):
                self._points[index] = self.center(index)
            elif isinstance(node, Affine):
                self._points[index] = self.operators[index].forward(self.point(node.inputs[0]))
            else:
                self._points[index] = node.forward(*(self.point(i) for i in node.inputs))
        return self._points[index]

    def center(self, index: int) -> Tensor:
        """The centre of the box of node ``index``, (batch, *shape)."""
        box = self.of(index)
        return torch.lerp(box.lower, box.upper, 0.5)

    def is_centred(self, index: int) -> bool:
        """Whether v̂ is the centre of the node's box: not of a box that was tightened after its point was taken."""
        if index == self.start:
            return True
        if self.interval(index) is not self.of(index):
            return False
        node = self.network.nodes[index]
        if isinstance(node, Reshape | Permute):
            return self.is_centred(node.inputs[0])
        return isinstance(node, Activation)

    def size(self, index: int) -> Tensor:
        """≥ |v|, |v̂| of node ``index``, (batch, *shape)."""
        found = rounding.size(self.of(index))
        return found if self.is_centred(index) else torch.maximum(found, self.point(index).abs())

    def magnitude(self, index: int) -> Tensor:
        """(batch,) the largest ``size`` of node ``index``."""
        if index not in self._magnitudes:
            self._magnitudes[index] = self.size(index).flatten(1).amax(1)
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
