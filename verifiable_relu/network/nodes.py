"""The kinds of node of a network: affine maps, activations, and what moves or adds numbers.

Shapes are those of *one sample*: a node of shape (3, 32, 32) carries tensors of shape (batch, 3, 32, 32).
A node knows the linear algebra of its own operator and nothing about bounds: bound propagation asks affine
nodes for their adjoint and their absolute map, and looks activations up in a table of its own.

Weights keep the bits that the file holds. Where an operator has no exact counterpart (a division by a
constant, a batch normalisation's square root, an average over nine pixels), the node's weights are computed
in float64 and ``weight_error`` bounds their relative error, for whoever accounts for rounding.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Shape = tuple[int, ...]
Made = TypeVar("Made")


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

    def linear(self, x: Tensor, single: bool = False) -> Tensor:
        """W·x for x of shape (batch, *input shape).

        ``single``: with sums in float32, of a node in float64 that allows it.
        """
        raise NotImplementedError

    def absolute(self, x: Tensor, single: bool = False) -> Tensor:
        """|W|·x, as ``linear`` is W·x."""
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

    @cached_property
    def constant(self) -> bool:
        """Whether nobody asks for the gradient of the node's tensors."""
        values = (getattr(self, f.name) for f in fields(self))
        return not any(isinstance(value, Tensor) and value.requires_grad for value in values)

    @property
    def terms(self) -> int:
        """The largest number of products that one output (forward) or one input (adjoint) sums."""
        raise NotImplementedError

    @property
    def row_sums(self) -> Tensor:
        """Upper bounds, up to rounding, of the sums of |W|'s rows; broadcastable to ``shape``."""
        raise NotImplementedError


_SPARSE = 1 / 32
"""Up to this share of weights that are not zero, products with sparse matrices are faster by far."""

_SMALL = 1 << 14
"""Below this number of weights nothing is gained."""

_WIDE = 32
"""From this number of output channels on, another layout is faster."""

_MANY = 16
"""From so many samples on matrix products are faster for a convolution in float64, too."""

_LINE = 96
"""Sums in float32 are of this length at least, one after another: shorter ones take more time, longer ones err more."""

_SHORT = 48
"""The same of products with matrices."""

_DEEP = 16
"""From so many lines on their sums are summed up in two steps."""

_CELL = 8
"""Sums in products of the kernel's blocks are to be so long at least: shorter ones are slow."""

_BLOCKS = 4
"""Products of up to so many blocks that the kernel fills are faster than one product, folded, in float64."""

_COLUMNS = 1 << 22
"""So are all, beyond so many bytes that one product folds: these no longer stay in the cache."""


@dataclass(frozen=True)
class _Sparse:
    """A weight W, Wᵀ and |W|ᵀ in compressed rows: what dense rows are multiplied with."""

    weight: Tensor
    transposed: Tensor
    absolute: Tensor

    @staticmethod
    def of(weight: Tensor) -> _Sparse:
        # torch's own conversion of a dense matrix takes several times as long, and a dense transpose before it.
        rows, columns = (torch.from_numpy(place) for place in np.nonzero(weight.detach().cpu().numpy()))
        rows, columns = rows.to(weight.device), columns.to(weight.device)
        values = weight[rows, columns]
        by_column = columns.argsort(stable=True)
        turned = columns[by_column], rows[by_column], values[by_column], weight.shape[::-1]
        return _Sparse(
            _compressed(rows, columns, values, weight.shape),
            _compressed(*turned),
            _compressed(*turned[:2], turned[2].abs(), turned[3]),
        )


