"""The end of a training: the replacement of its activation by ReLU, the measurements, the ONNX file and the record."""

from __future__ import annotations

import json
import platform
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import verifiable_relu
from verifiable_relu.data import Dataset
from verifiable_relu.network import from_torch, write_onnx
from verifiable_relu.nn import substitute_relu
from verifiable_relu.train import compress
from verifiable_relu.train.arms import ARMS
from verifiable_relu.train.checkpoint import write_whole
from verifiable_relu.train.loop import Trained, accuracy, attacked_accuracy, measure_swap
from verifiable_relu.train.monitor import settled
from verifiable_relu.train.options import Options
from verifiable_relu.train.patterns import unstable_neurons

ATTACKED = 1000
"""The number of test images, the first ones, on which attacked accuracy and unstable neurons are measured."""


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
        * ``int8`` and ``int8_per_tensor``: ``compress.Quantized`` on the test set, with a scale per channel or tensor;
        * ``pruned``: the accuracy on the test set by sparsity, for each of ``compress.SPARSITIES``;
        * where ε > 0: the attacked accuracy, in [0, 1], and the mean number of unstable neurons per image, on the first
          ``ATTACKED`` test images.
    """
    model = trained.model.eval()
    images, labels = torch.from_numpy(test.images), torch.from_numpy(test.labels)
    hard, swap = model if ARMS[options.arm].swap == "never" else substitute_relu(model), trained.swap
    assert isinstance(hard, torch.nn.Sequential)
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
        results[name] = asdict(compress.measure_int8(hard, training.images, images, labels, per_channel))
    results["pruned"] = {
        str(sparsity): accuracy(compress.prune(hard, sparsity), images, labels) for sparsity in compress.SPARSITIES
    }
    if options.eps:
        few, theirs = images[:ATTACKED], labels[:ATTACKED]
        results["images_attacked"] = len(few)
        results["clean_of_these"] = accuracy(hard, few, theirs)
        results["attacked_of_these"] = attacked_accuracy(hard, few, theirs, options.eps, options.seed)
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


def export(trained: Trained, options: Options, training: Dataset, test: Dataset, out: Path) -> dict[str, Any]:
    """Finish a training (``finish``), and write its network to ``out`` and its record beside it as ``.json``.

    Returns:
        The ``results`` of the record.
    """
    hard, record = finish(trained, options, training, test)
    write_whole(out, write_onnx(from_torch(hard, training.images.shape[1:])))
    write_record(out.with_suffix(".json"), record)
    return dict(record["results"])
