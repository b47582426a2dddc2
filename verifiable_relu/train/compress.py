"""What becomes of a trained network that is made smaller: static int8 quantisation, and pruning by magnitude."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from verifiable_relu.network import from_torch, write_onnx
from verifiable_relu.runtime import load, session

CALIBRATED = 300
"""Training images, the first, that the ranges of the int8 activations are taken over."""

SPARSITIES = (0.5, 0.7, 0.9)
"""The parts of the weights that are pruned."""


@dataclass(frozen=True)
class Quantized:
    """An int8 network beside the float network that it comes from, over one set of images.

    Attributes:
        clean: its accuracy, as parts of 1.
        flipped_predictions: images whose predicted class differs.
        mean_logit_change: mean of |its logit − the float network's| over images and classes.
        calibration_images: how many images its ranges are taken over.
    """

    clean: float
    flipped_predictions: int
    mean_logit_change: float
    calibration_images: int


@torch.no_grad()
def prune(model: nn.Module, sparsity: float) -> nn.Module:
    """A copy of ``model`` with the smallest weights 0: of all matrices and kernels together, nothing retrained.

    Args:
        model: of any modules; what has fewer than two axes (biases, λ, PReLU's slopes) is left as it is.
        sparsity: in [0, 1]; round(sparsity · number of weights) of them become 0, those of the least magnitude.
    """
    copy = deepcopy(model)
    kernels = [parameter for parameter in copy.parameters() if parameter.ndim > 1]
    order = torch.cat([kernel.abs().flatten() for kernel in kernels]).argsort(stable=True)
    kept = torch.ones(len(order), dtype=torch.bool)
    kept[order[: round(sparsity * len(order))]] = False
    for kernel, mask in zip(kernels, kept.split([kernel.numel() for kernel in kernels]), strict=True):
        kernel.masked_fill_(~mask.view_as(kernel), 0)
    return copy


def quantize(network: bytes, images: np.ndarray, per_channel: bool = True) -> bytes:
    """The ONNX file ``network`` with int8 weights and activations, as onnxruntime's static quantisation makes it.

    Its nodes are the float ones between QuantizeLinear and DequantizeLinear. Weights are quantised symmetrically,
    activations asymmetrically over the range that they have on ``images``.

    Args:
        network: a file with one input and a free batch axis.
        images: float32 (n, …), to calibrate with.
        per_channel: whether each output channel (neuron) of a kernel (matrix) has a scale of its own.
    """
    # Imported here, because only the end of a training needs it.
    quantization = load("quantization")

    class Once(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        """Hands out all images as one batch."""

        def __init__(self, name: str) -> None:
            self.batches = iter([{name: images}])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.batches, None)

    model = onnx.load_from_string(network)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "int8.onnx"
        quantization.quantize_static(model, path, Once(model.graph.input[0].name), per_channel=per_channel)
        return path.read_bytes()


def outputs(network: bytes, images: np.ndarray) -> np.ndarray:
    """The outputs (n, classes) of an ONNX file at float32 images (n, …), by onnxruntime."""
    # Without VNNI, sums of products of two int8 saturate in 16 bits; with this they do not: as on other machines.
    entries = {"session.x64quantprecision": "1"}
    loaded = session(network, torch.get_num_threads(), entries)
    name = loaded.get_inputs()[0].name
    batches = (images[start : start + 1000] for start in range(0, len(images), 1000))
    return np.concatenate([loaded.run(None, {name: batch})[0] for batch in batches])


@torch.no_grad()
def measure_int8(
    model: nn.Module, calibration: np.ndarray, images: Tensor, labels: Tensor, per_channel: bool = True
) -> Quantized:
    """Quantise ``model`` over the first images of ``calibration`` and compare both.

    Args:
        model: in evaluation mode, such as ``from_torch`` reads.
        calibration: float32 (m, …).
        images, labels: (n, …) and their right classes (n,), to compare over.
        per_channel: as in ``quantize``.
    """
    few = calibration[:CALIBRATED]
    written = write_onnx(from_torch(model, tuple(images.shape[1:])))
    after = torch.from_numpy(outputs(quantize(written, few, per_channel), images.numpy()))
    before = torch.cat([model(x) for x in images.split(1000)])
    now = after.argmax(1)
    return Quantized(
        clean=int((now == labels).sum()) / len(labels),
        flipped_predictions=int((now != before.argmax(1)).sum()),
        mean_logit_change=(after.double() - before.double()).abs().mean().item(),
        calibration_images=len(few),
    )


@contextmanager
def _quiet() -> Iterator[Any]:
    """No log message below an error: quantisation asks for a preprocessing that these networks do not need."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
