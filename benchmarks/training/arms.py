"""How does replacing GELU by ReLU change accuracy? Hardened λ-GELU, its rivals, and ReLU from the start.

    verifiable-relu study benchmarks/suites/arms.toml
    python -m benchmarks.training.arms

The suite trains the grid of arms × data sets × seeds, and asks the networks. This script makes the page of the records
of version 0.1: means over the seeds with 95 % intervals by Student's t, in arms.md rounded and in arms.csv with six
digits.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.measures import (
    Column,
    by_setting,
    correlation,
    difference,
    drift,
    early_oui,
    learned,
    profile,
    reading,
    result,
    runs,
    setting,
    table,
)
from benchmarks.common.study import Study
from verifiable_relu.report.estimate import Estimate
from verifiable_relu.report.markdown import Page
from verifiable_relu.report.radius import spelled
from verifiable_relu.report.table import Table
from verifiable_relu.study.cells import VARIANTS
from verifiable_relu.study.records import Record, notes

SWAP: dict[str, Column] = {
    "clean": result("clean"),
    "before swap": result("clean_before_substitution"),
    "after swap": result("clean_after_substitution"),
    "logit change, mean": result("mean_logit_change"),
    "worst": result("worst_logit_change"),
    "proven": result("proven_logit_change"),
    "flipped": result("flipped_predictions"),
    "λ per layer": profile,
    "drift": drift,
    "Spearman": lambda group: correlation(learned(group)),
}
LATER: dict[str, Column] = {
    "float": result("clean"),
    "int8": result("int8", "clean"),
    "int8, per tensor": result("int8_per_tensor", "clean"),
    **{f"pruned {share}": result("pruned", share) for share in ("0.5", "0.7", "0.9")},
    "attacked": result("attacked_of_these"),
    "unstable": result("unstable_neurons_by_intervals"),
    "OUI at 10 %": early_oui,
    "ms/step": result("seconds_per_step", factor=1e3),
}
ABOUT = """\
Means over the seeds ± half a 95 % interval (Student's t). Accuracies are parts of 1 over the whole test set, but
attacked accuracy and unstable neurons (by interval bounds), at ε, over its first 1,000 images.

The first table of a setting is about the replacement by ReLU, where and when the arm has one: the change of the logits,
the predictions that it flips, and what *proven* says: no logit changes by more for any image of [0, 1]ⁿ. λ per layer is
as the annealing began, *drift* its mean distance from the initial λ, *Spearman* the mean rank correlation of the
layers' λ between seeds. The second is about the network that is used (ReLU, or PReLU): *int8* after static quantisation
(onnxruntime, with a scale per channel or per tensor), *pruned* after setting that part of all weights to 0, the
smallest first, both without further training; the OUI of the activation patterns after a tenth of the training. ms/step
was measured beside other work on the machine and is no comparison of the arms: `activation_cost.py` is.
"""
DIFFERENCES = """\
## λ-GELU, learned and hardened, against the other arms

Accuracy at the end, of the network that is used, minus that of the other arm, paired by seed (same initial weights and
order of the data). A difference is read where its interval leaves out 0, not corrected for the number of comparisons.
"""


def against_rivals(groups: Mapping[tuple[Any, ...], Sequence[Record]]) -> Table:
    """The final clean accuracy of learned and hardened λ-GELU minus that of each other arm, paired by seed."""
    rows = []
    for key, group in groups.items():
        rivals = {other: theirs for other, theirs in groups.items() if other[:-1] == key[:-1] and other != key}
        for other, theirs in rivals.items() if key[-1] == 0 else ():
            gained = difference("clean", theirs)(group)
            if isinstance(gained, Estimate):
                data, net, _, changed, _ = key[:-1]
                said = reading(gained, "λ-GELU higher", "λ-GELU lower")
                rows.append((data, net, changed, list(VARIANTS)[other[-1]], gained.n, gained, said))
    return Table(("data", "net", "changed", "minus", "seeds", "Δ clean", "reading"), rows)


def page(records: Sequence[Record], folder: Path) -> Page:
    """The page with two tables for each setting and the differences between the arms, and all of it as CSV."""
    known = runs(records)
    groups = by_setting(known, setting)
    names = list(VARIANTS)
    made = Page("arms")
    made.add("# Arms", f"From {len(known)} records.")
    made.bullets(notes(records))
    made.add(ABOUT, DIFFERENCES, against_rivals(groups))
    for place in dict.fromkeys(key[:-1] for key in groups):
        data, net, epochs, changed, eps = place
        rows = [((names[key[-1]],), group) for key, group in groups.items() if key[:-1] == place]
        made.add(f"## {data}, {net}, {epochs} epochs, ε = {spelled(eps)}" + (f", {changed}" if changed else ""))
        made.add(*(f"{note}." for note in sorted({record["note"] for _, group in rows for record in group} - {""})))
        made.add(*(table(("arm",), columns, rows) for columns in (SWAP, LATER)))
    columns = ("data", "net", "epochs", "changed", "ε", "arm")
    cells = (((*key[:-1], names[key[-1]]), group) for key, group in groups.items())
    made.save("arms", table(columns, {**SWAP, **LATER}, cells))
    return made


STUDY = Study("benchmarks.training.arms", __doc__, None, None, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
