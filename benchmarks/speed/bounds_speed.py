"""How fast and how tight are IBP, CROWN and α-CROWN beside auto_LiRPA's, and how well do they use the machine?

    python -m benchmarks.speed.bounds_speed
    python -m benchmarks.speed.bounds_speed --net cifar_cnn --batch 1 16 --method crown --runs 9
    python -m benchmarks.speed.bounds_speed --library FOLDER --results runs/bounds_speed_newest

Both compute lower bounds of the label's output minus every other one, over L∞ balls around the first test images that
the network classifies correctly. auto_LiRPA is the installed version, or the one in FOLDER. It runs with the settings,
and with the number of images at once, that are fastest for the network, method and batch.

Networks and data that are missing are named and left out. Each line is a record and is not measured again: name another
folder with --results, or remove the records, to measure again. ``--net`` without names measures λ-GELU's widths alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.common.markup import Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.script import Script
from benchmarks.common.tables import Page
from benchmarks.speed.bounds_cases import CASES, DTYPES, EQUAL, GELU_CASE, ITERATIONS, METHODS

_LINE = {
    "network": ("network", ""),
    "ε": ("eps", ""),
    "dtype": ("dtype", ""),
    "method": ("method", ""),
    "batch": ("batch", ""),
    "unstable": ("unstable", ".1%"),
    "ours s": ("ours", ".4f"),
    "auto_LiRPA s": ("theirs", ".4f"),
    "ratio": ("ratio", ".1f"),
    "width": ("width", ".6f"),
    "worst": ("worst", ".1e"),
    "looser": ("looser", ".1%"),
    "tighter": ("tighter", ".1%"),
    "same": ("same", ".1e"),
    "peak": ("peak", ".0%"),
}
_ROUNDING = {
    "network": ("network", ""),
    "dtype": ("dtype", ""),
    "s without": ("seconds", ".4f"),
    "with": ("cost", "+.0%"),
    "slack / width": ("slack", ".1e"),
    "s as proven": ("seconds_proven", ".4f"),
    "with float32": ("cost_proven", "+.0%"),
    "slack / width, float32": ("slack_proven", ".1e"),
}
_WIDTHS = {
    "activation": ("activation", ""),
    "our IBP": ("ibp", ".4f"),
    "our CROWN": ("crown", ".4f"),
    "our α-CROWN": ("alpha-crown", ".4f"),
    "CROWN / ReLU's": ("crown_over_relu", ".3f"),
    "auto_LiRPA CROWN": ("theirs_crown", ".4f"),
    "α-CROWN": ("theirs_alpha-crown", ".4f"),
}
"""For each column of a table, the field of the records, and the format of its numbers."""


def table(records: Sequence[Record], columns: dict[str, tuple[str, str]]) -> Table:
    """The table with a row for each record."""
    rows = [[record[field] for field, _ in columns.values()] for record in records]
    return Table(tuple(columns), rows, {title: form for title, (_, form) in columns.items() if form})


def page(records: Sequence[Record]) -> Page:
    """The page with the tables, the meaning of their columns and what was left out."""
    lines, rounding, widths = (of(records, kind) for kind in ("line", "rounding", "widths"))
    made = Page.headed("# Bounds beside auto_LiRPA", notes(records))
    versions = ", ".join(dict.fromkeys(record["library"] for record in (*lines, *widths)))
    peaks = ", ".join(f"{record['gflops']:.0f} GFLOP/s in {record['dtype']}" for record in of(records, "peak"))
    made.add(f"auto_LiRPA {versions}. Peak: {peaks}.")
    if lines:
        made.add(table(lines, _LINE), ABOUT)
    if rounding:
        made.add(
            "Rows of the output only, batch 16: without regard to rounding, with it, and with it as bounds are proven, "
            "in float32 where what that costs can be borne:",
            table(rounding, _ROUNDING),
        )
    if widths:
        made.add(
            f"Mean widths of margins with λ-GELU in place of ReLU ({GELU_CASE.name}, ε = {GELU_CASE.eps}, 64 images):",
            table(widths, _WIDTHS),
        )
    missing = [record["text"] for record in of(records, "missing")]
    made.add("Left out:" if missing else "Left out: nothing")
    made.bullets(missing)
    return made


ABOUT = f"""\
Lower bounds of nine margins per image. IBP and CROWN start from the boxes, intermediate bounds included. α-CROWN is the
search alone: {ITERATIONS} iterations, both given our CROWN's intermediate bounds, no early stop, each library's own
learning rate. auto_LiRPA gets a batch whole or in parts, as is fastest (`settings` in the records). Our bounds account
for rounding; auto_LiRPA's do not. With dtype float64 our coefficients of the first layers are in float32 all the same,
with float32 all coefficients, and nothing else; α-CROWN's search, which proves nothing, runs in float32 in any case.

Seconds are medians over pairs of runs in turn. *ratio*: median of the pairs' auto_LiRPA s / ours s. *width*: our
bounds' width over theirs, mean. *worst*: by how much one of our lower bounds lies below theirs at most, in widths of
theirs; negative: all of ours are higher. *looser*, *tighter*: the shares that lie by more than {EQUAL:g} widths below
and above. *same*: *worst* with its bounds of the activations' inputs in place of ours. *unstable*: share of the
neurons, by our bounds of the method. *peak*: our matrix products and convolutions, at the rate of a large matrix
product, as a part of our time.
"""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose networks, methods, batches and limits."""
    names = [case.name for case in CASES]
    parser.add_argument("--net", nargs="*", choices=names, default=names, help="networks (default all)")
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS), help="methods (default all)")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16, 64], help="batch sizes (default 1 16 64)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float64"], help="dtypes (default float64)")
    parser.add_argument("--runs", type=int, default=7, help="number of pairs of runs (default 7)")
    parser.add_argument("--limit", type=float, default=60, help="most seconds of one run (default 60)")
    parser.add_argument("--memory", type=float, default=16, help="most GiB of address space (default 16)")
    parser.add_argument("--threads", type=int, default=1, help="number of threads of torch (default 1)")
    parser.add_argument("--library", help="a folder with another version of the package auto_LiRPA")


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Measure what has no record (``bounds_measuring.measure``)."""
    from benchmarks.speed import bounds_measuring

    bounds_measuring.measure(asked, records)


SCRIPT = Script("benchmarks.speed.bounds_speed", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
