"""The operators of ONNX that the checker knows, each as nodes of a graph (``tensors``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, cast

import numpy as np
from onnx.reference import ReferenceEvaluator
from scipy import sparse

from verifiable_relu.check import functions
from verifiable_relu.check.errors import BadInput
from verifiable_relu.check.functions import Kinked, Rounded, Signs
from verifiable_relu.check.graph import (
    LARGEST,
    Call,
    MaximumNode,
    Multiple,
    Ordered,
    Tensor,
    Value,
    Whole,
    affine,
    pick,
    spread,
)
from verifiable_relu.check.numbers import UNIT, Matrix, Number

ONE, NONE = np.ones(()), np.zeros(())

QUANTISED = ("int8", "uint8", "int16", "uint16")
"""The types of quantised numbers; biases have int32."""


def _derived(found: Number, of: Number) -> Number:
    """Return quotients and roots of the file's numbers, each off by a few units of its size; 0 where ``of`` is."""
    size = np.abs(found)
    right = np.where(of == 0, found == 0, (size >= 2.0**-1022) & (size < np.inf)).all()
    BadInput.when(not right, "a number that is made of the file's is too small or too large")
    return found


def _inverse(numbers: Number) -> tuple[Number, float]:
    """Return reciprocals, and their relative error: that of a power of two is exact."""
    exact = bool((np.abs(np.frexp(numbers)[0]) == 0.5).all())
    return _derived(1 / numbers, ONE), 0.0 if exact else 2 * UNIT


def moved(call: Call) -> Value:
    """Return an operator that only moves numbers, applied to the places of a tensor."""
    node, x, others = call.node, call.tensor(), call.inputs[1:]
    if node.op_type == "Gather":
        spread([x.index.size, np.asarray(others[0]).size])
    given = all(other is None or isinstance(other, np.ndarray) for other in others)
    BadInput.when(not given, "constant places are expected")
    named = zip(node.input, (x.index, *others), strict=True)
    evaluator: Any = ReferenceEvaluator(node, opsets={"": call.opset})
    return Tensor(x.node, np.asarray(evaluator.run(None, {name: value for name, value in named if name})[0]))


def _sum(call: Call, sign: int) -> Value:
    if not all(isinstance(value, Tensor) for value in call.inputs):
        if isinstance(call.inputs[0], Tensor):
            return call.scaled(call.tensor(), ONE, sign * call.numbers(1))
        return call.scaled(call.tensor(1), np.full((), float(sign)), call.numbers(0))
    tensors = call.tensor(0), call.tensor(1)
    shape = spread(*(x.shape for x in tensors))
    one = np.ones(int(np.prod(shape)))
    wide = zip(tensors, (one, sign * one), strict=True)
    terms = [(call.build.settled(Tensor(x.node, np.broadcast_to(x.index, shape))), factor) for x, factor in wide]
    return call.build.computed(affine(terms, 0 * one), shape)


def _product(call: Call) -> Value:
    if all(isinstance(value, Tensor) for value in call.inputs):
        return _gated(call)
    place = int(not isinstance(call.inputs[0], Tensor))
    return call.scaled(call.tensor(place), call.numbers(1 - place), NONE)


def _gated(call: Call) -> Value:
    """Return d·x times scale·(1 + erf(k·x)): 2·scale·d times x·(1 + erf(k·x))/2."""
    for gate, x in ((call.tensor(0), call.tensor(1)), (call.tensor(1), call.tensor(0))):
        of, scale, offset = call.build.gates.get(gate.node, (x, Fraction(0), Fraction(1)))
        inside = call.build.traced(Tensor(of.node, of.index.ravel()[gate.index])) if offset == scale else []
        for outer, factor in reversed(call.build.traced(x)):
            for inner in inside:
                if outer.node == inner[0].node and np.array_equal(outer.index, inner[0].index):
                    return _gelu(call, inner, 1.0, 2 * scale * factor)
    raise BadInput("a product that is not known")


def _gelu(call: Call, argument: Multiple, root: float, factor: Fraction) -> Value:
    """Return factor·x·(1 + erf(k·x))/2, k = root times the argument's factor; root may be off by a unit."""
    moderate = functions.MODERATE[0] <= argument[1] <= functions.MODERATE[1]
    BadInput.when(not moderate, "the scale of a GELU is negative, too small or too large")
    made = call.activation(argument[0], functions.gelu(float(argument[1]) * root))
    outside = np.array(float(factor))
    if Fraction(float(factor)) == factor:
        return made if factor == 1 else call.scaled(made, outside, NONE)
    return call.scaled(made, _derived(outside, ONE), NONE, UNIT, factor)


