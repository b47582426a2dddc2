"""The products of affine nodes' weights with numpy arrays of any kind of number: floats, or Python integers.

The functions follow the operators' definitions and do not use torch, because they serve to check what torch computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.nodes import Affine, Conv2d, Linear, Scale

Array = np.ndarray


def array(tensor: Tensor) -> Array:
    """The numbers of a tensor, bit for bit, in the tensor's own dtype."""
    found: Array = tensor.detach().cpu().numpy()
    return found


def bias(node: Linear | Conv2d) -> Array:
    """The stored bias, broadcastable to the node's shape."""
    stored = array(node.bias)
    return stored.reshape(-1, *(1,) * (node.weight.ndim - 2))


def _matrix(node: Linear, weights: Array, x: Array) -> Array:
    return x @ weights.T


def _windows(node: Conv2d, weights: Array, x: Array) -> Array:
    top, left, bottom, right = node.padding
    channels, height, width = x.shape
    # np.pad would fill an object array with 64-bit zeros, which overflow when they meet a long integer.
    padded = np.zeros((channels, top + height + bottom, left + width + right), dtype=x.dtype)
    padded[:, top : top + height, left : left + width] = x
    (rows, columns), (down, across), (stride_down, stride_across) = weights.shape[2:], node.dilation, node.stride
    windows = sliding_window_view(padded, (down * (rows - 1) + 1, across * (columns - 1) + 1), axis=(1, 2))
    windows = windows[:, ::stride_down, ::stride_across, ::down, ::across]
    grouped = windows.reshape(node.groups, -1, *windows.shape[1:])
    kernels = weights.reshape(node.groups, -1, *weights.shape[1:])
    parts = [
        np.moveaxis(patch, 0, 2).reshape(patch.shape[1] * patch.shape[2], -1) @ kernel.reshape(len(kernel), -1).T
        for patch, kernel in zip(grouped, kernels, strict=True)
    ]
    return np.concatenate(parts, axis=1).T.reshape(node.shape)


_PRODUCTS: Table[Callable[[Any, Array, Array], Array]] = Table(
    "the product of weights and values",
    {Linear: _matrix, Conv2d: _windows, Scale: Refusal("has no weight matrix")},
    group=Affine,
)


def product(node: Linear | Conv2d, weights: Array, x: Array) -> Array:
    """The product W·x of weights in a node's layout and one sample; the bias is not added.

    Args:
        node: its kind, stride, padding and groups define the product.
        weights: W in place of ``node.weight`` and of its shape: the weights as integers, say, or their absolute values.
        x: one sample of the node's input shape, in the same kind of number as ``weights``.

    Returns:
        An array of the node's shape, in the same kind of number.
    """
    return _PRODUCTS[node](node, weights, x)
