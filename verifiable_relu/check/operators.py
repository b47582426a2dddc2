"""The operators of ONNX that the checker knows, each as nodes of a graph.

A tensor of the file is a node of the graph and an array of places in it: what only moves numbers (Reshape, Transpose,
Flatten, …) moves places, and what computes makes a node. Nothing is merged and no weight is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy import sparse

from verifiable_relu.check import curves
from verifiable_relu.check.arithmetic import UNIT, Matrix, Number
from verifiable_relu.check.errors import BadInput
from verifiable_relu.check.graph import Activation, Affine, Ordered, Smooth, pick
from verifiable_relu.check.tensors import LARGEST, Builder, Gate, Multiple, Tensor, Value


@dataclass
class Call:
    """One use of an operator."""

    build: Builder
    name: str
    inputs: list[Value | None]
    attributes: dict[str, Any]
    opset: int

    def tensor(self, at: int = 0) -> Tensor:
        value = self.inputs[at]
        if not isinstance(value, Tensor):
            raise BadInput(f"input {at} is expected to depend on the network's input")
        return value

    def numbers(self, at: int) -> Number:
        """A constant input, floating point, in float64."""
        value = self.inputs[at]
        if not isinstance(value, np.ndarray) or value.dtype not in (np.float16, np.float32, np.float64):
            raise BadInput(f"input {at} is expected to be a constant of floating-point numbers")
        return value.astype(np.float64)

    def curve(self, x: Tensor, name: str, kind: str, curve: curves.Curve) -> Tensor:
        """A curve of every entry of a tensor."""
        return self.build.computed(Smooth(self.build.settled(x), x.index.size, name, kind, curve), x.shape)

    def given(self, at: int) -> bool:
        return len(self.inputs) > at and self.inputs[at] is not None

    def integers(self, name: str, at: int) -> list[int] | None:
        """Integers that are an attribute in some operator sets and an input in others."""
        if self.given(at):
            value = self.inputs[at]
            if not isinstance(value, np.ndarray) or value.dtype.kind != "i" or value.ndim != 1:
                raise BadInput(f"input {at} is expected to be a list of constant integers")
            return [int(v) for v in value]
        return self.attributes.get(name)

    def affine(self, source: Tensor, matrix: Matrix, bias: Number, shape: tuple[int, ...], rel: float = 0.0) -> Tensor:
        """matrix·source + bias as a tensor of the shape."""
        node = Affine([(self.build.settled(source), matrix)], np.ascontiguousarray(bias, np.float64), rel)
        sizes = np.abs(matrix.data if sparse.issparse(matrix) else matrix)
        if not (np.isfinite(sizes).all() and np.isfinite(node.bias).all()):
            raise BadInput("weights are not finite")
        # Numbers that are so small are rounded by more than by their own size.
        if rel and ((sizes > 0) & (sizes < 2.0**-500)).any():
            raise BadInput("rounded weights are too small")
        return self.build.computed(node, shape)

    def gate(self) -> tuple[Gate, Fraction] | None:
        """A gate and a constant, if these are the inputs."""
        for one, other in (self.inputs, self.inputs[::-1]):
            if isinstance(one, Gate) and isinstance(other, np.ndarray) and other.size == 1 and np.isfinite(other).all():
                return one, Fraction(float(other.astype(np.float64).item()))
        return None

    def scaled(self, factor: Number, bias: Number, rel: float = 0.0) -> Tensor:
        """factor·x + bias, entry by entry, of the one computed input."""
        x = next(value for value in self.inputs if isinstance(value, Tensor))
        shape = spread(x.shape, factor.shape, bias.shape)
        source = Tensor(x.node, np.broadcast_to(x.index, shape))
        diagonal = np.broadcast_to(factor, shape).ravel()
        matrix = sparse.dia_array((diagonal[None], [0]), shape=(len(diagonal), len(diagonal))).tocsr()
        made = self.affine(source, matrix, np.broadcast_to(bias, shape).ravel(), shape, rel)
        if factor.size == 1 and not bias.any():
            self.build.multiples[made.node] = Multiple(source, float(factor.item()), rel)
        return made


def spread(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that shapes are broadcast to."""
    found = np.broadcast_shapes(*shapes)
    if np.prod(found, dtype=float) > LARGEST:
        raise BadInput("it is too large for this checker")
    return found


