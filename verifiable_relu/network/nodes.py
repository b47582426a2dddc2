"""The kinds of node of a network: affine maps, activations, and what moves or adds numbers.

Shapes are those of *one sample*: a node of shape (3, 32, 32) carries tensors of shape (batch, 3, 32, 32).
A node knows the linear algebra of its own operator and nothing about bounds: bound propagation asks affine
nodes for their adjoint and their absolute map, and looks activations up in a table of its own.

Weights keep the bits that the file holds. Where an operator has no exact counterpart (a division by a
constant, a batch normalisation's square root, an average over nine pixels), the node's weights are computed
in float64 and ``weight_error`` bounds their relative error, for whoever accounts for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """One operator. ``inputs`` are indices of earlier nodes; ``shape`` is the output's, without the batch."""

    op: ClassVar[str]
    name: str
    inputs: tuple[int, ...]
    shape: Shape

    def forward(self, *xs: Tensor) -> Tensor:
        """Apply the operator to tensors shaped (batch, *input shape); returns (batch, *shape)."""
        raise NotImplementedError

    @cached_property
    def size(self) -> int:
        """Number of neurons: the product of ``shape``."""
        return math.prod(self.shape)

    @property
    def place(self) -> str:
        """What to call the node in an error message."""
        return f"node '{self.name}' ({self.op})"

    @property
    def limit(self) -> Node:
        """The operator that ``forward`` runs: the node itself, unless the node stands for a set of operators."""
        return self

    def map_tensors(self, convert: Callable[[Tensor], Tensor]) -> Node:
        """The same node with ``convert`` applied to each of its tensors."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {name: convert(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **changed) if changed else self


@dataclass(frozen=True, eq=False, kw_only=True)
class Input(Node):
    """The network's one input."""

    op = "Input"

    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0]


class Affine(Node):
    """A node y = W·x + b of one input. Subclasses are the ways in which W is stored.

    ``weight_error`` bounds |W_true − W| ≤ weight_error·|W| entry by entry; 0.0 means that the stored
    numbers are the operator's own.
    """

    weight_error: float

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
        return self.offset().abs()

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

    def forward(self, *xs: Tensor) -> Tensor:
        return self.convolved(xs[0], self.weight, self.bias)

    def linear(self, x: Tensor) -> Tensor:
        return self.convolved(x, self.weight)

    def absolute(self, x: Tensor) -> Tensor:
        return self.convolved(x, self.weight.abs())

    def convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The convolution of x, (batch, *input shape), with another weight of the same shape."""
        top, left, bottom, right = self.padding
        if (top, left) == (bottom, right):
            return F.conv2d(x, weight, bias, self.stride, (top, left), self.dilation, self.groups)
        return F.conv2d(F.pad(x, (left, right, top, bottom)), weight, bias, self.stride, 0, self.dilation, self.groups)

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
        return F.conv_transpose2d(a, self.weight, None, self.stride, 0, beyond, self.groups, self.dilation)

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

    Additions and multiplications by constants, normalisation and batch normalisation are all of this form.
    """

    op = "Scale"
    center: Tensor
    scale: Tensor
    shift: Tensor
    weight_error: float = 0.0

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
        return self.shift.abs() + (self.scale * self.center).abs()

    @property
    def terms(self) -> int:
        return 3

    def row_sums(self) -> Tensor:
        return self.scale.abs()


@dataclass(frozen=True, eq=False, kw_only=True)
class Add(Node):
    """The sum of two nodes of the same shape (a residual connection)."""

    op = "Add"

    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0] + xs[1]


@dataclass(frozen=True, eq=False, kw_only=True)
class Reshape(Node):
    """The same numbers in row-major order under another shape (Flatten, Squeeze, Unsqueeze too)."""

    op = "Reshape"

    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0].reshape(xs[0].shape[0], *self.shape)


@dataclass(frozen=True, eq=False, kw_only=True)
class Permute(Node):
    """Axes reordered: output axis i is input axis ``axes[i]``, the batch not counted."""

    op = "Permute"
    axes: tuple[int, ...]

    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0].permute(0, *(axis + 1 for axis in self.axes))

    def adjoint(self, a: Tensor) -> Tensor:
        """The inverse reordering of a, shaped (rows, *shape)."""
        inverse = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return a.permute(0, *(axis + 1 for axis in inverse))


class Activation(Node):
    """An element-wise non-linear node of one input."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Relu(Activation):
    op = "Relu"

    def forward(self, *xs: Tensor) -> Tensor:
        return F.relu(xs[0])


@dataclass(frozen=True, eq=False, kw_only=True)
class LeakyRelu(Activation):
    """max(x, 0) + slope·min(x, 0). ``slope`` is broadcastable to ``shape``: LeakyReLU (scalar) and PReLU."""

    op = "LeakyRelu"
    slope: Tensor

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.where(xs[0] >= 0, xs[0], self.slope * xs[0])


@dataclass(frozen=True, eq=False, kw_only=True)
class Sigmoid(Activation):
    op = "Sigmoid"

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.sigmoid(xs[0])


@dataclass(frozen=True, eq=False, kw_only=True)
class Tanh(Activation):
    op = "Tanh"

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.tanh(xs[0])


@dataclass(frozen=True, eq=False, kw_only=True)
class Gelu(Activation):
    """λ-GELU, f(x; λ) = x·Φ(λx) = GELU(λx)/λ (arXiv 2603.21991); λ = 1 is GELU. ``lam`` is a scalar tensor."""

    op = "Gelu"
    lam: Tensor

    def forward(self, *xs: Tensor) -> Tensor:
        return F.gelu(self.lam * xs[0]) / self.lam


@dataclass(frozen=True, eq=False, kw_only=True)
class Hardened(Activation):
    """ReLU and every λ'-GELU with λ' ≥ ``lam`` at once: a set of networks, of which ``forward`` runs ReLU's.

    x·Φ(λx) never falls as λ grows, so all of them lie between λ-GELU at ``lam`` and ReLU (arXiv 2603.21991). Bounds
    cover the whole set; a counterexample speaks of its limit, the ReLU network (``Network.limit``).
    """

    op = "Hardened"
    lam: Tensor

    def forward(self, *xs: Tensor) -> Tensor:
        return F.relu(xs[0])

    @property
    def limit(self) -> Node:
        return Relu(name=self.name, inputs=self.inputs, shape=self.shape)
