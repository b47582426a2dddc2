"""Affine maps y = W·x + b: the ways in which W is stored."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.network.nodes.node import Node, Shape


class Affine(Node):
    """A node y = W·x + b of one input. Subclasses are the ways in which W is stored.

    ``weight_error`` bounds |W_true − W| ≤ weight_error·|W| entry by entry, and so of every other stored number, b
    among them; 0.0 means that the stored numbers are the operator's own (``readers.derived``). Where W·x + b is what a
    runtime computes by rounding (``network.onnx.running``), W_true and b_true are other numbers at every x, and
    |b_true − b| ≤ weight_error·(|b| + ``offset_terms``). Of a division the ``divisor`` is exact.
    """

    weight_error: float
    offset_terms: float
    divisor: Tensor | None = None

    def with_error(self, error: float) -> Affine:
        """The node with another ``weight_error``, which leaves nothing exact to divide by."""
        changed: dict[str, Any] = {"weight_error": error}
        return replace(self, **changed if self.divisor is None else {**changed, "divisor": None})

    def linear(self, x: Tensor) -> Tensor:
        """W·x for x of shape (batch, *input shape)."""
        raise NotImplementedError

    def absolute(self, x: Tensor) -> Tensor:
        """|W|·x for x of shape (batch, *input shape)."""
        raise NotImplementedError

    def adjoint(self, a: Tensor, input_shape: Shape) -> Tensor:
        """Wᵀ·a for a of shape (rows, *shape); returns (rows, *input_shape)."""
        raise NotImplementedError

    def offset(self) -> Tensor:
        """The node's value at x = 0: the b of y = W·x + b, broadcastable to ``shape``."""
        raise NotImplementedError

    def offset_magnitude(self) -> Tensor:
        """An upper bound of |b| that also covers every term summed to make b; broadcastable to ``shape``."""
        return self.offset().abs() + self.offset_terms

    @property
    def terms(self) -> int:
        """The largest number of products that one output (forward) or one input (adjoint) sums."""
        raise NotImplementedError

    def row_sums(self) -> Tensor:
        """The sums of |W|'s rows, up to rounding; broadcastable to ``shape``."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, kw_only=True)
class Linear(Affine):
    """y = x·weightᵀ + bias over the last axis. ``weight`` (out, in), ``bias`` (out,)."""

    op = "Linear"
    weight: Tensor
    bias: Tensor
    weight_error: float = 0.0
    offset_terms: float = 0.0

    def forward(self, *xs: Tensor) -> Tensor:
        return F.linear(xs[0], self.weight, self.bias)

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def absolute(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.abs())

    def adjoint(self, a: Tensor, input_shape: Shape) -> Tensor:
        return a @ self.weight

    def offset(self) -> Tensor:
        return self.bias

    @property
    def terms(self) -> int:
        return max(self.weight.shape)

    def row_sums(self) -> Tensor:
        return self.weight.abs().sum(1)


_ENTRIES = 2**24
"""Heuristic: the entries, at most, of the matrices of windows that are made at once; one sample may have more."""


def _by_products(x: Tensor) -> bool:
    """Whether convolutions of x are matrix products: in float64 off the CPU.

    A device's library for convolutions may transform their sums (Winograd, FFT), and does not tell.
    """
    return x.dtype == torch.float64 and x.device.type != "cpu"


@dataclass(frozen=True, eq=False, kw_only=True)
class Conv2d(Affine):
    """Two-dimensional convolution (cross-correlation, as in ONNX and torch).

    ``weight`` (out, in / groups, kh, kw), ``bias`` (out,), ``padding`` (top, left, bottom, right) with zeros.
    """

    op = "Conv2d"
    weight: Tensor
    bias: Tensor
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    weight_error: float = 0.0
    offset_terms: float = 0.0

    def forward(self, *xs: Tensor) -> Tensor:
        return self.convolved(xs[0], self.weight, self.bias)

    def linear(self, x: Tensor) -> Tensor:
        return self.convolved(x, self.weight)

    def absolute(self, x: Tensor) -> Tensor:
        return self.convolved(x, self.weight.abs())

    def convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The convolution of x, (batch, *input shape), with another weight of the same shape."""
        top, left, bottom, right = self.padding
        if _by_products(x):
            return self._products(F.pad(x, (left, right, top, bottom)), weight, bias)
        if (top, left) == (bottom, right):
            return F.conv2d(x, weight, bias, self.stride, (top, left), self.dilation, self.groups)
        return F.conv2d(F.pad(x, (left, right, top, bottom)), weight, bias, self.stride, 0, self.dilation, self.groups)

    def _products(self, padded: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``convolved`` by matrix products."""
        window = self._window
        height, width = (
            (n - d * (k - 1) - 1) // s + 1
            for n, s, d, k in zip(padded.shape[2:], self.stride, self.dilation, window["kernel_size"], strict=True)
        )
        rows, parts = weight.reshape(self.groups, len(weight) // self.groups, -1), []
        for part in padded.split(max(1, _ENTRIES // max(1, rows.shape[0] * rows.shape[2] * height * width))):
            columns = F.unfold(part, **window).reshape(len(part), self.groups, rows.shape[2], -1)
            parts.append((rows @ columns).reshape(len(part), len(weight), height, width))
        found = torch.cat(parts)
        return found if bias is None else found + bias.reshape(-1, 1, 1)

    @property
    def _window(self) -> dict[str, tuple[int, int]]:
        """The window of the kernel, as ``F.unfold`` and ``F.fold`` take it."""
        height, width = self.weight.shape[2:]
        return {"kernel_size": (height, width), "dilation": self.dilation, "stride": self.stride}

    @property
    def corner(self) -> tuple[int, int]:
        """Where the image begins in the padded image: (row, column)."""
        top, left, _, _ = self.padding
        return top, left

    def adjoint(self, a: Tensor, input_shape: Shape) -> Tensor:
        top, left, bottom, right = self.padding
        _, height, width = input_shape
        full = self.transposed(a, (height + top + bottom, width + left + right))
        row, column = self.corner
        return full[:, :, row : row + height, column : column + width].contiguous()

    def transposed(self, a: Tensor, size: tuple[int, int]) -> Tensor:
        """Wᵀ·a on inputs of a size that counts the padding: (rows, channels, *size) from (rows, out, height, width)."""
        reached = [
            (n - 1) * s + d * (k - 1) + 1
            for n, s, d, k in zip(a.shape[2:], self.stride, self.dilation, self.weight.shape[2:], strict=True)
        ]
        beyond = (size[0] - reached[0], size[1] - reached[1])
        if not _by_products(a):
            return F.conv_transpose2d(a, self.weight, None, self.stride, 0, beyond, self.groups, self.dilation)
        columns, parts = self.weight.reshape(self.groups, len(self.weight) // self.groups, -1).transpose(1, 2), []
        entries = columns.shape[0] * columns.shape[1] * math.prod(a.shape[2:])
        for part in a.split(max(1, _ENTRIES // max(1, entries))):
            taken = columns @ part.reshape(len(part), self.groups, columns.shape[2], -1)
            parts.append(F.fold(taken.flatten(1, 2), (reached[0], reached[1]), **self._window))
        return F.pad(torch.cat(parts), (0, beyond[1], 0, beyond[0]))

    def offset(self) -> Tensor:
        return self.bias.reshape(-1, 1, 1)

    @property
    def terms(self) -> int:
        out, per_group, *kernel = self.weight.shape
        return max(per_group, out // self.groups) * math.prod(kernel)

    def row_sums(self) -> Tensor:
        return self.weight.abs().sum((1, 2, 3))[:, None, None]


@dataclass(frozen=True, eq=False, kw_only=True)
class Scale(Affine):
    """y = scale·(x − center) + shift, element by element; each tensor is broadcastable to ``shape``.

    Additions and multiplications by constants, normalisation and batch normalisation are all of this form. A division
    is the product with the rounded reciprocal of its ``divisor``, which is kept for exact evaluation.
    """

    op = "Scale"
    center: Tensor
    scale: Tensor
    shift: Tensor
    weight_error: float = 0.0
    offset_terms: float = 0.0
    divisor: Tensor | None = None

    def forward(self, *xs: Tensor) -> Tensor:
        return self.scale * (xs[0] - self.center) + self.shift

    def linear(self, x: Tensor) -> Tensor:
        return self.scale * x

    def absolute(self, x: Tensor) -> Tensor:
        return self.scale.abs() * x

    def adjoint(self, a: Tensor, input_shape: Shape) -> Tensor:
        return a * self.scale

    def offset(self) -> Tensor:
        return self.shift - self.scale * self.center

    def offset_magnitude(self) -> Tensor:
        return self.shift.abs() + (self.scale * self.center).abs() + self.offset_terms

    @property
    def terms(self) -> int:
        return 3

    def row_sums(self) -> Tensor:
        return self.scale.abs()


@dataclass(frozen=True, eq=False, kw_only=True)
class Sparse(Affine):
    """y[i] = Σ_k weight[i, k]·x[index[i, k]] + bias[i], with x and y numbered in row-major order.

    An affine map whose outputs have few terms each: what selects, repeats, pads or reorders numbers is of this form,
    with one term of weight 1. ``index`` (size, terms) holds whole numbers, ``weight`` is (size, terms), ``bias``
    (size,). An output with fewer terms than others has weights of 0 for the rest.
    """

    op = "Sparse"
    index: Tensor
    weight: Tensor
    bias: Tensor
    weight_error: float = 0.0
    offset_terms: float = 0.0

    def forward(self, *xs: Tensor) -> Tensor:
        return self.linear(xs[0]) + self.offset()

    def linear(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight)

    def absolute(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight.abs())

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        flat, index = x.reshape(x.shape[0], -1), self.index.to(x.device)
        parts = (flat.index_select(1, index[:, k]) * weight[:, k] for k in range(index.shape[1]))
        return sum(parts, x.new_zeros(())).reshape(x.shape[0], *self.shape)

    def adjoint(self, a: Tensor, input_shape: Shape) -> Tensor:
        flat, index = a.reshape(-1, self.size), self.index.to(a.device)
        back = a.new_zeros(len(flat), math.prod(input_shape))
        for k in range(index.shape[1]):
            back.index_add_(1, index[:, k], flat * self.weight[:, k])
        return back.reshape(len(flat), *input_shape)

    def offset(self) -> Tensor:
        return self.bias.reshape(self.shape)

    @cached_property
    def terms(self) -> int:
        used = self.index[(self.weight != 0).to(self.index.device)]
        most = int(torch.bincount(used).max()) if used.numel() else 0
        return max(self.index.shape[1], most)

    @cached_property
    def moves(self) -> bool:
        """Whether every output is a number of x as it is, or a constant, so that nothing is rounded."""
        one = self.weight == 1
        plain = (one & (self.bias == 0)[:, None]) | (self.weight == 0)
        return self.index.shape[1] == 1 and not self.weight_error and bool(plain.all())

    @cached_property
    def differences(self) -> bool:
        """Whether every output is a sum of numbers of x and of their negatives, without a weight that is off."""
        whole = ((self.weight == 0) | (self.weight.abs() == 1)).all() & (self.bias == 0).all()
        return not self.weight_error and bool(whole)

    def row_sums(self) -> Tensor:
        return self.weight.abs().sum(1).reshape(self.shape)
