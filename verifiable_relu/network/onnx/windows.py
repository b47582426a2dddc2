"""Sliding windows in any number of dimensions: which inputs each output of a convolution or a pooling sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.onnx.call import Call

MAX_CELLS = 1 << 24
"""Most inputs that all windows together may see."""


@dataclass(frozen=True)
class Windows:
    """Windows that slide over a grid; every field has one entry for each of its dimensions.

    Attributes:
        sizes: of the grid.
        kernel: of the window.
        strides, dilations: of the window.
        begins, ends: cells of padding before and after the grid.
        outputs: how many windows there are.
    """

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def pads(self) -> tuple[int, ...]:
        """All begins, then all ends."""
        return (*self.begins, *self.ends)

    def cells(self, padded: bool = False) -> np.ndarray:
        """(windows, cells of a window) the number of each cell in the grid, −1 outside it.

        Args:
            padded: whether cells of the padding are told apart from those beyond it: −2 stands for them.

        Raises:
            UnsupportedError: if there are more than ``MAX_CELLS``.
        """
        if math.prod(self.outputs) * math.prod(self.kernel) > MAX_CELLS:
            raise UnsupportedError(f"windows with more than {MAX_CELLS} cells together")
        dims = len(self.sizes)
        found = np.zeros((1,) * 2 * dims, np.int64)
        inside, around = np.ones_like(found, np.bool_), np.ones_like(found, np.bool_)
        for d, size in enumerate(self.sizes):
            first = np.arange(self.outputs[d]) * self.strides[d] - self.begins[d]
            place = first[:, None] + np.arange(self.kernel[d]) * self.dilations[d]
            place = place.reshape(
                [n if axis in (d, dims + d) else 1 for axis, n in enumerate(self.outputs + self.kernel)]
            )
            found = found * size + place
            inside = inside & (place >= 0) & (place < size)
            around = around & (place < size + self.ends[d])
        numbers = np.where(inside, found, np.where(around & padded, -2, -1))
        return np.broadcast_to(numbers, self.outputs + self.kernel).reshape(math.prod(self.outputs), -1)


def windows(call: Call, sizes: Sequence[int], kernel: Sequence[int]) -> Windows:
    """The windows of a node over a grid, by its attributes.

    Args:
        call: the node.
        sizes: of the grid.
        kernel: of the window.

    Raises:
        InputError: if the attributes are malformed, contradict each other, or leave no window.
        UnsupportedError: for an unknown ``auto_pad``.
    """
    dims = len(sizes)
    strides, dilations = whole(call, "strides", dims), whole(call, "dilations", dims)
    if len(kernel) != dims or min(kernel) < 1:
        raise InputError(f"a window of {list(kernel)} for inputs of {list(sizes)}")
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    begins, ends = padding(call, sizes, reach, strides)
    outputs = []
    for size, span, stride, before, after in zip(sizes, reach, strides, begins, ends, strict=True):
        rest = size + before + after - span
        if rest < 0 and not (call.get("ceil_mode", 0) and rest > -stride):
            raise InputError(f"a window of {list(kernel)} is larger than the padded inputs {list(sizes)}")
        count = rest // stride + 1
        if call.get("ceil_mode", 0):
            count = -(-rest // stride) + 1
            # A window that would begin in the padding behind the inputs is left out.
            count -= (count - 1) * stride >= size + before
        outputs.append(count)
    if min(outputs) < 1:
        raise InputError(f"a window of {list(kernel)} has no place in inputs of {list(sizes)}")
    return Windows(tuple(sizes), tuple(kernel), strides, dilations, begins, ends, tuple(outputs))


def whole(call: Call, attribute: str, dims: int) -> tuple[int, ...]:
    """An attribute of one positive integer for each dimension, 1 by default.

    Raises:
        InputError: if it is anything else.
    """
    sizes = tuple(int(size) for size in call.get(attribute, (1,) * dims))
    if len(sizes) != dims or min(sizes) < 1:
        raise InputError(f"its attribute {attribute} = {list(sizes)}")
    return sizes


def padding(
    call: Call, sizes: Sequence[int], reach: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cells of padding before and after a grid.

    Raises:
        InputError: if pads are malformed, or stand beside an ``auto_pad`` that makes them.
        UnsupportedError: for an unknown ``auto_pad``.
    """
    dims = len(sizes)
    pads = tuple(int(size) for size in call.get("pads", (0,) * 2 * dims))
    if len(pads) != 2 * dims or min(pads) < 0:
        raise InputError(f"its attribute pads = {list(pads)}")
    mode = call.get("auto_pad", b"NOTSET")
    if mode == b"NOTSET":
        return pads[:dims], pads[dims:]
    if any(pads):
        raise InputError(f"its attribute pads = {list(pads)} beside auto_pad = {mode!r}")
    if mode == b"VALID":
        return (0,) * dims, (0,) * dims
    if mode not in (b"SAME_UPPER", b"SAME_LOWER"):
        raise UnsupportedError(f"its attribute auto_pad = {mode!r}")
    totals = [
        max(0, (-(-size // stride) - 1) * stride + span - size)
        for size, span, stride in zip(sizes, reach, strides, strict=True)
    ]
    less, more = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
    return (less, more) if mode == b"SAME_UPPER" else (more, less)
