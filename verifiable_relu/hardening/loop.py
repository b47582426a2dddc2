"""The function ``harden``: fine-tuning while λ grows, the swap to ReLU, and what is proven of both networks."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from verifiable_relu.api.arguments import flag
from verifiable_relu.bounds.change import substitution_change
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.enclosure import find_difference, sample_points
from verifiable_relu.ir.families import between
from verifiable_relu.ir.interval import Interval
from verifiable_relu.nn.gates import HIDDEN, Hardness, Rectifier
from verifiable_relu.nn.places import (
    SmoothActivation,
    evaluating,
    leftovers,
    replace_wholly,
    substitute_relu,
)
from verifiable_relu.readers import from_torch, write_onnx
from verifiable_relu.rounding import unit_roundoff
from verifiable_relu.settings import default_settings, user_settings
from verifiable_relu.train import batches
from verifiable_relu.train.batches import NO_TENSOR, Batch, DataError, Outputs, Region, SubstitutionEffect, at, measure
from verifiable_relu.train.loop import Annealing, Callback, Checkpoint, fit, progress_bar
from verifiable_relu.train.loop import TrainingStep as TrainingStep
from verifiable_relu.train.options import Schedule

SAME = 1e-4  # The largest difference, relative to the largest output, that λ-gates may make by rounding
MOST_EPOCHS = 1_000_000  # A larger number of epochs is taken for a mistake
RATE = 1e-3  # The first learning rate of the default optimizer


@dataclass(frozen=True)
class HardenedModel:
    """A hardened model.

    Attributes:
        model: the model with ReLU, in evaluation mode. Its parameters and buffers have the names of the model that was
            given, so that the ``state_dict`` also fits that model's class with ReLU written in its source.
        smooth: the fine-tuned model with λ-gates, λ at its target, in evaluation mode.
        places, change, losses: the smooth activations of the model that was given, and what became of them; the effect
            of the swap; and the mean loss of each epoch.
        shape, argument: the shape of an input sample, None if the model's input is not one tensor; and the name of the
            argument that takes it, where batches are mappings.
    """

    model: nn.Module
    smooth: nn.Module
    places: tuple[SmoothActivation, ...]
    change: SubstitutionEffect
    losses: tuple[float, ...]
    shape: tuple[int, ...] | None
    argument: str | None = None

    def __str__(self) -> str:
        return "\n".join([*map(str, self.places), str(self.change)])

    def write(self, path: Path | str) -> Path:
        """Write the model with ReLU as ONNX; returns the path.

        Raises an InputError if the file cannot be written, or the model is no network of one input, and an
        UnsupportedError if it has operators that the package does not know.
        """
        if self.shape is None:
            raise InputError(NO_TENSOR)
        write_onnx(from_torch(self.model, self.shape, argument=self.argument), Path(path))
        return Path(path)


def soften(
    model: nn.Module, activations: Sequence[str] = HIDDEN, example: Any = None
) -> tuple[nn.Module, list[SmoothActivation]]:
    """Put a λ-gate with λ = 1 in the place of each smooth activation, in place; the model still computes the same.

    Gates that the model has already keep their λ. No λ is learned: ``Annealing`` sets it. Returns the model, and its
    smooth activations with what became of them. ``activations`` and ``example`` are those of ``substitute_relu``.

    Raises:
        InputError: if the model has no activation to harden, or an UnsupportedError as ``substitute_relu``; the model
            stays as it was.
    """

    def gate(found: Rectifier | Hardness) -> Hardness:
        if isinstance(found, Hardness):
            return found
        made = found.gate()
        made.set_lam(1.0)
        return made

    softened, places = replace_wholly(model, gate, activations, example)
    if not any(place.became for place in places):
        found = f"; found were {', '.join(map(str, places))}" if places else ""
        raise InputError(f"the model has no activation to harden ({', '.join(activations)}){found}")
    for module in softened.modules():
        if isinstance(module, Hardness):
            module.freeze()
    return softened, places


def harden(
    model: nn.Module,
    data: Any,
    *,
    epochs: int = 3,
    held_out: Any = None,
    loss: Callable[[nn.Module, Batch], Tensor] = batches.loss,
    outputs: Outputs = batches.outputs,
    optimizer: Callable[[nn.Module], Any] | None = None,
    target: float = 160.0,
    schedule: Schedule = "log",
    activations: Sequence[str] = HIDDEN,
    region: Region | None = None,
    change_timeout: float = 60.0,
    argument: str | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
    checkpoint: Path | str | None = None,
) -> HardenedModel:
    """Turn a trained model with GELU, SiLU and the like into one with ReLU, by fine-tuning while λ grows.

    Each smooth activation G becomes G(λx)/λ with λ = 1, which is G itself. λ then grows with every step of the
    fine-tuning until it is within 0.17/λ of ReLU, and ReLU takes its place (arXiv 2603.21991). The model that
    was given is not changed; a copy on the same device is.

    Args:
        data: for the fine-tuning: a ``DataLoader`` or list of batches, or a pair (inputs, classes) of arrays. A
            batch is a tuple (inputs, classes, …) or a mapping of the model's arguments (``labels`` are its classes).
        epochs: the number of passes over the data, at least 1.
        held_out: the data on which the change is measured, in the same form; None takes ``data``.
        loss: the loss of a model and a batch. By default the ``loss`` that a model returns for a
            mapping, and else the cross-entropy.
        outputs: the outputs of a model for a batch, (n, classes). By default what the model returns, or its ``logits``.
        optimizer: makes the optimizer of a model, or a pair of optimizer and learning-rate scheduler, whose ``step`` is
            called after each batch. By default AdamW with a rate that falls from 1e-3 to 0 as a cosine.
        target: λ at the end.
        schedule: how λ grows: ``linear`` in λ, in ``log`` λ or in 1/λ (``inverse``).
        activations: the names of the activations to harden (``nn.gates.RECTIFIERS``).
        region: the least and the greatest value of each input; over all inputs between them, the change of the outputs
            by the swap is bounded. None takes the range of the numbers in the data that the change is measured on.
        change_timeout: the seconds that the proof of that bound may take, at least 0; 0 leaves it out.
        argument: where batches are mappings with several tensors of real numbers, the name of the network's input.
        callbacks: called after each step.
        progress: True shows a progress bar on stderr.
        checkpoint: a file that is written after each epoch, and from which an interrupted hardening of the same model
            goes on, with the order of a pair of arrays and the CPU's random numbers. The caller deletes it.

    Raises:
        InputError: for a model without activations to harden, bad numbers, a checkpoint of another hardening, or if the
            loss becomes infinite or NaN.
        DataError: for data that cannot be used or that the model does not take.
        UnsupportedError: if activations cannot be replaced; the error names the module.
    """
    if isinstance(epochs, bool) or not isinstance(epochs, int) or not 1 <= epochs <= MOST_EPOCHS:
        raise InputError(f"epochs is a number from 1 to {MOST_EPOCHS}, not {epochs!r:.40}")
    progress = flag(progress, "progress")
    if not isinstance(callbacks, list | tuple):
        raise InputError(f"callbacks are a list of functions, not {callbacks!r:.40}")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            "an optimizer belongs to the parameters of the model that was given, but a copy is trained: give a "
            "function, such as lambda model: torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    functions = {"loss": loss, "outputs": outputs, "optimizer": optimizer or default_optimizer}
    for name, function in {**functions, **{f"callback {i}": each for i, each in enumerate(callbacks)}}.items():
        if not callable(function):
            raise InputError(f"{name} is a function, not {function!r:.40}")
    region = None if region is None else _region(region)
    if isinstance(change_timeout, bool) or not isinstance(change_timeout, int | float) or not change_timeout >= 0:
        raise InputError(f"change_timeout is a number of seconds, not {change_timeout!r:.40}")
    train, test = batches.loader(data, True), batches.loader(data if held_out is None else held_out, False)
    before, (soft, places) = model, soften(_copy(model), activations)
    first = batches.moved(next(iter(test)), soft)
    argument = batches.argument(first) if argument is None else argument
    with evaluating(before):
        _require_same(before, soft.eval(), first, outputs)
    places += leftovers(soft, places, lambda of: outputs(of, first))
    steps = epochs * len(train)
    annealing, losses = Annealing(soft, steps, target, schedule), list[float]()
    made = default_optimizer(soft, steps) if optimizer is None else optimizer(soft)
    stepper, scheduler = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(stepper, torch.optim.Optimizer):
        raise InputError(f"optimizer makes a {type(stepper).__name__}, not a torch optimizer")
    same = {"epochs": epochs, "batches": len(train), "target": target, "schedule": schedule}
    parts = {"losses": losses, "annealing": annealing, "model": soft, "optimizer": stepper, "scheduler": scheduler}
    parts |= {"order": getattr(train, "generator", None), "random": torch.default_generator}
    kept = Checkpoint(None if checkpoint is None else Path(checkpoint), same | _beginning(soft, stepper), parts)

    def moved_loss(of: nn.Module, batch: Batch) -> Tensor:
        return loss(of, batches.moved(batch, of))

    with progress_bar(progress, steps) as show:
        watching: list[Callback] = [] if scheduler is None else [lambda step: scheduler.step()]
        watching += [lambda step: show(step.step, str(step)), *callbacks]
        for epoch in fit(
            soft, epochs, lambda _: train, moved_loss, stepper, lambda _: annealing.step(), watching, kept
        ):
            losses.append(sum(epoch.losses) / max(len(epoch.losses), 1))
    soft.eval()
    hard = substitute_relu(soft, activations=activations).eval()
    inputs = batches.real_inputs(first, argument)
    shape = None if inputs is None else tuple(inputs.shape[1:])
    with evaluating(before), progress_bar(progress, math.ceil(min(change_timeout, MOST_EPOCHS))) as show:
        effect = measure(soft, hard, test, before=before, outputs=outputs, argument=argument)
        effect = replace(effect, region=region or effect.region, training=held_out is None)
        told = "seconds of the proof of the change"
        change = with_proof(
            effect, soft, hard, shape, change_timeout, argument=argument, watch=lambda taken: show(int(taken), told)
        )
    return HardenedModel(hard, soft, tuple(places), change, tuple(losses), shape, argument)


def _beginning(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the identity of a hardening: a digest of the weights, the learning rates, the seed."""
    weights = hashlib.sha256()
    for tensor in chain(model.parameters(), model.buffers()):
        weights.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return {"weights": weights.hexdigest()[:16], "rate": rates, "seed": torch.initial_seed()}


