"""The trainings, files and questions of the study ``hub_models``; it may import torch at its head."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from benchmarks.common.records import Record
from benchmarks.verification.hub_kinds import CHANNELS, CLASSES, KINDS, LENGTH, SIZE, WORDS, Kind
from verifiable_relu import harden, verify, verify_change
from verifiable_relu.api import Perturbation
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.network import Network
from verifiable_relu.nn import Embedded
from verifiable_relu.readers import from_torch, write_onnx
from verifiable_relu.supervisor.workers import processor_seconds

SAMPLES, STEPS, RATE = 256, 300, 1e-3
"""Of the training before the hardening: samples, all in each step, and AdamW's rate."""

EPOCHS, BATCH = 20, 64
"""Of the hardening."""

PATIENCE = 20.0
"""Seconds for the proof of the change by the swap."""

CLIP = {False: (0, 1), True: (-100, 100)}
"""Valid numbers of images, and of what embeddings make of tokens: of these, no ball is cut."""


def measured(name: str, seed: int, radii: Sequence[str], methods: Sequence[str], timeout: float) -> Record:
    """What becomes of a model on the whole way.

    Args:
        name: in ``KINDS``.
        seed: of the weights, the data and the training.
        radii: of the balls, as text.
        methods: the names of the methods that are asked.
        timeout: seconds for a question.

    Returns:
        ``package``; ``parameters``; the numbers of activations that became ``gates``, and the names of those ``left``;
        the accuracies ``before``, ``smooth`` (with gates) and ``hard`` (with ReLU); the largest ``change`` of an output
        by the swap on the data, the one ``proven`` for the range of the inputs (None, and why in ``unproven``), and for
        each radius the one proven ``around`` the first input (None where no bound is finite; ``unread`` says why the
        model with gates is not read); the
        processor seconds of hardening (``hardening``) and of writing the file (``writing``); ``neurons`` and the
        ``difference`` of the file's outputs in onnxruntime from the model's; and ``answers``: for each method and
        radius the answer, its reason and margin, and the processor seconds. ``failed`` has the stage at which an
        exception ended it, and the exception; what comes after that is not there.
    """
    kind, found, stage = KINDS[name], Record(), "making the model"
    try:
        torch.manual_seed(seed)
        model = kind.model()
        found |= {"package": kind.versions(), "parameters": sum(p.numel() for p in model.parameters())}
        inputs, classes = data(kind, seed)
        stage = "training"
        train(model, inputs, classes)
        stage = "hardening"
        took = timer()
        batches = list(zip(inputs.split(BATCH), classes.split(BATCH), strict=True))
        hardened = harden(model, batches, epochs=EPOCHS, change_timeout=PATIENCE)
        change = hardened.change
        found |= {
            "hardening": took(),
            "gates": sum(bool(place.became) for place in hardened.places),
            "left": sorted({place.found for place in hardened.places if not place.became}),
            "before": change.accuracy_before,
            "smooth": change.accuracy_smooth,
            "hard": change.accuracy,
            "change": change.worst,
            "proven": change.proven,
            "unproven": change.unproven,
        }
        stage = "writing"
        asked, x = of_numbers(kind, hardened.model, inputs[:1])
        with tempfile.TemporaryDirectory() as folder:
            path, took = Path(folder) / "model.onnx", timer()
            network = from_torch(asked, tuple(x.shape[1:]))
            write_onnx(network, path)
            neurons = sum(network.ops[i].size for i in network.activations)
            found |= {"writing": took(), "neurons": neurons}
            outputs = run(path, x.numpy())
            with torch.no_grad():
                computed = asked(x)
            logits = computed if isinstance(computed, Tensor) else computed.logits
            found["difference"] = float(np.abs(outputs - logits.numpy()).max())
            stage = "bounding the change"
            try:
                before = from_torch(of_numbers(kind, hardened.smooth, inputs[:1])[0], tuple(x.shape[1:]))
                found["around"] = {eps: changed(before, network, x, eps, kind) for eps in radii}
            except UnsupportedError as error:
                found["unread"] = str(error)
            stage = "asking"
            found["answers"] = {
                method: {eps: question(path, x, int(outputs.argmax()), eps, method, timeout, kind) for eps in radii}
                for method in methods
            }
    except Exception as error:  # Whatever a package, torch or this one raises is what is looked for.
        lines = str(error).splitlines() or [""]
        return {**found, "failed": f"{stage}: {type(error).__name__}: {lines[0]}"}
    return {**found, "failed": ""}


def timer() -> Callable[[], float]:
    """A clock of the processor seconds from now on, those of processes that have ended included."""
    start = processor_seconds()
    return lambda: round(processor_seconds() - start, 3)


def data(kind: Kind, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and classes: noise with one quarter of the image brighter, or tokens whose first says the class."""
    random = torch.Generator().manual_seed(seed)
    if kind.words:
        tokens = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=random)
        return tokens, (tokens[:, 0] - 1) * CLASSES // (WORDS - 1)
    classes = torch.randint(0, CLASSES, (SAMPLES,), generator=random)
    images, half = 0.5 * torch.rand(SAMPLES, CHANNELS, SIZE, SIZE, generator=random), SIZE // 2
    for image, number in zip(images, classes.tolist(), strict=True):
        row, column = divmod(number, 2)
        image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 0.5
    return images, classes


def train(model: nn.Module, inputs: Tensor, classes: Tensor) -> None:
    """Train a model with its own activations."""
    optimizer = torch.optim.AdamW(model.train().parameters(), RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        made: Any = model(inputs)
        nn.functional.cross_entropy(made if isinstance(made, Tensor) else made.logits, classes).backward()
        optimizer.step()
    model.eval()


def changed(smooth: Network, hard: Network, x: Tensor, eps: str, kind: Kind) -> float | None:
    """The largest change of an output by the swap that is proven in a ball around an input."""
    change = verify_change(smooth, hard, x, eps, clip=CLIP[bool(kind.words)])
    found = float(change.largest.item())
    return found if math.isfinite(found) else None


def of_numbers(kind: Kind, model: nn.Module, sample: Tensor) -> tuple[nn.Module, Tensor]:
    """A model as a function of real numbers, and its input: of tokens what their embedding makes of them."""
    if not kind.words:
        return model, sample
    embedding = model.get_submodule(kind.words)
    assert isinstance(embedding, nn.Embedding)
    return Embedded(model, embedding, sample[0]), embedding(sample).detach()


def run(path: Path, x: np.ndarray) -> np.ndarray:
    """A file's outputs in onnxruntime."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (declared,) = session.get_inputs()
    (outputs, *_) = session.run(None, {declared.name: x})
    return np.asarray(outputs)


def question(path: Path, x: Tensor, label: int, eps: str, method: str, timeout: float, kind: Kind) -> Record:
    """What a method says of a ball around an input in which the file is to keep its class."""
    took = timer()
    (result,) = verify(path, x, [label], eps, method, timeout, perturbation=Perturbation(clip=CLIP[bool(kind.words)]))
    margin = result.margin if result.margin is not None and math.isfinite(result.margin) else None
    seconds = took()
    return {"answer": result.answer, "reason": str(result.reason), "margin": margin, "seconds": seconds}
