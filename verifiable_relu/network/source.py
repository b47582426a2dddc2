"""What a network was read from, as it runs: its file in onnxruntime, or the module in torch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.graph import Network
from verifiable_relu.runtime import kept_session

_DTYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}


@lru_cache(maxsize=8)
def _written(network: Network) -> bytes | None:
    """The content of an ONNX file written for a network that was not read from one; None if none can be written."""
    # Imported here to spare the start-up of commands, whose networks come from files and are never written.
    from verifiable_relu.network.onnx.write import write_onnx

    try:
        return write_onnx(network, rounded=True)
    except UnsupportedError:
        return None


def replay(network: Network, x: np.ndarray) -> np.ndarray:
    """The network's outputs at a float32 point, as they are computed where it is used.

    A module that it was read from is run itself. Otherwise onnxruntime runs the file that it was read from, or one that
    is written for it; where none can be written, torch evaluates the network in float32.

    Args:
        network: with one input.
        x: one sample of any shape with ``input_size`` elements, float32; converted to the input dtype that the module
            or file declares.

    Returns:
        The outputs, flat, in their own dtype.

    Raises:
        UnsupportedError: if the module or the file does not run.
    """
    shape = (1, *network.input_shape) if network.batched else network.input_shape
    sample = np.asarray(x, np.float32).reshape(shape)
    run, by = network.run, "onnxruntime" if network.run is None else "torch"
    try:
        if run is None:
            data = network.onnx if network.onnx is not None else _written(network)
            if data is not None:
                loaded = kept_session(data)
                (declared,) = loaded.get_inputs()
                (outputs, *_) = loaded.run(None, {declared.name: sample.astype(_DTYPES[declared.type])})
                return np.asarray(outputs).reshape(-1)
            run = network
        outputs = run(torch.from_numpy(sample.reshape(1, *network.input_shape))).numpy()
    except Exception as error:
        raise UnsupportedError(f"{by} cannot run the network '{network.name}': {error}") from error
    return np.asarray(outputs).reshape(-1)
