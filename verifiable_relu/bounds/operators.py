"""Products with the weights of affine maps, as fast as bound propagation needs them.

**Cells.** Images in cells of one stride: how a convolution with strides becomes one without. A cell holds the stride[0]
× stride[1] neighbouring pixels of every channel, as channels of their own. Output (y, x) of a convolution without
dilation sees the cells (y + i, x + j) through the kernel's blocks (i, j), each as large as the stride. Cells begin at
the first padded pixel.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.bounds import sums
from verifiable_relu.bounds.tuning import TUNING, Tuning
from verifiable_relu.network.graph import Made, Network, Once
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Affine,
    Conv2d,
    Curve,
    Extreme,
    Linear,
    Node,
    Permute,
    Reshape,
    Shape,
)
from verifiable_relu.rounding import tiny

Kind = TypeVar("Kind", bound=Affine, covariant=True)


@dataclass(frozen=True)
class OneSign:
    """The rows of a weight that have no numbers of both signs, as bool tensors broadcastable to the node's shape.

    Attributes:
        rising: those without a negative number.
        any: those, and the ones without a positive number.
        all: whether every row is one.
        constant: those without any number but 0.
    """

    rising: Tensor
    any: Tensor
    all: bool
    constant: Tensor


class Operator(Generic[Kind]):
    """The products with W of a node y = W·x + b, and what is derived from W and b, which is made once.

    Attributes:
        node: the affine node; nothing of it is changed.
        terms32: how many additions in float32 a product takes part in, in ``linear32`` and in ``absolute32``.
        careful: whether a function that is not defined everywhere, such as a root, may come after the node: then an end
            of 0 is to be none that is a little below.
    """

    terms32: tuple[int, int] = (0, 0)

    careful = True

    def __init__(self, node: Kind, tuning: Tuning) -> None:
        self.node = node
        self.tuning = tuning
        self._once = Once()

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What ``make`` makes of the node's tensors: made once for a key, or each time if a gradient is wanted."""
        return self._once(key, make) if self.constant else make()

    @cached_property
    def constant(self) -> bool:
        """Whether no gradient of the node's tensors is wanted."""
        return not any(isinstance(value, Tensor) and value.requires_grad for value in vars(self.node).values())

    def forward(self, x: Tensor) -> Tensor:
        """W·x + b for x of shape (batch, *input shape)."""
        return self.node.forward(x)

    def linear(self, x: Tensor) -> Tensor:
        """W·x."""
        return self.node.linear(x)

    def absolute(self, x: Tensor) -> Tensor:
        """|W|·x."""
        return self.node.absolute(x)

    def linear32(self, x: Tensor) -> Tensor:
        """W·x with sums in float32, in the dtype of W; only where ``fits32``."""
        raise NotImplementedError

    def forward32(self, x: Tensor) -> Tensor:
        """W·x + b, the sums of W·x in float32, in the dtype of W; only where ``fits32``."""
        return self.linear32(x).add_(self.offset)

    def absolute32(self, x: Tensor) -> Tensor:
        """|W|·x with sums in float32, in the dtype of W; only where ``fits32``."""
        raise NotImplementedError

    def adjoint(self, a: Tensor, input_shape: Shape) -> Tensor:
        """Wᵀ·a for a of shape (rows, *shape), in the dtype of a; returns (rows, *input_shape).

        Where the network is in float64, a may be in float32 if ``fits32``.
        """
        return self.node.adjoint(a, input_shape)

    @property
    def fits32(self) -> bool:
        """Whether sums may be taken in float32: every weight is a float32 number, and sums are direct."""
        return False

    @property
    def offset(self) -> Tensor:
        """b, broadcastable to the node's shape."""
        return self.once("offset", self.node.offset)

    @property
    def offset_magnitude(self) -> Tensor:
        """≥ |b| (``Affine.offset_magnitude``)."""
        return self.once("offset magnitude", self.node.offset_magnitude)

    @cached_property
    def one_sign(self) -> OneSign | None:
        """Its rows without weights of both signs; None if there is none, if their ends need no care (``careful``), or
        if a gradient is wanted."""
        weight = getattr(self.node, "weight", None)
        if weight is None or not self.careful or not self.constant:
            return None
        rising, falling = ((part.flatten(1).all(1)).reshape(self.offset.shape) for part in (weight >= 0, weight <= 0))
        any_ = rising | falling
        return OneSign(rising, any_, bool(any_.all()), rising & falling) if bool(any_.any()) else None

    @cached_property
    def adds_up(self) -> bool:
        """True if the map is dense and each output is the exact sum of all numbers of its row of inputs."""
        node = self.node
        return (
            isinstance(node, Linear)
            and not node.weight_error
            and bool((node.weight == 1).all())
            and not bool(node.bias.any())
        )

    @property
    def row_sums(self) -> Tensor:
        """The sums of |W|'s rows, up to rounding; broadcastable to the node's shape."""
        return self.once("row sums", self.node.row_sums)


