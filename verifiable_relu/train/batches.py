"""A user's own data: batches of any form, and the effect of the swap to ReLU on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.errors import InputError, counted

Batch = Any
"""A tuple (inputs, classes, …), as torch's loaders give, or a mapping of the model's arguments, ``labels`` included."""

BATCH_SIZE = 128  # The size of batches of data given as arrays
_LEFT_OUT = -100  # The class of samples that torch's cross-entropy leaves out


class DataError(InputError):
    """Data that cannot be used, or that the model does not take."""


@contextmanager
def at(place: str) -> Iterator[None]:
    """Name a place, such as ``batch 3``, in a ``DataError`` that names none."""
    try:
        yield
    except DataError as error:
        if error.place is not None:
            raise
        raise DataError(error.message, place=place) from error.__cause__


def loader(data: Any, shuffled: bool, seed: int = 0) -> Collection[Batch]:
    """Return the batches of a user's data, which can be gone through any number of times.

    ``data`` is an iterable of batches with a length, such as a ``DataLoader``, or a pair (inputs, classes) of arrays,
    whose samples are ``shuffled`` by the seed. Raises a DataError for others, and for inputs that are no finite real
    numbers.
    """
    if _is_pair(data):
        inputs, classes = map(_tensor, data)
        if not inputs.ndim or inputs.shape[:1] != classes.shape[:1]:
            raise DataError(f"inputs of shape {tuple(inputs.shape)}, but classes of {tuple(classes.shape)}")
        if not inputs.numel():
            raise DataError(f"there are no data: the inputs have the shape {tuple(inputs.shape)}")
        if not inputs.is_floating_point():
            raise DataError(f"the inputs are {inputs.dtype}, not real numbers: scale pixels to [0, 1]")
        finite = inputs.flatten(1).isfinite().all(1) if inputs.ndim > 1 else inputs.isfinite()
        if not bool(finite.all()):
            raise DataError("an input is infinite or NaN", place=f"sample {int(finite.int().argmin())}")
        # A batch normalisation cannot be trained on a last batch of one sample; each epoch leaves out another.
        alone = shuffled and len(inputs) > BATCH_SIZE and len(inputs) % BATCH_SIZE == 1
        samples, generator = torch.utils.data.TensorDataset(inputs, classes), torch.Generator().manual_seed(seed)
        batches: Any = torch.utils.data.DataLoader(samples, BATCH_SIZE, shuffled, drop_last=alone, generator=generator)
        return cast(Collection[Batch], batches)
    if not isinstance(data, Iterable) or not isinstance(data, Sized) or isinstance(data, Tensor | np.ndarray | str):
        raise DataError(
            f"data are a DataLoader, a list of batches or a pair (inputs, classes) of arrays, not {type(data).__name__}"
        )
    if isinstance(data, Mapping):
        raise DataError("data are one batch: give a list of batches")
    if not len(data):
        raise DataError("there are no data")
    return cast(Collection[Batch], data)


def _is_pair(data: object) -> bool:
    return isinstance(data, tuple) and len(data) == 2 and all(isinstance(each, Tensor | np.ndarray) for each in data)


def _tensor(array: Tensor | np.ndarray) -> Tensor:
    if isinstance(array, Tensor):
        return array
    try:
        # torch takes numbers in this machine's order of bytes alone.
        return torch.as_tensor(array.astype(array.dtype.newbyteorder("="), copy=False))
    except TypeError:
        raise DataError(f"an array is {array.dtype}, not numbers") from None


def moved(batch: Batch, model: nn.Module) -> Batch:
    """Return a batch with its tensors on the device of a model's first parameter."""
    first = next(chain(model.parameters(), model.buffers()), None)
    if isinstance(batch, Tensor):
        return batch if first is None else batch.to(first.device)
    if isinstance(batch, Mapping):
        return {name: moved(value, model) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)([moved(value, model) for value in batch])
    return batch


def outputs(model: nn.Module, batch: Batch) -> Tensor:
    """Return a model's outputs for a batch: ``model(inputs)``, or ``model(**batch)``, or the ``logits`` of these.

    Raises an InputError if these are no tensor, or a DataError if the model does not take the batch.
    """
    found = _called(model, batch)
    found = found.get("logits", found) if isinstance(found, Mapping) else getattr(found, "logits", found)
    if not isinstance(found, Tensor):
        raise InputError(f"the model returns a {type(found).__name__}: give a function of its outputs by outputs=")
    return found


