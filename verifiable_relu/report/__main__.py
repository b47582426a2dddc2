"""The command ``verifiable-relu report``: one HTML page of campaigns or of a training, and figures for papers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from verifiable_relu.command_line import Parser, add_debug, guarded
from verifiable_relu.errors import InputError, printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status (``command_line.guarded``)."""
    options = parser().parse_args(arguments)
    return guarded("report", lambda: run(options), options.debug)


def parser() -> Parser:
    """Return the parser of the command line."""
    text = (
        "Write one HTML page, which needs no other file, of the results in a folder (certify --out), or of the record "
    )
    made = Parser(label="report", prog="verifiable-relu report", description=f"{text}of a training.")
    text = "a folder with a file records.jsonl, or a record that train has written; several campaigns are compared"
    made.add_argument("source", type=Path, nargs="+", metavar="DIR|RECORD.json", help=text)
    text = """a table whose rows begin with network and property, or with a category and these, and have a verdict (sat,
        unsat, violated, holds) in a later field, such as an instances.csv with expected verdicts or the competition's
        results.csv: answers are compared"""
    made.add_argument("--expected", type=Path, metavar="LIST.csv", help=" ".join(text.split()))
    text = "the page (default: DIR/report.html, or RECORD.html)"
    made.add_argument("--out", type=Path, metavar="FILE.html", help=text)
    made.add_argument("--title", help="the page's title (default: the folder's name)")
    text = "show the first N counterexamples (default: 60)"
    made.add_argument("--pictures", type=int, default=60, metavar="N", help=text)
    made.add_argument("--figures", type=Path, metavar="DIR", help="write figures for papers there, as PDF and PNG")
    add_debug(made)
    return made


def run(options: argparse.Namespace) -> int:
    """Write the page and the figures that the options ask for; an InputError for bad results or files."""
    if options.out is not None and options.out.suffix != ".html":
        # A page must never take the place of the records that it shows.
        raise InputError("the name of the page must end in .html", path=options.out)
    from verifiable_relu.report import figures, page
    from verifiable_relu.report.summary import CampaignSummary, read_campaigns, read_expected

    source, *others = options.source
    title = options.title or " and ".join(each.resolve().name.removesuffix(".json") for each in options.source)
    out = options.out or (source.with_suffix(".html") if source.suffix == ".json" else source / "report.html")
    notes: Sequence[str] = ()
    if source.suffix == ".json" and not others and options.expected is None:
        record = page.read_training(source)
        charts = figures.training_charts(record)
        text = page.training_page(record, charts, title)
        drawn = figures.write_training_figures(charts, options.figures) if options.figures else []
    else:
        expected = read_expected(options.expected) if options.expected else ()
        summary = CampaignSummary(read_campaigns(options.source), expected)
        text = page.campaign_page(summary, title, options.pictures, out.parent, None if others else source)
        drawn = figures.write_campaign_figures(summary, options.figures) if options.figures else []
        notes = summary.notes
    try:
        out.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", path=out) from None
    for line in (*notes, *(f"wrote {path}" for path in (out, *drawn))):
        print(printable(line))
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main())
