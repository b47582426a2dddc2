"""The linear part of affine nodes on numpy arrays of any kind of number: floats, or Python integers.

Written from the operators' definitions and apart from torch, whose arithmetic it serves to check.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.nodes import Affine, Conv2d, Linear


def weight(node: Affine) -> np.ndarray:
    """The stored weight of a Linear or Conv2d node with the bits that it has.

    Raises:
        UnsupportedError: for any other node.
    """
    if not isinstance(node, Linear | Conv2d):
        raise UnsupportedError("has no weight matrix", place=f"node '{node.name}' ({node.op})")
    array: np.ndarray = node.weight.detach().cpu().numpy()
    return array


def bias(node: Linear | Conv2d) -> np.ndarray:
    """The stored bias, broadcastable to the node's shape."""
    array: np.ndarray = node.bias.detach().cpu().numpy()
    return array if isinstance(node, Linear) else array[:, None, None]


def product(node: Linear | Conv2d, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """W·x for one sample x of the node's input shape, ``weights`` standing in for the node's own.

    Returns an array of the node's shape, in the numbers that ``weights`` and ``x`` are made of.
    """
    if isinstance(node, Linear):
        return x @ weights.T
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
