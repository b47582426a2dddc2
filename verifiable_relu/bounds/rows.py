"""Chunks of rows on their way back through a network, and the protocol of faster steps than the plain ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from verifiable_relu.bounds.types import Lines
from verifiable_relu.bounds.window import Window


@dataclass(frozen=True)
class Restricted:
    """Coefficients of the possibly active neurons of a ReLU alone: (1, each, how many), in order (``restrict``)."""

    values: Tensor

    def float(self) -> Restricted:
        """In float32."""
        return Restricted(self.values.float())


Rows = Tensor | Window | Restricted
"""Coefficients of a node: dense, (groups, each, neurons); in windows, group after group; or of some neurons."""


@dataclass(frozen=True)
class Chunk:
    """Rows that are propagated together: groups of equal size, each of one sample of the batch.

    Attributes:
        groups: how many groups there are.
        each: how many rows a group has.
        sample: (groups,) the sample of each group; None for every sample, one after another.
        rounded: whether rounding is accounted for. Without, values may steer a search and prove nothing.
        lines: for some activations, by index, each row's own lines, (rows, *shape), where groups have one row each.
        coefficients: whether those of the node at which rows end are wanted.
    """

    groups: int
    each: int
    sample: Tensor | None
    rounded: bool = True
    lines: Mapping[int, Lines] = field(default_factory=dict)
    coefficients: bool = False


@dataclass(frozen=True)
class Stepped:
    """The result of a faster step back.

    Attributes:
        constant: (groups, each) what the step adds to the rows' values; None for nothing.
        source: the node that the step has reached; −1 where the rows have ended.
        rows: the coefficients of that node; None where the rows have ended.
    """

    constant: Tensor | None
    source: int = -1
    rows: Rows | None = None


class Stepper(Protocol):
    """A faster way to take rows back through some nodes (``windowed``, ``last_convolution``, ``restrict``)."""

    def step(self, index: int, rows: Rows, chunk: Chunk) -> Stepped | None:
        """One step back from node ``index``; None if the plain step is to be taken for these rows."""
