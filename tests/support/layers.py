"""The construction of networks layer by layer, with random parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Conv2d, Input, Linear, Node, Reshape, Shape

Draw = Callable[[torch.Generator, Shape, int], Tensor]
"""A function that draws a tensor of a shape, for neurons with a given number of inputs (1 for a bias and the like)."""


def normal(generator: torch.Generator, shape: Shape, fan: int) -> Tensor:
    """Normal float32 numbers, scaled such that a layer's outputs are as large as its inputs."""
    return torch.randn(shape, generator=generator) / fan**0.5


def of_many_sizes(generator: torch.Generator, shape: Shape, fan: int) -> Tensor:
    """Float32 numbers whose exponents differ widely within one tensor; a tenth of them are zero."""
    values = torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 6 - 4)
    return values.where(torch.rand(shape, generator=generator) > 0.1, 0.0)


class Layers:
    """A network under construction. Its methods append a node, which by default reads the last one, and return self.

    Args:
        shape: the shape of the input, without the batch axis.
        seed: the seed of all parameters.
        draw: draws the parameters.
        dtype: the dtype of all parameters.
    """

    def __init__(self, *shape: int, seed: int = 0, draw: Draw = normal, dtype: torch.dtype = torch.float32) -> None:
        self.nodes: list[Node] = [Input(name="x", inputs=(), shape=shape)]
        self._generator = torch.Generator().manual_seed(seed)
        self._draw, self._dtype = draw, dtype

    @property
    def shape(self) -> Shape:
        """The shape of the last node."""
        return self.nodes[-1].shape

    def numbers(self, *shape: int, fan: int = 1) -> Tensor:
        """Random parameters of a shape."""
        return self._draw(self._generator, shape, fan).to(self._dtype)

    def add(
        self, kind: type[Node], shape: Shape | None = None, inputs: tuple[int, ...] = (), **fields: object
    ) -> Layers:
        """Append a node, by default of the shape of its first input."""
        inputs = inputs or (len(self.nodes) - 1,)
        shape = self.nodes[inputs[0]].shape if shape is None else shape
        self.nodes.append(kind(name=f"n{len(self.nodes)}", inputs=inputs, shape=shape, **fields))  # type: ignore[arg-type]
        return self

    def linear(self, outputs: int) -> Layers:
        """Append a linear map along the last axis."""
        *lead, size = self.shape
        weight = self.numbers(outputs, size, fan=size)
        return self.add(Linear, (*lead, outputs), weight=weight, bias=self.numbers(outputs))

    def conv(
        self,
        outputs: int,
        kernel: tuple[int, int],
        padding: tuple[int, int, int, int] = (0, 0, 0, 0),
        stride: tuple[int, int] = (1, 1),
        dilation: tuple[int, int] = (1, 1),
        groups: int = 1,
    ) -> Layers:
        """Append a convolution; ``padding`` is at the top, left, bottom and right."""
        channels, *size = self.shape
        seen = channels // groups
        found = (
            (n + before + after - d * (k - 1) - 1) // s + 1
            for n, before, after, k, s, d in zip(size, padding[:2], padding[2:], kernel, stride, dilation, strict=True)
        )
        return self.add(
            Conv2d,
            (outputs, *found),
            weight=self.numbers(outputs, seen, *kernel, fan=seen * math.prod(kernel)),
            bias=self.numbers(outputs),
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
        )

    def flatten(self) -> Layers:
        """Append a node that reshapes its input to one axis."""
        return self.add(Reshape, (math.prod(self.shape),))

    def network(self) -> Network:
        """The network of all nodes so far."""
        return Network(tuple(self.nodes))
