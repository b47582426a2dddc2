"""The operators of ONNX that the checker knows, each as nodes of a graph (``tensors``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from onnx.reference import ReferenceEvaluator
from scipy import sparse

from verifiable_relu.check import functions
from verifiable_relu.check.errors import BadInput
from verifiable_relu.check.functions import Kinked, Rounded, Signs
from verifiable_relu.check.graph import Affine, Ordered, added, pick
from verifiable_relu.check.numbers import UNIT, Number
from verifiable_relu.check.tensors import LARGEST, Call, Gate, Multiple, Tensor, Value, spread
from verifiable_relu.check.windows import convolution, largest, means, transposed

ONE, NONE = np.ones(()), np.zeros(())

QUANTISED = ("int8", "uint8", "int16", "uint16")
"""The types of quantised numbers; biases have int32."""


def _derived(found: Number, of: Number) -> Number:
    """Quotients and roots of the file's numbers, each off by a few units of its own size; 0 where ``of`` is.

    Raises:
        BadInput: if one is so small or so large that float64 has it with another error.
    """
    size = np.abs(found)
    right = np.where(of == 0, found == 0, (size >= 2.0**-1022) & (size < np.inf)).all()
    BadInput.when(not right, "a number that is made of the file's is too small or too large")
    return found


def _inverse(numbers: Number) -> tuple[Number, float]:
    """Reciprocals, and their relative error: that of a power of two is exact."""
    exact = bool((np.abs(np.frexp(numbers)[0]) == 0.5).all())
    return _derived(1 / numbers, ONE), 0.0 if exact else 2 * UNIT


def moved(call: Call) -> Value:
    """An operator that only moves numbers, applied to the places of a tensor."""
    node, x, others = call.node, call.tensor(), call.inputs[1:]
    if node.op_type == "Gather":
        spread([x.index.size, np.asarray(others[0]).size])
    BadInput.when(any(isinstance(other, Tensor | Gate) for other in others), "constant places are expected")
    given = zip(node.input, (x.index, *others), strict=True)
    evaluator: Any = ReferenceEvaluator(node, opsets={"": call.opset})
    index = np.asarray(evaluator.run(None, {name: value for name, value in given if name})[0])
    return call.build.at(x.node, index)


def _with_gate(call: Call) -> tuple[Gate, Fraction] | None:
    """A gate, broadcast to the shape of the result, and a constant, if these are the inputs."""
    for one, other in (call.inputs, call.inputs[::-1]):
        if isinstance(one, Gate) and isinstance(other, np.ndarray) and other.size == 1 and np.isfinite(other).all():
            x = Tensor(one.x.node, np.broadcast_to(one.x.index, spread(one.x.shape, other.shape)))
            return replace(one, x=x), Fraction(float(other.astype(np.float64).item()))
    return None


def _sum(call: Call, sign: int) -> Value:
    if (parts := _with_gate(call)) is not None and sign > 0:
        return replace(parts[0], offset=parts[0].offset + parts[1])
    if all(isinstance(value, Tensor) for value in call.inputs):
        first, second = call.tensor(0), call.tensor(1)
        shape = spread(first.shape, second.shape)
        size = int(np.prod(shape))
        wide = [Tensor(x.node, np.broadcast_to(x.index, shape)) for x in (first, second)]
        terms = [call.build.term(x, np.full(size, factor)) for x, factor in zip(wide, (1.0, float(sign)), strict=True)]
        node = Affine(added(terms), np.zeros(size))
        if len(node.terms) == 1 and call.build.stored is not None and node.terms[0][1].nnz < 2 * size:
            raise BadInput("the rounding of a sum of a number with itself is not known")
        return call.build.computed(node, shape)
    if isinstance(call.inputs[0], Tensor):
        return call.scaled(ONE, sign * call.numbers(1))
    return call.scaled(np.full((), float(sign)), call.numbers(0))


def _product(call: Call) -> Value:
    if any(isinstance(value, Gate) for value in call.inputs):
        if (parts := _with_gate(call)) is None:
            return _gated(call)
        return replace(parts[0], scale=parts[0].scale * parts[1], offset=parts[0].offset * parts[1])
    return call.scaled(call.numbers(1 if isinstance(call.inputs[0], Tensor) else 0), NONE)


def _gated(call: Call) -> Value:
    """d·x times scale·(1 + erf(k·x)): 2·scale·d times x·(1 + erf(k·x))/2."""
    gate, x = sorted(call.inputs, key=lambda value: isinstance(value, Tensor))
    if isinstance(gate, Gate) and isinstance(x, Tensor) and gate.offset == gate.scale:
        inside = call.build.traced(gate.x)
        for outer in reversed(call.build.traced(x)):
            for inner in inside:
                if outer.x.node == inner.x.node and np.array_equal(outer.x.index, inner.x.index):
                    return _gelu(call, inner, 1.0, 2 * gate.scale * outer.factor)
    raise BadInput("a product that is not known")


def _gelu(call: Call, argument: Multiple, root: float, factor: Fraction) -> Value:
    """factor·x·(1 + erf(k·x))/2, where k is root times the argument's factor; root may be off by a unit."""
    moderate = functions.MODERATE[0] <= argument.factor <= functions.MODERATE[1]
    BadInput.when(not moderate, "the scale of a GELU is negative, too small or too large")
    made = call.activation(argument.x, functions.gelu(float(argument.factor) * root))
    call.inputs, outside = [made], np.array(float(factor))
    if Fraction(float(factor)) == factor:
        return made if factor == 1 else call.scaled(outside, NONE)
    return call.scaled(_derived(outside, ONE), NONE, UNIT, factor)


