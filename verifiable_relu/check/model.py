"""ONNX files as graphs, read through ONNX's own protobuf classes, one operator after another.

A tensor of the file is a node of the graph and an array of places in it: what only moves numbers (Reshape, Transpose,
Flatten, …) moves places, and what computes makes a node. Nothing is merged and no weight is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from scipy import sparse

from verifiable_relu.check.arithmetic import Matrix, Number
from verifiable_relu.check.errors import BadInput
from verifiable_relu.check.graph import Activation, Affine, Graph, Source, pick

LARGEST = 1 << 27
"""Most entries of a matrix that are kept."""

MOVES = {"Cast", "Concat", "Gather", "Identity", "Reshape", "Shape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
"""Operators that are evaluated where all their inputs are constants: they move numbers and round none."""


@dataclass
class Tensor:
    """A computed tensor: the entries ``index``, shaped like the tensor, of a node."""

    node: int
    index: Number

    @property
    def shape(self) -> tuple[int, ...]:
        return self.index.shape


Value = Tensor | Number


def read_model(data: bytes) -> Graph:
    """The graph of an ONNX file with one input and one output; a leading axis of the input of unknown size is 1.

    Raises:
        BadInput: naming the node that is malformed or unknown.
    """
    try:
        model = onnx.load_from_string(data)
        onnx.checker.check_model(model)
    except Exception as error:
        raise BadInput(f"no ONNX model: {' '.join(str(error).split())[:200]}") from error
    return _Reader(model).graph()


class _Reader:
    """The tensors of a model's graph, read in the order of the file."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.nodes: list[Any] = []
        self.tensors: dict[str, Value | None] = {"": None}
        self.opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)

    def graph(self) -> Graph:
        graph = self.model.graph
        if graph.sparse_initializer or self.model.functions or self.opset < 7:
            raise BadInput("sparse weights, functions of its own, and operator sets before 7 are not known")
        for initializer in graph.initializer:
            self._name(initializer.name, _array(initializer))
        inputs = [i for i in graph.input if i.name not in self.tensors]
        if len(inputs) != 1 or len(graph.output) != 1:
            raise BadInput("a network with one input and one output is expected")
        dims = [d.dim_value for d in inputs[0].type.tensor_type.shape.dim]
        if dims and dims[0] <= 0:
            dims[0] = 1
        if not dims or min(dims) <= 0 or np.prod(dims, dtype=float) > LARGEST:
            raise BadInput("the shape of the input is not known")
        size = int(np.prod(dims))
        self.nodes.append(Source(size))
        self._name(inputs[0].name, Tensor(0, np.arange(size).reshape(dims)))
        for node in graph.node:
            place = f"node '{node.name or ' '.join(node.output)}' ({node.op_type})"
            try:
                found = self._value(node)
                if np.size(found.index if isinstance(found, Tensor) else found) == 0:
                    raise BadInput("it is empty")
                if isinstance(found, np.ndarray) and not np.isfinite(found).all():
                    raise BadInput("it is not finite")
                self._name(node.output[0], found)
            except BadInput as error:
                raise BadInput(f"{place}: {error}") from error
            except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise BadInput(f"{place}: {type(error).__name__}: {error}") from error
        output = self.tensors.get(graph.output[0].name)
        if not isinstance(output, Tensor):
            raise BadInput("the output does not depend on the input")
        return Graph(self.nodes, self.settled(output))

    def _name(self, name: str, value: Value) -> None:
        if name in self.tensors:
            raise BadInput(f"two tensors are named '{name}'")
        self.tensors[name] = value

    def _value(self, node: onnx.NodeProto) -> Value:
        if node.domain not in ("", "ai.onnx"):
            raise BadInput(f"the operator set '{node.domain}' is not known")
        inputs = [self.tensors[name] for name in node.input]
        attributes: dict[str, Any] = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Constant":
            if not isinstance(attributes.get("value"), onnx.TensorProto):
                raise BadInput("a constant is expected to be a tensor")
            return _array(attributes["value"])
        if node.op_type == "Shape" and isinstance(inputs[0], Tensor):
            return np.array(inputs[0].shape, np.int64)[attributes.get("start", 0) : attributes.get("end")]
        if not any(isinstance(value, Tensor) for value in inputs):
            return self._constant(node, [value for value in inputs if isinstance(value, np.ndarray)])
        operator = OPERATORS.get(node.op_type)
        if operator is None:
            raise BadInput("the operator is not known")
        return operator(_Call(self, node.output[0], inputs, attributes, self.opset))

    def _constant(self, node: onnx.NodeProto, inputs: list[Number]) -> Number:
        if node.op_type not in MOVES or len(inputs) < len(node.input):
            raise BadInput("arithmetic of constants is not known")
        evaluator: Any = ReferenceEvaluator(node, opsets={"": self.opset})
        made = evaluator.run(None, dict(zip(node.input, inputs, strict=True)))
        found = np.asarray(made[0])
        if node.op_type == "Cast" and not (inputs[0].astype(np.float64) == found.astype(np.float64)).all():
            raise BadInput("the cast changes numbers")
        return found

    def settled(self, tensor: Tensor) -> int:
        """The number of a node whose value is the tensor, flat."""
        index, size = tensor.index.ravel(), self.nodes[tensor.node].size
        if len(index) == size and (index == np.arange(size)).all():
            return tensor.node
        self.nodes.append(Affine([(tensor.node, pick(index, size))], np.zeros(len(index))))
        return len(self.nodes) - 1

    def computed(self, node: Any, shape: tuple[int, ...]) -> Tensor:
        """A new node as a tensor."""
        self.nodes.append(node)
        return Tensor(len(self.nodes) - 1, np.arange(node.size).reshape(shape))


