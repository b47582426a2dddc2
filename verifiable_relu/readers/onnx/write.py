"""Writing ONNX with standard operators only, bit for bit what the network holds.

Every value of the file is a batch of tensors. A vector of the network has whatever shape its maker left it in: images
stay images from one convolution to the next, and are flattened where an operator needs a vector.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.functions import Function, Hardened, Kinked, Smooth, StepFunction
from verifiable_relu.ir.linear import Convolution, Dense, Diagonal, Gather, Sparse
from verifiable_relu.ir.network import Affine, Elementwise, Maximum, Network, Op, Product, Shape, Sum

# Old enough for every reader; Gelu came with the second.
_OPSET, _GELU_OPSET = 13, 20
_IR_VERSION, _GELU_IR_VERSION = 8, 9


def write_onnx(network: Network, path: Path | str | None = None, rounded: bool = False) -> bytes:
    """Write a network as an ONNX file: the bytes that it was read from, or else standard operators in float32.

    λ-GELU is written as Mul, Gelu, Div: x·Φ(λx) = GELU(λx)/λ (arXiv 2603.21991). The same network gives the same
    bytes, and reading them gives a network that computes the same function: no number is rounded.

    Args:
        network: what to write.
        path: where to write it, if anywhere; replaced in one step.
        rounded: whether parameters may be rounded to float32, so that the file serves to run the network alone.

    Returns:
        The file's bytes.

    Raises:
        UnsupportedError: if a parameter is no float32 number, or the network is a set of networks; names the node.
        InputError: if the file cannot be written.
    """
    data = network.source.onnx if network.source.onnx is not None else _Writer(network, rounded).data()
    if path is not None:
        path = Path(path)
        part = path.with_name(path.name + ".part")
        try:
            part.write_bytes(data)
            os.replace(part, path)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", path=path) from error
    return data


@dataclass(frozen=True)
class _Written:
    """A value in the file: its name, and its shape without the batch axis."""

    name: str
    shape: Shape


class _Writer:
    """The state of one writing."""

    def __init__(self, network: Network, rounded: bool) -> None:
        self.network, self.rounded = network, rounded
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.opset, self.ir_version = _OPSET, _IR_VERSION
        self._shaped: dict[tuple[str, Shape], _Written] = {}

    def data(self) -> bytes:
        """Return the file's bytes.

        Raises:
            UnsupportedError: if a parameter is no float32 number, or an op has no ONNX form.
        """
        network, source = self.network, self.network.source
        batch: tuple[str, ...] = ("batch",) * source.batched
        values = [_Written("input", source.input_shape)]
        if not source.batched:
            values = [self.reshape("input", source.input_shape, "input.sample")]
        for index, op in enumerate(network.ops[1:], 1):
            values.append(self.written(op, [values[i] for i in op.inputs], f"v{index}"))
        self.finish(values[-1])
        graph = helper.make_graph(
            self.nodes,
            network.name,
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, (*batch, *source.input_shape))],
            [helper.make_tensor_value_info("output", TensorProto.FLOAT, (*batch, *source.output_shape))],
            self.constants,
        )
        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(
            graph, opset_imports=opsets, producer_name="verifiable_relu", ir_version=self.ir_version
        )
        onnx.checker.check_model(model, full_check=True)
        return bytes(model.SerializeToString(deterministic=True))

    def finish(self, last: _Written) -> None:
        """Give the last value the name and the shape of the output."""
        source = self.network.source
        if source.batched and last.shape == source.output_shape:
            # The last node gives it, unless a node before reads the same tensor.
            if self.nodes and self.nodes[-1].output[0] == last.name:
                self.nodes[-1].output[0] = "output"
            else:
                self.emit("Identity", [last.name], "output")
            return
        shape = (-1,) * source.batched + source.output_shape
        self.emit("Reshape", [last.name, self.integers("output.shape", shape)], "output")

    def written(self, op: Op, inputs: list[_Written], name: str) -> _Written:
        """Add the nodes of an op; the last one gives ``name``."""
        x = inputs[0]
        if isinstance(op, Affine):
            return _MAPS[type(op.map)](self, op, x, name)
        if isinstance(op, Elementwise):
            return self.function(op, op.function, x, name)
        if isinstance(op, Maximum):
            return self.maximum(op, x, name)
        kind = {Sum: "Add", Product: "Mul"}[type(op)]
        total, *rest = [self.shaped(each, x.shape) for each in inputs]
        for place, each in enumerate(rest, 1):
            total = self.node(kind, [total, each], name if place == len(rest) else f"{name}.{place}")
        return total

    def maximum(self, op: Maximum, x: _Written, name: str) -> _Written:
        flat, parts = self.shaped(x, (math.prod(x.shape),)), []
        for place, numbers in enumerate(op.candidates):
            index = self.integers(f"{name}.candidates{place}", numbers.cpu().numpy())
            parts.append(self.emit("Gather", [flat.name, index], f"{name}.{place}", axis=1))
        return _Written(self.emit("Max", parts, name), (op.size,))

    # Nodes and constants

    def emit(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add one ONNX node; returns its output."""
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def node(self, kind: str, inputs: list[_Written], name: str, *more: str, **attributes: Any) -> _Written:
        """Add a node whose result has the shape of its first input; ``more`` are names of constants."""
        return _Written(self.emit(kind, [*(x.name for x in inputs), *more], name, **attributes), inputs[0].shape)

    def reshape(self, name: str, shape: Shape, output: str) -> _Written:
        numbers = self.integers(f"{output}.shape", (-1, *shape))
        return _Written(self.emit("Reshape", [name, numbers], output), shape)

    def shaped(self, x: _Written, shape: Shape) -> _Written:
        """Return a value in another shape; each is made once."""
        if x.shape == shape:
            return x
        if (x.name, shape) not in self._shaped:
            output = f"{x.name}.{'x'.join(map(str, shape))}"
            flat = len(shape) == 1
            made = _Written(self.emit("Flatten", [x.name], output), shape) if flat else None
            self._shaped[x.name, shape] = made or self.reshape(x.name, shape, output)
        return self._shaped[x.name, shape]

    def parameter(self, op: Op, name: str, value: Tensor) -> str:
        """Add an initializer in float32; returns its name.

        Raises:
            UnsupportedError: if that would change a bit of it; where it may be rounded, if it is beyond float32.
        """
        exact = value.detach().cpu()
        single = exact.to(torch.float32)
        kept = bool(single.isfinite().all()) if self.rounded else torch.equal(single.to(exact.dtype), exact)
        if not kept:
            raise UnsupportedError("its parameters are no float32 numbers and cannot be written", place=op.place)
        self.constants.append(numpy_helper.from_array(single.contiguous().numpy(), name))
        return name

    def integers(self, name: str, numbers: Any) -> str:
        """Add an initializer of whole numbers; returns its name."""
        self.constants.append(numpy_helper.from_array(np.asarray(numbers, np.int64), name))
        return name

    def elements(self, op: Op, name: str, values: Tensor, shape: Shape) -> str:
        """Add an initializer with a number for each element of a shape, or for each channel, or one for all."""
        full = values.detach().reshape(shape)
        one = full[(slice(0, 1),) * len(shape)]
        if bool((full == one).all()):
            return self.parameter(op, name, one.reshape(()))
        channels = full[:, :1, :1] if len(shape) == 3 else full
        return self.parameter(op, name, channels if bool((full == channels).all()) else full)

    # Functions

    def function(self, op: Op, of: Function, x: _Written, name: str) -> _Written:
        """Add the nodes of a function."""
        if isinstance(of, Hardened):
            raise UnsupportedError("a set of networks cannot be written as one ONNX file", place=op.place)
        if isinstance(of, Kinked):
            if not bool(of.slope_below.any()):
                return self.node("Relu", [x], name)
            slope = of.slope_below.expand(op.size)
            return self.node("PRelu", [x], name, self.elements(op, f"{name}.slope", slope, x.shape))
        if isinstance(of, StepFunction) and of.spelling is None:
            self.emit("Cast", [x.name], f"{name}.whole", to=TensorProto.INT64)
            return _Written(self.emit("Cast", [f"{name}.whole"], name, to=TensorProto.FLOAT), x.shape)
        if isinstance(of, Smooth) and of.kind not in ("Sigmoid", "Tanh"):
            # Those that the first opset has, too, are left to it.
            self.opset, self.ir_version = _GELU_OPSET, _GELU_IR_VERSION
        if isinstance(of, Smooth) and of.kind in _SPELLED:
            return _SPELLED[of.kind](self, op, x, name)
        assert of.spelling is not None
        return self.node(of.spelling.operator, [x], name, **of.spelling.attributes)


