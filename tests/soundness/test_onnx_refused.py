"""ONNX files that are invalid, or that mean something else than they seem to: refused, in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
import torch
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from verifiable_relu.errors import InputError
from verifiable_relu.readers import read_onnx

from .onnx_agreement import bad_line

node = helper.make_node


def model(
    nodes: Sequence[onnx.NodeProto],
    shape: Sequence[object] = (1, 2),
    constants: dict[str, object] | None = None,
    opset: int = 13,
    output: str = "y",
    rank: int | None = None,
) -> onnx.ModelProto:
    """A float32 file with the input ``x`` and one output, whose sizes it does not say; its rank is that of ``x``."""
    stored = [numpy_helper.from_array(np.asarray(v), name) for name, v in (constants or {}).items()]
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_empty_tensor_value_info(output)],
        stored,
    )
    graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    for _ in range(len(shape) if rank is None else rank):
        graph.output[0].type.tensor_type.shape.dim.add()
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def f32(*numbers: object) -> np.ndarray:
    return np.array(numbers, dtype=np.float32)


def i64(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


ONE, RELU = (1, 2), node("Relu", ["x"], ["y"])
IMAGE, KERNEL = (1, 1, 3, 3), np.ones((1, 1, 2, 2), dtype=np.float32)


def changed(change: Callable[[onnx.ModelProto], object], **arguments: object) -> onnx.ModelProto:
    """A file that is fine (x → Add with a constant → Relu), and a change to it."""
    add = [node("Add", ["x", "w"], ["h"]), node("Relu", ["h"], ["y"])]
    made = model(add, constants={"w": f32(1, 2)}, **arguments)
    change(made)
    return made


def operator(kind: str, *inputs: str, **attributes: object) -> list[onnx.NodeProto]:
    return [node(kind, ["x", *inputs], ["y"], **attributes)]


def external(made: onnx.ModelProto) -> None:
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "weights.bin"


def subgraph() -> onnx.GraphProto:
    return helper.make_graph([node("Neg", ["x"], ["z"])], "b", [], [helper.make_empty_tensor_value_info("z")])


def with_function(made: onnx.ModelProto) -> None:
    opset = [helper.make_opsetid("", 13)]
    made.functions.append(helper.make_function("", "Relu", ["a"], ["b"], [node("Neg", ["a"], ["b"])], opset))


def repeat(field: Callable[[onnx.ModelProto], object]) -> Callable[[onnx.ModelProto], None]:
    return lambda made: field(made).add().CopyFrom(field(made)[0])


def typed(name: str, kind: AttributeProto.AttributeType, **value: object) -> AttributeProto:
    return AttributeProto(name=name, type=kind, **value)


def with_attribute(made: onnx.ModelProto, attribute: AttributeProto) -> onnx.ModelProto:
    made.graph.node[0].attribute.append(attribute)
    return made


INVALID: dict[str, onnx.ModelProto] = {
    # Names
    "two initialisers of one name": changed(repeat(lambda m: m.graph.initializer)),
    "two nodes with one output": changed(repeat(lambda m: m.graph.node)),
    "a node whose output is the input": changed(lambda m: m.graph.node.append(node("Neg", ["y"], ["x"]))),
    "a node whose output is an initialiser": changed(lambda m: m.graph.node.append(node("Neg", ["y"], ["w"]))),
    "two inputs of one name": changed(repeat(lambda m: m.graph.input)),
    "two inputs of two types": changed(lambda m: m.graph.input.append(helper.make_tensor_value_info("x2", 11, [1, 2]))),
    "two outputs, one of them of whole numbers that no node makes": changed(
        lambda m: m.graph.output.append(helper.make_tensor_value_info("nothing", 7, [1, 2]))
    ),
    "an output of whole numbers": changed(
        lambda m: m.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 7, [1, 2]))
    ),
    "no output": changed(lambda m: m.graph.ClearField("output")),
    "an output that no node makes": model([RELU], output="z"),
    "an input that no node makes": model([node("Add", ["x", "nothing"], ["y"])]),
    "a cycle": model([node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"]), node("Relu", ["b"], ["y"])]),
    "an output with an empty name": model([node("Relu", ["x"], [""])], output=""),
    # Versions and domains
    "an opset of the future": changed(lambda m: None, opset=999),
    "opset 0": changed(lambda m: None, opset=0),
    "no opset": changed(lambda m: m.ClearField("opset_import")),
    "two opsets": changed(lambda m: m.opset_import.append(helper.make_opsetid("", 9))),
    "an operator newer than the opset": model(operator("Gelu"), opset=13),
    "an operator of another domain": model([node("Relu", ["x"], ["y"], domain="elsewhere")]),
    "a file version of the future": changed(lambda m: setattr(m, "ir_version", 999)),
    "a function that redefines an operator": changed(with_function),
    "a subgraph": model([node("If", ["x"], ["y"], then_branch=subgraph(), else_branch=subgraph())]),
    # Inputs and attributes of nodes
    "one input too many": model([node("Relu", ["x", "x"], ["y"])]),
    "one input too few": model([node("Add", ["x"], ["y"])]),
    "a needed input left empty": model([node("Add", ["x", ""], ["y"])]),
    "one output too many": model([node("Relu", ["x"], ["y", "z"])]),
    "an attribute that Relu does not have": model(operator("Relu", alpha=0.5)),
    "an attribute that LeakyRelu does not have": model(operator("LeakyRelu", alpga=0.5)),
    "an attribute of an older form of Add": model(operator("Add", "w", broadcast=1), constants={"w": f32(1, 2)}),
    "an attribute of an older form of Squeeze": model(operator("Squeeze", axes=[0]), rank=1),
    "a mask of Dropout as the output": model([node("Dropout", ["x"], ["h", "y"])]),
    "Dropout in training": model(
        operator("Dropout", "r", "t"), constants={"r": np.float32(0.5), "t": np.array(True)}
    ),
    "an attribute of another type": with_attribute(
        model(operator("LeakyRelu")), typed("alpha", AttributeProto.INT, i=1)
    ),
    "an attribute twice": with_attribute(model(operator("LeakyRelu", alpha=0.5)), helper.make_attribute("alpha", 2.0)),
    "a slope that is no number": model(operator("LeakyRelu", alpha=float("nan"))),
    # Shapes and types
    "shapes that do not broadcast": model(operator("Add", "w"), constants={"w": f32(1, 2, 3)}),
    "a constant of another type": model(operator("Add", "w"), constants={"w": np.array([1.0, 2.0])}),
    "matrices that do not fit": model(operator("MatMul", "w"), constants={"w": np.ones((3, 1), np.float32)}),
    "Gemm of a vector": model(operator("Gemm", "w"), (2,), {"w": np.ones((2, 2), np.float32)}),
    "Gemm with C of a larger shape": model(
        operator("Gemm", "w", "c"), constants={"w": np.eye(2, dtype=np.float32), "c": np.ones((3, 2), np.float32)}
    ),
    "a slope that does not broadcast one way": model(operator("PRelu", "s"), constants={"s": f32([1, 1], [2, 2])}),
    "an axis that is not there": model(operator("Flatten", axis=3)),
    "a permutation with an axis twice": model(operator("Transpose", perm=[0, 0])),
    "axes of another rank": model(operator("Transpose", perm=[0, 2, 1])),
    "Reshape to another size": model(operator("Reshape", "s"), constants={"s": i64(1, 3)}),
    "Reshape with two unknown sizes": model(operator("Reshape", "s"), constants={"s": i64(-1, -1)}),
    "Squeeze of an axis that is not 1": model(operator("Squeeze", "s"), constants={"s": i64(1)}, rank=1),
    "Unsqueeze of an axis twice": model(operator("Unsqueeze", "s"), constants={"s": i64(0, 0)}, rank=4),
    "Cast to whole numbers": model(operator("Cast", to=TensorProto.INT64)),
    "an initialiser with too few bytes": changed(lambda m: setattr(m.graph.initializer[0], "raw_data", b"\0" * 4)),
    "an initialiser with too many bytes": changed(lambda m: setattr(m.graph.initializer[0], "raw_data", b"\0" * 12)),
    "an initialiser of a negative size": changed(lambda m: m.graph.initializer[0].dims.__setitem__(0, -2)),
    "an initialiser elsewhere": changed(external),
    "a weight that is not finite": model(operator("Add", "w"), constants={"w": f32(1, np.inf)}),
    "an input of whole numbers": changed(lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 7)),
    "an input without a shape": changed(lambda m: m.graph.input[0].type.tensor_type.ClearField("shape")),
    "an input of another rank than it is used with": model(operator("Conv", "w"), (1, 3), {"w": KERNEL}),
    "an output of another declared type": changed(
        lambda m: setattr(m.graph.output[0].type.tensor_type, "elem_type", TensorProto.DOUBLE)
    ),
    "an output of another declared size": changed(
        lambda m: setattr(m.graph.output[0].type.tensor_type.shape.dim[1], "dim_value", 5)
    ),
    # Windows
    "auto_pad = VALID with pads": model(
        operator("Conv", "w", auto_pad="VALID", pads=[1, 1, 1, 1]), IMAGE, {"w": KERNEL}
    ),
    "auto_pad = SAME_UPPER with pads": model(
        operator("Conv", "w", auto_pad="SAME_UPPER", pads=[1, 1, 1, 1]), IMAGE, {"w": KERNEL}
    ),
    "pooling with auto_pad = VALID and pads": model(
        operator("AveragePool", kernel_shape=[2, 2], auto_pad="VALID", pads=[1, 1, 1, 1]), IMAGE
    ),
    "an auto_pad that is none": model(operator("Conv", "w", auto_pad="HALF"), IMAGE, {"w": KERNEL}),
    "a kernel_shape that is not that of the kernel": model(
        operator("Conv", "w", kernel_shape=[3, 3]), IMAGE, {"w": KERNEL}
    ),
    "groups that do not divide the channels": model(operator("Conv", "w", group=2), IMAGE, {"w": KERNEL}),
    "a stride of 0": model(operator("Conv", "w", strides=[0, 1]), IMAGE, {"w": KERNEL}),
    "a dilation of 0": model(operator("Conv", "w", dilations=[0, 1]), IMAGE, {"w": KERNEL}),
    "negative pads that take off more than there is": model(operator("Pad", "p"), constants={"p": i64(0, -3, 0, 4)}),
    "negative pads": model(operator("AveragePool", kernel_shape=[2, 2], pads=[-1, 0, 0, 0]), IMAGE),
    "too few pads": model(operator("Conv", "w", pads=[1, 1]), IMAGE, {"w": KERNEL}),
    "a kernel larger than the image": model(operator("AveragePool", kernel_shape=[4, 4]), IMAGE),
    "a kernel of size 0": model(operator("AveragePool", kernel_shape=[0, 2]), IMAGE),
    "pooling without a kernel": model(operator("AveragePool"), IMAGE),
    # Normalisation
    "BatchNormalization in training": model(
        operator("BatchNormalization", *"sbmv", training_mode=1),
        constants={name: f32(1, 1) for name in "sbmv"},
        opset=15,
    ),
    "BatchNormalization of other channels": model(
        operator("BatchNormalization", *"sbmv"), constants={name: f32(1, 1, 1) for name in "sbmv"}
    ),
    "BatchNormalization of a negative variance": model(
        operator("BatchNormalization", *"sbmv"), constants={**dict.fromkeys("sbm", f32(1, 1)), "v": f32(-1, 1)}
    ),
    "BatchNormalization not over channels": model(
        operator("BatchNormalization", *"sbmv", spatial=0),
        (1, 2, 2),
        {name: np.ones((2, 2), np.float32) for name in "sbmv"},
        opset=8,
    ),
}  # fmt: skip


@pytest.mark.quick
def test_the_file_that_other_tests_damage_is_read_as_it_is() -> None:
    network = read_onnx(changed(lambda m: None).SerializeToString())
    found = network(torch.tensor([[-3.0, 1.0]], dtype=torch.float64))
    assert found.reshape(-1).tolist() == [0.0, 3.0]


@pytest.mark.quick
@pytest.mark.parametrize("name", INVALID)
def test_what_is_invalid_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(InputError) as caught:
        read_onnx(INVALID[name].SerializeToString())
    assert bad_line(caught.value) is None


@pytest.mark.parametrize("data", [b"", b"\0", b"onnx", b"\x08\x08", bytes(range(256)), b"\x1f\x8b\x08\x00"])
def test_what_is_no_onnx_file_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(InputError) as caught:
        read_onnx(data)
    assert bad_line(caught.value) is None


@pytest.mark.parametrize("text", ["a\nb", "\x1b[31mred", "\x07", "\x00", "n" * 100_000, "\u202e\u2028"])
@pytest.mark.parametrize("where", ["node", "output", "operator", "domain", "attribute", "input"])
def test_names_in_messages_are_printable_and_short(text: str, where: str) -> None:
    names = dict.fromkeys(("node", "output", "operator", "domain", "attribute", "input"), "")
    names[where] = text
    bad = node(names["operator"] or "NoSuch", [names["input"] or "x"], [names["output"] or "y"], names["node"] or None)
    bad.domain = names["domain"]
    if names["attribute"]:
        bad.op_type = "Relu"
        bad.attribute.append(helper.make_attribute(names["attribute"], 1))
    made = model([bad], output=names["output"] or "y")
    with pytest.raises(InputError) as caught:
        read_onnx(made.SerializeToString())
    assert bad_line(caught.value) is None


def leaky(slopes: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.where(x > 0, x, slopes * x)


SQUARE, PAIR = (1, 2, 2), f32(1, 10)
NORMAL = {name: f32(2, 3) for name in "sbmv"}
OLD: dict[str, tuple[onnx.ModelProto, Callable[[np.ndarray], np.ndarray] | None]] = {
    # A file of an opset before 7, and what it computes by that opset; None: nothing that is valid or deterministic.
    "Add along an axis": (
        model(operator("Add", "w", broadcast=1, axis=1), SQUARE, {"w": PAIR}, opset=6),
        lambda x: x + PAIR[:, None],
    ),
    "Sub along an axis": (
        model(operator("Sub", "w", broadcast=1, axis=1), SQUARE, {"w": PAIR}, opset=6),
        lambda x: x - PAIR[:, None],
    ),
    "Mul along an axis": (
        model(operator("Mul", "w", broadcast=1, axis=1), SQUARE, {"w": PAIR}, opset=6),
        lambda x: x * PAIR[:, None],
    ),
    "Div along an axis": (
        model(operator("Div", "w", broadcast=1, axis=1), SQUARE, {"w": PAIR}, opset=6),
        lambda x: x / PAIR[:, None],
    ),
    "Add along the last axis": (
        model(operator("Add", "w", broadcast=1), SQUARE, {"w": PAIR}, opset=6),
        lambda x: x + PAIR,
    ),
    "Add of other shapes without broadcast": (model(operator("Add", "w"), SQUARE, {"w": PAIR}, opset=6), None),
    "PRelu by channels": (
        model(operator("PRelu", "s"), SQUARE, {"s": PAIR}, opset=6),
        leaky(PAIR[:, None]),
    ),
    "BatchNormalization as in training": (
        model(operator("BatchNormalization", *"sbmv"), SQUARE, NORMAL, opset=6),
        None,
    ),
    "BatchNormalization as in testing": (
        model(operator("BatchNormalization", *"sbmv", is_test=1, epsilon=0.0), SQUARE, NORMAL, opset=6),
        lambda x: (x - PAIR_2[:, None]) / np.sqrt(PAIR_2)[:, None] * PAIR_2[:, None] + PAIR_2[:, None],
    ),
    "Dropout as in training": (model(operator("Dropout"), SQUARE, opset=6), None),
    "Dropout as in testing": (model(operator("Dropout", is_test=1), SQUARE, opset=6), lambda x: x),
    "Gemm with C of another shape, not broadcast": (
        model(operator("Gemm", "w", "c"), (1, 2), {"w": np.eye(2, dtype=np.float32), "c": PAIR}, opset=6),
        None,
    ),
    "Gemm with C broadcast": (
        model(operator("Gemm", "w", "c", broadcast=1), (1, 2), {"w": np.eye(2, dtype=np.float32), "c": PAIR}, opset=6),
        lambda x: x + PAIR,
    ),
    "Reshape by an attribute": (
        model(operator("Reshape", shape=[1, 4]), SQUARE, opset=4),
        lambda x: x.reshape(1, 4),
    ),
    "Cast by a type's name": (model(operator("Cast", to="FLOAT"), SQUARE, opset=5), lambda x: x),
    "Clip by attributes": (model(operator("Clip", min=0.0, max=1.0), SQUARE, opset=6), lambda x: np.clip(x, 0, 1)),
    "LeakyRelu that may overwrite": (
        model(operator("LeakyRelu", alpha=0.5, consumed_inputs=[0]), SQUARE, opset=5),
        leaky(f32(0.5)),
    ),
}  # fmt: skip
PAIR_2 = f32(2, 3)


@pytest.mark.parametrize("name", OLD)
def test_an_operator_of_an_old_opset_is_refused_or_read_as_that_opset_says(name: str) -> None:
    made, meant = OLD[name]
    try:
        network = read_onnx(made.SerializeToString())
    except InputError as error:
        assert bad_line(error) is None
        return
    assert meant is not None, "read although it has no meaning in that opset, or a random one"
    x = np.array([-1.5, 0.25, -0.75, 2.0], dtype=np.float64)
    shape = tuple(dim.dim_value for dim in made.graph.input[0].type.tensor_type.shape.dim)
    x = x[: int(np.prod(shape))].reshape(shape)
    found = network(torch.from_numpy(x.reshape(1, -1))).numpy().reshape(-1)
    assert np.abs(found - meant(x).reshape(-1)).max() < 1e-9


def untyped(made: onnx.ModelProto) -> None:
    made.graph.output[0].ClearField("type")
    made.graph.value_info.add().name = "h"


LAX: dict[str, tuple[onnx.ModelProto, Callable[[np.ndarray], np.ndarray]]] = {
    # Files that runtimes run although the standard's checker refuses them, or that old opsets allow.
    "nodes out of order": (
        changed(lambda m: m.graph.node.insert(0, m.graph.node.pop())),
        lambda x: np.maximum(x + f32(1, 2), 0),
    ),
    "an output without a type": (changed(untyped), lambda x: np.maximum(x + f32(1, 2), 0)),
    "negative pads of opset 2": (
        model(operator("Pad", pads=[0, 0, -1, 0, 0, 1], value=3.0), SQUARE, opset=2),
        lambda x: np.concatenate([x[:, :, 1:], np.full((1, 2, 1), 3.0)], 2),
    ),
    "negative pads of a constant": (
        model(
            [node("Pad", ["w", "pads"], ["v"]), node("Add", ["x", "v"], ["y"])],
            constants={"w": f32(1, 2, 3), "pads": i64(-1, 0)},
        ),
        lambda x: x + f32(2, 3),
    ),
    "negative pads of an old constant": (
        model(
            [node("Pad", ["w"], ["v"], pads=[-1, 1]), node("Add", ["x", "v"], ["y"])],
            constants={"w": f32(1, 2)},
            opset=9,
        ),
        lambda x: x + f32(2, 0),
    ),
    "an output with a type and no shape": (
        changed(lambda m: m.graph.output[0].type.tensor_type.ClearField("shape")),
        lambda x: np.maximum(x + f32(1, 2), 0),
    ),
    "two outputs of opset 2": (
        helper.make_model(
            helper.make_graph(
                [node("Split", ["x"], ["a", "y"], axis=1, split=[1, 1])],
                "g",
                [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 2))],
                [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 1)) for name in "ay"],
            ),
            opset_imports=[helper.make_opsetid("", 2)],
            ir_version=8,
        ),
        lambda x: x,
    ),
    "Concat along the first axis after the batch": (
        model([node("Concat", ["x", "x"], ["y"], axis=1)], SQUARE, opset=2),
        lambda x: np.concatenate([x, x], 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAX)
def test_files_as_tools_write_them_are_read(name: str) -> None:
    made, meant = LAX[name]
    shape = tuple(dim.dim_value for dim in made.graph.input[0].type.tensor_type.shape.dim)
    x = np.array([-1.5, 0.25, -0.75, 2.0])[: int(np.prod(shape))].reshape(shape)
    network = read_onnx(made.SerializeToString())
    found = network(torch.from_numpy(x.reshape(1, -1))).numpy().reshape(-1)
    assert np.abs(found - meant(x).reshape(-1)).max() < 1e-9


def test_nodes_in_a_circle_are_refused() -> None:
    made = changed(lambda m: m.graph.node[0].input.__setitem__(1, "y"))
    with pytest.raises(InputError, match="in a circle"):
        read_onnx(made.SerializeToString())
