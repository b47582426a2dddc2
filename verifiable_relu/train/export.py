"""What a training writes: the ReLU network as ONNX, and the record beside it."""

from __future__ import annotations

import json
import math
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
from verifiable_relu.train.loop import Trained, accuracy, attacked_accuracy
from verifiable_relu.train.monitor import settled
from verifiable_relu.train.options import Options
from verifiable_relu.train.patterns import unstable_neurons
from verifiable_relu.train.swap import measure

ATTACKED = 1000
"""Test images that the attacked accuracy and the unstable neurons are taken over."""


def finish(
    trained: Trained, options: Options, training: Dataset, test: Dataset
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Substitute ReLU where that is still to be done, and measure.

    Returns:
        The network in the form in which it is used, and the record. Its ``results`` are: ``clean`` (the network's
        accuracy over the test set, as parts of 1), the measures of the replacement by ReLU (``train.swap``; not for
        ReLU and PReLU), ``lam_learned`` (λ of each layer where the annealing began), ``seconds_per_step`` (median of
        the epochs' means), ``monitor`` (the looks at the training, ``Monitor.points``), ``patterns_settled`` and
        ``weights_settled`` (``monitor.settled``), ``int8`` and ``int8_per_tensor`` (``compress.Quantized`` over the
        test set, with one scale per channel and per tensor), ``pruned`` (accuracy over the test set for each of
        ``compress.SPARSITIES``, whose texts are the keys), and where ε > 0 the attacked accuracy and unstable neurons
        over the first test images.
    """
    model = trained.model.eval()
    images, labels = torch.from_numpy(test.images), torch.from_numpy(test.labels)
    hard, swap = substitute_relu(model), trained.swap
    assert isinstance(hard, torch.nn.Sequential)
    if swap is None and ARMS[options.arm].swap != "never":
        swap = measure(model, hard, images, labels, options.total_epochs)
    results: dict[str, Any] = {"clean": accuracy(hard, images, labels)}
    if swap is not None:
        results |= {
            "clean_before_substitution": swap.clean_before,
            "clean_after_substitution": swap.clean_after,
            "substituted_after_epochs": swap.epoch,
            "mean_logit_change": swap.mean_change,
            "worst_logit_change": swap.worst_change,
            "proven_logit_change": None if math.isnan(swap.proven_change) else swap.proven_change,
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
    """Write ``record`` as JSON, whole or not at all."""
    write_whole(path, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())


def export(trained: Trained, options: Options, training: Dataset, test: Dataset, out: Path) -> dict[str, Any]:
    """``finish``, then write the network to ``out`` and the record to ``out`` with the suffix ``.json``.

    Returns:
        The record's ``results``.
    """
    hard, record = finish(trained, options, training, test)
    write_whole(out, write_onnx(from_torch(hard, training.images.shape[1:])))
    write_record(out.with_suffix(".json"), record)
    return dict(record["results"])
