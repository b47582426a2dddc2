"""Reading ONNX: one converter per operator, in a table; whatever is not in it is refused by name.

A value of the file is a constant (numpy array) or a node of the network. Files carry a batch axis, networks do not:
a ``Value`` says whether the leading 1 of its ONNX shape is that axis. Constants that are computed from constants
are folded where no rounding can happen (shapes, indices, reordering); float arithmetic among constants is refused.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import (
    Gelu,
    LeakyRelu,
    Linear,
    Network,
    Relu,
    Scale,
    Shape,
    Sigmoid,
    Tanh,
)

_FLOATS = (np.float16, np.float32, np.float64)
_INPUT_TYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)

# Operators of which the value is a mere selection or reordering of their constant inputs.
_FOLDED = {
    "Cast", "Concat", "ConstantOfShape", "Expand", "Flatten", "Gather", "Identity", "Range",
    "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
_FOLDED_INTEGERS = {"Add", "Div", "Mul", "Neg", "ReduceProd", "Sub"}


def read_onnx(source: Path | str | bytes, name: str | None = None) -> Network:
    """Read a network from an ONNX file (gzipped or not) or from the bytes of one.

    Args:
        source: the path, or the file's bytes. Where ``NAME`` does not exist but ``NAME.gz`` does, that is read.
        name: what to call the network; by default the file's stem.

    Returns:
        The network with the weights' own bits. An input of rank ≥ 2 whose leading dimension is 1 or symbolic has
        a batch axis, which the network's shapes leave out; any other input is one sample.

    Raises:
        UnsupportedError: if an operator, or the form in which it is used, is not supported; names the node.
        InputError: if the file is missing, malformed, or holds NaN or infinite parameters.
    """
    if isinstance(source, bytes):
        return _read(source, name or "network")
    path = _existing(Path(source))
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot be read: {error}", path=path) from error
    try:
        return _read(data, name or Path(path.name.removesuffix(".gz")).stem)
    except InputError as error:
        raise error.located(path) from error


def _existing(path: Path) -> Path:
    """The path itself, or the gzipped file in its place.

    Raises:
        InputError: if there is neither.
    """
    zipped = path.with_name(path.name + ".gz")
    if not path.is_file() and zipped.is_file():
        return zipped
    if not path.is_file():
        raise InputError("no such file", path=path)
    return path


def _read(data: bytes, name: str) -> Network:
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:  # protobuf's own exception is no public class
        raise InputError("not an ONNX file") from error
    if not model.graph.node:
        raise InputError("not an ONNX file, or one without nodes")
    return _Reader(model).read(data, name)


@dataclass(frozen=True)
class Value:
    """A value of the file that is a node of the network; ``leading``: a leading 1 of its ONNX shape is left out."""

    index: int
    leading: bool


@dataclass(frozen=True)
class Call:
    """One ONNX node with its inputs looked up.

    Attributes:
        inputs: constants, values, or None where an optional one is left out.
        attributes: by name.
        alone: for each input, whether nothing else reads it.
    """

    op: str
    name: str
    inputs: tuple[np.ndarray | Value | None, ...]
    attributes: dict[str, Any]
    alone: tuple[bool, ...]

    @property
    def place(self) -> str:
        """How error messages name the node."""
        return f"node '{self.name}' ({self.op})"

    def get(self, attribute: str, default: Any) -> Any:
        """An attribute or its default."""
        return self.attributes.get(attribute, default)

    def value(self, position: int = 0) -> Value:
        """An input that must be computed.

        Raises:
            UnsupportedError: if it is a constant or left out.
        """
        found = self.inputs[position] if position < len(self.inputs) else None
        if not isinstance(found, Value):
            raise UnsupportedError(f"its input {position} is a constant")
        return found

    def constant(self, position: int) -> np.ndarray:
        """An input that must be constant.

        Raises:
            UnsupportedError: if it is computed or left out.
        """
        found = self.optional(position)
        if found is None:
            raise UnsupportedError(f"its input {position} is missing")
        return found

    def optional(self, position: int) -> np.ndarray | None:
        """An input that must be constant if it is there.

        Raises:
            UnsupportedError: if it is computed.
        """
        found = self.inputs[position] if position < len(self.inputs) else None
        if isinstance(found, Value):
            raise UnsupportedError(f"its input {position} is not a constant")
        return found

    def refuse(self, **expected: Any) -> None:
        """Refuse attributes that are there with another value than the one expected.

        Raises:
            UnsupportedError: naming the attribute.
        """
        for attribute, value in expected.items():
            if (found := self.get(attribute, value)) != value:
                raise UnsupportedError(f"its attribute {attribute} = {found}")


def tensor(array: np.ndarray) -> Tensor:
    """A parameter as a tensor: float32 and float64 keep their bits, float16 widens.

    Raises:
        UnsupportedError: if it is of another type.
    """
    if array.dtype not in _FLOATS:
        raise UnsupportedError(f"a parameter of type {array.dtype}")
    return torch.from_numpy(np.array(array, dtype=np.float64 if array.dtype == np.float64 else np.float32))


@dataclass
class _Reader:
    """The state of one reading."""

    model: onnx.ModelProto
    values: dict[str, np.ndarray | Value] = field(default_factory=dict)

    def read(self, data: bytes, name: str) -> Network:
        graph = self.model.graph
        for initializer in graph.initializer:
            if initializer.data_location == onnx.TensorProto.EXTERNAL:
                raise UnsupportedError("its data lies in another file", place=f"initializer '{initializer.name}'")
            self.values[initializer.name] = self._array(initializer)
        declared = [i for i in graph.input if i.name not in self.values]
        if len(declared) != 1 or len(graph.output) != 1:
            raise UnsupportedError(f"{len(declared)} inputs and {len(graph.output)} outputs where one of each is read")
        shape, batched = _input_shape(declared[0])
        self.build = Builder(shape, declared[0].name)
        self.values[declared[0].name] = Value(0, batched)
        self.opset = next((o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx")), 1)
        self.readers: dict[str, int] = {graph.output[0].name: 1}
        for node in graph.node:
            for source in node.input:
                self.readers[source] = self.readers.get(source, 0) + 1
        gelus = _gelu_patterns(graph, self.values)
        for position, node in enumerate(graph.node):
            label = node.name or (node.output[0] if node.output else str(position))
            try:
                if position in gelus.inside:
                    continue
                if position in gelus.ends:
                    self._gelu(node, label, gelus.ends[position])
                else:
                    self._convert(node, label)
            except InputError as error:
                if error.place is not None:
                    raise
                raise type(error)(error.message, place=f"node '{label}' ({node.op_type})") from error
            except (IndexError, KeyError, RuntimeError, TypeError, ValueError, OverflowError) as error:
                place = f"node '{label}' ({node.op_type})"
                raise InputError(f"does not fit its inputs: {error}", place=place) from error
        output = self.values.get(graph.output[0].name)
        if not isinstance(output, Value):
            raise InputError("it is not computed from the input", place=f"output '{graph.output[0].name}'")
        return self.build.network(output.index, name=name, onnx=data, batched=batched)

    @staticmethod
    def _array(initializer: onnx.TensorProto) -> np.ndarray:
        try:
            return numpy_helper.to_array(initializer)
        except Exception as error:  # whatever the bytes make numpy say
            raise InputError(f"malformed: {error}", place=f"initializer '{initializer.name}'") from error

    def _lookup(self, name: str) -> np.ndarray | Value | None:
        if not name:
            return None
        try:
            return self.values[name]
        except KeyError:
            raise InputError(f"its input '{name}' is not computed before it") from None

    def _convert(self, node: onnx.NodeProto, label: str) -> None:
        if node.domain not in ("", "ai.onnx"):
            raise UnsupportedError(f"operators of the domain '{node.domain}' are not supported")
        call = Call(
            node.op_type,
            label,
            tuple(self._lookup(name) for name in node.input),
            {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute},
            tuple(self.readers.get(name, 0) == 1 for name in node.input),
        )
        if node.op_type == "Constant":
            self.values[node.output[0]] = _constant(call)
        elif node.op_type == "Shape":
            shape = self._shape_of(call.inputs[0])
            self.values[node.output[0]] = np.array(shape[call.get("start", 0) : call.get("end", None)], np.int64)
        elif call.inputs and all(not isinstance(value, Value) for value in call.inputs):
            self.values[node.output[0]] = self._folded(node, call)
        else:
            converter = CONVERTERS.get(node.op_type)
            if converter is None:
                raise UnsupportedError("this operator is not supported")
            self.values[node.output[0]] = converter(self, call)

    def _gelu(self, node: onnx.NodeProto, label: str, pattern: tuple[str, float]) -> None:
        source, lam = pattern
        x = self._lookup(source)
        if not isinstance(x, Value):
            raise UnsupportedError("Erf of a constant")
        self.values[node.output[0]] = self.activation(x, Gelu, label, lam=torch.tensor(lam, dtype=torch.float64))

    def _folded(self, node: onnx.NodeProto, call: Call) -> np.ndarray:
        constants = [value for value in call.inputs if isinstance(value, np.ndarray)]
        integers = all(np.issubdtype(value.dtype, np.integer) for value in constants)
        if node.op_type not in _FOLDED and not (integers and node.op_type in _FOLDED_INTEGERS):
            raise UnsupportedError("of constants alone is not supported: fold constants when exporting")
        from onnx.reference import ReferenceEvaluator

        feeds = {n: v for n, v in zip(node.input, call.inputs, strict=True) if isinstance(v, np.ndarray)}
        known = [onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
                 for n, v in feeds.items()]  # fmt: skip
        result = onnx.helper.make_empty_tensor_value_info(node.output[0])
        graph = onnx.helper.make_graph([node], "constants", known, [result])
        opset = [onnx.helper.make_opsetid("", self.opset)]
        evaluator = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opset))
        (folded,) = (np.asarray(value) for value in evaluator.run(None, feeds))
        if node.op_type == "Cast" and not np.array_equal(folded.astype(np.float64), constants[0].astype(np.float64)):
            raise UnsupportedError("changes the numbers of a constant")
        return folded

    def _shape_of(self, value: np.ndarray | Value | None) -> Shape:
        """The ONNX shape, with a batch of 1."""
        if isinstance(value, Value):
            return (1,) * value.leading + self.build.shape(value.index)
        if value is None:
            raise InputError("its input is missing")
        return value.shape

    def reshaped(self, x: Value, shape: Sequence[int], name: str) -> Value:
        """x under another ONNX shape; its leading 1, if there is one, is the batch axis."""
        leading = len(shape) >= 2 and shape[0] == 1
        return Value(self.build.reshape(x.index, tuple(shape[leading:]), name), leading)

    def activation(self, x: Value, kind: type[Any], name: str, **parameters: Tensor) -> Value:
        """An element-wise activation of x."""
        return Value(self.build.activation(x.index, kind, name, **parameters), x.leading)

    def ends_with(self, x: Value, alone: bool) -> bool:
        """Whether x is the last node so far and nothing else reads it, so that it may still be changed."""
        return alone and x.index == len(self.build.nodes) - 1

    def replaced(self, x: Value, **changes: Any) -> Value:
        """x with its node's fields changed."""
        self.build.nodes[x.index] = replace(self.build.nodes[x.index], **changes)
        return x

    def beside(self, constant: np.ndarray, x: Value) -> Tensor:
        """A constant that is broadcast against x, without the batch axis.

        Raises:
            UnsupportedError: if broadcasting would enlarge x.
        """
        shape = self._shape_of(x)
        if len(constant.shape) > len(shape) or any(
            a not in (1, b) for a, b in zip(reversed(constant.shape), reversed(shape), strict=False)
        ):
            raise UnsupportedError(f"broadcasts a value of shape {shape} against a constant of shape {constant.shape}")
        return tensor(constant[0] if x.leading and constant.ndim == len(shape) else constant)


