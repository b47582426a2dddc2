"""What does a learned hardness cost in training? Steps with λ-GELU and λ-Swish against nn.GELU on the same network.

    python -m benchmarks.speed.activation_cost
    python -m benchmarks.speed.activation_cost --pairs 1000 --threads 2

A step is forward, backward and the optimiser's update as the trainer makes them, on a batch of 128 random images of
28×28. The networks take turns step by step, so that other load of the machine affects all of them alike. The ratio is
the median over pairs of neighbouring steps, in processor time of the process (and, beside it, in wall-clock time).
"learned" trains λ; "annealed" has λ frozen, as it is during the annealing. Each network is measured once for a number
of pairs and threads; with other numbers, or another folder of results, it is measured again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.markup import Page, Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.study import Study

_COLUMNS = {
    "network": "network",
    "activation": "activation",
    "milliseconds": "ms",
    "ratio": "ratio",
    "ratio_wall": "ratio, wall clock",
    "ratio_plain": "ratio to its plain form",
}
"""The fields of a record, and their columns."""


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Add a record for each network and activation; all activations of a network are measured together."""
    import torch

    from benchmarks.common.progress import say
    from benchmarks.speed import activation_steps

    torch.set_num_threads(asked.threads)
    for network, steps in activation_steps.cases().items():
        about = {"network": network, "pairs": asked.pairs, "threads": asked.threads}
        missing = [a for a in activation_steps.ACTIVATIONS if not records.has("cost", {**about, "activation": a})]
        if not missing:
            continue
        say(network)
        measured = activation_steps.measure(steps(), asked.pairs)
        for activation, (milliseconds, *ratios) in zip(activation_steps.ACTIVATIONS, measured, strict=True):
            figures = zip(list(_COLUMNS)[2:], (milliseconds, *ratios), strict=True)
            found = {name: round(value, 3) for name, value in figures}
            if activation in missing:
                records.append("cost", {**about, "activation": activation, **found})


def page(records: Sequence[Record], folder: Path) -> Page:
    """The page with one table."""
    costs = of(records, "cost")
    made = Page("activation_cost")
    made.add("# The cost of a learned hardness")
    made.bullets(notes(records))
    pairs, threads = ({record[name] for record in costs} for name in ("pairs", "threads"))
    made.add(
        f"Median of {', '.join(map(str, sorted(pairs)))} interleaved steps in milliseconds of processor time, and the "
        f"median ratio to nn.GELU of neighbouring steps; {', '.join(map(str, sorted(threads)))} thread(s). Target: a "
        "training step with λ-GELU at most 1.15.",
        Table(
            tuple(_COLUMNS.values()),
            [[record[name] for name in _COLUMNS] for record in costs],
            dict.fromkeys(_COLUMNS.values(), ".3f"),
        ),
    )
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the numbers of pairs and threads."""
    parser.add_argument("--pairs", type=int, default=300, help="number of pairs of neighbouring steps (default 300)")
    parser.add_argument("--threads", type=int, default=1, help="number of threads of torch (default 1)")


STUDY = Study("benchmarks.speed.activation_cost", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
