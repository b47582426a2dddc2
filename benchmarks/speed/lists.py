"""Does a list of 100,000 instances begin at once, and does its last answer come as fast as its first?

    python -m benchmarks.speed.lists
    python -m benchmarks.speed.lists --sizes 1000 10000 --method ibp

A list is made of the instances of `rl_benchmarks` of the verification competition, below the folder that
VERIFIABLE_RELU_DATA names: every second row is one of them as it is, again and again, and every other one has a
property file of its own, whose unsafe set has one more bound. The command ``certify`` answers the list, and then the
same list again, from its records. Rates are those of the first and the last 1,000 answers (or fewer, in a short list),
by the wall clock. Memory is the largest that the command's own process, and any of its workers, had resident at one of
the looks twice a second.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common.machine import load_average
from benchmarks.common.markup import Page, Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.study import ROOT, Study, data_folder
from verifiable_relu.errors import InputError
from verifiable_relu.files import read_text
from verifiable_relu.watched import resident

FAMILY = "rl_benchmarks"

SIZES = (1_000, 10_000, 100_000)
"""The numbers of instances of the lists."""

_ENDS = 1_000
"""The answers at either end of a list whose rate is measured."""

_LOOK = 0.5
"""Seconds between two looks at the memory."""


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Answer the lists that have no record yet.

    Raises:
        InputError: if the family is missing, or the command fails.
    """
    for size in asked.sizes:
        about = {"size": size, "method": asked.method, "jobs": asked.jobs}
        if records.has("list", {**about, "again": True}):
            continue
        with tempfile.TemporaryDirectory() as folder:
            files = listed(data_folder().resolve() / "vnncomp" / FAMILY, size, Path(folder))
            for again in (False, True):
                found = ran(Path(folder), asked.method, asked.jobs)
                records.append("list", {**about, "files": files, "again": again, **found})


def listed(family: Path, size: int, folder: Path) -> int:
    """Write ``instances.csv`` and the property files that are new; returns how many different files the list names.

    Raises:
        InputError: if the family's table or a file is missing.
    """
    from verifiable_relu.spec import limits, read_instances

    rows = read_instances(family / "instances.csv")
    texts = {row.vnnlib: read_text(row.vnnlib, limits.BYTES) for row in rows}
    with (folder / "instances.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        for number in range(size):
            row = rows[number // 2 % len(rows)]
            path = row.vnnlib
            if number % 2:
                path = folder / f"{number}.vnnlib"
                path.write_text(f"{texts[row.vnnlib]}\n(assert (<= Y_0 {10**6 + number}.0))\n", encoding="utf-8")
            table.writerow((row.onnx, path, row.timeout))
    return size // 2 + min(len(rows), -(-size // 2))


def ran(folder: Path, method: str, jobs: int) -> Record:
    """Answer the list of a folder by the command ``certify``.

    Returns:
        Seconds of the wall clock to the first answer and to the end, processor seconds of the command with its workers,
        rates, and memory in MiB.

    Raises:
        InputError: if the command fails.
    """
    line = [sys.executable, "-m", "verifiable_relu", "certify", "--spec", str(folder / "instances.csv"), "--quiet"]
    line += ["--out", str(folder / "out"), "--method", method, "--jobs", str(jobs)]
    load, before, start = load_average(), os.times(), time.perf_counter()
    times: list[float] = []
    largest = {"command": 0, "worker": 0}
    with (
        (folder / "errors").open("w+") as errors,
        subprocess.Popen(
            line, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        assert process.stdout is not None
        looking = threading.Thread(target=_look, args=(process, largest), daemon=True)
        looking.start()
        for _ in process.stdout:
            times.append(time.perf_counter() - start)
        process.wait()
        looking.join()
        if process.returncode:
            errors.seek(0)
            raise InputError(f"certify ended with status {process.returncode}: {errors.read()[-300:]}")
    after, ends = os.times(), min(_ENDS, len(times) // 2)
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "answers": len(times), "first": round(times[0], 2), "wall": round(times[-1], 1), "cpu": round(cpu, 1),
        "rate_first": round(ends / (times[ends] - times[0]), 1),
        "rate_last": round(ends / (times[-1] - times[-1 - ends]), 1),
        "command_mib": largest["command"] >> 20, "worker_mib": largest["worker"] >> 20,
        "load": [round(load, 1), round(load_average(), 1)],
    }  # fmt: skip


def _look(process: subprocess.Popen[bytes], largest: dict[str, int]) -> None:
    """Note the largest resident memory of a command and of its workers until the command ends."""
    while process.poll() is None:
        largest["command"] = max(largest["command"], resident(process.pid))
        for child in _children(process.pid):
            largest["worker"] = max(largest["worker"], resident(child))
        time.sleep(_LOOK)


def _children(pid: int) -> Iterator[int]:
    """The processes that a process has started, with all its threads (Linux)."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            yield from map(int, path.read_text().split())
        except OSError:
            continue


def page(records: Sequence[Record], folder: Path) -> Page:
    """The page with two rows for each list, by its latest records."""
    latest = {(r["method"], r["jobs"], r["size"], r["again"]): r for r in of(records, "list")}
    made = Page("lists")
    made.add("# Long lists of instances")
    made.bullets(notes(records))
    for method, jobs in dict.fromkeys((method, jobs) for method, jobs, *_ in latest):
        rows = [_row(latest[key]) for key in sorted(latest) if key[:2] == (method, jobs)]
        columns = (
            "instances", "property files", "from records", "first answer s", "all s", "processor s",
            "first answers/s", "last answers/s", "command MiB", "worker MiB", "load average",
        )  # fmt: skip
        made.add(f"`{FAMILY}`, method `{method}`, `--jobs {jobs}`.", Table(columns, rows))
    return made


def _row(record: Record) -> tuple[str, ...]:
    return (
        f"{record['size']:,}", f"{record['files']:,}", "all" if record["again"] else "",
        f"{record['first']:.1f}", f"{record['wall']:.0f}", f"{record['cpu']:.0f}",
        f"{record['rate_first']:.0f}", f"{record['rate_last']:.0f}",
        str(record["command_mib"]), str(record["worker_mib"]),
        " to ".join(map(str, record["load"])),
    )  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the lists and of how they are answered."""
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N", help="instances of each list")
    parser.add_argument("--method", default="crown", help="how the instances are answered (default: crown)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes that answer (default: 2)")


STUDY = Study("benchmarks.speed.lists", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
