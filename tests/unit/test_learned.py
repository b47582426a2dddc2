"""Files as skl2onnx writes them: scalers and linear models of ai.onnx.ml, labels, and maps from classes to numbers."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from onnx.helper import (
    make_graph,
    make_map_type_proto,
    make_model,
    make_node,
    make_opsetid,
    make_sequence_type_proto,
    make_tensor_type_proto,
    make_tensor_value_info,
    make_value_info,
)

from verifiable_relu.errors import InputError
from verifiable_relu.readers import read_onnx

ML = "ai.onnx.ml"
SCALER = make_node("Scaler", ["X"], ["scaled"], "scaler", domain=ML, offset=[1.0, -0.5, 2.0], scale=[0.5, 2.0, 0.1])
WEIGHTS = {"coefficients": [1.0, -2.0, 0.5, 0.25, 1.0, -1.0], "intercepts": [0.5, -0.25]}


def regressor(given: str, **more: object) -> onnx.NodeProto:
    return make_node("LinearRegressor", [given], ["Y"], "linear", domain=ML, targets=2, **WEIGHTS, **more)


def classifier(after: str, scores: str, **more: object) -> onnx.NodeProto:
    about = {"classlabels_ints": [0, 1], "post_transform": after, **WEIGHTS, **more}
    return make_node("LinearClassifier", ["scaled"], ["label", scores], "classifier", domain=ML, **about)


def normalizer(norm: str) -> onnx.NodeProto:
    return make_node("Normalizer", ["scores"], ["Y"], "normalizer", domain=ML, norm=norm)


def model(*nodes: onnx.NodeProto, label: bool = False, zipped: bool = False) -> bytes:
    """A file of some nodes whose last tensor is Y, with a label and a map of Y as outputs if they are asked for."""
    outputs = [make_tensor_value_info("label", TensorProto.INT64, ["N"])] if label else []
    made = list(nodes)
    if zipped:
        made.append(make_node("ZipMap", ["Y"], ["map"], domain=ML, classlabels_int64s=[0, 1]))
        values = make_tensor_type_proto(TensorProto.FLOAT, None)
        pairs = make_sequence_type_proto(make_map_type_proto(TensorProto.INT64, values))
        outputs.append(make_value_info("map", pairs))
    else:
        outputs.append(make_tensor_value_info("Y", TensorProto.FLOAT, ["N", 2]))
    graph = make_graph(made, "learned", [make_tensor_value_info("X", TensorProto.FLOAT, ["N", 3])], outputs)
    # skl2onnx names the standard operators twice.
    versions = [make_opsetid(ML, 1), make_opsetid("", 17), make_opsetid("", 17)]
    return make_model(graph, opset_imports=versions, ir_version=8).SerializeToString()


FILES = {
    "scaled regressor": model(SCALER, regressor("scaled")),
    "regressor": model(regressor("X")),
    "classifier": model(SCALER, classifier("NONE", "Y"), label=True),
    "softmax": model(SCALER, classifier("SOFTMAX", "scores"), normalizer("L1"), label=True),
    "logistic": model(SCALER, classifier("LOGISTIC", "scores"), normalizer("L1"), label=True),
    "euclidean": model(SCALER, classifier("NONE", "scores"), normalizer("L2")),
    "map": model(SCALER, classifier("SOFTMAX", "scores"), normalizer("L1"), label=True, zipped=True),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_scikit_learns_converter_are_read(name: str) -> None:
    network = read_onnx(FILES[name])
    session = onnxruntime.InferenceSession(FILES[name], providers=["CPUExecutionProvider"])
    for x in np.random.default_rng(0).normal(size=(4, 1, 3)).astype(np.float32):
        expected = session.run(None, {"X": x})[-1]
        numbers = [expected[0][i] for i in range(2)] if name == "map" else expected.reshape(-1)
        np.testing.assert_allclose(
            network(torch.from_numpy(x).flatten(1)).reshape(-1).numpy(), numbers, rtol=1e-5, atol=1e-6
        )
    assert network.output_size == 2
    outputs = {output.name for output in session.get_outputs()}
    for n in ("label", "map"):
        assert sum(sentence.startswith(f"output '{n}'") for sentence in network.source.repairs) == (n in outputs)
    assert sum("imported twice" in sentence for sentence in network.source.repairs) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (model(SCALER, regressor("scaled", post_transform="SOFTMAX")), "post_transform"),
        (model(SCALER, classifier("PROBIT", "Y")), "post_transform = PROBIT"),
        (model(SCALER, classifier("NONE", "scores"), normalizer("MAX")), "norm = MAX"),
        (model(SCALER, classifier("NONE", "Y", classlabels_ints=[0, 1, 2])), "2 scores for 3 classes"),
        (
            model(SCALER, classifier("NONE", "scores"), make_node("Gather", ["scores", "label"], ["Y"], axis=0)),
            "its input 'label' is not computed before it, or not read",
        ),
    ],
)
def test_what_is_not_known_of_them_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_onnx(data)
