"""Tables, and how their cells are shown on an HTML page.

A table is made of rows and of columns (title, unit, measure): what stands above the column, how its numbers are shown,
and the function from a row to its cell (``tabulate``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeVar

from verifiable_relu.errors import printable


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


class Link(str):
    """A text that leads to another place, on an HTML page.

    Attributes:
        address: of the place; empty for none.
    """

    address: str

    def __new__(cls, text: str, address: str) -> Link:
        """The text with its address."""
        made = super().__new__(cls, text)
        made.address = address
        return made


Cell = str | int | float | Interval | None
"""A cell of a table. None and NaN are shown as a dash."""

Row = TypeVar("Row")

Column = tuple[str, str, Callable[[Row], Cell]]
"""The heading, the format of the numbers (empty for the table's), and the function from a row to its cell."""


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

    def numeric(self) -> list[bool]:
        """Which columns have numbers."""
        return [not any(isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))]

    def sortable(self) -> Iterator[list[tuple[str, str, str]]]:
        """For each row and cell the text, the number by which a page sorts the cell (empty for texts), and a link.

        Numbers have four significant digits where ``forms`` asks for nothing else.
        """
        for row, texts in zip(self.rows, self._shown(".4g"), strict=True):
            yield [(text, _key(cell), getattr(cell, "address", "")) for text, cell in zip(texts, row, strict=True)]

    def _shown(self, form: str = ".3g") -> list[list[str]]:
        forms = [self.forms.get(column) for column in self.columns]
        return [[_shown(cell, own, form) for cell, own in zip(row, forms, strict=True)] for row in self.rows]


def tabulate(rows: Iterable[Row], columns: Sequence[Column[Row]], caption: str = "") -> Table:
    """The table with a row for each of ``rows``."""
    cells = [tuple(measure(row) for _, _, measure in columns) for row in rows]
    forms = {title: form for title, form, _ in columns if form}
    return Table(tuple(title for title, _, _ in columns), cells, forms, caption)


def _absent(cell: Cell) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def _shown(cell: Cell, own: str | None, form: str) -> str:
    """The text of a cell: a number in its column's ``own`` form, or a float in the table's ``form``."""
    if _absent(cell):
        return "–"
    if own is not None and not isinstance(cell, str):
        return format(cell, own)
    return format(cell, form) if isinstance(cell, float) else printable(str(cell))


def _key(cell: Cell) -> str:
    if isinstance(cell, str):
        return ""
    number = cell.mean if isinstance(cell, Interval) else cell
    return "-inf" if number is None or math.isnan(number) else repr(float(number))


_LARGEST_BELOW = 1_000
"""The largest denominator of a radius that is printed as a fraction."""


def natural(text: str) -> list[str | int]:
    """A key by which texts are sorted as a reader expects it, numbers in them as numbers."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", text))]


def spelled(eps: Fraction | float) -> str:
    """A radius as people write it: a decimal number of at most six digits, or ``1/255`` where none is equal to it.

    What is neither, a decimal number of more digits, is rounded to six.
    """
    decimal, nearest = f"{float(eps):g}", Fraction(eps).limit_denominator(_LARGEST_BELOW)
    return str(nearest) if float(nearest) == float(eps) and Fraction(decimal) != nearest else decimal
