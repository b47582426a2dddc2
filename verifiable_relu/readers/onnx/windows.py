"""Sliding windows in any number of dimensions: convolutions, transposed ones too, means and maxima."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.readers.builder import Value, tensor
from verifiable_relu.readers.derived import quotient, share
from verifiable_relu.readers.onnx.call import Call, converts

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

    def cells(self, padded: bool = False) -> np.ndarray:
        """Return the number of each cell in the grid, (windows, cells of a window); −1 outside it.

        With ``padded``, −2 stands for cells of the padding.
        """
        if math.prod(self.outputs) * math.prod(self.kernel) > MAX_CELLS:
            raise UnsupportedError(f"windows with more than {MAX_CELLS} cells together")
        dims = len(self.sizes)
        found = np.zeros((1,) * 2 * dims, np.int64)
        inside, around = np.ones_like(found, np.bool_), np.ones_like(found, np.bool_)
        for d, size in enumerate(self.sizes):
            first = np.arange(self.outputs[d]) * self.strides[d] - self.begins[d]
            place = first[:, None] + np.arange(self.kernel[d]) * self.dilations[d]
            place = place.reshape([n if i in (d, dims + d) else 1 for i, n in enumerate(self.outputs + self.kernel)])
            found = found * size + place
            inside = inside & (place >= 0) & (place < size)
            around = around & (place < size + self.ends[d])
        numbers = np.where(inside, found, np.where(around & padded, -2, -1))
        return np.broadcast_to(numbers, self.outputs + self.kernel).reshape(math.prod(self.outputs), -1)


def windows(call: Call, sizes: Sequence[int], kernel: Sequence[int]) -> Windows:
    """Return the windows of a node over a grid, by its attributes."""
    dims, rounds_up = len(sizes), bool(call.get("ceil_mode", 0))
    strides, dilations = (_numbers(call, name, (1,) * dims, 1) for name in ("strides", "dilations"))
    if len(kernel) != dims or min(kernel) < 1:
        raise InputError(f"a window of {list(kernel)} for inputs of {list(sizes)}")
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    begins, ends = _padding(call, sizes, reach, strides)
    outputs = []
    for size, span, stride, before, after in zip(sizes, reach, strides, begins, ends, strict=True):
        rest = size + before + after - span
        if rest < 0 and not (rounds_up and rest > -stride):
            raise InputError(f"a window of {list(kernel)} is larger than the padded inputs {list(sizes)}")
        count = rest // stride + 1
        if rounds_up:
            count = -(-rest // stride) + 1
            # A window that would begin in the padding behind the inputs is left out.
            count -= (count - 1) * stride >= size + before
        outputs.append(count)
    if min(outputs) < 1:
        raise InputError(f"a window of {list(kernel)} has no place in inputs of {list(sizes)}")
    return Windows(tuple(sizes), tuple(kernel), strides, dilations, begins, ends, tuple(outputs))


def _numbers(call: Call, attribute: str, default: Sequence[int], least: int) -> tuple[int, ...]:
    """Return an attribute of as many whole numbers as its default has, none below ``least``."""
    sizes = tuple(int(size) for size in call.get(attribute, default))
    if len(sizes) != len(default) or min(sizes) < least:
        raise InputError(f"its attribute {attribute} = {list(sizes)}")
    return sizes


def _halves(totals: Sequence[int], more_first: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return numbers of cells as those before and those after, which get the odd ones unless ``more_first``."""
    less, more = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
    return (more, less) if more_first else (less, more)