def classes(batch: Batch) -> Tensor | None:
    """Return the true classes of a batch, or None if it has none."""
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in _CLASSES if name in batch), None)
    else:
        found = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
    integers = isinstance(found, Tensor) and not found.is_floating_point() and not found.is_complex()
    return found if integers else None


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the ``loss`` that the model itself returns for a mapping, or the cross-entropy of its outputs.

    Raises a DataError if the model does not take the batch, or if it has no classes, or others than the model's
    outputs.
    """
    if isinstance(batch, Mapping):
        found = _called(model, batch)
        own = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
        if isinstance(own, Tensor):
            return own
    true = classes(batch)
    if true is None:
        raise DataError("a batch has no classes (integers): give the loss to minimise by loss=")
    found = outputs(model, batch)
    if found.ndim < 2 or (found.shape[0], *found.shape[2:]) != tuple(true.shape):
        raise DataError(f"outputs of shape {tuple(found.shape)} for classes of shape {tuple(true.shape)}")
    known = (true >= 0) & (true < found.shape[1])
    if not bool((known | (true == _LEFT_OUT)).all()):
        raise DataError(f"a class is none of the model's, 0 to {found.shape[1] - 1}")
    return F.cross_entropy(found, true.long())


def _called(model: nn.Module, batch: Batch) -> Any:
    """Return what a model returns for a batch, with a DataError where torch refuses shapes, types and classes."""
    try:
        return model(**batch) if isinstance(batch, Mapping) else model(_inputs(batch))
    except InputError:
        raise
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise DataError(f"the model does not take it: {error}") from error


NO_TENSOR = "the model's input is not one tensor of real numbers (argument= names one of several)"
_CLASSES = ("labels", "label", "classes")  # The names of the classes in a batch that is a mapping


def argument(batch: Batch) -> str | None:
    """Return the name of the one tensor of real numbers, besides the classes, in a batch that is a mapping, or None."""
    named = batch.items() if isinstance(batch, Mapping) else ()
    reals = (name for name, each in named if isinstance(each, Tensor) and each.is_floating_point())
    found = [name for name in reals if name not in _CLASSES]
    return found[0] if len(found) == 1 else None


def real_inputs(batch: Batch, argument: str | None = None) -> Tensor | None:
    """Return the inputs of a batch; None unless they are one tensor of real numbers."""
    found = _inputs(batch, argument)
    return found if isinstance(found, Tensor) and found.is_floating_point() else None


def _inputs(batch: Batch, argument: str | None = None) -> Any:
    if isinstance(batch, Mapping):
        return batch.get(argument)
    return batch[0] if isinstance(batch, tuple | list) and batch else batch


Outputs = Callable[[nn.Module, Batch], Tensor]  # Returns a model's outputs (n, …) for a batch
Region = tuple[float, float]  # The least and the greatest value of each input


@dataclass(frozen=True)
class SubstitutionEffect:
    """The effect of the replacement of a model's smooth activations by ReLU.

    The *smooth* model is the trained one, with each λ at its target, the *hard* one the same with ReLU in place of the
    activations. Accuracies are in [0, 1], and None if the data have no classes.

    Attributes:
        samples: the number of samples on which the effect was measured; ``training`` if they were trained on.
        accuracy_before: the accuracy of the model that hardening was given; None without such a model.
        accuracy_smooth, accuracy: those of the smooth and of the hard model.
        mean, worst: the mean and the maximum of |hard model's output − smooth model's output|.
        flipped: the number of samples for which the two models predict different classes.
        spread: the greatest output of all models minus the least.
        region: the least and the greatest value of each input of the region for which ``proven`` holds.
        proven: a proven upper bound of the change of any output over the region, in real arithmetic, or None.
        unproven: why there is no such bound, or none that is less than ``spread``; empty if there is one.
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
    unproven: str = "it was not asked for (change_timeout=0)"
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
            f"and {counted(self.flipped, 'prediction')}"
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
    outputs: Outputs = outputs,
    argument: str | None = None,
) -> SubstitutionEffect:
    """Compare a smooth model with its ReLU model, and with the one that hardening was given, in evaluation mode.

    ``argument`` is the name of the input in batches that are mappings. Raises a DataError if a model takes no batch.
    """
    models = [hard, smooth, *([] if before is None else [before])]
    samples, total, count, worst, flipped = 0, 0.0, 0, 0.0, 0
    right: list[int] | None = [0] * len(models)
    ends: list[Region] = []
    spread: list[float] = []
    for index, batch in enumerate(data):
        batch = moved(batch, hard)
        with at(f"batch {index} of the held-out data"):
            results = [outputs(model, batch) for model in models]
        change = (results[0].double() - results[1].double()).abs()
        predicted = [result.argmax(-1) for result in results]
        true = classes(batch)
        inputs = real_inputs(batch, argument)
        if inputs is not None:
            ends.append((inputs.min().item(), inputs.max().item()))
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