def exact_in_float32(weight: Tensor) -> bool:
    """Whether all numbers are float32 numbers, and none so small that a library may take it for 0."""
    narrow = weight.to(torch.float32)
    normal = (narrow == 0) | (narrow.abs() >= tiny(torch.float32))
    return bool(((narrow.to(weight) == weight) & normal).all())


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


def fill_cells(cells: Tensor, image: Tensor, stride: Pair, corner: Pair) -> None:
    """Put an image (rows, channels, height, width) into cells (rows, channels·stride, …) that are zeros before."""
    for part, mine in _phases(cells, image, stride, corner):
        part.copy_(mine)


def image_of_cells(cells: Tensor, shape: Shape, stride: Pair, corner: Pair = (0, 0)) -> Tensor:
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

    def pulls_back(self, dtype: torch.dtype) -> bool:
        """Whether windows of coefficients in a dtype are pulled back through it as windows."""
        return self.plain or (self.node.dilation == (1, 1) and dtype == self.node.weight.dtype)

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
        return self.node.forward(x)

    def linear(self, x: Tensor) -> Tensor:
        return self.node.linear(x)

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
            return image_of_cells(self.cells(a), input_shape, self.node.stride, self.node.corner)
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
            return image_of_cells(self.cells(a), (self.node.weight.shape[1], *size), self.node.stride)
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
        fill_cells(found, x, self.node.stride, self.node.corner)
        return found

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