def _padding(
    call: Call, sizes: Sequence[int], reach: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the cells of padding before and after a grid."""
    dims = len(sizes)
    pads = _numbers(call, "pads", (0,) * 2 * dims, 0)
    mode = call.get("auto_pad", b"NOTSET")
    if mode == b"NOTSET":
        return pads[:dims], pads[dims:]
    if any(pads):
        raise InputError(f"its attribute pads = {list(pads)} beside auto_pad = {mode!r}")
    if mode == b"VALID":
        return (0,) * dims, (0,) * dims
    if mode not in (b"SAME_UPPER", b"SAME_LOWER"):
        raise UnsupportedError(f"its attribute auto_pad = {mode!r}")
    grid = zip(sizes, reach, strides, strict=True)
    totals = [max(0, (-(-size // stride) - 1) * stride + span - size) for size, span, stride in grid]
    return _halves(totals, mode == b"SAME_LOWER")


@converts("Conv", 1, 11, 22)
def _conv(call: Call) -> Value:
    x, weight = call.value(), call.constant(1)
    _require(call, x.shape, weight)
    return _convolved(call, x, weight, windows(call, x.shape[2:], weight.shape[2:]))


def _require(call: Call, shape: Sequence[int], weight: np.ndarray) -> None:
    """Refuse an input or a kernel of a shape that no convolution has."""
    if len(shape) < 3 or weight.ndim != len(shape):
        raise InputError(f"a kernel of shape {weight.shape} does not fit inputs of shape {tuple(shape)}")
    if shape[0] != 1:
        raise UnsupportedError("an input without a batch axis")
    kernel = weight.shape[2:]
    if tuple(call.get("kernel_shape", kernel)) != kernel:
        raise InputError(f"its attribute kernel_shape = {call.get('kernel_shape', None)}, but its kernel is {kernel}")


def _convolved(call: Call, x: Value, weight: np.ndarray, seen: Windows) -> Value:
    """Return the convolution of x with a kernel (out, in / groups, …) of the windows' size, and the node's bias."""
    bias = None if (b := call.optional(2)) is None else tensor(b)
    groups, dims = call.get("group", 1), len(seen.sizes)
    out, channels = weight.shape[:2]
    if groups < 1 or channels * groups != x.shape[1] or out % groups:
        raise InputError(f"a kernel of shape {weight.shape} in {groups} groups does not fit inputs {x.shape}")
    if bias is not None and bias.numel() not in (1, out):
        raise InputError(f"the bias of shape {tuple(bias.shape)} where {(out,)} is expected")
    result = (1, out, *seen.outputs)
    if dims <= 2:
        # A line is an image of one row.
        one, none = (1,) * (2 - dims), (0,) * (2 - dims)
        found = call.build.convolution(
            x.reshaped((x.shape[1], *one, *seen.sizes)),
            tensor(weight.reshape(out, channels, *one, *seen.kernel)),
            bias,
            stride=(*one, *seen.strides),
            padding=(*none, *seen.begins, *none, *seen.ends),
            dilation=(*one, *seen.dilations),
            groups=groups,
        )
        return found.reshaped(result)
    if math.prod(result) * channels * math.prod(seen.kernel) > MAX_CELLS:
        raise UnsupportedError(f"a convolution with more than {MAX_CELLS} products")
    cells = seen.cells()
    # (out, windows, in / groups, cells)
    first = np.arange(out)[:, None] // (out // groups) * channels + np.arange(channels)
    index = first[:, None, :, None] * math.prod(seen.sizes) + np.maximum(cells, 0)[None, :, None, :]
    products = np.where(cells[None, :, None, :] >= 0, weight.reshape(out, 1, channels, -1), weight.dtype.type(0))
    added = None if bias is None else bias.reshape(-1).expand(out).repeat_interleave(len(cells)).numpy()
    return call.build.sparse(x, np.broadcast_to(index, products.shape), products, result, added)


@converts("ConvTranspose", 1, 11, 22)
def _conv_transpose(call: Call) -> Value:
    """Read the convolution of x, with zeros between its elements and around them, with the mirrored kernel."""
    x, weight, groups = call.value(), call.constant(1), call.get("group", 1)
    _require(call, x.shape, weight)
    sizes, kernel, dims = x.shape[2:], weight.shape[2:], len(x.shape) - 2
    strides, dilations = (_numbers(call, name, (1,) * dims, 1) for name in ("strides", "dilations"))
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    begins, ends = _transposed_padding(call, sizes, reach, strides)
    spread = np.full((1, x.shape[1], *((n - 1) * s + 1 for n, s in zip(sizes, strides, strict=True))), -1)
    spread[(slice(None), slice(None), *(slice(None, None, s) for s in strides))] = np.arange(x.size).reshape(x.shape)
    frame = [(span - 1 - before, span - 1 - after) for span, before, after in zip(reach, begins, ends, strict=True)]
    around = [(0, 0), (0, 0), *((max(0, b), max(0, a)) for b, a in frame)]
    spread = np.pad(spread, around, constant_values=-1)
    for axis, (before, after) in enumerate(frame, 2):
        spread = spread.take(range(max(0, -before), spread.shape[axis] - max(0, -after)), axis)
    if groups < 1 or weight.shape[0] != x.shape[1] or x.shape[1] % groups:
        raise InputError(f"a kernel of shape {weight.shape} in {groups} groups does not fit inputs {x.shape}")
    parts = np.flip(weight, tuple(range(2, weight.ndim))).reshape(groups, -1, *weight.shape[1:]).swapaxes(1, 2)
    mirrored = np.ascontiguousarray(parts.reshape(-1, *parts.shape[2:]))
    if not (spread >= 0).any():
        raise UnsupportedError("its result does not depend on its input")
    grid, one, none = spread.shape[2:], (1,) * dims, (0,) * dims
    outputs = tuple(n - span + 1 for n, span in zip(grid, reach, strict=True))
    if min(outputs) < 1:
        raise InputError(f"a result of shape {outputs}")
    seen = Windows(grid, kernel, one, dilations, none, none, outputs)
    return _convolved(call, call.build.moved(x, spread), mirrored, seen)


def _transposed_padding(
    call: Call, sizes: Sequence[int], reach: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how much of the full result is left out before and after; less than 0 adds zeros."""
    dims = len(sizes)
    further = _numbers(call, "output_padding", (0,) * dims, 0)
    full = [(n - 1) * s + span + f for n, s, span, f in zip(sizes, strides, reach, further, strict=True)]
    mode, wanted = call.get("auto_pad", b"NOTSET"), call.get("output_shape", None)
    if wanted is None and mode in (b"SAME_UPPER", b"SAME_LOWER"):
        wanted = [n * s for n, s in zip(sizes, strides, strict=True)]
    if wanted is None:
        begins, ends = _padding(call, sizes, reach, strides)
    else:
        if len(wanted) != dims:
            raise InputError(f"its attribute output_shape = {list(wanted)}")
        lengths = list(zip(full, map(int, wanted), strict=True))
        begins, ends = _halves([max(0, n - size) for n, size in lengths], mode != b"SAME_UPPER")
        further = tuple(f + max(0, size - n) for f, (n, size) in zip(further, lengths, strict=True))
    return begins, tuple(end - f for end, f in zip(ends, further, strict=True))


def _pooled(call: Call) -> tuple[Value, Windows]:
    """Return the input of a pooling, of shape (1, channels, …), and the windows."""
    x = call.value()
    if len(x.shape) < 3:
        raise InputError(f"pools an input of shape {x.shape}")
    sizes = x.shape[2:]
    if call.op.startswith("Global"):
        one, none = (1,) * len(sizes), (0,) * len(sizes)
        return x, Windows(sizes, sizes, one, one, none, none, one)
    return x, windows(call, sizes, tuple(call.get("kernel_shape", ())))


@converts("AveragePool", 7, 10, 11, 19, 22)
@converts("GlobalAveragePool", 1, 22)
def _average_pool(call: Call) -> Value:
    x, seen = _pooled(call)
    counted, pads = bool(call.get("count_include_pad", 0)), (*seen.begins, *seen.ends)
    whole = not call.get("ceil_mode", 0) and (counted or not any(pads))
    if whole and len(x.shape) == 4 and x.shape[0] == 1 and seen.dilations == (1, 1):
        number, error = share(math.prod(seen.kernel))
        weight = number.repeat(x.shape[1], 1, *seen.kernel)
        window = {"stride": seen.strides, "padding": pads, "groups": x.shape[1]}
        return call.build.convolution(x, weight, None, error, **window)
    cells = seen.cells(padded=True)
    counts = ((cells >= 0) | (counted & (cells == -2))).sum(1, keepdims=True)
    if not counts.all():
        raise UnsupportedError("the mean of no values")
    shares, error = quotient(1.0, torch.from_numpy(np.asarray(counts)))
    weight_of = np.where(cells >= 0, shares.numpy(), 0.0).astype(np.float64 if error else np.float32)
    images, size = math.prod(x.shape[:2]), math.prod(x.shape[2:])
    index = (np.arange(images)[:, None, None] * size + np.maximum(cells, 0)).reshape(-1, cells.shape[1])
    return call.build.sparse(x, index, np.tile(weight_of, (images, 1)), (*x.shape[:2], *seen.outputs), error=error)


@converts("MaxPool", 1, 8, 10, 11, 12, 22, group="maxima")
@converts("GlobalMaxPool", 1, 22, group="maxima")
def _max_pool(call: Call) -> Value:
    x, seen = _pooled(call)
    cells = seen.cells()
    if not (cells >= 0).any(1).all():
        # Padding takes no part.
        raise UnsupportedError("the maximum of no values")
    images, size = math.prod(x.shape[:2]), math.prod(x.shape[2:])
    each = np.where(cells >= 0, np.arange(images)[:, None, None] * size + cells, -1)
    return call.build.maximum(x, each.reshape(-1, cells.shape[1]).T, (*x.shape[:2], *seen.outputs))
