"""The operators of ONNX that the checker knows, each as nodes of a graph (``tensors``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
from scipy import sparse

from verifiable_relu.check import curves
from verifiable_relu.check.arithmetic import MODERATE, UNIT, Matrix, Number, derived
from verifiable_relu.check.errors import BadInput
from verifiable_relu.check.graph import ActivationNode, AffineNode, Ordered, pick
from verifiable_relu.check.tensors import LARGEST, Gate, Multiple, OperatorCall, Tensor, Value, spread
from verifiable_relu.check.windows import convolution, largest, means, transposed


def _with_gate(call: OperatorCall) -> tuple[Gate, Fraction] | None:
    """A gate, broadcast to the shape of the result, and a constant, if these are the inputs."""
    for one, other in (call.inputs, call.inputs[::-1]):
        if isinstance(one, Gate) and isinstance(other, np.ndarray) and other.size == 1 and np.isfinite(other).all():
            x = Tensor(one.x.node, np.broadcast_to(one.x.index, spread(one.x.shape, other.shape)))
            return replace(one, x=x), Fraction(float(other.astype(np.float64).item()))
    return None


def _sum(call: OperatorCall, sign: int) -> Value:
    if (parts := _with_gate(call)) is not None and sign > 0:
        return replace(parts[0], offset=parts[0].offset + parts[1])
    if all(isinstance(value, Tensor) for value in call.inputs):
        first, second = call.tensor(0), call.tensor(1)
        shape = spread(first.shape, second.shape)
        terms: dict[int, Matrix] = {}
        for factor, x in ((1, first), (sign, second)):
            matrix = factor * pick(np.broadcast_to(x.index, shape).ravel(), call.build.nodes[x.node].size)
            terms[x.node] = terms[x.node] + matrix if x.node in terms else matrix
        made = call.build.computed(AffineNode(list(terms.items()), np.zeros(int(np.prod(shape)))), shape)
        if call.build.stored is not None and sum(matrix.nnz for matrix in terms.values()) < 2 * made.index.size:
            raise BadInput("the rounding of a sum of a number with itself is not known")
        return made
    if isinstance(call.inputs[0], Tensor):
        return call.scaled(np.ones(()), sign * call.numbers(1))
    return call.scaled(np.full((), float(sign)), call.numbers(0))


def _product(call: OperatorCall) -> Value:
    if any(isinstance(value, Gate) for value in call.inputs):
        if (parts := _with_gate(call)) is None:
            return _gated(call)
        return replace(parts[0], scale=parts[0].scale * parts[1], offset=parts[0].offset * parts[1])
    return call.scaled(call.numbers(1 if isinstance(call.inputs[0], Tensor) else 0), np.zeros(()))


def _gated(call: OperatorCall) -> Value:
    """d·x times scale·(1 + erf(k·x)): 2·scale·d times x·(1 + erf(k·x))/2."""
    gate, x = sorted(call.inputs, key=lambda value: isinstance(value, Tensor))
    if not isinstance(gate, Gate) or not isinstance(x, Tensor):
        raise BadInput("a product that is not known")
    inside = call.build.traced(gate.x)
    for outer in reversed(call.build.traced(x)):
        for inner in inside:
            if outer.x.node == inner.x.node and np.array_equal(outer.x.index, inner.x.index):
                if gate.offset != gate.scale:
                    break
                return _gelu(call, gate.name, inner, 1.0, 2 * gate.scale * outer.factor)
    raise BadInput("a product that is not known")


def _gelu(call: OperatorCall, name: str, argument: Multiple, root: float, factor: Fraction) -> Value:
    """factor·x·(1 + erf(k·x))/2, where k is root times the argument's factor; root may be off by a unit."""
    if not MODERATE[0] <= argument.factor <= MODERATE[1]:
        raise BadInput("the scale of a GELU is negative, too small or too large")
    made = call.curve(argument.x, name, "Gelu", curves.same(curves.gelu(float(argument.factor) * root)))
    call.inputs = [made]
    outside = np.array(float(factor))
    if Fraction(float(factor)) == factor:
        return made if factor == 1 else call.scaled(outside, np.zeros(()))
    return call.scaled(derived(outside, np.ones(())), np.zeros(()), UNIT, factor)


