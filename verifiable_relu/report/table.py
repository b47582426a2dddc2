"""Tables of an HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """A table with a heading for each column.

    Attributes:
        columns: the headings.
        rows: a cell for each column; None is shown as a dash.
        caption: what the table shows.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str

    def numeric(self) -> list[bool]:
        """Which columns have numbers."""
        return [not any(isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))]

    def shown(self) -> Iterator[list[tuple[str, str]]]:
        """For each row and cell the text, and the number by which the cell is sorted (empty for texts)."""
        for row in self.rows:
            yield [(_text(cell), _key(cell)) for cell in row]


def _text(cell: Cell) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "–"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _key(cell: Cell) -> str:
    if isinstance(cell, str):
        return ""
    return "-inf" if cell is None or math.isnan(cell) else repr(float(cell))
