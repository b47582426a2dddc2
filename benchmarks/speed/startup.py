"""How long does one answer take before any work is done? --help, importing torch, an easy property, and the main job.

    python -m benchmarks.speed.startup
    python -m benchmarks.speed.startup --easy specs/mnist_mlp_mnist_0_eps3_100.vnnlib.gz --runs 20

The commands run in turn, so that other load of the machine affects all of them alike, and each runs once beforehand, so
that files are in memory. Earlier measurements stay among the records; the table shows the latest.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks.common.markup import Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.script import ROOT, Script
from benchmarks.common.tables import Page

EASY = "specs/cifar_cnn_cifar10_25_eps1_255.vnnlib.gz"
"""A property that CROWN verifies."""

MAIN = "specs/cifar_eps.vnnlib"
"""A property that bounds and the attack do not decide."""

IMPORT = 'python -c "import torch"'
HELP = "certify --help"
LIMITS = {HELP: 0.5, "easy": 2.0}
"""The most seconds for --help, and for an easy property on top of importing torch."""


def timed(commands: Mapping[str, Sequence[str]], runs: int) -> dict[str, list[float]]:
    """The wall-clock seconds of ``runs`` runs of each command; the commands take turns."""
    from rich.progress import track

    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for number in track(range(-1, runs), "runs"):
        for name, arguments in commands.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=ROOT)
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Add a record for each command with all its runs; ``beyond`` is its median time on top of importing torch."""
    certify = ("-m", "verifiable_relu.certify")
    commands = {
        HELP: (*certify, "--help"),
        IMPORT: ("-c", "import torch"),
        f"certify --spec {asked.easy}": (*certify, "--spec", asked.easy),
        f"certify --spec {MAIN}": (*certify, "--spec", MAIN),
    }
    found = timed(commands, asked.runs)
    for name, seconds in found.items():
        beyond = statistics.median(b - a for a, b in zip(found[IMPORT], seconds, strict=True))
        times = {"median": statistics.median(seconds), "fastest": min(seconds), "slowest": max(seconds)}
        rounded = {key: round(value, 3) for key, value in {**times, "beyond": beyond}.items()}
        records.append("command", {"command": name, "runs": asked.runs, **rounded})


def page(records: Sequence[Record]) -> Page:
    """The page with the latest figures of each command, and whether they keep the limits."""
    latest = {record["command"]: record for record in of(records, "command")}
    columns = ("median", "fastest", "slowest")
    rows = [(f"`{name}`", record["runs"], *(record[key] for key in columns)) for name, record in latest.items()]
    made = Page()
    made.add("# Starting up", "Wall clock; the commands took turns.")
    made.bullets(notes(records))
    titles = tuple(f"{name} s" for name in columns)
    made.add(Table(("command", "runs", *titles), rows, dict.fromkeys(titles, ".2f")))
    if HELP in latest:
        made.add(f"`--help`: {_judged(latest[HELP]['median'], LIMITS[HELP])}.")
    for name, record in latest.items():
        if name.startswith("certify --spec") and not name.endswith(MAIN):
            said = _judged(record["beyond"], LIMITS["easy"])
            made.add(f"The easy property beyond importing torch (median of the paired differences): {said}.")
    return made


def _judged(value: float, limit: float) -> str:
    return f"{value:.2f} s, {'within' if value <= limit else 'ABOVE'} the limit of {limit:g} s"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the property and the number of runs."""
    parser.add_argument("--easy", default=EASY, help=f"the easy property, from the root of the clone ({EASY})")
    parser.add_argument("--runs", type=int, default=10, help="of each command (default 10)")


SCRIPT = Script("benchmarks.speed.startup", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
