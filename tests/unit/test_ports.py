"""Files with several inputs and outputs, hidden nodes of queries, and outputs that are no floating-point numbers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx.helper import make_node, make_tensor_value_info

from tests.support.onnx_files import onnx_file
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.readers import Chosen, read_onnx
from verifiable_relu.solver import main

A = np.array([[1, -2, 0.5, 1], [0.25, 1, -1, 2], [-1, 0.5, 1, -0.5]], np.float32)
B = np.array([[1, -1], [0.5, 2], [-1, 1], [2, 0.25]], np.float32)


def model(opset: int = 17, second: int = TensorProto.FLOAT) -> bytes:
    """Inputs a (N, 3) and b (1, 2, 2); outputs y = relu(a·A + b)·B, the larger y's number, and the mean of relu."""
    nodes = [
        make_node("MatMul", ["a", "A"], ["product"]),
        make_node("Reshape", ["b", "shape"], ["flat"]),
        make_node("Add", ["product", "flat"], ["sum"]),
        make_node("Relu", ["sum"], ["hidden"]),
        make_node("MatMul", ["hidden", "B"], ["y"]),
        make_node("ArgMax", ["y"], ["label"], axis=1),
        make_node("GlobalAveragePool", ["image"], ["mean"]),
        make_node(
            "Unsqueeze", ["hidden", *["first"] * (opset >= 13)], ["image"], **{} if opset >= 13 else {"axes": [0]}
        ),
    ]
    nodes[-2:] = reversed(nodes[-2:])
    inputs, outputs = {"a": ["N", 3], "b": [1, 2, 2]}, {"y": ["N", 2], "label": ["N", 1], "mean": [1, "N", 1]}
    first = {"first": [0]} if opset >= 13 else {}
    made = onnx.load_from_string(onnx_file(nodes, inputs, outputs, opset, A=A, B=B, shape=[-1, 4], **first))
    made.graph.input[1].type.tensor_type.elem_type = second
    made.graph.output[1].type.tensor_type.elem_type = TensorProto.INT64
    return made.SerializeToString()


def by_runtime(data: bytes, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"a": a.reshape(1, 3), "b": b.reshape(1, 2, 2)}), strict=True))


@pytest.mark.parametrize("opset", [7, 11, 13, 18])
def test_several_inputs_and_outputs_are_one_vector_each(opset: int) -> None:
    data = model(opset)
    network = read_onnx(data)
    assert network.source.input_shape == (7,) and network.output_size == 3
    assert network.source.ports == {"a": (1, 3), "b": (1, 2, 2), "y": (1, 2), "mean": (1, 1, 1)}
    for x in np.random.default_rng(opset).normal(size=(5, 7)).astype(np.float32):
        found = by_runtime(data, x[:3], x[3:])
        np.testing.assert_allclose(
            network(torch.from_numpy(x)[None]).numpy().reshape(-1),
            np.concatenate([found["y"].reshape(-1), found["mean"].reshape(-1)]),
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.parametrize("inputs", [1, 2])
def test_no_output_is_lost_where_all_are_numbers(inputs: int) -> None:
    made = onnx.load_model_from_string(model())
    del made.graph.output[1]
    if inputs == 1:
        del made.graph.input[1]
        made.graph.initializer.append(numpy_helper.from_array(np.ones((1, 2, 2), np.float32), "b"))
    network = read_onnx(made.SerializeToString())
    assert network.output_size == 3 and list(network.source.ports)[inputs:] == ["y", "mean"]
    x = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    x[:, 3:] = 1
    hidden = np.maximum(x[:, :3] @ A + 1, 0)
    expected = np.concatenate([hidden @ B, hidden.mean(1, keepdims=True)], 1)
    found = network(torch.from_numpy(x[:, : network.input_size])).numpy().reshape(5, -1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_tensors_are_taken_in_the_order_in_which_they_are_named() -> None:
    plain, other = read_onnx(model()), read_onnx(model(), chosen=Chosen(("b", "a"), ("mean", "y"), ("hidden",)))
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 7)).astype(np.float32))
    y, z = plain(x).reshape(4, -1), other(torch.cat([x[:, 3:], x[:, :3]], 1)).reshape(4, -1)
    torch.testing.assert_close(z[:, :3], torch.cat([y[:, 2:], y[:, :2]], 1))
    hidden = torch.relu(x[:, :3] @ torch.from_numpy(A) + x[:, 3:])
    torch.testing.assert_close(z[:, 3:], hidden)
    assert list(other.source.ports) == ["b", "a", "mean", "y", "hidden"]


