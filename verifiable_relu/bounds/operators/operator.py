"""One affine map made ready for bound propagation."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from verifiable_relu.bounds.tuning import Tuning
from verifiable_relu.network.nodes import Affine, Shape
from verifiable_relu.network.once import Made, Once

Kind = TypeVar("Kind", bound=Affine, covariant=True)


class Operator(Generic[Kind]):
    """The products with W of a node y = W·x + b, and what is derived from W and b, which is made once.

    Attributes:
        node: the affine node; nothing of it is changed.
        terms32: how many additions in float32 a product takes part in, in ``linear32`` and in ``absolute32``.
    """

    terms32: tuple[int, int] = (0, 0)

    def __init__(self, node: Kind, tuning: Tuning) -> None:
        self.node = node
        self.tuning = tuning
        self._once = Once()

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What ``make`` makes of the node's tensors: made once for a key, or each time if a gradient is wanted."""
        return self._once(key, make) if self.constant else make()

    @cached_property
    def constant(self) -> bool:
        """Whether no gradient of the node's tensors is wanted."""
        return not any(isinstance(value, Tensor) and value.requires_grad for value in vars(self.node).values())

    def forward(self, x: Tensor) -> Tensor:
        """W·x + b for x of shape (batch, *input shape)."""
        return self.node.forward(x)

    def linear(self, x: Tensor) -> Tensor:
        """W·x."""
        return self.node.linear(x)

    def absolute(self, x: Tensor) -> Tensor:
        """|W|·x."""
        return self.node.absolute(x)

    def linear32(self, x: Tensor) -> Tensor:
        """W·x with sums in float32, in the dtype of W; only where ``fits32``."""
        raise NotImplementedError

    def forward32(self, x: Tensor) -> Tensor:
        """W·x + b, the sums of W·x in float32, in the dtype of W; only where ``fits32``."""
        return self.linear32(x).add_(self.offset)

    def absolute32(self, x: Tensor) -> Tensor:
        """|W|·x with sums in float32, in the dtype of W; only where ``fits32``."""
        raise NotImplementedError

    def adjoint(self, a: Tensor, input_shape: Shape) -> Tensor:
        """Wᵀ·a for a of shape (rows, *shape), in the dtype of a; returns (rows, *input_shape).

        Where the network is in float64, a may be in float32 if ``fits32``.
        """
        return self.node.adjoint(a, input_shape)

    @property
    def fits32(self) -> bool:
        """Whether sums may be taken in float32: every weight is a float32 number, and sums are direct."""
        return False

    @property
    def offset(self) -> Tensor:
        """b, broadcastable to the node's shape."""
        return self.once("offset", self.node.offset)

    @property
    def offset_magnitude(self) -> Tensor:
        """≥ |b| (``Affine.offset_magnitude``)."""
        return self.once("offset magnitude", self.node.offset_magnitude)

    @property
    def row_sums(self) -> Tensor:
        """The sums of |W|'s rows, up to rounding; broadcastable to the node's shape."""
        return self.once("row sums", self.node.row_sums)


def exact_in_float32(weight: Tensor) -> bool:
    """Whether all numbers are float32 numbers, and none so small that a library may take it for 0."""
    narrow = weight.to(torch.float32)
    normal = (narrow == 0) | (narrow.abs() >= torch.finfo(torch.float32).tiny)
    return bool(((narrow.to(weight) == weight) & normal).all())
