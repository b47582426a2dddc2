"""What the replacement of a model's smooth activations by ReLU changes: measured on data, and bounded over a region."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verifiable_relu.bounds.change import substitution_change
from verifiable_relu.bounds.tuning import Bounds
from verifiable_relu.errors import InputError
from verifiable_relu.network import Network, from_torch
from verifiable_relu.network.agreement import parting, sample_points
from verifiable_relu.network.family import swapped
from verifiable_relu.rounding import unit_roundoff
from verifiable_relu.settings import as_given, neutral
from verifiable_relu.train import batches
from verifiable_relu.train.batches import Batch, at

PATIENCE = 60.0
"""The seconds that a hardening's proof of the change may take, unless the user says otherwise."""

Outputs = Callable[[nn.Module, Batch], Tensor]
"""A function that returns a model's outputs (n, …) for a batch."""

Region = tuple[float, float]
"""The least and the greatest value of each input."""


@dataclass(frozen=True)
class Change:
    """The effect of the replacement of a model's smooth activations by ReLU.

    The *smooth* model is the trained one, with each λ at its target, the *hard* one the same with ReLU in place of the
    activations. Accuracies are in [0, 1], and None if the data have no classes.

    Attributes:
        samples: the number of samples on which the effect was measured.
        accuracy_before: the accuracy of the model that hardening was given; None without such a model.
        accuracy_smooth: the accuracy of the smooth model.
        accuracy: the accuracy of the hard model.
        mean: the mean of |hard model's output − smooth model's output|.
        worst: the maximum of the same.
        flipped: the number of samples for which the two models predict different classes.
        region: the least and the greatest value of each input of the region for which ``proven`` holds.
        proven: a proven upper bound of the change of any output over all inputs of the region, in real arithmetic;
            None if there is none.
        unproven: why there is no such bound, or none that is less than the range of the outputs on the data; empty if
            there is one.
        training: whether the samples are those of the training.
    """

    samples: int
    accuracy_before: float | None
    accuracy_smooth: float | None
    accuracy: float | None
    mean: float
    worst: float
    flipped: int
    region: Region | None
    proven: float | None
    unproven: str = ""
    training: bool = False

    def __str__(self) -> str:
        lines = []
        if self.accuracy is not None:
            given = "" if self.accuracy_before is None else f"{self.accuracy_before:.2%} before, "
            lines.append(
                f"accuracy on {self.samples} {'training ' * self.training}samples: {given}{self.accuracy_smooth:.2%} "
                f"with λ-gates, {self.accuracy:.2%} with ReLU"
            )
        lines.append(
            f"the swap changes outputs by {self.mean:.3g} in the mean and {self.worst:.3g} at most on these samples, "
            f"and {self.flipped} predictions"
        )
        if self.proven is not None and self.region is not None:
            low, high = self.region
            lines.append(f"proven: by at most {self.proven:.3g} for all inputs in [{low:g}, {high:g}]")
        else:
            lines.append(f"no bound of the change is proven: {self.unproven}")
        return "\n".join(lines)


