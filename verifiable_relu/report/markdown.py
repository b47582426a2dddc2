"""A page of results: paragraphs, tables and figures in Markdown, and the tables as files of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from verifiable_relu.report.table import Table


@dataclass
class Page:
    """A page under construction.

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

    def save(self, name: str, table: Table, *, latex: bool = False) -> None:
        """Add a table as the file ``name.csv`` beside the page, and as ``name.tex`` if LaTeX is wanted too."""
        self.files[f"{name}.csv"] = table.csv()
        if latex:
            self.files[f"{name}.tex"] = table.latex(name)

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
