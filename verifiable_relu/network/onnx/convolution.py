"""Convolutions in one, two and three dimensions, and transposed ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.onnx.call import Call, Value, converts, tensor
from verifiable_relu.network.onnx.moves import Numbered, moved
from verifiable_relu.network.onnx.windows import MAX_CELLS, Windows, padding, whole, windows


@converts("Conv", 1, 11, 22)
def _conv(call: Call) -> Value:
    x, weight = call.value(), call.constant(1)
    shape = call.shape(x)
    _require(call, shape, weight)
    return convolved(call, x, weight, windows(call, shape[2:], weight.shape[2:]))


def _require(call: Call, shape: Sequence[int], weight: np.ndarray) -> None:
    """Refuse an input or a kernel of a shape that no convolution has.

    Raises:
        InputError: if they do not fit.
        UnsupportedError: for a batch of several images.
    """
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
    """How much of the full result a transposed convolution leaves out before and after; less than 0 adds zeros.

    Raises:
        InputError: if the attributes are malformed.
    """
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
