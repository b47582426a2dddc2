"""What a training writes: the ReLU network as ONNX, and the record beside it."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import verifiable_relu
from verifiable_relu.data import Dataset
from verifiable_relu.network import from_torch, write_onnx
from verifiable_relu.nn import substitute_relu
from verifiable_relu.train.checkpoint import write_whole
from verifiable_relu.train.loop import Trained, accuracy, attacked_accuracy, unstable_neurons
from verifiable_relu.train.options import Options

ATTACKED = 1000
"""Test images that the attacked accuracy and the unstable neurons are taken over."""


def export(trained: Trained, options: Options, training: Dataset, test: Dataset, out: Path) -> dict[str, Any]:
    """Substitute ReLU, write the network to ``out`` and the record to ``out`` with the suffix ``.json``.

    Returns:
        The record's ``results``: accuracies as parts of 1 over the test set, before and after the substitution.
    """
    smooth = trained.model.eval()
    hard = substitute_relu(smooth)
    assert isinstance(hard, torch.nn.Sequential)
    images, labels = torch.from_numpy(test.images), torch.from_numpy(test.labels)
    results: dict[str, Any] = {
        "clean_before_substitution": accuracy(smooth, images, labels),
        "clean_after_substitution": accuracy(hard, images, labels),
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
    write_whole(out, write_onnx(from_torch(hard, training.images.shape[1:])))
    write_whole(out.with_suffix(".json"), (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    return results
