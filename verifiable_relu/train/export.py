"""The end of a training: the replacement of its activation by ReLU, the measurements, the ONNX files and the record."""

from __future__ import annotations

import json
import logging
import platform
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

import verifiable_relu
from verifiable_relu.data import Dataset
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.files import write_whole
from verifiable_relu.nn import substitute_relu
from verifiable_relu.readers import from_torch, write_onnx
from verifiable_relu.runtime import load, session
from verifiable_relu.train.loop import Training, accuracy, measure_swap, not_refuted
from verifiable_relu.train.options import ARMS, Options, int8_file

ATTACKED = 1000  # The number of test images, the first ones, that are attacked
CALIBRATED = 300  # The number of training images, the first ones, by which the ranges of int8 activations are set


def finish(trained: Training, options: Options, training: Dataset, test: Dataset) -> tuple[nn.Module, dict[str, Any]]:
    """Replace the trained activation by ReLU, if the arm replaces it at the end, and measure the network.

    Returns the network that is exported, and the record of the training. Its ``results`` have ``clean``, the accuracy
    on the test set; the effect of the replacement, unless there is none; ``lam_learned``, λ of each layer when the
    annealing began; and where ε > 0, the part of the first ``ATTACKED`` test images that no attack refutes.
    """
    model = trained.model.eval()
    images, labels = torch.from_numpy(test.images), torch.from_numpy(test.labels)
    hard, swap = model if ARMS[options.arm].swap == "never" else substitute_relu(model), trained.swap
    if ARMS[options.arm].swap == "end":
        swap = measure_swap(model, hard, test)
    results: dict[str, Any] = {"clean": accuracy(hard, images, labels)}
    if swap is not None:
        results |= {
            "clean_before_substitution": swap.accuracy_smooth,
            "clean_after_substitution": swap.accuracy,
            "mean_logit_change": swap.mean,
            "worst_logit_change": swap.worst,
            "flipped_predictions": swap.flipped,
        }
    results["lam_learned"] = trained.learned
    if options.eps:
        few, theirs = images[:ATTACKED], labels[:ATTACKED]
        results["images_attacked"] = len(few)
        results["clean_of_these"] = accuracy(hard, few, theirs)
        results["not_refuted_of_these"] = not_refuted(hard, few, theirs, options.eps, options.seed)
    record = {
        "options": asdict(options),
        "training_images": len(training),
        "note": training.note,
        "results": results,
        "epochs": trained.history,
        "seconds": round(sum(epoch["seconds"] for epoch in trained.history), 1),
        "versions": {
            "verifiable_relu": verifiable_relu.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
        },
    }
    return hard, record


def written(model: nn.Module, shape: tuple[int, ...]) -> bytes:
    """Return the ONNX file of a model; with a free batch axis, unless torch's exporter alone can write it."""
    network = from_torch(model, shape)
    try:
        return write_onnx(replace(network, source=replace(network.source, onnx=None)))
    except UnsupportedError:
        return write_onnx(network)


def export(
    trained: Training, options: Options, training: Dataset, test: Dataset, out: Path, int8: bool = False
) -> dict[str, Any]:
    """Finish a training (``finish``), and write its network to ``out`` and its record next to it as ``.json``.

    With ``int8``, the int8 network is written, too, and compared (``measure_int8``). Returns the record's ``results``.
    """
    hard, record = finish(trained, options, training, test)
    network = written(hard, training.images.shape[1:])
    write_whole(out, network)
    if int8:
        quantized = write_int8(network, out, training.images)
        images, labels = torch.from_numpy(test.images), torch.from_numpy(test.labels)
        record["results"]["int8"] = measure_int8(hard, quantized, images, labels)
    write_whole(out.with_suffix(".json"), (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    return dict(record["results"])


def write_int8(network: bytes, out: Path, images: np.ndarray) -> bytes:
    """Write the int8 network of an ONNX file next to it, calibrated on the first images; returns its content."""
    quantized = quantize(network, images[:CALIBRATED])
    write_whole(int8_file(out), quantized)
    return quantized


def quantize(network: bytes, images: np.ndarray, per_channel: bool = True) -> bytes:
    """Return the int8 file that onnxruntime's static quantisation makes of a float one with a free batch axis.

    The operators are the float ones between QuantizeLinear and DequantizeLinear. Weights are quantised symmetrically,
    with a scale for each output channel of a kernel and each neuron of a matrix or (``per_channel``) one for all, and
    activations asymmetrically over their range on float32 ``images`` (n, …).
    """
    # Imported here, because trainings need the module only at their end.
    quantization = load("quantization")
    model = onnx.load_from_string(network)
    batches = iter([{model.graph.input[0].name: images}])
    reader = type("Reader", (quantization.CalibrationDataReader,), {"get_next": lambda self: next(batches, None)})
    # onnxruntime recommends a preprocessing that these networks do not need.
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "int8.onnx"
            quantization.quantize_static(model, path, reader(), per_channel=per_channel)
            return path.read_bytes()
    finally:
        logging.disable(disabled)


def outputs(network: bytes, images: np.ndarray) -> np.ndarray:
    """Return the outputs (n, classes) that onnxruntime computes of an ONNX file's content at float32 images (n, …)."""
    loaded = session(network, torch.get_num_threads(), precise=True)
    name = loaded.get_inputs()[0].name
    batches = (images[start : start + 1000] for start in range(0, len(images), 1000))
    return np.concatenate([loaded.run(None, {name: batch})[0] for batch in batches])


@torch.no_grad()
def measure_int8(model: nn.Module, quantized: bytes, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Compare an int8 file with its model, in evaluation mode, on float32 images (n, …) and their classes (n,).

    Returns ``clean``, the accuracy of the int8 network in [0, 1]; ``flipped_predictions``, the number of images for
    which the two predict different classes; and ``mean_logit_change``, the mean of |int8 logit − float logit|.
    """
    after = torch.from_numpy(outputs(quantized, images.numpy()))
    before = torch.cat([model(x) for x in images.split(1000)])
    now = after.argmax(1)
    return {
        "clean": int((now == labels).sum()) / len(labels),
        "flipped_predictions": int((now != before.argmax(1)).sum()),
        "mean_logit_change": (after.double() - before.double()).abs().mean().item(),
    }