def _gelu_operator(call: Call) -> Value:
    BadInput.when(call.get("approximate", b"none") != b"none", "an approximation of GELU is not known")
    # Where a runtime rounds, a factor before the operator is another operator's.
    x = call.build.traced(call.tensor())[-1 if call.build.stored is None else 0]
    # The argument of erf is the operator's over the square root of 2.
    return _gelu(call, x, 0.7071067811865476, x.factor)


def _quotient(call: Call) -> Value:
    call.tensor(0)
    divisor = call.numbers(1)
    one = 1 / Fraction(float(divisor.item())) if divisor.size == 1 else None
    factor, off = _inverse(divisor)
    return call.scaled(factor, NONE, off, one)


def _gemm(call: Call) -> Value:
    x, weight = call.tensor(), call.numbers(1)
    BadInput.when(len(x.shape) != 2, "a matrix is expected")
    BadInput.when(not call.get("alpha", 1.0) == call.get("beta", 1.0) == 1.0, "alpha and beta are expected to be 1")
    index = x.index.T if call.get("transA", 0) else x.index
    weight = weight if call.get("transB", 0) else weight.T
    return _multiplied(call, Tensor(x.node, index), weight, call.numbers(2) if call.given(2) else NONE)


def _multiplied(call: Call, x: Tensor, weight: Number, bias: Number) -> Tensor:
    *leading, inputs = x.shape
    BadInput.when(weight.ndim != 2 or weight.shape[1] != inputs, "its inputs do not fit together")
    BadInput.when(weight.size * np.prod(leading, dtype=float) > LARGEST, "it is too large for this checker")
    shape, lead = (*leading, len(weight)), int(np.prod(leading))
    matrix = weight if lead == 1 else sparse.kron(sparse.eye_array(lead), sparse.csr_array(weight), format="csr")
    return call.affine(x, matrix, np.broadcast_to(bias, shape).ravel(), shape)


