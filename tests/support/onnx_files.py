"""ONNX files of a few nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shapes = Mapping[str, Sequence[int | str | None] | None]


def onnx_file(
    nodes: Sequence[onnx.NodeProto], inputs: Shapes, outputs: Shapes, opset: int = 18, **stored: Any
) -> bytes:
    """The file of a network of nodes, whose inputs and outputs are float32.

    Args:
        inputs: their names and shapes, with the batch axis.
        outputs: likewise.
        stored: constants by their names; those that are no integers are stored in float32.
    """
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in side.items()]
        for side in (inputs, outputs)
    ]
    arrays = {name: np.asarray(value) for name, value in stored.items()}
    tensors = [
        numpy_helper.from_array(value if value.dtype == np.int64 else value.astype(np.float32), name)
        for name, value in arrays.items()
    ]
    graph = helper.make_graph(list(nodes), "g", *ends, tensors)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return bytes(made.SerializeToString())