def _input_shape(declared: onnx.ValueInfoProto) -> tuple[Shape, bool]:
    """The shape of one sample, and whether the file has a batch axis before it."""
    place = f"input '{declared.name}'"
    kind = declared.type.tensor_type
    if kind.elem_type not in _INPUT_TYPES:
        raise UnsupportedError("is no tensor of floating-point numbers", place=place)
    if not kind.HasField("shape"):
        raise UnsupportedError("has no shape", place=place)
    sizes = [d.dim_value if d.HasField("dim_value") else 0 for d in kind.shape.dim]
    batched = len(sizes) >= 2 and sizes[0] in (0, 1)
    shape = tuple(sizes[batched:])
    # Some exporters write −1 for a symbolic batch.
    if len(sizes) >= 2 and sizes[0] < 0:
        shape, batched = tuple(sizes[1:]), True
    if not sizes or any(size < 1 for size in shape):
        shown = ", ".join(d.dim_param or str(d.dim_value) for d in kind.shape.dim)
        raise UnsupportedError(f"of shape ({shown}): only the leading dimension may be symbolic", place=place)
    return shape, batched


def _constant(call: Call) -> np.ndarray:
    for attribute, value in call.attributes.items():
        if attribute == "value":
            return numpy_helper.to_array(value)
        if attribute in ("value_float", "value_floats"):
            return np.array(value, np.float32)
        if attribute in ("value_int", "value_ints"):
            return np.array(value, np.int64)
    raise UnsupportedError("a constant that is no tensor")


