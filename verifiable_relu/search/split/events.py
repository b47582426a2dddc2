"""Events of a search over sub-boxes: all that it proves, at the moment it proves it, for writers of certificates.

The search hands every event to an observer. Events are batches of tensors. Multipliers are hints: whoever chose them,
the inequality that they stand for holds, so that they may be rounded to few bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from verifiable_relu.ir.interval import Interval
from verifiable_relu.search.property_rows import BoxRows
from verifiable_relu.search.split.boxes import SubBoxes


@dataclass(frozen=True, eq=False)
class BoxesBounded:
    """Rows of the boxes' properties are bounded from below; a box with a positive margin is proved.

    Attributes:
        boxes: the boxes.
        intervals: of the ops that feed nonlinear ops, over each box, by number.
        slopes: λ_j/K_j of elementwise ops on which the intervals rest, (boxes, size) by number; none where these rest
            on CROWN's own (``Function.slopes``).
        rows: the rows, sums of them among them.
        values: (boxes, rows) their lower bounds.
        coefficients: (boxes, rows, inputs) of the linear bounds that have these least values.
        by_slopes: (boxes, rows) whether a row's bound rests on ``slopes``, else on CROWN's over the intervals.
    """

    boxes: SubBoxes
    intervals: Mapping[int, Interval]
    slopes: Mapping[int, Tensor]
    rows: BoxRows
    values: Tensor
    coefficients: Tensor
    by_slopes: Tensor


@dataclass(frozen=True, eq=False)
class BoxesClipped:
    """Nothing beyond the ends of ``rest``, by the same numbers, is unsafe: by rows of the latest ``BoxesBounded``.

    Attributes:
        rest: what is left of the boxes; ends that cross where nothing is left.
        row: (2, boxes, polytopes, inputs) the row that cuts most of a polytope off below the lower and above the upper
            end.
        ends: likewise, these ends: what the rows leave of each polytope.
    """

    rest: SubBoxes
    row: Tensor
    ends: Tensor


@dataclass(frozen=True, eq=False)
class BoxesHalved:
    """Boxes are the union of ``children``: the lower halves, then the upper ones, of what clipping left of each."""

    parent: Tensor
    children: SubBoxes


Event = BoxesBounded | BoxesClipped | BoxesHalved
Observer = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Drop an event."""
