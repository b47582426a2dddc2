"""Arguments of the interface from Python, read and checked: models, images, labels, numbers, options.

Every function raises an ``InputError`` (a ``ValueError``) for what it cannot take; the message names the argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from verifiable_relu.errors import InputError
from verifiable_relu.execution.replay import replay
from verifiable_relu.ir.network import Network, Pair, Source
from verifiable_relu.readers import from_torch, read_onnx, runner
from verifiable_relu.readers.builder import OpBuilder, Value
from verifiable_relu.readers.derived import Derived, reciprocal, rounded
from verifiable_relu.settings import user_settings
from verifiable_relu.spec.balls import exact_number

_EXACT_INTEGERS = 2**53  # Up to here, every integer is a float64 number.

Model = nn.Module | Network | Path | str | bytes
"""A torch module, a network, or an ONNX file by its path or as bytes."""


def array(values: object, what: str) -> np.ndarray:
    """Return a tensor, an array or nested lists as a numpy array; a tensor's floating-point numbers become float64."""
    if isinstance(values, np.ma.MaskedArray):
        raise InputError(f"{what}: a masked array may lack numbers: fill them in first")
    try:
        if isinstance(values, Tensor):
            held = values.detach().cpu()
            values = held.double() if held.is_floating_point() else held
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what}: not an array of numbers: {error}") from None


def pixels(images: np.ndarray | Tensor) -> np.ndarray:
    """Return images as finite float64 numbers, (n, *input shape); numbers that float64 cannot represent are refused."""
    found = array(images, "images")
    if found.dtype.kind not in "fiub" or found.dtype.itemsize > 8:
        raise InputError(f"images of dtype {found.dtype} where real numbers of at most 64 bits are expected")
    if found.ndim < 2:
        raise InputError(f"images of shape {found.shape} where (n, *input shape) is expected")
    if found.dtype.kind in "iu" and found.size and max(-int(found.min()), int(found.max())) > _EXACT_INTEGERS:
        raise InputError("a pixel is an integer beyond 2^53, which float64 does not hold exactly")
    found = found.astype(np.float64)
    bad = np.argwhere(~np.isfinite(found))
    if len(bad):
        raise InputError("a pixel is NaN or infinite", place=f"image {bad[0][0]}")
    return found


def samples(images: Any, labels: Any) -> tuple[Any, Any]:
    """Return images and labels with an axis of samples: of one image and its label, or all that a DataLoader yields."""
    if isinstance(images, DataLoader):
        if labels is not None:
            raise InputError("a DataLoader yields labels, too: leave out labels=")
        try:
            pairs = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in images]
        except (TypeError, ValueError) as error:
            raise InputError(f"the DataLoader yields no pairs of images and labels: {error}") from None
        if not pairs:
            raise InputError("the DataLoader yields nothing")
        drawn = [torch.cat(parts) for parts in zip(*pairs, strict=True)]
        return drawn[0], drawn[1]
    if isinstance(labels, int | np.integer) or (isinstance(labels, np.ndarray | Tensor) and labels.ndim == 0):
        return array(images, "images")[None], [int(labels)]
    return images, labels


def classes(labels: object, what: str = "labels") -> np.ndarray:
    """Return class numbers as an array, int64 (n,)."""
    found = array(labels, what)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise InputError(f"{what} of shape {found.shape} and dtype {found.dtype} where n integers are expected")
    return found.clip(-1, 2**62).astype(np.int64)


def flag(value: object, what: str) -> bool:
    """Return an argument that is True or False."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise InputError(f"{what} is {value!r:.60}, neither True nor False")


def family(value: object) -> float | Sequence[float] | bool:
    """Return the argument ``family``: λ, one number or one per layer; True for the model's own, False for no family."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    found = array(None if isinstance(value, str | bytes | Mapping | set) else value, "family")
    if found.dtype.kind not in "fiu" or found.ndim > 1:
        raise InputError(f"family is {value!r:.60}, neither a number, nor one for each layer, nor True or False")
    return [float(number) for number in found] if found.ndim else float(found)


