"""Windows and places on a grid: convolutions, transposed ones too, means, maxima and resizing.

Each output is a weighted sum, or the largest, of inputs near a place. The inputs along each axis are worked out alone,
and combined. Resizing has its places and weights as fractions, from the standard's definition of the operator.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.network import Shape
from verifiable_relu.readers.builder import Value, places, require_few, tensor
from verifiable_relu.readers.derived import Derived, both, quotient, rounded, share
from verifiable_relu.readers.onnx.call import NodeCall, axis_of, converts
from verifiable_relu.rounding import LEAST_WEIGHT, UNIT


def _outer(parts: Sequence[np.ndarray], combine: np.ufunc) -> np.ndarray:
    """Return an array, (outputs, terms), that is combined of one for each axis, (outputs, terms) along it."""
    dims = len(parts)
    shaped = [np.expand_dims(part, [i for i in range(2 * dims) if i % dims != d]) for d, part in enumerate(parts)]
    found: np.ndarray = functools.reduce(combine, shaped)
    return found.reshape(math.prod(found.shape[:dims]), -1)


@dataclass(frozen=True)
class Windows:
    """Windows that slide over a grid; every field has one entry for each of its dimensions.

    Attributes:
        sizes: of the grid.
        kernel, reach: cells of the window, and how many it spans with the gaps between them.
        strides, dilations: of the window.
        begins, ends: cells of padding before and after the grid.
        outputs: how many windows there are.
    """

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    reach: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    outputs: tuple[int, ...]

    def cells(self) -> np.ndarray:
        """Return the number of each cell in the grid, (windows, cells of a window); −1 in the padding, −2 beyond it."""
        grid = list(zip(self.sizes, self.begins, self.ends, strict=True))
        require_few(math.prod(self.outputs) * math.prod(self.kernel))
        require_few(math.prod(map(sum, grid)))
        numbers = np.arange(math.prod(self.sizes)).reshape(self.sizes)
        padded = np.pad(numbers, [(before, after) for _, before, after in grid], constant_values=-1)
        spans = zip(self.outputs, self.strides, self.reach, padded.shape, strict=True)
        beyond = [(0, max(0, (count - 1) * stride + span - size)) for count, stride, span, size in spans]
        seen = sliding_window_view(np.pad(padded, beyond, constant_values=-2), self.reach)
        firsts = (slice(0, (n - 1) * stride + 1, stride) for n, stride in zip(self.outputs, self.strides, strict=True))
        return seen[*firsts, *(slice(None, None, gap) for gap in self.dilations)].reshape(math.prod(self.outputs), -1)


def _windows(call: NodeCall, sizes: Sequence[int], kernel: Sequence[int]) -> Windows:
    strides, dilations, reach = _steps(call, kernel, len(sizes))
    begins, ends = _padding(call, sizes, reach, strides)
    outputs = []
    for size, span, stride, before, after in zip(sizes, reach, strides, begins, ends, strict=True):
        rest = size + before + after - span
        count = rest // stride + 1
        if call.get("ceil_mode", 0):
            count = -(-rest // stride) + 1
            # A window that would begin in the padding behind the inputs is left out.
            count -= (count - 1) * stride >= size + before
        outputs.append(count)
    if min(outputs) < 1:
        raise InputError(f"a window of {list(kernel)} is larger than the padded inputs {list(sizes)}")
    return Windows(tuple(sizes), tuple(kernel), reach, strides, dilations, begins, ends, tuple(outputs))


def _steps(call: NodeCall, kernel: Sequence[int], dims: int) -> tuple[tuple[int, ...], ...]:
    """Return a window's strides, its dilations, and how many cells it spans."""
    strides, dilations = (_numbers(call, name, (1,) * dims, 1) for name in ("strides", "dilations"))
    if len(kernel) != dims or min(kernel) < 1:
        raise InputError(f"a window of {list(kernel)} for inputs of {dims} dimensions")
    return strides, dilations, tuple(d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True))


def _numbers(call: NodeCall, attribute: str, default: Sequence[int], least: int) -> tuple[int, ...]:
    """Return an attribute of as many whole numbers as its default has, none below ``least``."""
    sizes = tuple(int(size) for size in call.get(attribute, default))
    if len(sizes) != len(default) or min(sizes) < least:
        raise InputError(f"its attribute {attribute} = {list(sizes)}")
    return sizes


Pads = tuple[tuple[int, ...], tuple[int, ...]]
"""Cells before and after a grid, for each of its dimensions."""


def _halves(totals: Sequence[int], more_first: bool) -> Pads:
    """Return numbers of cells as those before and those after, which get the odd ones unless ``more_first``."""
    less, more = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
    return (more, less) if more_first else (less, more)


