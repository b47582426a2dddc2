"""What one answer costs before any work is done: --help, importing torch, an easy property, and the main job.

    python benchmarks/startup.py
    python benchmarks/startup.py --easy specs/mnist_mlp_mnist_0_eps3_100.vnnlib.gz --runs 20

The commands are run in turn, so that what else the machine does meets all of them alike, each once beforehand so that
files are in memory. Writes results/startup.md.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from machine import command, describe, load_average
from rich.progress import track

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
EASY = "specs/cifar_cnn_cifar10_25_eps1_255.vnnlib.gz"
"""CROWN verifies it."""
MAIN = "specs/cifar_eps.vnnlib"
"""Bounds and attack leave it open."""
HELP_LIMIT = 0.5
"""Seconds that --help may take."""
PROPERTY_LIMIT = 2.0
"""Seconds that an easy property may take beyond importing torch."""


def measure(commands: Mapping[str, Sequence[str]], runs: int) -> dict[str, list[float]]:
    """Wall-clock seconds of each command, ``runs`` times; they are run in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for number in track(range(-1, runs), "runs"):
        for name, arguments in commands.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=ROOT)
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def report(seconds: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """The Markdown table, and what the limits say."""
    yield "| command | median s | fastest s | slowest s |"
    yield "|---|---|---|---|"
    for name, values in seconds.items():
        yield f"| `{name}` | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |"
    asked, imported, answered, _ = seconds.values()
    beyond = statistics.median(b - a for a, b in zip(imported, answered, strict=True))
    help_time = statistics.median(asked)
    yield ""
    yield f"`--help`: {help_time:.2f} s, {_judged(help_time, HELP_LIMIT)}."
    yield (
        f"The easy property: {beyond:.2f} s more than importing torch (median of the paired differences), "
        f"{_judged(beyond, PROPERTY_LIMIT)}."
    )


def _judged(value: float, limit: float) -> str:
    return f"{'within' if value <= limit else 'ABOVE'} the limit of {limit:g} s"


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--easy", default=EASY, help=f"the easy property, from the root of the clone ({EASY})")
    parser.add_argument("--runs", type=int, default=10, help="of each command (default 10)")
    options = parser.parse_args()
    certify = ("-m", "verifiable_relu.certify")
    commands = {
        "certify --help": (*certify, "--help"),
        'python -c "import torch"': ("-c", "import torch"),
        f"certify --spec {options.easy}": (*certify, "--spec", options.easy),
        f"certify --spec {MAIN}": (*certify, "--spec", MAIN),
    }
    text = "\n".join(report(measure(commands, options.runs)))
    head = f"`{command()}`: {options.runs} runs of each, wall clock. {load_average()} {describe()}."
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "startup.md").write_text(f"{head}\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
