"""Random damage to ONNX files: to their bytes, and to the messages that the bytes spell."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import AttributeProto, TensorProto, helper

INTEGERS = (0, 1, 2, -1, 3, 7, 64, 65_536, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63), 2**63 - 1)
REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e30, -1e-30, 3.4e38, float("inf"), float("nan"), 1e-45)
STRINGS = ("", "x", "y", "N", "a\nb", "\x1b[31m", "\x00", "n" * 1000, "../../etc/passwd", "ä", "ai.onnx", "ai.onnx.ml")
OPERATORS = (
    "Add", "AveragePool", "BatchNormalization", "Cast", "Clip", "Concat", "Constant", "ConstantOfShape", "Conv", "Div",
    "Dropout", "Erf", "Expand", "Flatten", "Gather", "Gelu", "Gemm", "GlobalAveragePool", "Identity", "If", "LeakyRelu",
    "MatMul", "Max", "MaxPool", "Mul", "Neg", "PRelu", "Pad", "Range", "Relu", "Reshape", "Shape", "Sigmoid", "Slice",
    "Softmax", "Squeeze", "Sub", "Sum", "Tanh", "Transpose", "Unsqueeze", "NoSuchOperator",
)  # fmt: skip
ATTRIBUTES = (
    "alpha", "beta", "axis", "axes", "auto_pad", "broadcast", "ceil_mode", "consumed_inputs", "count_include_pad",
    "dilations", "epsilon", "group", "is_test", "kernel_shape", "pads", "perm", "spatial", "strides", "to",
    "training_mode", "transA", "transB", "value", "nothing",
)  # fmt: skip


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut out, put in or repeated."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not made:
            break
        start = rng.randrange(len(made))
        length = min(rng.choice((1, 1, 2, 4, 8, 40)), len(made) - start)
        match rng.randrange(6):
            case 0:
                made[start] ^= 1 << rng.randrange(8)
            case 1:
                made[start : start + length] = rng.randbytes(length)
            case 2:
                del made[start : start + length]
            case 3:
                made[start:start] = rng.randbytes(length)
            case 4:
                made[start:start] = made[start : start + length]
            case 5:
                made[start] = (made[start] + rng.choice((1, 255))) % 256
    return bytes(made)


def messages(message: Message) -> Iterator[Message]:
    """A message and all within it."""
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for part in value if field.is_repeated else [value]:
                yield from messages(part)


def names(model: onnx.ModelProto) -> list[str]:
    """All names of values in a graph."""
    graph = model.graph
    found = [name for node in graph.node for name in (*node.input, *node.output)]
    return sorted({*found, *(t.name for t in (*graph.initializer, *graph.input, *graph.output))})


def scalar(field: FieldDescriptor, value: Any, model: onnx.ModelProto, rng: random.Random) -> Any:
    """Another value for a field that holds no message."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return damaged_bytes(value or b"\0", rng)
        case FieldDescriptor.CPPTYPE_STRING:
            return rng.choice(
                (*(names(model) * 2 or ("x",)), *STRINGS, *(OPERATORS if field.name == "op_type" else ()))
            )
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            number = rng.choice((*REALS, value * 2, -value, value + 1))
            return struct.unpack("f", struct.pack("f", number))[0] if abs(number) < 3e38 else number
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice([entry.number for entry in field.enum_type.values])
    number = rng.choice((*INTEGERS, value + 1, value - 1, value + 1, value - 1, -value, 2 * value))
    narrow = field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32)
    bits = 31 if narrow else 63
    number = max(-(2**bits), min(2**bits - 1, number))
    return abs(number) if field.cpp_type in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64) else number


def change_field(model: onnx.ModelProto, rng: random.Random) -> None:
    """Change, remove, repeat or move what some field of some message holds."""
    message = rng.choice([m for m in messages(model) if m.ListFields()])
    field, value = rng.choice(message.ListFields())
    if not field.is_repeated:
        if rng.random() < 0.2:
            message.ClearField(field.name)
        elif field.type != FieldDescriptor.TYPE_MESSAGE:
            setattr(message, field.name, scalar(field, value, model, rng))
        return
    at = rng.randrange(len(value))
    match rng.randrange(4):
        case 0:
            del value[at]
        case 1 if field.type == FieldDescriptor.TYPE_MESSAGE:
            value.add().CopyFrom(value[at])
        case 1:
            value.append(value[at])
        case 2:
            kept = list(value)
            rng.shuffle(kept)
            del value[:]
            value.extend(kept)
        case 3 if field.type != FieldDescriptor.TYPE_MESSAGE:
            value[at] = scalar(field, value[at], model, rng)