@dataclass(frozen=True)
class _SparseProduct:
    """A weight W, Wᵀ and |W|ᵀ in compressed rows: what dense rows are multiplied with."""

    weight: Tensor
    transposed: Tensor
    absolute: Tensor

    @staticmethod
    def of(weight: Tensor) -> _SparseProduct:
        # torch's own conversion of a dense matrix takes several times as long, and a dense transpose before it.
        rows, columns = (torch.from_numpy(place) for place in np.nonzero(weight.detach().cpu().numpy()))
        rows, columns = rows.to(weight.device), columns.to(weight.device)
        values = weight[rows, columns]
        by_column = columns.argsort(stable=True)
        turned = columns[by_column], rows[by_column], values[by_column], weight.shape[::-1]
        return _SparseProduct(
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


class DenseOperator(Operator[Linear]):
    """y = x·Wᵀ + b over the last axis."""

    def __init__(self, node: Linear, tuning: Tuning) -> None:
        super().__init__(node, tuning)
        # The error of ``linear32`` counts by |centre|, that of ``absolute32`` by the radius, which is smaller.
        self._lines = tuple(sums.lines(node.weight.shape[1], n) for n in (tuning.weight_sum_length, tuning.sum_length))
        first, second = (length + sum(sums.steps(many, tuning.sum_steps)) - 2 for many, length in self._lines)
        self.terms32 = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.node.forward(x) if self._sparse is None else self.linear(x) + self.node.bias

    def linear(self, x: Tensor) -> Tensor:
        if self._sparse is None:
            return F.linear(x, self.node.weight)
        return (x.reshape(-1, x.shape[-1]) @ self._sparse.transposed).reshape(*x.shape[:-1], -1)

    def absolute(self, x: Tensor) -> Tensor:
        if self._sparse is None:
            return F.linear(x, self.once("absolute", self.node.weight.abs))
        return (x.reshape(-1, x.shape[-1]) @ self._sparse.absolute).reshape(*x.shape[:-1], -1)

    def linear32(self, x: Tensor) -> Tensor:
        return self._in_lines(x, absolute=False)

    def absolute32(self, x: Tensor) -> Tensor:
        return self._in_lines(x, absolute=True)

    def _in_lines(self, x: Tensor, absolute: bool) -> Tensor:
        """W·x or |W|·x for x of shape (batch, in), summed in float32 line by line, in the dtype of W."""
        lines = self._lines[absolute]

        def make() -> Tensor:
            weight = self.weight(torch.float32)
            return (weight.abs() if absolute else weight).T.reshape(*lines, -1).contiguous()

        weight = self.once(("in lines", absolute), make)
        found = torch.bmm(x.to(torch.float32).unflatten(1, lines).transpose(0, 1), weight)
        for parts in sums.steps(lines[0], self.tuning.sum_steps):
            if parts > 1:
                # A product with ones, which is exact, is faster than a sum over the first axis.
                found = found.new_ones(parts) @ found.reshape(parts, -1)
        return found.reshape(len(x), -1).to(self.node.weight.dtype)

    def adjoint(self, a: Tensor, input_shape: Shape) -> Tensor:
        if self._sparse is None:
            return a @ self.weight(a.dtype)
        return (a.reshape(-1, a.shape[-1]) @ self._sparse.weight).reshape(*a.shape[:-1], -1)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """W in a dtype, (out, in)."""
        return (
            self.node.weight
            if dtype == self.node.weight.dtype
            else self.once(dtype, lambda: self.node.weight.to(dtype))
        )

    @cached_property
    def fits32(self) -> bool:
        return self.constant and not self.sparse and len(self.node.shape) == 1 and exact_in_float32(self.node.weight)

    @property
    def sparse(self) -> bool:
        """Whether products go through compressed rows."""
        return self._sparse is not None

    @cached_property
    def _sparse(self) -> _SparseProduct | None:
        weight, tuning = self.node.weight, self.tuning
        if weight.numel() < tuning.sparse_weights or not self.constant:
            return None
        if int(weight.count_nonzero()) > tuning.sparse_share * weight.numel():
            return None
        return _SparseProduct.of(weight)


_KINDS: dict[type[Affine], type[Operator[Affine]]] = {Linear: DenseOperator, Conv2d: ConvolutionOperator}
"""The operators of kinds of affine map that have more than their own products."""


class Operators:
    """The operators of a network's affine nodes by the node's index, each made when it is first asked for."""

    def __init__(self, nodes: tuple[Node, ...], tuning: Tuning) -> None:
        # Not the network itself: it keeps this object, and a circle would wait for the garbage collector.
        self._nodes, self.tuning = nodes, tuning
        partial = (i for i, node in enumerate(nodes) if isinstance(node, Curve) and node.known.partial)
        self._last_partial = max(partial, default=-1)
        self._made: dict[int, Operator[Affine]] = {}

    def __getitem__(self, index: int) -> Operator[Affine]:
        if index not in self._made:
            node = self._nodes[index]
            assert isinstance(node, Affine)
            self._made[index] = _KINDS.get(type(node), Operator)(node, self.tuning)
            self._made[index].careful = index < self._last_partial
        return self._made[index]

    def find(self, index: int) -> Operator[Affine] | None:
        """The operator of node ``index``; None if that is no affine map."""
        return self[index] if isinstance(self._nodes[index], Affine) else None


def prepared(network: Network, tuning: Tuning = TUNING) -> Operators:
    """The operators of a network, which the network keeps: another dtype or device is another network."""
    return network.once((Operators, tuning), lambda: Operators(network.nodes, tuning))


def needed(network: Network, outputs: Tensor, dtype: torch.dtype) -> dict[int, Tensor] | None:
    """The activations' neurons that some outputs depend on, as far as the build of the network says.

    Args:
        network: the network.
        outputs: (outputs,) bool.
        dtype: of the network's numbers.

    Returns:
        By activation node index (1, neurons) bool; None where every neuron is one.
    """
    if not network.activations or bool(outputs.all()):
        return None
    return network.once((needed, outputs.cpu().numpy().tobytes()), lambda: _needed(network, outputs, dtype))


@torch.enable_grad()
def _needed(network: Network, outputs: Tensor, dtype: torch.dtype) -> dict[int, Tensor] | None:
    """As ``needed``: of which Σ|coefficient| of the outputs' rows is positive, activations being the identity."""
    values: list[Tensor] = []
    for node in network.nodes:
        if not node.inputs:
            value = torch.zeros(1, *node.shape, dtype=dtype, device=outputs.device, requires_grad=True)
        elif isinstance(node, Affine):
            value = node.absolute(values[node.inputs[0]])
        elif isinstance(node, Add | Reshape | Permute):
            value = node.forward(*(values[i] for i in node.inputs))
        elif isinstance(node, Extreme):
            value = values[node.inputs[-1]] * 1.0
        elif isinstance(node, Activation) and node.shape == network.nodes[node.inputs[0]].shape:
            value = values[node.inputs[0]] * 1.0
        else:
            # Every element of what else there is may depend on every element of its inputs.
            total = sum((values[i].sum() for i in node.inputs), start=values[0].new_zeros(()))
            value = total.expand(1, *node.shape)
        values.append(value)
    chosen = (values[-1].flatten() * outputs.to(values[-1])).sum()
    given = torch.autograd.grad(chosen, [values[i] for i in network.activations], materialize_grads=True)
    found = {i: (part != 0).flatten(1) for i, part in zip(network.activations, given, strict=True)}
    return None if all(bool(part.all()) for part in found.values()) else found