def _gelu_operator(call: Call) -> Value:
    BadInput.when(call.get("approximate", b"none") != b"none", "an approximation of GELU is not known")
    # Where a runtime rounds, a factor before the operator is another operator's.
    x = call.build.traced(call.tensor())[-1 if call.build.stored is None else 0]
    # The argument of erf is the operator's over the square root of 2.
    return _gelu(call, x, 0.7071067811865476, x[1])


def _quotient(call: Call) -> Value:
    divisor = call.numbers(1)
    one = 1 / Fraction(float(divisor.item())) if divisor.size == 1 else None
    factor, off = _inverse(divisor)
    return call.scaled(call.tensor(), factor, NONE, off, one)


def _gemm(call: Call) -> Value:
    x, weight = call.tensor(), call.numbers(1)
    BadInput.when(len(x.shape) != 2, "a matrix is expected")
    BadInput.when(not call.get("alpha", 1.0) == call.get("beta", 1.0) == 1.0, "alpha and beta are expected to be 1")
    index = x.index.T if call.get("transA", 0) else x.index
    return _multiplied(
        call, Tensor(x.node, index), weight if call.get("transB", 0) else weight.T, call.numbers(2, NONE)
    )


def _multiplied(call: Call, x: Tensor, weight: Number, bias: Number = NONE) -> Tensor:
    *leading, inputs = x.shape
    BadInput.when(weight.ndim != 2 or weight.shape[1] != inputs, "its inputs do not fit together")
    BadInput.when(weight.size * np.prod(leading, dtype=float) > LARGEST, "it is too large for this checker")
    shape, lead = (*leading, len(weight)), int(np.prod(leading))
    matrix = weight if lead == 1 else sparse.kron(sparse.eye_array(lead), sparse.csr_array(weight), format="csr")
    return call.affine(x, matrix, np.broadcast_to(bias, shape).ravel(), shape)


def _matmul(call: Call) -> Value:
    if isinstance(call.inputs[0], Tensor):
        return _multiplied(call, call.tensor(0), call.numbers(1).T)
    x = call.tensor(1)
    if len(x.shape) < 2:
        return _multiplied(call, x, call.numbers(0))
    found = _multiplied(call, Tensor(x.node, np.swapaxes(x.index, -1, -2)), call.numbers(0))
    return Tensor(found.node, np.swapaxes(found.index, -1, -2))


def _normalisation(call: Call) -> Value:
    x = call.tensor()
    BadInput.when(call.get("training_mode", 0) or call.opset < 9, "batch normalisation in training is not known")
    scale, bias, mean, variance = (call.numbers(i).reshape(-1, *[1] * (len(x.shape) - 2)) for i in range(1, 5))
    variance = variance + np.float64(np.float32(call.get("epsilon", 1e-5)))
    fits = len(x.shape) > 1 and all(len(part) == x.shape[1] for part in (scale, bias, mean, variance))
    BadInput.when(not fits, "its inputs do not fit together")
    BadInput.when(not ((variance > 0) & (variance < np.inf)).all(), "a variance is not positive")
    factor = _derived(scale / np.sqrt(variance), scale)
    # factor·(x − mean) + bias; the factor is the one number that is rounded.
    found = call.scaled(call.scaled(x, ONE, -mean), factor, bias, 8 * UNIT)
    call.build.nodes[found.node].is_inexact_factor = scale.size == 1 and not (bias.any() or mean.any())
    return found


def _kinked(call: Call, slope: Number, x: Tensor | None = None) -> Tensor:
    x = x or call.tensor()
    fits = np.broadcast_shapes(slope.shape, x.shape) == x.shape and np.isfinite(slope).all()
    BadInput.when(not fits, "its slopes do not fit its input, or are not finite")
    return call.activation(x, Kinked(np.ascontiguousarray(np.broadcast_to(slope, x.shape)).ravel()))


