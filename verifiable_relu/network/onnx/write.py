"""Writing ONNX with standard operators only, bit for bit what the network holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Add,
    Conv2d,
    Curve,
    Hardened,
    Identity,
    LeakyRelu,
    Linear,
    MatMul,
    Node,
    Permute,
    Product,
    Relu,
    Reshape,
    Scale,
    Seen,
    Sparse,
    Step,
)

# Old enough for every reader; Gelu came with the second.
_OPSET, _GELU_OPSET = 13, 20
_IR_VERSION, _GELU_IR_VERSION = 8, 9


def write_onnx(network: Network, path: Path | str | None = None, rounded: bool = False) -> bytes:
    """The network as an ONNX file: the bytes that it was read from, or else standard operators in float32.

    λ-GELU is written as Mul, Gelu, Div: x·Φ(λx) = GELU(λx)/λ (arXiv 2603.21991). The same network gives the same
    bytes, and reading them gives the same network: no number is rounded.

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
    data = network.onnx if network.onnx is not None else _Writer(network, rounded).data()
    if path is not None:
        path = Path(path)
        part = path.with_name(path.name + ".part")
        try:
            part.write_bytes(data)
            os.replace(part, path)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", path=path) from error
    return data


class _Writer:
    """The state of one writing."""

    def __init__(self, network: Network, rounded: bool) -> None:
        self.network = network
        self.rounded = rounded
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.smooth = False

    def data(self) -> bytes:
        """The file's bytes.

        Raises:
            UnsupportedError: if a parameter is no float32 number, or a kind of node has no ONNX form.
        """
        network = self.network
        names = ["input"]
        for index, node in enumerate(network.nodes[1:], 1):
            output = "output" if index == len(network.nodes) - 1 else f"v{index}"
            WRITERS[node](self, node, [names[i] for i in node.inputs], output)
            names.append(output)
        batch = ("batch",) * network.batched
        graph = helper.make_graph(
            self.nodes,
            network.name,
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, (*batch, *network.input_shape))],
            [helper.make_tensor_value_info("output", TensorProto.FLOAT, (*batch, *network.output_shape))],
            self.initializers,
        )
        opset = [helper.make_opsetid("", _GELU_OPSET if self.smooth else _OPSET)]
        version = _GELU_IR_VERSION if self.smooth else _IR_VERSION
        model = helper.make_model(graph, opset_imports=opset, producer_name="verifiable_relu", ir_version=version)
        onnx.checker.check_model(model, full_check=True)
        return bytes(model.SerializeToString(deterministic=True))

    def emit(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add one ONNX node; returns its output."""
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def parameter(self, node: Node, label: str, value: Tensor) -> str:
        """Add an initializer in float32; returns its name.

        Raises:
            UnsupportedError: if that would change a bit of it; where it may be rounded, if it is beyond float32.
        """
        exact = value.detach().cpu()
        single = exact.to(torch.float32)
        kept = bool(single.isfinite().all()) if self.rounded else torch.equal(single.to(exact.dtype), exact)
        if not kept:
            raise UnsupportedError("its parameters are no float32 numbers and cannot be written", place=node.place)
        return self.constant(label, single.contiguous().numpy())

    def constant(self, label: str, value: np.ndarray) -> str:
        """Add an initializer as it is; returns its name."""
        self.initializers.append(numpy_helper.from_array(value, label))
        return label

    def wide(self, value: Tensor, node: Node) -> Tensor:
        """A per-element parameter with as many axes as the node, so that none is taken for the batch."""
        return value.reshape((1,) * (len(node.shape) - value.ndim) + tuple(value.shape)) if value.ndim else value


def _linear(writer: _Writer, node: Linear, inputs: list[str], output: str) -> None:
    bias = writer.parameter(node, f"{output}.bias", node.bias)
    if writer.network.batched and len(node.shape) == 1:
        weight = writer.parameter(node, f"{output}.weight", node.weight)
        writer.emit("Gemm", [*inputs, weight, bias], output, transB=1)
        return
    weight = writer.parameter(node, f"{output}.weight", node.weight.T)
    product = writer.emit("MatMul", [*inputs, weight], f"{output}.product")
    writer.emit("Add", [product, bias], output)


def _conv2d(writer: _Writer, node: Conv2d, inputs: list[str], output: str) -> None:
    if not writer.network.batched:
        raise UnsupportedError("has no batch axis to write", place=node.place)
    kernel = tuple(node.weight.shape[2:])
    mean = 1 / (kernel[0] * kernel[1])
    depthwise = node.groups == node.weight.shape[0] == node.shape[0] and node.weight.shape[1] == 1
    if node.weight_error and depthwise and bool((node.weight == mean).all()) and not bool(node.bias.any()):
        window = {"kernel_shape": kernel, "strides": node.stride, "pads": node.padding, "count_include_pad": 1}
        writer.emit("AveragePool", inputs, output, **window)
        return
    weight = writer.parameter(node, f"{output}.weight", node.weight)
    bias = writer.parameter(node, f"{output}.bias", node.bias)
    writer.emit(
        "Conv",
        [*inputs, weight, bias],
        output,
        kernel_shape=kernel,
        strides=node.stride,
        pads=node.padding,
        dilations=node.dilation,
        group=node.groups,
    )


def _sparse(writer: _Writer, node: Sparse, inputs: list[str], output: str) -> None:
    """All terms gathered, weighed and summed; the terms of one output are next to each other."""
    batch = (-1,) * writer.network.batched
    flat = writer.constant(f"{output}.flat", np.array((*(batch and (0,)), -1), np.int64))
    row = writer.emit("Reshape", [*inputs, flat], f"{output}.row")
    index = writer.constant(f"{output}.index", node.index.cpu().numpy())
    terms = writer.emit("Gather", [row, index], f"{output}.terms", axis=len(batch))
    weight = writer.parameter(node, f"{output}.weight", node.weight)
    products = writer.emit("Mul", [terms, weight], f"{output}.products")
    last = writer.constant(f"{output}.last", np.array([-1], np.int64))
    total = writer.emit("ReduceSum", [products, last], f"{output}.total", keepdims=0)
    added = writer.emit("Add", [total, writer.parameter(node, f"{output}.bias", node.bias)], f"{output}.added")
    shape = writer.constant(f"{output}.shape", np.array((*batch, *node.shape), np.int64))
    writer.emit("Reshape", [added, shape], output)


def _scale(writer: _Writer, node: Scale, inputs: list[str], output: str) -> None:
    steps: list[tuple[str, str, Tensor]] = []
    if bool(node.center.any()):
        steps.append(("Sub", "center", node.center))
    if bool((node.scale != 1).any()):
        divisor = (1 / node.scale.double()).float()
        if node.weight_error and bool((1 / divisor.double() == node.scale).all()):
            steps.append(("Div", "divisor", divisor))
        else:
            steps.append(("Mul", "scale", node.scale))
    if bool(node.shift.any()) or not steps:
        steps.append(("Add", "shift", node.shift))
    current = inputs[0]
    for position, (op, label, value) in enumerate(steps):
        constant = writer.parameter(node, f"{output}.{label}", writer.wide(value, node))
        last = position == len(steps) - 1
        current = writer.emit(op, [current, constant], output if last else f"{output}.{op.lower()}")


def _reshape(writer: _Writer, node: Reshape, inputs: list[str], output: str) -> None:
    if writer.network.batched and len(node.shape) == 1:
        writer.emit("Flatten", inputs, output, axis=1)
        return
    shape = np.array((-1,) * writer.network.batched + node.shape, np.int64)
    writer.emit("Reshape", [*inputs, writer.constant(f"{output}.shape", shape)], output)


def _seen(writer: _Writer, node: Seen, inputs: list[str], output: str) -> None:
    writer.emit("Identity", inputs[-1:], output)


def _permute(writer: _Writer, node: Permute, inputs: list[str], output: str) -> None:
    axes = (0, *(a + 1 for a in node.axes)) if writer.network.batched else node.axes
    writer.emit("Transpose", inputs, output, perm=axes)


def _gelu(writer: _Writer, node: Curve, inputs: list[str], output: str) -> None:
    if bool(node.parameter == 1):
        writer.emit("Gelu", inputs, output)
        return
    lam = writer.parameter(node, f"{output}.lambda", node.parameter)
    hard = writer.emit("Mul", [*inputs, lam], f"{output}.hard")
    writer.emit("Div", [writer.emit("Gelu", [hard], f"{output}.gelu"), lam], output)


def _cube(writer: _Writer, node: Curve, inputs: list[str], output: str) -> None:
    writer.emit("Mul", [writer.emit("Mul", inputs * 2, f"{output}.square"), *inputs], output)


def _pow(writer: _Writer, node: Curve, inputs: list[str], output: str) -> None:
    writer.emit("Pow", [*inputs, writer.parameter(node, f"{output}.exponent", node.parameter)], output)


_SPELLED: dict[str, Callable[[_Writer, Curve, list[str], str], object]] = {
    "GELU": _gelu,
    "tanh-GELU": lambda writer, _, x, output: writer.emit("Gelu", x, output, approximate="tanh"),
    "SiLU": lambda writer, _, x, output: writer.emit(
        "Mul", [*x, writer.emit("Sigmoid", x, f"{output}.sigmoid")], output
    ),
    "InverseRoot": lambda writer, _, x, output: writer.emit(
        "Reciprocal", [writer.emit("Sqrt", x, f"{output}.root")], output
    ),
    "Square": lambda writer, _, x, output: writer.emit("Mul", x * 2, output),
    "Cube": _cube,
    **dict.fromkeys(("Power", "Root"), _pow),
}
"""How functions are written that are no operator of their own."""


def _curve(writer: _Writer, node: Curve, inputs: list[str], output: str) -> None:
    known = node.known
    # Those that the first opset has, too, are left to it.
    writer.smooth |= node.op not in ("Sigmoid", "Tanh")
    if known.operator:
        attributes = {known.attribute: float(node.parameter)} if known.attribute else {}
        writer.emit(known.operator, inputs, output, **attributes)
    else:
        _SPELLED[node.function](writer, node, inputs, output)


def _step(writer: _Writer, node: Step, inputs: list[str], output: str) -> None:
    if node.known.operator:
        writer.emit(node.known.operator, inputs, output)
    else:
        whole = writer.emit("Cast", inputs, f"{output}.whole", to=TensorProto.INT64)
        writer.emit("Cast", [whole], output, to=TensorProto.FLOAT)


def _leaky_relu(writer: _Writer, node: LeakyRelu, inputs: list[str], output: str) -> None:
    slope = writer.parameter(node, f"{output}.slope", writer.wide(node.slope, node))
    writer.emit("PRelu", [*inputs, slope], output)


def _plain(op: str) -> Callable[[_Writer, Node, list[str], str], None]:
    """The writer of a kind that one ONNX operator without attributes computes."""

    def write(writer: _Writer, node: Node, inputs: list[str], output: str) -> None:
        writer.emit(op, inputs, output)

    return write


WRITERS: Table[Callable[[_Writer, Any, list[str], str], None]] = Table(
    "the ONNX writer",
    {
        Linear: _linear,
        Conv2d: _conv2d,
        Sparse: _sparse,
        Scale: _scale,
        Add: _plain("Add"),
        Product: _plain("Mul"),
        MatMul: _plain("MatMul"),
        Identity: _plain("Identity"),
        Seen: _seen,
        Reshape: _reshape,
        Permute: _permute,
        LeakyRelu: _leaky_relu,
        Relu: _plain("Relu"),
        Step: _step,
        Curve: _curve,
        Hardened: Refusal("a set of networks cannot be written as one ONNX file"),
    },
)
"""What each kind of node is in ONNX: a function of the writer, the node, its inputs' names and its output's name."""
