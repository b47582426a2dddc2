"""Bounds of every node, from the inputs on: boxes from the boxes of the inputs, rounded outward.

Every node also has a point, about which rows are propagated (``slack``).

Source: Gowal et al., On the Effectiveness of Interval Bound Propagation for Training Verifiably Robust Models,
arXiv 1810.12715, section 3.1 (centre and radius through an affine map).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.activations import image, relax
from verifiable_relu.bounds.operators import Operator, Operators, prepared
from verifiable_relu.bounds.tuning import TUNING, Bounds, Lines, Tuning
from verifiable_relu.errors import InputError
from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Affine,
    Input,
    Linear,
    MatMul,
    Node,
    Permute,
    Product,
    Relu,
    Reshape,
    Scale,
)
from verifiable_relu.rounding import above, below
from verifiable_relu.spec.property import Property

_HUGE = 1e37
"""Sums of up to this size do not overflow in float32, nor on the way."""


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


def largest(bounds: Bounds) -> Tensor:
    """(batch,) the largest absolute value within each sample's bounds."""
    return torch.maximum(-bounds.lower.flatten(1).amin(1), bounds.upper.flatten(1).amax(1))


def affine_image(
    operator: Operator[Affine],
    box: Bounds,
    most: Tensor | None = None,
    about: tuple[Tensor, Tensor] | None = None,
    float32: bool | None = None,
) -> Bounds:
    """The box of W·x + b over a box of x, shaped (batch, *shape).

    Args:
        operator: of the affine map.
        box: of x.
        most: (batch,) ``largest`` of the box, if known.
        about: the box's centre, and W·x + b there, if known.
        float32: whether sums may be in float32 (``rounding.float32_is_plain``), if known.
    """
    node = operator.node
    if isinstance(node, Scale):
        return _scaled(node, operator, box, largest(box) if most is None else most)
    center, radius = rounding.ball(box, None if about is None else about[0])
    middle, terms = None if about is None else about[1], _float32_terms(operator, radius, float32)
    if terms:
        radius = radius.float()
    if terms and middle is None:
        narrow = center.float()
        size = narrow.abs()
        sums = size.flatten(1).sum(1), radius.flatten(1).sum(1)
        if _bearable(operator, *sums):
            middle = operator.forward32(narrow)
            radius = rounding.interval_single(size, radius, operator.terms32[0])
            # It may be far too large, which does not matter beside the errors of sums in float32.
            most = rounding.reach_single(*sums, size[0].numel()) if most is None else most
    if middle is None:
        middle = operator.forward(center)
    growth, extra = rounding.interval_affine(operator, largest(box) if most is None else most, terms)
    spread = torch.add(extra, operator.absolute32(radius) if terms else operator.absolute(radius), alpha=growth)
    return Bounds(middle - spread, spread.add_(middle))


def _scaled(node: Scale, operator: Operator[Affine], box: Bounds, most: Tensor) -> Bounds:
    """The box of s·x + b, element by element: its ends are the values at the ends of the box of x."""
    _, error = rounding.interval_affine(operator, most)
    low, high = operator.offset - error, operator.offset + error
    if operator.once("increasing", lambda: bool((node.scale >= 0).all())):
        return Bounds(torch.addcmul(low, node.scale, box.lower), torch.addcmul(high, node.scale, box.upper))
    ends = node.scale * box.lower, node.scale * box.upper
    return Bounds(torch.minimum(*ends) + low, torch.maximum(*ends) + high)


def _float32_terms(operator: Operator[Affine], radius: Tensor, float32: bool | None) -> int:
    """In how many float32 additions a product of |W|·radius takes part; 0 where sums are in float64."""
    node, tuning, terms = operator.node, operator.tuning, operator.terms32
    if not tuning.float32 or len(radius) < tuning.interval_samples or not 0 < max(terms) <= tuning.interval_terms:
        return 0
    large = not isinstance(node, Linear) or len(radius) * node.weight.numel() >= tuning.interval_products
    if not large or not operator.fits32 or radius[0].numel() > tuning.interval_inputs:
        return 0
    return terms[1] if (rounding.float32_is_plain(radius) if float32 is None else float32) else 0


def _bearable(operator: Operator[Affine], size: Tensor, radius: Tensor) -> bool:
    """Whether W·centre, too, may be summed in float32: no sum overflows, and no sample's box is widened by much.

    Args:
        operator: of the affine map.
        size: (batch,) the sum of |centre|.
        radius: (batch,) the sum of the radius, to a share of which the widening is compared (``interval_widening``).
    """
    most = operator.once("largest row sum", lambda: float(operator.row_sums.amax().clamp(min=1)))
    part = rounding.share_single(operator.terms32[0])
    allowed = (radius * operator.tuning.interval_widening).clamp_(max=part * _HUGE / most)
    return bool((size * part <= allowed).all())