def radii(eps: object) -> object:
    """Return the radii of balls as a number, or an array of numbers or fractions."""
    if isinstance(eps, Tensor | np.ma.MaskedArray) or (isinstance(eps, np.ndarray) and eps.dtype != object):
        found = array(eps, "eps")
        if found.dtype.kind not in "fiu":
            raise InputError(f"radii of dtype {found.dtype} where real numbers are expected")
        return found if found.ndim else found.item()
    if isinstance(eps, list | tuple):
        try:
            return np.array(eps, dtype=object)
        except ValueError:
            raise InputError("eps: not an array of numbers") from None
    return eps


def masked(eps: object, mask: object, shape: tuple[int, ...]) -> object:
    """Return radii that are 0 outside of a boolean mask: an array in the images' shape, (n, …)."""
    chosen = array(mask, "mask")
    if chosen.dtype != bool:
        raise InputError(f"a mask of dtype {chosen.dtype}, where bool is expected")
    radius = np.asarray(eps, dtype=object)
    if radius.ndim == 1 and len(radius) == shape[0]:
        radius = radius.reshape(-1, *(1,) * (len(shape) - 1))
    try:
        found = np.broadcast_to(radius, shape).copy()
        found[~np.broadcast_to(chosen, shape)] = Fraction(0)
        return found
    except ValueError:
        raise InputError(f"a mask of shape {chosen.shape} and radii {radius.shape} for images of {shape}") from None


def normalised(then: Network, given: Any) -> Network:
    """Return a network behind a normalisation of its input: a pair of mean and std, each taken exactly."""
    try:
        mean, std = given
    except (TypeError, ValueError):
        raise InputError(f"normalize is a pair of mean and std, not {given!r:.60}") from None
    found = []
    for each, name in ((mean, "mean"), (std, "std")):
        numbers = array(each, name)
        if numbers.dtype.kind not in "fiu" or numbers.ndim > 1 or not numbers.size:
            raise InputError(f"{name}: one number, or one for each channel, is expected")
        exact = np.array([exact_number(number, name) for number in numbers.flat], dtype=object)
        found.append(Derived(exact.reshape(() if numbers.size == 1 else (-1, 1, 1))))
    if not all(number > 0 for number in found[1].values.flat):
        raise InputError(f"the std must be positive, got {std}")
    # The mean and 1/std in float64, and the relative errors of both.
    (center, off), (scale, other) = rounded(found[0]), rounded(reciprocal(found[1]))
    shape, error = then.source.input_shape, max(off, other)
    build = OpBuilder(shape)
    build.name = "normalisation"
    last = build.scale(build.scale(Value(0, shape), shift=-center, shift_error=error), scale, error=error).op
    moved = [replace(op, inputs=tuple(source + last for source in op.inputs)) for op in then.ops[1:]]
    pairs = tuple(Pair(*(number + last for number in pair)) for pair in then.pairs)

    def run(x: Tensor) -> Tensor:
        return torch.from_numpy(replay(then, ((x - center) * scale).float().numpy()))[None]

    source = Source(shape, then.source.output_shape, run=run, repairs=then.source.repairs)
    return Network((*build.ops, *moved), source, then.name, then.arithmetic, pairs)


def network(model: Model, shape: tuple[int, ...], normalize: Any = None, argument: str | None = None) -> Network:
    """Return the network of a model; a torch module is read in evaluation mode.

    ``shape`` is that of an input sample, which torch modules do not tell; ``normalize`` the mean and std of a
    normalisation of the input that is not part of the model, None for none; ``argument`` the name of the argument of a
    torch module that takes the input, None for the first one.
    """
    match model:
        case Network():
            read = model
        case nn.Module():
            with user_settings():
                traced = from_torch(model, shape, type(model).__name__, exact=True, argument=argument)
            found = Source(traced.source.input_shape, traced.source.output_shape, run=runner(model, argument))
            read = replace(traced, source=found)
        case Path() | str() | bytes():
            read = read_onnx(model)
        case _:
            raise InputError(f"a model is a torch module, a Network or an ONNX file, not {type(model).__name__}")
    return read if normalize is None else normalised(read, normalize)
