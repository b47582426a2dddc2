"""Rows of coefficients that are zero outside a small window: what a neuron of a convolution sees.

A neuron of a convolution depends on a patch of its input, that on a larger patch before, and so on. Pulling back whole
images of coefficients, nearly all zeros, is most of CROWN's work in a convolutional network; windows are all of the
same size, and only their position differs from row to row. (The idea is that of the patches mode in Xu et al., arXiv
2002.12920; the windows here lie on the grid of the neurons that they started from.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.bounds.operators import ConvolutionOperator
from verifiable_relu.bounds.operators.cells import framed
from verifiable_relu.bounds.tuning import TUNING, Tuning
from verifiable_relu.network.nodes import Conv2d, Shape


@dataclass(frozen=True)
class Grid:
    """Where windows lie in a node of shape (channels, height, width).

    The window of grid point (i, j) begins at row i·stride[0] − offset[0] and has size[0] rows; columns likewise.
    Windows may reach beyond the edges; entries there belong to padding and stand for nothing.
    """

    points: tuple[int, int]
    size: tuple[int, int]
    stride: tuple[int, int]
    offset: tuple[int, int]

    def before(self, node: Conv2d) -> Grid:
        """The grid in the input of a convolution whose output this one lies in."""
        size = tuple((n - 1) * s + k for n, s, k in zip(self.size, node.stride, node.weight.shape[2:], strict=True))
        stride = tuple(n * s for n, s in zip(self.stride, node.stride, strict=True))
        offset = tuple(n * s + p for n, s, p in zip(self.offset, node.stride, node.padding[:2], strict=True))
        return Grid(self.points, size, stride, offset)  # type: ignore[arg-type]

    def cells_before(self, operator: ConvolutionOperator) -> Grid:
        """The grid, in cells of one stride of a convolution's input, of the cells that windows of its output see.

        A cell is counted as an output: the cells that output (y, x) sees begin at cell (y, x).
        """
        _, height, width = operator.cells_shape(self.size)
        return replace(self, size=(height, width))

    def table(self, values: Tensor) -> Tensor:
        """The windows of values (batch, channels, height, width): (batch·points, channels, *size), 0 beyond edges."""
        return self.views(values).reshape(-1, values.shape[1], *self.size)

    def views(self, values: Tensor) -> Tensor:
        """The same as (batch, *points, channels, *size), not copied."""
        margins = []
        for axis in (1, 0):
            reach = (self.points[axis] - 1) * self.stride[axis] + self.size[axis] - self.offset[axis]
            margins += [self.offset[axis], reach - values.shape[2 + axis]]
        # Windows may begin after the image ends, or end before it begins.
        rows = framed(values, margins).unfold(2, self.size[0], self.stride[0])
        return rows.unfold(3, self.size[1], self.stride[1]).permute(0, 2, 3, 1, 4, 5)


@dataclass(frozen=True)
class Window:
    """Rows of coefficients of a node, given in their windows.

    Attributes:
        values: (rows, channels, *grid.size).
        point: (rows,) the number of each row's grid point, in row-major order.
        grid: where the windows lie.
        clean: whether the values beyond the edges are known to be zero.
        tuning: when windows are copied in turn, and when a convolution's adjoint on windows is one matrix.
    """

    values: Tensor
    point: Tensor
    grid: Grid
    clean: bool = False
    tuning: Tuning = TUNING

    def __len__(self) -> int:
        return len(self.values)

    def of(self, images: Tensor, grid: Grid | None = None) -> Tensor:
        """What lies in each row's window, or in that of another grid with as many points.

        ``images`` (groups, channels, height, width), of the groups that rows come in.
        """
        grid, (down, right), each = grid or self.grid, self.grid.points, len(self) // len(images)
        group = torch.arange(len(images), device=images.device).repeat_interleave(each)
        if down * right <= self.tuning.window_table_rows * each:
            return grid.table(images).index_select(0, group * (down * right) + self.point)
        return grid.views(images)[group, self.point.div(right, rounding_mode="floor"), self.point % right]

    def before(self, operator: ConvolutionOperator) -> Window:
        """Pulled back through a plain convolution."""
        weight, grid = operator.node.weight, self.grid.before(operator.node)
        if self.values.dtype != weight.dtype:
            values = operator.transposed(self.values, grid.size)
        elif self.grid.size == (1, 1):
            values = (self.values.flatten(1) @ weight.flatten(1)).unflatten(1, weight.shape[1:])
        elif (matrix := _matrix(operator, self.grid, self.tuning)) is not None:
            values = (self.values.flatten(1) @ matrix).unflatten(1, (-1, *grid.size))
        else:
            values = operator.transposed(self.values, grid.size)
        return Window(values, self.point, grid, tuning=self.tuning)

    def float(self) -> Window:
        """In float32."""
        return self if self.values.dtype == torch.float32 else replace(self, values=self.values.float())

    def plus(self, other: Window) -> Window | None:
        """The sum, in windows that cover both; None where the grids do not go together."""
        ours, theirs = self.grid, other.grid
        if (ours.points, ours.stride) != (theirs.points, theirs.stride):
            return None
        pairs = [*zip(ours.offset, ours.size, theirs.offset, theirs.size, strict=True)]
        offset = tuple(max(a, b) for a, _, b, _ in pairs)
        size = tuple(most + max(n - a, m - b) for most, (a, n, b, m) in zip(offset, pairs, strict=True))
        grid = Grid(ours.points, size, ours.stride, offset)  # type: ignore[arg-type]
        values = self._within(grid) + other._within(grid)
        return Window(values, self.point, grid, self.clean and other.clean, self.tuning)

    def _within(self, grid: Grid) -> Tensor:
        """The values in larger windows, zero where they had none."""
        margins = []
        for axis in (1, 0):
            before = grid.offset[axis] - self.grid.offset[axis]
            margins += [before, grid.size[axis] - self.grid.size[axis] - before]
        return F.pad(self.values, margins)

    def dense(self, shape: Shape) -> Tensor:
        """The rows as whole coefficients (rows, *shape)."""
        channels, height, width = shape
        (rows, columns), (down, right) = self.grid.size, self.grid.stride
        top = self.point.div(self.grid.points[1], rounding_mode="floor") * down - self.grid.offset[0]
        left = self.point % self.grid.points[1] * right - self.grid.offset[1]
        # A margin of one takes all that lies beyond the edges.
        canvas = self.values.new_zeros(len(self.values), channels, height + 2, width + 2)
        y = (top[:, None] + torch.arange(rows, device=top.device)).clamp(-1, height)[:, :, None] + 1
        x = (left[:, None] + torch.arange(columns, device=top.device)).clamp(-1, width)[:, None, :] + 1
        at = (y * canvas.shape[3] + x).flatten(1)[:, None].expand(-1, channels, -1)
        whole = canvas.flatten(2).scatter(2, at, self.values.flatten(2)).reshape(canvas.shape)
        return whole[:, :, 1 : 1 + height, 1 : 1 + width]


def _matrix(operator: ConvolutionOperator, grid: Grid, tuning: Tuning) -> Tensor | None:
    """A convolution's adjoint on windows as one matrix, where that is small and not much emptier than the kernel.

    torch's transposed convolution goes row by row in float64; a matrix product does not.
    """
    weight, before = operator.node.weight, grid.before(operator.node)
    inside, outside = math.prod(grid.size), math.prod(before.size)
    out, channels, *kernel = weight.shape
    if outside > tuning.window_matrix_emptiness * math.prod(kernel):
        return None
    if out * inside * channels * outside > tuning.window_matrix_entries:
        return None

    def make() -> Tensor:
        one = torch.eye(out * inside, dtype=weight.dtype, device=weight.device)
        return operator.transposed(one.unflatten(1, (out, *grid.size)), before.size).flatten(1)

    return operator.once(("adjoint on windows", grid.size), make)


def kernels(operator: ConvolutionOperator, neuron: Tensor, sign: Tensor, tuning: Tuning) -> Window:
    """sign·(neurons of a convolution) as rows of its input: kernels in their windows.

    Args:
        operator: the convolution, plain.
        neuron: (rows,) the neurons' numbers, in row-major order.
        sign: (rows,) ±1, in the dtype that the rows are to have.
        tuning: of the windows.
    """
    points = operator.node.shape[1:]
    size = math.prod(points)
    values = operator.weight(sign.dtype).index_select(0, neuron // size).mul_(sign[:, None, None, None])
    grid = Grid(points, (1, 1), (1, 1), (0, 0)).before(operator.node)  # type: ignore[arg-type]
    return Window(values, neuron % size, grid, tuning=tuning)


def windows(shape: Shape, neuron: Tensor, sign: Tensor, tuning: Tuning) -> Window:
    """sign·(neurons of a node) as rows of that node, each in a window of one point.

    Args:
        shape: of the node, (channels, height, width).
        neuron: (rows,) the neurons' numbers, in row-major order.
        sign: (rows,) ±1.
        tuning: of the windows.
    """
    channels, height, width = shape
    channel = neuron.div(height * width, rounding_mode="floor")
    values = sign.new_zeros(len(neuron), channels, 1, 1)
    values[torch.arange(len(neuron), device=neuron.device), channel] = sign[:, None, None]
    grid = Grid((height, width), (1, 1), (1, 1), (0, 0))
    return Window(values, neuron % (height * width), grid, clean=True, tuning=tuning)
