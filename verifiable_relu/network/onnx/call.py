"""One ONNX node with its inputs looked up: what converters are handed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.build import Builder
from verifiable_relu.network.nodes import Shape

_FLOATS = (np.float16, np.float32, np.float64)

_LARGEST_WHOLE = 2.0**53


@dataclass(frozen=True)
class Value:
    """A tensor of the file that is computed from the input.

    Attributes:
        index: the node of the network whose value it is.
        leading: whether the tensor's ONNX shape has a leading 1, the batch axis, that the node's shape leaves out.
    """

    index: int
    leading: bool


@dataclass(frozen=True)
class Call:
    """One ONNX node with its inputs looked up, and the network under construction.

    Attributes:
        build: where the nodes that it stands for are added.
        op: the operator.
        version: of the operator: the opset in which its present definition began.
        name: what to call the node.
        inputs: constants, values, or None where an optional input is left out.
        attributes: by name.
        node: as the file has it.
        opset: the version of the standard's operators.
    """

    build: Builder
    op: str
    version: int
    name: str
    inputs: tuple[np.ndarray | Value | None, ...]
    attributes: dict[str, Any]
    node: onnx.NodeProto
    opset: int

    def get(self, attribute: str, default: Any) -> Any:
        """An attribute or its default."""
        return self.attributes.get(attribute, default)

    def value(self, position: int = 0) -> Value:
        """An input that must be computed.

        Raises:
            UnsupportedError: if it is a constant or left out.
        """
        found = self.inputs[position] if position < len(self.inputs) else None
        if not isinstance(found, Value):
            raise UnsupportedError(f"its input {position} is a constant")
        return found

    def constant(self, position: int) -> np.ndarray:
        """An input that must be constant.

        Raises:
            UnsupportedError: if it is computed or left out.
        """
        found = self.optional(position)
        if found is None:
            raise UnsupportedError(f"its input {position} is missing")
        return found

    def given(self) -> list[Result]:
        """All inputs.

        Raises:
            UnsupportedError: if one is left out.
        """
        found = [value for value in self.inputs if value is not None]
        if len(found) < len(self.inputs):
            raise UnsupportedError("an input is missing")
        return found

    def optional(self, position: int) -> np.ndarray | None:
        """An input that must be constant if it is there.

        Raises:
            UnsupportedError: if it is computed.
        """
        found = self.inputs[position] if position < len(self.inputs) else None
        if isinstance(found, Value):
            raise UnsupportedError(f"its input {position} is not a constant")
        return found

    def refuse(self, **expected: Any) -> None:
        """Refuse attributes that are there with another value than the one expected.

        Raises:
            UnsupportedError: naming the attribute.
        """
        for attribute, value in expected.items():
            if (found := self.get(attribute, value)) != value:
                raise UnsupportedError(f"its attribute {attribute} = {found}")

    def shape(self, given: Value | np.ndarray) -> Shape:
        """The ONNX shape of an input, with a batch of 1."""
        return (1,) * given.leading + self.build.shape(given.index) if isinstance(given, Value) else given.shape

    def reshaped(self, x: Value, shape: Sequence[int]) -> Value:
        """x under another ONNX shape; a leading 1 of two or more axes is the batch axis."""
        leading = len(shape) >= 2 and shape[0] == 1
        return Value(self.build.reshape(x.index, tuple(shape[leading:]), self.name), leading)

    def sparse(
        self,
        x: int,
        index: np.ndarray,
        weight: np.ndarray,
        shape: Sequence[int],
        bias: np.ndarray | None = None,
        error: float = 0.0,
    ) -> Value:
        """Σ_k weight[i, k]·x[index[i, k]] + bias[i] under an ONNX shape.

        Args:
            x: the node whose elements are summed.
            index: (outputs, terms), or any shape with as many elements, of whole numbers.
            weight: like ``index``.
            shape: of the result.
            bias: (outputs,).
            error: the relative error of the weights.

        Raises:
            UnsupportedError: for a result without elements.
        """
        if not math.prod(shape):
            raise UnsupportedError("a computed tensor without elements")
        rows, leading = math.prod(shape), len(shape) >= 2 and shape[0] == 1
        places = torch.from_numpy(np.array(index, np.int64).reshape(rows, -1))
        numbers, added = tensor(weight.reshape(rows, -1)), None if bias is None else tensor(bias)
        found = self.build.sparse(x, places, numbers, added, tuple(shape[leading:]), self.name, error)
        return Value(found, leading)

    def beside(self, constant: np.ndarray, x: Value) -> Tensor:
        """A constant that is broadcast against x, without the batch axis.

        Raises:
            UnsupportedError: if broadcasting would enlarge x.
        """
        shape = self.shape(x)
        if len(constant.shape) > len(shape) or any(
            a not in (1, b) for a, b in zip(reversed(constant.shape), reversed(shape), strict=False)
        ):
            raise UnsupportedError(f"broadcasts a value of shape {shape} against a constant of shape {constant.shape}")
        return tensor(constant[0] if x.leading and constant.ndim == len(shape) else constant)


def tensor(array: np.ndarray) -> Tensor:
    """A parameter as a tensor: float32 and float64 keep their bits, float16 and whole numbers widen.

    Raises:
        UnsupportedError: if it is of another type, or a whole number beyond those that float64 holds.
    """
    if array.dtype.kind in "iub":
        wide = array.astype(np.float64)
        if wide.size and float(np.abs(wide).max()) > _LARGEST_WHOLE:
            raise UnsupportedError("a whole number of more than 53 bits")
        single = wide.astype(np.float32)
        return torch.from_numpy(single if bool((single == wide).all()) else wide)
    if array.dtype not in _FLOATS:
        raise UnsupportedError(f"a parameter of type {array.dtype}")
    return torch.from_numpy(np.array(array, dtype=np.float64 if array.dtype == np.float64 else np.float32))


Result = Value | np.ndarray
"""What a name of the file stands for."""

Converter = Callable[[Call], Result | Sequence[Result | None]]
CONVERTERS: dict[tuple[str, int], Converter] = {}
"""What reads a node, by operator and version of the operator: its output, or its outputs in order.

None stands for an output that is not read; a node that takes it is refused.
"""


GROUPS = ("affine", "pieces", "maxima", "steps", "smooth", "products")
"""What operators become: affine maps alone, or also piecewise-linear activations, maxima written with ReLUs,
functions that jump, smooth functions of one variable, or products of computed values."""

GROUP: dict[str, str] = {}
"""The group of each operator."""


def converts(operator: str, *versions: int, group: str = GROUPS[0]) -> Callable[[Converter], Converter]:
    """Register what reads an operator.

    Args:
        operator: of the standard domain, or of ai.onnx.ml, which share no names; of another domain with that before it.
        versions: the opsets in which a definition of the operator began that the converter reads. An operator in
            any other version is refused: its meaning may differ.
        group: what it becomes, of ``GROUPS``.
    """
    assert group in GROUPS

    def register(converter: Converter) -> Converter:
        for version in versions:
            assert (operator, version) not in CONVERTERS
            CONVERTERS[operator, version] = converter
            GROUP[operator] = group
        return converter

    return register
