"""The rational evaluator's operators that move numbers, reduce axes, and take maxima; magnitudes are sums of all."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np


class Moves:
    """What ``onnx_exact.Evaluator`` computes with, and these operators."""

    absolute: bool
    opset: int
    real: Callable[[Any], Any]
    windows: Callable[..., tuple[Any, ...]]

    def _extreme(self, arrays: list[np.ndarray], largest: bool) -> np.ndarray:
        pick = (lambda a, b: a + b) if self.absolute else max if largest else min
        return functools.reduce(np.frompyfunc(pick, 2, 1), arrays)

    def op_Abs(self, _: dict, x: Any) -> Any:
        return abs(x.array)

    def op_Max(self, _: dict, *parts: Any) -> Any:
        return self._extreme([part.array for part in parts], True)

    def op_Min(self, _: dict, *parts: Any) -> Any:
        return self._extreme([part.array for part in parts], False)

    def op_Tile(self, _: dict, x: Any, times: Any) -> Any:
        return np.tile(x.array, tuple(times.array))

    def op_Pad(self, attributes: dict, x: Any, pads: Any = None, value: Any = None) -> Any:
        sizes = attributes["pads"] if pads is None else pads.array.tolist()
        filled = self.real(attributes.get("value", 0.0)) if value is None else value.array.item()
        rank = x.array.ndim
        widths = [(sizes[i], sizes[i + rank]) for i in range(rank)]
        mode = attributes.get("mode", "constant")
        numbers = np.arange(x.array.size).reshape(x.array.shape)
        added = [(max(before, 0), max(after, 0)) for before, after in widths]
        places = np.pad(numbers, added, mode, **({"constant_values": -1} if mode == "constant" else {}))
        cut = zip(widths, places.shape, strict=True)
        places = places[tuple(slice(max(-before, 0), size - max(-after, 0)) for (before, after), size in cut)]
        made = np.empty(places.shape, dtype=object)
        flat = x.array.reshape(-1)
        for at in np.ndindex(*places.shape):
            made[at] = filled if places[at] < 0 else flat[places[at]]
        return made

    def op_Split(self, attributes: dict, x: Any, sizes: Any = None) -> Any:
        parts = attributes["split"] if sizes is None else sizes.array.tolist()
        return np.split(x.array, np.cumsum(parts)[:-1], axis=attributes.get("axis", 0))

    def _reduced(self, attributes: dict, x: Any, axes: Any, of: Callable[[list[Any]], Any]) -> Any:
        named = attributes.get("axes") if axes is None else axes.array.tolist()
        rank = x.array.ndim
        along = sorted({axis % rank for axis in named}) if named else list(range(rank))
        kept = [axis for axis in range(rank) if axis not in along]
        rows = x.array.transpose(kept + along).reshape(math.prod(x.array.shape[axis] for axis in kept), -1)
        made = np.empty(len(rows), dtype=object)
        for place, row in enumerate(rows):
            made[place] = of(list(row))
        shape = [1 if axis in along else size for axis, size in enumerate(x.array.shape)]
        if not attributes.get("keepdims", 1):
            shape = [x.array.shape[axis] for axis in kept]
        return made.reshape(shape)

    def op_ReduceSum(self, attributes: dict, x: Any, axes: Any = None) -> Any:
        return self._reduced(attributes, x, axes, sum)

    def op_ReduceMean(self, attributes: dict, x: Any, axes: Any = None) -> Any:
        return self._reduced(attributes, x, axes, lambda row: sum(row) / len(row))

    def op_ReduceL1(self, attributes: dict, x: Any, axes: Any = None) -> Any:
        return self._reduced(attributes, x, axes, lambda row: sum(abs(v) for v in row))

    def op_ReduceMax(self, attributes: dict, x: Any, axes: Any = None) -> Any:
        return self._reduced(attributes, x, axes, sum if self.absolute else max)

    def op_ReduceMin(self, attributes: dict, x: Any, axes: Any = None) -> Any:
        return self._reduced(attributes, x, axes, sum if self.absolute else min)

    def op_MaxPool(self, attributes: dict, x: Any) -> Any:
        kernel = tuple(attributes["kernel_shape"])
        shape = x.array.shape[2:]
        strides, dilations, first, _, sizes = self.windows(attributes, shape, kernel)
        made = np.empty((*x.array.shape[:2], *sizes), dtype=object)
        for place in np.ndindex(*sizes):
            seen = []
            for offset in np.ndindex(*kernel):
                at = [p * s - f + o * d for p, s, f, o, d in zip(place, strides, first, offset, dilations, strict=True)]
                if all(0 <= a < n for a, n in zip(at, shape, strict=True)):
                    seen.append(x.array[(slice(None), slice(None), *at)])
            made[(slice(None), slice(None), *place)] = self._extreme(seen, True)
        return made
