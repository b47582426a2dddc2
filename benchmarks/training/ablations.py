"""What each choice in λ-GELU's training does, on Fashion-MNIST: one option at a time against the defaults.

    python benchmarks/ablations.py
    python benchmarks/ablations.py --seeds 3 --workers 1
    python benchmarks/ablations.py --table

The arm lambda-gelu of arms.py (MLP 2×128, 6 epochs) with another switch point, schedule, rate of λ's parameter, ramp,
temperature t and factor c, or Adam's β1 = β2. The grid is trained as that of arms.py: each finished run leaves a record
in results/ablations/ and is never trained again; a killed one goes on. Then CROWN certifies the first 1,000 test images
for each network (results/ablations/certified.jsonl). results/ablations.md and .csv are made of all that is there. Needs
Fashion-MNIST (see README.md).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import RESULTS, RUNS, run_name, train_all
from comparison import Counting, Lines
from machine import command, describe, load_average
from measures import Column, Record, difference, drift, early_oui, profile, read_records, result, stored_options, table
from questions import bars, clean
from rich.console import Console

from verifiable_relu.data import load
from verifiable_relu.errors import InputError
from verifiable_relu.network import read_onnx
from verifiable_relu.report import Table
from verifiable_relu.spec import Query, linf_properties
from verifiable_relu.train.options import Options
from verifiable_relu.verifiers.base import Budget, Verdict

BASE = Options("fashion_mnist", hidden=(128, 128), epochs=6, eps=0.01)
EPS = "0.01"
"""What CROWN certifies; ``BASE.eps`` in the decimals of a property."""

IMAGES = 1000
SGD = {"optimizer": "sgd", "rate": 0.05}

Changes = dict[str, Any]
STUDIES: dict[str, dict[str, Changes]] = {
    "Switch point": {f"{part:.0%}": {"switch": part} for part in (0.0, 0.1, 0.25, 0.5, 0.75)},
    "Schedule": {name: {"schedule": name} for name in ("linear", "log", "inverse")},
    "Rate of s under AdamW": {name: {"lam_rate": name} for name in ("raw", "matched", "natural")},
    "Rate of s under SGD": {name: {**SGD, "lam_rate": name} for name in ("raw", "matched", "natural")},
    "λ during the ramp": {name: {"ramp": name} for name in ("frozen", "learning")},
    "The (t, c) grid, raw rate": {
        f"t = {t}, c = {c}": {"lam_rate": "raw", "lam_temperature": t, "lam_factor": float(c)}
        for t in (0.05, 0.1, 0.2, 1.0)
        for c in (1, 9, 25)
    },
    "(t, c), matched rate": {
        f"t = {t}, c = {c}": {"lam_temperature": t, "lam_factor": float(c)}
        for t, c in ((0.1, 1), (0.1, 9), (0.1, 25), (0.05, 9), (1.0, 9))
    },
    "β1, β2 of AdamW": {
        f"{one}, {two}": {"beta1": one, "beta2": two} for one, two in ((0.9, 0.999), (0.9, 0.9), (0.95, 0.95))
    },
}
"""For each study its settings, by what they are called: the options that differ from ``BASE``."""

ABOUT = f"""\
Arm lambda-gelu on Fashion-MNIST, MLP 2×128, 6 epochs, batches of 128; a setting differs from the defaults (switch 25 %,
schedule log, rate matched with t = 0.1 and c = 9, frozen ramp, AdamW with β = 0.9, 0.999 and rate 2e-3) in what it
names, and by SGD with rate 0.05 and momentum 0.9 where that is said. λ is annealed from the first whole epoch after the
switch point on: from epochs 0, 1, 2, 3 and 5 for 0, 10, 25, 50 and 75 %.