# --- the GELU pattern ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Patterns:
    """GELUs that are written out: ``ends`` maps the last node to (name of x, λ); ``inside`` are the other nodes."""

    ends: dict[int, tuple[str, float]]
    inside: set[int]


def _gelu_patterns(graph: onnx.GraphProto, constants: dict[str, Any]) -> _Patterns:
    """Find x·½·(1 + erf(k·x)), factors in any order; it is λ-GELU with λ = √2·k."""
    producer = {output: i for i, node in enumerate(graph.node) for output in node.output}
    readers: dict[str, list[int]] = {}
    for i, node in enumerate(graph.node):
        for source in node.input:
            readers.setdefault(source, []).append(i)
    outputs = {output.name for output in graph.output}

    def scalar(name: str) -> float | None:
        found = constants.get(name)
        if found is None and name in producer and graph.node[producer[name]].op_type == "Constant":
            node = graph.node[producer[name]]
            found = _constant(Call("Constant", name, (), {a.name: onnx.helper.get_attribute_value(a)
                                                          for a in node.attribute}, ()))  # fmt: skip
        return float(found.reshape(())) if isinstance(found, np.ndarray) and found.size == 1 else None

    def scaled(name: str) -> tuple[str, float, int | None]:
        """``name`` as (x, c, node) with value c·x, where a Mul or Div by a constant makes it."""
        node = graph.node[producer[name]] if name in producer else None
        if node is not None and node.op_type in ("Mul", "Div"):
            left, right = node.input
            if (c := scalar(right)) is not None and c != 0:
                return left, c if node.op_type == "Mul" else 1 / c, producer[name]
            if node.op_type == "Mul" and (c := scalar(left)) is not None:
                return right, c, producer[name]
        return name, 1.0, None

    def only_reader(name: str) -> int | None:
        found = readers.get(name, [])
        return found[0] if len(found) == 1 and name not in outputs else None

    ends, inside = {}, set()
    for start, erf in enumerate(graph.node):
        if erf.op_type != "Erf":
            continue
        x, k, before = scaled(erf.input[0])
        used = {start} | ({before} if before is not None and len(readers[erf.input[0]]) == 1 else set())
        at = only_reader(erf.output[0])
        if at is None or graph.node[at].op_type != "Add" or 1.0 not in map(scalar, graph.node[at].input):
            continue
        factor, seen_x = 1.0, False
        while not (seen_x and factor == 0.5):
            used.add(at)
            current = graph.node[at].output[0]
            following = only_reader(current)
            if following is None or graph.node[following].op_type not in ("Mul", "Div"):
                break
            node = graph.node[following]
            other = node.input[1] if node.input[0] == current else node.input[0]
            if (c := scalar(other)) is not None and c != 0 and (node.op_type == "Mul" or node.input[1] == other):
                factor *= c if node.op_type == "Mul" else 1 / c
            elif node.op_type == "Mul" and not seen_x and other == x:
                seen_x = True
            elif node.op_type == "Mul" and not seen_x and scaled(other)[0] == x:
                _, c, made = scaled(other)
                factor, seen_x = factor * c, True
                if made is not None and only_reader(other) is not None:
                    used.add(made)
            else:
                break
            at = following
        if seen_x and factor == 0.5 and k > 0:
            ends[at] = (x, math.sqrt(2) * k)
            inside |= used - {at}
    return _Patterns(ends, inside)


