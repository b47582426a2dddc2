"""Write a ledger, or compare two."""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.ledger.queries import ROOT, lists

VERDICTS = Path(__file__).parent / "verdicts.json"

RUNS = {
    "auto": ("--certificates", "certificates"),
    "crown": ("--method", "crown"),
    "float32": ("--arithmetic", "float32", "--timeout", "10"),
}
"""The ways in which each list is asked: options of ``certify``."""

WITHOUT_DATA = ("specs", "drawn", "smooth")

Ledger = dict[str, Any]
"""By "list/network property, run" the answer, and by "list, run" the CPU seconds."""


def ask(instances: Path, run: str, folder: Path) -> tuple[dict[str, list[Any]], float]:
    """Ask a list of instances by the command ``certify``.

    Returns:
        By names of network and property the verdict, whether a certificate was accepted, and CROWN's margin, and the
        CPU seconds of all.
    """
    folder.mkdir(exist_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "verifiable_relu.certify", str(instances), "--out", str(folder / run), "--quiet"]
    command += ["--jobs", "1", *(str(folder / part) if part == "certificates" else part for part in RUNS[run])]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found: dict[str, list[Any]] = {}
    with (folder / run / "results.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            verdict = row["answer"] if row["answer"] in ("sat", "unsat") else "unknown"
            margin = float(row["margin"]) if run == "crown" and row["margin"] else None
            found[name_of(row["onnx"], row["vnnlib"])] = [verdict, row["trust"] == "checked", margin]
    return found, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def name_of(onnx: object, vnnlib: object) -> str:
    """Return the names of a network's and a property's file, without folders and extensions."""
    return " ".join(Path(str(path)).name.partition(".onnx")[0].partition(".vnnlib")[0] for path in (onnx, vnnlib))


def write(only: str = "", runs: tuple[str, ...] = tuple(RUNS), names: tuple[str, ...] = ()) -> Ledger:
    """Return the ledger of this tree for the lists whose names contain ``only``."""
    ledger: Ledger = {}
    with tempfile.TemporaryDirectory() as made:
        for name, instances in lists(Path(made), only):
            for run in runs if not names or name in names else ():
                answers, seconds = ask(instances, run, Path(made) / name)
                ledger |= {f"{name}/{one}, {run}": answer for one, answer in answers.items()}
                ledger[f"{name}, {run}"] = seconds
                print(f"{seconds:8.1f} CPU s  {name}, {run}: {len(answers)}", file=sys.stderr, flush=True)
    return ledger


def against(revision: str, only: str) -> Ledger:
    """Return the ledger of another commit, written here in a work tree of its own with its own ``tests/ledger``."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            made = Path(folder) / "ledger.json"
            command = [sys.executable, "-m", "tests.ledger", "--write", str(made), "--only", only]
            subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True)
            return _read(made)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def differences(old: Ledger, new: Ledger) -> list[str]:
    """Return a line for each answer that differs: verdict, accepted certificate, or margin by more than 1e-6 of it."""
    lines = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if isinstance(before, float) or isinstance(after, float):
            continue
        if before is None or after is None:
            lines.append(f"{name}: only in the {'new' if before is None else 'old'} ledger")
        elif before[:2] != after[:2] or not _close(before[2], after[2]):
            lines.append(f"{name}: {before}, now {after}")
    return lines


def _close(before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return before is after
    return abs(before - after) <= 1e-6 * max(abs(before), abs(after))


def times(old: Ledger, new: Ledger) -> list[str]:
    """Return a line for each list and run with its CPU seconds, before and now."""
    names = [name for name, value in new.items() if isinstance(value, float) and name in old]
    return [f"{name}: {old[name]:.1f} s, now {new[name]:.1f} s ({new[name] / old[name]:.2f})" for name in names]


def _read(path: Path) -> Ledger:
    ledger: Ledger = json.loads(path.read_text(encoding="utf-8"))
    return ledger


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ledger", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="write the ledger of this tree")
    what.add_argument("--compare", type=Path, metavar="FILE", help="compare this tree with a ledger that was written")
    what.add_argument("--against", metavar="REV", help="compare this tree with a commit of this repository")
    what.add_argument("--verdicts", action="store_true", help=f"write {VERDICTS.name} again")
    parser.add_argument("--only", default="", metavar="TEXT", help="lists whose names contain this text")
    options = parser.parse_args()
    if options.verdicts:
        ledger = write(runs=("auto",), names=WITHOUT_DATA)
        lines = (
            f"{json.dumps(name)}: {json.dumps(found)}" for name, found in ledger.items() if isinstance(found, list)
        )
        VERDICTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return 0
    if options.write is not None:
        options.write.write_text(json.dumps(write(options.only), indent=0) + "\n", encoding="utf-8")
        return 0
    old = against(options.against, options.only) if options.against else _read(options.compare)
    old = {name: answer for name, answer in old.items() if options.only in name.partition("/")[0].partition(",")[0]}
    new = write(options.only)
    changed = differences(old, new)
    print(f"{sum(isinstance(one, list) for one in new.values())} answers; {len(changed)} differ", *changed, sep="\n")
    print("\nCPU time", *times(old, new), sep="\n")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
