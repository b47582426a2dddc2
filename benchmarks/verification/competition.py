"""Does the command line decide what the verification competition asked? Verdicts against its consensus, and time.

    python -m benchmarks.verification.competition test rl_benchmarks collins_rul_cnn

Each family is answered twice: as one campaign in one process, and with one process for every instance (as the
competition runs tools). Each answer is a record: a family that was interrupted goes on, in processes after the last
instance. Needs the benchmarks under VERIFIABLE_RELU_DATA/vnncomp.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.study import Study, data_folder
from benchmarks.report import Cell, Table
from benchmarks.report.page import Page
from verifiable_relu.files import read_text

FAMILIES = ("test", "rl_benchmarks", "collins_rul_cnn")
MODES = ("campaign", "process")
_LARGEST = 1 << 26
"""Bytes of a table of the competition."""

_FIELDS = ("family", "mode", "method", "onnx", "vnnlib", "verdict", "seconds", "cpu", "truth")


def truth(folder: Path) -> dict[tuple[str, str], str]:
    """What is known of each instance: a counterexample that was replayed outweighs all votes.

    sat, unsat or unknown, the competition's consensus; as ``disputed (unsat)`` where its tools disagreed.

    Raises:
        InputError: if the file is missing.
    """
    rows = csv.DictReader(io.StringIO(read_text(folder / "truth.csv", _LARGEST)))
    return {(row["onnx"], row["vnnlib"]): _truth(row) for row in rows}


def _truth(row: dict[str, str]) -> str:
    if row["ce_check"] in ("strict", "tol1e-4"):
        return "sat"
    return f"disputed ({row['consensus_verdict']})" if row["note"] else row["consensus_verdict"]


def instances(folder: Path, count: int | None) -> list[tuple[str, str, float]]:
    """The first ``count`` rows (onnx, vnnlib, time limit) of instances.csv.

    Raises:
        InputError: if the file is missing.
    """
    rows = csv.reader(io.StringIO(read_text(folder / "instances.csv", _LARGEST)))
    return [(row[0], row[1], float(row[2])) for row in rows][:count]


def certify(*arguments: str) -> tuple[str, float, float]:
    """Run the command; returns its stdout, wall and processor seconds. What it has to complain of goes to stderr."""
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    line = [sys.executable, "-m", "verifiable_relu.certify", *arguments]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode < 0 or done.returncode == 130:
        raise SystemExit(f"{' '.join(line)} was ended ({done.returncode})")
    return done.stdout, wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def campaign(asked: argparse.Namespace, records: Records, folder: Path, about: dict[str, Any]) -> None:
    """One process for all instances: a record for each, and then one of kind ``campaign`` with the whole time.

    Of the instances the seconds are those that the campaign charges to them, and the processor's are not known.
    """
    if records.has("campaign", {**about, "count": asked.count}):
        return
    known = truth(folder)
    with tempfile.TemporaryDirectory() as out:
        table = Path(out) / "instances.csv"
        with table.open("w", newline="") as file:
            csv.writer(file).writerows(
                (folder / onnx, folder / vnnlib, min(asked.limit, seconds))
                for onnx, vnnlib, seconds in instances(folder, asked.count)
            )
        _, wall, cpu = certify("--spec", str(table), "--method", asked.method, "--out", f"{out}/run")
        with (Path(out) / "run" / "results.csv").open(newline="") as file:
            answers = {(row["onnx"], row["vnnlib"]): row for row in csv.DictReader(file)}
    for onnx, vnnlib, _ in instances(folder, asked.count):
        answer = answers[str(folder / onnx), str(folder / vnnlib)]
        found = {"verdict": answer["answer"], "seconds": float(answer["seconds"]), "cpu": None}
        title = {**about, "onnx": onnx, "vnnlib": vnnlib}
        if not records.has("answer", title):
            records.append("answer", {**title, **found, "truth": known[onnx, vnnlib]})
    records.append("campaign", {**about, "count": asked.count, "seconds": round(wall, 3), "cpu": round(cpu, 3)})


def processes(asked: argparse.Namespace, records: Records, folder: Path, about: dict[str, Any]) -> None:
    """One process, and one record, for each instance; ``error`` where the command did not end with status 0."""
    from rich.progress import track

    known = truth(folder)
    for onnx, vnnlib, seconds in track(instances(folder, asked.count), about["family"]):
        title = {**about, "onnx": onnx, "vnnlib": vnnlib}
        if records.has("answer", title):
            continue
        arguments = ("--spec", str(folder / vnnlib), "--net", str(folder / onnx), "--method", asked.method, "--quiet")
        out, wall, cpu = certify(*arguments, "--timeout", str(min(asked.limit, seconds)))
        verdict = out.split("\n", 1)[0].strip() or "error"
        found = {"verdict": verdict, "seconds": round(wall, 3), "cpu": round(cpu, 3)}
        records.append("answer", {**title, **found, "truth": known[onnx, vnnlib]})


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Ask what is not answered yet, by the same method and within the same limit.

    Raises:
        InputError: if the benchmarks are missing.
    """
    for family in asked.families:
        folder = data_folder() / "vnncomp" / family
        for mode in asked.modes:
            about = {"family": family, "mode": mode, "method": asked.method, "limit": asked.limit}
            (campaign if mode == "campaign" else processes)(asked, records, folder, about)


