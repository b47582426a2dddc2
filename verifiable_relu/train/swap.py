"""The effect of the replacement of a model's smooth activations by ReLU, measured on data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verifiable_relu.train import batches
from verifiable_relu.train.batches import Batch, at

Outputs = Callable[[nn.Module, Batch], Tensor]
"""A function that returns a model's outputs (n, …) for a batch."""

Region = tuple[float, float]
"""The least and the greatest value of each input."""


@dataclass(frozen=True)
class SubstitutionEffect:
    """The effect of the replacement of a model's smooth activations by ReLU.

    The *smooth* model is the trained one, with each λ at its target, the *hard* one the same with ReLU in place of the
    activations. Accuracies are in [0, 1], and None if the data have no classes.

    Attributes:
        samples: the number of samples on which the effect was measured.
        accuracy_before: the accuracy of the model that hardening was given; None without such a model.
        accuracy_smooth, accuracy: those of the smooth and of the hard model.
        mean, worst: the mean and the maximum of |hard model's output − smooth model's output|.
        flipped: the number of samples for which the two models predict different classes.
        spread: the greatest output of all models minus the least.
        region: the least and the greatest value of each input of the region for which ``proven`` holds.
        proven: a proven upper bound of the change of any output over all inputs of the region, in real arithmetic;
            None if there is none.
        unproven: why there is no such bound, or none that is less than ``spread``; empty if there is one.
        training: True if the samples are those of the training.
    """

    samples: int
    accuracy_before: float | None
    accuracy_smooth: float | None
    accuracy: float | None
    mean: float
    worst: float
    flipped: int
    spread: float
    region: Region | None
    proven: float | None = None
    unproven: str = "it was not asked for (patience=0)"
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
    argument: str | None = None,
) -> SubstitutionEffect:
    """Compare a smooth model with its ReLU model, and with the one that hardening was given, in evaluation mode.

    Args:
        data: the batches on which the models are compared.
        before: the model that hardening was given, if there is one.
        outputs: a model's outputs for a batch.
        argument: the name of the input, for batches that are mappings (``batches.argument``).

    Raises:
        DataError: if the model does not take a batch.
    """
    models = [hard, smooth, *([] if before is None else [before])]
    samples, total, count, worst, flipped = 0, 0.0, 0, 0.0, 0
    right: list[int] | None = [0] * len(models)
    ends: list[Region] = []
    spread: list[float] = []
    for index, batch in enumerate(data):
        batch = batches.moved(batch, hard)
        with at(f"batch {index} of the held-out data"):
            results = [outputs(model, batch) for model in models]
        change = (results[0].double() - results[1].double()).abs()
        predicted = [result.argmax(-1) for result in results]
        true = batches.classes(batch)
        if batches.sample_shape(batch, argument) is not None:
            ends.append(batches.value_range(batch, argument))
        spread += [end.item() for result in results for end in result.aminmax()]
        samples += len(results[0])
        total, count = total + change.sum().item(), count + change.numel()
        worst = max(worst, change.max().item())
        flipped += int((predicted[0] != predicted[1]).sum())
        if true is None or true.shape != predicted[0].shape:
            right = None
        elif right is not None:
            right = [n + int((p == true).sum()) for n, p in zip(right, predicted, strict=True)]
    region = (min(low for low, _ in ends), max(high for _, high in ends)) if ends else None
    hardened, softened, given = (None,) * 3 if right is None else (*(n / samples for n in right), None)[:3]
    widest = max(spread) - min(spread)
    return SubstitutionEffect(samples, given, softened, hardened, total / count, worst, flipped, widest, region)
