"""Tables, their forms in Markdown, LaTeX and CSV, and pages of tables in Markdown.

A table is made of rows and of columns (title, unit, measure): what stands above the column, how its numbers are shown,
and the function from a row to its cell (``tabulate``).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

from verifiable_relu.errors import printable
from verifiable_relu.files import csv_cell


@dataclass(frozen=True)
class Interval:
    """The mean of n numbers with the ends of its 95 % interval; both ends are NaN for one number."""

    mean: float
    low: float
    high: float
    n: int

    SUFFIXES: ClassVar[tuple[str, ...]] = ("", "_low", "_high")
    """What CSV appends to a column's heading, for each of ``numbers``."""

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
"""A cell of a table. None and NaN are shown as a dash, and are empty in CSV."""

Row = TypeVar("Row")

Column = tuple[str, str, Callable[[Row], Cell]]
"""The heading, the format of the numbers (empty for the table's), and the function from a row to its cell."""

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
        lines = [
            r"\begin{table}",
            r"\centering",
            *([rf"\caption{{{_escaped(self.caption)}}}"] if self.caption else []),
            *([rf"\label{{tab:{label}}}"] if label else []),
            rf"\begin{{tabular}}{{@{{}}{kinds}@{{}}}}",
            *(r"\toprule", head, r"\midrule", *body, r"\bottomrule"),
            r"\end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """The table in CSV, with six significant digits; an interval takes a column for each of its numbers."""
        suffixes = [self._suffixes(i) for i in range(len(self.columns))]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(name + end for name, ends in zip(self.columns, suffixes, strict=True) for end in ends)
        for row in self.rows:
            parts = (_parts(cell, len(ends)) for cell, ends in zip(row, suffixes, strict=True))
            writer.writerow(_exported(part) for group in parts for part in group)
        return text.getvalue()

    def _suffixes(self, column: int) -> tuple[str, ...]:
        return next((row[column].SUFFIXES for row in self.rows if isinstance(row[column], Interval)), ("",))  # type: ignore[union-attr]

    def numeric(self) -> list[bool]:
        """Which columns have numbers."""
        return [not any(isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))]

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


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(char, char) for char in text)


def _parts(cell: Cell, count: int) -> Sequence[Cell]:
    """The numbers of a cell, filled up to ``count``."""
    numbers: Sequence[Cell] = cell.numbers if isinstance(cell, Interval) else (cell,)
    return [*numbers, *[None] * (count - len(numbers))]


def _exported(part: Cell) -> str:
    return "" if _absent(part) else f"{part:.6g}" if isinstance(part, float) else csv_cell(str(part))


@dataclass
class Page:
    """A page of results in Markdown, under construction, and the files beside it.

    Attributes:
        name: the name of the page's file, without suffix.
        parts: the paragraphs and tables of the page, in their order.
        files: the content of the files beside the page, by name with suffix.
    """

    name: str
    parts: list[str | Table] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def add(self, *parts: str | Table) -> None:
        """Append paragraphs and tables to the page; empty ones are left out."""
        self.parts += [part for part in parts if part]

    def bullets(self, lines: Iterable[str]) -> None:
        """Append a list, one item per line."""
        self.add("\n".join(f"- {line}" for line in lines))

    def save(self, name: str, table: Table) -> None:
        """Add a table as the file ``name.csv`` beside the page."""
        self.files[f"{name}.csv"] = table.csv()

    def markdown(self) -> str:
        """The page in Markdown."""
        parts = [part.markdown() if isinstance(part, Table) else part for part in self.parts]
        return "\n\n".join(part.strip("\n") for part in parts) + "\n"

    def write(self, folder: Path) -> str:
        """Write the page and its files into a folder; returns the Markdown."""
        text = self.markdown()
        for name, content in {**self.files, f"{self.name}.md": text}.items():
            (folder / name).write_text(content, encoding="utf-8")
        return text


NAMES = {
    "lambda-gelu": "λ-GELU, hardened",
    "lambda-gelu-frozen": "λ-GELU, λ not learned",
    "lambda-gelu-kept": "λ-GELU, kept",
    "swish": "λ-Swish, hardened",
    "gelu": "GELU",
    "gelu-swap": "GELU, swapped",
    "gelu-swap-finetune": "GELU, swapped, fine-tuned",
    "gelu-swap-finetune-extra": "GELU, swapped, fine-tuned longer",
    "relu": "ReLU",
    "prelu": "PReLU",
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "adult": "Adult",
    "digits": "digits",
    "mlp": "MLP",
    "cnn": "CNN",
    "crown": "CROWN",
    "alpha-crown": "α-CROWN",
    "ibp": "IBP",
    "milp": "MILP",
    "smt": "SMT",
    "bab": "branch and bound",
    "split": "input split",
}
"""The printable name of each identifier that is more than its words."""


def spoken(text: str) -> str:
    """A text with identifiers, parted by ", ", as a reader expects it; what has no name keeps its words."""
    return ", ".join(_word(part) for part in text.split(", "))


def _word(part: str) -> str:
    if part in NAMES:
        return NAMES[part]
    first, blank, rest = part.partition(" ")
    return NAMES.get(first, first.replace("_", " ")) + blank + rest
