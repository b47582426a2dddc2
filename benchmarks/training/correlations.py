"""What goes with what, over the records of arms.py and ablations.py and the bounds of comparison.py.

    python -m benchmarks.training.correlations

Hardness drift against the disruption by the swap and against certified accuracy; the OUI after a tenth of the training
against the outcome; how early activation patterns settle beside weights; whether seeds agree on the layers' λ. Trains
nothing and measures nothing: the tables follow from the records of these three studies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.machine import command
from benchmarks.common.records import of, read_records
from benchmarks.common.study import RESULTS, add_results, guarded
from verifiable_relu.arguments import Parser

_MODULE = "benchmarks.training.correlations"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    made = Parser(prog=f"python -m {_MODULE}", description=__doc__, formatter_class=formatter, allow_abbrev=False)
    add_results(made, RESULTS / "correlations")
    return made


def tabulate(folder: Path) -> None:
    """Read the records of the three studies beside ``folder``, and write the tables there.

    Raises:
        InputError: if one of them has no records, or a file has something else in it.
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
