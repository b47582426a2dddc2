"""Images in cells of one stride: how a convolution with strides becomes one without.

A cell holds the stride[0] × stride[1] neighbouring pixels of every channel, as channels of their own. Output (y, x) of
a convolution without dilation sees the cells (y + i, x + j) through the kernel's blocks (i, j), each as large as the
stride. Cells begin at the first padded pixel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from verifiable_relu.network.nodes import Shape

Pair = tuple[int, int]


@cache
def _in_step(phase: int, stride: int, first: int, cells: int, length: int) -> tuple[int, int, int]:
    """The pixels of one phase of the cells that lie in a line of an image.

    Args:
        phase: which pixel of every cell.
        stride: pixels in a cell.
        first: the pixel, counted from the first cell, at which the line begins.
        cells: how many there are.
        length: of the line.

    Returns:
        The first such cell, the place of its pixel in the line, and how many there are.
    """
    start = -((phase - first) // stride)
    place = start * stride + phase - first
    return start, place, max(0, min(cells - start, -(-(length - place) // stride)))


def _phases(cells: Tensor, image: Tensor, stride: Pair, corner: Pair) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the same numbers in cells and in an image that begins at a corner, one pixel of a cell at a time."""
    (up, across), (down, right), (rows, channels, height, width) = stride, cells.shape[2:], image.shape
    ours, theirs = cells.stride(), image.stride()
    # Slices, axis by axis, would take as long as copying what is in them.
    for i, j in itertools.product(range(up), range(across)):
        y, top, tall = _in_step(i, up, corner[0], down, height)
        x, left, broad = _in_step(j, across, corner[1], right, width)
        size = rows, channels, tall, broad
        start = cells.storage_offset() + (i * across + j) * ours[1] + y * ours[2] + x * ours[3]
        part = cells.as_strided(size, (ours[0], up * across * ours[1], ours[2], ours[3]), start)
        start = image.storage_offset() + top * theirs[2] + left * theirs[3]
        yield part, image.as_strided(size, (theirs[0], theirs[1], up * theirs[2], across * theirs[3]), start)


def fill(cells: Tensor, image: Tensor, stride: Pair, corner: Pair) -> None:
    """Put an image (rows, channels, height, width) into cells (rows, channels·stride, …) that are zeros before."""
    for part, mine in _phases(cells, image, stride, corner):
        part.copy_(mine)


def image(cells: Tensor, shape: Shape, stride: Pair, corner: Pair = (0, 0)) -> Tensor:
    """The image (rows, *shape) that begins at a corner of cells; zeros where the cells end before it.

    Args:
        cells: (rows, channels·stride, height, width).
        shape: (channels, height, width) of the image.
        stride: pixels of a cell.
        corner: the pixel, counted from the first cell, at which the image begins.
    """
    if stride == (1, 1) and corner == (0, 0) and cells.shape[1:] == shape:
        return cells
    reached = zip(cells.shape[2:], stride, corner, shape[1:], strict=True)
    inside = all(n * s >= first + length for n, s, first, length in reached)
    found = cells.new_empty(len(cells), *shape) if inside else cells.new_zeros(len(cells), *shape)
    for part, mine in _phases(cells, found, stride, corner):
        mine.copy_(part)
    return found


def framed(x: Tensor, margins: list[int]) -> Tensor:
    """``F.pad`` of x: zeros where margins are positive, cuts where they are negative, even into the zeros."""
    for part in ([max(m, 0) for m in margins], [min(m, 0) for m in margins]):
        # Without margins, too, F.pad copies.
        x = torch.constant_pad_nd(x, part) if any(part) else x
    return x
