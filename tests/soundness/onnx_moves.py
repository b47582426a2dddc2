"""What a random ONNX file is made of: operators that move numbers, reduce axes, and take maxima.

Each function appends one in a random form of the file's opset, as those in ``onnx_operators`` do.
"""

from __future__ import annotations

import math

import numpy as np
from onnx import helper

from .onnx_graphs import DOUBLE, Draft, Tensor
from .onnx_reshapes import ranked

MOST = 60
"""Most values have at most so many entries, so that a file takes milliseconds."""


def _axis(draft: Draft, value: Tensor) -> int | None:
    """An axis that is not the batch's."""
    axes = range(1 if value.batch else 0, value.rank)
    return draft.rng.choice(axes) if axes else None


def _written(draft: Draft, axis: int, value: Tensor, since: int = 11) -> int:
    """An axis, sometimes counted from the end, which operators understand since a version."""
    return axis - value.rank if draft.opset >= since and draft.chance(0.3) else axis


def _resized(value: Tensor, axis: int, size: int) -> tuple[int, ...]:
    return (*value.shape[:axis], size, *value.shape[axis + 1 :])


def concat(draft: Draft) -> Tensor | None:
    """Values and constants one after another."""
    value = draft.pick(ranked(1))
    if value is None or (axis := _axis(draft, value)) is None:
        return None
    parts, sizes = [value.name], value.shape[axis]
    for _ in range(draft.rng.randint(1, 2)):
        fits = (
            [
                t
                for t in draft.pool
                if t.kind == value.kind and t.batch == value.batch and _resized(value, axis, 1) == _resized(t, axis, 1)
            ]
            if value.rank
            else []
        )
        fits = [t for t in fits if t.rank == value.rank]
        if fits and draft.chance(0.7):
            other = draft.rng.choice(fits)
            parts.insert(draft.rng.randint(0, len(parts)), other.name)
            sizes += other.shape[axis]
        else:
            size = draft.rng.randint(1, 2)
            parts.insert(draft.rng.randint(0, len(parts)), draft.weight(_resized(value, axis, size), value.kind))
            sizes += size
    shape = _resized(value, axis, sizes)
    if math.prod(shape) > MOST:
        return None
    return draft.emit("Concat", parts, value, shape, axis=_written(draft, axis, value))


def sliced(draft: Draft) -> Tensor | None:
    value = draft.pick(ranked(1))
    if value is None or (axis := _axis(draft, value)) is None:
        return None
    size = value.shape[axis]
    start = draft.rng.randint(-size, size - 1)
    end = draft.rng.choice((size, 2**31 - 1, -1, draft.rng.randint(1, size + 3)))
    step = draft.rng.choice((1, 1, 2, -1)) if draft.opset >= 10 else 1
    if step < 0:
        end = draft.rng.choice((-size - 1, -(2**31)))
    count = len(range(size)[start:end:step])
    if not count:
        return None
    shape = _resized(value, axis, count)
    if draft.opset < 10:
        return draft.emit("Slice", [value.name], value, shape, starts=[start], ends=[end], axes=[axis])
    given = [[start], [end], [_written(draft, axis, value)], [step]][: 4 if step != 1 or draft.chance(0.5) else 3]
    return draft.emit("Slice", [value.name, *map(draft.integers, given)], value, shape)


def gathered(draft: Draft) -> Tensor | None:
    value = draft.pick(ranked(1))
    if value is None or (axis := _axis(draft, value)) is None:
        return None
    size = value.shape[axis]
    least = -size if draft.opset >= 11 else 0
    if draft.chance(0.3) and (axis or not value.batch) and value.rank > 1:
        index = draft.constant(np.array(draft.rng.randint(least, size - 1), dtype=np.int64))
        shape = (*value.shape[:axis], *value.shape[axis + 1 :])
    else:
        entries = [draft.rng.randint(least, size - 1) for _ in range(draft.rng.randint(1, 4))]
        index, shape = draft.integers(entries), _resized(value, axis, len(entries))
    if math.prod(shape) > MOST:
        return None
    return draft.emit("Gather", [value.name, index], value, shape, axis=_written(draft, axis, value))


def padded(draft: Draft) -> Tensor | None:
    value = draft.pick(ranked(1))
    if value is None:
        return None
    mode = draft.rng.choice(("constant", "constant", "reflect", "edge"))
    first = 1 if value.batch else 0
    most = [0] * first + [min(2, n - 1) if mode == "reflect" else 2 for n in value.shape[first:]]
    pads = [draft.rng.randint(0, n) if draft.chance(0.5) else 0 for n in (*most, *most)]
    shape = tuple(n + pads[i] + pads[i + value.rank] for i, n in enumerate(value.shape))
    if math.prod(shape) > MOST:
        return None
    attributes: dict[str, object] = {} if mode == "constant" and draft.chance(0.5) else {"mode": mode}
    if draft.opset < 11:
        if draft.chance(0.5):
            attributes["value"] = draft.rng.choice((0.0, 0.5, -2.0))
        return draft.emit("Pad", [value.name], value, shape, pads=pads, **attributes)
    inputs = [value.name, draft.integers(pads)]
    if mode == "constant" and draft.chance(0.5):
        inputs.append(draft.weight((), value.kind))
    return draft.emit("Pad", inputs, value, shape, **attributes)