Means over the seeds ± half a 95 % interval (Student's t). *clean*: accuracy of the ReLU network over the test set;
logit change and flipped predictions over it are those of the replacement by ReLU, *proven* bounds the change over all
images of [0, 1]ⁿ. λ per layer is as the annealing began, *drift* Δλ its mean distance from the initial λ = 1 + ln 2.
*certified*: of the first {IMAGES} test images, classified rightly and proven by CROWN at ε = {EPS}, rounding accounted
for; *unstable*: neurons per image, classified rightly, of either sign by CROWN's bounds there. *Δ* are differences from
the setting of the defaults, paired by seed (same initial weights and order of the data); they are shown where the
interval leaves out 0, not corrected for the number of comparisons.
"""


def grid_of(seeds: int, studies: Mapping[str, Mapping[str, Changes]] = STUDIES) -> list[Options]:
    """Every run once, seed by seed."""
    settings = [changes for settings in studies.values() for changes in settings.values()]
    return list(dict.fromkeys(replace(BASE, **changes, seed=seed) for seed in range(seeds) for changes in settings))


def certified(options: Options, networks: Path, images: np.ndarray, labels: np.ndarray) -> Record:
    """How many of the images are classified rightly, and how many of these CROWN proves.

    Raises:
        InputError: for a network that cannot be read.
    """
    network = read_onnx(networks / f"{run_name(options)}.onnx")
    good = clean(network, images, labels)
    properties = linf_properties(images[good], labels[good], Fraction(EPS), network.output_size)
    queries = [Query(network, prop) for prop in properties]
    crown = Counting()
    outcomes = crown.verify(queries, Budget.each(math.inf, len(queries)))
    return {
        **{"run": run_name(options), "network": network.digest, "eps": EPS},
        **{"images": len(images), "clean": len(queries)},
        "certified": sum(outcome.verdict is Verdict.UNSAT for outcome in outcomes),
        "unstable": sum(map(sum, crown.counts)) / len(queries),
    }


def certify(grid: Sequence[Options], lines: Lines, networks: Path, images: int) -> None:
    """Certify the networks of ``grid`` that have no line yet over the first exact test images.

    Raises:
        InputError: for a network or data that cannot be used.
    """
    test = load(BASE.data, "test")
    chosen = np.flatnonzero(test.exact)[:images]
    known = {(record["run"], record["images"]) for record in lines.records}
    missing = [options for options in grid if (run_name(options), len(chosen)) not in known]
    with bars() as bar:
        task = bar.add_task("CROWN", total=len(missing))
        for options in missing:
            lines.append(certified(options, networks, test.images[chosen], test.labels[chosen]))
            bar.advance(task)


def joined(records: Sequence[Record], lines: Sequence[Record]) -> list[Record]:
    """The records with ``certified`` (a part of the images) and ``unstable`` among their results, where known."""
    known = {line["run"]: line for line in lines}
    return [
        {**record, "results": {**record["results"], **_shares(known[record["run"]])}}
        if record["run"] in known
        else record
        for record in records
    ]


def _shares(line: Record) -> Record:
    return {"certified": line["certified"] / line["images"], "unstable": line["unstable"]}


def tables(records: Sequence[Record]) -> dict[str, Table]:
    """For each study that has records a table with a row per setting."""
    by_options: dict[Options, list[Record]] = {}
    for record in sorted(records, key=lambda r: r["options"]["seed"]):
        by_options.setdefault(replace(stored_options(record), seed=0), []).append(record)
    base = by_options.get(BASE, [])
    columns: dict[str, Column] = {
        "clean": result("clean"),
        "logit change, mean": result("mean_logit_change"),
        "worst": result("worst_logit_change"),
        "proven": result("proven_logit_change"),
        "flipped": result("flipped_predictions"),
        "λ per layer": profile,
        "drift": drift,
        "OUI at 10 %": early_oui,
        f"certified at {EPS}": result("certified"),
        "unstable": result("unstable"),
        "Δ clean": difference("clean", base),
        "Δ certified": difference("certified", base),
        "Δ unstable": difference("unstable", base),
    }
    found = {}
    for study, settings in STUDIES.items():
        groups = {name: by_options.get(replace(BASE, **changes), []) for name, changes in settings.items()}
        rows = [((name,), group) for name, group in groups.items() if group]
        if rows:
            found[study] = table(("setting",), columns, rows)
    return found


def write_tables(folder: Path, results: Path) -> str:
    """``ablations.md`` and ``ablations.csv`` in ``results``, from the records in ``folder``; the Markdown.

    Raises:
        InputError: if a file there is no record.
    """
    records = joined(read_records(folder), lines_in(folder).records)
    made = tables(records)
    about = folder / "measured.txt"
    head = [f"- {line}" for line in about.read_text(encoding="utf-8").splitlines()] if about.is_file() else []
    parts = ["# Ablations\n", f"From {len(records)} records in results/ablations/.\n", *head, "", ABOUT]
    for study, each in made.items():
        parts += [f"## {study}\n", each.markdown()]
    text = "\n".join(parts)
    (results / "ablations.md").write_text(text, encoding="utf-8")
    everything = Table(
        ("study", *next(iter(made.values())).columns),
        [(study, *row) for study, each in made.items() for row in each.rows],
    )
    (results / "ablations.csv").write_text(everything.csv(), encoding="utf-8")
    return text


def lines_in(folder: Path) -> Lines:
    """What CROWN certified for the networks of the records in ``folder``.

    Raises:
        InputError: if the file is of another kind.
    """
    return Lines(folder / "certified.jsonl", ("run", "network", "eps", "images"))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seeds", type=int, default=5, help="how many, from 0 on (default 5)")
    made.add_argument("--workers", type=int, default=os.cpu_count())
    made.add_argument("--images", type=int, default=IMAGES, help=f"to certify (default {IMAGES})")
    made.add_argument("--records", type=Path, default=RESULTS / "ablations")
    made.add_argument("--networks", type=Path, default=RUNS.parent / "ablations")
    made.add_argument("--results", type=Path, default=RESULTS)
    made.add_argument("--table", action="store_true", help="train nothing, only make the tables")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, certify and tabulate; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    asked = parser().parse_args(arguments)
    console = Console(stderr=True)
    torch.set_num_threads(1)
    try:
        if not asked.table:
            grid = grid_of(asked.seeds)
            train_all(grid, asked.records, asked.networks, asked.workers, console)
            certify(grid, lines_in(asked.records), asked.networks, asked.images)
            with (asked.records / "measured.txt").open("a", encoding="utf-8") as file:
                file.write(f"`{command()}`. {load_average()} {describe()}.\n")
        print(write_tables(asked.records, asked.results))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command goes on: {command()}", highlight=False)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
