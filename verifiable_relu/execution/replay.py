"""Replay of networks in the runtime where they are used: onnxruntime, torch, or operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.linear import Convolution, Dense, Gather
from verifiable_relu.ir.network import Affine, Network, Op, Sum
from verifiable_relu.runtime import kept_session

_DTYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}


@torch.no_grad()
def replay(network: Network, x: np.ndarray) -> np.ndarray:
    """Return the outputs at a float32 point as the network's source computes them.

    A module is run by torch, a file by onnxruntime. A network that was made from neither is evaluated by torch.

    Args:
        network: with one input.
        x: one sample of any shape with ``input_size`` elements, float32; converted to the input dtype that the module
            or file declares.

    Returns:
        The outputs, flat, in their own dtype.

    Raises:
        UnsupportedError: if the module or the file does not run.
    """
    source, sample = network.source, np.asarray(x, np.float32)
    by = "onnxruntime" if source.run is None and source.onnx is not None else "torch"
    try:
        if source.run is not None:
            outputs = source.run(torch.from_numpy(sample.reshape(1, *source.input_shape))).numpy()
        elif source.onnx is not None:
            loaded = kept_session(source.onnx)
            (declared,) = loaded.get_inputs()
            given = sample.reshape((1, *source.input_shape) if source.batched else source.input_shape)
            outputs = loaded.run(None, {declared.name: given.astype(_DTYPES[declared.type])})[0]
        else:
            outputs = network(torch.from_numpy(sample.reshape(1, -1))).numpy()
    except Exception as error:
        raise UnsupportedError(f"{by} cannot run the network '{network.name}': {error}") from error
    return np.asarray(outputs).reshape(-1)


def evaluations(network: Network, x: np.ndarray) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Yield the evaluations in a network's arithmetic that can be run here, by name.

    Args:
        network: as it runs (``model.as_executed``).
        x: (input_size,) float32.
    """
    # Of several networks in one, each part is run as it is.
    if network.arithmetic == "float32" and (network.source.onnx is not None or network.source.run is not None):
        yield "onnxruntime", lambda: replay(network, x)

    def is_evaluation(op: Op) -> bool:
        """Return True if an op's value in float32 is an evaluation: it rounds as its errors say, or only moves."""
        if isinstance(op, Sum):
            # A sum of the file has summands that are off by its rounding; that of a GELU and its error is none.
            return all(isinstance(source := network.ops[i], Affine) and source.weight_error for i in op.inputs)
        moves = isinstance(op, Affine) and isinstance(op.map, Gather) and op.bias is None
        return not isinstance(op, Affine) or moves or not op.is_exact

    if all(is_evaluation(op) for op in network.ops[1:]):
        yield "torch, operator by operator,", lambda: _evaluate_by_operators(network, x)


@torch.no_grad()
def _evaluate_by_operators(network: Network, x: np.ndarray) -> np.ndarray:
    """Return the outputs as torch computes them in float32, op by op, with operands and results rounded."""
    operand, result = _ROUNDED[network.arithmetic]
    values = [result(torch.from_numpy(x).reshape(1, -1))]
    for op in network.ops[1:]:
        inputs = [values[i] for i in op.inputs]
        if isinstance(op, Affine) and isinstance(op.map, Dense | Convolution):
            inputs = [operand(each) for each in inputs]
            op = replace(op, map=op.map.with_weight(operand(op.map.weight.float())))
        values.append(result(op.value(*inputs)))
    return values[-1].numpy().reshape(-1)


def _cut(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


_ROUNDED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "float32": (lambda x: x, lambda x: x),
    "tf32": (_cut, lambda x: x),
    "bfloat16": (lambda x: x, lambda x: x.bfloat16().float()),
    "float16": (lambda x: x, lambda x: x.half().float()),
}
"""How an arithmetic rounds float32 operands of products of matrices, and results."""
