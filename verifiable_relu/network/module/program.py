"""What a module was seen to compute: a list of operators, each of which makes one new value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.errors import UnsupportedError

GATE = "hardness_gate"
"""The name under which a λ-GELU or λ-Swish is recorded: one operator of the arguments ``gate`` and ``self``."""


class NotFollowed(UnsupportedError):
    """A module does what its own record has no operator for, and nothing that forbids to read it."""


@dataclass(frozen=True)
class Ref:
    """The value with this index, in the arguments of a step."""

    index: int


@dataclass(frozen=True)
class Step:
    """One operator, which computes the value whose index is the step's place in the list plus one.

    Attributes:
        op: the operator's name in ATen, of an in-place one without its underscore.
        arguments: by their names in ATen's schema, with ``Ref`` for computed values; constants as they are.
        shape, dtype: of the result, the batch axis included.
        path: the name of the innermost module that was running, "" for the outermost.
        observed: the result's numbers; None if they were not asked for.
    """

    op: str
    arguments: dict[str, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    path: str
    observed: Tensor | None

    @property
    def place(self) -> str:
        """Where the step comes from, for messages."""
        return place_of(self.path, self.op)


@dataclass
class Program:
    """The steps that lead from the input (value 0) to the value ``output``.

    Attributes:
        constants: each tensor that steps use and that does not depend on the input, with torch's count of the
            changes that it had seen, and the step's place.
    """

    steps: list[Step] = field(default_factory=list)
    output: int = 0
    constants: list[tuple[Tensor, int, str]] = field(default_factory=list)

    def require_unchanged(self) -> None:
        """Make certain that the constants still are what they were when they were used.

        Raises:
            UnsupportedError: if one was changed in place.
        """
        for tensor, seen, place in self.constants:
            if version(tensor) != seen:
                raise UnsupportedError("a tensor is changed in place after it was used", place=place)


def place_of(path: str, op: str) -> str:
    """Where something happened, for messages: the module and the operator."""
    return f"'{path}' ({op})" if op == GATE else f"'{path}' (aten.{op})"


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place, as far as torch counts it."""
    return -1 if tensor.is_inference() else tensor._version
