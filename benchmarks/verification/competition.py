"""Families of the verification competition: verdicts against the competition's consensus, and time.

    python benchmarks/competition.py test rl_benchmarks collins_rul_cnn

Each family is answered by the command line twice: as one campaign in one process, and with one process for every
instance (as the competition runs tools). Needs the benchmarks under VERIFIABLE_RELU_DATA/vnncomp. Writes
results/competition.csv (a row per instance and mode) and results/competition.md (a row per family and mode), anew
after each family.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from machine import command, describe, load_average
from rich.progress import track

RESULTS = Path(__file__).parent / "results"
MODES = ("campaign", "process")


@dataclass(frozen=True)
class Row:
    """One instance in one mode.

    Attributes:
        verdict: the first word of the answer; ``error`` where the command did not end with status 0.
        seconds: wall clock; for a campaign the time charged to the instance.
        cpu: processor seconds of the whole process, children included; NaN for a campaign's instances.
        truth: sat, unsat or unknown, the competition's consensus; as ``disputed (unsat)`` where its tools disagreed.
    """

    family: str
    mode: str
    method: str
    onnx: str
    vnnlib: str
    verdict: str
    seconds: float
    cpu: float
    truth: str

    @property
    def wrong(self) -> bool:
        """Whether the verdict contradicts an undisputed consensus."""
        return {self.verdict, self.truth} == {"sat", "unsat"}

    @property
    def outvoted(self) -> bool:
        """Whether the verdict is not that of the majority, where the competition's tools disagreed."""
        return (self.verdict, self.truth) in (("sat", "disputed (unsat)"), ("unsat", "disputed (sat)"))


def truth(folder: Path) -> dict[tuple[str, str], str]:
    """The truth about each instance as far as it is known: a counterexample that was replayed outweighs all votes."""
    with (folder / "truth.csv").open(newline="") as file:
        return {(row["onnx"], row["vnnlib"]): _truth(row) for row in csv.DictReader(file)}


def _truth(row: dict[str, str]) -> str:
    if row["ce_check"] in ("strict", "tol1e-4"):
        return "sat"
    return f"disputed ({row['consensus_verdict']})" if row["note"] else row["consensus_verdict"]


def instances(folder: Path, count: int | None) -> list[tuple[str, str, str]]:
    """The first ``count`` rows (onnx, vnnlib, timeout) of instances.csv."""
    with (folder / "instances.csv").open(newline="") as file:
        return [(row[0], row[1], row[2]) for row in csv.reader(file)][:count]


def certify(*arguments: str) -> tuple[str, float, float]:
    """Run the command; returns its stdout, wall and processor seconds. What it has to complain of goes to stderr."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    line = [sys.executable, "-m", "verifiable_relu.certify", *arguments]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode < 0 or done.returncode == 130:
        raise SystemExit(f"{' '.join(line)} was ended ({done.returncode})")
    return done.stdout, wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def campaign(family: str, folder: Path, method: str, limit: float, count: int | None) -> tuple[list[Row], float, float]:
    """One process for all instances."""
    known = truth(folder)
    with tempfile.TemporaryDirectory() as out:
        table = Path(out) / "instances.csv"
        with table.open("w", newline="") as file:
            csv.writer(file).writerows(
                (folder / onnx, folder / vnnlib, min(limit, float(seconds)))
                for onnx, vnnlib, seconds in instances(folder, count)
            )
        _, wall, cpu = certify("--spec", str(table), "--method", method, "--out", f"{out}/run")
        with (Path(out) / "run" / "results.csv").open(newline="") as file:
            answers = {(r["onnx"], r["vnnlib"]): r for r in csv.DictReader(file)}
    rows = []
    for onnx, vnnlib, _ in instances(folder, count):
        answer = answers[str(folder / onnx), str(folder / vnnlib)]
        rows.append(
            Row(
                family, "campaign", method, onnx, vnnlib, answer["answer"], float(answer["seconds"]), float("nan"),
                known[onnx, vnnlib],
            )
        )  # fmt: skip
    return rows, wall, cpu


def processes(
    family: str, folder: Path, method: str, limit: float, count: int | None
) -> tuple[list[Row], float, float]:
    """One process for each instance."""
    known = truth(folder)
    rows = []
    for onnx, vnnlib, seconds in track(instances(folder, count), family):
        timeout = str(min(limit, float(seconds)))
        arguments = ("--spec", str(folder / vnnlib), "--net", str(folder / onnx), "--timeout", timeout)
        out, wall, cpu = certify(*arguments, "--method", method, "--quiet")
        verdict = out.split("\n", 1)[0].strip() or "error"
        times = (round(wall, 3), round(cpu, 3))
        rows.append(Row(family, "process", method, onnx, vnnlib, verdict, *times, known[onnx, vnnlib]))
    return rows, sum(r.seconds for r in rows), sum(r.cpu for r in rows)


def table(rows: list[Row], totals: dict[tuple[str, str], tuple[float, float]]) -> Iterator[str]:
    """The Markdown table: one row per family and mode."""
    columns = ("family", "mode", "instances", "sat", "unsat", "undecided", "wrong", "outvoted", "wall s", "CPU s")
    yield f"| {' | '.join((*columns, 'slowest s'))} |"
    yield "|---" * (len(columns) + 1) + "|"
    for (family, mode), (wall, cpu) in totals.items():
        mine = [r for r in rows if (r.family, r.mode) == (family, mode)]
        count = Counter(r.verdict for r in mine)
        undecided = len(mine) - count["sat"] - count["unsat"]
        against = f"{sum(r.wrong for r in mine)} | {sum(r.outvoted for r in mine)}"
        times = f"{wall:.1f} | {cpu:.1f} | {max(r.seconds for r in mine):.1f}"
        counts = f"{len(mine)} | {count['sat']} | {count['unsat']} | {undecided}"
        yield f"| {family} | {mode} | {counts} | {against} | {times} |"


def write(options: argparse.Namespace, rows: list[Row], totals: dict[tuple[str, str], tuple[float, float]]) -> None:
    """Both results files."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{options.name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    head = (
        f"`{command()}`: `--method {options.method}`, at most {options.limit:g} s per instance and no more than the "
        f"competition gave. {load_average()} {describe()}."
    )
    notes = (
        "*campaign*: one process for the whole family. *process*: one for each instance, start-up included. *wrong*: "
        "sat where the competition's tools agree on unsat, or unsat where they agree on sat or a counterexample of "
        "theirs was replayed. *outvoted*: unlike the majority where they disagree. *undecided* counts time-outs and "
        "errors."
    )
    text = "\n".join(table(rows, totals))
    (RESULTS / f"{options.name}.md").write_text(f"{head}\n\n{text}\n\n{notes}\n")


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="+")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per instance at the most (default 60)")
    parser.add_argument("--count", type=int, help="only the first COUNT instances of each family")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--name", default="competition", help="of the results files")
    options = parser.parse_args()
    data = Path(os.environ["VERIFIABLE_RELU_DATA"]) / "vnncomp"
    rows: list[Row] = []
    totals: dict[tuple[str, str], tuple[float, float]] = {}
    for family in options.families:
        for mode in options.modes:
            run = campaign if mode == "campaign" else processes
            new, wall, cpu = run(family, data / family, options.method, options.limit, options.count)
            rows += new
            totals[family, mode] = (wall, cpu)
        write(options, rows, totals)
    print("\n".join(table(rows, totals)))


if __name__ == "__main__":
    main()
