"""What a batch of the user's data holds: a model's arguments, its outputs and the true classes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sized
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.errors import InputError

Batch = Any
"""A tuple (inputs, classes, …), as torch's loaders give, or a mapping of the model's arguments, ``labels`` included."""

BATCH_SIZE = 128
"""The size of batches of data given as arrays."""


def loader(data: Any, shuffled: bool, seed: int = 0) -> Collection[Batch]:
    """The batches of a user's data, which can be gone through any number of times.

    Args:
        data: an iterable of batches with a length, such as a ``DataLoader`` or a list; or a pair (inputs, classes) of
            tensors or arrays.
        shuffled: whether the order of the samples of a pair of arrays is random.
        seed: the seed of that order.

    Raises:
        InputError: if the data are neither, or empty.
    """
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(each, Tensor | np.ndarray) for each in data):
        inputs, classes = (torch.as_tensor(each) for each in data)
        if len(inputs) != len(classes):
            raise InputError(f"{len(inputs)} inputs, but {len(classes)} classes")
        if not len(inputs):
            raise InputError("there are no data")
        if not inputs.is_floating_point():
            raise InputError(f"the inputs are {inputs.dtype}, not real numbers: scale pixels to [0, 1]")
        held = torch.utils.data.TensorDataset(inputs, classes)
        generator = torch.Generator().manual_seed(seed)
        batches: Any = torch.utils.data.DataLoader(held, BATCH_SIZE, shuffle=shuffled, generator=generator)
        return cast(Collection[Batch], batches)
    if not isinstance(data, Iterable) or not isinstance(data, Sized) or isinstance(data, Tensor | np.ndarray | str):
        raise InputError(
            f"data are a DataLoader, a list of batches or a pair (inputs, classes) of arrays, not {type(data).__name__}"
        )
    if isinstance(data, Mapping):
        raise InputError("data are a list of batches, not one batch")
    if not len(data):
        raise InputError("there are no data")
    return cast(Collection[Batch], data)


def moved(batch: Batch, model: nn.Module) -> Batch:
    """A batch with its tensors on the device of a model's first parameter."""
    first = next(chain(model.parameters(), model.buffers()), None)
    if first is None:
        return batch
    if isinstance(batch, Tensor):
        return batch.to(first.device)
    if isinstance(batch, Mapping):
        return {name: moved(value, model) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)([moved(value, model) for value in batch])
    return batch


def outputs(model: nn.Module, batch: Batch) -> Tensor:
    """A model's outputs for a batch: ``model(inputs)``, or ``model(**batch)`` and its ``logits``.

    Raises:
        InputError: if these are no tensor.
    """
    found = model(**batch) if isinstance(batch, Mapping) else model(_inputs(batch))
    if isinstance(found, Mapping) and "logits" in found:
        found = found["logits"]
    found = getattr(found, "logits", found)
    if not isinstance(found, Tensor):
        raise InputError(f"the model returns a {type(found).__name__}: say by outputs= where its outputs are")
    return found


def classes(batch: Batch) -> Tensor | None:
    """The true classes of a batch, or None if it has none."""
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in ("labels", "label", "classes") if name in batch), None)
    else:
        found = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
    integers = isinstance(found, Tensor) and not found.is_floating_point() and not found.is_complex()
    return found if integers else None


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The ``loss`` that the model itself returns for a mapping, or the cross-entropy of its outputs.

    Raises:
        InputError: if the batch has no classes, or others than the model's outputs.
    """
    if isinstance(batch, Mapping):
        found = model(**batch)
        own = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
        if isinstance(own, Tensor):
            return own
    true = classes(batch)
    if true is None:
        raise InputError("a batch has no classes (integers): say by loss= what is to become small")
    found = outputs(model, batch)
    if found.ndim < 2 or (found.shape[0], *found.shape[2:]) != tuple(true.shape):
        raise InputError(f"outputs of shape {tuple(found.shape)} for classes of shape {tuple(true.shape)}")
    # The cross-entropy of torch leaves out what has the class −100.
    if not bool(((true >= 0) & (true < found.shape[1]) | (true == -100)).all()):
        raise InputError(f"a class is none of the model's, 0 to {found.shape[1] - 1}")
    return F.cross_entropy(found, true.long())


def sample_shape(batch: Batch) -> tuple[int, ...] | None:
    """The shape of one input sample of a batch; None unless the batch's input is one tensor of real numbers."""
    found = None if isinstance(batch, Mapping) else _inputs(batch)
    return tuple(found.shape[1:]) if isinstance(found, Tensor) and found.is_floating_point() else None


def value_range(batch: Batch) -> tuple[float, float]:
    """The least and the greatest number of a batch's inputs."""
    inputs = _inputs(batch)
    return inputs.min().item(), inputs.max().item()


def _inputs(batch: Batch) -> Any:
    return batch[0] if isinstance(batch, tuple | list) and batch else batch
