"""What a random ONNX file is made of: operators that change a value's shape or name alone, in all forms of an opset.

Each function appends one, as those in ``onnx_operators`` do.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .onnx_graphs import DOUBLE, FLOAT, Draft, Shape, Tensor


def ranked(least: int, most: int = 9) -> Callable[[Tensor], bool]:
    return lambda t: least <= t.rank <= most


def alias(draft: Draft, value: Tensor | None = None) -> Tensor | None:
    """A second name: an operator that changes nothing about a value."""
    value = value or draft.pick()
    same = draft.rng.choice(
        ("Identity", "Identity", "Dropout", "Cast", "Flatten", "Reshape", "Transpose", "Squeeze", "Neutral")
    )
    match same:
        case "Identity":
            return draft.emit("Identity", [value.name], value)
        case "Dropout":
            return dropout(draft, value)
        case "Cast":
            return draft.emit("Cast", [value.name], value, to=value.kind)
        case "Flatten" if value.rank == 2:
            return draft.emit(
                "Flatten", [value.name], value, axis=draft.rng.choice((1, -1 if draft.opset >= 11 else 1))
            )
        case "Reshape":
            return draft.reshape(value, value.shape)
        case "Transpose":
            perm = list(range(value.rank))
            ones = [axis for axis in perm if value.shape[axis] == 1 and not (axis == 0 and value.batch)]
            if len(ones) >= 2 and draft.chance(0.5):
                perm[ones[0]], perm[ones[1]] = perm[ones[1]], perm[ones[0]]
            return draft.emit("Transpose", [value.name], value, **({"perm": perm} if perm else {}))
        case "Squeeze":
            axis = draft.rng.randint(1 if value.batch else 0, value.rank)
            wider = draft.unsqueeze(value.name, [axis])
            return draft.keep(draft.axes("Squeeze", wider, [axis]), value, value.shape)
        case "Neutral":
            operator = draft.rng.choice(("Add", "Sub", "Mul", "Div"))
            entry = np.array(
                0 if operator in ("Add", "Sub") else 1, dtype=np.float64 if value.kind == DOUBLE else np.float32
            )
            return draft.emit(operator, [value.name, draft.constant(entry)], value)
    return None


def dropout(draft: Draft, value: Tensor) -> Tensor:
    inputs, attributes = [value.name], {}
    if draft.opset < 12:
        if draft.chance(0.5):
            attributes["ratio"] = 0.25
    else:
        if draft.chance(0.4):
            ratio = "" if draft.chance(0.2) else draft.constant(np.array(0.5, dtype=np.float32))
            inputs.append(ratio)
            if draft.chance(0.4):
                inputs.append(draft.constant(np.array(False)) if draft.chance(0.7) else "")
        if draft.chance(0.2):
            attributes["seed"] = 7
    made = draft.emit("Dropout", inputs, value, **attributes)
    if draft.chance(0.3):
        draft.nodes[-1].output.append("" if draft.chance(0.2) else f"{made.name}_mask")
    return made


def cast(draft: Draft) -> Tensor | None:
    """The value in the other floating-point type."""
    value = draft.pick()
    kind = DOUBLE if value.kind == FLOAT else FLOAT
    return draft.keep(draft.node("Cast", [value.name], to=kind), value, value.shape, kind=kind)


def reshape(draft: Draft) -> Tensor | None:
    value = draft.pick(ranked(1))
    if value is None:
        return None
    size = math.prod(value.shape)
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    first = draft.rng.choice(divisors)
    inner: Shape = draft.rng.choice(((size,), (first, size // first), (1, size), (size, 1), (1, first, size // first)))
    return draft.reshape(value, (1, *inner) if value.batch and draft.chance(0.97) else inner)


def flatten(draft: Draft) -> Tensor | None:
    value = draft.pick(ranked(1))
    if value is None:
        return None
    axis = 1 if value.batch and draft.chance(0.95) else draft.rng.randint(0, value.rank)
    shape = (math.prod(value.shape[:axis]), math.prod(value.shape[axis:]))
    if axis < value.rank and draft.opset >= 11 and draft.chance(0.3):
        axis -= value.rank
    attributes = {} if axis == 1 and draft.chance(0.5) else {"axis": axis}
    return draft.emit("Flatten", [value.name], value, shape, **attributes)


def squeeze(draft: Draft) -> Tensor | None:
    value = draft.pick(lambda t: 1 in t.shape[1 if t.batch else 0 :])
    if value is None:
        return None
    ones = [axis for axis, size in enumerate(value.shape) if size == 1 and not (axis == 0 and value.batch)]
    if not value.batch and draft.chance(0.3):
        return draft.keep(draft.axes("Squeeze", value.name, None), value, tuple(s for s in value.shape if s != 1))
    axes = draft.rng.sample(ones, draft.rng.randint(1, len(ones)))
    shape = tuple(size for axis, size in enumerate(value.shape) if axis not in axes)
    if draft.opset >= 11 and draft.chance(0.3):
        axes = [axis - value.rank for axis in axes]
    return draft.keep(draft.axes("Squeeze", value.name, axes), value, shape)


def unsqueeze(draft: Draft) -> Tensor | None:
    value = draft.pick(ranked(0, 4))
    if value is None:
        return None
    rank = value.rank + draft.rng.choice((1, 1, 2))
    axes = draft.rng.sample(range(1 if value.batch else 0, rank), rank - value.rank)
    sizes = iter(value.shape)
    shape = tuple(1 if axis in axes else next(sizes) for axis in range(rank))
    if draft.opset >= 11 and draft.chance(0.3):
        axes = [axis - rank for axis in axes]
    return draft.keep(draft.unsqueeze(value.name, axes), value, shape)


def transpose(draft: Draft) -> Tensor | None:
    value = draft.pick(ranked(2))
    if value is None:
        return None
    perm = draft.permutation(value.rank)
    if value.batch and draft.chance(0.95):
        perm = [0, *(1 + p for p in draft.permutation(value.rank - 1))]
    if perm == list(range(value.rank))[::-1] and draft.chance(0.5):
        name = draft.node("Transpose", [value.name])
    else:
        name = draft.node("Transpose", [value.name], perm=perm)
    return draft.keep(name, value, tuple(value.shape[p] for p in perm), batch=value.batch and perm[0] == 0)


def unread(draft: Draft) -> Tensor | None:
    """Slices, pieces and joins of values, which no verifier here reads today."""
    value = draft.pick(lambda t: t.rank >= 2 and t.shape[-1] >= 2)
    if value is None:
        return None
    last = value.rank - 1
    if draft.chance(0.5):
        return draft.keep(draft.slice(value.name, last, 0, 1), value, (*value.shape[:-1], 1))
    return draft.emit("Concat", [value.name] * 2, value, (*value.shape[:-1], 2 * value.shape[-1]), axis=last)
