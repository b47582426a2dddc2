"""Products of two computed values: y = x₁∘x₂, linear in each of two inputs while the other stays."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.network.nodes.node import Node, Shape


class Bilinear(Node):
    """A product x₁∘x₂ of two inputs. Subclasses are the kinds of product.

    |x₁∘x₂| ≤ |x₁|∘|x₂| holds element by element, and (x₁ + d₁)∘(x₂ + d₂) = x₁∘x₂ + d₁∘x₂ + x₁∘d₂ + d₁∘d₂.
    """

    @property
    def terms(self) -> int:
        """The largest number of products that one output (forward) or one input (``to_first``, ``to_second``) sums."""
        raise NotImplementedError

    def to_first(self, a: Tensor, second: Tensor) -> Tensor:
        """The rows of x₁ that a·(x₁∘x₂) has, for a constant x₂.

        Args:
            a: (groups, each, *shape).
            second: x₂, (groups or 1, *shape of the second input).

        Returns:
            (groups, each, *shape of the first input).
        """
        raise NotImplementedError

    def to_second(self, a: Tensor, first: Tensor) -> Tensor:
        """The rows of x₂ that a·(x₁∘x₂) has, for a constant x₁ (``to_first``)."""
        raise NotImplementedError

    @property
    def pairs(self) -> Shape:
        """The shape of all products of two numbers that outputs are sums of."""
        raise NotImplementedError

    def paired(self, first: Tensor, second: Tensor) -> Tensor:
        """These products, (batch, *pairs), of x₁ and x₂, (batch, *shape of the input) each."""
        raise NotImplementedError

    def spread(self, a: Tensor) -> Tensor:
        """For each product the number of its output in a, (batch, *shape), broadcastable to (batch, *pairs)."""
        raise NotImplementedError

    def summed(self, products: Tensor) -> Tensor:
        """The outputs, (batch, *shape), that are sums of products (batch, *pairs)."""
        raise NotImplementedError

    def weighed_to_first(self, a: Tensor, weight: Tensor, second: Tensor) -> Tensor:
        """``to_first`` of one row for each of a batch, with a weight for every product, (batch, *pairs)."""
        raise NotImplementedError

    def weighed_to_second(self, a: Tensor, weight: Tensor, first: Tensor) -> Tensor:
        """``to_second`` likewise."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, kw_only=True)
class Product(Bilinear):
    """The product of two nodes of the same shape, element by element."""

    op = "Product"

    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0] * xs[1]

    @property
    def terms(self) -> int:
        return 1

    def to_first(self, a: Tensor, second: Tensor) -> Tensor:
        return a * second.unsqueeze(1)

    def to_second(self, a: Tensor, first: Tensor) -> Tensor:
        return a * first.unsqueeze(1)

    @property
    def pairs(self) -> Shape:
        return self.shape

    def paired(self, first: Tensor, second: Tensor) -> Tensor:
        return first * second

    def spread(self, a: Tensor) -> Tensor:
        return a

    def summed(self, products: Tensor) -> Tensor:
        return products

    def weighed_to_first(self, a: Tensor, weight: Tensor, second: Tensor) -> Tensor:
        return a * weight * second

    def weighed_to_second(self, a: Tensor, weight: Tensor, first: Tensor) -> Tensor:
        return a * weight * first


@dataclass(frozen=True, eq=False, kw_only=True)
class MatMul(Bilinear):
    """The product of two nodes' matrices: (…, n, k) times (…, k, m) is (…, n, m), leading axes being the same.

    ``inner`` is k.
    """

    op = "MatMul"
    inner: int

    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0] @ xs[1]

    @property
    def terms(self) -> int:
        return max(self.inner, *self.shape[-2:])

    def to_first(self, a: Tensor, second: Tensor) -> Tensor:
        return torch.einsum("ge...nm,g...km->ge...nk", a, second)

    def to_second(self, a: Tensor, first: Tensor) -> Tensor:
        return torch.einsum("ge...nm,g...nk->ge...km", a, first)

    @property
    def pairs(self) -> Shape:
        *leading, rows, columns = self.shape
        return *leading, rows, self.inner, columns

    def paired(self, first: Tensor, second: Tensor) -> Tensor:
        return first.unsqueeze(-1) * second.unsqueeze(-3)

    def spread(self, a: Tensor) -> Tensor:
        return a.unsqueeze(-2)

    def summed(self, products: Tensor) -> Tensor:
        return products.sum(-2)

    def weighed_to_first(self, a: Tensor, weight: Tensor, second: Tensor) -> Tensor:
        return torch.einsum("g...nm,g...nkm,g...km->g...nk", a, weight, second)

    def weighed_to_second(self, a: Tensor, weight: Tensor, first: Tensor) -> Tensor:
        return torch.einsum("g...nm,g...nkm,g...nk->g...km", a, weight, first)
