"""Quantisation against a simulation of its own."""

import logging

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn

from verifiable_relu.nn import Normalize, cnn, mlp
from verifiable_relu.readers import from_torch, write_onnx
from verifiable_relu.train.export import CALIBRATED, measure_int8, outputs, quantize

# Quantisation


def of(shape: tuple[int, int, int], activation: type[nn.Module]) -> tuple[nn.Sequential, np.ndarray, bytes]:
    torch.manual_seed(1)
    model = cnn(shape, (4, 6), (9,), 5, activation, Normalize((0.4,) * shape[0], (0.2,) * shape[0]))
    images = np.random.default_rng(0).random((250, *shape), dtype=np.float32)
    return model.eval(), images, write_onnx(from_torch(model, shape))


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.PReLU])
def test_every_matrix_and_kernel_is_int8(activation: type[nn.Module], per_channel: bool) -> None:
    model, images, written = of((2, 8, 8), activation)
    made = onnx.load_from_string(quantize(written, images, per_channel))
    tensors = {tensor.name: tensor for tensor in made.graph.initializer}
    made_by = {name: node for node in made.graph.node for name in node.output}
    weights = [p.detach().numpy() for p in model.parameters() if p.ndim > 1]
    layers = [node for node in made.graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    assert len(layers) == len(weights) == 4
    for layer, weight in zip(layers, weights, strict=True):
        data, scale, zero = (tensors[name] for name in made_by[layer.input[1]].input)
        assert data.data_type == TensorProto.INT8 and not numpy_helper.to_array(zero).any()
        scales = numpy_helper.to_array(scale)
        assert scales.shape == ((len(weight),) if per_channel else ())
        scales = scales.reshape(-1, *(1,) * (weight.ndim - 1))
        assert (np.abs(numpy_helper.to_array(data) * scales - weight) <= scales * 0.5001).all()
        # Its input is int8 as well.
        integers = made_by[layer.input[0]].input
        assert tensors[integers[2]].data_type == TensorProto.INT8


def simulate(made: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """An int8 MLP node by node in numpy: floats between quantisation and dequantisation."""
    values = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer} | {made.graph.input[0].name: x}
    for node in made.graph.node:
        first, *rest = (values[name] for name in node.input)
        match node.op_type:
            case "QuantizeLinear":
                result = np.clip(np.rint(first / rest[0]) + rest[1], -128, 127)
            case "DequantizeLinear":
                shape = (-1, *(1,) * (first.ndim - 1))
                result = (first.astype(np.float64) - rest[1].reshape(shape)) * rest[0].reshape(shape)
                result = result.reshape(first.shape)
            case "Flatten":
                result = first.reshape(len(first), -1)
            case "Gemm":
                result = first @ rest[0].T + rest[1]
            case "Relu":
                result = np.maximum(first, 0)
            case other:
                raise AssertionError(other)
        values[node.output[0]] = result
    return np.asarray(values[made.graph.output[0].name])


@pytest.mark.parametrize("per_channel", [True, False])
def test_onnxruntime_computes_what_the_file_says(per_channel: bool) -> None:
    torch.manual_seed(0)
    model = mlp([36, 20, 20, 4], nn.ReLU)
    images = np.random.default_rng(0).random((200, 1, 6, 6), dtype=np.float32)
    made = quantize(write_onnx(from_torch(model, (1, 6, 6))), images, per_channel)
    expected, found = simulate(onnx.load_from_string(made), images), outputs(made, images)
    step = np.diff(np.unique(found.round(6))).min()
    # Sums that lie between two int8 may be rounded either way.
    assert np.abs(found - expected).max() <= 2.01 * step
    assert (np.abs(found - expected) > 1e-5).mean() < 0.02


def measured(
    model: nn.Module, calibration: np.ndarray, x: torch.Tensor, labels: torch.Tensor, per_channel: bool = True
) -> dict[str, float]:
    network = write_onnx(from_torch(model, tuple(x.shape[1:])))
    return measure_int8(model, quantize(network, calibration[:CALIBRATED], per_channel), x, labels)


def test_a_network_that_int8_holds_exactly_is_unchanged() -> None:
    """Weights 0 and 1, and inputs that are multiples of 1/255 from 0 to 1."""
    model = mlp([3, 3, 3], nn.ReLU)
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(3)[[1, 2, 0]])
        model[3].weight.copy_(torch.eye(3)[[0, 2, 1]])
        model[1].bias.zero_()
        model[3].bias.zero_()
    images = (np.random.default_rng(0).permuted(np.tile(np.arange(256), (3, 1)), axis=1).T / 255).astype(np.float32)
    images = images.reshape(-1, 3, 1, 1)
    labels = torch.from_numpy(images.reshape(-1, 3)[:, [1, 0, 2]].argmax(1))
    for per_channel in (True, False):
        same = measured(model, images, torch.from_numpy(images), labels, per_channel)
        assert (same["clean"], same["flipped_predictions"]) == (1.0, 0) and same["mean_logit_change"] < 1e-6
        between = torch.from_numpy((images + 0.4 / 255).clip(0, 1).astype(np.float32))
        other = measured(model, images, between, labels, per_channel)
        assert other["mean_logit_change"] == pytest.approx(0.4 / 255, rel=0.05)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.PReLU])
def test_the_measures_are_those_of_the_two_files(activation: type[nn.Module]) -> None:
    model, images, written = of((1, 8, 8), activation)
    x, labels = torch.from_numpy(images), torch.arange(len(images)) % 5
    found = measured(model, images, x, labels)

    def run(data: bytes) -> np.ndarray:
        entries = onnxruntime.SessionOptions()
        # As in ``outputs``: without it, sums saturate on processors without VNNI.
        entries.add_session_config_entry("session.x64quantprecision", "1")
        session = onnxruntime.InferenceSession(data, entries, providers=["CPUExecutionProvider"])
        return np.asarray(session.run(None, {session.get_inputs()[0].name: images})[0])

    before, after = run(written), run(quantize(written, images[:CALIBRATED]))
    assert found["clean"] == (after.argmax(1) == labels.numpy()).mean()
    assert found["flipped_predictions"] == (after.argmax(1) != before.argmax(1)).sum()
    assert found["mean_logit_change"] == pytest.approx(np.abs(after - before).mean(), rel=1e-3)
    assert 0 < found["mean_logit_change"] < 0.02


def test_quantisation_says_nothing_and_leaves_logging_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    _, images, written = of((1, 8, 8), nn.ReLU)
    quantize(written, images)
    assert not caplog.records
    logging.getLogger("after").warning("heard")
    assert [record.message for record in caplog.records] == ["heard"]
