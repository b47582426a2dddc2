"""Convolutions: in float32 direct sums, in float64 matrix products where these are faster than the library's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.bounds.operators import cells as in_cells
from verifiable_relu.bounds.operators.cells import framed
from verifiable_relu.bounds.operators.operator import Operator, exact_in_float32
from verifiable_relu.bounds.tuning import Tuning
from verifiable_relu.network.nodes import Conv2d, Shape


@cache
def _direct() -> Callable[..., Tensor]:
    """oneDNN's convolution by name, since another library may transform the sums (Winograd, FFT)."""
    found: Callable[..., Tensor] = torch.ops.aten.mkldnn_convolution.default
    return found


class ConvolutionOperator(Operator[Conv2d]):
    """A two-dimensional convolution."""

    def __init__(self, node: Conv2d, tuning: Tuning) -> None:
        super().__init__(node, tuning)
        terms = math.prod(node.weight.shape[1:])
        self.terms32 = terms, terms

    @property
    def plain(self) -> bool:
        """Whether every output sees every channel, and all of its window."""
        return self.node.groups == 1 and self.node.dilation == (1, 1)

    @cached_property
    def fits32(self) -> bool:
        return self.plain and self.constant and exact_in_float32(self.node.weight)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """The kernels in a dtype, (out, in / groups, kh, kw)."""
        return (
            self.node.weight
            if dtype == self.node.weight.dtype
            else self.once(dtype, lambda: self.node.weight.to(dtype))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self._summed(x, self.node.bias) if self.by_blocks(x) else self.node.forward(x)

    def linear(self, x: Tensor) -> Tensor:
        return self._summed(x, None) if self.by_blocks(x) else self.node.linear(x)

    def absolute(self, x: Tensor) -> Tensor:
        return self.node.convolved(x, self.once("absolute", self.node.weight.abs))

    def linear32(self, x: Tensor) -> Tensor:
        return self._in_float32(x, self.weight(torch.float32))

    def absolute32(self, x: Tensor) -> Tensor:
        return self._in_float32(x, self.once("absolute32", self.weight(torch.float32).abs))

    def _in_float32(self, x: Tensor, weight: Tensor) -> Tensor:
        """A convolution with direct sums in float32, in the dtype of the node's weight."""
        top, left, bottom, right = self.node.padding
        if (top, left) != (bottom, right):
            x, top, left = F.pad(x, (left, right, top, bottom)), 0, 0
        found = _direct()(x.to(torch.float32), weight, None, (top, left), self.node.stride, self.node.dilation, 1)
        return found.to(self.node.weight.dtype)

    @cached_property
    def adjoint_terms(self) -> int:
        """The largest number of products that one entry of the adjoint sums."""
        out, _, *kernel = self.node.weight.shape
        return out // self.node.groups * math.prod(-(-k // s) for k, s in zip(kernel, self.node.stride, strict=True))

    def adjoint(self, a: Tensor, input_shape: Shape) -> Tensor:
        if self._through_cells(a):
            return in_cells.image(self.cells(a), input_shape, self.node.stride, self.node.corner)
        return self.node.adjoint(a, input_shape)

    def transposed(self, a: Tensor, size: tuple[int, int]) -> Tensor:
        """Wᵀ·a on inputs of a size that counts the padding, in the dtype of a.

        Each entry directly sums ``adjoint_terms`` products at most.

        Args:
            a: (rows, out, height, width); in float32, where the network is in float64, only if ``fits32``.
            size: of the inputs.

        Returns:
            (rows, channels, *size).
        """
        if self._through_cells(a):
            return in_cells.image(self.cells(a), (self.node.weight.shape[1], *size), self.node.stride)
        return self.node.transposed(a, size)

    def _through_cells(self, a: Tensor) -> bool:
        """Whether the adjoint of ``a`` goes through ``cells``."""
        if a.dtype != self.node.weight.dtype:
            return True
        narrow = a.dtype == torch.float32 and a.device.type == "cpu" and not a.requires_grad
        return narrow and self.plain and self.constant

    def cells(self, a: Tensor) -> Tensor:
        """Wᵀ·a in float32, on inputs in cells of one stride: a convolution of ``a`` with the kernel's blocks.

        Args:
            a: (rows, out, height, width) in float32.

        Returns:
            (rows, channels·stride, height + blocks − 1, width + blocks − 1), as ``image_in_cells`` orders inputs.
        """
        (high, wide), weight = self._blocks, self.node.weight
        if self.node.stride != (1, 1) and weight.shape[0] >= self.tuning.channels_last:
            a = a.contiguous(memory_format=torch.channels_last)
        turned = self.once("cells", lambda: self._blocked.permute(3, 2, 0, 1).flip(2, 3).contiguous().to(torch.float32))
        if a.dtype == weight.dtype:
            return F.conv2d(a, turned, None, (1, 1), (high - 1, wide - 1))
        return _direct()(a, turned, None, (high - 1, wide - 1), (1, 1), (1, 1), 1)

    def cells_shape(self, size: Shape) -> Shape:
        """The shape of what ``cells`` returns for one row of outputs of a size, (height, width)."""
        (high, wide), (up, across) = self._blocks, self.node.stride
        return self.node.weight.shape[1] * up * across, size[0] + high - 1, size[1] + wide - 1

    def image_in_cells(self, x: Tensor) -> Tensor:
        """Inputs (rows, channels, height, width) in cells, as ``cells`` returns coefficients of them."""
        found = x.new_zeros(len(x), *self.cells_shape(self.node.shape[1:]))
        in_cells.fill(found, x, self.node.stride, self.node.corner)
        return found

    def outputs_that_see(self, outputs: Tensor, input_shape: Shape) -> Tensor:
        """How many of some outputs see every pixel of the input.

        Args:
            outputs: (rows, *shape) bool.
            input_shape: (channels, height, width).

        Returns:
            (rows, 1, height, width) of the input.
        """
        top, left = self.node.padding[:2]
        weight = self.node.weight
        count = outputs.sum(1, keepdim=True, dtype=weight.dtype)
        ones = self.once("ones", lambda: weight.new_ones(1, 1, *weight.shape[2:]))
        seen = F.conv_transpose2d(count, ones, None, self.node.stride)
        _, height, width = input_shape
        return framed(seen, [-left, left + width - seen.shape[3], -top, top + height - seen.shape[2]])

    def by_blocks(self, x: Tensor) -> bool:
        """Whether ``_summed`` is faster than torch's convolution in float64 on a CPU."""
        tuning = self.tuning
        if x.dtype != torch.float64 or x.device.type != "cpu" or x.requires_grad or len(x) < tuning.block_samples:
            return False
        (_, *points), (_, channels, *kernel) = self.node.shape, self.node.weight.shape
        if not self.plain or not self.constant or channels * math.prod(self.node.stride) < tuning.block_terms:
            return False
        whole = all(k % s == 0 for k, s in zip(kernel, self.node.stride, strict=True))
        unfolded = x.element_size() * len(x) * channels * math.prod(kernel) * math.prod(points)
        return unfolded > tuning.block_bytes or (whole and math.prod(self._blocks) <= tuning.block_count)

    def _summed(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution as a sum of matrix products, one for each block of the kernel, of inputs in cells.

        With as many columns of outputs as there are of cells, a block is a product with all cells from a constant
        distance on.
        """
        (_, wide), (height, width) = self._blocks, self.node.shape[1:]
        channels, down, right = self.cells_shape((height, width))
        # The last outputs of the last row reach beyond; they are cut off.
        cells = x.new_zeros(len(x), channels, down * right + wide - 1)
        in_cells.fill(cells[:, :, : down * right].unflatten(2, (down, right)), x, self.node.stride, self.node.corner)
        size = height * right
        found: Tensor | None = None
        for number, block in enumerate(self.once("blocks", lambda: self._blocked.flatten(0, 1).unsqueeze(1).unbind())):
            start = number // wide * right + number % wide
            mine, those = block.expand(len(x), -1, -1), cells[:, :, start : start + size]
            if found is not None:
                found.baddbmm_(mine, those)
            elif bias is not None:
                found = torch.baddbmm(bias[:, None], mine, those)
            else:
                found = torch.bmm(mine, those)
        assert found is not None
        return found.unflatten(2, (height, right))[:, :, :, :width]

    @property
    def _blocked(self) -> Tensor:
        """The kernels in blocks of one stride, padded with zeros: (high, wide, out, numbers of a cell)."""
        (high, wide), (up, across) = self._blocks, self.node.stride
        out, channels, *kernel = self.node.weight.shape
        padded = F.pad(self.node.weight, (0, wide * across - kernel[1], 0, high * up - kernel[0]))
        blocks = padded.reshape(out, channels, high, up, wide, across).permute(2, 4, 0, 1, 3, 5)
        return blocks.reshape(high, wide, out, -1).contiguous()

    @cached_property
    def _blocks(self) -> tuple[int, int]:
        """How many strides the kernel is high and wide."""
        high, wide = (-(-k // s) for k, s in zip(self.node.weight.shape[2:], self.node.stride, strict=True))
        return high, wide
