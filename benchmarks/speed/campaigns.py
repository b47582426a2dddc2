"""How long does a campaign take in one process, in several, and on a local Dask cluster, and what does a kill cost?

    python -m benchmarks.speed.campaigns
    python -m benchmarks.speed.campaigns --limit 60
    python -m benchmarks.speed.campaigns --instances 3 --results trial

The instances are the first ones of two families of the verification competition, below the folder that
VERIFIABLE_RELU_DATA names. Each way answers all of them once, by the command ``certify``, and leaves one record. The
cluster has one process for each worker; its start is not part of the seconds of the clock, but of those of the
processor. Needs the extra ``dask``.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.machine import load_average
from benchmarks.common.markup import Page, Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.study import ROOT, Study, data_folder
from verifiable_relu.errors import InputError, missing
from verifiable_relu.files import read_text

FAMILIES = {"acasxu": 110, "mnist_fc": 90}
"""The number of instances of each family, the first ones of its ``instances.csv``."""

WORKERS = 2
"""The processes of the ways that have several."""

_LARGEST = 1 << 26
"""Bytes of a table."""


@dataclass(frozen=True)
class Way:
    """How a campaign is run.

    Attributes:
        workers: the number of processes that answer.
        dask: whether they are workers of a Dask cluster.
        killed: whether the command is killed when half of the answers are on record, and then started again.
    """

    workers: int
    dask: bool = False
    killed: bool = False


WAYS = {
    "`--jobs 1`": Way(1),
    f"`--jobs {WORKERS}`": Way(WORKERS),
    f"`--executor dask://…`, {WORKERS} workers": Way(WORKERS, dask=True),
    f"`--jobs {WORKERS}`, killed and started again": Way(WORKERS, killed=True),
}


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Run the ways that have no record for this time limit.

    Raises:
        InputError: if the instances are missing, or Dask is not installed.
    """
    from rich.progress import track

    families = {name: min(count, asked.instances or count) for name, count in FAMILIES.items()}
    rows = instances(data_folder().resolve() / "vnncomp", families, asked.limit)
    for name, way in track(list(WAYS.items()), "ways"):
        about = {"way": name, "families": families, "limit": asked.limit}
        if records.has("campaign", about):
            continue
        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder) / "instances.csv"
            with table.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(rows)
            load = load_average()
            found = ran(way, table, Path(folder) / "out")
        found["load"] = [round(load, 1), round(load_average(), 1)]
        records.append("campaign", {**about, "count": len(rows), **found})


def instances(folder: Path, families: Mapping[str, int], limit: float) -> list[tuple[str, str, float]]:
    """Network, property and time limit of instances of each family, in their order.

    Raises:
        InputError: if a family's table is missing.
    """
    found = []
    for family, count in families.items():
        lines = read_text(folder / family / "instances.csv", _LARGEST).splitlines()
        for onnx, vnnlib, _ in list(csv.reader(lines))[:count]:
            found.append((str(folder / family / onnx), str(folder / family / vnnlib), limit))
    return found


