"""Tables in Markdown, the pages that they stand on, printable names, and means over few runs as cells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.common.markup import Cell, Interval, Table


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[Cell]], forms: Mapping[str, str] | None = None
) -> str:
    """A table in GitHub's dialect of Markdown, with columns of numbers aligned to the right; empty without rows.

    Args:
        columns: the headings.
        rows: the rows, with a cell for each column; None and NaN are shown as a dash.
        forms: the format of the numbers of some columns, such as ``.1%``; without one they have three digits.
    """
    given, forms = [tuple(row) for row in rows], forms or {}
    if not given:
        return ""
    rule = ["---" if any(isinstance(cell, str) for cell in cells) else "---:" for cells in zip(*given, strict=True)]
    shown = [[_shown(cell, forms.get(name)) for name, cell in zip(columns, row, strict=True)] for row in given]
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, rule, *shown])


def _shown(cell: Cell, form: str | None) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "–"
    if isinstance(cell, str):
        return cell.replace("|", "\\|")
    return format(cell, form) if form is not None else f"{cell:.3g}" if isinstance(cell, float) else str(cell)


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


@dataclass
class Page:
    """A page in Markdown under construction; empty parts are left out."""

    parts: list[str] = field(default_factory=list)

    @classmethod
    def headed(cls, title: str, notes: Iterable[str]) -> Page:
        """Return a page of a title and a list of notes."""
        page = cls()
        page.add(title)
        page.bullets(notes)
        return page

    def add(self, *parts: str | Table) -> None:
        """Append paragraphs and tables."""
        for part in parts:
            made = markdown_table(part.columns, part.rows, part.forms) if isinstance(part, Table) else part.strip("\n")
            self.parts += [made] if made else []

    def bullets(self, lines: Iterable[str]) -> None:
        """Append a list, one item per line."""
        self.add("\n".join(f"- {line}" for line in lines))

    @property
    def text(self) -> str:
        """The page."""
        return "\n\n".join(self.parts) + "\n"


@dataclass(frozen=True)
class Estimate(Interval):
    """The mean over n runs and its 95 % interval by Student's t, of which half the width is shown (NaN for one run)."""

    half: float

    def shown(self, form: str) -> str:
        """Half the width behind the mean, in a format of numbers."""
        return f" ± {self.half:{form}}"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one or more numbers, with its 95 % interval."""
    # Imported here, because scripts import this module at their heads, and --help need not wait for scipy.
    from scipy import stats

    n, mean = len(values), statistics.fmean(values)
    half = float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(mean, mean - half, mean + half, n, half)
