"""The command ``verifiable-relu report``: one HTML page of a folder of results, and figures for papers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verifiable_relu.arguments import Parser, add_debug
from verifiable_relu.errors import InputError, printable
from verifiable_relu.streams import guarded

if TYPE_CHECKING:
    from verifiable_relu.report.page import Found

PICTURES = 60
"""The counterexamples that a page shows by default."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status (``streams.guarded``)."""
    options = parser().parse_args(arguments)
    return guarded("report", lambda: run(options), options.debug)


def parser() -> Parser:
    """The parser of the command line."""
    made = Parser(
        label="report",
        prog="verifiable-relu report",
        description="Write one HTML page, which needs no other file, of the results in a folder: those of certify "
        "--out, or of a study of benchmarks/; or of the record of a training.",
    )
    made.add_argument(
        "source",
        type=Path,
        nargs="+",
        metavar="DIR|RECORD.json",
        help="the folder, which has a file records.jsonl, or the record that train has written; several campaigns "
        "are shown side by side",
    )
    made.add_argument(
        "--expected",
        type=Path,
        metavar="LIST.csv",
        help="a table whose rows begin with network and property, or with a category and these, and have a verdict "
        "(sat, unsat, violated, holds) in a later field, such as an instances.csv with expected verdicts or the "
        "competition's results.csv: answers are compared",
    )
    made.add_argument(
        "--out", type=Path, metavar="FILE.html", help="the page (default: DIR/report.html, or RECORD.html)"
    )
    made.add_argument("--title", help="the page's title (default: the folder's name)")
    made.add_argument(
        "--pictures",
        type=_count,
        default=PICTURES,
        metavar="N",
        help=f"show the first N counterexamples (default: {PICTURES})",
    )
    made.add_argument(
        "--figures",
        type=Path,
        metavar="DIR",
        help="write figures for papers there, as PDF and PNG",
    )
    add_debug(made)
    return made


def _count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of counterexamples")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Write the page and the figures that the options describe; returns the exit status 0.

    Raises:
        InputError: if the folder has no results, or if a file cannot be written.
    """
    if options.out is not None and options.out.suffix != ".html":
        # A page must never take the place of the records that it shows.
        raise InputError("the name of the page must end in .html", path=options.out)
    from verifiable_relu.report.page import of_source

    source, *others = options.source
    title = options.title or " and ".join(each.resolve().name.removesuffix(".json") for each in options.source)
    out = options.out or (source.with_suffix(".html") if source.suffix == ".json" else source / "report.html")
    found = of_source(source, options.pictures, others, options.expected, out.parent)
    try:
        out.write_text(found.html(printable(title)), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", path=out) from None
    made = [out, *(draw(found, options.figures) if options.figures is not None else ())]
    for note in found.notes:
        print(printable(note))
    for path in made:
        print(printable(f"wrote {path}"))
    return 0


def draw(found: Found, folder: Path) -> list[Path]:
    """Draw the figures of a campaign (seconds, answers, certified accuracy) or a training; returns the files.

    Raises:
        InputError: for a study, or if a file cannot be written.
    """
    from verifiable_relu.report import campaign, figures

    if found.curves:
        shown = [found.curves[name] for name in ("loss", "lam", "unstable") if name in found.curves]
        return figures.draw(shown, folder / "training", 0.75 * figures.COLUMN, 2.1)
    if not found.results:
        raise InputError("figures are drawn of campaigns and trainings; those of a study lie beside its records")
    bars = campaign.answers(found.results)
    made = figures.draw([bars], folder / "answers", height=0.6 + 0.28 * len(bars.bars))
    certified = campaign.certified(campaign.at_radii(found.results))
    for name, chart in {"cactus": campaign.cactus(found.results), "certified": certified}.items():
        if chart is not None:
            made += figures.draw([chart], folder / name, height=2.4)
    return made


if __name__ == "__main__":
    import sys

    sys.exit(main())
