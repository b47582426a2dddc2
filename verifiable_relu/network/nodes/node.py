"""What all kinds of node have in common, and those that move or add numbers.

Shapes are those of *one sample*: a node of shape (3, 32, 32) carries tensors of shape (batch, 3, 32, 32).
A node knows the linear algebra of its own operator and nothing about bounds: bound propagation asks affine
nodes for their adjoint and their absolute map, and looks activations up in a table of its own.

Weights keep the bits that the file holds. Where an operator has no exact counterpart (a division by a
constant, a batch normalisation's square root, an average over nine pixels), the node's weights are computed
in float64 and ``weight_error`` bounds their relative error, for whoever accounts for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """One operator. ``inputs`` are indices of earlier nodes; ``shape`` is the output's, without the batch."""

    op: ClassVar[str]
    name: str
    inputs: tuple[int, ...]
    shape: Shape

    def forward(self, *xs: Tensor) -> Tensor:
        """Apply the operator to tensors shaped (batch, *input shape); returns (batch, *shape)."""
        raise NotImplementedError

    @cached_property
    def size(self) -> int:
        """Number of neurons: the product of ``shape``."""
        return math.prod(self.shape)

    @property
    def seen_through(self) -> tuple[int, ...]:
        """The inputs of which bounds of the node are made."""
        return self.inputs

    @property
    def place(self) -> str:
        """What to call the node in an error message."""
        return f"node '{self.name}' ({self.op})"

    @property
    def limit(self) -> Node:
        """The operator that ``forward`` runs: the node itself, unless the node stands for a set of operators."""
        return self

    def map_tensors(self, convert: Callable[[Tensor], Tensor]) -> Node:
        """The same node with ``convert`` applied to each of its tensors of floating-point numbers."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        numbers = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        changed: dict[str, Any] = {n: convert(value) for n, value in numbers.items() if value.is_floating_point()}
        return replace(self, **changed) if changed else self


@dataclass(frozen=True, eq=False, kw_only=True)
class Input(Node):
    """The network's one input."""

    op = "Input"

    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class Add(Node):
    """The sum of two nodes of the same shape (a residual connection)."""

    op = "Add"

    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0] + xs[1]


@dataclass(frozen=True, eq=False, kw_only=True)
class Reshape(Node):
    """The same numbers in row-major order under another shape (Flatten, Squeeze, Unsqueeze too)."""

    op = "Reshape"

    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0].reshape(xs[0].shape[0], *self.shape)


@dataclass(frozen=True, eq=False, kw_only=True)
class Permute(Node):
    """Axes reordered: output axis i is input axis ``axes[i]``, the batch not counted."""

    op = "Permute"
    axes: tuple[int, ...]

    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0].permute(0, *(axis + 1 for axis in self.axes))

    def adjoint(self, a: Tensor) -> Tensor:
        """The inverse reordering of a, shaped (rows, *shape)."""
        inverse = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return a.permute(0, *(axis + 1 for axis in inverse))


class Seen(Node):
    """The value of the last input. The others are what else is known of it: bounds look at these, nothing else does."""

    def forward(self, *xs: Tensor) -> Tensor:
        return xs[-1]


@dataclass(frozen=True, eq=False, kw_only=True)
class Maximum(Seen):
    """Maxima of some elements of the first input, which the second input is in another way: made of ReLUs.

    Bounds may look at the first one alone, and then need nothing of the ReLUs.

    Attributes:
        candidates: (most, size) the elements of the first input whose maxima they are, by their numbers in row-major
            order; −1 for none.
    """

    op = "Maximum"
    candidates: Tensor

    @property
    def seen_through(self) -> tuple[int, ...]:
        return self.inputs[:1]

    def seen(self, x: Tensor, nothing: float) -> Tensor:
        """The candidates' values in x, (batch, *shape of the first input), and ``nothing``: (batch, most, size)."""
        index = self.candidates.to(x.device)
        values = x.flatten(1)[:, index.clamp(min=0)]
        return values.masked_fill(index < 0, nothing)


@dataclass(frozen=True, eq=False, kw_only=True)
class Extreme(Seen):
    """max(x, y) of the first two inputs, or min(x, y), element by element, which the last input is: made of a ReLU.

    Intervals look at x and y: of x + relu(y − x) they know less. Rows go through the ReLU.

    Attributes:
        sign: 1 for the maximum, −1 for the minimum.
    """

    op = "Extreme"
    sign: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Beside(Seen):
    """The values g(z′) of a network's activation, the last input, beside the values f(z) of another's, the second.

    The first input is z′ − z. Where that is small, bounds look at f(z) + (g(z′) − f(z)) (``bounds.beside``).
    """

    op = "Beside"
