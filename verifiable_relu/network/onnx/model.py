"""From the bytes of an ONNX file to a model that the standard's checker accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.onnx.external import load_external
from verifiable_relu.trial import survived

OLDEST_IR, NEWEST_IR = 3, onnx.IR_VERSION
"""The versions of the file format that are read."""

MAX_BYTES = 1 << 31
"""The largest file, unpacked and with the data beside it: protobuf's own limit is 2 GiB."""

MAX_NODES = 100_000
"""Most nodes of a graph."""

_FIRST = {bytes([tag]) for tag in (0x08, 0x12, 0x1A, 0x22, 0x28, 0x32, 0x3A, 0x42, 0x72, 0xA2, 0xCA, 0xD2)}
"""First bytes of the fields of ``ModelProto``, as protobuf writes their numbers and types."""

_DOMAINS = ("", "ai.onnx")


_PLAIN = {
    "Abs", "Add", "AveragePool", "BatchNormalization", "Clip", "Concat", "Constant", "Conv", "Div", "Dropout", "Elu",
    "Erf", "Exp", "Flatten", "Gelu", "Gemm", "GlobalAveragePool", "Identity", "LeakyRelu", "Log", "MatMul", "Max",
    "MaxPool", "Min", "Mul", "Neg", "Pow", "ReduceMean", "ReduceSum", "Relu", "Reshape", "Sigmoid", "Softmax",
    "Softplus", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators at which the standard's library was never seen to crash, in 1,500 random graphs of them alone.

It crashes (onnx 1.23.2) at EyeLike and Mish whose input has no type that is known, and at others.
"""


def load_model(
    data: bytes, folder: Path | None, read: Callable[[onnx.ModelProto], object]
) -> tuple[onnx.ModelProto, bytes]:
    """Parse and check a file.

    Args:
        data: the file's bytes, unpacked.
        folder: where the file lies, for data beside it.
        read: what will be done with the model. Both this and the check are tried in a process of its own first where
            the file has operators at which the standard's library may crash.

    Returns:
        A model with one flat graph of standard operators, which holds all its tensors, and its bytes: those of the
        file, unless tensors lay in another one.

    Raises:
        InputError: if the bytes are no ONNX file, or one that the standard's checker refuses, or data beside it cannot
            be read.
        UnsupportedError: for a valid file with subgraphs or sparse tensors, or operators that the file defines itself.
    """
    try:
        model = onnx.load_model_from_string(data)
    except Exception:  # protobuf's own exception is no public class
        raise InputError("not an ONNX file") from None
    if not model.graph.node:
        raise InputError("not an ONNX file, or one without nodes")
    if len(model.graph.node) > MAX_NODES:
        raise UnsupportedError(f"{len(model.graph.node)} nodes, of which at most {MAX_NODES} are read")
    _refuse_unread_parts(model)
    # This comes before the checker, which would follow references to other files.
    if load_external(_tensors(model.graph), folder, MAX_BYTES - len(data)):
        data = model.SerializeToString()
    if any(node.op_type not in _PLAIN or node.domain for node in model.graph.node):

        def tried() -> None:
            onnx.checker.check_model(data, full_check=True)
            onnx.shape_inference.infer_shapes(model, data_prop=True)
            read(model)

        if not survived(tried):
            raise InputError("the ONNX library crashes on the file, or there is no memory for another process")
    try:
        onnx.checker.check_model(data, full_check=True)
    except onnx.checker.ValidationError as error:
        raise InputError(f"the ONNX checker refuses the file: {error}") from None
    except Exception as error:  # shape inference has exceptions of its own, and lets others of C++ through
        raise InputError(f"the ONNX checker refuses the file: {type(error).__name__}: {error}") from None
    return model, data


def require_onnx(start: bytes) -> None:
    """Refuse a file whose first bytes are no ONNX file's.

    Raises:
        InputError: if the first field is none of those that a model may have.
    """
    if start[:1] not in _FIRST:
        raise InputError("not an ONNX file")


def opset_of(model: onnx.ModelProto, domain: str = "") -> int:
    """The version of the operators of a domain that a model is written in; by default of the standard ones.

    Raises:
        InputError: if the model names none, or several; skl2onnx names one twice.
    """
    names = _DOMAINS if domain in _DOMAINS else (domain,)
    versions = {entry.version for entry in model.opset_import if entry.domain in names}
    if len(versions) != 1:
        which = "the standard operators" if domain in _DOMAINS else f"the operators of {domain}"
        raise InputError(f"the file imports {len(versions)} versions of {which} where one is expected")
    return int(versions.pop())


def _refuse_unread_parts(model: onnx.ModelProto) -> None:
    """Refuse what a model may hold beside one graph of standard operators."""
    if not OLDEST_IR <= model.ir_version <= NEWEST_IR:
        raise UnsupportedError(f"IR version {model.ir_version}; versions {OLDEST_IR} to {NEWEST_IR} are read")
    opset_of(model)
    if model.functions:
        raise UnsupportedError("operators that the file defines itself", place=f"function '{model.functions[0].name}'")
    if model.graph.sparse_initializer:
        raise UnsupportedError("sparse initializers")
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g") or attribute.graphs:
                raise UnsupportedError("has a subgraph", place=f"node '{node.name}' ({node.op_type})")


def _tensors(graph: onnx.GraphProto) -> Iterator[tuple[str, TensorProto]]:
    """All tensors of a graph, with how messages name them."""
    for initializer in graph.initializer:
        yield f"initializer '{initializer.name}'", initializer
    for node in graph.node:
        for attribute in node.attribute:
            place = f"node '{node.name}' ({node.op_type})"
            if attribute.HasField("t"):
                yield place, attribute.t
            for tensor in attribute.tensors:
                yield place, tensor
            if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                raise UnsupportedError("a sparse tensor", place=place)


def array(tensor: TensorProto, place: str) -> np.ndarray:
    """A tensor of the file as an array.

    Raises:
        InputError: if its bytes do not fit its type and shape.
    """
    try:
        found: np.ndarray = numpy_helper.to_array(tensor)
        return found
    except Exception as error:  # whatever the bytes make numpy say
        raise InputError(f"malformed: {error}", place=place) from error
