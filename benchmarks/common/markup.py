"""Cells and tables of benchmarks, before they are written as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Interval:
    """The mean of n numbers with the ends of its 95 % interval; both ends are NaN for one number."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def numbers(self) -> tuple[float, ...]:
        """The mean and the ends."""
        return self.mean, self.low, self.high

    def __format__(self, form: str) -> str:
        form = form or (".1e" if 0 < abs(self.mean) < 1e-3 else ".4f" if abs(self.mean) < 1 else ".2f")
        return f"{self.mean:{form}}" + ("" if math.isnan(self.low) else self.shown(form))

    def shown(self, form: str) -> str:
        """The interval behind the mean, in a format of numbers."""
        return f" [{self.low:{form}}, {self.high:{form}}]"

    def __str__(self) -> str:
        return format(self, "")


Cell = str | int | float | Interval | None
"""A cell of a table. None and NaN are shown as a dash."""


@dataclass(frozen=True)
class Table:
    """A table with a heading for each column.

    Attributes:
        columns: the headings of the columns; a heading in ``forms`` must be unique.
        rows: the rows, each with a cell for each column.
        forms: for some columns, the format of the numbers, such as ``.1%``.
        caption: what the table shows.

    Raises:
        ValueError: for a row of another length.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    forms: Mapping[str, str] = field(default_factory=dict)
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells under {len(self.columns)} columns: {row}")
