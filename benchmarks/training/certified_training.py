"""Does training for verifiability help λ-GELU more than ReLU? Stability terms, and certified training.

    verifiable-relu study benchmarks/suites/stability.toml
    verifiable-relu study benchmarks/suites/certified_training.toml
    python -m benchmarks.training.certified_training

Two parts, on MNIST. *stability*: an MLP 2×128 whose loss has the ReLU-stability term at ε = 0.02, at four weights that
grow over the first half of the ramp of λ. *certified*: a small CNN trained by IBP, CROWN-IBP and SABR for ε = 0.1. The
suites train and ask them; this script makes the page of the records of version 0.1.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.study import Study
from verifiable_relu.errors import InputError
from verifiable_relu.report.estimate import Estimate, estimate
from verifiable_relu.report.markdown import Page
from verifiable_relu.report.table import Table
from verifiable_relu.study.cells import architecture
from verifiable_relu.study.records import Record, notes, of

EPS = {"stability": "0.02", "certified": "0.1"}
"""The radius that is asked about in each part."""


def table(records: Sequence[Record], part: str) -> Table:
    """The table of a part, with a row for each objective and arm.

    Raises:
        InputError: if a network that was measured has no record of its training.
    """
    trained = {record["run"]: record for record in of(records, "run")}
    groups: dict[tuple[Any, ...], list[tuple[Record, Record]]] = defaultdict(list)
    for record in of(records, "measured"):
        if record["part"] == part:
            run = trained.get(record["run"])
            if run is None:
                raise InputError("no record of this training", place=record["run"])
            options = run["options"]
            objective = (
                f"{options['stability'] / sum(options['hidden']):.2g}"
                if part == "stability"
                else f"{options['certified_by']}, w = {options['certified']:g}"
            )
            setting = (architecture(options), options["epochs"], options["rate"], options["eps"], *record["images"])
            groups[(*setting, record["eps"], objective, options["arm"])].append((record, run))
    columns: tuple[str, ...] = ("net", "epochs", "rate", "ε in training", "images, IBP", "images, others", "ε")
    columns += ("stability, summed" if part == "stability" else "trained by", "arm", "seeds")
    columns += ("clean", "attacked", "certified, IBP", "CROWN", "α-CROWN", "unstable", "ms/step")
    rows = []
    for key, group in groups.items():
        many, few = key[4:6]

        def share(name: str, of: int, group: Sequence[tuple[Record, Record]] = group) -> Estimate:
            return estimate([(r if name in r else r["few"])[name] / of for r, _ in group])

        rows.append(
            (
                *(*key, len(group), share("clean", many), share("attacked", few), share("ibp", many)),
                *(share("crown", few), share("alpha-crown", few), share("unstable", 1)),
                statistics.fmean(1e3 * run["results"]["seconds_per_step"] for _, run in group),
            )
        )
    return Table(columns, rows)


def page(records: Sequence[Record], folder: Path) -> Page:
    """The page with a table for each of the two parts."""
    made = Page("certified_training")
    tables = {part: table(records, part) for part in EPS}
    for part, each in tables.items():
        made.save(part, each)
    made.add("# Training for verifiability")
    made.bullets(notes(records))
    made.add(
        """\
MNIST; means over the seeds ± half a 95 % interval (Student's t), parts of all images asked. *clean* and IBP over the
first test images as many as *images, IBP* says, the rest over as many as *images, others*. *attacked*: classified
rightly and not refuted by the project's attack. *certified*: proven for the ReLU network, rounding accounted for.
*unstable*: neurons per rightly classified image whose input can have either sign by CROWN's bounds. The first test
images are harder than the rest, so that CROWN over few may lie below IBP over all. One seed has no interval, and shows
no difference between arms. ms/step (median of the epochs' means) was measured beside other work on the machine.""",
        f"""## ReLU stability at ε = {EPS["stability"]}, its weight growing over the first half of the ramp of λ""",
        """ReLU has no λ, and the same growth of the weight over the same steps.""",
        tables["stability"],
        f"""## Certified training for ε = {EPS["certified"]}""",
        """\
Rate 0.005 was the best for ReLU of a few trials of 5 epochs, judged on the test images by IBP at ε = 0.1 (rates 0.002,
0.005 and 0.01, ε in training 0.1, 0.12 and 0.15, batches of 64 and 128); nothing was tuned for λ-GELU.""",
        tables["certified"],
    )
    return made


STUDY = Study("benchmarks.training.certified_training", __doc__, None, None, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