def _steps(call: Call, shape: tuple[int, ...], kinds: tuple[str, ...]) -> tuple[Number, Number, str]:
    """Return the scale, the zero point, spread along the axis that they are for, and the type of the whole numbers."""
    unknown = [name for name in ("block_size", "output_dtype", "precision") if call.get(name, 0)]
    BadInput.when(unknown, f"{unknown} is not known")
    scale, zero = call.numbers(1), cast(Any, call.inputs[2] if call.given(2) else np.zeros((), np.uint8))
    fits = isinstance(zero, np.ndarray) and (zero.shape == scale.shape or not call.given(2))
    if not fits or str(zero.dtype) not in kinds:
        raise BadInput("a zero point like the scale, a whole number of a type that is known, is expected")
    BadInput.when(not ((scale > 0) & np.isfinite(scale)).all(), "a scale is not positive")
    along: tuple[int, ...] = ()
    if scale.size > 1:
        axis = call.axis(len(shape))
        BadInput.when(scale.shape != shape[axis : axis + 1], "a scale for each place of one axis is expected")
        along = tuple(-1 if i == axis else 1 for i in range(len(shape)))
    return scale.reshape(along), zero.astype(np.float64).reshape(along), str(zero.dtype)


def _quantize(call: Call) -> Value:
    """Return round(x/scale) + zero as low + relu(…), and that as high − relu(high − …)."""
    scale, zero, kind = _steps(call, call.tensor().shape, QUANTISED)
    low, high = float(np.iinfo(kind).min), float(np.iinfo(kind).max)
    factor, off = _inverse(scale)
    made = call.activation(call.scaled(call.tensor(), factor, NONE, off), Rounded())
    for sign, bias in ((ONE, zero - low), (-ONE, np.full((), high - low))):
        made = _kinked(call, NONE, call.scaled(made, sign, bias))
    return Whole(call.scaled(made, -ONE, np.full((), high)), kind)


def _dequantize(call: Call) -> Value:
    whole = call.inputs[0]
    types = () if call.given(2) else ("uint8",)
    if isinstance(whole, Whole):
        scale, zero, _ = _steps(call, whole.x.shape, (whole.kind, *types))
        made = call.scaled(call.scaled(whole.x, ONE, -zero), scale, NONE)
        # What it multiplies is no multiple of the numbers before: a curve behind it is one of its result.
        call.build.multiples.pop(made.node, None)
        return made
    if not isinstance(whole, np.ndarray) or str(whole.dtype) not in (*QUANTISED, "int32"):
        raise BadInput("whole numbers of a type that is known are expected")
    scale, zero, _ = _steps(call, whole.shape, (str(whole.dtype), *types))
    number = whole.astype(np.float64) - zero
    found = np.asarray(number * scale)
    # Products of 29 and of 24 bits.
    exact = np.abs(number).max(initial=0) < 1 << 29 and (scale == scale.astype(np.float32)).all()
    BadInput.when(not exact, "a number that float64 may not hold")
    return found


def _concat(call: Call) -> Value:
    tensors = [call.tensor(at) for at in range(len(call.inputs))]
    axis = call.axis(len(tensors[0].shape), 1)
    which = np.concatenate([np.full(x.shape, at) for at, x in enumerate(tensors)], axis)
    index = np.concatenate([x.index for x in tensors], axis)
    sizes = [call.build.nodes[x.node].size for x in tensors]
    terms = [(x.node, pick(np.where(which == at, index, -1), sizes[at])) for at, x in enumerate(tensors)]
    return call.build.computed(affine(terms, np.zeros(index.size)), index.shape)


def _upsample(call: Call) -> Value:
    x = call.tensor()
    scales = call.numbers(1).ravel().tolist() if call.given(1) else call.get("scales", [])
    known = call.get("mode", b"nearest") == b"nearest" and all(scale >= 1 and scale == int(scale) for scale in scales)
    BadInput.when(not known, "only whole factors, and the nearest number, are known")
    spread([int(scale) * size for scale, size in zip(scales, x.shape, strict=True)])
    index = x.index
    for axis, scale in enumerate(scales):
        index = np.repeat(index, int(scale), axis)
    return Tensor(x.node, index)