def test_outputs_of_other_types_are_left_out_with_what_only_they_need() -> None:
    made = onnx.load_model_from_string(model())
    del made.graph.output[2]
    del made.graph.input[1]
    made.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 2, 2), np.float32), "b"))
    network = read_onnx(made.SerializeToString())
    assert (
        network.source.input_shape == (3,)
        and network.source.output_shape == (2,)
        and list(network.source.ports) == ["a", "y"]
    )
    operators = {node.op_type for node in onnx.load_model_from_string(network.source.onnx or b"").graph.node}
    assert "MatMul" in operators and "ArgMax" not in operators


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (Chosen(inputs=("a",)), "the inputs are 'a', 'b', not 'a'"),
        (Chosen(inputs=("a", "c")), "the inputs are 'a', 'b', not 'a', 'c'"),
        (Chosen(outputs=("hidden",)), "no output 'hidden' of numbers; there are 'y', 'mean', 'label'"),
        (Chosen(hidden=("a",)), "no node computes a tensor 'a'"),
        (Chosen(outputs=("y", "y")), "a tensor is named twice"),
    ],
)
def test_tensors_that_are_not_there_are_refused(chosen: Chosen, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_onnx(model(), chosen=chosen)


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_inputs_or_outputs_of_different_types_are_refused(side: str) -> None:
    made = onnx.load_model_from_string(model(second=TensorProto.DOUBLE if side == "inputs" else TensorProto.FLOAT))
    if side == "inputs":
        made.graph.node.insert(0, make_node("Cast", ["b"], ["narrow"], to=TensorProto.FLOAT))
        made.graph.node[2].input[0] = "narrow"
    else:
        made.graph.node.append(make_node("Cast", ["mean"], ["wide"], to=TensorProto.DOUBLE))
        made.graph.output[2].CopyFrom(make_tensor_value_info("wide", TensorProto.DOUBLE, [1, "N", 1]))
    with pytest.raises(UnsupportedError, match=f"{side} of different types, double and float"):
        read_onnx(made.SerializeToString())


QUERY = """(vnnlib-version <2.0>)
(declare-network f (declare-input S real [1,3]) (declare-input T real [2,2])
  (declare-hidden H real [4] "hidden")
  (declare-output Y real [2]) (declare-output M real [1]))
"""
BOX = "".join(f"(assert (and (>= S[0,{i}] 0.0) (<= S[0,{i}] 1.0)))" for i in range(3)) + "".join(
    f"(assert (and (>= T[{i},{j}] -1.0) (<= T[{i},{j}] 1.0)))" for i in range(2) for j in range(2)
)


def asked(folder: Path, text: str, capsys: pytest.CaptureFixture[str], status: int = 0) -> list[str]:
    (folder / "net.onnx").write_bytes(model())
    (folder / "q.vnnlib").write_text(text)
    command = ["verify", str(folder / "q.vnnlib"), "--net", str(folder / "net.onnx"), "--timeout", "60"]
    assert main(command) == status
    shown = capsys.readouterr()
    return (shown.err if status else shown.out).splitlines()


def declared(inputs: list[tuple[str, str]], outputs: list[tuple[str, str]], hidden: str = "") -> str:
    """A query about (name, tensor of the file) in an order, at one point, where y_0 is 3.5."""
    kinds = {"a": "float32 [1,3]", "b": "float32 [1,2,2]", "y": "float32 [1,2]", "mean": "float32 [1,1,1]"}
    heads = [f"(declare-input {name} {kinds[of]})" for name, of in inputs]
    heads += [hidden, *(f"(declare-output {name} {kinds[of]})" for name, of in outputs)]
    a, b, y, mean = (next(name for name, tensor in (*inputs, *outputs) if tensor == of) for of in kinds)
    conditions = [f"(== {a}[0,{i}] {value})" for i, value in enumerate(("1.0", "0.0", "0.0"))]
    conditions += [f"(== {b}[0,{i},{j}] 0.5)" for i in range(2) for j in range(2)]
    conditions += [f"(>= {y}[0,0] 3.4)", f"(<= {y}[0,1] 0.0)", f"(<= {mean}[0,0,0] 1.1)"]
    asserts = "".join(f"(assert {condition})" for condition in conditions)
    return f"(vnnlib-version <2.0>)(declare-network n {' '.join(heads)}){asserts}"


A_B, Y_MEAN = [("a", "a"), ("b", "b")], [("y", "y"), ("mean", "mean")]
OTHER = [("P", "a"), ("Q", "b")], [("R", "y"), ("S", "mean")]


@pytest.mark.parametrize("hidden", ["", '(declare-hidden H float32 [1,4] "hidden")'])
def test_tensors_declared_by_the_files_names_are_those_in_any_order(
    hidden: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for inputs in (A_B, A_B[::-1], OTHER[0]):
        for outputs in (Y_MEAN, Y_MEAN[::-1], OTHER[1]):
            assert asked(tmp_path, declared(inputs, outputs, hidden), capsys)[0] == "sat"


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        (A_B, [("mean", "y"), ("S", "mean")], "name all outputs as the file does, or none"),
        (A_B, [("R", "y"), ("y", "mean")], "'y' is declared in the place of the file's 'mean'"),
        ([("b", "a"), ("Q", "b")], Y_MEAN, "name all inputs as the file does, or none"),
    ],
)
def test_some_of_the_files_names_in_the_places_of_others_are_refused(
    inputs: list[tuple[str, str]],
    outputs: list[tuple[str, str]],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (line,) = asked(tmp_path, declared(inputs, outputs), capsys, 2)
    assert said in line


@pytest.mark.thorough
def test_queries_name_several_inputs_and_outputs_by_order_by_name_and_hidden_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corners = np.stack(np.meshgrid(*[[0, 1]] * 3, *[[-1, 1]] * 4, indexing="ij"), -1).reshape(-1, 7)
    hidden = np.maximum(corners[:, :3] @ A + corners[:, 3:], 0)
    # The mean of the hidden neurons is convex in the inputs: it is largest in a corner.
    most = hidden.mean(1).max()
    plain = QUERY.replace('(declare-hidden H real [4] "hidden")', "")
    assert asked(tmp_path, f"{plain}{BOX}(assert (>= M[0] {most + 0.01}))", capsys) == ["unsat"]
    assert asked(tmp_path, f"{QUERY}{BOX}(assert (>= M[0] {most + 0.01}))", capsys) == ["unsat"]
    answer, *lines = asked(tmp_path, f"{QUERY}{BOX}(assert (>= M[0] {most - 0.01}))", capsys)
    heads = ["S Real [1,3]", "T Real [2,2]", "Y Real [2]", "M Real [1]", "H Real [4]"]
    assert answer == "sat" and [line for line in lines if "[" in line] == heads
    value = np.array([float(line) for line in lines if "[" not in line])
    found = by_runtime(model(), value[:3].astype(np.float32), value[3:7].astype(np.float32))
    np.testing.assert_allclose(value[7:10], [*found["y"].reshape(-1), *found["mean"].reshape(-1)], rtol=1e-5)
    np.testing.assert_allclose(value[10:].mean(), value[9], rtol=1e-5)
    # A constraint on a hidden node and an output together: with h_3 = 0, y_0 = h_0 + h_1/2 − h_2.
    largest = hidden[:, 0].max() + hidden[:, 1].max() / 2
    more = f"(assert (and (<= H[3] 0.0) (>= Y[0] {largest + 0.01})))"
    assert asked(tmp_path, QUERY + BOX + more, capsys) == ["unsat"]


def test_what_a_query_declares_must_be_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    goal = "(assert (>= M[0] 100.0))"
    for before, after, message in (
        ("(declare-output Y real [2]) ", "", "4 inputs, outputs and hidden nodes are declared, but the file has 5"),
        ("T real [2,2]", "T real [2,1,2]", "tensor T is declared with shape [2, 1, 2], but 'b' of 'net' has [1, 2, 2]"),
        ("H real [4]", "H real [2,2]", "tensor H is declared with shape [2, 2], but 'hidden' of 'net' has [1, 4]"),
        ('"hidden"', '"nothing"', "no node computes a tensor 'nothing'"),
        ("S real", "S int64", ""),
    ):
        box = re.sub(r"T\[(\d),", r"T[\1,0,", BOX) if "T real" in before else BOX
        (line,) = asked(tmp_path, QUERY.replace(before, after) + box + goal, capsys, 2)
        assert message in line, line
