"""Adding nodes one by one with their shapes worked out and checked: what both readers are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from verifiable_relu.errors import InputError
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Conv2d,
    Input,
    Linear,
    MatMul,
    Node,
    Permute,
    Product,
    Reshape,
    Scale,
    Shape,
    Sparse,
)
from verifiable_relu.network.simplify import live
from verifiable_relu.readers.derived import quotient, share


class Builder:
    """A network under construction. Every method that adds a node returns its index."""

    def __init__(self, input_shape: Shape, name: str = "input", device: torch.device | str = "cpu") -> None:
        self.device = device
        self.nodes: list[Node] = [Input(name=name, inputs=(), shape=tuple(input_shape))]

    def shape(self, index: int) -> Shape:
        """The shape of one sample at a node."""
        return self.nodes[index].shape

    def size(self, index: int) -> int:
        """How many numbers one sample has at a node."""
        return self.nodes[index].size

    def append(self, node: Node) -> int:
        """Add a node as it is."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def linear(self, x: int, weight: Tensor, bias: Tensor | None, name: str, error: float = 0.0) -> int:
        """x·weightᵀ + bias over the last axis; ``weight`` (out, in).

        Raises:
            InputError: if the shapes do not fit.
        """
        shape = self.shape(x)
        if not shape or weight.ndim != 2 or weight.shape[1] != shape[-1]:
            raise InputError(f"a weight of shape {tuple(weight.shape)} (outputs, inputs) does not fit inputs {shape}")
        if bias is None:
            bias = weight.new_zeros(weight.shape[0])
        bias = _expanded(bias, (weight.shape[0],), "the bias")
        shape = (*shape[:-1], weight.shape[0])
        return self.append(Linear(name=name, inputs=(x,), shape=shape, weight=weight, bias=bias, weight_error=error))

    def conv2d(
        self,
        x: int,
        weight: Tensor,
        bias: Tensor | None,
        name: str,
        *,
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int, int, int] = (0, 0, 0, 0),
        dilation: tuple[int, int] = (1, 1),
        groups: int = 1,
        error: float = 0.0,
    ) -> int:
        """A convolution of (channels, height, width); ``padding`` is (top, left, bottom, right).

        Raises:
            InputError: if the shapes do not fit.
        """
        shape = self.shape(x)
        if len(shape) != 3 or weight.ndim != 4 or weight.shape[1] * groups != shape[0] or weight.shape[0] % groups:
            raise InputError(f"a kernel of shape {tuple(weight.shape)} in {groups} groups does not fit inputs {shape}")
        if min(*stride, *dilation) < 1 or min(padding) < 0:
            raise InputError(f"strides {stride}, pads {padding}, dilations {dilation}")
        top, left, bottom, right = padding
        size = tuple(
            (length - d * (kernel - 1) - 1) // s + 1
            for length, kernel, s, d in zip(
                (shape[1] + top + bottom, shape[2] + left + right), weight.shape[2:], stride, dilation, strict=True
            )
        )
        if min(size) < 1:
            raise InputError(f"a kernel of shape {tuple(weight.shape)} is larger than the padded inputs {shape}")
        if bias is None:
            bias = weight.new_zeros(weight.shape[0])
        return self.append(
            Conv2d(
                name=name,
                inputs=(x,),
                shape=(weight.shape[0], *size),
                weight=weight,
                bias=_expanded(bias, (weight.shape[0],), "the bias"),
                stride=stride,
                padding=padding,
                dilation=dilation,
                groups=groups,
                weight_error=error,
            )
        )

    def average_pool(
        self, x: int, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int, int, int], name: str
    ) -> int:
        """The mean over each kernel, zeros of the padding counted, as one convolution per channel.

        Raises:
            InputError: if the shapes do not fit.
        """
        number, error = share(math.prod(kernel))
        weight = number.to(self.device).repeat((self.shape(x) or (0,))[0], 1, *kernel)
        return self.conv2d(x, weight, None, name, stride=stride, padding=padding, groups=len(weight), error=error)

    def scale(
        self,
        x: int,
        name: str,
        *,
        center: Tensor | None = None,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        error: float = 0.0,
    ) -> int:
        """scale·(x − center) + shift, each broadcast to the shape of x.

        Raises:
            InputError: if a shape does not fit.
        """
        shape = self.shape(x)
        given = next(t for t in (center, scale, shift) if t is not None)
        parts = {"center": center, "scale": scale, "shift": shift}
        for key, value in parts.items():
            if value is None:
                parts[key] = given.new_full((), 1.0 if key == "scale" else 0.0)
            elif not _broadcasts(value.shape, shape):
                raise InputError(f"a constant of shape {tuple(value.shape)} does not broadcast to {shape}")
        return self.append(Scale(name=name, inputs=(x,), shape=shape, weight_error=error, **parts))  # type: ignore[arg-type]

    def quotient(self, x: int, name: str, by: Tensor) -> int:
        """x/by, ``by`` being broadcastable to the shape of x.

        Raises:
            InputError: for a division by zero.
            UnsupportedError: if a reciprocal is beyond float64's normal range.
        """
        factor, error = quotient(1.0, by)
        index = self.scale(x, name, scale=factor, error=error)
        made = self.nodes[index]
        assert isinstance(made, Scale)
        self.nodes[index] = replace(made, divisor=by)
        return index

    def sparse(
        self,
        x: int,
        index: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shape: Shape,
        name: str,
        error: float = 0.0,
    ) -> int:
        """Σ_k weight[i, k]·x[index[i, k]] + bias[i], in row-major order; ``index`` and ``weight`` (outputs, terms).

        Raises:
            InputError: if the shapes do not fit, or an index is none of x.
        """
        size, outputs = self.size(x), math.prod(shape)
        if index.shape != weight.shape or index.ndim != 2 or len(index) != outputs:
            raise InputError(f"indices {tuple(index.shape)} and weights {tuple(weight.shape)} for outputs {shape}")
        if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < size):
            raise InputError(f"an index beyond the {size} inputs")
        if bias is None:
            bias = weight.new_zeros(outputs)
        return self.append(
            Sparse(
                name=name,
                inputs=(x,),
                shape=tuple(shape),
                index=index,
                weight=weight,
                bias=_expanded(bias, (outputs,), "the bias"),
                weight_error=error,
            )
        )

    def add(self, x: int, y: int, name: str) -> int:
        """x + y.

        Raises:
            InputError: if their shapes differ.
        """
        if self.shape(x) != self.shape(y):
            raise InputError(f"adds shapes {self.shape(x)} and {self.shape(y)}")
        return self.append(Add(name=name, inputs=(x, y), shape=self.shape(x)))

    def product(self, x: int, y: int, name: str) -> int:
        """x·y, element by element.

        Raises:
            InputError: if their shapes differ.
        """
        if self.shape(x) != self.shape(y):
            raise InputError(f"multiplies shapes {self.shape(x)} and {self.shape(y)}")
        return self.append(Product(name=name, inputs=(x, y), shape=self.shape(x)))

    def matmul(self, x: int, y: int, name: str) -> int:
        """The products of the matrices (…, n, k) of x and (…, k, m) of y.

        Raises:
            InputError: if the shapes do not fit; leading axes must be the same.
        """
        left, right = self.shape(x), self.shape(y)
        if min(len(left), len(right)) < 2 or left[:-2] != right[:-2] or left[-1] != right[-2]:
            raise InputError(f"multiplies matrices of shapes {left} and {right}")
        return self.append(MatMul(name=name, inputs=(x, y), shape=(*left[:-1], right[-1]), inner=left[-1]))

    def reshape(self, x: int, shape: Shape, name: str) -> int:
        """The same numbers under another shape; x itself if it has that shape.

        Raises:
            InputError: if the number of elements changes.
        """
        if tuple(shape) == self.shape(x):
            return x
        if math.prod(shape) != math.prod(self.shape(x)):
            raise InputError(f"reshapes {self.shape(x)} to {tuple(shape)}")
        return self.append(Reshape(name=name, inputs=(x,), shape=tuple(shape)))

    def permute(self, x: int, axes: tuple[int, ...], name: str) -> int:
        """Axes reordered; x itself if they stay.

        Raises:
            InputError: if ``axes`` is no permutation of the axes of x.
        """
        shape = self.shape(x)
        if sorted(axes) != list(range(len(shape))):
            raise InputError(f"axes {axes} of shape {shape}")
        if list(axes) == sorted(axes):
            return x
        return self.append(Permute(name=name, inputs=(x,), shape=tuple(shape[a] for a in axes), axes=tuple(axes)))

    def activation(self, x: int, kind: type[Activation], name: str, **parameters: Tensor) -> int:
        """An activation of the given type; its parameters are broadcast to the shape of x.

        Raises:
            InputError: if a parameter's shape does not fit.
        """
        for value in parameters.values():
            if not _broadcasts(value.shape, self.shape(x)):
                raise InputError(f"a constant of shape {tuple(value.shape)} does not broadcast to {self.shape(x)}")
        return self.append(kind(name=name, inputs=(x,), shape=self.shape(x), **parameters))

    def network(self, output: int, *, name: str) -> Network:
        """The finished network with the node ``output`` as its last, without the nodes that it does not need.

        Raises:
            InputError: if a parameter is not finite.
        """
        return as_network(self.nodes, output, name=name)