def _matmul(call: Call) -> Value:
    if isinstance(call.inputs[0], Tensor):
        return _multiplied(call, call.tensor(0), call.numbers(1).T, NONE)
    x = call.tensor(1)
    if len(x.shape) < 2:
        return _multiplied(call, x, call.numbers(0), NONE)
    found = _multiplied(call, Tensor(x.node, np.swapaxes(x.index, -1, -2)), call.numbers(0), NONE)
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
    call.inputs = [call.scaled(ONE, -mean), None]
    found = call.scaled(factor, bias, 8 * UNIT)
    made = call.build.nodes[found.node]
    assert isinstance(made, Affine)
    made.is_inexact_factor = scale.size == 1 and not (bias.any() or mean.any())
    return found


def _kinked(call: Call, slope: Number) -> Value:
    x = call.tensor()
    fits = np.broadcast_shapes(slope.shape, x.shape) == x.shape and np.isfinite(slope).all()
    BadInput.when(not fits, "its slopes do not fit its input, or are not finite")
    return call.activation(x, Kinked(np.ascontiguousarray(np.broadcast_to(slope, x.shape)).ravel()))


def _steps(call: Call, shape: tuple[int, ...], kinds: tuple[str, ...]) -> tuple[Number, Number, str]:
    """The scale, the zero point, spread along the axis that they are for, and the type of the whole numbers."""
    unknown = [name for name in ("block_size", "output_dtype", "precision") if call.get(name, 0)]
    BadInput.when(unknown, f"{unknown} is not known")
    scale, zero = call.numbers(1), call.inputs[2] if call.given(2) else np.zeros((), np.uint8)
    fits = isinstance(zero, np.ndarray) and (zero.shape == scale.shape or not call.given(2))
    if not isinstance(zero, np.ndarray) or not fits or str(zero.dtype) not in kinds:
        raise BadInput("a zero point like the scale, a whole number of a type that is known, is expected")
    BadInput.when(not ((scale > 0) & np.isfinite(scale)).all(), "a scale is not positive")
    axis = call.get("axis", 1)
    axis += len(shape) if axis < 0 else 0
    found = []
    for part in (scale, zero.astype(np.float64)):
        alone = part.size == 1
        fits = alone or (part.ndim == 1 and 0 <= axis < len(shape) and part.size == shape[axis])
        BadInput.when(not fits, "a scale for each place of one axis is expected")
        found.append(part.reshape(() if alone else [-1 if i == axis else 1 for i in range(len(shape))]))
    return found[0], found[1], str(zero.dtype)


def _quantize(call: Call) -> Value:
    """round(x/scale) + zero as low + relu(…), and that as high − relu(high − …)."""
    scale, zero, kind = _steps(call, call.tensor().shape, QUANTISED)
    low, high = float(np.iinfo(kind).min), float(np.iinfo(kind).max)
    factor, off = _inverse(scale)
    call.inputs = [call.scaled(factor, NONE, off)]
    call.inputs = [call.activation(call.tensor(), Rounded())]
    for sign, bias in ((ONE, zero - low), (-ONE, np.full((), high - low))):
        call.inputs = [call.scaled(sign, bias)]
        call.inputs = [_kinked(call, NONE)]
    made = call.scaled(-ONE, np.full((), high))
    call.build.whole[made.node] = kind
    return made


def _dequantize(call: Call) -> Value:
    whole = call.inputs[0]
    types = () if call.given(2) else ("uint8",)
    if isinstance(whole, Tensor):
        kind = call.build.whole.get(whole.node, "")
        scale, zero, _ = _steps(call, whole.shape, (kind, *types))
        # A whole number less another is exact: of what runs, the product with the scale alone is rounded.
        call.inputs = [whole]
        difference = call.scaled(ONE, -zero)
        call.build.whole[difference.node] = kind
        call.inputs = [difference]
        made = call.scaled(scale, NONE)
        # What it multiplies is no multiple of the numbers before: a curve behind it is one of its result.
        call.build.multiples.pop(made.node, None)
        return made
    if not isinstance(whole, np.ndarray) or str(whole.dtype) not in (*QUANTISED, "int32"):
        raise BadInput("whole numbers of a type that is known are expected")
    scale, zero, _ = _steps(call, whole.shape, (str(whole.dtype), *types))
    number = whole.astype(np.float64) - zero
    found = np.asarray(number * scale)
    if np.abs(number).max(initial=0) >= 1 << 24:
        pairs = zip(*(part.ravel().tolist() for part in np.broadcast_arrays(number, scale, found)), strict=True)
        exact = all(Fraction(n) * Fraction(s) == Fraction(product) for n, s, product in pairs)
        BadInput.when(not exact, "a number that float64 does not hold")
    return found


