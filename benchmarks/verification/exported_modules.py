"""Are small torch modules of all kinds read, bounded soundly and decided rightly, however they are exported?

    python -m benchmarks.verification.exported_modules
    python -m benchmarks.verification.exported_modules --module "basic block" "attention head"

Each module of ``module_kinds`` is read three ways: from the file of torch.onnx.export by its defaults, from that of
torch.onnx.export(dynamo=False), and as the module that it is. What was read is compared with onnxruntime's outputs for
the file (with torch's for the module), its bounds over a box with the network's values at samples and, in rational
arithmetic or enclosed, at corners; and two questions with known answers are asked. Each module and way is a record.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.markup import Cell, Page, Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.study import Study
from verifiable_relu.errors import InputError

WAYS = ("default", "dynamo=False", "module")
"""The ways in which a module is read."""

RIGHT = ("sat", "unsat")
"""The answers of the two questions, as they are known."""


def measure(asked: argparse.Namespace, records: Records) -> None:
    """A record per module and way (``exported_asking.measured``).

    Raises:
        InputError: for a module that is not in the list.
    """
    import torch

    from benchmarks.common.progress import bars
    from benchmarks.verification.exported_asking import measured
    from benchmarks.verification.module_kinds import MODULES

    torch.set_num_threads(1)
    for name in asked.module:
        if name not in MODULES:
            raise InputError(f"no module is called '{name}'")
    with bars() as bar:
        for name in bar.track(asked.module or list(MODULES), description="modules"):
            for way in WAYS:
                title = {"module": name, "way": way}
                if not records.has("read", title):
                    records.append("read", {**title, **measured(name, way, asked.timeout)})


def by_module(found: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """The latest record of each module and way, by module and way."""
    groups: dict[str, dict[str, Record]] = {}
    for record in found:
        groups.setdefault(record["module"], {})[record["way"]] = record
    return groups


def outcome(record: Record | None) -> str:
    """What became of a module in a way, in a word or two."""
    if record is None:
        return "–"
    if record["exporter"]:
        return "not exported"
    if record["refused"]:
        return "refused"
    if not record["agrees"]:
        return "DIFFERS"
    if record["escaped"]:
        return "UNSOUND"
    wrong = [
        answer for answer, right in zip(record["answers"], RIGHT, strict=True) if answer in RIGHT and answer != right
    ]
    return "WRONG" if wrong else ", ".join(record["answers"])


def table(found: Sequence[Record]) -> Table:
    """A row per module."""
    rows: list[tuple[Cell, ...]] = []
    for name, ways in by_module(found).items():
        read = [record for record in ways.values() if not (record["exporter"] or record["refused"])]
        difference = max((record["difference"] for record in read), default=None)
        points = sum(record["points"] for record in read)
        exact = sum(record["exact"] for record in read)
        looseness = max((record["looseness"] for record in read), default=None)
        rows.append((name, *(outcome(ways.get(way)) for way in WAYS), difference, points, exact, looseness))
    columns = ("module", *WAYS, "largest difference", "samples", "corners", "looseness")
    return Table(columns, rows, {"largest difference": ".1e", "looseness": ".2f"})


def counts(found: Sequence[Record]) -> Table:
    """For each way, how many modules had which outcome."""
    rows: list[tuple[Cell, ...]] = []
    for way in WAYS:
        outcomes = [outcome(ways.get(way)) for ways in by_module(found).values()]
        words = ("not exported", "refused", "DIFFERS", "UNSOUND", "WRONG")
        decided = sum(outcome == ", ".join(RIGHT) for outcome in outcomes)
        partly = len(outcomes) - decided - sum(outcomes.count(word) for word in (*words, "–"))
        rows.append((way, len(outcomes), decided, partly, *(outcomes.count(word) for word in words)))
    return Table(
        ("way", "modules", "both right", "left unknown", *("not exported", "refused", "differ", "unsound", "wrong")),
        rows,
    )


def page(records: Sequence[Record], folder: Path) -> Page:
    """Both tables, what was refused and why, and a row per module and way as CSV."""
    found = of(records, "read")
    made = Page("exported_modules")
    made.add("# Small modules, read three ways")
    made.bullets(notes(records))
    made.add(
        "Each cell has the answers to two questions about a box around a random point in which up to four inputs vary "
        "by 0.5: whether an output can be as small as it is at the best of 256 samples (*sat*), and whether it can be "
        "smaller than a proven bound (*unsat*).",
        counts(found),
        "*largest difference*: from onnxruntime's outputs for the same file, or torch's for the module, relative to "
        "the largest output where that is above 1. *samples*, *corners*: points at which outputs lie within the bounds "
        "of IBP and of CROWN, the corners' outputs in rational arithmetic or, where they are irrational, enclosed. "
        "*looseness*: the width of CROWN's bounds by the width that the samples span, the mean over outputs, at worst.",
        table(found),
    )
    reasons = {
        f"{record['module']} ({record['way']}): {record['exporter'] or record['refused']}"
        for record in found
        if record["exporter"] or record["refused"]
    }
    if reasons:
        made.add("Not exported, or refused:")
        made.bullets(sorted(reasons))
    made.save("exported_modules", table(found))
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Which modules, and the time for a question."""
    parser.add_argument("--module", nargs="+", default=[], help="names of modules (default all)")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for a question (default 20)")


STUDY = Study("benchmarks.verification.exported_modules", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