def _dense(writer: _Writer, op: Affine, x: _Written, name: str) -> _Written:
    map = op.map
    assert isinstance(map, Dense)
    if map.copies == 1:
        flat = writer.shaped(x, (map.n_in,))
        constants = [writer.parameter(op, f"{name}.weight", map.weight)]
        if op.bias is not None:
            constants.append(writer.parameter(op, f"{name}.bias", op.bias))
        return _Written(writer.emit("Gemm", [flat.name, *constants], name, transB=1), (op.size,))
    outputs, inputs = map.weight.shape
    rows = writer.shaped(x, (map.copies, inputs))
    weight = writer.parameter(op, f"{name}.weight", map.weight.T)
    shape = (map.copies, outputs)
    output = name if op.bias is None else f"{name}.product"
    product = _Written(writer.emit("MatMul", [rows.name, weight], output), shape)
    if op.bias is None:
        return product
    per_copy = op.bias.detach().reshape(shape)
    shared = per_copy[0] if bool((per_copy == per_copy[:1]).all()) else per_copy
    return writer.node("Add", [product], name, writer.parameter(op, f"{name}.bias", shared))


def _convolution(writer: _Writer, op: Affine, x: _Written, name: str) -> _Written:
    map = op.map
    assert isinstance(map, Convolution)
    image, kernel = writer.shaped(x, map.in_shape), tuple(map.weight.shape[2:])
    window: dict[str, Any] = {"kernel_shape": kernel, "strides": map.stride, "pads": map.padding}
    depthwise = map.groups == len(map.weight) == map.in_shape[0]
    if op.weight_error and depthwise and op.bias is None and bool((map.weight == 1 / math.prod(kernel)).all()):
        return _Written(writer.emit("AveragePool", [image.name], name, count_include_pad=1, **window), map.out_shape)
    constants = [writer.parameter(op, f"{name}.weight", map.weight)]
    added = None if op.bias is None else op.bias.detach().reshape(map.out_shape)
    in_channels = added is None or bool((added == added[:, :1, :1]).all())
    if added is not None and in_channels:
        constants.append(writer.parameter(op, f"{name}.bias", added[:, 0, 0]))
    how = {"dilations": map.dilation, "group": map.groups, **window}
    output = name if in_channels else f"{name}.product"
    found = _Written(writer.emit("Conv", [image.name, *constants], output, **how), map.out_shape)
    return found if added is None or in_channels else _shifted(writer, op, found, name)


