"""The conversion of networks for auto_LiRPA: each kind of node becomes operators of torch that the library knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Add,
    Affine,
    Bilinear,
    Conv2d,
    Gelu,
    Hardened,
    Identity,
    LeakyRelu,
    Linear,
    Node,
    Permute,
    Relu,
    Reshape,
    Scale,
    Sigmoid,
    Smooth,
    Sparse,
    Tanh,
)


def _no_tensors(node: Node) -> dict[str, Tensor]:
    return {}


def _forward(node: Node, held: list[Tensor], *xs: Tensor) -> Tensor:
    return node.forward(*xs)


def _first_size(node: Node, *sizes: Tensor) -> Tensor:
    return sizes[0]


@dataclass(frozen=True)
class Conversion:
    """The conversion of one kind of node, by functions of a node. Tensors of values are shaped (batch, *shape).

    Attributes:
        size: (node, bounds of the absolute values of its inputs …) ↦ the approximate size of the numbers that the
            library sums for the node.
        tensors: node ↦ the constant tensors that the library needs for the node, by name.
        apply: (node, these tensors, values of its inputs …) ↦ the node's value, in operators that the library knows.
        patches: node ↦ whether the library's sparse form of matrices for convolutions ("patches") passes through it.
    """

    size: Callable[..., Tensor] = _first_size
    tensors: Callable[[Any], dict[str, Tensor]] = _no_tensors
    apply: Callable[..., Tensor] = _forward
    patches: Callable[[Any], bool] = lambda node: True


def _affine_size(node: Affine, size: Tensor) -> Tensor:
    return node.absolute(size) + node.offset_magnitude()


def _linear_tensors(node: Linear) -> dict[str, Tensor]:
    if len(node.shape) > 1:
        raise UnsupportedError("auto_LiRPA takes linear maps of vectors", place=node.place)
    return {"weight": node.weight, "bias": node.bias}


def _linear(node: Linear, held: list[Tensor], x: Tensor) -> Tensor:
    return F.linear(x, held[0], held[1])


def _conv2d_tensors(node: Conv2d) -> dict[str, Tensor]:
    """The bias, and the kernel extended by zeros such that equal padding on opposite sides gives the same result.

    Let p₀ and p₁ be the padding before and after the image. With padding p = max(p₀, p₁) on both sides, p − p₀ zeros
    before and p − p₁ zeros after the kernel's entries change neither the windows' products nor the number of windows.
    """
    top, left, bottom, right = node.padding
    if (top, left) == (bottom, right):
        return {"weight": node.weight, "bias": node.bias}
    if node.dilation != (1, 1):
        raise UnsupportedError("auto_LiRPA takes no dilated convolution with unequal padding", place=node.place)
    height, width = max(top, bottom), max(left, right)
    margins = (width - left, width - right, height - top, height - bottom)
    return {"weight": F.pad(node.weight, margins), "bias": node.bias}


def _conv2d(node: Conv2d, held: list[Tensor], x: Tensor) -> Tensor:
    top, left, bottom, right = node.padding
    padding = (max(top, bottom), max(left, right))
    return F.conv2d(x, held[0], held[1], node.stride, padding, node.dilation, node.groups)


def _conv2d_patches(node: Conv2d) -> bool:
    square = all(a == b for a, b in (node.shape[1:], node.stride, node.padding[:2], node.padding[2:]))
    return square and node.dilation == (1, 1) and node.groups == 1


def _by_channel(node: Scale) -> bool:
    """Whether a node scales all pixels of a channel alike, so that it equals a 1×1 convolution."""
    constants = (node.scale, node.offset())
    return len(node.shape) == 3 and all(c.numel() == 1 or c.shape[-2:] == (1, 1) for c in constants)


def _scale_tensors(node: Scale) -> dict[str, Tensor]:
    if not _by_channel(node):
        return {"scale": _full(node, node.scale), "offset": _full(node, node.offset())}
    scale, offset = (c.expand(node.shape[0], 1, 1) for c in (node.scale, node.offset()))
    return {"weight": torch.diag(scale[:, 0, 0])[:, :, None, None], "bias": offset[:, 0, 0].clone()}


def _scale(node: Scale, held: list[Tensor], x: Tensor) -> Tensor:
    return F.conv2d(x, held[0], held[1]) if held[0].ndim > len(node.shape) else x * held[0] + held[1]


def _leaky_relu_tensors(node: LeakyRelu) -> dict[str, Tensor]:
    """The tensors with which LeakyReLU is written as slope·x + (1 − slope)·relu(x).

    For slopes in [0, 1] this form makes no bound looser, and α can be optimised. The library's own LeakyReLU takes only
    scalar slopes below 1.
    """
    return {"slope": _full(node, node.slope), "rest": _full(node, 1 - node.slope)}


def _leaky_relu(node: LeakyRelu, held: list[Tensor], x: Tensor) -> Tensor:
    return x * held[0] + F.relu(x) * held[1]


def _full(node: Node, tensor: Tensor) -> Tensor:
    """A constant of an elementwise operator in the node's own shape; the library does not broadcast all shapes."""
    return tensor.expand(node.shape).clone()


