"""Writing ONNX with standard operators only, bit for bit what the network holds.

Every value of the file is a batch of tensors. A vector of the network has whatever shape its maker left it in: images
stay images from one convolution to the next, and are flattened where an operator needs a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.files import write_whole
from verifiable_relu.ir.functions import Hardened, PiecewiseLinear, Smooth, StepFunction
from verifiable_relu.ir.linear import Convolution, Dense, Diagonal, Gather, Sparse
from verifiable_relu.ir.network import Affine, Elementwise, Maximum, Network, Op, Product, Shape, Sum

# Opset and IR version, old enough for every reader; Gelu came with the second.
_OLD, _GELU = (13, 8), (20, 9)


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
        try:
            write_whole(Path(path), data, lasting=False)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", path=Path(path)) from error
    return data


@dataclass(frozen=True)
class _Written:
    """A value in the file: its name, and its shape without the batch axis."""

    name: str
    shape: Shape


class _Writer:
    """The state of one writing. Each method that takes a ``name`` gives it to the value that its last node computes."""

    def __init__(self, network: Network, rounded: bool) -> None:
        self.network, self.rounded = network, rounded
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.versions = _OLD
        self._shaped: dict[tuple[str, Shape], _Written] = {}

    def data(self) -> bytes:
        network, source = self.network, self.network.source
        batch: tuple[str, ...] = ("batch",) * source.batched
        given = _Written("input", source.input_shape)
        values = [given if source.batched else self.reshaped(given, source.input_shape, "input.sample")]
        for index, op in enumerate(network.ops[1:], 1):
            values.append(self.written(op, [values[i] for i in op.inputs], f"v{index}"))
        last = values[-1]
        if not source.batched or last.shape != source.output_shape:
            shape = (-1,) * source.batched + source.output_shape
            self.node("Reshape", [last, self.integers("output.shape", shape)], "output")
        elif self.nodes and self.nodes[-1].output[0] == last.name:
            self.nodes[-1].output[0] = "output"
        else:
            # A node before reads the same tensor.
            self.node("Identity", [last], "output")
        graph = helper.make_graph(
            self.nodes,
            network.name,
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, (*batch, *source.input_shape))],
            [helper.make_tensor_value_info("output", TensorProto.FLOAT, (*batch, *source.output_shape))],
            self.constants,
        )
        opset, ir_version = self.versions
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", opset)],
            producer_name="verifiable_relu",
            ir_version=ir_version,
        )
        onnx.checker.check_model(model, full_check=True)
        return bytes(model.SerializeToString(deterministic=True))

    def written(self, op: Op, inputs: list[_Written], name: str) -> _Written:
        x = inputs[0]
        if isinstance(op, Affine):
            return self.affine(op, x, name)
        if isinstance(op, Elementwise):
            return self.function(op, x, name)
        if isinstance(op, Maximum):
            flat, parts = self.shaped(x, (math.prod(x.shape),)), list[_Written | str]()
            for place, numbers in enumerate(op.candidates):
                index = self.integers(f"{name}.candidates{place}", numbers.cpu().numpy())
                parts.append(self.node("Gather", [flat, index], f"{name}.{place}", (op.size,), axis=1))
            return self.node("Max", parts, name, (op.size,))
        kind = {Sum: "Add", Product: "Mul"}[type(op)]
        for place, each in enumerate(inputs[1:], 2):
            label = name if place == len(inputs) else f"{name}.{place - 1}"
            x = self.node(kind, [x, self.shaped(each, x.shape)], label)
        return x

    # Nodes and constants

    def node(
        self, kind: str, inputs: Sequence[_Written | str], name: str, shape: Shape | None = None, **attributes: Any
    ) -> _Written:
        """Add a node; inputs that are constants by their names. Its result has by default the first one's shape."""
        names = [x if isinstance(x, str) else x.name for x in inputs]
        self.nodes.append(helper.make_node(kind, names, [name], name=name, **attributes))
        return _Written(name, inputs[0].shape if shape is None and isinstance(inputs[0], _Written) else shape or ())

    def reshaped(self, x: _Written, shape: Shape, name: str) -> _Written:
        return self.node("Reshape", [x, self.integers(f"{name}.shape", (-1, *shape))], name, shape)

    def shaped(self, x: _Written, shape: Shape) -> _Written:
        """Return a value in another shape; each is made once."""
        if x.shape == shape:
            return x
        if (x.name, shape) not in self._shaped:
            name, flat = f"{x.name}.{'x'.join(map(str, shape))}", len(shape) == 1
            made = self.node("Flatten", [x], name, shape) if flat else self.reshaped(x, shape, name)
            self._shaped[x.name, shape] = made
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
            raise UnsupportedError("its parameters do not fit float32 and cannot be written", place=op.place)
        self.constants.append(numpy_helper.from_array(single.contiguous().numpy(), name))
        return name

    def integers(self, name: str, numbers: Any) -> str:
        """Add an initializer of whole numbers; returns its name."""
        self.constants.append(numpy_helper.from_array(np.asarray(numbers, np.int64), name))
        return name

    def elements(self, op: Op, name: str, values: Tensor, shape: Shape) -> str:
        """Add an initializer with a number for each element of a shape, or for each channel or column, or one."""
        full = values.detach().reshape(shape)
        one = full[(slice(0, 1),) * len(shape)].reshape(())
        part = full[:, :1, :1] if len(shape) == 3 else full[0] if len(shape) == 2 else full
        return self.parameter(op, name, next(small for small in (one, part, full) if bool((full == small).all())))

    # Affine maps

    def affine(self, op: Affine, x: _Written, name: str) -> _Written:
        """Add the nodes of a map, and one for the bias where these do not take it."""
        map, bias = op.map, op.bias
        taken = bias if isinstance(map, Dense) and map.copies == 1 else None
        if bias is not None and isinstance(map, Convolution):
            image = bias.detach().reshape(map.out_shape)
            taken = image[:, 0, 0] if bool((image == image[:, :1, :1]).all()) else None
        if bias is None or taken is not None:
            return _MAPS[type(map)](self, op, map, x, name, taken)
        made = _MAPS[type(map)](self, op, map, x, f"{name}.product", None)
        return self.node("Add", [made, self.elements(op, f"{name}.bias", bias, made.shape)], name)

    def dense(self, op: Affine, map: Dense, x: _Written, name: str, bias: Tensor | None) -> _Written:
        if map.copies > 1:
            rows = self.shaped(x, (map.copies, map.terms))
            weight = self.parameter(op, f"{name}.weight", map.weight.T)
            return self.node("MatMul", [rows, weight], name, (map.copies, len(map.weight)))
        constants = [self.parameter(op, f"{name}.weight", map.weight)]
        constants += [] if bias is None else [self.parameter(op, f"{name}.bias", bias)]
        return self.node("Gemm", [self.shaped(x, (map.n_in,)), *constants], name, (op.size,), transB=1)

    def convolution(self, op: Affine, map: Convolution, x: _Written, name: str, bias: Tensor | None) -> _Written:
        image, kernel = self.shaped(x, map.in_shape), tuple(map.weight.shape[2:])
        window: dict[str, Any] = {"kernel_shape": kernel, "strides": map.stride, "pads": map.padding}
        depthwise = map.groups == len(map.weight) == map.in_shape[0]
        if op.weight_error and depthwise and op.bias is None and bool((map.weight == 1 / math.prod(kernel)).all()):
            return self.node("AveragePool", [image], name, map.out_shape, count_include_pad=1, **window)
        constants = [self.parameter(op, f"{name}.weight", map.weight)]
        constants += [] if bias is None else [self.parameter(op, f"{name}.bias", bias)]
        how = {"dilations": map.dilation, "group": map.groups, **window}
        return self.node("Conv", [image, *constants], name, map.out_shape, **how)

    def diagonal(self, op: Affine, map: Diagonal, x: _Written, name: str, bias: None) -> _Written:
        factor = map.weight if map.divisor is None else map.divisor.expand(op.size)
        if op.bias is not None and bool((factor == 1).all()):
            return x
        constant = self.elements(op, f"{name}.factor", factor, x.shape)
        return self.node("Mul" if map.divisor is None else "Div", [x, constant], name)

    def gather(self, op: Affine, map: Gather, x: _Written, name: str, bias: None) -> _Written:
        index, gaps = map.index.cpu(), bool((map.index < 0).any())
        flat, places = self.shaped(x, (map.n_in,)), self.integers(f"{name}.index", index.clamp(min=0).numpy())
        made = self.node("Gather", [flat, places], f"{name}.places" if gaps else name, (op.size,), axis=1)
        if not gaps:
            return made
        return self.node("Mul", [made, self.parameter(op, f"{name}.kept", (index >= 0).float())], name)

    def sparse(self, op: Affine, map: Sparse, x: _Written, name: str, bias: None) -> _Written:
        """Gather, weigh and sum all terms; the terms of one output are next to each other."""
        index = self.integers(f"{name}.index", map.index.cpu().numpy())
        terms = self.node("Gather", [self.shaped(x, (map.n_in,)), index], f"{name}.terms", axis=1)
        weight = self.parameter(op, f"{name}.weight", map.weight)
        products, last = self.node("Mul", [terms, weight], f"{name}.products"), self.integers(f"{name}.last", [-1])
        return self.node("ReduceSum", [products, last], name, (op.size,), keepdims=0)

    # Functions

    def function(self, op: Elementwise, x: _Written, name: str) -> _Written:
        of = op.function
        if isinstance(of, Hardened):
            raise UnsupportedError("a family of networks cannot be written as one ONNX file", place=op.place)
        if isinstance(of, PiecewiseLinear):
            if not bool(of.slope_below.any()):
                return self.node("Relu", [x], name)
            slope = self.elements(op, f"{name}.slope", of.slope_below.expand(op.size), x.shape)
            return self.node("PRelu", [x, slope], name)
        if isinstance(of, StepFunction) and not of.step.operator:
            whole = self.node("Cast", [x], f"{name}.whole", to=TensorProto.INT64)
            return self.node("Cast", [whole], name, to=TensorProto.FLOAT)
        if isinstance(of, Smooth) and of.kind not in ("Sigmoid", "Tanh"):
            # Those that the first opset has, too, are left to it.
            self.versions = _GELU
        if isinstance(of, Smooth) and of.kind in _SPELLED:
            return _SPELLED[of.kind](self, op, x, name)
        if isinstance(of, StepFunction):
            return self.node(of.step.operator, [x], name)
        assert isinstance(of, Smooth) and of.curve.operator
        attributes: dict[str, Any] = {of.curve.attribute: of.parameter} if of.curve.attribute else {}
        return self.node(of.curve.operator, [x], name, **attributes)

    def number(self, op: Elementwise, name: str) -> str:
        """Add the parameter of a function as an initializer; returns its name."""
        return self.parameter(op, name, torch.tensor(op.function.parameters["parameter"], dtype=torch.float64))

    def gelu(self, op: Elementwise, x: _Written, name: str) -> _Written:
        if op.function.parameters["parameter"] == 1:
            return self.node("Gelu", [x], name)
        lam = self.number(op, f"{name}.lambda")
        inside = self.node("Mul", [x, lam], f"{name}.inside")
        return self.node("Div", [self.node("Gelu", [inside], f"{name}.gelu"), lam], name)


_MAPS: dict[type, Callable[..., _Written]] = {
    Dense: _Writer.dense,
    Diagonal: _Writer.diagonal,
    Gather: _Writer.gather,
    Sparse: _Writer.sparse,
    Convolution: _Writer.convolution,
}

_SPELLED: dict[str, Callable[[_Writer, Elementwise, _Written, str], _Written]] = {
    "GELU": _Writer.gelu,
    "tanh-GELU": lambda to, op, x, name: to.node("Gelu", [x], name, approximate="tanh"),
    "SiLU": lambda to, op, x, name: to.node("Mul", [x, to.node("Sigmoid", [x], f"{name}.sigmoid")], name),
    "InverseRoot": lambda to, op, x, name: to.node("Reciprocal", [to.node("Sqrt", [x], f"{name}.root")], name),
    "Square": lambda to, op, x, name: to.node("Mul", [x, x], name),
    "Cube": lambda to, op, x, name: to.node("Mul", [to.node("Mul", [x, x], f"{name}.square"), x], name),
    **dict.fromkeys(
        ("Power", "Root"), lambda to, op, x, name: to.node("Pow", [x, to.number(op, f"{name}.exponent")], name)
    ),
}
"""Functions that are no operator of their own, or that take their parameter as an input."""