def _shifted(writer: _Writer, op: Affine, x: _Written, name: str) -> _Written:
    """Add the op's bias."""
    assert op.bias is not None
    return writer.node("Add", [x], name, writer.elements(op, f"{name}.bias", op.bias, x.shape))


def _diagonal(writer: _Writer, op: Affine, x: _Written, name: str) -> _Written:
    map = op.map
    assert isinstance(map, Diagonal)
    if map.divisor is not None:
        kind, factor = "Div", map.divisor.expand(op.size)
    else:
        kind, factor = "Mul", map.weight
    if op.bias is not None and bool((factor == 1).all()):
        return _shifted(writer, op, x, name)
    output = name if op.bias is None else f"{name}.scaled"
    made = writer.node(kind, [x], output, writer.elements(op, f"{name}.factor", factor, x.shape))
    return made if op.bias is None else _shifted(writer, op, made, name)


def _gather(writer: _Writer, op: Affine, x: _Written, name: str) -> _Written:
    map = op.map
    assert isinstance(map, Gather)
    flat, index = writer.shaped(x, (map.n_in,)), map.index.cpu()
    steps = [("Gather", writer.integers(f"{name}.index", index.clamp(min=0).numpy()))]
    if bool((index < 0).any()):
        steps.append(("Mul", writer.parameter(op, f"{name}.kept", (index >= 0).float())))
    if op.bias is not None:
        steps.append(("Add", writer.elements(op, f"{name}.bias", op.bias, (op.size,))))
    made = flat.name
    for place, (kind, constant) in enumerate(steps, 1):
        axis = {"axis": 1} if kind == "Gather" else {}
        made = writer.emit(kind, [made, constant], name if place == len(steps) else f"{name}.{place}", **axis)
    return _Written(made, (op.size,))