def _gelu_operator(call: OperatorCall) -> Value:
    if call.attributes.get("approximate", b"none") != b"none":
        raise BadInput("an approximation of GELU is not known")
    # Where a runtime rounds, a factor before the operator is another operator's.
    x = call.build.traced(call.tensor())[-1 if call.build.stored is None else 0]
    # The argument of erf is the operator's over the square root of 2.
    return _gelu(call, call.name, x, 0.7071067811865476, x.factor)


def _quotient(call: OperatorCall) -> Value:
    call.tensor(0)
    divisor = call.numbers(1)
    # The reciprocal of a power of two is exact.
    exact = bool((np.abs(np.frexp(divisor)[0]) == 0.5).all())
    factor = derived(1 / divisor, np.ones(()))
    one = 1 / Fraction(float(divisor.item())) if divisor.size == 1 else None
    return call.scaled(factor, np.zeros(()), 0.0 if exact else 2 * UNIT, one)


def _gemm(call: OperatorCall) -> Value:
    x, weight = call.tensor(), call.numbers(1)
    if len(x.shape) != 2:
        raise BadInput("a matrix is expected")
    index = x.index.T if call.attributes.get("transA", 0) else x.index
    weight = weight if call.attributes.get("transB", 0) else weight.T
    bias = call.numbers(2) if call.given(2) else np.zeros(())
    for name in ("alpha", "beta"):
        if call.attributes.get(name, 1.0) != 1.0:
            raise BadInput(f"{name} is expected to be 1")
    return _multiplied(call, Tensor(x.node, index), weight, bias)


def _multiplied(call: OperatorCall, x: Tensor, weight: Number, bias: Number) -> Tensor:
    """x·weightᵀ + bias over the last axis."""
    *leading, inputs = x.shape
    if weight.ndim != 2 or weight.shape[1] != inputs:
        raise BadInput("its inputs do not fit together")
    if weight.size * np.prod(leading, dtype=float) > LARGEST:
        raise BadInput("it is too large for this checker")
    shape, lead = (*leading, len(weight)), int(np.prod(leading))
    matrix = weight if lead == 1 else sparse.kron(sparse.eye_array(lead), sparse.csr_array(weight), format="csr")
    return call.affine(x, matrix, np.broadcast_to(bias, shape).ravel(), shape)


def _matmul(call: OperatorCall) -> Value:
    if isinstance(call.inputs[0], Tensor):
        return _multiplied(call, call.tensor(0), call.numbers(1).T, np.zeros(()))
    x = call.tensor(1)
    if len(x.shape) < 2:
        return _multiplied(call, x, call.numbers(0), np.zeros(()))
    found = _multiplied(call, Tensor(x.node, np.swapaxes(x.index, -1, -2)), call.numbers(0), np.zeros(()))
    return Tensor(found.node, np.swapaxes(found.index, -1, -2))


def _normalisation(call: OperatorCall) -> Value:
    x = call.tensor()
    if call.attributes.get("training_mode", 0) or call.opset < 9:
        raise BadInput("batch normalisation in training is not known")
    scale, bias, mean, variance = (call.numbers(i).reshape(-1, *[1] * (len(x.shape) - 2)) for i in range(1, 5))
    variance = variance + np.float64(np.float32(call.attributes.get("epsilon", 1e-5)))
    if len(x.shape) < 2 or any(len(part) != x.shape[1] for part in (scale, bias, mean, variance)):
        raise BadInput("its inputs do not fit together")
    if not ((variance > 0) & (variance < np.inf)).all():
        raise BadInput("a variance is not positive")
    factor = derived(scale / np.sqrt(variance), scale)
    # factor·(x − mean) + bias; the factor is the one number that is rounded.
    call.inputs = [call.scaled(np.ones(()), -mean), None]
    found = call.scaled(factor, bias, 8 * UNIT)
    made = call.build.nodes[found.node]
    assert isinstance(made, AffineNode)
    made.is_inexact_factor = scale.size == 1 and not (bias.any() or mean.any())
    return found