def _concat(call: Call) -> Value:
    tensors = [call.tensor(at) for at in range(len(call.inputs))]
    axis = call.axis(len(tensors[0].shape), 1)
    which = np.concatenate([np.full(x.shape, at) for at, x in enumerate(tensors)], axis)
    index = np.concatenate([x.index for x in tensors], axis)
    sizes = [call.build.nodes[x.node].size for x in tensors]
    terms = [(x.node, pick(np.where(which == at, index, -1), sizes[at])) for at, x in enumerate(tensors)]
    return call.build.computed(Affine(added(terms), np.zeros(index.size)), index.shape)


def _upsample(call: Call) -> Value:
    x = call.tensor()
    scales = call.numbers(1).ravel().tolist() if call.given(1) else call.get("scales", [])
    known = call.get("mode", b"nearest") == b"nearest" and len(scales) == len(x.shape)
    whole = known and all(scale >= 1 and scale == int(scale) for scale in scales)
    BadInput.when(not whole, "only whole factors, and the nearest number, are known")
    spread([int(scale) * size for scale, size in zip(scales, x.shape, strict=True)])
    index = x.index
    for axis, scale in enumerate(scales):
        index = np.repeat(index, int(scale), axis)
    return call.build.at(x.node, index)


def _pad(call: Call) -> Value:
    """Numbers around a tensor; negative pads take elements off first."""
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
        return call.build.at(x.node, padded)
    size = call.build.nodes[x.node].size
    bias = np.where(padded < 0, float(call.numbers(2).item()) if call.given(2) else value, 0.0)
    return call.affine(Tensor(x.node, np.arange(size)), pick(padded, size), bias.ravel(), padded.shape)


def _dropout(call: Call) -> Value:
    training = call.inputs[2] if call.given(2) else np.zeros(())
    fits = isinstance(training, np.ndarray) and not training.any()
    BadInput.when(not fits, "dropout in training is not known")
    return call.tensor()


def _ordered(call: Call) -> Value:
    x = call.tensor()
    return call.build.computed(Ordered(call.build.settled(x), x.index.size), x.shape)


def _softmax(call: Call) -> Value:
    """A softmax, or its logarithm, over all entries: each is an increasing function, the same for all of them.

    In operator sets before 13 it is one over all axes from ``axis`` on.
    """
    shape, old = call.tensor().shape, call.opset < 13
    axis = call.axis(len(shape), 1 if old else -1)
    over = shape[axis:] if old else shape[axis : axis + 1]
    BadInput.when(np.prod(over) != np.prod(shape), "a softmax over a part of its input is not known")
    return _ordered(call)


MOVED = {"DequantizeLinear", "Flatten", "Identity", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
"""Operators that take quantised numbers; all but the first only choose or move them."""

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
    "Erf": lambda call: Gate(call.tensor()),
    "Gelu": _gelu_operator,
    "Gemm": _gemm,
    "GlobalAveragePool": lambda call: means(call, everywhere=True),
    "LeakyRelu": lambda call: _kinked(call, np.array(np.float32(call.get("alpha", 0.01)), np.float64)),
    "LogSoftmax": _softmax,
    "MatMul": _matmul,
    "MaxPool": largest,
    "Mul": _product,
    "Neg": lambda call: call.scaled(-ONE, NONE),
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
