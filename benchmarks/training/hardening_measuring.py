"""The trainings and measurements of the study ``hardening``; it may import torch at its head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

from benchmarks.common.questions import Balls, climb, first_exact, split_tensors
from benchmarks.common.records import Record
from verifiable_relu import harden
from verifiable_relu.data import Dataset, load
from verifiable_relu.hardening.loop import RATE, default_optimizer
from verifiable_relu.nn import cnn, substitute_relu
from verifiable_relu.readers import from_torch
from verifiable_relu.search.registry import make
from verifiable_relu.train.batches import loader, loss
from verifiable_relu.train.loop import accuracy, fit


class FunctionalMLP(nn.Module):
    """An MLP 2×128 of MNIST whose forward calls F.gelu."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(784, 128)
        self.second = nn.Linear(128, 128)
        self.last = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x.flatten(1)))
        y: Tensor = self.last(F.gelu(self.second(x)))
        return y


def network(name: str) -> nn.Module:
    """An untrained network with GELU: ``mlp``, or the CNN of 8 and 16 channels and a hidden layer of 64."""
    return FunctionalMLP() if name == "mlp" else cnn((1, 28, 28), (8, 16), (64,), 10, nn.GELU)


def fine_tuned(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int, rate: float = RATE) -> nn.Module:
    """A model trained by the loss, batches, optimizer and schedule that ``harden`` takes by default."""
    batches = loader(data, True)
    steps = epochs * len(batches)
    optimizer, scheduler = default_optimizer(model, steps, rate)
    for _ in fit(model, epochs, lambda _: batches, loss, optimizer, callbacks=[lambda _: scheduler.step()]):
        pass
    return model.eval()


def measured(title: Mapping[str, Any], bar: Progress) -> Record:
    """Return the figures of each arm for a network and seed.

    Each arm has ``accuracy``, over all test images; the number ``images`` of the first exact test images; and the
    numbers of ``climb``. ``hardened`` has the ``change`` by its swap, too.
    """
    test = load("mnist", "test")
    data, held_out = split_tensors("mnist", title["train"])
    torch.manual_seed(title["seed"])
    gelu = fine_tuned(network(title["network"]), data, title["epochs"], 2e-3)
    hardened = harden(gelu, data, epochs=title["finetuning"], held_out=held_out, region=(0, 1))
    control = fine_tuned(substitute_relu(gelu), data, title["finetuning"])
    models = {"GELU": gelu, "swap": substitute_relu(gelu), "swap, fine-tuning": control, "hardened": hardened.model}
    chosen = first_exact(test, title["images"])
    found: Record = {name: figures(model, test, chosen, title["eps"], held_out, bar) for name, model in models.items()}
    found["hardened"]["change"] = asdict(hardened.change)
    return found


def figures(
    model: nn.Module, test: Dataset, chosen: np.ndarray, eps: str, held_out: tuple[Tensor, Tensor], bar: Progress
) -> Record:
    """The figures of one model (``measured``)."""
    ladder = climb(Balls.around(from_torch(model, (1, 28, 28)), test, chosen, eps), make, bar)
    return {"accuracy": accuracy(model, *held_out), "images": len(chosen), **ladder}
