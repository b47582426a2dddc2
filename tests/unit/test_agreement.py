"""The comparison of a network with its source: a misread network is refused, and a correct one never is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from verifiable_relu.campaign.inputs import compare_on_boxes
from verifiable_relu.errors import InputError
from verifiable_relu.ir.network import Affine, Op
from verifiable_relu.readers import read_onnx
from verifiable_relu.readers.builder import Value
from verifiable_relu.readers.onnx.call import CONVERTERS, NodeCall
from verifiable_relu.readers.simplify import simplified
from verifiable_relu.spec.property import Box, Property

RNG = np.random.default_rng(0)


def file(nodes: list, size: int, constants: dict[str, np.ndarray], kind: int = TensorProto.FLOAT) -> bytes:
    """An ONNX file with ``size`` inputs x and as many outputs y."""
    shape = (1, size)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, shape)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()


def chain(depth: int, width: int, scale: float = 1.0, dtype: type = np.float32) -> bytes:
    """MatMul, Add and Relu, ``depth`` times."""
    nodes, constants, last = [], {}, "x"
    for i in range(depth):
        constants[f"w{i}"] = (RNG.normal(size=(width, width)) * scale / width**0.5).astype(dtype)
        constants[f"b{i}"] = RNG.normal(size=width).astype(dtype)
        out = "y" if i == depth - 1 else f"r{i}"
        nodes += [
            helper.make_node("MatMul", [last, f"w{i}"], [f"m{i}"], name=f"product {i}"),
            helper.make_node("Add", [f"m{i}", f"b{i}"], [f"a{i}"], name=f"sum {i}"),
            helper.make_node("Relu", [f"a{i}"], [out], name=f"relu {i}"),
        ]
        last = out
    kind = TensorProto.FLOAT if dtype == np.float32 else TensorProto.DOUBLE
    return file(nodes, width, constants, kind)


def wrong_sign(call: NodeCall) -> Value:
    """A faulty converter of MatMul."""
    return call.build.dense(call.value(), -torch.tensor(call.constant(1).T.copy()))


def weights_off(call: NodeCall) -> Value:
    """A faulty converter of MatMul, whose weights are off by a thousandth."""
    return call.build.dense(call.value(), torch.tensor(1.001 * call.constant(1).T))


def capped(call: NodeCall) -> Value:
    """A faulty converter of Neg, which is wrong for inputs beyond 1,000."""
    negative = call.build.scale(call.value(), -1.0)
    return call.build.sum(negative, call.build.relu(call.build.scale(call.value(), shift=-1000.0)))


@pytest.mark.parametrize("fault", [wrong_sign, weights_off])
def test_a_faulty_converter_is_found_and_its_node_named(fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    data = chain(3, 8)
    calls = iter(range(3))
    right = CONVERTERS["MatMul", 13]
    monkeypatch.setitem(CONVERTERS, ("MatMul", 13), lambda c: fault(c) if next(calls) == 1 else right(c))  # type: ignore[operator]
    with pytest.raises(InputError, match=r"node 'product 1': .*does not compute what the file does"):
        read_onnx(data)


def test_a_faulty_merging_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(ops: Sequence[Op], output: int) -> tuple[Op, ...]:
        found = simplified(ops, output)
        return tuple(
            replace(op, bias=-op.bias) if isinstance(op, Affine) and op.bias is not None else op for op in found
        )

    monkeypatch.setattr("verifiable_relu.readers.onnx.read.simplified", careless)
    with pytest.raises(InputError, match="though each single node does"):
        read_onnx(chain(2, 8))


def test_a_misreading_that_shows_in_the_propertys_box_alone_is_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONVERTERS, ("Neg", 13), capped)
    network = read_onnx(file([helper.make_node("Neg", ["x"], ["y"])], 3, {}))
    near, far = (Property(Box(np.full(3, low), np.full(3, low + 1.0)), ()) for low in (0.0, 5000.0))
    compare_on_boxes(network, (near,))
    with pytest.raises(InputError, match="at a point of the property's box"):
        compare_on_boxes(network, (near, far))


def test_a_box_beyond_float32_is_not_compared() -> None:
    network = read_onnx(file([helper.make_node("Relu", ["x"], ["y"])], 3, {}))
    compare_on_boxes(network, (Property(Box(np.full(3, 1e39), np.full(3, 2e39)), ()),))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("depth", "width", "scale"), [(1, 2000, 1.0), (40, 50, 2.0), (40, 50, 0.1), (6, 300, 30.0)])
def test_rounding_alone_never_refuses_a_network(depth: int, width: int, scale: float, dtype: type) -> None:
    data = chain(depth, width, scale, dtype)
    network = read_onnx(data)
    box = Box(np.full(width, -3.0), np.full(width, 3.0))
    compare_on_boxes(network, (Property(box, ()),))


@pytest.mark.parametrize("seed", [2, 7, 11])
@pytest.mark.parametrize("spread", [1.5, 20.0])
def test_a_softmax_of_outputs_far_apart_is_no_misread_file(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.standard_normal((4, 24)), spread * rng.standard_normal((24, 3))
    arrays = {"V": first, "W": second, "b": rng.standard_normal(3)}
    nodes = [
        helper.make_node("MatMul", ["x", "V"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "W", "b"], ["z"]),
        helper.make_node("Softmax", ["z"], ["y"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "softmax",
        [helper.make_tensor_value_info("x", 1, [1, 4])],
        [helper.make_tensor_value_info("y", 1, [1, 3])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    assert read_onnx(model.SerializeToString()).output_size == 3
