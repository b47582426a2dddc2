"""Sliding windows in any number of dimensions: convolutions, transposed ones too, means and maxima."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.derived import quotient
from verifiable_relu.network.nodes import Shape
from verifiable_relu.network.onnx.call import Call, Value, converts, tensor
from verifiable_relu.network.onnx.moves import Numbered, moved
from verifiable_relu.network.onnx.reduce import maxima

MAX_CELLS = 1 << 24
"""Most inputs that all windows together may see."""


@dataclass(frozen=True)
class Windows:
    """Windows that slide over a grid; every field has one entry for each of its dimensions.

    Attributes:
        sizes: of the grid.
        kernel: of the window.
        strides, dilations: of the window.
        begins, ends: cells of padding before and after the grid.
        outputs: how many windows there are.
    """

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def pads(self) -> tuple[int, ...]:
        """All begins, then all ends."""
        return (*self.begins, *self.ends)

    def cells(self, padded: bool = False) -> np.ndarray:
        """(windows, cells of a window) the number of each cell in the grid, −1 outside it.

        Args:
            padded: whether cells of the padding are told apart from those beyond it: −2 stands for them.

        Raises:
            UnsupportedError: if there are more than ``MAX_CELLS``.
        """
        if math.prod(self.outputs) * math.prod(self.kernel) > MAX_CELLS:
            raise UnsupportedError(f"windows with more than {MAX_CELLS} cells together")
        dims = len(self.sizes)
        found = np.zeros((1,) * 2 * dims, np.int64)
        inside, around = np.ones_like(found, np.bool_), np.ones_like(found, np.bool_)
        for d, size in enumerate(self.sizes):
            first = np.arange(self.outputs[d]) * self.strides[d] - self.begins[d]
            place = first[:, None] + np.arange(self.kernel[d]) * self.dilations[d]
            place = place.reshape(
                [n if axis in (d, dims + d) else 1 for axis, n in enumerate(self.outputs + self.kernel)]
            )
            found = found * size + place
            inside = inside & (place >= 0) & (place < size)
            around = around & (place < size + self.ends[d])
        numbers = np.where(inside, found, np.where(around & padded, -2, -1))
        return np.broadcast_to(numbers, self.outputs + self.kernel).reshape(math.prod(self.outputs), -1)


def windows(call: Call, sizes: Sequence[int], kernel: Sequence[int]) -> Windows:
    """The windows of a node over a grid, by its attributes.

    Raises:
        InputError: if the attributes are malformed, contradict each other, or leave no window.
        UnsupportedError: for an unknown ``auto_pad``.
    """
    dims = len(sizes)
    strides, dilations = whole(call, "strides", dims), whole(call, "dilations", dims)
    if len(kernel) != dims or min(kernel) < 1:
        raise InputError(f"a window of {list(kernel)} for inputs of {list(sizes)}")
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    begins, ends = padding(call, sizes, reach, strides)
    outputs = []
    for size, span, stride, before, after in zip(sizes, reach, strides, begins, ends, strict=True):
        rest = size + before + after - span
        if rest < 0 and not (call.get("ceil_mode", 0) and rest > -stride):
            raise InputError(f"a window of {list(kernel)} is larger than the padded inputs {list(sizes)}")
        count = rest // stride + 1
        if call.get("ceil_mode", 0):
            count = -(-rest // stride) + 1
            # A window that would begin in the padding behind the inputs is left out.
            count -= (count - 1) * stride >= size + before
        outputs.append(count)
    if min(outputs) < 1:
        raise InputError(f"a window of {list(kernel)} has no place in inputs of {list(sizes)}")
    return Windows(tuple(sizes), tuple(kernel), strides, dilations, begins, ends, tuple(outputs))


def whole(call: Call, attribute: str, dims: int) -> tuple[int, ...]:
    """An attribute of one positive integer for each dimension, 1 by default.

    Raises:
        InputError: if it is anything else.
    """
    sizes = tuple(int(size) for size in call.get(attribute, (1,) * dims))
    if len(sizes) != dims or min(sizes) < 1:
        raise InputError(f"its attribute {attribute} = {list(sizes)}")
    return sizes


def padding(
    call: Call, sizes: Sequence[int], reach: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cells of padding before and after a grid.

    Raises:
        InputError: if pads are malformed, or stand beside an ``auto_pad`` that makes them.
        UnsupportedError: for an unknown ``auto_pad``.
    """
    dims = len(sizes)
    pads = tuple(int(size) for size in call.get("pads", (0,) * 2 * dims))
    if len(pads) != 2 * dims or min(pads) < 0:
        raise InputError(f"its attribute pads = {list(pads)}")
    mode = call.get("auto_pad", b"NOTSET")
    if mode == b"NOTSET":
        return pads[:dims], pads[dims:]
    if any(pads):
        raise InputError(f"its attribute pads = {list(pads)} beside auto_pad = {mode!r}")
    if mode == b"VALID":
        return (0,) * dims, (0,) * dims
    if mode not in (b"SAME_UPPER", b"SAME_LOWER"):
        raise UnsupportedError(f"its attribute auto_pad = {mode!r}")
    totals = [
        max(0, (-(-size // stride) - 1) * stride + span - size)
        for size, span, stride in zip(sizes, reach, strides, strict=True)
    ]
    less, more = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
    return (less, more) if mode == b"SAME_UPPER" else (more, less)


@converts("Conv", 1, 11, 22)
def _conv(call: Call) -> Value:
    x, weight = call.value(), call.constant(1)
    shape = call.shape(x)
    _require(call, shape, weight)
    return convolved(call, x, weight, windows(call, shape[2:], weight.shape[2:]))


def _require(call: Call, shape: Sequence[int], weight: np.ndarray) -> None:
    """Refuse an input or a kernel of a shape that no convolution has."""
    if len(shape) < 3 or weight.ndim != len(shape):
        raise InputError(f"a kernel of shape {weight.shape} does not fit inputs of shape {tuple(shape)}")
    if shape[0] != 1:
        raise UnsupportedError("an input without a batch axis")
    kernel = weight.shape[2:]
    if tuple(call.get("kernel_shape", kernel)) != kernel:
        raise InputError(f"its attribute kernel_shape = {call.get('kernel_shape', None)}, but its kernel is {kernel}")


def convolved(call: Call, x: Value, weight: np.ndarray, seen: Windows) -> Value:
    """The convolution of x with a kernel (out, in / groups, …) of the windows' size, and the node's bias.

    Raises:
        InputError: if the channels do not fit the groups.
        UnsupportedError: for more than two dimensions, if it has more than ``MAX_CELLS`` products.
    """
    bias = None if (b := call.optional(2)) is None else tensor(b)
    groups, dims, shape = call.get("group", 1), len(seen.sizes), call.shape(x)
    out, channels = weight.shape[:2]
    if groups < 1 or channels * groups != shape[1] or out % groups:
        raise InputError(f"a kernel of shape {weight.shape} in {groups} groups does not fit inputs {tuple(shape)}")
    result = (1, out, *seen.outputs)
    if dims <= 2:
        # A line is an image of one row.
        flat = call.build.reshape(x.index, (shape[1], *(1,) * (2 - dims), *seen.sizes), call.name)
        one = (1,) * (2 - dims)
        index = call.build.conv2d(
            flat,
            tensor(weight.reshape(out, channels, *one, *seen.kernel)),
            bias,
            call.name,
            stride=_pair((*one, *seen.strides)),
            padding=_four((*(0,) * (2 - dims), *seen.begins, *(0,) * (2 - dims), *seen.ends)),
            dilation=_pair((*one, *seen.dilations)),
            groups=groups,
        )
        return call.reshaped(Value(index, True), result)
    if math.prod(result) * channels * math.prod(seen.kernel) > MAX_CELLS:
        raise UnsupportedError(f"a convolution with more than {MAX_CELLS} products")
    cells = seen.cells()
    # (out, windows, in / groups, cells)
    first = np.arange(out)[:, None] // (out // groups) * channels + np.arange(channels)
    index = first[:, None, :, None] * math.prod(seen.sizes) + np.maximum(cells, 0)[None, :, None, :]
    products = np.where(cells[None, :, None, :] >= 0, weight.reshape(out, 1, channels, -1), weight.dtype.type(0))
    added = None if bias is None else bias.expand(out).repeat_interleave(len(cells)).numpy()
    return call.sparse(x.index, np.broadcast_to(index, products.shape), products, result, added)


def _pair(sizes: tuple[int, ...]) -> tuple[int, int]:
    return sizes[0], sizes[1]


def _four(sizes: tuple[int, ...]) -> tuple[int, int, int, int]:
    return sizes[0], sizes[1], sizes[2], sizes[3]


@converts("ConvTranspose", 1, 11, 22)
def _conv_transpose(call: Call) -> Value:
    """The convolution of x, with zeros between its elements and around them, with the mirrored kernel."""
    x, weight = call.value(), call.constant(1)
    shape = call.shape(x)
    _require(call, shape, weight)
    sizes, kernel, dims, groups = shape[2:], weight.shape[2:], len(shape) - 2, call.get("group", 1)
    strides, dilations = whole(call, "strides", dims), whole(call, "dilations", dims)
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    begins, ends = _transposed_padding(call, sizes, reach, strides)
    numbered = Numbered()
    numbers = numbered.add(call, x)
    spread = np.zeros((1, shape[1], *((n - 1) * s + 1 for n, s in zip(sizes, strides, strict=True))), np.int64)
    spread[(slice(None), slice(None), *(slice(None, None, s) for s in strides))] = numbers
    frame = [(span - 1 - before, span - 1 - after) for span, before, after in zip(reach, begins, ends, strict=True)]
    spread = np.pad(spread, [(0, 0), (0, 0), *((max(0, b), max(0, a)) for b, a in frame)])
    inner = (slice(max(0, -b), spread.shape[2 + d] - max(0, -a)) for d, (b, a) in enumerate(frame))
    source = moved(call, numbered, spread[(slice(None), slice(None), *inner)])
    if groups < 1 or weight.shape[0] != shape[1] or shape[1] % groups:
        raise InputError(f"a kernel of shape {weight.shape} in {groups} groups does not fit inputs {tuple(shape)}")
    parts = np.flip(weight, tuple(range(2, weight.ndim))).reshape(groups, -1, *weight.shape[1:]).swapaxes(1, 2)
    mirrored = np.ascontiguousarray(parts.reshape(-1, *parts.shape[2:]))
    if not isinstance(source, Value):
        raise UnsupportedError("its result does not depend on its input")
    grid = call.shape(source)[2:]
    one, none = (1,) * dims, (0,) * dims
    outputs = tuple(n - span + 1 for n, span in zip(grid, reach, strict=True))
    if min(outputs) < 1:
        raise InputError(f"a result of shape {outputs}")
    return convolved(call, source, mirrored, Windows(grid, kernel, one, dilations, none, none, outputs))


def _transposed_padding(
    call: Call, sizes: Sequence[int], reach: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How much of the full result a transposed convolution leaves out before and after; less than 0 adds zeros."""
    dims = len(sizes)
    further = tuple(int(size) for size in call.get("output_padding", (0,) * dims))
    if len(further) != dims or min(further) < 0:
        raise InputError(f"its attribute output_padding = {list(further)}")
    full = [(n - 1) * s + span + f for n, s, span, f in zip(sizes, strides, reach, further, strict=True)]
    mode = call.get("auto_pad", b"NOTSET")
    wanted = call.get("output_shape", None)
    if wanted is None and mode in (b"SAME_UPPER", b"SAME_LOWER"):
        wanted = [n * s for n, s in zip(sizes, strides, strict=True)]
    if wanted is None:
        begins, ends = padding(call, sizes, reach, strides)
    else:
        if len(wanted) != dims:
            raise InputError(f"its attribute output_shape = {list(wanted)}")
        totals = [max(0, n - int(size)) for n, size in zip(full, wanted, strict=True)]
        less, more = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
        begins, ends = (less, more) if mode == b"SAME_UPPER" else (more, less)
        short = tuple(max(0, int(size) - n) for n, size in zip(full, wanted, strict=True))
        further = tuple(f + s for f, s in zip(further, short, strict=True))
    return begins, tuple(end - f for end, f in zip(ends, further, strict=True))


def _seen(call: Call) -> tuple[Value, Shape, Windows]:
    """The input of a pooling, its ONNX shape, (1, channels, …), and the windows."""
    x = call.value()
    shape = call.shape(x)
    if len(shape) < 3:
        raise InputError(f"pools an input of shape {shape}")
    sizes = shape[2:]
    if call.op.startswith("Global"):
        one, none = (1,) * len(sizes), (0,) * len(sizes)
        return x, shape, Windows(sizes, sizes, one, one, none, none, one)
    return x, shape, windows(call, sizes, tuple(call.get("kernel_shape", ())))


@converts("AveragePool", 7, 10, 11, 19, 22)
@converts("GlobalAveragePool", 1, 22)
def _average_pool(call: Call) -> Value:
    x, shape, seen = _seen(call)
    counted = bool(call.get("count_include_pad", 0))
    whole = not call.get("ceil_mode", 0) and (counted or not any(seen.pads))
    if whole and len(shape) == 4 and shape[0] == 1 and seen.dilations == (1, 1):
        kernel, stride, pads = _pair(seen.kernel), _pair(seen.strides), _four(seen.pads)
        return Value(call.build.average_pool(x.index, kernel, stride, pads, call.name), True)
    cells = seen.cells(padded=True)
    counts = ((cells >= 0) | (counted & (cells == -2))).sum(1, keepdims=True)
    if not counts.all():
        raise UnsupportedError("the mean of no values")
    shares, error = quotient(1.0, torch.from_numpy(np.asarray(counts)))
    weight = np.where(cells >= 0, shares.numpy(), 0.0).astype(np.float64 if error else np.float32)
    images, size = math.prod(shape[:2]), math.prod(shape[2:])
    index = (np.arange(images)[:, None, None] * size + np.maximum(cells, 0)).reshape(-1, cells.shape[1])
    return call.sparse(x.index, index, np.tile(weight, (images, 1)), (*shape[:2], *seen.outputs), error=error)


@converts("MaxPool", 1, 8, 10, 11, 12, 22, group="maxima")
@converts("GlobalMaxPool", 1, 22, group="maxima")
def _max_pool(call: Call) -> Value:
    x, shape, seen = _seen(call)
    cells = seen.cells()
    if not (cells >= 0).any(1).all():
        # Padding takes no part.
        raise UnsupportedError("the maximum of no values")
    images, size = math.prod(shape[:2]), math.prod(shape[2:])
    each = np.where(cells >= 0, np.arange(images)[:, None, None] * size + cells, -1)
    candidates = each.reshape(-1, cells.shape[1]).T
    return call.reshaped(Value(maxima(call, x.index, candidates), False), (*shape[:2], *seen.outputs))
