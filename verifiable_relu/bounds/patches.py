"""Rows of coefficients of an image that are zero outside a window (patches mode).

A neuron of a convolution depends on a window of its input, this on a larger window before it, and so on; all windows of
one op have one size and differ only in place. Source: Xu et al., arXiv 2002.12920 (patches mode).

A group of rows has one grid point, so that what its sample says of a window is read once for all of the group. Channels
come last: a window of a vector is copied pixel by pixel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.bounds.rows import Rows, SampleVectors
from verifiable_relu.ir.linear import Convolution, Diagonal, Image

Pair = tuple[int, int]

PATCH_SHARE = 0.5
"""Rows are kept as whole images where a window has more than this part of the image."""


@dataclass(frozen=True)
class PatchGrid:
    """The places of windows: that of grid point (i, j) begins at row i·stride[0] − offset[0] and has size[0] rows.

    The same holds for columns, with index 1. Windows may reach beyond the image; entries there stand for nothing.
    """

    points: Pair
    size: Pair
    stride: Pair
    offset: Pair

    @staticmethod
    def whole(image: Image) -> PatchGrid:
        """Return the grid of one window that covers the whole image."""
        return PatchGrid((1, 1), image[1:], (1, 1), (0, 0))

    def before(self, conv: Convolution) -> PatchGrid:
        """Return the grid in the input of a convolution whose output has this grid."""
        kernel = conv.weight.shape[2:]
        size = tuple(
            (n - 1) * s + d * (k - 1) + 1
            for n, s, d, k in zip(self.size, conv.stride, conv.dilation, kernel, strict=True)
        )
        stride = tuple(n * s for n, s in zip(self.stride, conv.stride, strict=True))
        offset = tuple(n * s + p for n, s, p in zip(self.offset, conv.stride, conv.padding[:2], strict=True))
        return PatchGrid(self.points, (size[0], size[1]), (stride[0], stride[1]), (offset[0], offset[1]))

    def covering(self, other: PatchGrid) -> PatchGrid | None:
        """Return the grid whose windows cover those of both; None if the grids' strides do not match."""
        if (self.points, self.stride) != (other.points, other.stride):
            return None
        pairs = [*zip(self.offset, self.size, other.offset, other.size, strict=True)]
        top, left = (max(a, b) for a, _, b, _ in pairs)
        height, width = (first + max(n - a, m - b) for first, (a, n, b, m) in zip((top, left), pairs, strict=True))
        return PatchGrid(self.points, (height, width), self.stride, (top, left))

    def within(self, image: Image) -> bool:
        """Return True if no window reaches beyond the image."""
        ends = (
            (n - 1) * s - o + k for n, s, o, k in zip(self.points, self.stride, self.offset, self.size, strict=True)
        )
        return max(self.offset) <= 0 and all(end <= n for end, n in zip(ends, image[1:], strict=True))

    def share(self, image: Image) -> float:
        """Return the fraction of the image that a window covers."""
        return math.prod(self.size) / math.prod(image[1:])

    def pixels(self, image: Image, device: torch.device) -> Tensor:
        """Return the numbers of each window's pixels, (points, pixels); the image's size beyond its edges."""
        return _pixels(self, image[1:], device)

    def inside(self, image: Image, like: Tensor) -> Tensor:
        """Return 1 for each pixel within the image and 0 beyond its edges, (points, *size, 1)."""
        mask = (self.pixels(image, like.device) < math.prod(image[1:])).to(like.dtype)
        return mask.view(-1, *self.size, 1)