# --- converters ------------------------------------------------------------------------------------------------------

Converter = Callable[[_Reader, Call], Value]
CONVERTERS: dict[str, Converter] = {}


def _converts(*operators: str) -> Callable[[Converter], Converter]:
    def register(converter: Converter) -> Converter:
        CONVERTERS.update(dict.fromkeys(operators, converter))
        return converter

    return register


@_converts("Identity")
def _identity(reader: _Reader, call: Call) -> Value:
    return call.value()


@_converts("Dropout")
def _dropout(reader: _Reader, call: Call) -> Value:
    training = call.optional(2)
    if training is not None and bool(training.any()):
        raise UnsupportedError("in training mode")
    return call.value()


@_converts("Cast")
def _cast(reader: _Reader, call: Call) -> Value:
    if call.get("to", None) not in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
        raise UnsupportedError("casts a computed value to another kind of number")
    return call.value()


@_converts("Flatten")
def _flatten(reader: _Reader, call: Call) -> Value:
    shape = reader._shape_of(call.value())
    axis = call.get("axis", 1)
    axis += len(shape) if axis < 0 else 0
    return reader.reshaped(call.value(), (math.prod(shape[:axis]), math.prod(shape[axis:])), call.name)


@_converts("Reshape")
def _reshape(reader: _Reader, call: Call) -> Value:
    shape = reader._shape_of(call.value())
    target = call.attributes["shape"] if "shape" in call.attributes else call.constant(1).tolist()
    sizes = [shape[i] if size == 0 and not call.get("allowzero", 0) else int(size) for i, size in enumerate(target)]
    if -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(shape) // max(1, -math.prod(sizes))
    return reader.reshaped(call.value(), sizes, call.name)


