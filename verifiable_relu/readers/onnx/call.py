"""One ONNX node with its inputs looked up, and the table of converters by operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.readers.builder import OpBuilder, Value, tensor

Result = Value | np.ndarray
"""A tensor of the file: computed from the input, or constant."""


@dataclass(frozen=True)
class NodeCall:
    """One ONNX node with its inputs looked up, and the network under construction.

    Attributes:
        build: the builder to which the node's ops are added, under its name.
        op, version: the operator, and the opset in which its present definition began.
        inputs: constants, values, or None where an optional input is left out.
        attributes: by name.
        node, opset: as the file has it, and the version of the standard's operators.
    """

    build: OpBuilder
    op: str
    version: int
    inputs: tuple[Result | None, ...]
    attributes: dict[str, Any]
    node: onnx.NodeProto
    opset: int

    def get(self, attribute: str, default: Any) -> Any:
        """Return an attribute or its default."""
        return self.attributes.get(attribute, default)

    def value(self, position: int = 0) -> Value:
        """Return an input that must be a computed value, not a constant."""
        found = self.inputs[position] if position < len(self.inputs) else None
        if not isinstance(found, Value):
            raise UnsupportedError(f"its input {position} is a constant")
        return found

    def optional(self, position: int) -> np.ndarray | None:
        """Return an input that must be constant if it is there."""
        found = self.inputs[position] if position < len(self.inputs) else None
        if isinstance(found, Value):
            raise UnsupportedError(f"its input {position} is not a constant")
        return found

    def constant(self, position: int) -> np.ndarray:
        """Return an input that must be constant."""
        if (found := self.optional(position)) is None:
            raise UnsupportedError(f"its input {position} is missing")
        return found

    def refuse(self, **expected: Any) -> None:
        """Refuse attributes that are present with another value than the expected one."""
        for attribute, value in expected.items():
            self.choice(attribute, value, {value: None})

    def choice(self, attribute: str, default: Any, known: Mapping[Any, Any]) -> Any:
        """Return the meaning in ``known`` of an attribute's value; other values are refused."""
        found = self.get(attribute, default)
        if found not in known:
            shown = found.decode(errors="replace") if isinstance(found, bytes) else found
            raise UnsupportedError(f"its attribute {attribute} = {shown}")
        return known[found]

    def as_operator(
        self, operator: str, version: int, inputs: Sequence[Result | None], attributes: dict[str, Any] | None = None
    ) -> Value:
        """Return the one result of another operator of the standard, by default with the node's attributes."""
        node = onnx.helper.make_node(operator, self.node.input, self.node.output)
        node.attribute.extend(self.node.attribute)
        given = self.attributes if attributes is None else attributes
        made = replace(self, op=operator, version=version, inputs=tuple(inputs), attributes=given, node=node)
        found = CONVERTERS[operator, version](made)
        (value,) = found if isinstance(found, Sequence) else (found,)
        assert isinstance(value, Value)
        return value


def axis_of(axis: int, rank: int) -> int:
    """Return an axis as a number from 0 on."""
    if not -rank <= axis < rank:
        raise InputError(f"there is no axis {axis} among {rank} axes")
    return axis % rank


def operands(build: OpBuilder, left: Result | None, right: Result | None) -> tuple[Value | Tensor, Value | Tensor]:
    """Return two operands, at least one of them computed; computed ones get the shape of the result."""
    if left is None or right is None:
        raise UnsupportedError("an operand is missing")
    try:
        shape = np.broadcast_shapes(left.shape, right.shape)
    except ValueError:
        raise InputError(f"shapes {left.shape} and {right.shape} do not broadcast") from None
    x, y = (build.broadcast(v, shape) if isinstance(v, Value) else tensor(v) for v in (left, right))
    return x, y


RUNTIME = "com.microsoft"
"""The domain of onnxruntime's own operators."""

Converter = Callable[[NodeCall], Result | Sequence[Result | None]]
CONVERTERS: dict[tuple[str, int], Converter] = {}
"""By operator and its version, what reads a node: it gives the output, or a list with None for those not read."""

GROUPS = ("affine", "pieces", "maxima", "steps", "smooth", "products")
"""Groups of operators by their ops: affine maps alone, or also piecewise-linear activations, maxima, functions that
jump, smooth functions of one variable, or products of computed values."""

GROUP: dict[str, str] = {}
"""The group of each operator."""


def converts(operator: str, *versions: int, group: str = GROUPS[0]) -> Callable[[Converter], Converter]:
    """Register the converter of an operator, and what the operator becomes (``GROUPS``).

    Args:
        operator: of the standard domain, or of ai.onnx.ml, which share no names; of another domain with that before it.
        versions: the opsets in which a definition of the operator began that the converter reads; others are refused.
    """
    assert group in GROUPS

    def register(converter: Converter) -> Converter:
        for version in versions:
            assert (operator, version) not in CONVERTERS
            CONVERTERS[operator, version] = converter
            GROUP[operator] = group
        return converter

    return register


def operator_of(node: onnx.NodeProto) -> tuple[str, str]:
    """Return the domain of a node's operator, and the operator's name in ``CONVERTERS``."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    return domain, f"{domain}.{node.op_type}" if domain == RUNTIME else node.op_type


def converter_of(node: onnx.NodeProto, opset: int) -> tuple[Converter, int]:
    """Return the converter of a node and its operator's version, for an opset of its domain."""
    domain, operator = operator_of(node)
    try:
        # The standard knows nothing of the runtime's own operators, which have one version.
        version = 1 if domain == RUNTIME else onnx.defs.get_schema(node.op_type, opset, domain).since_version
    except onnx.defs.SchemaError:
        raise UnsupportedError(f"no operator of opset {opset}") from None
    if (operator, version) not in CONVERTERS:
        others = sorted(v for op, v in CONVERTERS if op == operator)
        read = f" (read are versions {', '.join(map(str, others))})" if others else ""
        raise UnsupportedError(f"version {version} of this operator{read}")
    return CONVERTERS[operator, version], version
