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
    """

    relaxation: Relaxation
    rows: BoxRows
    values: Tensor
    chosen: Tensor
    choices: Mapping[int, Tensor]
