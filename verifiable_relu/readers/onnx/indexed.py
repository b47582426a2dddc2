"""Computed whole numbers that say where something is, or where it goes: tables of what depends on them alone.

The elements that a Slice with a computed start takes are one of finitely many choices, since ends beyond an axis count
as the axis' own; a Gather beyond an axis has no result. So what such operators make of constants is a table, with an
axis for each computed number; what comes after is computed choice by choice, once for each that differs. Where a table
meets a computed tensor it becomes the sum, over what it can be, of that times whether the numbers say so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.readers.builder import Value
from verifiable_relu.readers.derived import exact_sum
from verifiable_relu.readers.onnx.arithmetic import added, times
from verifiable_relu.readers.onnx.call import Call, Result
from verifiable_relu.readers.onnx.constants import Constant, numbered_places
from verifiable_relu.readers.onnx.decisions import is_zero
from verifiable_relu.readers.onnx.functions import bounded

INDEXED = {"Gather": (1,), "GatherND": (1,), "ScatterND": (1,), "Slice": (1, 2)}
"""The inputs that say where, by operator."""

_KEEPS = {"Cast", "Concat", "Identity", "Reshape", "Squeeze", "Unsqueeze"}

_CHOICES = 1 << 16
"""Most choices of the computed numbers together."""

_WEIGHTS = 1 << 24
"""Most weights of a sum over what a table can be."""


@dataclass(frozen=True, eq=False)
class Whole:
    """Whole numbers of which each is a computed one plus a constant, or a constant.

    Attributes:
        key: the op of each; −1 for a constant. An op with such a number has one element.
        offset: the constants, of the same shape.
    """

    key: np.ndarray
    offset: np.ndarray

    @staticmethod
    def of(given: Whole | np.ndarray) -> Whole:
        """Return constants as such numbers."""
        return given if isinstance(given, Whole) else Whole(np.full(given.shape, -1), given)


def followed(node: onnx.NodeProto, inputs: Sequence[Any], opset: int) -> Whole | None:
    """Return what a node makes of whole numbers; None where that is not known to be such numbers."""
    if not all(isinstance(each, Whole) or (isinstance(each, np.ndarray) and each.dtype.kind == "i") for each in inputs):
        return None
    given = [Whole.of(each) for each in inputs]
    if node.op_type in ("Add", "Sub") and (given[1].key < 0).all():
        sign = 1 if node.op_type == "Add" else -1
        offset = given[0].offset + sign * given[1].offset
        return Whole(np.broadcast_to(given[0].key, offset.shape), offset)
    if node.op_type not in _KEEPS:
        return None
    moved = [number == 0 or node.op_type == "Concat" for number in range(len(given))]
    inputs = [each.key if moves else each.offset for each, moves in zip(given, moved, strict=True)]
    (at,) = numbered_places(node, inputs, moved, opset)
    sources = [each for each, moves in zip(given, moved, strict=True) if moves]
    keys, offsets = (np.concatenate([getattr(m, name).reshape(-1) for m in sources]) for name in ("key", "offset"))
    return Whole(keys[at - 1], offsets[at - 1])


@dataclass(frozen=True, eq=False)
class ValueTable:
    """A tensor that depends on a few computed whole numbers alone.

    Attributes:
        keys: the ops of these numbers, each with the least and the largest number that the table tells apart: beyond
            these it is what it is there.
        arrays: what the tensor can be.
        which: of all choices of the numbers the array, by its place; an axis for each number.
    """

    keys: dict[int, tuple[int, int]]
    arrays: list[np.ndarray]
    which: np.ndarray

    @staticmethod
    def of(whole: Whole, sizes: Sequence[int], ends: bool) -> ValueTable:
        """Return numbers that say where in axes of these sizes; ``ends``: what is beyond an axis counts as its end."""
        reach = max(sizes) + int(np.abs(whole.offset).max(initial=0)) + 1
        keys = {int(key): (-reach, reach) for key in np.unique(whole.key[whole.key >= 0])}
        domain = _domain(keys)
        arrays, size = [], np.array(sizes) if len(sizes) > 1 else sizes[0]
        for values in itertools.product(range(-reach, reach + 1), repeat=len(keys)):
            array = whole.offset + sum(v * (whole.key == k) for k, v in zip(keys, values, strict=True))
            # There is no result beyond the axis: any will do.
            arrays.append(array if ends else array.clip(-size, size - 1))
        return ValueTable(keys, arrays, np.arange(len(arrays)).reshape(domain))

    def along(self, keys: dict[int, tuple[int, int]]) -> np.ndarray:
        """Return ``which`` for choices of these numbers, its own among them, of ranges that are no smaller."""
        found = self.which
        for axis, (key, (low, high)) in enumerate(self.keys.items()):
            least, most = keys[key]
            found = found.take((np.arange(least, most + 1).clip(low, high) - low), axis)
        order = [list(self.keys).index(key) for key in keys if key in self.keys]
        missing = [axis for axis, key in enumerate(keys) if key not in self.keys]
        return np.broadcast_to(np.expand_dims(found.transpose(order), missing), _domain(keys))


def _domain(keys: dict[int, tuple[int, int]]) -> tuple[int, ...]:
    """Return how many numbers each of some keys can be."""
    domain = tuple(high - low + 1 for low, high in keys.values())
    if math.prod(domain) > _CHOICES:
        raise UnsupportedError(f"depends on computed whole numbers, in more than {_CHOICES} ways")
    return domain


def _choices(inputs: Sequence[Any]) -> tuple[dict[int, tuple[int, int]], list[list[Any]], np.ndarray]:
    """Return the numbers on which some inputs depend, with ranges; the inputs as they can be; and which when."""
    tables = [each for each in inputs if isinstance(each, ValueTable)]
    keys: dict[int, tuple[int, int]] = {}
    for key, (low, high) in itertools.chain.from_iterable(table.keys.items() for table in tables):
        least, most = keys.get(key, (low, high))
        keys[key] = min(low, least), max(high, most)
    domain = _domain(keys)
    every = np.stack([table.along(keys).reshape(-1) for table in tables])
    different, which = np.unique(every, axis=1, return_inverse=True)
    found = []
    for chosen in different.T:
        arrays = iter([table.arrays[k] for table, k in zip(tables, chosen, strict=True)])
        found.append([next(arrays) if isinstance(each, ValueTable) else each for each in inputs])
    return keys, found, which.reshape(domain)


def computed(
    inputs: Sequence[Any], compute: Callable[[list[Any]], Sequence[Constant]]
) -> list[ValueTable | np.ndarray]:
    """Return the results of a function of constants and tables: tables, or constants where all are alike."""
    keys, cases, which = _choices(inputs)
    results = [list(compute(case)) for case in cases]
    made: list[ValueTable | np.ndarray] = []
    for mine in zip(*results, strict=True):
        numbers: dict[tuple[Any, ...], int] = {}
        arrays, places = [], []
        for array in mine:
            if not isinstance(array, np.ndarray):
                raise UnsupportedError("computes numbers that no float64 number is, from computed whole numbers")
            content = (str(array.dtype), array.shape, array.tobytes())
            if content not in numbers:
                arrays.append(array)
            places.append(numbers.setdefault(content, len(numbers)))
        made.append(arrays[0] if len(arrays) == 1 else ValueTable(keys, arrays, np.array(places)[which]))
    return made


def selected(call: Call, table: ValueTable) -> Value:
    """Return a table as a computed tensor: its most frequent array, and the difference for every other choice made.

    Where float64 rounds a difference, it is the sum over all choices of what it is, if that is made.
    """
    shape = table.arrays[0].shape
    if any(array.shape != shape for array in table.arrays):
        raise UnsupportedError("a shape that depends on computed numbers")
    wide = [array.reshape(-1).astype(np.float64) for array in table.arrays]
    if any((many.astype(a.dtype) != a.reshape(-1)).any() for many, a in zip(wide, table.arrays, strict=True)):
        raise UnsupportedError("a table of whole numbers that float64 does not hold")
    usual = int(np.bincount(table.which.reshape(-1)).argmax())
    parts, base = [exact_sum(array, -wide[usual]) for array in wide], wide[usual]
    if any(part is None for part in parts):
        usual, parts, base = -1, [*wide], np.zeros_like(base)
    # Numbers that never make a difference are one choice.
    small, hits = table.which, []
    for axis, (key, (low, high)) in enumerate(table.keys.items()):
        _, first, same = np.unique(
            np.moveaxis(small, axis, 0).reshape(small.shape[axis], -1), axis=0, return_index=True, return_inverse=True
        )
        small = small.take(first, axis)
        hits.append(_hits(call, key, low, high, same.reshape(-1), len(first)))
    cells = np.argwhere(small != usual)
    moved = [call.build.moved(hit, cells[:, axis]) for axis, hit in enumerate(hits)]
    total = call.build.sum(*moved)
    if len(hits) > 1:
        total = call.build.relu(added(call, total, np.asarray(1 - len(hits), np.float32)))
    arrays = np.stack([part for k in small[tuple(cells.T)] if (part := parts[k]) is not None], 1)
    terms = int((arrays != 0).sum(1).max())
    if terms * len(arrays) > _WEIGHTS:
        raise UnsupportedError(f"a choice among {len(cells)} tensors of {len(arrays)} numbers")
    place = np.argsort(arrays == 0, axis=1, kind="stable")[:, :terms]
    return call.build.sparse(total, place, np.take_along_axis(arrays, place, 1), shape, base)


def _hits(call: Call, key: int, low: int, high: int, same: np.ndarray, count: int) -> Value:
    """Return for each of some sets whether it has a computed whole number, (count,).

    The numbers from ``low`` to ``high``, whose ends count for what is beyond, are in the sets ``same``, (range,).
    """
    within = bounded(call, bounded(call, Value(key, (1,)), float(low), 1), float(high), -1)
    size = high - low + 1
    each = call.build.moved(within, np.zeros(size, np.int64))
    equal = is_zero(call, added(call, each, -np.arange(low, high + 1).astype(np.float32)))
    terms = int(np.bincount(same).max())
    place, weight = np.zeros((count, terms), np.int64), np.zeros((count, terms), np.float32)
    for number in range(count):
        mine = np.flatnonzero(same == number)
        place[number, : len(mine)], weight[number, : len(mine)] = mine, 1
    return call.build.sparse(equal, place, weight, (count,))


def chosen(call: Call, inputs: Sequence[Any], convert: Callable[[list[Any]], Result]) -> Value:
    """Return the sum, over what some inputs can be, of what a node makes of these times whether they are that."""
    keys, cases, which = _choices(inputs)
    hit = selected(call, ValueTable(keys, list(np.eye(len(cases), dtype=np.float32)), which))
    parts = []
    for number, case in enumerate(cases):
        made = convert(case)
        parts.append(times(call, call.build.moved(hit, np.full(made.shape, number)), made))
    return call.build.sum(*parts)