def _of_affine(node: Affine, boxes: Sequence[Bounds], operator: Operator[Affine]) -> Bounds:
    return affine_image(operator, boxes[0])


def _activation_image(node: Activation, boxes: Sequence[Bounds], _: None) -> Bounds:
    return rounding.interval_activation(node, image(node, boxes[0]))


def _sum_image(node: Add, boxes: Sequence[Bounds], _: None) -> Bounds:
    total = Bounds(boxes[0].lower + boxes[1].lower, boxes[0].upper + boxes[1].upper)
    error = rounding.interval_sum(largest(total)).reshape(-1, *[1] * len(node.shape))
    return Bounds(total.lower - error, total.upper + error)


def _product_image(node: Product, boxes: Sequence[Bounds], _: None) -> Bounds:
    return rounding.widen(_corners(*boxes), 1)


def _corners(x: Bounds, y: Bounds) -> Bounds:
    """The least and the largest product of numbers of two boxes, which are at corners; (batch, …) each."""
    products = [a * b for a in (x.lower, x.upper) for b in (y.lower, y.upper)]
    least, most = torch.minimum(*products[:2]), torch.maximum(*products[:2])
    for product in products[2:]:
        least, most = torch.minimum(least, product), torch.maximum(most, product)
    return Bounds(least, most)


def _matmul_image(node: MatMul, boxes: Sequence[Bounds], _: None) -> Bounds:
    x, y = boxes
    lower = upper = size = torch.zeros((), dtype=x.lower.dtype, device=x.lower.device)
    for k in range(node.inner):
        column = Bounds(x.lower[..., k, None], x.upper[..., k, None])
        term = _corners(column, Bounds(y.lower[..., k, None, :], y.upper[..., k, None, :]))
        lower, upper = lower + term.lower, upper + term.upper
        size = size + torch.maximum(-term.lower, term.upper)
    error = rounding.interval_products(size, node.inner)
    return Bounds(lower - error, upper + error)


def _moved_image(node: Reshape | Permute, boxes: Sequence[Bounds], _: None) -> Bounds:
    return Bounds(node.forward(boxes[0].lower), node.forward(boxes[0].upper))


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
        bounds.append(node_image(node, index, operators, boxes))
    return bounds


def node_image(node: Node, index: int, operators: Operators, boxes: Sequence[Bounds]) -> Bounds:
    """The box of one node's value over boxes of its inputs."""
    image = KINDS[node].image
    assert image is not None, "the input's box is given"
    return image(node, boxes, operators.find(index))


class Rules:
    """The image and the lines of every activation: by default those of the function that the node names.

    A network of differences, whose activations are other functions of the same graph, has rules of its own
    (``change``).
    """

    def image(self, index: int, node: Activation, pre: Bounds) -> Bounds:
        """The box of the activation's output over that of its input, outward; (batch, *shape)."""
        return rounding.interval_activation(node, image(node, pre))

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
        image: the box of a node's value by intervals, (batch, *shape), of the node, its inputs' boxes, and an affine
            map's operator; None for the input, whose box is given.
        box: the box of a node, (batch, *shape), of the bounds of the nodes before it, its index, itself, and what is
            asked for better bounds.
        point: the point of a node, (batch, *shape), of the bounds of the nodes before it, its index and itself.
        centred: whether the point is the centre of the box.
        moves: whether the node has the numbers of its input, perhaps in another order.
        keeps_box: whether, over a box of its input, its values fill a box.
        nonnegative: whether no value is below 0, so that the upper bounds alone tell the largest.
    """

    image: Callable[[Any, Sequence[Bounds], Any], Bounds] | None
    box: Callable[[NodeBounds, int, Any, Tighten | None], Bounds] = NodeBounds.box_by_intervals
    point: Callable[[NodeBounds, int, Any], Tensor] = NodeBounds.point_of_values
    centred: bool = False
    moves: bool = False
    keeps_box: bool = False
    nonnegative: bool = False


_MOVED = Kind(_moved_image, moves=True, keeps_box=True)

_BOUNDED = Kind(_activation_image, NodeBounds.box_of_activation, NodeBounds.point_of_box, centred=True)

KINDS: Table[Kind] = Table(
    "bounds of nodes",
    {
        Input: Kind(None),
        Affine: Kind(_of_affine, NodeBounds.box_of_map, NodeBounds.point_of_map),
        Scale: Kind(_of_affine, NodeBounds.box_of_map, NodeBounds.point_of_map, keeps_box=True),
        Activation: _BOUNDED,
        Relu: replace(_BOUNDED, nonnegative=True),
        Add: Kind(_sum_image),
        Product: Kind(_product_image),
        MatMul: Kind(_matmul_image),
        Reshape: _MOVED,
        Permute: _MOVED,
    },
)
