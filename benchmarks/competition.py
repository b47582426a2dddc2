"""Families of the verification competition: verdicts against the competition's consensus, and time.

    python benchmarks/competition.py test rl_benchmarks collins_rul_cnn

Each family is answered by the command line twice: as one campaign in one process, and with one process for every
instance (as the competition runs tools). Needs the benchmarks under VERIFIABLE_RELU_DATA/vnncomp. Writes
results/competition.csv (a row per instance and mode) and results/competition.md (a row per family and mode).
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

from machine import describe
from rich.progress import track

RESULTS = Path(__file__).parent / "results"
MODES = ("campaign", "process")


@dataclass(frozen=True)
class Row:
    """One instance in one mode.

    Attributes:
        seconds: wall clock; for a campaign the time charged to the instance.
        cpu: processor seconds of the whole process, children included; NaN for a campaign's instances.
        truth: the competition's consensus; ``disputed`` where its tools disagreed.
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


def truth(folder: Path) -> dict[tuple[str, str], str]:
    """The consensus of each instance. Disputed rows whose tools were outvoted by a replayed counterexample stay."""
    with (folder / "truth.csv").open(newline="") as file:
        return {
            (row["onnx"], row["vnnlib"]): row["consensus_verdict"]
            if not row["note"] or row["ce_check"] in ("strict", "tol1e-4")
            else f"disputed ({row['consensus_verdict']})"
            for row in csv.DictReader(file)
        }


def instances(folder: Path, count: int | None) -> list[tuple[str, str, str]]:
    """The first ``count`` rows (onnx, vnnlib, timeout) of instances.csv."""
    with (folder / "instances.csv").open(newline="") as file:
        return [(row[0], row[1], row[2]) for row in csv.reader(file)][:count]


def certify(*arguments: str) -> tuple[str, float, float]:
    """Run the command; returns its stdout, wall and processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    command = [sys.executable, "-m", "verifiable_relu.certify", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
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
                family, "campaign", method, onnx, vnnlib, answer["verdict"], float(answer["seconds"]), float("nan"),
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
        out, wall, cpu = certify(*arguments, "--method", method)
        verdict = out.split("\n", 1)[0].strip()
        rows.append(Row(family, "process", method, onnx, vnnlib, verdict, wall, cpu, known[onnx, vnnlib]))
    return rows, sum(r.seconds for r in rows), sum(r.cpu for r in rows)


def table(rows: list[Row], totals: dict[tuple[str, str], tuple[float, float]]) -> Iterator[str]:
    """The Markdown table: one row per family and mode."""
    yield "| family | mode | instances | sat | unsat | unknown | wrong | wall s | CPU s | slowest s |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for (family, mode), (wall, cpu) in totals.items():
        mine = [r for r in rows if (r.family, r.mode) == (family, mode)]
        count = Counter(r.verdict for r in mine)
        unknown = len(mine) - count["sat"] - count["unsat"]
        slowest = max(r.seconds for r in mine)
        yield (
            f"| {family} | {mode} | {len(mine)} | {count['sat']} | {count['unsat']} | {unknown} "
            f"| {sum(r.wrong for r in mine)} | {wall:.1f} | {cpu:.1f} | {slowest:.1f} |"
        )


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
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{options.name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    text = "\n".join(table(rows, totals))
    head = f"`{options.method}`, at most {options.limit:g} s per instance. {describe()}."
    (RESULTS / f"{options.name}.md").write_text(f"{head}\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