@_converts("Squeeze", "Unsqueeze")
def _squeeze(reader: _Reader, call: Call) -> Value:
    shape = list(reader._shape_of(call.value()))
    given = call.attributes.get("axes")
    if given is None and (constant := call.optional(1)) is not None:
        given = constant.reshape(-1).tolist()
    if call.op == "Unsqueeze":
        if given is None:
            raise InputError("its axes are missing")
        rank = len(shape) + len(given)
        axes = {axis % rank for axis in given}
        rest = iter(shape)
        return reader.reshaped(call.value(), [1 if i in axes else next(rest) for i in range(rank)], call.name)
    axes = {axis % len(shape) for axis in given} if given is not None else {i for i, n in enumerate(shape) if n == 1}
    if any(shape[axis] != 1 for axis in axes):
        raise InputError(f"squeezes axes {sorted(axes)} of shape {tuple(shape)}")
    return reader.reshaped(call.value(), [n for i, n in enumerate(shape) if i not in axes], call.name)


@_converts("Transpose")
def _transpose(reader: _Reader, call: Call) -> Value:
    x = call.value()
    shape = reader._shape_of(x)
    axes = tuple(call.get("perm", None) or reversed(range(len(shape))))
    if x.leading and axes and axes[0] == 0:
        return Value(reader.build.permute(x.index, tuple(a - 1 for a in axes[1:]), call.name), True)
    whole = reader.build.reshape(x.index, shape, call.name)
    moved = Value(reader.build.permute(whole, axes, call.name), False)
    return reader.reshaped(moved, [shape[a] for a in axes], call.name)


