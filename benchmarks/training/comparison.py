"""Does hardening give networks that are easier to verify? The networks are those that arms.py trained.

    python -m benchmarks.training.comparison
    python -m benchmarks.training.comparison --data fashion_mnist --images 200 --solver-images 0
    python -m benchmarks.training.comparison --table

The options that choose the networks are those of arms.py, which must have trained them: the network after the swap of
every arm and seed. For each network, clean, attacked and certified accuracy are measured at the radii of its data set,
and its unstable neurons per layer by CROWN's bounds. Then the complete solvers get the first images that all these
networks classify correctly. Both measurements of a network leave a record and are never repeated. Tables (CSV,
Markdown, LaTeX) and figures are made of the records, those of arms.py in the folder beside included. The script needs
the data sets (see README.md), and matplotlib for the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.runs import add_grid
from benchmarks.common.study import NETWORKS, Study
from verifiable_relu.errors import InputError
from verifiable_relu.report.markdown import Page
from verifiable_relu.study.records import Record, Records, of, read_records
from verifiable_relu.study.variants import VARIANTS

IMAGES, SOLVER_IMAGES = 1000, 50
"""The numbers of images in a full run: for bounds and the attack, and for the solvers."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the networks, the images and the limits."""
    add_grid(parser, NETWORKS / "arms")
    parser.add_argument(
        "--images", type=int, default=IMAGES, help=f"first exact images of the test split (default {IMAGES})"
    )
    parser.add_argument(
        "--solver-images", type=int, default=SOLVER_IMAGES, help=f"for MILP and SMT (default {SOLVER_IMAGES})"
    )
    parser.add_argument("--solver-seeds", type=int, default=3, help="seeds that the solvers are asked of (default 3)")
    parser.add_argument(
        "--solver-arms", type=lambda text: text.split(","), default=list(VARIANTS), help="(default all)"
    )
    parser.add_argument("--limit", type=float, default=5.0, help="seconds per question and solver (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Measure the networks that have no record."""
    import torch

    from benchmarks.training import comparison_measuring

    torch.set_num_threads(asked.threads)
    comparison_measuring.measure(asked, records)


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


STUDY = Study("benchmarks.training.comparison", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
