"""Which figures of trainings are correlated? Over the records of arms.py, ablations.py and comparison.py.

    python -m benchmarks.training.correlations

The tables correlate the hardness drift with the disruption by the swap and with certified accuracy, and the OUI after a
tenth of the training with the outcome. They also show how early activation patterns settle beside weights, and whether
seeds agree on the layers' λ. The script trains and measures nothing: the tables follow from the records of these three
studies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.study import RESULTS, add_results, guarded
from verifiable_relu.arguments import Parser
from verifiable_relu.study.machine import command
from verifiable_relu.study.records import of, read_records

_MODULE = "benchmarks.training.correlations"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    made = Parser(prog=f"python -m {_MODULE}", description=__doc__, formatter_class=formatter, allow_abbrev=False)
    add_results(made, RESULTS / "correlations")
    return made


def tabulate(folder: Path) -> None:
    """Write the tables of correlations into ``folder``, from the records of the three studies beside it.

    Raises:
        InputError: if a study has no records, or if its file has lines that are no records.
    """
    from benchmarks.common.measures import runs
    from benchmarks.training.ablation_settings import trained
    from benchmarks.training.correlation_tables import page, with_bounds

    ablations, arms, bounds = (read_records(folder.parent / name) for name in ("ablations", "arms", "comparison"))
    made = page(trained(ablations), with_bounds(runs(arms), of(bounds, "bounds")))
    folder.mkdir(parents=True, exist_ok=True)
    print(made.write(folder))


def main(arguments: Sequence[str] | None = None) -> int:
    """Tabulate; 0 when done, 2 for bad input."""
    folder = parser().parse_args(arguments).results
    return guarded(lambda: tabulate(folder), command(_MODULE))


if __name__ == "__main__":
    sys.exit(main())