def change_node(model: onnx.ModelProto, rng: random.Random) -> None:
    """Change what a node is or reads, or its attributes."""
    if not model.graph.node:
        return
    node = rng.choice(model.graph.node)
    known = names(model)
    match rng.randrange(7):
        case 0:
            node.op_type = rng.choice(OPERATORS)
        case 1 if node.input:
            node.input[rng.randrange(len(node.input))] = rng.choice([*known, ""])
        case 2:
            node.input.append(rng.choice([*known, ""]))
        case 3:
            node.output[:] = [rng.choice(known), *node.output[1:]]
        case 4:
            node.output.append(rng.choice([*known, "", "unheard"]))
        case 5:
            entry = rng.choice(
                (0, 1, -1, 2, 0.5, "VALID", "SAME_UPPER", "none", [0], [1, 1], [0, 1], [2, 2], [0, 0, 1, 1], [1.5])
            )
            node.attribute.append(helper.make_attribute(rng.choice(ATTRIBUTES), entry))
        case 6 if node.attribute:
            rng.choice(node.attribute).name = rng.choice(ATTRIBUTES)


def insert_alias(model: onnx.ModelProto, rng: random.Random) -> None:
    """Give a value a second name, and let one reader use it."""
    readers = [(n, i) for n, node in enumerate(model.graph.node) for i, name in enumerate(node.input) if name]
    if not readers:
        return
    at, place = rng.choice(readers)
    node = model.graph.node[at]
    made = helper.make_node(rng.choice(("Identity", "Dropout", "Relu", "Neg")), [node.input[place]], ["second name"])
    node.input[place] = "second name"
    nodes = list(model.graph.node)
    nodes.insert(at, made)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def change_tensor(model: onnx.ModelProto, rng: random.Random) -> None:
    """Change a constant's shape, type, name or place."""
    tensors = [m for m in messages(model) if isinstance(m, TensorProto)]
    if not tensors:
        return
    tensor = rng.choice(tensors)
    match rng.randrange(6):
        case 0:
            tensor.dims[:] = [*tensor.dims, rng.choice((0, 1, 2, 10**12))]
        case 1:
            tensor.dims[:] = tensor.dims[::-1]
        case 2:
            tensor.data_type = rng.choice((1, 7, 11, 6, 9, 10, 8, 0, 99))
        case 3:
            tensor.name = rng.choice([t.name for t in tensors])
        case 4:
            tensor.data_location = TensorProto.EXTERNAL
            entry = tensor.external_data.add()
            entry.key, entry.value = "location", rng.choice(("weights.bin", "/etc/passwd", "../x", ""))
        case 5:
            model.graph.initializer.add().CopyFrom(tensor)


def change_interface(model: onnx.ModelProto, rng: random.Random) -> None:
    """Change the graph's input or output, the opset or the file's version."""
    graph = model.graph
    match rng.randrange(6):
        case 0 if model.opset_import:
            model.opset_import[0].version = rng.choice((*range(1, 30), 0, -1, 10**9))
        case 1:
            model.ir_version = rng.choice((1, 2, 3, 4, 8, 10, 13, 14, 99, -1))
        case 2:
            rng.choice((graph.input, graph.output)).add().CopyFrom(
                helper.make_tensor_value_info(rng.choice(names(model)), 1, [1])
            )
        case 3 if graph.output:
            graph.output[0].name = rng.choice(names(model))
        case 4 if graph.input:
            shape = graph.input[0].type.tensor_type.shape
            shape.dim.add().dim_value = rng.choice((0, 1, 2, 10**12, -1))
        case 5 if graph.input and graph.input[0].type.tensor_type.shape.dim:
            dim = rng.choice(graph.input[0].type.tensor_type.shape.dim)
            if rng.random() < 0.5:
                dim.dim_value = rng.choice((0, 1, 2, 3, 10**12, -1))
            else:
                dim.dim_param = rng.choice(("N", "M", ""))


def nest(model: onnx.ModelProto, rng: random.Random) -> None:
    """Add what a graph seldom has: a subgraph, a function, a sparse initialiser."""
    match rng.randrange(3):
        case 0 if model.graph.node:
            inner = onnx.GraphProto.FromString(model.graph.SerializeToString())  # protobuf does not copy into itself
            attribute = rng.choice(model.graph.node).attribute.add()
            attribute.name, attribute.type = rng.choice(("then_branch", "body", "value")), AttributeProto.GRAPH
            attribute.g.CopyFrom(inner)
        case 1 if model.graph.node:
            function = model.functions.add()
            function.name, function.domain = rng.choice(model.graph.node).op_type, rng.choice(("", "local"))
            function.input.append("a")
            function.output.append("b")
            function.node.add().CopyFrom(helper.make_node("Neg", ["a"], ["b"]))
            function.opset_import.add().version = 13
        case 2 if model.graph.initializer:
            sparse = model.graph.sparse_initializer.add()
            sparse.values.CopyFrom(rng.choice(model.graph.initializer))


CHANGES: dict[Callable[[onnx.ModelProto, random.Random], None], int] = {
    change_field: 10, change_node: 8, insert_alias: 3, change_tensor: 4, change_interface: 4, nest: 1,
}  # fmt: skip


def damaged_message(data: bytes, rng: random.Random) -> bytes:
    """Some fields of the file's messages changed."""
    model = onnx.load_model_from_string(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choices(list(CHANGES), list(CHANGES.values()))[0](model, rng)
    return model.SerializeToString()


KINDS: dict[str, Callable[[bytes, random.Random], bytes]] = {"bytes": damaged_bytes, "messages": damaged_message}
