"""The training loop: learn the weights and λ, then anneal λ to its target, then substitute ReLU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.data import Dataset
from verifiable_relu.errors import InputError
from verifiable_relu.nn import LambdaGELU, Normalize, cnn, mlp
from verifiable_relu.train import checkpoint, losses, schedule
from verifiable_relu.train.augment import augment
from verifiable_relu.train.optimizer import make_optimizer, set_rates
from verifiable_relu.train.options import Options

Progress = Callable[[int, str], None]
"""Called after every step with the number of steps taken in all, and a word on how it goes."""


@dataclass(frozen=True)
class Trained:
    """What a training leaves.

    Attributes:
        model: with its λ-GELUs, every λ at its target.
        history: for each epoch ``lam`` (each layer's λ at its end), ``loss`` and ``accuracy`` (means over its steps;
            the accuracy is that at the points trained on) and ``seconds``.
    """

    model: nn.Sequential
    history: list[dict[str, Any]]


def build(options: Options, data: Dataset) -> nn.Sequential:
    """The untrained network for the images of ``data``, the same for the same seed, normalisation included."""
    normalize = Normalize(data.mean, data.std)
    channels, height, width = data.images.shape[1:]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(options.seed)
        gate = partial(LambdaGELU, options.lam_init)
        if options.model == "mlp":
            return mlp([channels * height * width, *options.hidden, data.classes], gate, normalize)
        shape = (channels, height, width)
        return cnn(shape, options.channels, options.hidden, data.classes, gate, normalize)


def train(options: Options, data: Dataset, saved: Path | None = None, progress: Progress | None = None) -> Trained:
    """Train on ``data``, going on from the checkpoint ``saved`` if it exists and writing it after each epoch.

    A training that was interrupted and resumed gives, bit for bit, the network of one that was not: every epoch's
    order, augmentation and attacks come from the seed and its number alone.

    Raises:
        InputError: if the checkpoint is damaged or another training's, or if the loss is no longer finite.
    """
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    model = build(options, data)
    gates = [module for module in model if isinstance(module, LambdaGELU)]
    optimizer = make_optimizer(model, options)
    history: list[dict[str, Any]] = []
    learned: list[float] = []
    state = checkpoint.restore(saved, options) if saved is not None else None
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        history, learned = state["history"], state["learned"]

    per_epoch = ceil(len(images) / options.batch)
    steps = per_epoch * options.epochs
    for epoch in range(len(history), options.epochs):
        began = time.monotonic()
        generator = torch.Generator().manual_seed(1_000_003 * options.seed + epoch)
        if epoch >= schedule.annealing_start(options.epochs) and not learned:
            learned = [gate.lam.item() for gate in gates]
        for gate in gates if learned else ():
            gate.freeze()
        order = torch.randperm(len(images), generator=generator)
        total, right = 0.0, 0
        for position, chosen in enumerate(order.split(options.batch)):
            step = epoch * per_epoch + position
            done = schedule.annealing_progress(step, per_epoch, options.epochs)
            for gate, start in zip(gates, learned, strict=False):
                gate.set_lam(schedule.hardness(options.schedule, start, options.lam_target, done))
            rate = schedule.learning_rate(options.rate, options.rise, step, steps)
            set_rates(optimizer, model, rate, options)
            x, y = augment(images[chosen], options.crop, options.flip, generator), labels[chosen]
            growth = schedule.warmup(step, options.warmup * per_epoch)
            loss, logits = objective(model, x, y, options, growth, generator)
            if not torch.isfinite(loss):
                raise InputError("the loss is no longer finite; a lower --rate may help", place=f"epoch {epoch}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
            right += int((logits.argmax(1) == y).sum())
            if progress is not None:
                progress(step + 1, f"loss {loss.item():.3f}, λ {min(gate.lam.item() for gate in gates):.1f}")
        history.append(
            {
                "lam": [gate.lam.item() for gate in gates],
                "loss": total / len(images),
                "accuracy": right / len(images),
                "seconds": round(time.monotonic() - began, 2),
            }
        )
        if saved is not None:
            weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint.save(saved, options, {**weights, "history": history, "learned": learned})
    return Trained(model, history)


def objective(
    model: nn.Sequential, x: Tensor, y: Tensor, options: Options, growth: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The loss of one batch and the logits at the points trained on, with ε and the weights scaled by ``growth``."""
    eps = options.eps * growth
    point = x
    if options.attack_steps and eps > 0:
        point = losses.attacked(model, x, y, eps, options.attack_steps, generator)
    logits: Tensor = model(point)
    loss = F.cross_entropy(logits, y)
    if (options.certified or options.stability) and eps > 0:
        layers, lb, ub = losses.intervals(model, (x - eps).clamp_min(0), (x + eps).clamp_max(1))
        if options.certified:
            last = model[-1]
            assert isinstance(last, nn.Linear)
            certified = F.cross_entropy(losses.worst_logits(last, lb, ub, y), y)
            loss = torch.lerp(loss, certified, options.certified * growth)
        if options.stability:
            loss = loss + options.stability * growth * losses.instability(layers)
    if options.l1:
        loss = loss + options.l1 * sum(p.abs().sum() for p in model.parameters() if p.ndim > 1)
    return loss, logits


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The part of the images that ``model`` classifies rightly."""
    pairs = zip(images.split(1000), labels.split(1000), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs) / len(labels)


def attacked_accuracy(model: nn.Module, images: Tensor, labels: Tensor, eps: float, seed: int) -> float:
    """The part of the images that stays rightly classified under a 40-step attack of radius ``eps``."""
    generator = torch.Generator().manual_seed(seed)
    right = 0
    for x, y in zip(images.split(500), labels.split(500), strict=True):
        with torch.no_grad():
            stands = model(x).argmax(1) == y
        point = losses.attacked(model, x, y, eps, 40, generator)
        with torch.no_grad():
            right += int((stands & (model(point).argmax(1) == y)).sum())
    return right / len(labels)


@torch.no_grad()
def unstable_neurons(model: nn.Sequential, images: Tensor, eps: float) -> float:
    """Mean number per image of neurons whose interval contains 0, by interval bounds."""
    layers, _, _ = losses.intervals(model, (images - eps).clamp_min(0), (images + eps).clamp_max(1))
    return sum(int(((lb < 0) & (ub > 0)).sum()) for lb, ub in layers) / len(images)
