"""Interval bound propagation: each node's box from its inputs' boxes, rounded outward.

Source: Gowal et al., On the Effectiveness of Interval Bound Propagation for Training Verifiably Robust Models,
arXiv 1810.12715, section 3.1 (centre and radius through an affine map).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds import rounding
from verifiable_relu.bounds.activations import image
from verifiable_relu.bounds.types import Bounds
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Add, Affine, Conv2d, Linear, Node, Permute, Reshape, Scale, kept
from verifiable_relu.spec.property import Property

_MANY = 4
"""From so many samples on sums in float32 are faster."""

_LARGE = 1 << 21
"""So many products a linear map has to have for that."""

_SINGLE = 512
"""Up to so many terms a radius may be summed in float32: that widens it by about 1e-5."""

_MOST = 1 << 22
"""Of more inputs float32 says little about their sum."""

_SHARE = 8e-5
"""By so much a radius may grow for the sake of its centre in float32: on average over a sample's inputs."""

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
    node: Affine,
    box: Bounds,
    most: Tensor | None = None,
    about: tuple[Tensor, Tensor] | None = None,
    single: bool | None = None,
) -> Bounds:
    """The box of W·x + b over a box of x, shaped (batch, *shape).

    Args:
        node: the affine map.
        box: of x.
        most: (batch,) ``largest`` of the box, if known.
        about: the box's centre, and W·x + b there, if known.
        single: whether sums may be in float32 (``rounding.single``), if known.
    """
    if isinstance(node, Scale):
        return _scaled(node, box, largest(box) if most is None else most)
    center, radius = rounding.ball(box, None if about is None else about[0])
    middle, terms = None if about is None else about[1], _single_terms(node, radius, single)
    if terms:
        radius = radius.float()
    if terms and middle is None:
        assert isinstance(node, Conv2d | Linear)
        narrow = center.float()
        size = narrow.abs()
        sums = size.flatten(1).sum(1), radius.flatten(1).sum(1)
        if _bearable(node, *sums):
            middle = node.linear(narrow, single=True).add_(kept(node, "_offset", node.offset))
            radius = rounding.interval_single(size, radius, node.single_terms[0])
            # Beside sums in float32 it does not count that this may be far too large.
            most = rounding.reach_single(*sums, size[0].numel()) if most is None else most
    if middle is None:
        middle = node.forward(center)
    growth, extra = rounding.interval_affine(node, largest(box) if most is None else most, terms)
    spread = torch.add(extra, node.absolute(radius, terms > 0), alpha=growth)
    return Bounds(middle - spread, spread.add_(middle))


def _scaled(node: Scale, box: Bounds, most: Tensor) -> Bounds:
    """The box of s·x + b, element by element: its ends are those of the ends."""
    offset = kept(node, "_offset", node.offset)
    _, error = rounding.interval_affine(node, most)
    low, high = offset - error, offset + error
    if bool(kept(node, "_increasing", lambda: (node.scale >= 0).all())):
        return Bounds(torch.addcmul(low, node.scale, box.lower), torch.addcmul(high, node.scale, box.upper))
    ends = node.scale * box.lower, node.scale * box.upper
    return Bounds(torch.minimum(*ends) + low, torch.maximum(*ends) + high)


def _single_terms(node: Affine, radius: Tensor, single: bool | None = None) -> int:
    """How many products are summed in float32 for |W|·radius, 0 where they are in float64."""
    if not isinstance(node, Conv2d | Linear) or len(radius) < _MANY or max(node.single_terms) > _SINGLE:
        return 0
    large = isinstance(node, Conv2d) or len(radius) * node.weight.numel() >= _LARGE
    if not large or not node.single or radius[0].numel() > _MOST:
        return 0
    return node.single_terms[1] if (rounding.single(radius) if single is None else single) else 0


def _bearable(node: Conv2d | Linear, size: Tensor, radius: Tensor) -> bool:
    """Whether sums in float32 for W·center, too, widen no sample's bounds by more than a small share, nor overflow.

    Args:
        node: the affine map.
        size: (batch,) the sum of |center|.
        radius: (batch,) that of the radius.
    """
    most = float(kept(node, "_largest_sum", lambda: node.row_sums.amax().clamp(min=1)))
    part = rounding.share_single(node.single_terms[0])
    return bool((size * part <= (radius * _SHARE).clamp_(max=part * _HUGE / most)).all())


def node_image(node: Node, boxes: Sequence[Bounds]) -> Bounds:
    """The box of one node's value over boxes of its inputs.

    Raises:
        UnsupportedError: for an operator without an interval image.
    """
    match node:
        case Affine():
            return affine_image(node, boxes[0])
        case Activation():
            return rounding.interval_activation(node, image(node, boxes[0]))
        case Add():
            total = Bounds(boxes[0].lower + boxes[1].lower, boxes[0].upper + boxes[1].upper)
            error = rounding.interval_sum(largest(total)).reshape(-1, *[1] * len(node.shape))
            return Bounds(total.lower - error, total.upper + error)
        case Reshape() | Permute():
            return Bounds(node.forward(boxes[0].lower), node.forward(boxes[0].upper))
    raise UnsupportedError("no interval image is known", place=f"node '{node.name}' ({node.op})")


def intersect(first: Bounds, second: Bounds) -> Bounds:
    """Both bounds at once; NaN in either stays NaN, so that nothing is ever proved from it."""
    return Bounds(torch.maximum(first.lower, second.lower), torch.minimum(first.upper, second.upper))


def interval_bounds(network: Network, box: Bounds, known: Mapping[int, Bounds] | None = None) -> list[Bounds]:
    """Bounds of every node's value, in node order.

    Args:
        network: the network, in the dtype and on the device of ``box``.
        box: the inputs, shaped (batch, *input_shape).
        known: bounds of some activation nodes' *inputs*, by activation node index, to be used as well.
    """
    bounds: list[Bounds] = [box]
    for index, node in enumerate(network.nodes[1:], start=1):
        boxes = [bounds[i] for i in node.inputs]
        if known and index in known:
            boxes = [intersect(boxes[0], known[index])]
        bounds.append(node_image(node, boxes))
    return bounds
