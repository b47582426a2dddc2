"""Write a ledger, or compare two."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.ledger.entries import Entry, answer, of_query, trainings
from tests.ledger.queries import PARTS, ROOT, WITHOUT_DATA, everything

Ledger = dict[str, Entry]

VERDICTS = Path(__file__).parent / "verdicts.json"


def write(only: str = "") -> Ledger:
    """The ledger of the package that is imported, of the questions whose names contain ``only``."""
    found: Ledger = {}
    began = time.process_time()
    for question in everything(only):
        assert question.name not in found, question.name
        found[question.name] = of_query(question)
        print(f"{time.process_time() - began:7.1f} s  {question.name}", file=sys.stderr, flush=True)
    for name, made in trainings():
        if only in name:
            found[name] = made()
    return found


def against(revision: str, only: str) -> Ledger:
    """The ledger of another commit, computed here: in a work tree of its own, with its own ``tests/ledger``.

    A commit from before there was one gets this one.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            if not (tree / "tests" / "ledger").exists():
                shutil.copytree(Path(__file__).parent, tree / "tests" / "ledger")
            made = Path(folder) / "ledger.json"
            command = [sys.executable, "-m", "tests.ledger", "--write", str(made), "--only", only]
            subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True)
            return _read(made)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def differences(old: Ledger, new: Ledger, kinds: str = "") -> dict[str, list[str]]:
    """What differs, by kind, each with what it was and what it is."""
    found: dict[str, list[str]] = {}
    for name in sorted({*old, *new}):
        if name not in old or name not in new:
            found.setdefault("questions", []).append(f"{name} is only in the {'old' if name in old else 'new'} ledger")
            continue
        for kind in sorted({*old[name], *new[name]}):
            if kinds in kind:
                found.setdefault(kind, []).extend(_changed(name, old[name].get(kind), new[name].get(kind)))
    return {kind: lines for kind, lines in found.items() if lines}


def _changed(name: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [line for key in {**old, **new} for line in _changed(f"{name}, {key}", old.get(key), new.get(key))]
    if old == new:
        return []
    if isinstance(old, list) and isinstance(new, list) and isinstance(old[-1], str) and len(old[-1]) > 64:
        # The digests of a tree's batches, eight digits each.
        before, after = (re.findall("." * 8, one[-1]) for one in (old, new))
        pairs = enumerate(zip(before, after, strict=False))
        same = next((number for number, (a, b) in pairs if a != b), min(len(before), len(after)))
        return [f"{name}: other from batch {same} on; {old[0]} nodes, now {new[0]}"]
    return [f"{name}: {old}, now {new}"]


def portable() -> dict[str, list[Any]]:
    """What is the same on every machine: of each question that needs no data set, the verdict of ``auto``.

    With that, whether the checker accepts its certificate, where there is one.
    """
    found = {}
    for question in (one for part in WITHOUT_DATA for one in PARTS[part]()):
        entry = of_query(question, brief=True)
        found[question.name] = answer(entry)
        print(question.name, *found[question.name], file=sys.stderr, flush=True)
    return found


def _read(path: Path) -> Ledger:
    ledger: Ledger = json.loads(path.read_text(encoding="utf-8"))
    return ledger


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ledger", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="write the ledger of this tree")
    what.add_argument("--compare", type=Path, metavar="FILE", help="compare this tree with a ledger that was written")
    what.add_argument("--verdicts", action="store_true", help=f"write {VERDICTS.name} again")
    what.add_argument("--against", metavar="REV", help="compare this tree with a commit of this repository")
    parser.add_argument("--only", default="", metavar="TEXT", help="questions whose names contain this text")
    parser.add_argument("--kinds", default="", metavar="TEXT", help="compare kinds whose names contain this text")
    parser.add_argument("--all", action="store_true", help="print all differences, not the first ten of each kind")
    options = parser.parse_args()
    if options.verdicts:
        lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in portable().items())
        VERDICTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return 0
    if options.write is not None:
        options.write.write_text(json.dumps(write(options.only), indent=0) + "\n", encoding="utf-8")
        return 0
    old = against(options.against, options.only) if options.against else _read(options.compare)
    new = write(options.only)
    changed = differences({name: entry for name, entry in old.items() if options.only in name}, new, options.kinds)
    counts = Counter({kind: len(lines) for kind, lines in changed.items()})
    print(f"{len(new)} questions and trainings; differences: {dict(counts) or 'none'}")
    for kind, lines in changed.items():
        print(f"\n{kind}:")
        print("\n".join(f"  {line}" for line in (lines if options.all else lines[:10])))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
