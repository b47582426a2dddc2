"""The trainings and measurements of the study ``transformers``; it may import torch at its head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from benchmarks.common.questions import Balls, climb, first_exact, split_tensors
from benchmarks.common.records import Record
from benchmarks.training.transformers_models import vit
from verifiable_relu import harden
from verifiable_relu.bounds.change import substitution_change
from verifiable_relu.data import load
from verifiable_relu.hardening.loop import HardenedModel
from verifiable_relu.ir.interval import Interval
from verifiable_relu.nn import Hardness, LambdaGELU
from verifiable_relu.readers import from_torch
from verifiable_relu.search.registry import make
from verifiable_relu.train.batches import loader, loss
from verifiable_relu.train.loop import fit, learning_rate, make_optimizer, set_rates
from verifiable_relu.train.options import Options

HEADS = 2
TOKENS = 200
"""Test images whose tokens are the centres of boxes of block inputs."""

RADII = (0.01, 0.1)
"""The radii of these boxes."""

SAMPLES = 20
"""Random points in each box at which the change is measured, half of them corners; ``TOKENS`` times as many
where there is one box."""

WHOLE = 5
"""Test images around which the change of the whole network is bounded."""


Watch = Callable[[nn.Module, int, int], object]
"""A function of a model, the steps taken and the steps of the whole training."""


def trained(
    model: nn.Module, data: tuple[Tensor, Tensor], epochs: int, watch: Watch = lambda model, step, steps: None
) -> nn.Module:
    """Train a model with AdamW, the paper's learning rate of λ, and a rate that rises and falls as a cosine.

    ``watch`` is called before every step and at the end.
    """
    # The rate of arXiv 2603.21991, at which λ moves within few epochs.
    options = Options(data="mnist", lam_factor=90.0)
    optimizer, batches = make_optimizer(model, options), loader(data, True)
    steps = epochs * len(batches)

    def before(step: int) -> None:
        watch(model, step, steps)
        set_rates(optimizer, learning_rate(options.rate, step, steps), options)

    for _ in fit(model, epochs, lambda _: batches, loss, optimizer, before):
        pass
    watch(model, steps, steps)
    return model.eval()


def measured(title: Mapping[str, Any], radii: Sequence[str], bar: Progress) -> Record:
    """Return the figures of one network.

    These are ``lam``, the learned λ of each layer; ``change``, what hardening and swap change over all test images;
    ``blocks``, a record for each feed-forward block and box of its inputs; ``proven``, the largest change of an output
    over balls of the smallest radius, or None; and ``certified``, the numbers of ``climb`` for each radius.
    """
    test = load(title["data"], "test")
    data, held_out = split_tensors(title["data"], title["train"])
    shape = tuple(int(size) for size in test.images.shape[1:])
    torch.manual_seed(title["seed"])
    size = title["patch"], title["width"], HEADS, title["hidden"], title["layers"]
    gate = partial(LambdaGELU, Options.lam_init)
    model = trained(vit((shape[0], shape[1], shape[2]), *size, test.classes, gate), data, title["epochs"])
    lam = [gate.lam.item() for gate in model.modules() if isinstance(gate, Hardness)]
    hardened = harden(model, data, epochs=title["finetuning"], held_out=held_out)
    chosen = first_exact(test, title["images"])
    network = from_torch(hardened.model, shape)
    certified = {eps: climb(Balls.around(network, test, chosen, eps), make, bar) for eps in radii}
    return {
        "lam": lam,
        "change": asdict(hardened.change),
        "blocks": list(block_changes(hardened, held_out[0][:TOKENS])),
        "proven": whole_change(hardened.smooth, held_out[0][:WHOLE], float(radii[0])),
        "certified": certified,
    }


def block_changes(hardened: HardenedModel, images: Tensor) -> Iterator[Record]:
    """For each feed-forward block and box of its inputs, the change of an output by the swap.

    Yields:
        The ``layer``, the ``box`` in words, the largest magnitude of an input (``size``), and the largest change
        ``sampled`` and ``proven`` over all boxes of the kind.
    """
    smooth, hard = list(hardened.smooth.children()), list(hardened.model.children())
    for index in range(2, len(smooth) - 1, 2):
        with torch.no_grad():
            tokens = nn.Sequential(*smooth[:index])(images).flatten(0, 1).double()
        boxes = {f"radius {radius:g}": Interval(tokens - radius, tokens + radius) for radius in RADII}
        boxes["range of all"] = Interval(tokens.amin(0, keepdim=True), tokens.amax(0, keepdim=True))
        network = from_torch(smooth[index], (1, tokens.shape[1]), exact=True)
        for kind, box in boxes.items():
            change = substitution_change(network, box)
            yield {
                "layer": index // 2,
                "box": kind,
                "size": float(tokens.abs().max()),
                "sampled": sampled(smooth[index], hard[index], box),
                "proven": largest(change),
            }


@torch.no_grad()
def sampled(smooth: nn.Module, hard: nn.Module, box: Interval) -> float:
    """The largest difference of an output of two modules at random points and corners of boxes."""
    # In float32, rounding would be part of differences this small.
    smooth, hard = deepcopy(smooth).double(), deepcopy(hard).double()
    worst = 0.0
    generator = torch.Generator().manual_seed(0)
    for index in range(SAMPLES if len(box.lower) > 1 else SAMPLES * TOKENS):
        share = torch.rand(box.lower.shape, generator=generator, dtype=torch.float64)
        x = (box.lower + (share.round() if index % 2 else share) * (box.upper - box.lower))[:, None]
        worst = max(worst, float((hard(x) - smooth(x)).abs().max()))
    return worst


def whole_change(smooth: nn.Module, images: Tensor, eps: float) -> float | None:
    """The largest change of an output by the swap, proven over balls around images; None if nothing is known."""
    network, x = from_torch(smooth, tuple(images.shape[1:]), exact=True), images.double().flatten(1)
    return largest(substitution_change(network, Interval((x - eps).clamp(0, 1), (x + eps).clamp(0, 1))))


def largest(change: Interval) -> float | None:
    """The largest magnitude that bounds leave; None if it is infinite or unknown."""
    found = float(torch.maximum(-change.lower, change.upper).max())
    return found if math.isfinite(found) else None