@_converts("Gemm")
def _gemm(reader: _Reader, call: Call) -> Value:
    call.refuse(transA=0)
    x = call.value()
    weight = tensor(call.constant(1) if call.get("transB", 0) else call.constant(1).T)
    bias = None if (c := call.optional(2)) is None else tensor(c)
    # A product of two float32 numbers is exact in float64.
    if (alpha := call.get("alpha", 1.0)) != 1.0:
        weight = _exact_product(weight, alpha)
    if bias is not None and (beta := call.get("beta", 1.0)) != 1.0:
        bias = _exact_product(bias, beta)
    return Value(reader.build.linear(x.index, weight, bias, call.name), x.leading)


def _exact_product(weight: Tensor, factor: float) -> Tensor:
    if weight.dtype == torch.float64:
        raise UnsupportedError("scales weights of double precision")
    return weight.double() * factor


@_converts("MatMul")
def _matmul(reader: _Reader, call: Call) -> Value:
    if isinstance(call.inputs[0], Value):
        x, weight = call.value(0), call.constant(1)
        while weight.ndim > 2 and weight.shape[0] == 1:
            weight = weight[0]
        if weight.ndim != 2:
            raise UnsupportedError(f"a weight of shape {call.constant(1).shape}")
        return Value(reader.build.linear(x.index, tensor(weight.T), None, call.name), x.leading)
    weight, x = call.constant(0), call.value(1)
    shape = reader.build.shape(x.index)
    if weight.ndim != 2:
        raise UnsupportedError(f"a weight of shape {weight.shape}")
    if len(shape) == 1 and not x.leading:
        return Value(reader.build.linear(x.index, tensor(weight), None, call.name), False)
    if len(shape) < 2:
        raise UnsupportedError("multiplies the batch axis")
    swap = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    columns = reader.build.permute(x.index, swap, call.name)
    product = reader.build.linear(columns, tensor(weight), None, call.name)
    return Value(reader.build.permute(product, swap, call.name), x.leading)


@_converts("Conv")
def _conv(reader: _Reader, call: Call) -> Value:
    x, weight = call.value(), call.constant(1)
    if weight.ndim != 4:
        raise UnsupportedError(f"a kernel of shape {weight.shape}: only two-dimensional convolutions are supported")
    if not x.leading:
        raise UnsupportedError("an input without a batch axis")
    dilation = tuple(call.get("dilations", (1, 1)))
    stride, padding = _window(reader, call, x, weight.shape[2:], dilation)
    bias = None if (b := call.optional(2)) is None else tensor(b)
    index = reader.build.conv2d(
        x.index,
        tensor(weight),
        bias,
        call.name,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=call.get("group", 1),
    )
    return Value(index, True)


