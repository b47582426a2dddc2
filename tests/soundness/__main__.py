"""``python -m tests.soundness``: which kind of test catches which seeded fault, written to README.md."""

from __future__ import annotations

from pathlib import Path

from .faults import FAULTS, KINDS, caught_by

HEAD = """# Soundness tests and the faults that they catch

Made by `python -m tests.soundness`. Each fault (`faults.py`) is put into the library and held against each kind of
test (`kinds.py`) in its quick form; *yes* means that the test fails, as it should.

- **corners**: exact rational values at box corners, which no bound of any node may exclude
- **points**: boxes of one point, margins of exactly zero and ± next to nothing
- **planted**: hidden counterexamples that may never be denied, under small budgets too
- **agreement**: random networks and properties near their decision boundary, all methods against each other
- **boundary**: counterexamples planted exactly at the boundary, at scales from 1e-30 to 1e30, with slopes of any size,
  rescaled layers, and weights that are known up to an error (`boundary.py`)
- **trees**: every leaf of branch and bound proved again in rational arithmetic, and the leaves a cover (`trees.py`)
"""


def main() -> None:
    """Try every fault on every kind of test and write the table."""
    rows = ["| fault | " + " | ".join(KINDS) + " |", "|---|" + "---|" * len(KINDS)]
    for fault in FAULTS:
        caught = ["yes" if caught_by(kind, fault) else "" for kind in KINDS]
        rows.append(f"| {fault.name} | " + " | ".join(caught) + " |")
        print(rows[-1], flush=True)
    Path(__file__).with_name("README.md").write_text(HEAD + "\n" + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