@dataclass
class _Call:
    """One use of an operator."""

    reader: _Reader
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

    def given(self, at: int) -> bool:
        return len(self.inputs) > at and self.inputs[at] is not None

    def integers(self, name: str, at: int) -> list[int] | None:
        """Integers that are an attribute in some operator sets and an input in others."""
        if self.given(at):
            value = self.inputs[at]
            if not isinstance(value, np.ndarray) or value.dtype.kind != "i":
                raise BadInput(f"input {at} is expected to be constant integers")
            return [int(v) for v in value.ravel()]
        return self.attributes.get(name)

    def affine(self, source: Tensor, matrix: Matrix, bias: Number, shape: tuple[int, ...], rel: float = 0.0) -> Tensor:
        """matrix·source + bias as a tensor of the shape."""
        node = Affine([(self.reader.settled(source), matrix)], np.ascontiguousarray(bias, np.float64), rel)
        sizes = np.abs(matrix.data if sparse.issparse(matrix) else matrix)
        if not (np.isfinite(sizes).all() and np.isfinite(node.bias).all()):
            raise BadInput("weights are not finite")
        # Numbers that are so small are rounded by more than by their own size.
        if rel and ((sizes > 0) & (sizes < 2.0**-500)).any():
            raise BadInput("rounded weights are too small")
        return self.reader.computed(node, shape)

    def scaled(self, factor: Number, bias: Number, rel: float = 0.0) -> Tensor:
        """factor·x + bias, entry by entry, of the one computed input."""
        x = next(value for value in self.inputs if isinstance(value, Tensor))
        shape = np.broadcast_shapes(x.shape, factor.shape, bias.shape)
        source = Tensor(x.node, np.broadcast_to(x.index, shape))
        diagonal = np.broadcast_to(factor, shape).ravel()
        matrix = sparse.dia_array((diagonal[None], [0]), shape=(len(diagonal), len(diagonal))).tocsr()
        return self.affine(source, matrix, np.broadcast_to(bias, shape).ravel(), shape, rel)


def _array(tensor: onnx.TensorProto) -> Number:
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise BadInput(f"the weights '{tensor.name}' are in another file")
    return np.array(numpy_helper.to_array(tensor))


