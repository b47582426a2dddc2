"""What bounds of whole boxes prove, at the moment they prove it: for whoever writes certificates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.search.property_rows import BoxRows


@dataclass(frozen=True, eq=False)
class RowsBounded:
    """Rows of properties are bounded from below over their boxes; a query with a positive margin is proved.

    Attributes:
        relaxation: the intervals of all ops over the boxes, and CROWN's slopes.
        rows: of the properties.
        values: (boxes, rows) lower bounds of matrix·y − bound.
        chosen: (count,) numbers of the rows, as ``values`` flattened counts them, for which slopes were searched for.
        choices: what each of these chose at elementwise ops and products, by number, (count, n) in [0, 1]
            (``bounds.alpha``). Which slopes prove a row better may be found out by bounding it with both.
        by_crown: whether CROWN's rows bound the inputs of nonlinear ops; else intervals alone do.
        by_intervals: (boxes, rows) whether the output's interval alone bounds a row as well.
        after: CROWN's rows bound the inputs of the nonlinear ops behind this one alone; others are known.
    """

    relaxation: Relaxation
    rows: BoxRows
    values: Tensor
    chosen: Tensor
    choices: Mapping[int, Tensor]
    by_crown: bool = True
    after: float = -1
    by_intervals: Tensor | None = None


@dataclass(frozen=True, eq=False)
class NeuronsBounded:
    """Neurons are bounded by rows with slopes of their own; ``RowsBounded`` of the same relaxation follows.

    Attributes:
        relaxation: as far as ops are bounded.
        op: the op whose elements they are.
        neuron, sign, sample: (rows,) sign·(element ``neuron``) is bounded from below over the box of ``sample``.
        lower: (rows,) the bounds.
        choices: as of ``RowsBounded``, (rows, n) by number.
    """

    relaxation: Relaxation
    op: int
    neuron: Tensor
    sign: Tensor
    sample: Tensor
    lower: Tensor
    choices: Mapping[int, Tensor]
