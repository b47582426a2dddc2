"""The HTML page: its sections, and how they become one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from markupsafe import Markup

from verifiable_relu import __version__
from verifiable_relu.report import campaign
from verifiable_relu.report.counterexamples import Shown
from verifiable_relu.report.svg import COLOURS
from verifiable_relu.report.table import Table


@dataclass(frozen=True)
class Section:
    """A part of a page; what is empty is left out.

    Attributes:
        id: its anchor, unique in the page.
        title: its heading.
        texts: paragraphs.
        shares: answers, shown as a bar for each method; the only method has no name.
        charts: pairs of a caption and an SVG.
        figures: pairs of a caption and the address of a picture.
        tables: tables; readers can sort each by any column.
        filter: whether readers can choose rows of the tables by words.
        gallery: counterexamples.
        facts: names and values.
    """

    id: str
    title: str
    texts: Sequence[str] = ()
    shares: Mapping[str, Sequence[campaign.Share]] = field(default_factory=dict)
    charts: Sequence[tuple[str, Markup]] = ()
    figures: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    filter: bool = False
    gallery: Sequence[Shown] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def html(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The page of the sections, in their order."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = FileSystemLoader(Path(__file__).parent)
    numbers = count(1)
    page = Environment(loader=templates, autoescape=True, undefined=StrictUndefined).get_template("page.html")
    return page.render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        version=__version__,
        colours=COLOURS,
        style=campaign.answer_style,
        loop_number=lambda: next(numbers),
    )