def _sparse(writer: _Writer, op: Affine, x: _Written, name: str) -> _Written:
    """Gather, weigh and sum all terms; the terms of one output are next to each other."""
    map = op.map
    assert isinstance(map, Sparse)
    flat = writer.shaped(x, (map.n_in,))
    index = writer.integers(f"{name}.index", map.index.cpu().numpy())
    terms = writer.emit("Gather", [flat.name, index], f"{name}.terms", axis=1)
    weight = writer.parameter(op, f"{name}.weight", map.weight)
    products = writer.emit("Mul", [terms, weight], f"{name}.products")
    last = writer.integers(f"{name}.last", [-1])
    output = name if op.bias is None else f"{name}.sum"
    total = _Written(writer.emit("ReduceSum", [products, last], output, keepdims=0), (op.size,))
    return total if op.bias is None else _shifted(writer, op, total, name)


_MAPS: dict[type, Callable[[_Writer, Affine, _Written, str], _Written]] = {
    Dense: _dense,
    Diagonal: _diagonal,
    Gather: _gather,
    Sparse: _sparse,
    Convolution: _convolution,
}


# Functions that are no operator of their own


def _gelu(writer: _Writer, op: Op, x: _Written, name: str) -> _Written:
    assert isinstance(op, Elementwise) and isinstance(op.function, Smooth)
    if op.function.parameter == 1:
        return writer.node("Gelu", [x], name)
    lam = writer.parameter(op, f"{name}.lambda", torch.tensor(op.function.parameter, dtype=torch.float64))
    inside = writer.node("Mul", [x], f"{name}.inside", lam)
    return writer.node("Div", [writer.node("Gelu", [inside], f"{name}.gelu")], name, lam)


def _power(writer: _Writer, op: Op, x: _Written, name: str) -> _Written:
    assert isinstance(op, Elementwise) and isinstance(op.function, Smooth)
    exponent = torch.tensor(op.function.parameter, dtype=torch.float64)
    return writer.node("Pow", [x], name, writer.parameter(op, f"{name}.exponent", exponent))


def _silu(writer: _Writer, op: Op, x: _Written, name: str) -> _Written:
    return writer.node("Mul", [x, writer.node("Sigmoid", [x], f"{name}.sigmoid")], name)


def _inverse_root(writer: _Writer, op: Op, x: _Written, name: str) -> _Written:
    return writer.node("Reciprocal", [writer.node("Sqrt", [x], f"{name}.root")], name)


def _cube(writer: _Writer, op: Op, x: _Written, name: str) -> _Written:
    return writer.node("Mul", [writer.node("Mul", [x, x], f"{name}.square"), x], name)


_SPELLED: dict[str, Callable[[_Writer, Op, _Written, str], _Written]] = {
    "GELU": _gelu,
    "tanh-GELU": lambda writer, _, x, name: writer.node("Gelu", [x], name, approximate="tanh"),
    "SiLU": _silu,
    "InverseRoot": _inverse_root,
    "Square": lambda writer, _, x, name: writer.node("Mul", [x, x], name),
    "Cube": _cube,
    **dict.fromkeys(("Power", "Root"), _power),
}
