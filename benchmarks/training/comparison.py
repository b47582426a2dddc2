"""Does hardening give networks that are easier to verify? The networks are those that arms.py shows.

    verifiable-relu study benchmarks/suites/arms.toml
    python -m benchmarks.training.comparison

For each network after the swap, clean, attacked and certified accuracy at the radii of its data set, and its unstable
neurons per layer by CROWN's bounds; then the answers of complete solvers about the first images that all these networks
classify rightly. The suite asks the same of its networks (``solvers``, which comes with the package, asks solvers);
this script makes tables (CSV, Markdown, LaTeX) and figures of the records of version 0.1, and of those of arms.py in
the folder beside. It needs matplotlib for the figures.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.study import Study
from verifiable_relu.errors import InputError
from verifiable_relu.report.markdown import Page
from verifiable_relu.study.records import Record, of, read_records

IMAGES, SOLVER_IMAGES = 1000, 50
"""The numbers of images in a full run: for bounds and the attack, and for the solvers."""


def page(records: Sequence[Record], folder: Path) -> Page:
    """The page with tables and figures, which also takes the records of the trainings.

    Raises:
        InputError: if the record of a training is missing or unreadable.
    """
    from benchmarks.training import comparison_tables

    beside = folder.parent / "arms"
    trained = {record["run"]: record for record in of(read_records(beside), "run")}
    names = list(dict.fromkeys(record["run"] for record in of(records, "bounds")))
    if missing := [name for name in names if name not in trained]:
        raise InputError(f"no record of the training {missing[0]}", path=beside)
    runs = [comparison_tables.titled(trained[name]) for name in names]
    return comparison_tables.page(records, runs, folder, (IMAGES, SOLVER_IMAGES))


STUDY = Study("benchmarks.training.comparison", __doc__, None, None, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