def _sum(call: Call, sign: int) -> Value:
    if (parts := call.gate()) is not None and sign > 0:
        return replace(parts[0], offset=parts[0].offset + parts[1])
    if all(isinstance(value, Tensor) for value in call.inputs):
        first, second = call.tensor(0), call.tensor(1)
        shape = spread(first.shape, second.shape)
        terms: dict[int, Matrix] = {}
        for factor, x in ((1, first), (sign, second)):
            matrix = factor * pick(np.broadcast_to(x.index, shape).ravel(), call.build.nodes[x.node].size)
            terms[x.node] = terms[x.node] + matrix if x.node in terms else matrix
        return call.build.computed(Affine(list(terms.items()), np.zeros(int(np.prod(shape)))), shape)
    if isinstance(call.inputs[0], Tensor):
        return call.scaled(np.ones(()), sign * call.numbers(1))
    return call.scaled(np.full((), float(sign)), call.numbers(0))


def _product(call: Call) -> Value:
    if any(isinstance(value, Gate) for value in call.inputs):
        if (parts := call.gate()) is None:
            return _gated(call)
        return replace(parts[0], scale=parts[0].scale * parts[1], offset=parts[0].offset * parts[1])
    return call.scaled(call.numbers(1 if isinstance(call.inputs[0], Tensor) else 0), np.zeros(()))


def _gated(call: Call) -> Value:
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
                return _gelu(call, gate.name, inner, 2 * gate.scale * Fraction(outer.factor), outer.relative)
    raise BadInput("a product that is not known")


def _gelu(call: Call, name: str, argument: Multiple, factor: Fraction, relative: float) -> Value:
    """factor·x·(1 + erf(k·x))/2, where k·x is the argument."""
    if not 2.0**-40 <= argument.factor <= 2.0**40 or argument.relative > 4 * UNIT:
        raise BadInput("the scale of a GELU is not known well enough")
    made = call.curve(argument.x, name, "Gelu", curves.same(curves.gelu(argument.factor)))
    call.inputs = [made]
    if Fraction(float(factor)) != factor:
        relative += UNIT
    return made if factor == 1 and not relative else call.scaled(np.array(float(factor)), np.zeros(()), relative)


def _gelu_operator(call: Call) -> Value:
    if call.attributes.get("approximate", b"none") != b"none":
        raise BadInput("an approximation of GELU is not known")
    x = call.build.traced(call.tensor())[-1]
    # The argument of erf is the operator's over the square root of 2.
    argument = replace(x, factor=x.factor * 0.7071067811865476, relative=x.relative + 2 * UNIT)
    return _gelu(call, call.name, argument, Fraction(x.factor), x.relative)


def _quotient(call: Call) -> Value:
    call.tensor(0)
    divisor = call.numbers(1)
    # The reciprocal of a power of two is exact.
    exact = bool((np.abs(np.frexp(divisor)[0]) == 0.5).all())
    return call.scaled(1 / divisor, np.zeros(()), 0.0 if exact else 2.0**-52)


def _gemm(call: Call) -> Value:
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


def _multiplied(call: Call, x: Tensor, weight: Number, bias: Number) -> Tensor:
    """x·weightᵀ + bias over the last axis."""
    *leading, inputs = x.shape
    if weight.ndim != 2 or weight.shape[1] != inputs:
        raise BadInput("its inputs do not fit together")
    if weight.size * np.prod(leading, dtype=float) > LARGEST:
        raise BadInput("it is too large for this checker")
    shape, lead = (*leading, len(weight)), int(np.prod(leading))
    matrix = weight if lead == 1 else sparse.kron(sparse.eye_array(lead), sparse.csr_array(weight), format="csr")
    return call.affine(x, matrix, np.broadcast_to(bias, shape).ravel(), shape)


def _matmul(call: Call) -> Value:
    if isinstance(call.inputs[0], Tensor):
        return _multiplied(call, call.tensor(0), call.numbers(1).T, np.zeros(()))
    x = call.tensor(1)
    if len(x.shape) < 2:
        return _multiplied(call, x, call.numbers(0), np.zeros(()))
    found = _multiplied(call, Tensor(x.node, np.swapaxes(x.index, -1, -2)), call.numbers(0), np.zeros(()))
    return Tensor(found.node, np.swapaxes(found.index, -1, -2))


