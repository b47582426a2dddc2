"""Interval bound propagation: each node's box from its inputs' boxes, rounded outward.

Source: Gowal et al., On the Effectiveness of Interval Bound Propagation for Training Verifiably Robust Models,
arXiv 1810.12715, section 3.1 (centre and radius through an affine map).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.activations import image
from verifiable_relu.bounds.operators import Operator, Operators, prepared
from verifiable_relu.bounds.tuning import TUNING, Tuning
from verifiable_relu.bounds.types import Bounds
from verifiable_relu.errors import InputError
from verifiable_relu.network.dispatch import Refusal, Table
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
    Reshape,
    Scale,
)
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
    low = torch.where(low > lower, torch.nextafter(low, torch.full_like(low, -torch.inf)), low)
    high = torch.where(high < upper, torch.nextafter(high, torch.full_like(high, torch.inf)), high)
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


IMAGES: Table[Callable[[Any, Sequence[Bounds], Any], Bounds]] = Table(
    "interval arithmetic",
    {
        Input: Refusal("the input's box is given"),
        Affine: _of_affine,
        Activation: _activation_image,
        Add: _sum_image,
        Product: _product_image,
        MatMul: _matmul_image,
        Reshape: _moved_image,
        Permute: _moved_image,
    },
)
"""The box of a node's value, (batch, *shape): of the node, its inputs' boxes, and an affine map's operator."""


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
    return IMAGES[node](node, boxes, operators.find(index))