def _activation(call: OperatorCall, slope: Number) -> Value:
    x = call.tensor()
    if np.broadcast_shapes(slope.shape, x.shape) != x.shape:
        raise BadInput("its slopes do not fit its input")
    if not np.isfinite(slope).all():
        raise BadInput("its slopes are not finite")
    return call.build.computed(
        ActivationNode(call.build.settled(x), np.broadcast_to(slope, x.shape).ravel(), call.name), x.shape
    )


def _leaky(call: OperatorCall) -> Value:
    return _activation(call, np.array(np.float32(call.attributes.get("alpha", 0.01)), np.float64))


QUANTISED = ("int8", "uint8", "int16", "uint16")
"""The types of quantised numbers; biases have int32."""


def _steps(call: OperatorCall, shape: tuple[int, ...], kinds: tuple[str, ...]) -> tuple[Number, Number, str]:
    """The scale, the zero point, spread along the axis that they are for, and the type of the whole numbers."""
    for name in ("block_size", "output_dtype", "precision"):
        if call.attributes.get(name, 0):
            raise BadInput(f"{name} is not known")
    scale, zero = call.numbers(1), call.inputs[2] if call.given(2) else np.zeros((), np.uint8)
    if (
        not isinstance(zero, np.ndarray)
        or str(zero.dtype) not in kinds
        or (call.given(2) and zero.shape != scale.shape)
    ):
        raise BadInput("a zero point like the scale, a whole number of a type that is known, is expected")
    if not ((scale > 0) & np.isfinite(scale)).all():
        raise BadInput("a scale is not positive")
    axis = call.attributes.get("axis", 1)
    axis += len(shape) if axis < 0 else 0
    found = []
    for part in (scale, zero.astype(np.float64)):
        if part.size != 1 and (part.ndim != 1 or not 0 <= axis < len(shape) or part.size != shape[axis]):
            raise BadInput("a scale for each place of one axis is expected")
        found.append(part.reshape(() if part.size == 1 else [-1 if i == axis else 1 for i in range(len(shape))]))
    return found[0], found[1], str(zero.dtype)


def _quantize(call: OperatorCall) -> Value:
    """round(x/scale) + zero as low + relu(…), and that as high − relu(high − …)."""
    scale, zero, kind = _steps(call, call.tensor().shape, QUANTISED)
    low, high = float(np.iinfo(kind).min), float(np.iinfo(kind).max)
    exact = bool((np.frexp(scale)[0] == 0.5).all())
    one, none = np.ones(()), np.zeros(())
    call.inputs = [call.scaled(derived(1 / scale, one), none, 0.0 if exact else 2 * UNIT)]
    call.inputs = [call.curve(call.tensor(), call.name, "Round", curves.ROUNDED)]
    for factor, bias in ((one, zero - low), (-one, np.full((), high - low))):
        call.inputs = [call.scaled(factor, bias)]
        call.inputs = [_activation(call, none)]
    made = call.scaled(-one, np.full((), high))
    call.build.whole[made.node] = kind
    return made