def as_network(
    nodes: Sequence[Node],
    output: int,
    *,
    name: str,
    onnx: bytes | None = None,
    batched: bool = True,
    ports: Mapping[str, Shape] | None = None,
    mended: Sequence[str] = (),
) -> Network:
    """The network of some nodes with the node ``output`` as its last, without those that it does not need.

    Args:
        nodes: in topological order, the input first.
        output: the index of the output; where it is the input itself, a factor of 1 follows.
        name: of the network.
        onnx: the bytes of the file that the nodes were read from.
        batched: whether that file has a batch axis.
        ports, mended: as ``Network`` has them.

    Raises:
        InputError: if a parameter is not finite.
    """
    kept, last = live(nodes, output)
    if last == 0:
        one = torch.ones(())
        zero = torch.zeros(())
        kept.append(Scale(name="output", inputs=(0,), shape=kept[0].shape, center=zero, scale=one, shift=zero))
    # A number without axes becomes a vector of one: bounds have every value's axes after that of the samples.
    kept = [node if node.shape else replace(node, shape=(1,)) for node in kept]
    return Network(tuple(kept), onnx=onnx, name=name, batched=batched, ports=ports or {}, mended=tuple(mended))


def _broadcasts(shape: Shape, target: Shape) -> bool:
    """Whether a tensor broadcasts to ``target`` without enlarging it."""
    return len(shape) <= len(target) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(target), strict=False)
    )


def _expanded(value: Tensor, shape: Shape, what: str) -> Tensor:
    """``value`` broadcast to ``shape``."""
    while value.ndim > len(shape) and value.shape[0] == 1:
        value = value[0]
    if not _broadcasts(value.shape, shape):
        raise InputError(f"{what} of shape {tuple(value.shape)} where {shape} is expected")
    return value.expand(shape)