def _compressed(rows: Tensor, columns: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """A matrix in compressed rows, of its entries in row-major order."""
    starts = torch.zeros(shape[0] + 1, dtype=torch.long, device=rows.device)
    starts[1:] = torch.bincount(rows, minlength=shape[0]).cumsum(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support", category=UserWarning)
        return torch.sparse_csr_tensor(starts, columns, values, tuple(shape), check_invariants=False)


def kept(node: Affine, name: str, make: Callable[[], Made]) -> Made:
    """What ``make`` makes of a node's tensors, made once where these are constant."""
    found: Made | None = node.__dict__.get(name)
    if found is None:
        if not node.constant:
            return make()
        # Others than who asks first may want gradients.
        with torch.inference_mode(False):
            found = node.__dict__[name] = make()
    return found


def framed(x: Tensor, margins: Sequence[int]) -> Tensor:
    """``F.pad`` of x: zeros where margins are positive, cuts where they are negative, even into the zeros."""
    for part in ([max(m, 0) for m in margins], [min(m, 0) for m in margins]):
        # Without margins, too, F.pad copies.
        x = torch.constant_pad_nd(x, part) if any(part) else x
    return x


@cache
def folded(size: int, short: bool = False) -> tuple[int, int]:
    """As how many lines of how many numbers so many are summed in float32, so that few errors add up."""
    least = min(size, _SHORT if short else _LINE)
    length = next(n for n in range(least, size + 1) if size % n == 0)
    return size // length, length


@cache
def _halves(lines: int) -> tuple[int, int]:
    """In how many parts of how many each sums of so many lines are summed up, if there are many."""
    first = next(n for n in range(math.isqrt(lines), 0, -1) if lines % n == 0)
    return (first, lines // first) if lines >= _DEEP else (1, lines)


@cache
def _in_step(phase: int, stride: int, first: int, cells: int, length: int) -> tuple[int, int, int]:
    """Of cells of one stride, the first that has its phase in a line that begins at ``first``; where; and how many."""
    start = -((phase - first) // stride)
    place = start * stride + phase - first
    return start, place, max(0, min(cells - start, -(-(length - place) // stride)))


@cache
def _mkldnn() -> Callable[..., Tensor]:
    """The convolution of one library, by name, since another may transform the sums."""
    found: Callable[..., Tensor] = torch.ops.aten.mkldnn_convolution.default
    return found


def _magnitude(node: Linear | Conv2d) -> Tensor:
    """|weight|."""
    return kept(node, "_absolute", node.weight.abs)


def _in_single(node: Linear | Conv2d) -> Tensor:
    """The weight in float32."""
    return kept(node, "_float32", lambda: node.weight.to(torch.float32))


def weight_like(node: Linear | Conv2d, a: Tensor) -> Tensor:
    """The weight in the dtype of ``a``."""
    return node.weight if a.dtype == node.weight.dtype else _in_single(node)


def _is_single(node: Linear | Conv2d) -> bool:
    """Whether the weight's numbers are float32 numbers, and none so small that a library may take it for 0."""

    def make() -> Tensor:
        single = _in_single(node)
        normal = (single == 0) | (single.abs() >= torch.finfo(single.dtype).tiny)
        return ((single.to(node.weight) == node.weight) & normal).all()

    return bool(kept(node, "_is_float32", make))


@dataclass(frozen=True, eq=False, kw_only=True)
class Linear(Affine):
    """y = x·weightᵀ + bias over the last axis. ``weight`` (out, in), ``bias`` (out,)."""

    op = "Linear"
    weight: Tensor
    bias: Tensor
    weight_error: float = 0.0

    def forward(self, *xs: Tensor) -> Tensor:
        if self._sparse is None:
            return F.linear(xs[0], self.weight, self.bias)
        return self.linear(xs[0]) + self.bias

    def linear(self, x: Tensor, single: bool = False) -> Tensor:
        if single:
            return self._in_lines(x, False)
        if self._sparse is None:
            return F.linear(x, self.weight)
        return (x.reshape(-1, x.shape[-1]) @ self._sparse.transposed).reshape(*x.shape[:-1], -1)

    def _in_lines(self, x: Tensor, absolute: bool) -> Tensor:
        """W·x or |W|·x of (batch, in), summed in float32 line by line, and given in the weight's dtype."""
        # Errors count by |x|: that is a radius, or a centre, which is larger.
        lines = folded(x.shape[1], short=not absolute)

        def make() -> Tensor:
            weight = _in_single(self).abs() if absolute else _in_single(self)
            return weight.T.reshape(*lines, -1).contiguous()

        weight = kept(self, f"_in_lines{absolute}", make)
        sums = torch.bmm(x.to(torch.float32).unflatten(1, lines).transpose(0, 1), weight)
        for parts in _halves(lines[0]):
            if parts > 1:
                # A product with ones, which is exact, is faster than a sum over the first axis.
                sums = sums.new_ones(parts) @ sums.reshape(parts, -1)
        return sums.reshape(len(x), -1).to(self.weight.dtype)

    def absolute(self, x: Tensor, single: bool = False) -> Tensor:
        if single:
            return self._in_lines(x, True)
        if self._sparse is None:
            return F.linear(x, _magnitude(self))
        return (x.reshape(-1, x.shape[-1]) @ self._sparse.absolute).reshape(*x.shape[:-1], -1)

    def adjoint(self, a: Tensor, input_shape: Shape) -> Tensor:
        """In the dtype of ``a``: of one in float32, where the network is in float64, the weights are taken so, too."""
        if self._sparse is None:
            return a @ weight_like(self, a)
        return (a.reshape(-1, a.shape[-1]) @ self._sparse.weight).reshape(*a.shape[:-1], -1)

    @cached_property
    def single(self) -> bool:
        """Whether ``adjoint`` may take float32: the weights are the same there, and dense."""
        return self.constant and not self.sparse and len(self.shape) == 1 and _is_single(self)

    @cached_property
    def single_terms(self) -> tuple[int, int]:
        """How many sums a product takes part in, in float32, in ``linear`` and in ``absolute`` with ``single``."""
        short, long = (
            length + sum(_halves(lines)) - 2
            for lines, length in (folded(self.weight.shape[1], s) for s in (True, False))
        )
        return short, long

    @property
    def row_sums(self) -> Tensor:
        return kept(self, "_row_sums", lambda: _magnitude(self).sum(1))

    @property
    def sparse(self) -> bool:
        """Whether products go through sparse matrices."""
        return self._sparse is not None

    @cached_property
    def _sparse(self) -> _Sparse | None:
        """The weight as a sparse matrix, where most of it is zeros and nobody asks for its gradient."""
        if self.weight.numel() < _SMALL or not self.constant:
            return None
        if int(self.weight.count_nonzero()) > _SPARSE * self.weight.numel():
            return None
        return _Sparse.of(self.weight)

    def offset(self) -> Tensor:
        return self.bias

    @property
    def terms(self) -> int:
        return max(self.weight.shape)


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

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        top, left, bottom, right = self.padding
        if weight is self.weight and self._by_blocks(x):
            return self._summed(x, bias)
        if (top, left) == (bottom, right):
            return F.conv2d(x, weight, bias, self.stride, (top, left), self.dilation, self.groups)
        return F.conv2d(F.pad(x, (left, right, top, bottom)), weight, bias, self.stride, 0, self.dilation, self.groups)

    def forward(self, *xs: Tensor) -> Tensor:
        return self._convolve(xs[0], self.weight, self.bias)

    def linear(self, x: Tensor, single: bool = False) -> Tensor:
        return self._direct(x, _in_single(self)) if single else self._convolve(x, self.weight, None)

    def absolute(self, x: Tensor, single: bool = False) -> Tensor:
        if single:
            return self._direct(x, kept(self, "_float32_absolute", lambda: _in_single(self).abs()))
        return self._convolve(x, _magnitude(self), None)

    def _direct(self, x: Tensor, weight: Tensor) -> Tensor:
        """A convolution whose sums, of ``single_terms``, are in float32, and direct (``mkldnn_convolution``)."""
        top, left, bottom, right = self.padding
        if (top, left) != (bottom, right):
            x, top, left = F.pad(x, (left, right, top, bottom)), 0, 0
        narrow = x.to(torch.float32)
        found: Tensor = _mkldnn()(narrow, weight, None, (top, left), self.stride, self.dilation, 1)
        return found.to(self.weight.dtype)

    def adjoint(self, a: Tensor, input_shape: Shape) -> Tensor:
        """In the dtype of ``a`` (``transposed``)."""
        top, left, bottom, right = self.padding
        _, height, width = input_shape
        if self._fast(a):
            return self._from_cells(self.cells(a), (height, width), (top, left))
        full = self.transposed(a, (height + top + bottom, width + left + right))
        return full[:, :, top : top + height, left : left + width].contiguous()

    def transposed(self, a: Tensor, size: tuple[int, int]) -> Tensor:
        """Wᵀ·a on inputs of a size, without padding: (rows, channels, *size) from (rows, out, height, width).

        Of ``a`` in float32, where the network is in float64, the weights are taken in float32 (``single``), too: on a
        CPU that takes a fraction of the time. Each entry sums ``adjoint_terms`` products at most, directly.
        """
        if self._fast(a):
            return self._from_cells(self.cells(a), size)
        reached = [
            (n - 1) * s + d * (k - 1) + 1
            for n, s, d, k in zip(a.shape[2:], self.stride, self.dilation, self.weight.shape[2:], strict=True)
        ]
        beyond = (size[0] - reached[0], size[1] - reached[1])
        return F.conv_transpose2d(a, self.weight, None, self.stride, 0, beyond, self.groups, self.dilation)

    def _fast(self, a: Tensor) -> bool:
        """Whether ``transposed`` goes through ``cells``."""
        if a.dtype != self.weight.dtype:
            return True
        narrow = a.dtype == torch.float32 and a.device.type == "cpu" and not a.requires_grad
        return narrow and self.plain and self.constant

    def cells(self, a: Tensor) -> Tensor:
        """``transposed`` in float32, in cells of one stride: a convolution of ``a`` with the kernel's blocks.

        Output (y, x) reaches the cells (y + i, x + j) by the kernel's blocks (i, j).

        Args:
            a: (rows, out, height, width) in float32.

        Returns:
            (rows, channels · stride, height + blocks − 1, width + blocks − 1), as ``in_cells`` orders them.
        """
        (high, wide), (up, across) = self._blocks, self.stride
        if (up, across) != (1, 1) and self.weight.shape[0] >= _WIDE:
            a = a.contiguous(memory_format=torch.channels_last)

        def make() -> Tensor:
            return self._blocked.permute(3, 2, 0, 1).flip(2, 3).contiguous().to(torch.float32)

        weight = kept(self, "_cells", make)
        if a.dtype == self.weight.dtype:
            return F.conv2d(a, weight, None, (1, 1), (high - 1, wide - 1))
        found: Tensor = _mkldnn()(a, weight, None, (high - 1, wide - 1), (1, 1), (1, 1), 1)
        return found

    def seen_by(self, outputs: Tensor, input_shape: Shape) -> Tensor:
        """How many of some outputs, (rows, *shape) bool, see every input: (rows, 1, height, width) of the input."""
        top, left = self.padding[:2]
        count = outputs.sum(1, keepdim=True, dtype=self.weight.dtype)
        ones = kept(self, "_ones", lambda: self.weight.new_ones(1, 1, *self.weight.shape[2:]))
        seen = F.conv_transpose2d(count, ones, None, self.stride)
        _, height, width = input_shape
        return framed(seen, (-left, left + width - seen.shape[3], -top, top + height - seen.shape[2]))

    def cells_shape(self, size: Shape) -> Shape:
        """The shape of what ``cells`` returns for one row of outputs of a size."""
        (high, wide), (up, across) = self._blocks, self.stride
        return self.weight.shape[1] * up * across, size[0] + high - 1, size[1] + wide - 1

    def in_cells(self, x: Tensor) -> Tensor:
        """Inputs (rows, channels, height, width) in cells, as ``cells`` returns coefficients of them."""
        cells = x.new_zeros(len(x), *self.cells_shape(self.shape[1:]))
        self._fill(cells, x)
        return cells

    def _fill(self, cells: Tensor, x: Tensor) -> None:
        """Put inputs (rows, channels, height, width) in their cells, which are zeros before."""
        top, left = self.padding[:2]
        for part, mine in self._phases(cells, x, (top, left)):
            part.copy_(mine)

    def _from_cells(self, cells: Tensor, size: tuple[int, int], corner: tuple[int, int] = (0, 0)) -> Tensor:
        """Images of a size, from a corner on, whose cells these are; beyond them zeros."""
        shape = len(cells), self.weight.shape[1], *size
        if self.stride == (1, 1) and corner == (0, 0) and cells.shape == shape:
            return cells
        reached = zip(cells.shape[2:], self.stride, corner, size, strict=True)
        inside = all(n * s >= first + length for n, s, first, length in reached)
        image = cells.new_empty(shape) if inside else cells.new_zeros(shape)
        for part, mine in self._phases(cells, image, corner):
            mine.copy_(part)
        return image

    def _phases(self, cells: Tensor, image: Tensor, corner: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
        """The same numbers in cells and in an image that begins at a corner: a place within the cells at a time."""
        (up, across), (down, right), (rows, channels, height, width) = self.stride, cells.shape[2:], image.shape
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

    def _by_blocks(self, x: Tensor) -> bool:
        """Whether ``_summed`` is faster than torch's convolution in float64 on a CPU."""
        if x.dtype != torch.float64 or x.device.type != "cpu" or x.requires_grad or len(x) < _MANY:
            return False
        (_, *points), (_, channels, *kernel) = self.shape, self.weight.shape
        if not self.plain or not self.constant or channels * math.prod(self.stride) < _CELL:
            return False
        whole = all(k % s == 0 for k, s in zip(kernel, self.stride, strict=True))
        columns = x.element_size() * len(x) * channels * math.prod(kernel) * math.prod(points)
        return columns > _COLUMNS or (whole and math.prod(self._blocks) <= _BLOCKS)

    def _summed(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution as a sum of matrix products, one for each block of the kernel, of inputs in cells.

        Output (y, x) is what the kernel's blocks (i, j) make of the cells (y + i, x + j): with as many columns of
        outputs as there are of cells, a block is a product with all cells from a constant distance on.
        """
        (_, wide), (height, width) = self._blocks, self.shape[1:]
        channels, down, right = self.cells_shape((height, width))
        # The last outputs of the last row reach beyond; they are cut off.
        cells = x.new_zeros(len(x), channels, down * right + wide - 1)
        self._fill(cells[:, :, : down * right].unflatten(2, (down, right)), x)
        size = height * right
        blocks = kept(self, "_every_block", lambda: self._blocked.flatten(0, 1).unsqueeze(1).unbind())
        found: Tensor | None = None
        for number, block in enumerate(blocks):
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
        """The weight in blocks of one stride, padded with zeros: (high, wide, out, numbers of a cell)."""
        (high, wide), (up, across) = self._blocks, self.stride
        out, channels, *kernel = self.weight.shape
        padded = F.pad(self.weight, (0, wide * across - kernel[1], 0, high * up - kernel[0]))
        blocks = padded.reshape(out, channels, high, up, wide, across).permute(2, 4, 0, 1, 3, 5)
        return blocks.reshape(high, wide, out, -1).contiguous()

    @cached_property
    def _blocks(self) -> tuple[int, int]:
        """How many strides the kernel is high and wide."""
        high, wide = (-(-k // s) for k, s in zip(self.weight.shape[2:], self.stride, strict=True))
        return high, wide

    @property
    def plain(self) -> bool:
        """Whether every output sees every channel, and all of its window."""
        return self.groups == 1 and self.dilation == (1, 1)

    @cached_property
    def single(self) -> bool:
        """Whether ``transposed`` may take float32: the weights are the same there, and the kernel is a plain one."""
        return self.plain and self.constant and _is_single(self)

    @cached_property
    def single_terms(self) -> tuple[int, int]:
        """How many sums a product takes part in, in float32, in ``linear`` and in ``absolute`` with ``single``."""
        terms = math.prod(self.weight.shape[1:])
        return terms, terms

    @cached_property
    def adjoint_terms(self) -> int:
        """The largest number of products that one entry of the adjoint sums."""
        out, _, *kernel = self.weight.shape
        return out // self.groups * math.prod(-(-k // s) for k, s in zip(kernel, self.stride, strict=True))

    @property
    def row_sums(self) -> Tensor:
        return kept(self, "_row_sums", lambda: _magnitude(self).sum((1, 2, 3))[:, None, None])

    def offset(self) -> Tensor:
        return self.bias.reshape(-1, 1, 1)

    @property
    def terms(self) -> int:
        out, per_group, *kernel = self.weight.shape
        return max(per_group, out // self.groups) * math.prod(kernel)


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

    def linear(self, x: Tensor, single: bool = False) -> Tensor:
        return self.scale * x

    def absolute(self, x: Tensor, single: bool = False) -> Tensor:
        return self.scale.abs() * x

    def adjoint(self, a: Tensor, input_shape: Shape) -> Tensor:
        return a * self.scale

    @property
    def row_sums(self) -> Tensor:
        return self.scale.abs()

    def offset(self) -> Tensor:
        return self.shift - self.scale * self.center

    def offset_magnitude(self) -> Tensor:
        return self.shift.abs() + (self.scale * self.center).abs()

    @property
    def terms(self) -> int:
        return 3


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


PIECEWISE_LINEAR = (Relu, LeakyRelu)
