"""A table, and its forms in Markdown, LaTeX and CSV, and on an HTML page."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from verifiable_relu.errors import printable
from verifiable_relu.files import csv_cell
from verifiable_relu.report.estimate import Estimate, Interval
from verifiable_relu.report.names import spoken

Cell = str | int | float | Estimate | Interval | None
"""A cell of a table. None and NaN are shown as a dash, and are empty in CSV."""

_LATEX = {
    "\\": r"\textbackslash{}",
    **{char: f"\\{char}" for char in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
    "×": r"$\times$",
    "Δ": r"$\Delta$",
    "α": r"$\alpha$",
    "ε": r"$\varepsilon$",
    "λ": r"$\lambda$",
    "–": "--",
}


@dataclass(frozen=True)
class Table:
    """A table with a heading for each column.

    Attributes:
        columns: the headings of the columns; a heading in ``forms`` must be unique.
        rows: the rows, each with a cell for each column.
        forms: for some columns, the format specification with which Markdown and LaTeX show the numbers, such as
            ``.1%``. Without one, numbers have three significant digits. In CSV, every number has six.
        caption: what the table shows, for LaTeX and HTML.

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

    def markdown(self) -> str:
        """The table in GitHub's dialect of Markdown, with columns of numbers aligned to the right."""
        rule = ["---:" if right else "---" for right in self.numeric()]
        lines = [self.columns, rule, *self._shown()]
        return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)

    def latex(self, label: str = "") -> str:
        """The table in LaTeX, with the rules of the package booktabs, printable names and its caption.

        Args:
            label: the name by which the text refers to the table, ``tab:LABEL``; empty for none.
        """
        kinds = "".join("r" if right else "l" for right in self.numeric())
        named = [[spoken(cell) for cell in row] for row in [self.columns, *self._shown()]]
        head, *body = (" & ".join(map(_escaped, line)) + r" \\" for line in named)
        tabular = [
            rf"\begin{{tabular}}{{@{{}}{kinds}@{{}}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule",
            r"\end{tabular}",
        ]  # fmt: skip
        caption = [rf"\caption{{{_escaped(self.caption)}}}"] if self.caption else []
        reference = [rf"\label{{tab:{label}}}"] if label else []
        lines = [r"\begin{table}", r"\centering", *caption, *reference, *tabular, r"\end{table}"]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """The table in CSV, with six significant digits.

        An estimate takes two columns; the second, whose heading ends in ``_half``, has half the width of its interval.
        An interval takes three; the last two, ``_low`` and ``_high``, have its ends.
        """
        suffixes = [self._suffixes(i) for i in range(len(self.columns))]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(name + end for name, ends in zip(self.columns, suffixes, strict=True) for end in ends)
        for row in self.rows:
            parts = (_parts(cell, len(ends)) for cell, ends in zip(row, suffixes, strict=True))
            writer.writerow(_exported(part) for group in parts for part in group)
        return text.getvalue()

    def _suffixes(self, column: int) -> tuple[str, ...]:
        spread = (row[column] for row in self.rows)
        return next((cell.SUFFIXES for cell in spread if isinstance(cell, Estimate | Interval)), ("",))

    def numeric(self) -> list[bool]:
        """Which columns have numbers."""
        return [not any(isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))]

    def sortable(self) -> Iterator[list[tuple[str, str]]]:
        """For each row and cell the text, and the number by which an HTML page sorts the cell (empty for texts).

        Numbers have four significant digits where ``forms`` asks for nothing else.
        """
        for row, texts in zip(self.rows, self._shown(".4g"), strict=True):
            yield [(text, _key(cell)) for text, cell in zip(texts, row, strict=True)]

    def _shown(self, form: str = ".3g") -> list[list[str]]:
        forms = [self.forms.get(column) for column in self.columns]
        return [[_shown(cell, own, form) for cell, own in zip(row, forms, strict=True)] for row in self.rows]


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
    number = cell.mean if isinstance(cell, Estimate | Interval) else cell
    return "-inf" if number is None or math.isnan(number) else repr(float(number))


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(char, char) for char in text)


def _parts(cell: Cell, count: int) -> Sequence[Cell]:
    """The numbers of a cell, filled up to ``count``."""
    numbers: Sequence[Cell] = cell.numbers if isinstance(cell, Estimate | Interval) else (cell,)
    return [*numbers, *[None] * (count - len(numbers))]


def _exported(part: Cell) -> str:
    return "" if _absent(part) else f"{part:.6g}" if isinstance(part, float) else csv_cell(str(part))