def _sum(call: _Call, sign: int) -> Value:
    if all(isinstance(value, Tensor) for value in call.inputs):
        first, second = call.tensor(0), call.tensor(1)
        shape = np.broadcast_shapes(first.shape, second.shape)
        terms: dict[int, Matrix] = {}
        for factor, x in ((1, first), (sign, second)):
            matrix = factor * pick(np.broadcast_to(x.index, shape).ravel(), call.reader.nodes[x.node].size)
            terms[x.node] = terms[x.node] + matrix if x.node in terms else matrix
        return call.reader.computed(Affine(list(terms.items()), np.zeros(int(np.prod(shape)))), shape)
    if isinstance(call.inputs[0], Tensor):
        return call.scaled(np.ones(()), sign * call.numbers(1))
    return call.scaled(np.full((), float(sign)), call.numbers(0))


def _product(call: _Call) -> Value:
    return call.scaled(call.numbers(1 if isinstance(call.inputs[0], Tensor) else 0), np.zeros(()))


def _quotient(call: _Call) -> Value:
    call.tensor(0)
    divisor = call.numbers(1)
    # The reciprocal of a power of two is exact.
    exact = bool((np.abs(np.frexp(divisor)[0]) == 0.5).all())
    return call.scaled(1 / divisor, np.zeros(()), 0.0 if exact else 2.0**-52)


def _gemm(call: _Call) -> Value:
    x, weight = call.tensor(), call.numbers(1)
    index = x.index.T if call.attributes.get("transA", 0) else x.index
    weight = weight if call.attributes.get("transB", 0) else weight.T
    bias = call.numbers(2) if call.given(2) else np.zeros(())
    for name in ("alpha", "beta"):
        if call.attributes.get(name, 1.0) != 1.0:
            raise BadInput(f"{name} is expected to be 1")
    return _multiplied(call, Tensor(x.node, index), weight, bias)


def _multiplied(call: _Call, x: Tensor, weight: Number, bias: Number) -> Tensor:
    """x·weightᵀ + bias over the last axis."""
    *leading, inputs = x.shape
    if weight.ndim != 2 or weight.shape[1] != inputs:
        raise BadInput("its inputs do not fit together")
    shape, lead = (*leading, len(weight)), int(np.prod(leading))
    matrix = weight if lead == 1 else sparse.kron(sparse.eye_array(lead), sparse.csr_array(weight), format="csr")
    return call.affine(x, matrix, np.broadcast_to(bias, shape).ravel(), shape)


def _matmul(call: _Call) -> Value:
    if isinstance(call.inputs[0], Tensor):
        return _multiplied(call, call.tensor(0), call.numbers(1).T, np.zeros(()))
    x = call.tensor(1)
    if len(x.shape) < 2:
        return _multiplied(call, x, call.numbers(0), np.zeros(()))
    found = _multiplied(call, Tensor(x.node, np.swapaxes(x.index, -1, -2)), call.numbers(0), np.zeros(()))
    return Tensor(found.node, np.swapaxes(found.index, -1, -2))


def _windows(call: _Call, x: Tensor, kernel: list[int]) -> Number:
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
    elif mode not in (b"NOTSET", b"VALID") or (mode == b"VALID" and any(pads)):
        raise BadInput("the padding is not known")
    if len(pads) != 2 * rank or min(pads) < 0 or min(stride) < 1 or min(dilation) < 1:
        raise BadInput("the window is malformed")
    widths = [(0, 0), *zip(pads[:rank], pads[rank:], strict=True)]
    padded = np.pad(x.index[0], widths, constant_values=-1)
    view = sliding_window_view(padded, reach, axis=tuple(range(1, rank + 1)))
    steps = [slice(None), *(slice(None, None, s) for s in stride), *(slice(None, None, d) for d in dilation)]
    return view[tuple(steps)]


def _conv(call: _Call) -> Value:
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
    size = call.reader.nodes[x.node].size
    entries = (values[kept], (rows[kept], columns[kept]))
    matrix = sparse.csr_array(sparse.coo_array(entries, shape=(outputs * count, size)))
    bias = np.repeat(call.numbers(2) if call.given(2) else np.zeros(outputs), count)
    if len(bias) != outputs * count:
        raise BadInput("its inputs do not fit together")
    return call.affine(Tensor(x.node, np.arange(size)), matrix, bias, (1, outputs, *places))


