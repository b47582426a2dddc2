"""Graphs as tf2onnx writes Keras's layers: images with their channels last, transposed about convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from verifiable_relu.readers import read_onnx

node = helper.make_node
RNG = np.random.default_rng(0)
IMAGE = ["batch", 6, 6, 2]


def weights(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32) / 2


TO_CHANNELS = node("Transpose", ["x"], ["nchw"], name="conv__6", perm=[0, 3, 1, 2])
FROM_CHANNELS = node("Transpose", ["c"], ["nhwc"], name="conv__10", perm=[0, 2, 3, 1])
FLAT = np.array([-1, 48], np.int64)
FLATTENED = [
    node("Reshape", ["nhwc", "flat"], ["f"], name="flatten/Reshape"),
    node("MatMul", ["f", "w"], ["m"], name="dense/MatMul"),
    node("Add", ["m", "b"], ["logits"], name="dense/BiasAdd"),
]
DENSE = {"flat": FLAT, "w": weights(48, 3), "b": weights(3)}
CONV = {"k": weights(3, 2, 3, 3), "kb": weights(3)}

GRAPHS: dict[str, tuple[Sequence[object], list[onnx.NodeProto], dict[str, np.ndarray]]] = {
    "dense layers and a softmax": (
        ["batch", 4],
        [
            node("MatMul", ["x", "w0"], ["m0"]),
            node("Add", ["m0", "b0"], ["a0"]),
            node("Relu", ["a0"], ["r0"]),
            node("MatMul", ["r0", "w1"], ["m1"]),
            node("Add", ["m1", "b1"], ["a1"]),
            node("Softmax", ["a1"], ["y"], axis=-1),
        ],
        {"w0": weights(4, 5), "b0": weights(5), "w1": weights(5, 3), "b1": weights(3)},
    ),
    "a convolution of stride 2, padded at the end, flattened with channels last": (
        IMAGE,
        [
            TO_CHANNELS,
            node("Conv", ["nchw", "k", "kb"], ["c0"], strides=[2, 2], pads=[0, 0, 1, 1], kernel_shape=[3, 3], group=1),
            node("Relu", ["c0"], ["c"]),
            FROM_CHANNELS,
            *FLATTENED[:2],
            node("Add", ["m", "b"], ["y"]),
        ],
        {**CONV, **DENSE, "flat": np.array([-1, 27], np.int64), "w": weights(27, 3)},
    ),
    "a depthwise convolution, a normalisation that is a product and a sum, ReLU6, and the mean of all places": (
        IMAGE,
        [
            TO_CHANNELS,
            node("Conv", ["nchw", "k"], ["d"], group=2, strides=[1, 1], pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
            node("Mul", ["d", "scale"], ["s"]),
            node("Add", ["s", "shift"], ["t"]),
            node("Min", ["t", "six"], ["low"]),
            node("Max", ["low", "zero"], ["c"]),
            FROM_CHANNELS,
            node("ReduceMean", ["nhwc"], ["g"], axes=[1, 2], keepdims=0),
            node("Sigmoid", ["g"], ["y"]),
        ],
        {
            "k": weights(2, 1, 3, 3),
            "scale": weights(1, 2, 1, 1),
            "shift": weights(1, 2, 1, 1),
            "six": np.array(6, np.float32),
            "zero": np.array(0, np.float32),
        },
    ),
    "a normalisation of channels that are last, pools and a softmax": (
        IMAGE,
        [
            node("Mul", ["x", "scale"], ["s"]),
            node("Add", ["s", "shift"], ["t"]),
            node("Transpose", ["t"], ["nchw"], perm=[0, 3, 1, 2]),
            node("Conv", ["nchw", "k", "kb"], ["c0"], pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
            node("LeakyRelu", ["c0"], ["c1"], alpha=0.3),
            node("MaxPool", ["c1"], ["c2"], kernel_shape=[2, 2], strides=[2, 2]),
            node("AveragePool", ["c2"], ["c"], kernel_shape=[2, 2], strides=[1, 1]),
            FROM_CHANNELS,
            node("Reshape", ["nhwc", "flat"], ["f"]),
            node("MatMul", ["f", "w"], ["m"]),
            node("Add", ["m", "b"], ["logits"]),
            node("Softmax", ["logits"], ["y"], axis=1),
        ],
        {
            **CONV,
            "scale": weights(2),
            "shift": weights(2),
            "flat": np.array([-1, 12], np.int64),
            "w": weights(12, 3),
            "b": weights(3),
        },
    ),
    "a shape that is computed from the input's": (
        IMAGE,
        [
            node("Shape", ["x"], ["shape"]),
            node("Cast", ["shape"], ["whole"], to=TensorProto.INT32),
            node("Slice", ["whole", "first", "second", "axis"], ["batch"]),
            node("Concat", ["batch", "rest"], ["sizes"], axis=0),
            node("Cast", ["sizes"], ["long"], to=TensorProto.INT64),
            node("Reshape", ["x", "long"], ["f"]),
            node("MatMul", ["f", "w"], ["y"]),
        ],
        {
            "first": np.array([0], np.int64),
            "second": np.array([1], np.int64),
            "axis": np.array([0], np.int64),
            "rest": np.array([72], np.int32),
            "w": weights(72, 2),
        },
    ),
    "a residual block between transpositions": (
        IMAGE,
        [
            TO_CHANNELS,
            node("Conv", ["nchw", "k"], ["c0"], pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
            node("Relu", ["c0"], ["c1"]),
            node("Add", ["c1", "nchw"], ["c"]),
            FROM_CHANNELS,
            node("GlobalAveragePool", ["c"], ["p"]),
            node("Squeeze", ["p", "places"], ["f"]),
            node("Gemm", ["f", "w", "b"], ["y"]),
        ],
        {"k": weights(2, 2, 3, 3), "places": np.array([2, 3], np.int64), "w": weights(2, 3), "b": weights(3)},
    ),
}


@pytest.mark.parametrize("opset", (13, 15))
@pytest.mark.parametrize("name", GRAPHS)
def test_what_tf2onnx_writes_is_read_as_onnxruntime_runs_it(name: str, opset: int) -> None:
    shape, nodes, constants = GRAPHS[name]
    graph = helper.make_graph(
        nodes,
        "tf2onnx",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "classes"])],
        [numpy_helper.from_array(value, label) for label, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    data = model.SerializeToString()
    network = read_onnx(data)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    x = RNG.normal(size=(4, *network.source.input_shape)).astype(np.float32)
    expected = np.concatenate([session.run(["y"], {"x": each[None]})[0] for each in x])
    np.testing.assert_allclose(network(torch.from_numpy(x).flatten(1)).numpy(), expected, rtol=1e-5, atol=1e-5)