def _reshape(node: Reshape, held: list[Tensor], x: Tensor) -> Tensor:
    return torch.flatten(x, 1) if len(node.shape) == 1 else x.reshape(-1, *node.shape)


def _moved_size(node: Reshape | Permute, size: Tensor) -> Tensor:
    return node.forward(size)


CONVERSIONS: Table[Conversion] = Table(
    "auto_LiRPA",
    {
        Linear: Conversion(_affine_size, _linear_tensors, _linear),
        Conv2d: Conversion(_affine_size, _conv2d_tensors, _conv2d, _conv2d_patches),
        Sparse: Refusal("auto_LiRPA takes no affine map that is given term by term"),
        Scale: Conversion(_affine_size, _scale_tensors, _scale, _by_channel),
        Add: Conversion(lambda node, x, y: x + y, patches=lambda node: len(node.shape) == 3),
        Reshape: Conversion(_moved_size, apply=_reshape, patches=lambda node: len(node.shape) == 1),
        Permute: Conversion(_moved_size, patches=lambda node: False),
        LeakyRelu: Conversion(
            lambda node, x: x * node.slope.abs().clamp(min=1),
            _leaky_relu_tensors,
            _leaky_relu,
            lambda node: False,
        ),
        Relu: Conversion(),
        Identity: Conversion(),
        Bilinear: Refusal("auto_LiRPA's bounds of products of two computed values are not tried here"),
        Smooth: Refusal("auto_LiRPA has no sound bounds of this function, or none that are tried here"),
        Sigmoid: Conversion(lambda node, x: torch.ones_like(x)),
        Tanh: Conversion(),
        Gelu: Conversion(),
        # The node's forward pass is that of ReLU, and a proof for ReLU says nothing of the smooth members of the set.
        Hardened: Refusal("auto_LiRPA takes one network, not a set of networks"),
    },
)
"""The conversion of each kind of node."""


class Graph(nn.Module):
    """A network as a torch module of operators that the library knows, with flat outputs.

    Raises:
        UnsupportedError: if the library does not take a kind of node, or not with the attributes of a node.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.nodes = network.nodes[1:]
        self.held: list[tuple[str, ...]] = []
        for index, node in enumerate(self.nodes):
            tensors = CONVERSIONS[node].tensors(node)
            self.held.append(tuple(f"{name}_{index}" for name in tensors))
            for name, tensor in zip(self.held[-1], tensors.values(), strict=True):
                # The library takes the dtype from a module's parameters, so that constants are parameters too.
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for node, names in zip(self.nodes, self.held, strict=True):
            held = [getattr(self, name) for name in names]
            values.append(CONVERSIONS[node].apply(node, held, *(values[i] for i in node.inputs)))
        return values[-1] if values[-1].ndim == 2 else torch.flatten(values[-1], 1)


def takes_patches(network: Network) -> bool:
    """Whether the library's sparse form of matrices for convolutions ("patches") passes through every node."""
    return all(CONVERSIONS[node].patches(node) for node in network.nodes[1:])


def largest_terms(network: Network, size: Tensor) -> Tensor:
    """The approximate size of the numbers that the library sums for each output, (batch, *output_shape).

    Args:
        network: the network, in the dtype of ``size``.
        size: bounds of the absolute values of the inputs, (batch, *input_shape).
    """
    sizes = [size]
    for node in network.nodes[1:]:
        sizes.append(CONVERSIONS[node].size(node, *(sizes[i] for i in node.inputs)))
    return sizes[-1]