def _copy(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise InputError(f"a model is a torch module, not {type(model).__name__}")
    if any(is_lazy(tensor) for tensor in chain(model.parameters(), model.buffers())):
        raise InputError("the model has parameters without numbers: call a lazy module once first")
    try:
        copy = deepcopy(model)
    except Exception as error:  # The classes of a user's model decide what copying raises.
        raise UnsupportedError(f"the model cannot be copied: {error}") from error
    for parameter in copy.parameters():
        if not parameter.is_leaf:
            # So a copy of TorchScript has them, which no optimizer takes.
            parameter.detach_().requires_grad_()
    half = next((p.dtype for p in model.parameters() if p.dtype in (torch.float16, torch.bfloat16)), None)
    if half is not None:
        raise InputError(
            f"the model is in {half}, in which small steps of the weights and of λ are lost: convert it to float32 "
            "first (model.float()); torch.autocast may run it in half precision"
        )
    return copy


def _region(region: object) -> Region:
    try:
        low, high = (float(end) for end in region)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise InputError(f"a region is a least and a greatest value, not {region!r:.40}") from None
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise InputError(f"the region from {low} to {high} is empty or not finite")
    return low, high


@torch.no_grad()
def _require_same(before: nn.Module, soft: nn.Module, batch: Batch, outputs: Outputs) -> None:
    with at("first batch"):
        expected = outputs(before, batch)
    if not isinstance(expected, Tensor) or not expected.ndim or not expected.numel():
        shown = tuple(expected.shape) if isinstance(expected, Tensor) else type(expected).__name__
        raise InputError(f"the outputs for the data's first batch are {shown}, where a tensor (n, …) is expected")
    if not bool(expected.isfinite().all()):
        raise DataError("the model's outputs for the data's first batch are infinite or NaN")
    found = outputs(soft, batch)
    if found.shape != expected.shape or not (found - expected).abs().max() <= SAME * (1 + expected.abs().max()):
        raise UnsupportedError(
            "the model computes something else once its activations are replaced by gates with λ = 1: does its forward "
            "depend on more than its tensors?"
        )


def default_optimizer(
    model: nn.Module, steps: int, rate: float = RATE
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Make AdamW with a learning rate that falls from ``rate`` to 0 as a cosine over a number of steps."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise InputError("the model has no parameters that could be trained")
    optimizer = torch.optim.AdamW(parameters, rate)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


@torch.no_grad()
@default_settings()
def with_proof(
    effect: SubstitutionEffect,
    smooth: nn.Module,
    hard: nn.Module,
    shape: tuple[int, ...] | None,
    change_timeout: float,
    *,
    argument: str | None = None,
    watch: Callable[[float], None] = lambda seconds: None,
) -> SubstitutionEffect:
    """Return an effect with a proven bound of the change over its region, or the reason why there is none.

    ``shape`` is that of an input sample, None if the model's input is not one tensor, and ``argument`` its name, for
    models of several. After ``change_timeout`` seconds the proof goes on with intervals alone; 0 leaves it out.
    ``watch`` is told again and again the seconds that it has taken.
    """
    if not change_timeout:
        return effect
    if shape is None or effect.region is None:
        return replace(effect, unproven=NO_TENSOR)
    start = time.monotonic()

    def stop() -> bool:
        watch(taken := time.monotonic() - start)
        return taken > change_timeout

    try:
        with user_settings():
            first, second = (from_torch(model, shape, argument=argument, exact=True) for model in (smooth, hard))
        family = between(first, second)
        # The swapped smooth network computes the numbers of the hard one, but for those made of λ, which are rounded to
        # the modules' precision.
        ops, x = family.limit.ops, sample_points((family.input_size,), torch.float64)
        apart = find_difference(ops, x, {len(ops) - 1: second(x)}, 2 * unit_roundoff(torch.float32))
        if apart is not None:
            raise InputError(f"the swap is not the one of the model's activations alone: {apart}")
        low, high = (torch.full((1, family.input_size), end, dtype=torch.float64) for end in effect.region)
        found = substitution_change(family, Interval(low, high), stop=stop)
    except InputError as error:
        return replace(effect, unproven=str(error))
    bound = torch.maximum(-found.lower, found.upper).max().item()
    if bound <= effect.spread:
        return replace(effect, proven=bound, unproven="")
    why = f"a bound of {bound:.3g} says nothing, for all outputs here are within {effect.spread:.3g}"
    if not math.isfinite(bound):
        why = "the region is too large to bound a divisor or an exponential"
        why = f"the proof took longer than {change_timeout:g} s (change_timeout=)" if stop() else why
    return replace(effect, unproven=why)
