"""The command ``verifiable-relu report``: one HTML page of a folder of results, and figures for papers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from verifiable_relu.arguments import Parser
from verifiable_relu.errors import InputError
from verifiable_relu.streams import guarded

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
        "--out, or of a study of benchmarks/.",
    )
    made.add_argument("folder", type=Path, metavar="DIR", help="the folder, which has a file records.jsonl")
    made.add_argument("--out", type=Path, metavar="FILE.html", help="the page (default: DIR/report.html)")
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
        help="write figures for papers there, as PDF and PNG (needs matplotlib: pip install 'verifiable-relu[report]')",
    )
    made.add_argument("--debug", action="store_true", help="show the traceback of a fault of the program")
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
    from verifiable_relu.report.page import html
    from verifiable_relu.report.sections import of_folder

    title = options.title or options.folder.resolve().name
    found = of_folder(options.folder, options.pictures)
    out = options.out or options.folder / "report.html"
    try:
        out.write_text(html(title, found.subtitle, found.sections), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", path=out) from None
    print(f"wrote {out}")
    if options.figures is not None:
        from verifiable_relu.report.figures import of_campaign

        for path in of_campaign(found.results, options.figures):
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main())
