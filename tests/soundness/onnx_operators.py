"""What a random ONNX file is made of: each function appends one operator, in a random form of the file's opset.

A function takes the file under construction (``Draft``), picks the values that the operator reads, appends its nodes
and returns the value it made, or None if no value fits. ``OPERATORS`` maps each to how often it is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .onnx_graphs import DOUBLE, Draft, Shape, Tensor
from .onnx_moves import (
    clipped,
    concat,
    extreme,
    gathered,
    max_pool,
    padded,
    reduced,
    repeated,
    sliced,
    split,
)
from .onnx_reshapes import alias, cast, flatten, ranked, reshape, squeeze, transpose, unread, unsqueeze

MOST = 60
"""Most values have at most so many entries, so that a file takes milliseconds."""


def broadcast(draft: Draft, shape: Shape) -> Shape:
    """A shape that broadcasts to ``shape``."""
    kept = shape[draft.rng.randint(0, len(shape)) :] if draft.chance(0.5) else shape
    return tuple(size if draft.chance(0.6) else 1 for size in kept)


# Affine operators


def with_constant(draft: Draft, value: Tensor | None = None) -> Tensor | None:
    """Add, Sub, Mul or Div of a value and a constant, on either side."""
    value = value or draft.pick()
    operator = draft.rng.choice(("Add", "Add", "Sub", "Sub", "Mul", "Mul", "Div"))
    shape = broadcast(draft, value.shape)
    result = value.shape
    if draft.chance(0.04) and math.prod(value.shape) <= 6:
        shape = (2, *value.shape) if not value.batch else (1, *value.shape)
        result = shape
    elif draft.chance(0.04) and value.rank and value.shape[-1] == 1:
        shape = (3,)
        result = (*value.shape[:-1], 3)
    number = draft.weight(shape, value.kind, positive=operator == "Div")
    if draft.chance(0.02 if operator == "Div" else 0.5):
        return draft.emit(operator, [number, value.name], value, result)
    return draft.emit(operator, [value.name, number], value, result)


def of_two(draft: Draft) -> Tensor | None:
    """The sum or difference of two values."""
    first = draft.pick()

    def fits(t: Tensor) -> bool:
        try:
            shape = np.broadcast_shapes(t.shape, first.shape)
        except ValueError:
            return False
        return t.kind == first.kind and t.batch == first.batch and (shape == first.shape or math.prod(shape) <= MOST)

    second = draft.rng.choice([t for t in draft.pool if fits(t)])
    shape = np.broadcast_shapes(first.shape, second.shape)
    if first.batch and len(shape) > min(first.rank, second.rank):
        return None
    return draft.emit(draft.rng.choice(("Add", "Add", "Sub")), [first.name, second.name], first, shape)


def product(draft: Draft) -> Tensor | None:
    """The product of two values, which no verifier here reads."""
    value = draft.pick()
    return draft.emit("Mul", [value.name, draft.rng.choice([value.name, value.name])], value)


def negated(draft: Draft, value: Tensor | None = None) -> Tensor | None:
    value = value or draft.pick()
    return draft.emit("Neg", [value.name], value)


def matmul(draft: Draft) -> Tensor | None:
    value = draft.pick(ranked(1))
    if value is None:
        return None
    size = draft.rng.randint(1, 5)
    if draft.chance(0.2) and value.rank >= 2 + value.batch:
        weight = draft.weight((size, value.shape[-2]), value.kind)
        return draft.emit("MatMul", [weight, value.name], value, (*value.shape[:-2], size, value.shape[-1]))
    if draft.chance(0.05):
        weight = draft.weight((value.shape[-1],), value.kind)
        return draft.emit("MatMul", [value.name, weight], value, value.shape[:-1])
    stacked = draft.chance(0.1) and value.rank >= 3
    front = (*(1 if draft.chance(0.5) else s for s in value.shape[1:-2]),) if stacked else ()
    weight = draft.weight((*front, value.shape[-1], size), value.kind)
    return draft.emit("MatMul", [value.name, weight], value, (*value.shape[:-1], size))


def gemm(draft: Draft) -> Tensor | None:
    value = draft.pick(ranked(2, 2))
    if value is None:
        return None
    attributes: dict[str, object] = {}
    for name in ("alpha", "beta"):
        if draft.chance(0.3):
            attributes[name] = draft.rng.choice((0.5, 2.0, -1.0, 0.25, 0.0, 1.0, 0.1))
    size = draft.rng.randint(1, 5)
    if draft.chance(0.12) and value.shape[0] == 1:  # the value transposed, on the left or as it is, on the right
        rows, columns = value.shape
        if draft.chance(0.5):
            attributes["transA"] = 1
            weight = draft.weight((1, size), value.kind)
            inputs, shape = [value.name, weight], (columns, size)
        else:
            weight = draft.weight((size, 1), value.kind)
            inputs, shape = [weight, value.name], (size, columns)
    elif draft.chance(0.05):  # the value in the place of C alone
        inner = draft.rng.randint(1, 3)
        sides = [draft.weight((value.shape[0], inner), value.kind), draft.weight((inner, value.shape[1]), value.kind)]
        return draft.emit("Gemm", [*sides, value.name], value, **attributes)
    else:
        rows, columns = value.shape
        if draft.chance(0.5):
            attributes["transB"] = 1
            weight = draft.weight((size, columns), value.kind)
        else:
            weight = draft.weight((columns, size), value.kind)
            if draft.chance(0.3):
                attributes["transB"] = 0
        inputs, shape = [value.name, weight], (rows, size)
    if draft.opset < 11 or draft.chance(0.7):
        same = [t.name for t in draft.pool if t.shape == shape and t.kind == value.kind]
        if same and draft.chance(0.1):
            inputs.append(draft.rng.choice(same))
        else:
            choices: list[Shape] = [(), (1,), (shape[1],), (1, shape[1]), shape, (shape[0], 1), (1, 1)]
            inputs.append(draft.weight(draft.rng.choice(choices), value.kind))
    elif draft.chance(0.5):
        inputs.append("")
    return draft.emit("Gemm", inputs, value, shape, **attributes)


def batch_normalization(draft: Draft) -> Tensor | None:
    value = draft.pick(lambda t: t.rank >= 2 and t.batch)
    if value is None:
        return None
    channels = (value.shape[1],)
    attributes: dict[str, object] = {}
    if draft.chance(0.5):
        attributes["epsilon"] = draft.rng.choice((0.25, 0.5, 1e-3, 0.0, 1e-5))
    if draft.chance(0.3):
        attributes["momentum"] = 0.5
    if draft.opset < 9 and draft.chance(0.3):
        attributes["spatial"] = 1
    if draft.opset >= 14 and draft.chance(0.3):
        attributes["training_mode"] = 0
    weights = [draft.weight(channels, value.kind, positive=i == 3) for i in range(4)]
    return draft.emit("BatchNormalization", [value.name, *weights], value, **attributes)


# Windows


def windows(
    draft: Draft, sizes: Shape, kernel: Shape, *, dilated: bool, pooling: bool
) -> tuple[dict[str, object], Shape] | None:
    """Strides, dilations and paddings in a random form, and the sizes that follow; None where nothing is left."""
    rank = len(sizes)
    strides = tuple(draft.rng.choice((1, 1, 2)) for _ in sizes)
    dilations = tuple(draft.rng.choice((1, 1, 2)) for _ in sizes) if dilated and draft.chance(0.3) else (1,) * rank
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    attributes: dict[str, object] = {"strides": strides} if max(strides) > 1 or draft.chance(0.3) else {}
    if max(dilations) > 1 or (dilated and draft.chance(0.1)):
        attributes["dilations"] = dilations
    mode = draft.rng.choices(("pads", "none", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"), (8, 4, 1, 2, 2, 2))[0]
    if mode.startswith("SAME"):
        if max(dilations) > 1 and draft.chance(0.9):
            return None  # onnxruntime does not run it
        attributes["auto_pad"] = mode
        return attributes, tuple(-(-n // s) for n, s in zip(sizes, strides, strict=True))
    if mode in ("NOTSET", "VALID"):
        attributes["auto_pad"] = mode
    pads = (0,) * 2 * rank
    if mode in ("pads", "NOTSET"):
        most = min(kernel) - 1 if pooling else 2
        pads = tuple(draft.rng.randint(0, most) for _ in range(2 * rank))
        attributes["pads"] = pads
    room = [n + pads[i] + pads[i + rank] - reach[i] for i, n in enumerate(sizes)]
    if min(room) < 0:
        return None
    return attributes, tuple(r // s + 1 for r, s in zip(room, strides, strict=True))


def convolution(draft: Draft) -> Tensor | None:
    value = draft.pick(lambda t: t.rank == 4 or (t.rank == 3 and draft.chance(0.1)))
    if value is None or (value.rank == 3 and not value.batch):
        return None
    _, channels, *sizes = value.shape
    groups = draft.rng.choice([g for g in (1, 1, channels) if channels % g == 0])
    made = groups * draft.rng.randint(1, 2)
    kernel = tuple(draft.rng.randint(1, min(3, n)) for n in sizes)
    found = windows(draft, tuple(sizes), kernel, dilated=True, pooling=False)
    if found is None or made * math.prod(found[1]) > MOST:
        return None
    if made * math.prod(found[1]) * (channels // groups) * math.prod(kernel) > 20 * MOST:
        return None
    attributes, result = found
    if groups > 1 or draft.chance(0.2):
        attributes["group"] = groups
    if draft.chance(0.6):
        attributes["kernel_shape"] = kernel
    inputs = [value.name, draft.weight((made, channels // groups, *kernel), value.kind)]
    if draft.chance(0.6):
        inputs.append(draft.weight((made,), value.kind))
    elif draft.chance(0.3):
        inputs.append("")
    return draft.emit("Conv", inputs, value, (value.shape[0], made, *result), **attributes)


def average_pool(draft: Draft) -> Tensor | None:
    value = draft.pick(ranked(4, 4))
    if value is None:
        return None
    if draft.chance(0.3):
        return draft.emit("GlobalAveragePool", [value.name], value, (*value.shape[:2], 1, 1))
    sizes = value.shape[2:]
    kernel = tuple(draft.rng.randint(1, min(3, n)) for n in sizes)
    found = windows(draft, sizes, kernel, dilated=draft.opset >= 19 and draft.chance(0.3), pooling=True)
    if found is None:
        return None
    attributes, result = found
    if draft.chance(0.4):
        attributes["count_include_pad"] = draft.rng.choice((0, 1))
    if draft.opset >= 10 and draft.chance(0.1):
        attributes["ceil_mode"] = 0
    return draft.emit(
        "AveragePool", [value.name], value, (*value.shape[:2], *result), kernel_shape=kernel, **attributes
    )


# Activations


def relu(draft: Draft, value: Tensor | None = None) -> Tensor | None:
    value = value or draft.pick()
    return draft.emit("Relu", [value.name], value)


def leaky(draft: Draft, value: Tensor | None = None) -> Tensor | None:
    value = value or draft.pick()
    attributes = {}
    if draft.chance(0.8):
        attributes["alpha"] = draft.rng.choice((0.125, 0.5, 0.01, 0.0, 1.0, -0.5, 2.0, -3.0, 512.0, -1024.0, 3e7))
    return draft.emit("LeakyRelu", [value.name], value, **attributes)


def prelu(draft: Draft, value: Tensor | None = None) -> Tensor | None:
    value = value or draft.pick()
    return draft.emit("PRelu", [value.name, draft.weight(broadcast(draft, value.shape), value.kind)], value)


def smooth(draft: Draft) -> Tensor | None:
    value = draft.pick()
    operators = ["Sigmoid", "Tanh"] + (["Gelu", "Gelu"] if draft.opset >= 20 else [])
    operator = draft.rng.choice(operators)
    attributes = {"approximate": "none"} if operator == "Gelu" and draft.chance(0.3) else {}
    return draft.emit(operator, [value.name], value, **attributes)


def spelt_gelu(draft: Draft, value: Tensor | None = None) -> Tensor | None:
    """GELU(λx)·c as exporters spell it, by Erf: its factors and terms in any order, with second names in between."""
    value = value or draft.pick()
    if draft.opset < 9:
        return None

    def number(entry: float) -> str:
        shape: Shape = (1,) * draft.rng.randint(0, value.rank)
        return draft.constant(np.full(shape, entry, dtype=np.float64 if value.kind == DOUBLE else np.float32))

    def both(operator: str, *names: str) -> str:
        names = names[::-1] if draft.chance(0.5) else names
        return renamed(draft.node(operator, names))

    def renamed(name: str) -> str:
        return draft.node("Identity", [name]) if draft.chance(0.05) else name

    inner = renamed(value.name)
    if draft.chance(0.3):
        inner = both("Mul", inner, number(draft.rng.choice((0.5, 2.0, 4.0))))
    scaled = (
        renamed(draft.node("Div", [inner, number(math.sqrt(2))]))
        if draft.chance(0.5)
        else both("Mul", inner, number(math.sqrt(0.5)))
    )
    if draft.chance(0.1):
        outer, half = value.name, 0.5  # another factor than what the Erf is of, unless λ is 1
    else:
        outer, half = inner, draft.rng.choice((0.5, 0.5, 0.5, 1.0, 0.25))
    term = both("Add", renamed(draft.node("Erf", [scaled])), number(1.0))
    factors = [outer, term, number(half)]
    draft.rng.shuffle(factors)
    first = both("Mul", *factors[:2])
    if draft.chance(0.2):
        draft.keep(draft.rng.choice((inner, scaled, first)), value, value.shape)
    return draft.keep(both("Mul", first, factors[2]), value, value.shape)


# Files


def branches(draft: Draft) -> Tensor | None:
    """A value, and what operators make of a second name of it, joined again: nothing may be merged into the value."""
    value = None
    if draft.chance(0.6):
        value = draft.rng.choice((with_constant, with_constant, matmul, gemm, convolution, batch_normalization))(draft)
    value = value or draft.pick()
    other = alias(draft, value) if draft.chance(0.75) else value
    for _ in range(draft.rng.randint(1, 3)):
        step = draft.rng.choices(
            (with_constant, negated, leaky, prelu, relu, alias, spelt_gelu), (8, 1, 1, 1, 1, 2, 1)
        )[0]
        other = step(draft, other) if other is not None else None
    if other is None or other.shape != value.shape:
        return other
    first, second = (value, other) if draft.chance(0.5) else (other, value)
    if draft.chance(0.3):
        first = alias(draft, first) or first
    return draft.emit(draft.rng.choice(("Add", "Sub")), [first.name, second.name], value)


OPERATORS: dict[Callable[[Draft], Tensor | None], float] = {
    with_constant: 6, of_two: 4, product: 0.03, negated: 0.7, matmul: 3, gemm: 3, batch_normalization: 1,
    convolution: 4, average_pool: 1.5, relu: 2, leaky: 1, prelu: 1, smooth: 0.8, spelt_gelu: 0.6,
    alias: 3, branches: 4, cast: 0.15, reshape: 0.7, flatten: 0.6, squeeze: 0.5, unsqueeze: 0.6, transpose: 0.8,
    unread: 0.04, concat: 0.6, sliced: 0.4, gathered: 0.4, padded: 0.4, repeated: 0.3, split: 0.4, extreme: 0.6,
    clipped: 0.6, reduced: 0.6, max_pool: 0.8,
}  # fmt: skip


def combined(draft: Draft) -> Tensor:
    """The graph's output: mostly one on which much of what was made depends, sometimes an inner value."""
    last = draft.pool[-1]
    if last is draft.input:
        last = draft.emit("Relu", [last.name], last)
    loose = [t for t in draft.pool if not draft.read[t.name] and t is not last]
    for value in loose:
        if draft.chance(0.3):
            continue  # an unused node
        joined = joinable(draft, value, last)
        if joined is not None:
            last = draft.emit(draft.rng.choice(("Add", "Sub")), [joined.name, last.name], last)
    if draft.chance(0.15):
        last = alias(draft) or last
    if draft.chance(0.1):  # an inner value, which is read again
        return draft.rng.choice([t for t in draft.pool if t is not draft.input])
    if draft.chance(0.15):  # the output is read again, by unused nodes
        other = alias(draft, last) or last
        draft.rng.choice((with_constant, relu, negated))(draft, other)
    return last


def joinable(draft: Draft, value: Tensor, other: Tensor) -> Tensor | None:
    """The value, or a linear image of it, in the shape of another; None where that takes too many steps."""
    if value.kind != other.kind or value.batch != other.batch:
        return None
    if value.shape == other.shape:
        return value
    if math.prod(value.shape) * math.prod(other.shape) > 10 * MOST:
        return None
    size, front = math.prod(other.shape), (1,) if value.batch else ()
    flat = draft.reshape(value, (*front, math.prod(value.shape))) if value.rank != len(front) + 1 else value
    weight = draft.weight((flat.shape[-1], size), value.kind)
    image = draft.emit("MatMul", [flat.name, weight], flat, (*front, size))
    return image if image.shape == other.shape else draft.reshape(image, other.shape)