def repeated(draft: Draft) -> Tensor | None:
    """Tile or Expand."""
    value = draft.pick(ranked(1))
    if value is None or draft.opset < 8:
        return None
    first = 1 if value.batch else 0
    if draft.chance(0.5):
        times = [1] * first + [draft.rng.choice((1, 1, 2)) for _ in value.shape[first:]]
        shape = tuple(n * t for n, t in zip(value.shape, times, strict=True))
        operator, given = "Tile", times
    else:
        shape = tuple(n if n > 1 or i < first else draft.rng.choice((1, 3)) for i, n in enumerate(value.shape))
        operator, given = "Expand", list(shape)
    if math.prod(shape) > MOST:
        return None
    return draft.emit(operator, [value.name, draft.integers(given)], value, shape)


def split(draft: Draft) -> Tensor | None:
    """Split into two parts, of which one or both are used."""
    value = draft.pick(lambda t: t.rank >= 1 and max(t.shape[1 if t.batch else 0 :], default=0) >= 2)
    if value is None:
        return None
    axis = draft.rng.choice([i for i, n in enumerate(value.shape) if n >= 2 and not (value.batch and i == 0)])
    first = draft.rng.randint(1, value.shape[axis] - 1)
    sizes = [first, value.shape[axis] - first]
    attributes: dict[str, object] = {"axis": _written(draft, axis, value)}
    inputs = [value.name]
    if draft.opset >= 13:
        inputs.append(draft.integers(sizes))
    else:
        attributes["split"] = sizes
    names = [draft.name(), draft.name()]
    draft.nodes.append(helper.make_node("Split", inputs, names, **attributes))
    draft.read.update(inputs)
    parts = [draft.keep(name, value, _resized(value, axis, size)) for name, size in zip(names, sizes, strict=True)]
    return draft.rng.choice(parts)


def extreme(draft: Draft) -> Tensor | None:
    """Max or Min of values and constants."""
    value = draft.pick()
    if value.kind == DOUBLE and draft.opset < 8:
        return None
    operands = [value.name]
    for _ in range(draft.rng.randint(1, 2)):
        same = [
            t.name for t in draft.pool if t.shape == value.shape and t.kind == value.kind and t.batch == value.batch
        ]
        if draft.chance(0.5):
            operands.append(draft.rng.choice(same))
        else:
            operands.append(draft.weight(draft.rng.choice(((), value.shape)), value.kind))
    draft.rng.shuffle(operands)
    return draft.emit(draft.rng.choice(("Max", "Min")), operands, value)


def clipped(draft: Draft) -> Tensor | None:
    """Clip on one side or both, or an absolute value."""
    value = draft.pick()
    if draft.chance(0.3):
        return draft.emit("Abs", [value.name], value)
    low, high = draft.rng.choice((-2.0, 0.0, 0.25)), draft.rng.choice((0.5, 6.0))
    if draft.opset < 11:
        ends = {name: end for name, end in (("min", low), ("max", high)) if draft.chance(0.7)}
        return draft.emit("Clip", [value.name], value, **ends)
    if draft.opset < 12 and value.kind == DOUBLE:
        return None
    dtype = np.float64 if value.kind == DOUBLE else np.float32
    given = [draft.constant(np.array(end, dtype)) if draft.chance(0.7) else "" for end in (low, high)]
    return draft.emit("Clip", [value.name, *given], value)


def reduced(draft: Draft) -> Tensor | None:
    value = draft.pick(ranked(2))
    if value is None:
        return None
    operator = draft.rng.choice(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1"))
    first = 1 if value.batch else 0
    axes = sorted({draft.rng.randint(first, value.rank - 1) for _ in range(draft.rng.randint(1, 2))})
    keep = draft.chance(0.5)
    shape = tuple(1 if i in axes else n for i, n in enumerate(value.shape) if keep or i not in axes)
    attributes: dict[str, object] = {} if keep and draft.chance(0.5) else {"keepdims": int(keep)}
    named = [_written(draft, axis, value) for axis in axes]
    since = 13 if operator == "ReduceSum" else 18
    if draft.opset < since:
        return draft.emit(operator, [value.name], value, shape, axes=named, **attributes)
    return draft.emit(operator, [value.name, draft.integers(named)], value, shape, **attributes)


def max_pool(draft: Draft) -> Tensor | None:
    from .onnx_operators import windows

    value = draft.pick(lambda t: t.rank in (3, 4))
    if value is None or not value.batch:
        return None
    sizes = value.shape[2:]
    kernel = tuple(draft.rng.randint(1, min(3, n)) for n in sizes)
    found = windows(draft, sizes, kernel, dilated=draft.opset >= 10, pooling=True)
    if found is None:
        return None
    attributes, result = found
    return draft.emit("MaxPool", [value.name], value, (*value.shape[:2], *result), kernel_shape=kernel, **attributes)
