"""``python -m tests.soundness``: which kind of test catches which seeded fault, written to README.md."""

from __future__ import annotations

import argparse
from pathlib import Path

from .faults import FAULTS, KINDS, caught_by

HEAD = """# Soundness tests and the faults that they catch

Made by `python -m tests.soundness`. Each fault puts something wrong in the place of a function of the library
(`faults.py`, by the hooks of `tests/support/hooks.py`). Each kind of test is then run in its quick form: *yes* means
that the test fails, as it should, a dash that it was not tried. `test_faults.py` holds each fault against the kind that
it names.

- **engine**: bounds, steps and sums of the relaxation engine against fractions (`unit/test_engine_soundness.py`)
- **corners**: exact values at box corners, which no bound of any op may exclude: rows, affine forms, intervals
- **points**: boxes of one point, margins of exactly zero and ± next to nothing
- **planted**: hidden counterexamples that may never be denied, under small budgets too
- **agreement**: random networks and properties near their decision boundary, all methods against each other
- **boundary**: counterexamples planted exactly at the boundary, at scales from 1e-30 to 1e30, with slopes of any size,
  rescaled layers, and weights that are known up to an error (`boundary.py`)
- **programs**: exact values of networks are solutions of the programs that HiGHS gets (`programs.py`)
- **magnitudes**: ONNX files whose numbers are derived from others, at scales from 1e-300 to 1e300 and near rounding,
  asked about their exact value at a point, just before it and just behind (`magnitudes.py`)
- **factors**: the same of batch normalisations and spelled GELUs alone, of which few have a factor that vanishes
"""


def main() -> None:
    """Try every fault on its own kind of test and on those named, by default all, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.soundness", description=main.__doc__)
    parser.add_argument("kinds", nargs="*", metavar="kind", help=f"of {', '.join(KINDS)}")
    wanted = parser.parse_args().kinds or list(KINDS)
    if unknown := set(wanted) - set(KINDS):
        parser.error(f"no kind of test: {', '.join(sorted(unknown))}")
    rows = ["| fault | " + " | ".join(KINDS) + " |", "|---|" + "---|" * len(KINDS)]
    for fault in FAULTS:
        tried = {kind: caught_by(kind, fault) for kind in KINDS if kind in wanted or kind == fault.best}
        cells = ("–" if kind not in tried else "yes" if tried[kind] else "" for kind in KINDS)
        rows.append(f"| {fault.name} | " + " | ".join(cells) + " |")
        print(rows[-1], flush=True)
    Path(__file__).with_name("README.md").write_text(HEAD + "\n" + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
