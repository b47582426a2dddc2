"""What does each choice in the training of λ-GELU change? One option at a time against the defaults, on Fashion-MNIST.

    verifiable-relu study benchmarks/suites/ablations.toml
    python -m benchmarks.training.ablations

The arm lambda-gelu (MLP 2×128, 6 epochs) with another switch point, schedule, rate of λ's parameter, ramp, temperature
t and factor c, or Adam's β1 = β2. The suite trains these, and compares each with the defaults; this script makes the
page of the records of version 0.1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common.measures import Column, difference, drift, early_oui, profile, result, stored_options, table
from benchmarks.common.study import Study
from benchmarks.training.ablation_settings import BASE, EPS, STUDIES, trained
from verifiable_relu.report.markdown import Page
from verifiable_relu.report.table import Table
from verifiable_relu.study.records import Record, notes
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


STUDY = Study("benchmarks.training.ablations", __doc__, None, None, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
