"""What does each choice in the training of λ-GELU change? One option at a time against the defaults, on Fashion-MNIST.

    python -m benchmarks.training.ablations
    python -m benchmarks.training.ablations --seeds 3 --workers 1
    python -m benchmarks.training.ablations --table

The arm lambda-gelu (MLP 2×128, 6 epochs) with another switch point, schedule, rate of λ's parameter, ramp, temperature
t and factor c, or Adam's β1 = β2. Each finished run leaves a record and is never trained again; a killed run resumes.
Then CROWN certifies the first 1,000 test images for each network. The tables are made of all records. The script needs
Fashion-MNIST (see README.md).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common.measures import Column, difference, drift, early_oui, profile, result, stored_options, table
from benchmarks.common.runs import network_path, run_name, train_all
from benchmarks.common.study import NETWORKS, Study
from benchmarks.training.ablation_settings import BASE, EPS, STUDIES, Changes, trained
from verifiable_relu.report.markdown import Page
from verifiable_relu.report.table import Table
from verifiable_relu.study.records import Record, Records, notes
from verifiable_relu.train.options import Options

IMAGES = 1000

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
    """The options of every run of all studies, each once, ordered by seed."""
    settings = [changes for settings in studies.values() for changes in settings.values()]
    return list(dict.fromkeys(replace(BASE, **changes, seed=seed) for seed in range(seeds) for changes in settings))


def certify(grid: Sequence[Options], records: Records, networks: Path, images: int) -> None:
    """Certify by CROWN the networks of a grid that have no record of that, on the first exact test images.

    Raises:
        InputError: for a network or data that cannot be used.
    """
    from benchmarks.common.progress import bars
    from benchmarks.common.questions import Balls, Counting, first_exact
    from verifiable_relu.data import load
    from verifiable_relu.network import read_onnx
    from verifiable_relu.verifiers.base import Verdict

    test = load(BASE.data, "test")
    chosen = first_exact(test, images)
    with bars() as bar:
        for options in bar.track(grid, description="CROWN"):
            about = {"run": run_name(options), "eps": EPS, "images": len(chosen)}
            if records.has("certified", about):
                continue
            network = read_onnx(network_path(networks, options))
            balls, crown = Balls.around(network, test, chosen, EPS), Counting()
            certified = balls.ask(crown, bar).count(Verdict.UNSAT)
            found = {"clean": len(balls), "certified": certified, "unstable": sum(crown.layers) / max(1, len(balls))}
            records.append("certified", {**about, "network": network.digest, **found})


def tables(records: Sequence[Record]) -> dict[str, Table]:
    """For each study with records, a table with a row for each setting."""
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


def page(records: Sequence[Record], folder: Path) -> Page:
    """The page with a table for each study, and one file with all tables as CSV."""
    known = trained(records)
    made = tables(known)
    page = Page("ablations")
    page.add("# Ablations", f"From {len(known)} records.")
    page.bullets(notes(records))
    page.add(ABOUT)
    for study, each in made.items():
        page.add(f"## {study}", each)
    rows = [(study, *row) for study, each in made.items() for row in each.rows]
    columns = next((each.columns for each in made.values()), ())
    page.save("ablations", Table(("study", *columns), rows))
    return page


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the number of seeds, images and processes."""
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on (default 5)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="trainings at once (default: the cores)")
    parser.add_argument("--images", type=int, default=IMAGES, help=f"to certify (default {IMAGES})")
    parser.add_argument("--networks", type=Path, default=NETWORKS / "ablations", help="folder of the trained networks")


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Train the networks without a record, then certify them."""
    import torch

    torch.set_num_threads(1)
    grid = grid_of(asked.seeds)
    train_all(grid, records, asked.networks, asked.workers)
    certify(grid, records, asked.networks, asked.images)


STUDY = Study("benchmarks.training.ablations", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