def _dequantize(call: OperatorCall) -> Value:
    whole = call.inputs[0]
    if isinstance(whole, Tensor):
        kind = call.build.whole.get(whole.node, "")
        scale, zero, _ = _steps(call, whole.shape, (kind, *(() if call.given(2) else ("uint8",))))
        # A whole number less another is exact: of what runs, the product with the scale alone is rounded.
        call.inputs = [whole]
        difference = call.scaled(np.ones(()), -zero)
        call.build.whole[difference.node] = kind
        call.inputs = [difference]
        made = call.scaled(scale, np.zeros(()))
        # What it multiplies is no multiple of the numbers before: a curve behind it is one of its result.
        call.build.multiples.pop(made.node, None)
        return made
    if not isinstance(whole, np.ndarray) or str(whole.dtype) not in (*QUANTISED, "int32"):
        raise BadInput("whole numbers of a type that is known are expected")
    scale, zero, _ = _steps(call, whole.shape, (str(whole.dtype), *(() if call.given(2) else ("uint8",))))
    number = whole.astype(np.float64) - zero
    found = np.asarray(number * scale)
    if np.abs(number).max(initial=0) >= 1 << 24:
        pairs = zip(*(part.ravel().tolist() for part in np.broadcast_arrays(number, scale, found)), strict=True)
        if not all(Fraction(n) * Fraction(s) == Fraction(product) for n, s, product in pairs):
            raise BadInput("a number that float64 does not hold")
    return found


def _moved(call: OperatorCall, index: Number) -> Value:
    return Tensor(call.tensor().node, index)


def _reshape(call: OperatorCall) -> Value:
    x, shape = call.tensor(), call.integers("shape", 1)
    if shape is None or call.attributes.get("allowzero", 0):
        raise BadInput("the new shape is not known")
    return _moved(call, x.index.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(shape)]))


def _flatten(call: OperatorCall) -> Value:
    x, axis = call.tensor(), call.attributes.get("axis", 1)
    axis += len(x.shape) if axis < 0 else 0
    if not 0 <= axis <= len(x.shape):
        raise BadInput("there is no such axis")
    return _moved(call, x.index.reshape(int(np.prod(x.shape[:axis])), -1))


def _squeeze(call: OperatorCall) -> Value:
    axes = call.integers("axes", 1)
    return _moved(call, np.squeeze(call.tensor().index, None if axes is None else tuple(axes)))


def _unsqueeze(call: OperatorCall) -> Value:
    return _moved(call, np.expand_dims(call.tensor().index, tuple(call.integers("axes", 1) or ())))


def _transpose(call: OperatorCall) -> Value:
    return _moved(call, np.transpose(call.tensor().index, call.attributes.get("perm")))


def _upsample(call: OperatorCall) -> Value:
    """Every number several times, one beside the other."""
    x = call.tensor()
    scales = call.numbers(1).ravel().tolist() if call.given(1) else call.attributes.get("scales") or []
    known = call.attributes.get("mode", b"nearest") == b"nearest" and len(scales) == len(x.shape)
    if not known or not all(scale >= 1 and scale == int(scale) for scale in scales):
        raise BadInput("only whole factors, and the nearest number, are known")
    spread([int(scale) * size for scale, size in zip(scales, x.shape, strict=True)])
    index = x.index
    for axis, scale in enumerate(scales):
        index = np.repeat(index, int(scale), axis)
    # No entry is named twice in what a tensor is of a node: matrices would add their weights.
    return Tensor(call.build.settled(Tensor(x.node, index)), np.arange(index.size).reshape(index.shape))


def _pad(call: OperatorCall) -> Value:
    """Numbers around a tensor; negative pads take elements off first."""
    x, pads, value = call.tensor(), call.integers("pads", 1), call.attributes.get("value", 0.0)
    rank, given = len(x.shape), call.integers("axes", 3)
    axes = [axis + rank * (axis < 0) for axis in (range(rank) if given is None else given)]
    known = call.attributes.get("mode", b"constant") == b"constant" and pads is not None and len(pads) == 2 * len(axes)
    if not known or pads is None or len(set(axes)) < len(axes) or not set(axes) <= set(range(rank)):
        raise BadInput("the padding is not known")
    index, widths = x.index, [(0, 0)] * rank
    for axis, first, last in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        kept = range(max(0, -first), x.shape[axis] - max(0, -last))
        if kept.start > kept.stop:
            raise BadInput("negative pads take off more than there is")
        index, widths[axis] = np.take(index, kept, axis), (max(0, first), max(0, last))
    sizes = [size + first + last for size, (first, last) in zip(index.shape, widths, strict=True)]
    if np.prod(sizes, dtype=float) > LARGEST or not index.size:
        raise BadInput("the padding is too large for this checker, or takes everything off")
    padded = np.pad(index, widths, constant_values=-1)
    if (padded >= 0).all():
        return _moved(call, padded)
    flat, size = padded.ravel(), call.build.nodes[x.node].size
    (rows,) = np.nonzero(flat >= 0)
    matrix = sparse.csr_array((np.ones(len(rows)), (rows, flat[rows])), shape=(len(flat), size))
    bias = np.where(flat < 0, float(call.numbers(2).item()) if call.given(2) else value, 0.0)
    return call.affine(Tensor(x.node, np.arange(size)), matrix, bias, padded.shape)


