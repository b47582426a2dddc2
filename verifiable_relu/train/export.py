"""The end of a training: the replacement of its activation by ReLU, the measurements, the ONNX file and the record.

Among the measurements is the accuracy of the network once it is compressed, by static int8 quantisation or by pruning.
"""

from __future__ import annotations

import json
import logging
import platform
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
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
from verifiable_relu.network import from_torch, write_onnx
from verifiable_relu.nn import substitute_relu
from verifiable_relu.runtime import load, session
from verifiable_relu.train.loop import Trained, accuracy, measure_swap, not_refuted
from verifiable_relu.train.monitor import settled, unstable_neurons
from verifiable_relu.train.options import ARMS, Options, int8_file

ATTACKED = 1000
"""The number of test images, the first ones, that are attacked and on which unstable neurons are counted."""


def finish(
    trained: Trained, options: Options, training: Dataset, test: Dataset
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Replace the trained activation by ReLU, if the arm replaces it at the end, and measure the network.

    Returns:
        The network in the form in which it is exported, and the record of the training. The record's ``results`` are

        * ``clean``: the accuracy on the test set, in [0, 1];
        * the measurements of the replacement by ReLU (``train.swap``), unless the arm never replaces its activation;
        * ``lam_learned``: λ of each layer when the annealing began;
        * ``seconds_per_step``: the median over the epochs of the mean time of a step;
        * ``monitor``: the measurements during the training (``Monitor.points``);
        * ``patterns_settled`` and ``weights_settled``: see ``monitor.settled``;
        * ``int8`` and ``int8_per_tensor``: ``Quantized`` on the test set, with a scale per channel or tensor;
        * ``pruned``: the accuracy on the test set by sparsity, for each of ``SPARSITIES``;
        * where ε > 0: the part that an attack does not refute, and the mean number of unstable neurons per image, on
          the first ``ATTACKED`` test images.
    """
    model = trained.model.eval()
    images, labels = torch.from_numpy(test.images), torch.from_numpy(test.labels)
    hard, swap = model if ARMS[options.arm].swap == "never" else substitute_relu(model), trained.swap
    if swap is None and ARMS[options.arm].swap != "never":
        swap = measure_swap(model, hard, test)
    results: dict[str, Any] = {"clean": accuracy(hard, images, labels)}
    if swap is not None:
        results |= {
            "clean_before_substitution": swap.accuracy_smooth,
            "clean_after_substitution": swap.accuracy,
            "substituted_after_epochs": options.total_epochs if trained.swapped is None else trained.swapped,
            "mean_logit_change": swap.mean,
            "worst_logit_change": swap.worst,
            "proven_logit_change": swap.proven,
            "flipped_predictions": swap.flipped,
        }
    results["lam_learned"] = trained.learned
    results["seconds_per_step"] = statistics.median(epoch["seconds"] / epoch["steps"] for epoch in trained.history)
    results["monitor"] = trained.monitor
    for name in ("patterns", "weights"):
        results[f"{name}_settled"] = settled(trained.monitor, f"{name}_changed")
    for name, per_channel in (("int8", True), ("int8_per_tensor", False)):
        results[name] = asdict(measure_int8(hard, training.images, images, labels, per_channel))
    results["pruned"] = {str(sparsity): accuracy(prune(hard, sparsity), images, labels) for sparsity in SPARSITIES}
    if options.eps:
        few, theirs = images[:ATTACKED], labels[:ATTACKED]
        results["images_attacked"] = len(few)
        results["clean_of_these"] = accuracy(hard, few, theirs)
        results["not_refuted_of_these"] = not_refuted(hard, few, theirs, options.eps, options.seed)
        results["unstable_neurons_by_intervals"] = unstable_neurons(hard, few, options.eps)
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


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, completely or not at all."""
    write_whole(path, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())


def written(model: nn.Module, shape: tuple[int, ...]) -> bytes:
    """A model as an ONNX file; with a free batch axis, unless torch's exporter alone can write it.

    Raises:
        UnsupportedError: if the model cannot be read, or be written.
    """
    network = from_torch(model, shape)
    try:
        return write_onnx(replace(network, onnx=None))
    except UnsupportedError:
        return write_onnx(network)


def export(
    trained: Trained, options: Options, training: Dataset, test: Dataset, out: Path, int8: bool = False
) -> dict[str, Any]:
    """Finish a training (``finish``), and write its network to ``out`` and its record beside it as ``.json``.

    Args:
        trained, options, training, test: as in ``finish``.
        out: the ONNX file.
        int8: whether to write the int8 network (``quantize``), too, which is calibrated on training images.

    Returns:
        The ``results`` of the record.
    """
    hard, record = finish(trained, options, training, test)
    network = written(hard, training.images.shape[1:])
    write_whole(out, network)
    if int8:
        write_whole(int8_file(out), quantize(network, training.images[:CALIBRATED]))
    write_record(out.with_suffix(".json"), record)
    return dict(record["results"])


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
    loaded = session(network, torch.get_num_threads(), precise=True)
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
    network = written(model, images.shape[1:])
    after = torch.from_numpy(outputs(quantize(network, few, per_channel), images.numpy()))
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
