"""ONNX files evaluated in rational arithmetic, operator by operator, from the definitions in the ONNX standard.

The evaluator is a referee for ``verifiable_relu.readers.read_onnx``: it shares no code with the package and reads files
through ``onnx``'s own classes. It knows the operators of opset 7 and later that the package reads, and those of which
exporters make constants (shapes, mostly). Numbers are ``Fraction`` in numpy arrays of dtype object. Where a value is
irrational (``Sigmoid``, the square root of ``BatchNormalization``) it is taken from mpmath with 60 digits, and
what depends on it says that it is not exact.

``magnitudes`` evaluates the same file on absolute values in float64: every difference becomes a sum. Its results bound
the intermediate values and, times the unit roundoff and the number of roundings, the error of an evaluation in floating
point, so that a tolerance can be derived from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

from .onnx_exact_moves import Moves

DIGITS = 60
REALS = (TensorProto.FLOAT, TensorProto.DOUBLE)
INTEGERS = (TensorProto.INT64, TensorProto.INT32)


class UnknownOperatorError(Exception):
    """The evaluator has no definition of an operator, or of the form in which a node uses it."""


@dataclass
class Value:
    """A tensor: an array of ``Fraction`` (or ``float``, for magnitudes), ``int`` or ``bool``, and its ONNX type."""

    array: np.ndarray
    kind: int
    constant: bool
    exact: bool = True
    """Whether no irrational number, taken from mpmath with 60 digits, went into it."""


@dataclass
class Result:
    """Every tensor of a graph by name."""

    values: dict[str, Value] = field(default_factory=dict)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.values[name].array


def objects(array: np.ndarray, convert: Callable[[Any], object]) -> np.ndarray:
    """An array of dtype object, of the same shape, with ``convert`` of each entry."""
    array = np.asarray(array)
    made = np.empty(array.shape, dtype=object)
    made.reshape(-1)[:] = [convert(v) for v in array.reshape(-1).tolist()]
    return made


def _array(value: object) -> np.ndarray:
    """Numpy unpacks object arrays of shape () into their entry: this packs them again."""
    if isinstance(value, np.ndarray):
        return value
    made = np.empty((), dtype=object)
    made[()] = value
    return made


def _to_fraction(value: mpmath.mpf) -> Fraction:
    sign, mantissa, exponent, _ = value._mpf_
    if exponent < -20_000:  # beside nothing, and too long to write out
        return Fraction(0)
    return Fraction(-int(mantissa) if sign else int(mantissa)) * Fraction(2) ** exponent


def _to_mpf(value: Fraction) -> mpmath.mpf:
    return mpmath.mpf(value.numerator) / value.denominator


def _root(value: Fraction) -> tuple[Fraction, bool]:
    """The square root of a rational number, and whether it is exact."""
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if top * top == value.numerator and bottom * bottom == value.denominator:
        return Fraction(top, bottom), True
    with mpmath.workdps(DIGITS):
        return _to_fraction(mpmath.sqrt(_to_mpf(value))), False


class Evaluator(Moves):
    """One evaluation of a file; ``absolute`` makes it one of magnitudes."""

    def __init__(self, model: onnx.ModelProto, *, absolute: bool = False) -> None:
        self.model = model
        self.absolute = absolute
        self.opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
        self.result = Result()
        self.rational = True  # whether all that the node at hand computed is

    def run(self, inputs: Mapping[str, np.ndarray]) -> Result:
        """Evaluate the graph; ``inputs`` holds numbers that ``Fraction`` takes, in the shapes of the file."""
        values = self.result.values
        for tensor in self.model.graph.initializer:
            values[tensor.name] = self.tensor(tensor)
        for declared in self.model.graph.input:
            if declared.name in inputs:
                kind = declared.type.tensor_type.elem_type
                convert = self.real if kind in REALS else int
                array = objects(np.asarray(inputs[declared.name], dtype=object), convert)
                values[declared.name] = Value(array, kind, constant=False)
        for node in self.model.graph.node:
            self.node(node)
        return self.result

    def real(self, number: Any) -> Any:
        """A number as this evaluation computes with it."""
        if isinstance(number, float) and not math.isfinite(number):
            raise UnknownOperatorError("a number that is not finite")
        return abs(float(number)) if self.absolute else Fraction(number)

    def tensor(self, tensor: TensorProto) -> Value:
        """A constant of the file."""
        if tensor.data_type in REALS:
            return Value(objects(numpy_helper.to_array(tensor), self.real), tensor.data_type, constant=True)
        if tensor.data_type in (*INTEGERS, TensorProto.BOOL):
            return Value(objects(numpy_helper.to_array(tensor), lambda v: v), tensor.data_type, constant=True)
        raise UnknownOperatorError(f"constants of type {tensor.data_type}")

    def node(self, node: NodeProto) -> None:
        """Evaluate one node."""
        definition = getattr(self, f"op_{node.op_type}", None)
        if definition is None or node.domain not in ("", "ai.onnx"):
            raise UnknownOperatorError(f"{node.domain}.{node.op_type}")
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        attributes = {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items()}
        if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute):
            raise UnknownOperatorError(f"{node.op_type} with a graph")
        inputs = [self.result.values[name] if name else None for name in node.input]
        while inputs and inputs[-1] is None:
            inputs.pop()
        given = [value for value in inputs if value is not None]
        self.rational = True
        made = definition(attributes, *inputs)
        array, kind = made if isinstance(made, tuple) else (made, given[0].kind)
        constant = all(value.constant for value in given)
        rational = self.rational and all(value.exact for value in given)
        results = array if isinstance(array, list) else [array]
        for name, one in zip(node.output, results, strict=False):
            self.result.values[name] = Value(_array(one), kind, constant, rational)
        if any(node.output[len(results) :]) and node.op_type != "Dropout":
            raise UnknownOperatorError(f"{node.op_type} with several outputs")

    # Sums and products

    def op_Add(self, _: dict, a: Value, b: Value) -> Any:
        return a.array + b.array

    def op_Sub(self, _: dict, a: Value, b: Value) -> Any:
        return a.array + b.array if self.absolute and a.kind in REALS else a.array - b.array

    def op_Mul(self, _: dict, a: Value, b: Value) -> Any:
        return a.array * b.array

    def op_Div(self, _: dict, a: Value, b: Value) -> Any:
        if a.kind not in REALS:
            quotient = np.frompyfunc(lambda p, q: abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1), 2, 1)
            return quotient(a.array, b.array)
        if any(v == 0 for v in b.array.reshape(-1)):
            raise UnknownOperatorError("division by zero")
        return a.array / b.array

    def op_Neg(self, _: dict, a: Value) -> Any:
        return a.array if self.absolute and a.kind in REALS else -a.array

    def op_MatMul(self, _: dict, a: Value, b: Value) -> Any:
        return np.matmul(a.array, b.array)

    def op_Gemm(self, attributes: dict, a: Value, b: Value, c: Value | None = None) -> Any:
        left = a.array.T if attributes.get("transA", 0) else a.array
        right = b.array.T if attributes.get("transB", 0) else b.array
        made = self.real(attributes.get("alpha", 1.0)) * np.matmul(left, right)
        return made if c is None else made + self.real(attributes.get("beta", 1.0)) * c.array

    def op_BatchNormalization(
        self, attributes: dict, x: Value, scale: Value, bias: Value, mean: Value, variance: Value
    ) -> Any:
        if attributes.get("training_mode", 0) or (self.opset < 9 and not attributes.get("spatial", 1)):
            raise UnknownOperatorError("BatchNormalization in training, or not over channels")
        epsilon = self.real(attributes.get("epsilon", float(np.float32(1e-5))))
        if self.absolute:
            divisors = objects(variance.array, lambda v: math.sqrt(v + epsilon))
        else:
            roots = [_root(v + epsilon) for v in variance.array.reshape(-1)]
            self.rational = all(exact for _, exact in roots)
            divisors = objects(variance.array, lambda v: _root(v + epsilon)[0])
        shape = (1, -1, *(1,) * (x.array.ndim - 2))
        centred = x.array + (1 if self.absolute else -1) * mean.array.reshape(shape)
        return centred / divisors.reshape(shape) * scale.array.reshape(shape) + bias.array.reshape(shape)

    # Windows

    def windows(self, attributes: dict, shape: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[Any, ...]:
        """Strides, dilations, first and last paddings, and sizes of the output, for each spatial axis."""
        rank = len(kernel)
        strides = tuple(attributes.get("strides", (1,) * rank))
        dilations = tuple(attributes.get("dilations", (1,) * rank))
        pads = tuple(attributes.get("pads", (0,) * 2 * rank))
        mode = attributes.get("auto_pad", "NOTSET")
        reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
        first, last, sizes = [], [], []
        for axis in range(rank):
            n, s, r = shape[axis], strides[axis], reach[axis]
            if mode in ("SAME_UPPER", "SAME_LOWER"):
                size = -(-n // s)
                total = max((size - 1) * s + r - n, 0)
                smaller, larger = total // 2, total - total // 2
                before, after = (smaller, larger) if mode == "SAME_UPPER" else (larger, smaller)
            else:
                before, after = (0, 0) if mode == "VALID" else (pads[axis], pads[axis + rank])
                room = n + before + after - r
                size = (-(-room // s) if attributes.get("ceil_mode", 0) else room // s) + 1
                if attributes.get("ceil_mode", 0) and (size - 1) * s >= n + before:
                    size -= 1
            first.append(before)
            last.append(after)
            sizes.append(size)
        return strides, dilations, first, last, sizes

    def op_Conv(self, attributes: dict, x: Value, w: Value, b: Value | None = None) -> Any:
        channels, per_group, *kernel = w.array.shape
        shape = x.array.shape[2:]
        strides, dilations, first, _, sizes = self.windows(attributes, shape, tuple(kernel))
        groups = attributes.get("group", 1)
        made = np.full((x.array.shape[0], channels, *sizes), self.real(0), dtype=object)
        for place in np.ndindex(*sizes):
            for offset in np.ndindex(*kernel):
                at = [p * s - f + o * d for p, s, f, o, d in zip(place, strides, first, offset, dilations, strict=True)]
                if all(0 <= a < n for a, n in zip(at, shape, strict=True)):
                    for channel in range(channels):
                        start = channel // (channels // groups) * per_group
                        column = x.array[(slice(None), slice(start, start + per_group), *at)]
                        made[(slice(None), channel, *place)] += column @ w.array[(channel, slice(None), *offset)]
        return made if b is None else made + b.array.reshape(1, -1, *(1,) * len(kernel))

    def op_ConvTranspose(self, attributes: dict, x: Value, w: Value, b: Value | None = None) -> Any:
        channels, per_group, *kernel = w.array.shape
        groups, rank, shape = attributes.get("group", 1), len(kernel), x.array.shape[2:]
        if attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or "output_shape" in attributes:
            raise UnknownOperatorError("a padding that is not given")
        strides, dilations, further = (
            attributes.get(name, [least] * rank)
            for name, least in (("strides", 1), ("dilations", 1), ("output_padding", 0))
        )
        pads = attributes.get("pads", [0] * 2 * rank)
        sizes = [
            (n - 1) * s + (k - 1) * d + 1 + more - first - last
            for n, s, k, d, more, first, last in zip(
                shape, strides, kernel, dilations, further, pads[:rank], pads[rank:], strict=True
            )
        ]
        made = np.full((x.array.shape[0], per_group * groups, *sizes), self.real(0), dtype=object)
        for place in np.ndindex(*shape):
            for offset in np.ndindex(*kernel):
                at = [p * s - f + o * d for p, s, f, o, d in zip(place, strides, pads, offset, dilations, strict=False)]
                if all(0 <= a < n for a, n in zip(at, sizes, strict=True)):
                    for channel in range(channels):
                        start = channel // (channels // groups) * per_group
                        weights = w.array[(channel, slice(None), *offset)]
                        column = x.array[(slice(None), channel, *place)]
                        made[(slice(None), slice(start, start + per_group), *at)] += column[:, None] * weights
        return made if b is None else made + b.array.reshape(1, -1, *(1,) * rank)

    def op_AveragePool(self, attributes: dict, x: Value) -> Any:
        kernel = tuple(attributes["kernel_shape"])
        shape = x.array.shape[2:]
        strides, dilations, first, last, sizes = self.windows(attributes, shape, kernel)
        made = np.full((*x.array.shape[:2], *sizes), self.real(0), dtype=object)
        for place in np.ndindex(*sizes):
            count = 0
            for offset in np.ndindex(*kernel):
                at = [p * s - f + o * d for p, s, f, o, d in zip(place, strides, first, offset, dilations, strict=True)]
                if all(0 <= a < n for a, n in zip(at, shape, strict=True)):
                    made[(slice(None), slice(None), *place)] += x.array[(slice(None), slice(None), *at)]
                    count += 1
                elif attributes.get("count_include_pad", 0):
                    count += all(-f <= a < n + e for a, n, f, e in zip(at, shape, first, last, strict=True))
            made[(slice(None), slice(None), *place)] /= count
        return made

    def op_GlobalAveragePool(self, _: dict, x: Value) -> Any:
        axes = tuple(range(2, x.array.ndim))
        return _array(x.array.sum(axis=axes, keepdims=True)) / math.prod(x.array.shape[2:])

    # Activations

    def op_Relu(self, _: dict, x: Value) -> Any:
        return x.array if self.absolute else objects(x.array, lambda v: max(v, Fraction(0)))

    def op_LeakyRelu(self, attributes: dict, x: Value) -> Any:
        alpha = self.real(attributes.get("alpha", float(np.float32(0.01))))
        if self.absolute:
            return max(alpha, 1.0) * x.array
        return objects(x.array, lambda v: v if v >= 0 else alpha * v)

    def op_PRelu(self, _: dict, x: Value, slope: Value) -> Any:
        slopes = np.broadcast_to(slope.array, x.array.shape)
        pick = (lambda v, s: max(s, 1.0) * v) if self.absolute else (lambda v, s: v if v >= 0 else s * v)
        return np.frompyfunc(pick, 2, 1)(x.array, slopes)

    def op_Clip(self, attributes: dict, x: Value, low: Value | None = None, high: Value | None = None) -> Any:
        least = attributes.get("min") if low is None else low.array.item()
        most = attributes.get("max") if high is None else high.array.item()
        if self.absolute:
            return x.array + sum(abs(float(v)) for v in (least, most) if v is not None)
        made = x.array
        if least is not None:
            made = objects(made, lambda v: max(v, Fraction(least)))
        return made if most is None else objects(made, lambda v: min(v, Fraction(most)))

    def smooth(self, x: Value, of: Callable[[mpmath.mpf], mpmath.mpf], size: Callable[[float], float]) -> np.ndarray:
        """An irrational function; ``size`` bounds its magnitude and how it passes on that of its input."""
        if self.absolute:
            return objects(x.array, size)
        self.rational = False
        with mpmath.workdps(DIGITS):
            return objects(x.array, lambda v: _to_fraction(of(_to_mpf(v))))

    def op_Sigmoid(self, _: dict, x: Value) -> Any:
        return self.smooth(x, lambda v: 1 / (1 + mpmath.exp(-v)), lambda v: v / 4 + 1)

    def op_Tanh(self, _: dict, x: Value) -> Any:
        return self.smooth(x, mpmath.tanh, lambda v: 2 * v)

    def op_Erf(self, _: dict, x: Value) -> Any:
        return self.smooth(x, mpmath.erf, lambda v: 2 * v)

    def op_Gelu(self, attributes: dict, x: Value) -> Any:
        if attributes.get("approximate", "none") == "tanh":
            raise UnknownOperatorError("Gelu by tanh")
        return self.smooth(x, lambda v: v * mpmath.ncdf(v), lambda v: 3 * v)

    # Shapes

    def op_Identity(self, _: dict, x: Value) -> Any:
        return x.array

    def op_Dropout(self, _: dict, x: Value, ratio: Value | None = None, training: Value | None = None) -> Any:
        if training is not None and training.array.item():
            raise UnknownOperatorError("Dropout in training")
        return x.array

    def op_Cast(self, attributes: dict, x: Value) -> Any:
        to = attributes["to"]
        if x.kind in REALS and to == TensorProto.FLOAT and x.constant and not self.absolute:
            return objects(x.array, lambda v: Fraction(float(np.float32(float(v))))), to
        if to in REALS:
            return (x.array if x.kind in REALS else objects(x.array, self.real)), to
        if to in INTEGERS and x.constant:
            return objects(x.array, int), to
        raise UnknownOperatorError(f"Cast to {to}")

    def op_Reshape(self, attributes: dict, x: Value, shape: Value) -> Any:
        sizes = list(shape.array)
        if not attributes.get("allowzero", 0):
            sizes = [x.array.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
        return x.array.reshape(sizes)

    def op_Flatten(self, attributes: dict, x: Value) -> Any:
        axis = attributes.get("axis", 1)
        axis += x.array.ndim if axis < 0 else 0
        return x.array.reshape(math.prod(x.array.shape[:axis]), -1)

    def op_Squeeze(self, attributes: dict, x: Value, axes: Value | None = None) -> Any:
        given = attributes.get("axes") if axes is None else axes.array.tolist()
        return _array(np.squeeze(x.array, axis=None if given is None else tuple(np.atleast_1d(given))))

    def op_Unsqueeze(self, attributes: dict, x: Value, axes: Value | None = None) -> Any:
        given = attributes["axes"] if axes is None else axes.array.tolist()
        return np.expand_dims(x.array, tuple(np.atleast_1d(given)))

    def op_Transpose(self, attributes: dict, x: Value) -> Any:
        return x.array.transpose(attributes.get("perm"))

    # Constants as exporters make them

    def op_Constant(self, attributes: dict) -> Any:
        ((name, value),) = attributes.items()
        match name:
            case "value":
                made = self.tensor(value)
                return made.array, made.kind
            case "value_float" | "value_floats":
                return objects(np.asarray(value), self.real), TensorProto.FLOAT
            case "value_int" | "value_ints":
                return objects(np.asarray(value), lambda v: v), TensorProto.INT64
            case "sparse_value":
                entries, places = self.tensor(value.values), numpy_helper.to_array(value.indices)
                made = np.full(tuple(value.dims), self.real(0), dtype=object)
                for entry, place in zip(entries.array, places, strict=True):
                    made[np.unravel_index(int(place), made.shape) if places.ndim == 1 else tuple(place)] = entry
                return made, entries.kind
        raise UnknownOperatorError(f"Constant with {name}")

    def op_ConstantOfShape(self, attributes: dict, shape: Value) -> Any:
        value = self.tensor(attributes["value"]) if "value" in attributes else None
        made = np.empty(tuple(shape.array), dtype=object)
        made[...] = self.real(0) if value is None else value.array.item()
        return made, TensorProto.FLOAT if value is None else value.kind

    def op_Shape(self, attributes: dict, x: Value) -> Any:
        sizes = x.array.shape[attributes.get("start", 0) : attributes.get("end")]
        return objects(np.asarray(sizes, dtype=np.int64), lambda v: v), TensorProto.INT64

    def op_Gather(self, attributes: dict, x: Value, indices: Value) -> Any:
        return np.take(x.array, indices.array.astype(np.int64), axis=attributes.get("axis", 0))

    def op_Concat(self, attributes: dict, *parts: Value) -> Any:
        return np.concatenate([part.array for part in parts], axis=attributes["axis"])

    def op_Expand(self, _: dict, x: Value, shape: Value) -> Any:
        return np.broadcast_to(x.array, np.broadcast_shapes(x.array.shape, tuple(shape.array)))

    def op_Range(self, _: dict, start: Value, limit: Value, step: Value) -> Any:
        first, last, by = (v.array.item() for v in (start, limit, step))
        return objects(np.asarray([first + i * by for i in range(max(0, -(-(last - first) // by)))]), lambda v: v)

    def op_Slice(self, attributes: dict, x: Value, *given: Value | None) -> Any:
        if self.opset < 10:
            starts, ends, axes, steps = attributes["starts"], attributes["ends"], attributes.get("axes"), None
        else:
            lists = [None if value is None else value.array.tolist() for value in given]
            starts, ends, axes, steps = lists + [None] * (4 - len(lists))
        made = x.array
        axes = range(len(starts)) if axes is None else axes
        for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(starts), strict=True):
            cut = [slice(None)] * made.ndim
            if step < 0 and end < -made.shape[axis]:
                end = None
            cut[axis] = slice(start, end, step)
            made = made[tuple(cut)]
        return made


def exact(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> Result:
    """Every tensor of a graph at a rational point.

    Args:
        model: with operators of opset 7 or later.
        inputs: the graph's inputs by name, arrays of numbers that ``Fraction`` takes.

    Raises:
        UnknownOperatorError: if a node has no definition here.
    """
    return Evaluator(model).run(inputs)


def magnitudes(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> Result:
    """What ``exact`` computes, on absolute values and without cancellation, in float64; infinite where too large."""
    return Evaluator(model, absolute=True).run(inputs)