def _pad(call: Call) -> Value:
    """Put numbers around a tensor; negative pads take elements off first."""
    x, pads, value = call.tensor(), call.integers("pads", 1), call.get("value", 0.0)
    rank, given = len(x.shape), call.integers("axes", 3)
    axes = [axis + rank * (axis < 0) for axis in (range(rank) if given is None else given)]
    known = call.get("mode", b"constant") == b"constant" and pads is not None and len(pads) == 2 * len(axes)
    if not known or pads is None or len(set(axes)) < len(axes) or not set(axes) <= set(range(rank)):
        raise BadInput("the padding is not known")
    index, widths = x.index, [(0, 0)] * rank
    for axis, first, last in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        kept = range(max(0, -first), x.shape[axis] - max(0, -last))
        BadInput.when(kept.start >= kept.stop, "negative pads take everything off")
        index, widths[axis] = np.take(index, kept, axis), (max(0, first), max(0, last))
    spread([size + sum(width) for size, width in zip(index.shape, widths, strict=True)])
    padded = np.pad(index, widths, constant_values=-1)
    if (padded >= 0).all():
        return Tensor(x.node, padded)
    size = call.build.nodes[x.node].size
    bias = np.where(padded < 0, float(call.numbers(2, np.array(value)).item()), 0.0)
    return call.affine(Tensor(x.node, np.arange(size)), pick(padded, size), bias.ravel(), padded.shape)


def _dropout(call: Call) -> Value:
    training = call.inputs[2] if call.given(2) else NONE
    BadInput.when(not isinstance(training, np.ndarray) or training.any(), "dropout in training is not known")
    return call.tensor()


def _ordered(call: Call) -> Tensor:
    x = call.tensor()
    return call.build.computed(Ordered((call.build.settled(x),), x.index.size), x.shape)


def _erf(call: Call) -> Value:
    made = _ordered(call)
    call.build.gates[made.node] = call.tensor(), Fraction(1), Fraction(0)
    return made


def _softmax(call: Call) -> Value:
    """Return a softmax, or its logarithm, over all entries: each is an increasing function, the same for all of them.

    In operator sets before 13 it is one over all axes from ``axis`` on.
    """
    shape, old = call.tensor().shape, call.opset < 13
    axis = call.axis(len(shape), 1 if old else -1)
    over = shape[axis:] if old else shape[axis : axis + 1]
    BadInput.when(np.prod(over) != np.prod(shape), "a softmax over a part of its input is not known")
    return _ordered(call)


def _layout(call: Call, kernel: list[int]) -> tuple[list[int], list[int], list[int], bytes]:
    """Return strides, dilations, pads (those before, then those behind) and how the pads are given."""
    shape, rank, mode = call.tensor().shape, len(kernel), call.get("auto_pad", b"NOTSET")
    stride, dilation = call.get("strides", [1] * rank), call.get("dilations", [1] * rank)
    pads = call.get("pads", [0] * (2 * rank))
    fits = shape[:1] == (1,) and len(shape) == rank + 2 and min(kernel, default=0) >= 1
    BadInput.when(not fits, "one sample with channels, and a window of as many axes, are expected")
    lengths = [len(pads), len(stride), len(dilation)] == [2 * rank, rank, rank]
    BadInput.when(not lengths or min(pads) < 0 or min(stride + dilation) < 1, "the window is malformed")
    BadInput.when(call.get("kernel_shape", kernel) != kernel, "its inputs do not fit together")
    BadInput.when(mode == b"VALID" and any(pads), "the padding is not known")
    return stride, dilation, pads, mode


def _windows(
    shape: Sequence[int],
    counts: Sequence[int],
    kernel: Sequence[int],
    stride: list[int],
    dilation: list[int],
    pads: list[int],
) -> Number:
    """Return (channels, *counts, *kernel): the entries that windows cover, −1 in the padding, −2 beyond it.

    ``shape`` is that of the entries, (channels, *sizes), which are counted in row-major order.
    """
    rank, found = len(kernel), np.zeros((), np.int64)
    spread([shape[0], *counts, *kernel])
    for axis, size in enumerate(shape[1:]):
        at = np.arange(counts[axis])[:, None] * stride[axis] + np.arange(kernel[axis]) * dilation[axis] - pads[axis]
        at = np.where(at < size, np.maximum(at, -1), np.where(at < size + pads[rank + axis], -1, -2))
        at = np.expand_dims(at, [i for i in range(2 * rank) if i % rank != axis])
        found = np.where(np.minimum(found, at) < 0, np.minimum(found, at), found * size + at)
    channel = np.arange(shape[0]).reshape(-1, *[1] * (2 * rank)) * int(np.prod(shape[1:]))
    return np.where(found < 0, found, found + channel)