def _dropout(call: OperatorCall) -> Value:
    training = call.inputs[2] if call.given(2) else None
    if training is not None and (not isinstance(training, np.ndarray) or training.any()):
        raise BadInput("dropout in training is not known")
    return call.tensor()


def _ordered(call: OperatorCall) -> Value:
    """A function that increases with every entry."""
    x = call.tensor()
    return call.build.computed(Ordered(call.build.settled(x), x.index.size), x.shape)


def _softmax(call: OperatorCall) -> Value:
    """A softmax, or its logarithm, over all entries: each is an increasing function, the same for all of them.

    In operator sets before 13 it is one over all axes from ``axis`` on.
    """
    shape, old = call.tensor().shape, call.opset < 13
    axis = call.attributes.get("axis", 1 if old else -1)
    axis += len(shape) if axis < 0 else 0
    over = shape[axis:] if old else shape[axis : axis + 1]
    if not 0 <= axis < len(shape) or np.prod(over) != np.prod(shape):
        raise BadInput("a softmax over a part of its input is not known")
    return _ordered(call)


MOVED = {"DequantizeLinear", "Flatten", "Identity", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
"""Operators that take quantised numbers; all but the first only choose or move them."""

OPERATORS: dict[str, Callable[[OperatorCall], Value]] = {
    "Abs": lambda call: _activation(call, np.full((), -1.0)),
    "Add": lambda call: _sum(call, 1),
    "Asinh": _ordered,
    "Atan": _ordered,
    "AveragePool": means,
    "BatchNormalization": _normalisation,
    "Conv": convolution,
    "ConvTranspose": transposed,
    "DequantizeLinear": _dequantize,
    "Div": _quotient,
    "Dropout": _dropout,
    "Erf": lambda call: Gate(call.tensor(), call.name),
    "Exp": _ordered,
    "Flatten": _flatten,
    "Gelu": _gelu_operator,
    "Gemm": _gemm,
    "GlobalAveragePool": lambda call: means(call, everywhere=True),
    "Identity": lambda call: call.tensor(),
    "LeakyRelu": _leaky,
    "LogSoftmax": _softmax,
    "MatMul": _matmul,
    "MaxPool": largest,
    "Mul": _product,
    "Pad": _pad,
    "PRelu": lambda call: _activation(call, call.numbers(1)),
    "QuantizeLinear": _quantize,
    "Relu": lambda call: _activation(call, np.zeros(())),
    "Reshape": _reshape,
    "Round": lambda call: call.curve(call.tensor(), call.name, "Round", curves.ROUNDED),
    "Sigmoid": lambda call: call.curve(call.tensor(), call.name, "Sigmoid", curves.SIGMOID),
    "Sign": lambda call: call.curve(call.tensor(), call.name, "Sign", curves.SIGNS),
    "Softmax": _softmax,
    "Softplus": _ordered,
    "Softsign": _ordered,
    "Squeeze": _squeeze,
    "Sub": lambda call: _sum(call, -1),
    "Tanh": lambda call: call.curve(call.tensor(), call.name, "Tanh", curves.TANH),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Upsample": _upsample,
}
"""How each operator is read; all of them mean the same in every operator set from 7 on, where they exist."""
