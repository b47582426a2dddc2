"""The compression of a trained network by static int8 quantisation or by pruning, and the effect on its accuracy."""

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
"""The number of training images, the first ones, on which the ranges of the int8 activations are calibrated."""

SPARSITIES = (0.5, 0.7, 0.9)
"""The fractions of the weights that are pruned."""


@dataclass(frozen=True)
class Quantized:
    """A comparison of an int8 network with the float network that it was made from, on one set of images.

    Attributes:
        clean: the accuracy of the int8 network, in [0, 1].
        flipped_predictions: the number of images for which the two networks predict different classes.
        mean_logit_change: the mean of |int8 logit − float logit| over images and classes.
        calibration_images: the number of images on which the int8 ranges were calibrated.
    """

    clean: float
    flipped_predictions: int
    mean_logit_change: float
    calibration_images: int


@torch.no_grad()
def prune(model: nn.Module, sparsity: float) -> nn.Module:
    """A copy of a model in which the weights of least magnitude are 0; nothing is retrained.

    Args:
        model: any module. Its matrices and kernels are pruned together; parameters with fewer than two axes (biases, λ,
            the slopes of PReLU) are kept.
        sparsity: the fraction of the weights that become 0, in [0, 1], rounded to a whole number of weights.
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
    """An ONNX file with int8 weights and activations, as onnxruntime's static quantisation makes it from a float file.

    The operators of the new file are the float ones between QuantizeLinear and DequantizeLinear. Weights are quantised
    symmetrically, and activations asymmetrically over their range on ``images``.

    Args:
        network: the content of an ONNX file with one input and a free batch axis.
        images: float32 (n, …), the images on which ranges are calibrated.
        per_channel: whether each output channel of a kernel, or each neuron of a matrix, has a scale of its own.
    """
    # Imported here, because trainings need the module only at their end.
    quantization = load("quantization")

    class Once(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        """A reader that returns all images as one batch."""

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
    """The outputs (n, classes) that onnxruntime computes of an ONNX file's content at float32 images (n, …)."""
    # On a processor without VNNI, sums of two products of int8 numbers saturate at 16 bits by default. With this entry
    # they do not, and the outputs are the same on all processors.
    entries = {"session.x64quantprecision": "1"}
    loaded = session(network, torch.get_num_threads(), entries)
    name = loaded.get_inputs()[0].name
    batches = (images[start : start + 1000] for start in range(0, len(images), 1000))
    return np.concatenate([loaded.run(None, {name: batch})[0] for batch in batches])


@torch.no_grad()
def measure_int8(
    model: nn.Module, calibration: np.ndarray, images: Tensor, labels: Tensor, per_channel: bool = True
) -> Quantized:
    """Quantise a model and compare the int8 network with it.

    Args:
        model: in evaluation mode, of modules that ``from_torch`` reads.
        calibration: float32 (m, …); the first ``CALIBRATED`` of these images calibrate the ranges.
        images: float32 (n, …), the images on which both networks are compared.
        labels: (n,), the true classes of ``images``.
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
    """Suppress log messages below errors: onnxruntime recommends a preprocessing that these networks do not need."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