def _window(
    reader: _Reader, call: Call, x: Value, kernel: Sequence[int], dilation: Sequence[int] = (1, 1)
) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """Strides and pads (top, left, bottom, right) of a node with a sliding window."""
    rows, columns = call.get("strides", (1, 1))
    stride = (int(rows), int(columns))
    mode = call.get("auto_pad", b"NOTSET").decode()
    if mode == "NOTSET":
        top, left, bottom, right = call.get("pads", (0, 0, 0, 0))
        return stride, (top, left, bottom, right)
    if mode == "VALID":
        return stride, (0, 0, 0, 0)
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        raise UnsupportedError(f"its attribute auto_pad = {mode}")
    before, after = [], []
    for length, size, s, d in zip(reader.build.shape(x.index)[1:], kernel, stride, dilation, strict=True):
        total = max(0, (-(-length // s) - 1) * s + d * (size - 1) + 1 - length)
        less, more = total // 2, total - total // 2
        before.append(less if mode == "SAME_UPPER" else more)
        after.append(more if mode == "SAME_UPPER" else less)
    return stride, (before[0], before[1], after[0], after[1])


@_converts("AveragePool")
def _average_pool(reader: _Reader, call: Call) -> Value:
    x = call.value()
    call.refuse(ceil_mode=0, dilations=[1, 1])
    kernel = tuple(call.attributes["kernel_shape"])
    if len(kernel) != 2 or not x.leading:
        raise UnsupportedError("only two-dimensional pooling is supported")
    stride, padding = _window(reader, call, x, kernel)
    if any(padding) and not call.get("count_include_pad", 0):
        raise UnsupportedError("pads that are left out of the mean (count_include_pad = 0)")
    return Value(reader.build.average_pool(x.index, kernel, stride, padding, call.name), True)


@_converts("GlobalAveragePool")
def _global_average_pool(reader: _Reader, call: Call) -> Value:
    x = call.value()
    shape = reader.build.shape(x.index)
    if len(shape) != 3 or not x.leading:
        raise UnsupportedError("only two-dimensional pooling is supported")
    return Value(reader.build.average_pool(x.index, shape[1:], (1, 1), (0, 0, 0, 0), call.name), True)


@_converts("BatchNormalization")
def _batch_normalization(reader: _Reader, call: Call) -> Value:
    call.refuse(training_mode=0, spatial=1)
    x = call.value()
    if not x.leading:
        raise UnsupportedError("an input without a batch axis")
    gamma, beta, mean, variance = (tensor(call.constant(i)) for i in (1, 2, 3, 4))
    spread = variance.double() + call.get("epsilon", 1e-5)
    if not bool((spread > 0).all()):
        raise InputError("its variance plus epsilon is not positive")
    channels = (-1, *(1,) * (len(reader.build.shape(x.index)) - 1))
    # The sum, the root and the quotient each round once: half of 2⁻⁵³ passes the root, two more follow.
    index = reader.build.scale(
        x.index,
        call.name,
        center=mean.reshape(channels),
        scale=(gamma.double() / spread.sqrt()).reshape(channels),
        shift=beta.reshape(channels),
        error=3 * 2.0**-53,
    )
    return Value(index, True)


def _two(call: Call) -> tuple[Value, np.ndarray, bool]:
    """The operands of a binary operator of which one is constant, and whether the constant comes first."""
    left, right = call.inputs
    if isinstance(left, Value) and isinstance(right, np.ndarray):
        return left, right, False
    if isinstance(right, Value) and isinstance(left, np.ndarray):
        return right, left, True
    raise UnsupportedError("of two computed values is not supported")


def _both_computed(call: Call) -> tuple[Value, Value] | None:
    left, right = call.inputs
    return (left, right) if isinstance(left, Value) and isinstance(right, Value) else None


def _sum(reader: _Reader, x: Value, y: Value, name: str) -> Value:
    if reader._shape_of(x) != reader._shape_of(y):
        raise UnsupportedError(f"adds shapes {reader._shape_of(x)} and {reader._shape_of(y)}")
    return Value(reader.build.add(x.index, y.index, name), x.leading)


@_converts("Add")
def _add(reader: _Reader, call: Call) -> Value:
    if pair := _both_computed(call):
        return _sum(reader, *pair, call.name)
    x, constant, first = _two(call)
    shift = reader.beside(constant, x)
    made = reader.build.nodes[x.index] if reader.ends_with(x, call.alone[first]) else None
    # MatMul and Add are one affine map; 0 + bias is exact. A constant of more axes varies over those too.
    row = all(size == 1 for size in shift.shape[:-1])
    if isinstance(made, Linear) and row and shift.dtype == made.bias.dtype and not made.bias.any():
        return reader.replaced(x, bias=shift.reshape(-1).expand(made.bias.shape))
    if isinstance(made, Scale) and not made.shift.any():
        return reader.replaced(x, shift=shift)
    return Value(reader.build.scale(x.index, call.name, shift=shift), x.leading)


@_converts("Sub")
def _sub(reader: _Reader, call: Call) -> Value:
    if pair := _both_computed(call):
        x, y = pair
        negative = Value(reader.build.scale(y.index, call.name, scale=torch.tensor(-1.0)), y.leading)
        return _sum(reader, x, negative, call.name)
    x, constant, first = _two(call)
    number = reader.beside(constant, x)
    if first:
        return Value(reader.build.scale(x.index, call.name, scale=-torch.ones_like(number), shift=number), x.leading)
    return Value(reader.build.scale(x.index, call.name, center=number), x.leading)


@_converts("Neg")
def _neg(reader: _Reader, call: Call) -> Value:
    x = call.value()
    return Value(reader.build.scale(x.index, call.name, scale=torch.tensor(-1.0)), x.leading)


@_converts("Mul")
def _mul(reader: _Reader, call: Call) -> Value:
    x, constant, first = _two(call)
    return _multiplied(reader, x, reader.beside(constant, x), call, first)


def _multiplied(reader: _Reader, x: Value, factor: Tensor, call: Call, position: int, error: float = 0.0) -> Value:
    """factor·x; (x − center)·factor is one node."""
    made = reader.build.nodes[x.index]
    if isinstance(made, Scale) and reader.ends_with(x, call.alone[position]):  # noqa: SIM102
        if bool((made.scale == 1).all()) and not made.shift.any() and not made.weight_error:
            return reader.replaced(x, scale=factor, weight_error=error)
    return Value(reader.build.scale(x.index, call.name, scale=factor, error=error), x.leading)


@_converts("Div")
def _div(reader: _Reader, call: Call) -> Value:
    x, constant, first = _two(call)
    if first:
        raise UnsupportedError("divides by a computed value")
    divisor = reader.beside(constant, x).double()
    if not bool(divisor.all()):
        raise InputError("divides by zero")
    if (lam := _hardness(reader, x, divisor, call.alone[0])) is not None:
        return lam
    factor = 1 / divisor
    exact = bool((torch.frexp(divisor).mantissa.abs() == 0.5).all())
    return _multiplied(reader, x, factor, call, 0, 0.0 if exact else 2.0**-53)


def _hardness(reader: _Reader, x: Value, divisor: Tensor, alone: bool) -> Value | None:
    """GELU(λx)/λ as the one node λ-GELU, where the file writes it as Mul, Gelu, Div."""
    nodes = reader.build.nodes
    gelu = nodes[x.index]
    if not (reader.ends_with(x, alone) and isinstance(gelu, Gelu) and bool(gelu.lam == 1)):
        return None
    times = nodes[gelu.inputs[0]]
    if not (isinstance(times, Scale) and divisor.numel() == 1 and times.scale.numel() == 1):
        return None
    if bool(times.center.any()) or bool(times.shift.any()) or float(times.scale) != float(divisor) or divisor <= 0:
        return None
    return reader.replaced(x, inputs=times.inputs, lam=times.scale.reshape(()))


@_converts("Relu")
def _relu(reader: _Reader, call: Call) -> Value:
    return reader.activation(call.value(), Relu, call.name)


@_converts("LeakyRelu")
def _leaky_relu(reader: _Reader, call: Call) -> Value:
    slope = torch.tensor(call.get("alpha", 0.01), dtype=torch.float32)
    return reader.activation(call.value(), LeakyRelu, call.name, slope=slope)


@_converts("PRelu")
def _prelu(reader: _Reader, call: Call) -> Value:
    x = call.value()
    return reader.activation(x, LeakyRelu, call.name, slope=reader.beside(call.constant(1), x))


@_converts("Sigmoid")
def _sigmoid(reader: _Reader, call: Call) -> Value:
    return reader.activation(call.value(), Sigmoid, call.name)


@_converts("Tanh")
def _tanh(reader: _Reader, call: Call) -> Value:
    return reader.activation(call.value(), Tanh, call.name)


@_converts("Gelu")
def _gelu(reader: _Reader, call: Call) -> Value:
    call.refuse(approximate=b"none")
    return reader.activation(call.value(), Gelu, call.name, lam=torch.tensor(1.0))