def _padding(call: NodeCall, sizes: Sequence[int], reach: Sequence[int], strides: Sequence[int]) -> Pads:
    dims = len(sizes)
    pads = _numbers(call, "pads", (0,) * 2 * dims, 0)
    mode = call.choice("auto_pad", b"NOTSET", {m: m for m in (b"NOTSET", b"VALID", b"SAME_UPPER", b"SAME_LOWER")})
    if mode != b"NOTSET" and any(pads):
        raise InputError(f"its attribute pads = {list(pads)} together with auto_pad = {mode.decode()}")
    if mode in (b"NOTSET", b"VALID"):
        return pads[:dims], pads[dims:]
    grid = zip(sizes, reach, strides, strict=True)
    totals = [max(0, (-(-size // stride) - 1) * stride + span - size) for size, span, stride in grid]
    return _halves(totals, mode == b"SAME_LOWER")


# Convolutions


def _kernel(call: NodeCall) -> np.ndarray:
    shape, weight = call.value().shape, call.constant(1)
    if len(shape) < 3 or weight.ndim != len(shape):
        raise InputError(f"a kernel of shape {weight.shape} does not fit inputs of shape {tuple(shape)}")
    if shape[0] != 1:
        raise UnsupportedError("an input without a batch axis")
    if (named := tuple(call.get("kernel_shape", weight.shape[2:]))) != weight.shape[2:]:
        raise InputError(f"its attribute kernel_shape = {named}, but its kernel is {weight.shape[2:]}")
    return weight


@converts("Conv", 1, 11, 22)
def _conv(call: NodeCall) -> Value:
    weight = _kernel(call)
    return _convolved(call, call.value(), weight, _windows(call, call.value().shape[2:], weight.shape[2:]))


def _convolved(call: NodeCall, x: Value, weight: np.ndarray, seen: Windows) -> Value:
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
    require_few(math.prod(result) * channels * math.prod(seen.kernel))
    cells = seen.cells()
    # (out, windows, in / groups, cells)
    first = np.arange(out)[:, None] // (out // groups) * channels + np.arange(channels)
    index = first[:, None, :, None] * math.prod(seen.sizes) + np.maximum(cells, 0)[None, :, None, :]
    products = np.where(cells[None, :, None, :] >= 0, weight.reshape(out, 1, channels, -1), weight.dtype.type(0))
    added = None if bias is None else bias.reshape(-1).expand(out).repeat_interleave(len(cells)).numpy()
    return call.build.sparse(x, np.broadcast_to(index, products.shape), products, result, added)


@converts("ConvTranspose", 1, 11, 22)
def _conv_transpose(call: NodeCall) -> Value:
    """Read the convolution of x, with zeros between its elements and around them, with the mirrored kernel."""
    x, weight, groups = call.value(), _kernel(call), call.get("group", 1)
    sizes, kernel, dims = x.shape[2:], weight.shape[2:], len(x.shape) - 2
    strides, dilations, reach = _steps(call, kernel, dims)
    begins, ends = _transposed_padding(call, sizes, reach, strides)
    lengths = [(n - 1) * s + 2 * span - 1 for n, s, span in zip(sizes, strides, reach, strict=True)]
    grid = tuple(n - b - e for n, b, e in zip(lengths, begins, ends, strict=True))
    outputs = tuple(n - span + 1 for n, span in zip(grid, reach, strict=True))
    if min(outputs) < 1:
        raise InputError(f"its result would have the shape {outputs}")
    require_few(x.shape[1] * max(math.prod(lengths), math.prod(grid)))
    spread = np.full((1, x.shape[1], *lengths), -1)
    spread[:, :, *(slice(r - 1, n - r + 1, s) for r, n, s in zip(reach, lengths, strides, strict=True))] = places(x)
    # Less than the full result is a part of the grid, and more of it has zeros around.
    more = [(max(0, -b), max(0, -e)) for b, e in zip(begins, ends, strict=True)]
    spread = np.pad(spread, [(0, 0), (0, 0), *more], constant_values=-1)
    spread = spread[:, :, *(slice(max(0, b), max(0, b) + n) for b, n in zip(begins, grid, strict=True))]
    if not (spread >= 0).any():
        raise UnsupportedError("its result does not depend on its input")
    parts = np.flip(weight, tuple(range(2, weight.ndim))).reshape(groups, -1, *weight.shape[1:]).swapaxes(1, 2)
    mirrored = np.ascontiguousarray(parts.reshape(-1, *parts.shape[2:]))
    one, none = (1,) * dims, (0,) * dims
    seen = Windows(grid, kernel, reach, one, dilations, none, none, outputs)
    return _convolved(call, call.build.moved(x, spread), mirrored, seen)


def _transposed_padding(call: NodeCall, sizes: Sequence[int], reach: Sequence[int], strides: Sequence[int]) -> Pads:
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


# Pooling


def _pooled(call: NodeCall) -> tuple[Value, Windows, np.ndarray]:
    """Return the input of a pooling, (1, channels, …), the windows, and the first place of each of its images."""
    x = call.value()
    if len(x.shape) < 3:
        raise InputError(f"an input of shape {x.shape} cannot be pooled")
    sizes = x.shape[2:]
    starts = np.arange(math.prod(x.shape[:2]))[:, None, None] * math.prod(sizes)
    return x, _windows(call, sizes, sizes if call.op.startswith("Global") else call.get("kernel_shape", ())), starts


@converts("AveragePool", 7, 10, 11, 19, 22)
@converts("GlobalAveragePool", 1, 22)
def _average_pool(call: NodeCall) -> Value:
    x, seen, starts = _pooled(call)
    counted, pads = bool(call.get("count_include_pad", 0)), (*seen.begins, *seen.ends)
    whole = not call.get("ceil_mode", 0) and (counted or not any(pads))
    if whole and len(x.shape) == 4 and x.shape[0] == 1 and seen.dilations == (1, 1):
        number, error = share(math.prod(seen.kernel))
        weight = number.repeat(x.shape[1], 1, *seen.kernel)
        return call.build.convolution(x, weight, None, error, stride=seen.strides, padding=pads, groups=x.shape[1])
    cells = seen.cells()
    counts = (cells >= -int(counted)).sum(1, keepdims=True)
    if not counts.all():
        raise UnsupportedError("the mean of no values")
    shares, error = quotient(1.0, torch.from_numpy(np.asarray(counts)))
    weight_of = np.where(cells >= 0, shares.numpy(), 0.0).astype(np.float64 if error else np.float32)
    index = (starts + np.maximum(cells, 0)).reshape(-1, cells.shape[1])
    weights = np.tile(weight_of, (len(starts), 1))
    return call.build.sparse(x, index, weights, (*x.shape[:2], *seen.outputs), error=error)


@converts("MaxPool", 1, 8, 10, 11, 12, 22, group="maxima")
@converts("GlobalMaxPool", 1, 22, group="maxima")
def _max_pool(call: NodeCall) -> Value:
    x, seen, starts = _pooled(call)
    cells = seen.cells()
    if not (cells >= 0).any(1).all():
        # Padding takes no part.
        raise UnsupportedError("the maximum of no values")
    each = np.where(cells >= 0, starts + cells, -1)
    return call.build.maximum(x, each.reshape(-1, cells.shape[1]).T, (*x.shape[:2], *seen.outputs))


# Resizing

_HALF = Fraction(1, 2)

PLACES: dict[bytes, Callable[[int, int, int, Fraction], Fraction]] = {
    b"asymmetric": lambda i, before, after, scale: i / scale,
    b"half_pixel": lambda i, before, after, scale: (i + _HALF) / scale - _HALF,
    b"pytorch_half_pixel": lambda i, before, after, scale: (i + _HALF) / scale - _HALF if after > 1 else Fraction(0),
    b"align_corners": lambda i, before, after, scale: Fraction(i * (before - 1), max(1, after - 1)),
    b"half_pixel_symmetric": lambda i, before, after, scale: (
        Fraction(before, 2) * (1 - after / (scale * before)) + (i + _HALF) / scale - _HALF
    ),
}
"""The place that an output comes from, in the numbering of the inputs, by ``coordinate_transformation_mode``.

The arguments are the output's number, the axis' length before and after, and the factor between these.
"""

NEAREST: dict[bytes, Callable[[Fraction], int]] = {
    b"round_prefer_floor": lambda place: math.ceil(place - _HALF),
    b"round_prefer_ceil": lambda place: math.floor(place + _HALF),
    b"floor": math.floor,
    b"ceil": math.ceil,
}
"""The input that is taken for one at a place between inputs, by ``nearest_mode``."""

Terms = list[tuple[int, Fraction]]
"""Inputs along an axis, which may lie beyond its ends, and their weights."""


def _linear(place: Fraction) -> Terms:
    first = math.floor(place)
    return [(first, 1 - (place - first)), (first + 1, place - first)]


def _cubic(place: Fraction, a: Fraction) -> Terms:
    """R. Keys, Cubic Convolution Interpolation for Digital Image Processing, IEEE Trans. ASSP 29, 1981, eq. 15."""
    first, terms = math.floor(place), []
    for i in range(first - 1, first + 3):
        s = abs(place - i)
        near = ((a + 2) * s - (a + 3)) * s * s + 1
        far = ((a * s - 5 * a) * s + 8 * a) * s - 4 * a
        terms.append((i, near if s <= 1 else far))
    return terms


@converts("Upsample", 7, 9)
@converts("Resize", 10, 11, 13, 18, 19)
def _resize(call: NodeCall) -> Value:
    call.refuse(antialias=0, keep_aspect_ratio_policy=b"stretch")
    x, old, mode = call.value(), call.version < 11, call.get("mode", b"nearest")
    place = call.choice("coordinate_transformation_mode", b"asymmetric" if old else b"half_pixel", PLACES)
    nearest = call.choice("nearest_mode", b"floor" if old else b"round_prefer_floor", NEAREST)
    a = Fraction(float(np.float32(call.get("cubic_coeff_a", -0.75))))
    known: dict[bytes, Callable[[Fraction], Terms]] = {
        b"nearest": lambda at: [(nearest(at), Fraction(1))],
        b"linear": _linear,
        **({b"bilinear": _linear} if old else {b"cubic": lambda at: _cubic(at, a)}),
    }
    terms = call.choice("mode", b"nearest", known)
    if mode == b"linear":
        call.refuse(exclude_outside=0)
    # Inputs beyond an end are the one at the end, or are left out, the other weights made larger.
    inside = mode == b"cubic" and bool(call.get("exclude_outside", 0))
    factors = _factors(call, x.shape, old)
    shape = tuple(math.floor(factor * size) for size, factor in zip(x.shape, factors, strict=True))
    if min(shape) < 1:
        raise InputError(f"its result would have the shape {list(shape)}")
    if place is PLACES[b"align_corners"] and any(f * n != m for f, n, m in zip(factors, x.shape, shape, strict=True)):
        # The standard's own test cases and onnxruntime take different lengths for the result's.
        raise UnsupportedError("aligned corners of a result whose length is not whole")

    def line(before: int, after: int, scale: Fraction) -> list[Terms]:
        """Return the inputs and weights of each output along one axis."""
        if scale == 1 and before == after:
            return [[(i, Fraction(1))] for i in range(after)]
        found = [terms(place(i, before, after, scale)) for i in range(after)]
        if inside:
            found = [[(i, w if 0 <= i < before else Fraction(0)) for i, w in row] for row in found]
            found = [[(i, w / sum(share for _, share in row)) for i, w in row] for row in found]
        return [[(min(max(i, 0), before - 1), w) for i, w in row] for row in found]

    lines = [line(*axis) for axis in zip(x.shape, shape, factors, strict=True)]
    count = math.prod(len(each[0]) for each in lines)
    require_few(math.prod(shape) * count)
    error, short, numbers, weights = 0.0, True, [], []
    for axis, each in enumerate(lines):
        numbers.append(np.array([[i for i, _ in row] for row in each]) * math.prod(x.shape[axis + 1 :]))
        shares = np.array([[w for _, w in row] for row in each], dtype=object)
        closest, off = rounded(Derived(shares))
        weights.append(closest.numpy())
        # Each product rounds once more, unless all its factors are short: weights of few binary places.
        parts = {w.denominator for w in shares.flat}
        short &= all(part & (part - 1) == 0 and part <= 1 << 48 // len(shape) for part in parts)
        error = both(both(error, off), 0.0 if short else float(UNIT))
    index, weight = _outer(numbers, np.add), _outer(weights, np.multiply)
    if count == 1 and bool((weight == 1).all()):
        return call.build.moved(x, index.reshape(shape))
    if bool(((weight != 0) & (np.abs(weight) < LEAST_WEIGHT)).any()):
        raise UnsupportedError("weights next to 0")
    return call.build.sparse(x, index, weight, shape, error=error)


def _factors(call: NodeCall, shape: Shape, old: bool) -> list[Fraction]:
    """Return the factors by which the axes of a shape grow, by scales or sizes of some of them."""
    axes = [axis_of(axis, len(shape)) for axis in call.get("axes", range(len(shape)))]
    if old:
        scales, sizes = call.get("scales", ()) if call.version == 7 else call.constant(1), None
    else:
        scales, sizes = (None if given is None or not given.size else given for given in map(call.optional, (2, 3)))
    if (scales is None) == (sizes is None) or len(set(axes)) < len(axes):
        raise InputError("it must name either scales or sizes, and each axis once")
    given = np.reshape(scales if sizes is None else sizes, -1).tolist()
    if len(given) != len(axes):
        raise InputError(f"{len(given)} factors or sizes for {len(axes)} axes")
    factors = [Fraction(1)] * len(shape)
    for axis, value in zip(axes, given, strict=True):
        factors[axis] = Fraction(value) if sizes is None else Fraction(int(value), shape[axis])
    return factors