@torch.no_grad()
def measure(
    smooth: nn.Module,
    hard: nn.Module,
    data: Iterable[Batch],
    *,
    before: nn.Module | None = None,
    outputs: Outputs = batches.outputs,
    region: Region | None = None,
    patience: float = math.inf,
    argument: str | None = None,
    watch: Callable[[float], None] = lambda seconds: None,
) -> Change:
    """Compare a smooth model with its ReLU model, and with the model that hardening was given, all in evaluation mode.

    Args:
        smooth: the model with smooth activations.
        hard: the same with ReLU.
        data: the batches on which the models are compared.
        before: the model that hardening was given, if there is one.
        outputs: a model's outputs for a batch.
        region: the region over which the change is bounded; None takes the range of the data's numbers.
        patience: the seconds that the proof may take; it goes on with interval bounds alone where they are over. 0
            leaves it out.
        argument: the name of the input that is one tensor of real numbers, for batches that are mappings
            (``batches.argument``).
        watch: told during the proof, again and again, the seconds that it has taken.

    Raises:
        DataError: if the model does not take a batch.
    """
    models = [hard, smooth, *([] if before is None else [before])]
    samples, total, count, worst, flipped = 0, 0.0, 0, 0.0, 0
    right: list[int] | None = [0] * len(models)
    known: list[Region] = []
    shape: tuple[int, ...] | None = None
    least, most = math.inf, -math.inf
    for index, batch in enumerate(data):
        batch = batches.moved(batch, hard)
        with at(f"batch {index} of the held-out data"):
            results = [outputs(model, batch) for model in models]
        change = (results[0].double() - results[1].double()).abs()
        predicted = [result.argmax(-1) for result in results]
        true = batches.classes(batch)
        shape = batches.sample_shape(batch, argument)
        if shape is not None:
            known.append(batches.value_range(batch, argument))
        least, most = min(least, *(r.min().item() for r in results)), max(most, *(r.max().item() for r in results))
        samples += len(results[0])
        total, count = total + change.sum().item(), count + change.numel()
        worst = max(worst, change.max().item())
        flipped += int((predicted[0] != predicted[1]).sum())
        if true is None or true.shape != predicted[0].shape:
            right = None
        elif right is not None:
            right = [n + int((p == true).sum()) for n, p in zip(right, predicted, strict=True)]
    if region is None and known:
        region = min(low for low, _ in known), max(high for _, high in known)
    proven, why = _proven(smooth, hard, shape, region, patience, argument, watch)
    if proven is not None and proven > most - least:
        proven, why = None, f"a bound of {proven:.3g} says nothing, for all outputs here are within {most - least:.3g}"
    hardened, softened, given = (None,) * 3 if right is None else (*(n / samples for n in right), None)[:3]
    return Change(samples, given, softened, hardened, total / count, worst, flipped, region, proven, why)


@neutral()
def _proven(
    smooth: nn.Module,
    hard: nn.Module,
    shape: tuple[int, ...] | None,
    region: Region | None,
    patience: float,
    argument: str | None,
    watch: Callable[[float], None],
) -> tuple[float | None, str]:
    """A proven bound of the change of any output over a region, or None and the reason."""
    if not patience:
        return None, "it was not asked for (patience=0)"
    if shape is None or region is None:
        return None, batches.NO_TENSOR
    start = time.monotonic()

    def stop() -> bool:
        watch(taken := time.monotonic() - start)
        return taken > patience

    try:
        with as_given():
            read = [from_torch(model, shape, argument=argument) for model in (smooth, hard)]
        # The bounds are computed on the CPU, whatever the model's device, and need no gradients of the weights.
        first, second = (Network(tuple(n.map_tensors(lambda t: t.detach().cpu()) for n in r.nodes)) for r in read)
        family = swapped(first, second)
        _require_swap(family.limit, second)
        ones = torch.ones(1, *shape, dtype=torch.float64)
        found = substitution_change(family.to(torch.float64), Bounds(ones * region[0], ones * region[1]), stop=stop)
    except InputError as error:
        return None, str(error)
    largest = torch.maximum(-found.lower, found.upper).max().item()
    if not math.isfinite(largest):
        if stop():
            return None, f"the proof took longer than {patience:g} s (patience=)"
        return None, "over a region this large, nothing is known of a divisor or an exponential"
    return largest, ""


def _require_swap(found: Network, hard: Network) -> None:
    """Compare what the swap makes of a network as it is read with the hard model's network.

    Raises:
        InputError: if they compute different numbers.
    """
    x = sample_points(found.input_shape, torch.float64)
    last = len(found.nodes) - 1
    expected = hard.to(torch.float64).values(x)[-1]
    # Numbers that are made of λ are rounded to the modules' precision.
    apart = parting(found.nodes, x, {last: expected}, 2 * unit_roundoff(torch.float32))
    if apart is not None:
        raise InputError(f"the swap is not the one of the model's activations alone: {apart}")
