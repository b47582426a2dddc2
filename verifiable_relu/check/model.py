"""ONNX files as graphs, read through ONNX's own protobuf classes, one operator after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from verifiable_relu.check.errors import BadInput
from verifiable_relu.check.graph import LARGEST, Builder, Call, Graph, Node, Tensor, Value, Whole
from verifiable_relu.check.numbers import Number
from verifiable_relu.check.operators import MOVED, OPERATORS
from verifiable_relu.check.running import RoundingModel, Running

MOVES = {"Cast", "Concat", "Gather", "Identity", "Reshape", "Shape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
"""Operators that are evaluated where all their inputs are constants: they move numbers and round none."""

OPSETS, FORMS = range(7, 24), range(3, 14)
"""The versions of the standard's operators, and of the files' form, that are known."""

FLOATS = {onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE}
"""The types of inputs and outputs."""


def read_model(data: bytes, arithmetic: RoundingModel | None = None) -> Graph:
    """Return the graph of an ONNX file with one input and one output; a leading axis of the input of unknown size is 1.

    Args:
        data: the file.
        arithmetic: of what runs it, whose rounding the graph's nodes then have as errors; None for real arithmetic.

    Raises:
        BadInput: naming the node that is malformed or unknown.
    """
    try:
        model = onnx.load_from_string(data)
        tensors = [*model.graph.initializer, *(a.t for node in model.graph.node for a in node.attribute)]
        if any(t.external_data or t.data_location == onnx.TensorProto.EXTERNAL for t in tensors):
            raise BadInput("weights are in another file, which no digest speaks of")
        reader = _ModelReader(model, arithmetic)
        graph = reader.graph()
        # ONNX's own functions may crash on operators that are malformed: they see those alone that have been read.
        reader.compare()
        return graph
    except BadInput:
        raise
    except Exception as error:  # onnx and numpy raise exceptions of many kinds for what is malformed
        said = " ".join(str(error).split())[:200]
        raise BadInput(f"no ONNX model that is known: {type(error).__name__}: {said}") from error


class _ModelReader:
    """The tensors of a model's graph."""

    def __init__(self, model: onnx.ModelProto, arithmetic: RoundingModel | None) -> None:
        self.model, self.build = model, Builder()
        self.tensors: dict[str, Value | None] = {"": None}
        self.running = None if arithmetic is None else Running(self.build, arithmetic)
        versions = {entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")}
        self.opset = versions.pop() if len(versions) == 1 else 0

    def graph(self) -> Graph:
        graph = self.model.graph
        known = self.opset in OPSETS and self.model.ir_version in FORMS
        BadInput.when(not known, "its operator set, or the version of its form, is not known")
        BadInput.when(graph.sparse_initializer or self.model.functions, "sparse weights and functions are not known")
        for initializer in graph.initializer:
            self._name(initializer.name, np.array(numpy_helper.to_array(initializer)))
        inputs = [i for i in graph.input if i.name not in self.tensors]
        BadInput.when(len(inputs) != 1 or len(graph.output) != 1, "a network with one input and one output is expected")
        self._require_floats(inputs[0])
        axes = inputs[0].type.tensor_type.shape.dim
        dims = [axis.dim_value if axis.HasField("dim_value") else int(not at) for at, axis in enumerate(axes)]
        known = min(dims, default=0) > 0 and np.prod(dims, dtype=float) <= LARGEST
        BadInput.when(not known, "the shape of the input is not known")
        source = self.build.computed(Node((), int(np.prod(dims))), dims)
        self._name(inputs[0].name, source if self.running is None else self.running.result(source))
        for node in graph.node:
            try:
                found = self._value(node)
                self._name(node.output[0], found)
                BadInput.when(0 in self._shape(node.output[0]), "it is empty")
                BadInput.when(isinstance(found, np.ndarray) and not np.isfinite(found).all(), "it is not finite")
            except Exception as error:
                kind = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
                place = f"node '{node.name or ' '.join(node.output)}' ({node.op_type})"
                raise BadInput(f"{place}: {kind}{error}") from error
        output = self.tensors.get(graph.output[0].name)
        if not isinstance(output, Tensor):
            raise BadInput("the output does not depend on the input")
        if self.running is not None:
            output = self.running.output(output)
        return Graph(self.build.nodes, self.build.settled(output))

    def _require_floats(self, end: onnx.ValueInfoProto) -> None:
        known = end.type.tensor_type.elem_type in (FLOATS if self.running is None else {onnx.TensorProto.FLOAT})
        BadInput.when(not known, "an input and an output of floating-point numbers are expected, float32 if they run")

    def compare(self) -> None:
        """Compare the model with ONNX's checker, and the shapes of all values with those of its inference.

        Raises:
            BadInput: if a shape differs, or ONNX does not tell it, for a batch of one.
        """
        model, (output,) = self.model, self.model.graph.output
        if not output.type.tensor_type.HasField("shape"):
            output.CopyFrom(onnx.shape_inference.infer_shapes(model).graph.output[0])
        self._require_floats(output)
        onnx.checker.check_model(model, full_check=True)
        for end in model.graph.input:
            for axis, size in zip(end.type.tensor_type.shape.dim, self._shape(end.name), strict=True):
                axis.dim_value = size
        # What the file says of other shapes is no operator's definition.
        del model.graph.value_info[:]
        output.type.tensor_type.ClearField("shape")
        found = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True).graph
        types = {value.name: value.type.tensor_type for value in (*found.value_info, *found.output)}
        shapes = {name: type_.shape.dim for name, type_ in types.items() if type_.HasField("shape")}
        for node in model.graph.node:
            name = node.output[0]
            ours, theirs = list(self._shape(name)), [axis.dim_value for axis in shapes.get(name, ())]
            if name not in shapes or ours != theirs:
                raise BadInput(f"the shape of '{name}' would be {ours}, ONNX says {theirs if name in shapes else None}")

    def _shape(self, name: str) -> tuple[int, ...]:
        value: Any = self.tensors[name]
        return tuple(getattr(value, "x", value).shape)

    def _name(self, name: str, value: Value) -> None:
        BadInput.when(name in self.tensors, f"two tensors are named '{name}'")
        self.tensors[name] = value

    def _value(self, node: onnx.NodeProto) -> Value:
        BadInput.when(node.domain not in ("", "ai.onnx"), f"the operator set '{node.domain}' is not known")
        BadInput.when(not set(node.input) <= self.tensors.keys(), "an input is made by no node before it")
        inputs = [self.tensors[name] for name in node.input]
        attributes: dict[str, Any] = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Constant":
            if not isinstance(attributes.get("value"), onnx.TensorProto):
                raise BadInput("a constant is expected to be a tensor")
            return np.array(numpy_helper.to_array(attributes["value"]))
        if node.op_type == "Shape" and isinstance(inputs[0], Tensor):
            return np.array(inputs[0].shape, np.int64)[attributes.get("start", 0) : attributes.get("end")]
        stored = [value for value in inputs if value is None or isinstance(value, np.ndarray)]
        if node.op_type != "DequantizeLinear" and len(stored) == len(inputs):
            return self._constant(node, [value for value in stored if value is not None])
        operator = OPERATORS.get(node.op_type)
        if operator is None:
            raise BadInput("the operator is not known")
        BadInput.when(len(node.output) > 1 and node.op_type != "Dropout", "only its first output is known")
        call, first = Call(self.build, node, inputs, attributes, self.opset), inputs[0]
        if isinstance(first, Whole) and node.op_type in MOVED:
            call.inputs[0] = first.x
            made: Any = operator(call)
            return Whole(made, first.kind)
        found = operator(call)
        return found if self.running is None else self.running.operator(node.op_type, found)

    def _constant(self, node: onnx.NodeProto, inputs: list[Number]) -> Number:
        if node.op_type not in MOVES or len(inputs) < len(node.input):
            raise BadInput("arithmetic of constants is not known")
        if np.prod([float(value.size) for value in inputs]) > LARGEST and node.op_type == "Gather":
            raise BadInput("it is too large for this checker")
        evaluator: Any = ReferenceEvaluator(node, opsets={"": self.opset})
        found = np.asarray(evaluator.run(None, dict(zip(node.input, inputs, strict=True)))[0])
        if node.op_type == "Cast" and not (inputs[0].astype(np.float64) == found.astype(np.float64)).all():
            raise BadInput("the cast changes numbers")
        return found
