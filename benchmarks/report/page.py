"""A page of results: paragraphs, tables and figures in Markdown, and the tables as files of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report.tables import Table


@dataclass
class Page:
    """A page that is made part by part.

    Attributes:
        name: of the file, without suffix.
        parts: what stands on the page, in its order.
        files: by name with suffix, what is written beside it.
    """

    name: str
    parts: list[str | Table] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def add(self, *parts: str | Table) -> None:
        """Paragraphs and tables at the end of the page; empty ones are left out."""
        self.parts += [part for part in parts if part]

    def bullets(self, lines: Iterable[str]) -> None:
        """A list."""
        self.add("\n".join(f"- {line}" for line in lines))

    def save(self, name: str, table: Table, *, latex: bool = False) -> None:
        """Write a table as ``name.csv`` beside the page, and as ``name.tex`` too if LaTeX is wanted."""
        self.files[f"{name}.csv"] = table.csv()
        if latex:
            self.files[f"{name}.tex"] = table.latex()

    def markdown(self) -> str:
        """The page."""
        parts = [part.markdown() if isinstance(part, Table) else part for part in self.parts]
        return "\n\n".join(part.strip("\n") for part in parts) + "\n"

    def write(self, folder: Path) -> str:
        """The page and its tables into ``folder``; the Markdown."""
        text = self.markdown()
        for name, content in {**self.files, f"{self.name}.md": text}.items():
            (folder / name).write_text(content, encoding="utf-8")
        return text
