"""The trainings of the study ``transformer_profiles``; it may import torch at its head."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common.questions import split_tensors
from benchmarks.common.records import Record
from benchmarks.study.measuring import Monitor, settled
from benchmarks.training.transformers_measuring import HEADS, trained
from benchmarks.training.transformers_models import vit
from verifiable_relu.nn import Hardness, LambdaGELU
from verifiable_relu.train.options import Options

SYMBOLS = 16
"""The symbols of the artificial language."""

LENGTH = 16
"""The symbols of a sentence, after which the next one is asked."""

TESTED = 2_000
"""The sentences of the test set."""

Samples = tuple[Tensor, Tensor]
"""Inputs (samples, channels, height, width) and their classes."""


def language(count: int) -> tuple[Samples, Samples]:
    """Return training and test sentences of an artificial language, in which two symbols decide how likely a third is.

    A sentence is drawn from a Markov chain of the second order, whose transitions are drawn once from a Dirichlet
    distribution with concentration 0.1; all seeds of a training see the same sentences. The symbols are unit vectors
    (samples, ``SYMBOLS``, ``LENGTH``, 1), an image whose patches are single symbols; the class is the next symbol.
    """
    random = np.random.default_rng(0)
    ends = random.dirichlet(np.full(SYMBOLS, 0.1), (SYMBOLS, SYMBOLS)).cumsum(-1)
    total = count + TESTED
    told = random.integers(0, SYMBOLS, (total, LENGTH + 1))
    for place in range(2, LENGTH + 1):
        drawn = random.random((total, 1)) * ends[told[:, place - 2], told[:, place - 1], -1:]
        told[:, place] = (drawn >= ends[told[:, place - 2], told[:, place - 1]]).sum(1)
    inputs = torch.from_numpy(np.eye(SYMBOLS, dtype=np.float32)[told[:, :-1]]).transpose(1, 2)[..., None].contiguous()
    classes = torch.from_numpy(told[:, -1])
    return (inputs[:count], classes[:count]), (inputs[count:], classes[count:])


def profiled(title: Mapping[str, Any]) -> Record:
    """Return the figures of one Transformer, trained with learned λ and not hardened.

    These are ``accuracy`` on the test set; ``lam``, the learned λ of each layer; and ``patterns`` and ``weights``, the
    part of the training after which nine tenths of their change had happened (``settled``).
    """
    data, held_out = language(title["train"]) if title["data"] == "language" else split_tensors("mnist", title["train"])
    torch.manual_seed(title["seed"])
    channels, height, breadth = data[0].shape[1:]
    patch, classes = (1, SYMBOLS) if title["data"] == "language" else (title["patch"], 10)
    gate = partial(LambdaGELU, Options.lam_init)
    size = patch, title["width"], HEADS, title["hidden"], title["layers"], classes
    monitor: list[Monitor] = []

    def watch(model: nn.Module, step: int, steps: int) -> None:
        if not monitor:
            monitor.append(Monitor(data[0], steps))
        monitor[0].look(model, step)

    model = trained(vit((channels, height, breadth), *size, gate), data, title["epochs"], watch)
    with torch.no_grad():
        right = (model(held_out[0]).argmax(1) == held_out[1]).double().mean().item()
    points = monitor[0].points
    return {
        "accuracy": right,
        "lam": [module.lam.item() for module in model.modules() if isinstance(module, Hardness)],
        "patterns": settled(points, "patterns_changed"),
        "weights": settled(points, "weights_changed"),
    }