def _normalisation(call: _Call) -> Value:
    x = call.tensor()
    if call.attributes.get("training_mode", 0) or call.opset < 9:
        raise BadInput("batch normalisation in training is not known")
    scale, bias, mean, variance = (call.numbers(i).reshape(-1, *[1] * (len(x.shape) - 2)) for i in range(1, 5))
    variance = variance + np.float64(np.float32(call.attributes.get("epsilon", 1e-5)))
    if not (variance > 0).all():
        raise BadInput("a variance is not positive")
    factor = scale / np.sqrt(variance)
    # factor·(x − mean) + bias; the factor is the one number that is rounded.
    call.inputs = [call.reader.computed(*_shifted(call, x, -mean)), None]
    return call.scaled(factor, bias, 2.0**-50)


def _shifted(call: _Call, x: Tensor, shift: Number) -> tuple[Affine, tuple[int, ...]]:
    matrix = pick(x.index.ravel(), call.reader.nodes[x.node].size)
    return Affine([(x.node, matrix)], np.broadcast_to(shift, x.shape).ravel()), x.shape


def _activation(call: _Call, slope: Number) -> Value:
    x = call.tensor()
    if np.broadcast_shapes(slope.shape, x.shape) != x.shape:
        raise BadInput("its slopes do not fit its input")
    if not np.isfinite(slope).all():
        raise BadInput("its slopes are not finite")
    return call.reader.computed(
        Activation(call.reader.settled(x), np.broadcast_to(slope, x.shape).ravel(), call.name), x.shape
    )


def _leaky(call: _Call) -> Value:
    return _activation(call, np.array(np.float32(call.attributes.get("alpha", 0.01)), np.float64))


def _moved(call: _Call, index: Number) -> Value:
    return Tensor(call.tensor().node, index)


def _reshape(call: _Call) -> Value:
    x, shape = call.tensor(), call.integers("shape", 1)
    if shape is None or call.attributes.get("allowzero", 0):
        raise BadInput("the new shape is not known")
    return _moved(call, x.index.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(shape)]))


def _flatten(call: _Call) -> Value:
    x, axis = call.tensor(), call.attributes.get("axis", 1)
    axis += len(x.shape) if axis < 0 else 0
    return _moved(call, x.index.reshape(int(np.prod(x.shape[:axis])), -1))


def _squeeze(call: _Call) -> Value:
    axes = call.integers("axes", 1)
    return _moved(call, np.squeeze(call.tensor().index, None if axes is None else tuple(axes)))


def _unsqueeze(call: _Call) -> Value:
    return _moved(call, np.expand_dims(call.tensor().index, tuple(call.integers("axes", 1) or ())))


def _transpose(call: _Call) -> Value:
    return _moved(call, np.transpose(call.tensor().index, call.attributes.get("perm")))


def _dropout(call: _Call) -> Value:
    training = call.inputs[2] if call.given(2) else None
    if training is not None and (isinstance(training, Tensor) or np.any(training)):
        raise BadInput("dropout in training is not known")
    return call.tensor()


OPERATORS: dict[str, Callable[[_Call], Value]] = {
    "Add": lambda call: _sum(call, 1),
    "BatchNormalization": _normalisation,
    "Conv": _conv,
    "Div": _quotient,
    "Dropout": _dropout,
    "Flatten": _flatten,
    "Gemm": _gemm,
    "Identity": lambda call: call.tensor(),
    "LeakyRelu": _leaky,
    "MatMul": _matmul,
    "Mul": _product,
    "PRelu": lambda call: _activation(call, call.numbers(1)),
    "Relu": lambda call: _activation(call, np.zeros(())),
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Sub": lambda call: _sum(call, -1),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""How each operator is read; all of them mean the same in every operator set from 7 on, where they exist."""
