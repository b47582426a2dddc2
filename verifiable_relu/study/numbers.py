"""Numbers of networks, as functions of their cells, and means of them over the seeds of a setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from verifiable_relu.report.estimate import Interval
from verifiable_relu.study import outcomes
from verifiable_relu.study.joined import Cell
from verifiable_relu.study.statistics import interval

Number = Callable[[Cell], float | None]
"""A number of a network; None where the records do not have it."""


def share(measure: str, eps: str = "", method: str = "") -> Number:
    """The number ``Cell.share``."""
    return lambda cell: cell.share(measure, eps, method)


def result(name: str) -> Number:
    """One of ``outcomes.NUMBERS`` of a cell's training."""
    return lambda cell: outcomes.number(cell.training, name)


def unstable(eps: str) -> Number:
    """The mean number of unstable neurons per image, in all layers together."""

    def value(cell: Cell) -> float | None:
        layers = cell.unstable(eps)
        return None if layers is None else math.fsum(layers)

    return value


def norm(cell: Cell) -> float | None:
    """The Frobenius norm of all matrices and kernels together."""
    norms = cell.measures.get("weight_norms")
    return None if norms is None else math.hypot(*norms)


def mean(cells: Iterable[Cell], value: Number) -> Interval | None:
    """The mean of a number over those of the cells that have it, with its interval; None if none has it."""
    known = [found for cell in cells if (found := value(cell)) is not None]
    return interval(known) if known else None


def difference(pairs: Iterable[tuple[Cell, Cell]], value: Number) -> Interval | None:
    """The mean over pairs of cells of the first one's number minus the second's; None if no pair has both."""
    known = [(value(first), value(second)) for first, second in pairs]
    found = [a - b for a, b in known if a is not None and b is not None]
    return interval(found) if found else None