def _covered(call: Call, kernel: list[int]) -> Number:
    """Return the entries of the input that each window covers (``_windows``).

    With ``ceil_mode`` the last windows may reach beyond the padding.
    """
    _, *shape = call.tensor().shape
    stride, dilation, pads, mode = _layout(call, kernel)
    rank, ceil = len(kernel), bool(call.get("ceil_mode", 0))
    BadInput.when(mode not in (b"NOTSET", b"VALID", b"SAME_UPPER", b"SAME_LOWER"), "the padding is not known")
    BadInput.when(ceil and mode != b"NOTSET", "ceil_mode with a padding that is not given is not known")
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    if mode.startswith(b"SAME"):
        BadInput.when(max(dilation) > 1, "padding to the same size of a dilated window is not known")
        whole = [max((-(-n // s) - 1) * s + r - n, 0) for n, s, r in zip(shape[1:], stride, reach, strict=True)]
        first = [(w + (mode == b"SAME_LOWER")) // 2 for w in whole]
        pads = first + [w - f for w, f in zip(whole, first, strict=True)]
    counts = []
    for n, before, behind, step, span in zip(shape[1:], pads[:rank], pads[rank:], stride, reach, strict=True):
        room = n + before + behind - span
        last = -(-room // step) if ceil else room // step
        # With ceil_mode a window that would begin in the padding behind the entries is left out.
        counts.append(last + 1 - (ceil and last * step >= n + before))
    BadInput.when(min(counts) < 1, "a window is larger than what it moves over")
    return _windows(shape, counts, kernel, stride, dilation, pads)


def _products(weight: Number, groups: int, windows: Number, size: int) -> Matrix:
    """Return the matrix of a convolution of ``size`` numbers, some of them covered by windows."""
    outputs, per_group, *kernel = weight.shape
    count = int(np.prod(windows.shape[1 : 1 + len(kernel)]))
    fits = groups >= 1 and windows.shape[0] == per_group * groups and not outputs % groups
    BadInput.when(not fits, "its inputs do not fit together")
    spread([count, weight.size])
    # (group, place, channel of the group and place of the kernel)
    columns: Number = windows.reshape(groups, per_group, count, -1).transpose(0, 2, 1, 3).reshape(groups, count, -1)
    columns = np.repeat(columns, outputs // groups, axis=0)
    values = np.broadcast_to(weight.reshape(outputs, 1, -1), columns.shape)
    rows = np.broadcast_to(np.arange(outputs * count).reshape(outputs, count, 1), columns.shape)
    kept = (columns >= 0) & (values != 0)
    return sparse.csr_array((values[kept], (rows[kept], columns[kept])), shape=(outputs * count, size))


def _weighted(call: Call, matrix: Matrix, outputs: int, places: Sequence[int]) -> Tensor:
    bias = np.repeat(call.numbers(2, np.zeros(outputs)), int(np.prod(places)))
    BadInput.when(len(bias) != matrix.shape[0], "its inputs do not fit together")
    return call.affine(call.tensor(), matrix, bias, (1, outputs, *places))


def convolution(call: Call) -> Tensor:
    """Return Conv, as a sparse matrix."""
    weight = call.numbers(1)
    windows = _covered(call, list(weight.shape[2:]))
    matrix = _products(weight, call.get("group", 1), windows, call.tensor().index.size)
    return _weighted(call, matrix, len(weight), windows.shape[1 : weight.ndim - 1])


def transposed(call: Call) -> Tensor:
    """Return ConvTranspose: its matrix is the transposed one of the convolution of its output with the weights."""
    x, weight, groups = call.tensor(), call.numbers(1), call.get("group", 1)
    channels, per_group, *kernel = weight.shape
    stride, dilation, pads, mode = _layout(call, kernel)
    sizes, rank, further = x.shape[2:], len(kernel), call.get("output_padding", [0] * len(kernel))
    fits = x.shape[1] == channels and len(further) == rank and min(further) >= 0
    BadInput.when(not fits, "its inputs do not fit together")
    known = mode in (b"NOTSET", b"VALID") and not call.get("output_shape", None)
    BadInput.when(not known, "a padding that is not given is not known")
    reach = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(sizes, stride, kernel, dilation, strict=True)]
    places = [r + m - a - b for r, m, a, b in zip(reach, further, pads[:rank], pads[rank:], strict=True)]
    BadInput.when(min(places) < 1 or groups < 1, "its inputs do not fit together")
    shape = spread([per_group * groups, *places])
    windows = _windows(shape, sizes, kernel, stride, dilation, pads)
    matrix = _products(weight, groups, windows, int(np.prod(shape)))
    return _weighted(call, sparse.csr_array(matrix.T), shape[0], places)


def _pooled(call: Call, kernel: list[int]) -> tuple[Number, tuple[int, ...]]:
    """Return the entries that a pooling's windows cover, (windows, most), and the shape of its output."""
    wide = any(pad >= size for pad, size in zip(call.get("pads", ()), 2 * kernel, strict=False))
    BadInput.when(wide, "a padding as wide as the window is not known")
    windows = _covered(call, kernel)
    shape = windows.shape[: 1 + len(kernel)]
    cells = windows.reshape(int(np.prod(shape)), -1)
    BadInput.when(not (cells >= 0).any(1).all(), "a window covers nothing but padding")
    return cells, (1, *shape)


def means(call: Call, everywhere: bool = False) -> Tensor:
    """Return AveragePool: the mean of each window; with ``everywhere``, of each channel (GlobalAveragePool).

    The divisor is how many entries the window covers, with ``count_include_pad`` those of the padding included.
    """
    x = call.tensor()
    cells, shape = _pooled(call, list(x.shape[2:]) if everywhere else call.get("kernel_shape", []))
    counts = (cells >= (-1 if call.get("count_include_pad", 0) else 0)).sum(1)
    rows, places = np.nonzero(cells >= 0)
    inverse, off = _inverse(counts)
    matrix = sparse.csr_array((inverse[rows], (rows, cells[rows, places])), shape=(len(cells), x.index.size))
    return call.affine(x, matrix, np.zeros(len(cells)), shape, off)


def largest(call: Call) -> Tensor:
    """Return MaxPool: the largest entry of each window."""
    x = call.tensor()
    cells, shape = _pooled(call, call.get("kernel_shape", []))
    # Entries come first, and the first of them stands in the place of what is missing.
    cells = np.take_along_axis(cells, np.argsort(cells < 0, axis=1, kind="stable"), 1).T
    rivals = x.index.ravel()[np.where(cells >= 0, cells, cells[0])[(cells >= 0).any(1)]]
    if len(rivals) == 1:
        return Tensor(x.node, rivals[0].reshape(shape))
    return call.build.computed(MaximumNode((x.node,), rivals.shape[1], rivals), shape)


MOVED = {"Flatten", "Identity", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
"""Operators that take quantised numbers, too, which they choose or move."""

OPERATORS: dict[str, Callable[[Call], Value]] = {
    **dict.fromkeys(("Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"), moved),
    **dict.fromkeys(("Asinh", "Atan", "Exp", "Softplus", "Softsign"), _ordered),
    "Abs": lambda call: _kinked(call, np.full((), -1.0)),
    "Add": lambda call: _sum(call, 1),
    "AveragePool": means,
    "BatchNormalization": _normalisation,
    "Concat": _concat,
    "Conv": convolution,
    "ConvTranspose": transposed,
    "DequantizeLinear": _dequantize,
    "Div": _quotient,
    "Dropout": _dropout,
    "Erf": _erf,
    "Gelu": _gelu_operator,
    "Gemm": _gemm,
    "GlobalAveragePool": lambda call: means(call, everywhere=True),
    "LeakyRelu": lambda call: _kinked(call, np.array(np.float32(call.get("alpha", 0.01)), np.float64)),
    "LogSoftmax": _softmax,
    "MatMul": _matmul,
    "MaxPool": largest,
    "Mul": _product,
    "Neg": lambda call: call.scaled(call.tensor(), -ONE, NONE),
    "Pad": _pad,
    "PRelu": lambda call: _kinked(call, call.numbers(1)),
    "QuantizeLinear": _quantize,
    "Relu": lambda call: _kinked(call, NONE),
    "Round": lambda call: call.activation(call.tensor(), Rounded()),
    "Sigmoid": lambda call: call.activation(call.tensor(), functions.SIGMOID),
    "Sign": lambda call: call.activation(call.tensor(), Signs()),
    "Softmax": _softmax,
    "Sub": lambda call: _sum(call, -1),
    "Tanh": lambda call: call.activation(call.tensor(), functions.TANH),
    "Upsample": _upsample,
}
"""How each operator is read; all of them mean the same in every operator set from 7 on, where they exist."""