def wrong(record: Record) -> bool:
    """Whether the verdict contradicts an undisputed consensus."""
    return {record["verdict"], record["truth"]} == {"sat", "unsat"}


def outvoted(record: Record) -> bool:
    """Whether the verdict is not that of the majority, where the competition's tools disagreed."""
    return (record["verdict"], record["truth"]) in (("sat", "disputed (unsat)"), ("unsat", "disputed (sat)"))


def table(records: Sequence[Record]) -> Table:
    """A row per family and mode."""
    columns = ("family", "mode", "method", "limit, s", "instances", "sat", "unsat", "undecided", "wrong", "outvoted")
    times = ("wall s", "CPU s", "slowest s")
    keys = ("family", "mode", "method", "limit")
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in of(records, "answer"):
        groups.setdefault(tuple(record[name] for name in keys), []).append(record)
    whole = {tuple(record[name] for name in keys): record for record in of(records, "campaign")}
    rows: list[tuple[Cell, ...]] = []
    for key, mine in groups.items():
        count = Counter(record["verdict"] for record in mine)
        undecided = len(mine) - count["sat"] - count["unsat"]
        if key[1] == "campaign":
            wall, cpu = (whole[key][name] if key in whole else None for name in ("seconds", "cpu"))
        else:
            wall, cpu = (sum(record[name] for record in mine) for name in ("seconds", "cpu"))
        against = (sum(map(wrong, mine)), sum(map(outvoted, mine)))
        taken = (wall, cpu, max(record["seconds"] for record in mine))
        rows.append((*key, len(mine), count["sat"], count["unsat"], undecided, *against, *taken))
    return Table((*columns, *times), rows, {"limit, s": "g", **dict.fromkeys(times, ".1f")})


def page(records: Sequence[Record], folder: Path) -> Page:
    """The table, and the answers as CSV."""
    made = Page("competition")
    made.add("# Families of the verification competition")
    made.bullets(notes(records))
    made.add(
        table(records),
        "*campaign*: one process for the whole family. *process*: one for each instance, start-up included. *limit*: "
        "per instance, where the competition did not give less. *wrong*: sat where the competition's tools agree on "
        "unsat, or unsat where they agree on sat or a counterexample of theirs was replayed. *outvoted*: unlike the "
        "majority where they disagree. *undecided* counts time-outs and errors.",
    )
    answers = of(records, "answer")
    made.save("competition", Table(_FIELDS, [[record[name] for name in _FIELDS] for record in answers]))
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Which families, how, and for how long."""
    parser.add_argument(
        "families", nargs="*", default=list(FAMILIES), help=f"folders of the benchmarks (default {' '.join(FAMILIES)})"
    )
    parser.add_argument("--method", default="auto", help="of certify (default auto)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per instance at the most (default 60)")
    parser.add_argument("--count", type=int, help="only the first COUNT instances of each family")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="(default both)")


STUDY = Study("benchmarks.verification.competition", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
