"""A table, and its forms in Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report.estimate import Estimate
from benchmarks.report.names import spoken

Cell = str | int | float | Estimate | None
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
        caption: what the table shows, for LaTeX.

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
        rule = ["---:" if right else "---" for right in self._numeric()]
        lines = [self.columns, rule, *self._shown()]
        return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)

    def latex(self, label: str = "") -> str:
        """The table in LaTeX, with the rules of the package booktabs, printable names and its caption.

        Args:
            label: the name by which the text refers to the table, ``tab:LABEL``; empty for none.
        """
        kinds = "".join("r" if right else "l" for right in self._numeric())
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
        """
        wide = [any(isinstance(row[i], Estimate) for row in self.rows) for i in range(len(self.columns))]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_spread(self.columns, wide, lambda name: (name, f"{name}_half")))
        writer.writerows(_spread(row, wide, _parts) for row in self.rows)
        return text.getvalue()

    def _shown(self) -> list[list[str]]:
        forms = [self.forms.get(column) for column in self.columns]
        return [[_shown(cell, form) for cell, form in zip(row, forms, strict=True)] for row in self.rows]

    def _numeric(self) -> list[bool]:
        return [not any(isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))]


def _absent(cell: Cell) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def _shown(cell: Cell, form: str | None) -> str:
    if _absent(cell):
        return "–"
    if form is not None and isinstance(cell, int | float):
        return format(cell, form)
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(char, char) for char in text)


def _parts(cell: Cell) -> tuple[Cell, Cell]:
    if not isinstance(cell, Estimate):
        return cell, None
    return cell.mean, cell.half


def _spread(cells: Sequence[Cell], wide: Sequence[bool], parts: Callable[[Any], tuple[Cell, Cell]]) -> list[str]:
    flat: list[Cell] = []
    for cell, two in zip(cells, wide, strict=True):
        flat += parts(cell) if two else (cell,)
    return ["" if _absent(part) else f"{part:.6g}" if isinstance(part, float) else str(part) for part in flat]