def ran(way: Way, table: Path, out: Path) -> Record:
    """Run the command over all instances of a table.

    Returns:
        Wall-clock and processor seconds, the number of instances with each answer, and, for a way that is killed, the
        number of answers on record at the kill and of those that the second command asked again. The processor seconds
        of a command that is killed are not known.

    Raises:
        InputError: if the command fails, or Dask is not installed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found: Record = {}
    with _cluster(way.workers) if way.dask else nullcontext(("--jobs", str(way.workers))) as where:
        line = [sys.executable, "-m", "verifiable_relu.certify", "--spec", str(table), "--out", str(out), "--quiet"]
        start = time.perf_counter()
        if way.killed:
            known = _killed([*line, *where], out / "records.jsonl", sum(1 for _ in table.open(encoding="utf-8")) // 2)
        _finished([*line, *where])
        wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found |= {"wall": round(wall, 1), "cpu": None if way.killed else round(cpu, 1)}
    rows = list(csv.DictReader((out / "results.csv").read_text(encoding="utf-8").splitlines()))
    found["answers"] = dict(sorted(Counter(row["answer"] for row in rows).items()))
    if way.killed:
        asked = Counter(_decided(out / "records.jsonl"))
        found["known"], found["again"] = len(known), sum(asked[one] > 1 for one in known)
        found["lost"] = sum(asked[one] == 0 for one in known)
    return found


def _finished(line: Sequence[str]) -> None:
    """Run a command to its end.

    Raises:
        InputError: with what it said last, if it did not end as ``certify`` ends with answers.
    """
    done = subprocess.run(line, cwd=ROOT, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode not in (0, 1):
        raise InputError((done.stderr.decode().splitlines() or [f"certify ended with status {done.returncode}"])[-1])


def _killed(line: Sequence[str], records: Path, count: int) -> list[tuple[str, str]]:
    """Run a command until it has ``count`` records, and kill it; returns what was decided then."""
    with subprocess.Popen(
        line, cwd=ROOT, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and not (records.exists() and records.read_bytes().count(b"\n") >= count):
            time.sleep(0.05)
        process.kill()
    return _decided(records)


def _decided(records: Path) -> list[tuple[str, str]]:
    """Network and property of each record that says sat or unsat."""
    from verifiable_relu.campaign.store import RESULTS
    from verifiable_relu.journal import read_journal
    from verifiable_relu.verifiers.base import Verdict

    found = read_journal(records.parent, RESULTS)
    return [(result.onnx, result.vnnlib) for result in found if result.verdict is not Verdict.UNKNOWN]


@contextmanager
def _cluster(workers: int) -> Iterator[Sequence[str]]:
    """The options of ``certify`` for a cluster of this machine, which ends with the block.

    Raises:
        InputError: if Dask is not installed.
    """
    try:
        from distributed import LocalCluster
    except ModuleNotFoundError:
        raise missing("a Dask cluster", "distributed") from None
    os.environ.update(_environment())
    with LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None) as cluster:
        yield "--executor", cluster.scheduler_address.replace("tcp://", "dask://")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def page(records: Sequence[Record], folder: Path) -> Page:
    """The page with a row for each way, by its latest record."""
    campaigns: dict[tuple[int, float], dict[str, Record]] = {}
    for record in of(records, "campaign"):
        campaigns.setdefault((record["count"], record["limit"]), {})[record["way"]] = record
    made = Page("campaigns")
    made.add("# Campaigns")
    made.bullets(notes(records))
    for ways in campaigns.values():
        first, rows = next(iter(ways.values())), [_row(record) for record in ways.values()]
        families = " and ".join(f"{count} of `{name}`" for name, count in first["families"].items())
        title = f"{first['count']} instances, {families}; at most {first['limit']:g} s of the clock each."
        made.add(title, Table(("way", "s", "processor s", "answers", "load average"), rows))
    for record in (record for ways in campaigns.values() for record in ways.values()):
        if "known" in record:
            made.add(
                f"{record['count']} instances, limit {record['limit']:g} s: killed (SIGKILL) with {record['known']} "
                f"instances decided; the same command, started again, lost {record['lost']} of these and asked "
                f"{record['again']} again."
            )
    return made


def _row(record: Record) -> tuple[str, str, str | None, str, str]:
    answers = ", ".join(f"{count} {answer}" for answer, count in record["answers"].items())
    cpu = None if record["cpu"] is None else f"{record['cpu']:.0f}"
    return record["way"], f"{record['wall']:.0f}", cpu, answers, " to ".join(map(str, record["load"]))


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the instances and their time limit."""
    most = max(FAMILIES.values())
    parser.add_argument("--instances", type=int, choices=range(1, most + 1), metavar="N", help="at most N of a family")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of each instance at the most (default 20)")


STUDY = Study("benchmarks.speed.campaigns", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