@cache
def _pixels(grid: PatchGrid, size: Pair, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        axes = []
        for axis in (0, 1):
            first = torch.arange(grid.points[axis], device=device) * grid.stride[axis] - grid.offset[axis]
            axes.append(first[:, None] + torch.arange(grid.size[axis], device=device))
        y, x = axes[0][:, None, :, None], axes[1][None, :, None, :]
        inside = (y >= 0) & (y < size[0]) & (x >= 0) & (x < size[1])
        return torch.where(inside, y * size[1] + x, size[0] * size[1]).flatten(2).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Patches(Rows):
    """Rows of coefficients of an image in their windows.

    Attributes:
        values: (groups, each, *grid.size, channels).
        point: (groups,) the number of each group's grid point, in row-major order.
        grid: the places of windows.
        image: channels, height and width.
        clean: whether values beyond the edges are known to be zero.
    """

    values: Tensor
    point: Tensor
    grid: PatchGrid
    image: Image
    clean: bool = False

    def pick(self, vectors: SampleVectors, sample: Tensor | None) -> tuple[Tensor, ...]:
        pixels = None
        if self.grid != PatchGrid.whole(self.image):
            pixels = self.grid.pixels(self.image, self.point.device).index_select(0, self.point)
        return vectors.windows(pixels, self.grid.size, self.image, sample)

    def replace(self, values: Tensor) -> Patches:
        return replace(self, values=values, clean=True)

    def cleaned(self) -> Patches:
        """Return the rows with zeros beyond the image's edges."""
        if self.clean or self.grid.within(self.image):
            return self
        inside = self.grid.inside(self.image, self.values).index_select(0, self.point)
        return self.replace(self.values * inside.unsqueeze(1))

    def plus(self, other: Rows) -> Rows:
        if not isinstance(other, Patches):
            return super().plus(other)
        grid = self.grid.covering(other.grid)
        if grid is None:
            return self.whole().plus(other.whole())
        values = self._in(grid) + other._in(grid)
        return replace(self, values=values, grid=grid, clean=self.clean and other.clean)

    def _in(self, grid: PatchGrid) -> Tensor:
        """Return the values in larger windows."""
        margins = [0, 0]
        for axis in (1, 0):
            first = grid.offset[axis] - self.grid.offset[axis]
            margins += [first, grid.size[axis] - self.grid.size[axis] - first]
        return F.pad(self.values, margins) if any(margins) else self.values

    def whole(self) -> Patches:
        """Return the rows as whole images."""
        grid = PatchGrid.whole(self.image)
        if self.grid == grid:
            return self
        (channels, height, width), (groups, each) = self.image, self.values.shape[:2]
        if self.grid.points == (1, 1):
            # Cut off what lies beyond the edges, and add what no output sees.
            (down, across), (top, left) = self.grid.size, self.grid.offset
            margins = [0, 0, -left, width - across + left, -top, height - down + top]
            found = F.pad(self.values, margins) if any(margins) else self.values
            return Patches(found, self.point, grid, self.image, clean=True)
        pixels = height * width
        place = self.grid.pixels(self.image, self.values.device).index_select(0, self.point)
        first = torch.arange(groups * each, device=place.device).view(groups, each, 1) * (pixels + 1)
        flat = self.values.reshape(-1, channels)
        canvas = flat.new_zeros(groups * each * (pixels + 1), channels)
        # All that lies beyond the edges goes to one more pixel.
        canvas = canvas.index_copy(0, (first + place.unsqueeze(1)).flatten(), flat).view(groups, each, -1, channels)
        values = canvas[:, :, :-1].unflatten(2, (height, width))
        return Patches(values, torch.zeros_like(self.point), grid, self.image, clean=True)

    def dense(self) -> Tensor:
        return self.whole().values.permute(0, 1, 4, 2, 3).flatten(2)

    def through(self, conv: Convolution) -> Patches:
        """Return A·W for a convolution W, the rows being of its output."""
        rows, grid = self.cleaned(), self.grid.before(conv)
        values = rows.values.flatten(0, 1).permute(0, 3, 1, 2)
        found = transposed(conv, values, grid.size).permute(0, 2, 3, 1).unflatten(0, self.values.shape[:2])
        patches = Patches(found, self.point, grid, conv.in_shape)
        return patches.whole() if grid.points == (1, 1) or grid.share(conv.in_shape) > PATCH_SHARE else patches

    def scaled(self, scale: Diagonal) -> Patches:
        """Return A·W for a diagonal map of the image."""
        rows = self.cleaned()
        (weight,) = self.pick(SampleVectors(scale.weight_in(self.dtype, self.values.device)[None]), None)
        return rows.replace(rows.values * weight)


def transposed(conv: Convolution, a: Tensor, size: Pair) -> Tensor:
    """Return Wᵀ·a, (rows, in, *size), as ``Convolution.transpose_images`` does, for channels that come last in memory.

    In float32 on a CPU a kernel that is a multiple of its stride becomes a convolution without stride whose channels
    are the pixels of one stride: oneDNN takes several times as long for strided transposes. Source: Shi et al., arXiv
    1609.05158. It sums directly.
    """
    s, kernel = conv.stride[0], conv.weight.shape[2:]
    whole = conv.stride == (s, s) and s > 1 and conv.groups == 1 and conv.dilation == (1, 1)
    if a.device.type != "cpu" or a.dtype != torch.float32 or not whole or any(k % s for k in kernel):
        return conv.transpose_images(a, size)
    out, channels = conv.weight.shape[:2]
    high, wide = (k // s for k in kernel)

    def make() -> Tensor:
        blocks = conv.weight.reshape(out, channels, high, s, wide, s).permute(3, 5, 1, 0, 2, 4).flip(4, 5)
        return blocks.reshape(s * s * channels, out, high, wide).to(a)

    cells = F.conv2d(a, conv.cached(("patches", a.dtype, a.device), make), None, 1, (high - 1, wide - 1))
    rows, _, down, across = cells.shape
    image = cells.permute(0, 2, 3, 1).reshape(rows, down, across, s, s, channels).transpose(2, 3)
    image = image.reshape(rows, down * s, across * s, channels)
    missing = (size[0] - down * s, size[1] - across * s)
    return (F.pad(image, (0, 0, 0, missing[1], 0, missing[0])) if any(missing) else image).permute(0, 3, 1, 2)


def kernels(conv: Convolution, neuron: Tensor, sign: Tensor) -> Patches:
    """Return sign·(neurons of a convolution without groups), (groups, each), as rows of its input.

    The neurons of a group lie at one pixel. ``sign`` is in the dtype of the rows.
    """
    points = math.prod(conv.out_shape[1:])
    weight = conv.cached(
        ("kernels", sign.dtype, sign.device), lambda: conv.weight.permute(0, 2, 3, 1).contiguous().to(sign)
    )
    values = weight.index_select(0, neuron.flatten() // points) * sign.reshape(-1, 1, 1, 1)
    grid = PatchGrid(conv.out_shape[1:], (1, 1), (1, 1), (0, 0))
    size = tuple(d * (k - 1) + 1 for d, k in zip(conv.dilation, conv.weight.shape[2:], strict=True))
    assert size == tuple(conv.weight.shape[2:])
    before = grid.before(conv)
    return Patches(values.unflatten(0, neuron.shape), neuron[:, 0] % points, before, conv.in_shape)


def unit_patches(image: Image, neuron: Tensor, sign: Tensor) -> Patches:
    """Return sign·(neurons of an image), (groups, each), as rows of this image, each in a window of one pixel."""
    channels, height, width = image
    values = sign.new_zeros(*neuron.shape, channels)
    values.scatter_(2, (neuron // (height * width)).unsqueeze(2), sign.unsqueeze(2))
    grid = PatchGrid((height, width), (1, 1), (1, 1), (0, 0))
    return Patches(values[:, :, None, None], neuron[:, 0] % (height * width), grid, image, clean=True)