def _windows(call: Call, x: Tensor, kernel: list[int]) -> Number:
    """(channels, *places of the output, *kernel): the entries that each window covers, −1 in the padding."""
    rank, get = len(kernel), call.attributes.get
    if x.shape[0] != 1 or len(x.shape) != rank + 2:
        raise BadInput("one sample with channels is expected")
    stride, dilation = get("strides") or [1] * rank, get("dilations") or [1] * rank
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    pads = get("pads") or [0] * (2 * rank)
    mode = get("auto_pad", b"NOTSET")
    if mode in (b"SAME_UPPER", b"SAME_LOWER"):
        whole = [max((-(-n // s) - 1) * s + r - n, 0) for n, s, r in zip(x.shape[2:], stride, reach, strict=True)]
        first = [w // 2 if mode == b"SAME_UPPER" else w - w // 2 for w in whole]
        pads = first + [w - f for w, f in zip(whole, first, strict=True)]
        if max(dilation) > 1:
            raise BadInput("padding to the same size of a dilated window is not known")
    elif mode not in (b"NOTSET", b"VALID") or (mode == b"VALID" and any(pads)):
        raise BadInput("the padding is not known")
    sizes = [len(pads), len(stride), len(dilation)]
    if sizes != [2 * rank, rank, rank] or min(pads) < 0 or min(stride + dilation) < 1:
        raise BadInput("the window is malformed")
    if np.prod([n + sum(pads[i::rank]) for i, n in enumerate(x.shape[2:])], dtype=float) * x.shape[1] > LARGEST:
        raise BadInput("it is too large for this checker")
    widths = [(0, 0), *zip(pads[:rank], pads[rank:], strict=True)]
    padded = np.pad(x.index[0], widths, constant_values=-1)
    view = sliding_window_view(padded, reach, axis=tuple(range(1, rank + 1)))
    steps = [slice(None), *(slice(None, None, s) for s in stride), *(slice(None, None, d) for d in dilation)]
    return view[tuple(steps)]


def _conv(call: Call) -> Value:
    x, weight, groups = call.tensor(), call.numbers(1), call.attributes.get("group", 1)
    outputs, per_group, *kernel = weight.shape
    windows = _windows(call, x, kernel)
    channels, places = windows.shape[0], windows.shape[1 : 1 + len(kernel)]
    if channels != per_group * groups or outputs % groups or call.attributes.get("kernel_shape", kernel) != kernel:
        raise BadInput("its inputs do not fit together")
    count = int(np.prod(places))
    if count * weight.size > LARGEST:
        raise BadInput("the convolution is too large for this checker")
    # (group, place, channel of the group and place of the kernel)
    columns: Number = windows.reshape(groups, per_group, count, -1).transpose(0, 2, 1, 3).reshape(groups, count, -1)
    columns = np.repeat(columns, outputs // groups, axis=0).ravel()
    values = np.repeat(weight.reshape(outputs, 1, -1), count, axis=1).ravel()
    rows = np.repeat(np.arange(outputs * count), weight[0].size)
    kept = (columns >= 0) & (values != 0)
    size = call.build.nodes[x.node].size
    entries = (values[kept], (rows[kept], columns[kept]))
    matrix = sparse.csr_array(sparse.coo_array(entries, shape=(outputs * count, size)))
    bias = np.repeat(call.numbers(2) if call.given(2) else np.zeros(outputs), count)
    if len(bias) != outputs * count:
        raise BadInput("its inputs do not fit together")
    return call.affine(Tensor(x.node, np.arange(size)), matrix, bias, (1, outputs, *places))


def _normalisation(call: Call) -> Value:
    x = call.tensor()
    if call.attributes.get("training_mode", 0) or call.opset < 9:
        raise BadInput("batch normalisation in training is not known")
    scale, bias, mean, variance = (call.numbers(i).reshape(-1, *[1] * (len(x.shape) - 2)) for i in range(1, 5))
    variance = variance + np.float64(np.float32(call.attributes.get("epsilon", 1e-5)))
    if len(x.shape) < 2 or any(len(part) != x.shape[1] for part in (scale, bias, mean, variance)):
        raise BadInput("its inputs do not fit together")
    if not ((variance > 0) & (variance < np.inf)).all():
        raise BadInput("a variance is not positive")
    factor = scale / np.sqrt(variance)
    # factor·(x − mean) + bias; the factor is the one number that is rounded.
    call.inputs = [call.scaled(np.ones(()), -mean), None]
    return call.scaled(factor, bias, 2.0**-50)


def _activation(call: Call, slope: Number) -> Value:
    x = call.tensor()
    if np.broadcast_shapes(slope.shape, x.shape) != x.shape:
        raise BadInput("its slopes do not fit its input")
    if not np.isfinite(slope).all():
        raise BadInput("its slopes are not finite")
    return call.build.computed(
        Activation(call.build.settled(x), np.broadcast_to(slope, x.shape).ravel(), call.name), x.shape
    )


def _leaky(call: Call) -> Value:
    return _activation(call, np.array(np.float32(call.attributes.get("alpha", 0.01)), np.float64))


def _moved(call: Call, index: Number) -> Value:
    return Tensor(call.tensor().node, index)


def _reshape(call: Call) -> Value:
    x, shape = call.tensor(), call.integers("shape", 1)
    if shape is None or call.attributes.get("allowzero", 0):
        raise BadInput("the new shape is not known")
    return _moved(call, x.index.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(shape)]))


def _flatten(call: Call) -> Value:
    x, axis = call.tensor(), call.attributes.get("axis", 1)
    axis += len(x.shape) if axis < 0 else 0
    if not 0 <= axis <= len(x.shape):
        raise BadInput("there is no such axis")
    return _moved(call, x.index.reshape(int(np.prod(x.shape[:axis])), -1))


def _squeeze(call: Call) -> Value:
    axes = call.integers("axes", 1)
    return _moved(call, np.squeeze(call.tensor().index, None if axes is None else tuple(axes)))


def _unsqueeze(call: Call) -> Value:
    return _moved(call, np.expand_dims(call.tensor().index, tuple(call.integers("axes", 1) or ())))


def _transpose(call: Call) -> Value:
    return _moved(call, np.transpose(call.tensor().index, call.attributes.get("perm")))


def _dropout(call: Call) -> Value:
    training = call.inputs[2] if call.given(2) else None
    if training is not None and (not isinstance(training, np.ndarray) or training.any()):
        raise BadInput("dropout in training is not known")
    return call.tensor()


def _ordered(call: Call) -> Value:
    """A function that increases with every entry."""
    x = call.tensor()
    return call.build.computed(Ordered(call.build.settled(x), x.index.size), x.shape)


def _softmax(call: Call) -> Value:
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


OPERATORS: dict[str, Callable[[Call], Value]] = {
    "Add": lambda call: _sum(call, 1),
    "Atan": _ordered,
    "BatchNormalization": _normalisation,
    "Conv": _conv,
    "Div": _quotient,
    "Dropout": _dropout,
    "Erf": lambda call: Gate(call.tensor(), call.name),
    "Exp": _ordered,
    "Flatten": _flatten,
    "Gelu": _gelu_operator,
    "Gemm": _gemm,
    "Identity": lambda call: call.tensor(),
    "LeakyRelu": _leaky,
    "LogSoftmax": _softmax,
    "MatMul": _matmul,
    "Mul": _product,
    "PRelu": lambda call: _activation(call, call.numbers(1)),
    "Relu": lambda call: _activation(call, np.zeros(())),
    "Reshape": _reshape,
    "Sigmoid": lambda call: call.curve(call.tensor(), call.name, "Sigmoid", curves.SIGMOID),
    "Softmax": _softmax,
    "Softplus": _ordered,
    "Softsign": _ordered,
    "Squeeze": _squeeze,
    "Sub": lambda call: _sum(call, -1),
    "Tanh": lambda call: call.curve(call.tensor(), call.name, "Tanh", curves.TANH),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""How each operator is read; all of them mean the same in every operator set from 7 on, where they exist."""
