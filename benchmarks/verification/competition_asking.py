"""The command ``certify``, asked about instances of the competition: one process for many, or one for each."""

from __future__ import annotations

import csv
import hashlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import verifiable_relu
from benchmarks.common.machine import commit, load_average
from benchmarks.common.records import Records
from benchmarks.verification.competition_instances import Instance
from verifiable_relu.certify import cores
from verifiable_relu.errors import InputError

if TYPE_CHECKING:
    from verifiable_relu.campaign import Result

PACKAGE = Path(verifiable_relu.__file__).resolve().parent
"""Of the package that is measured."""

_ENDED_BY_PEOPLE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Ran:
    """How a command ended.

    Attributes:
        status: its exit status; minus the number of the signal that ended it.
        complaint: the last line of its stderr.
        wall, cpu: seconds of the clock and of the processor, those of its own processes included.
    """

    status: int
    complaint: str
    wall: float
    cpu: float

    @property
    def crashed(self) -> bool:
        """Whether it ended in another way than ``certify`` ends: with a verdict, for bad input, or for a fault."""
        return self.status not in (0, 1, 2)


@dataclass(frozen=True)
class Question:
    """What is asked of every instance in the same way.

    Attributes:
        folder: of the family.
        title: the fields of its records that say what is asked.
        method: of ``certify``.
        limit: seconds per instance at most; an instance for which the competition gave less has less.
    """

    folder: Path
    title: Mapping[str, Any]
    method: str
    limit: float

    def seconds(self, instance: Instance) -> float:
        """The time limit of an instance."""
        return min(self.limit, instance.seconds)

    def of(self, instance: Instance) -> dict[str, Any]:
        """The fields that say what is asked about an instance."""
        return {**self.title, "onnx": instance.onnx, "vnnlib": instance.vnnlib}

    def files(self, instance: Instance) -> tuple[str, str]:
        """The network and the property."""
        # Imported here, since --help need not wait for the import.
        from verifiable_relu.spec.find import onnx_files

        return str(self.folder / onnx_files(instance.onnx)), str(self.folder / instance.vnnlib)


def certify(patience: float, *arguments: str) -> Ran:
    """Run the command with one thread, unless OMP_NUM_THREADS says another number.

    Args:
        patience: seconds after which it is killed; its limit of time should have ended it long before.
        arguments: of the command line.

    Raises:
        KeyboardInterrupt: if it was interrupted, or ended by a person's signal.
    """
    line = [sys.executable, "-m", "verifiable_relu.certify", *arguments]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    # Byte code is kept, as it is where people install the package.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    try:
        done = subprocess.run(
            line, cwd=PACKAGE.parent, env=environment, capture_output=True, text=True, timeout=patience, check=False
        )
        status, said = done.returncode, done.stderr
    except subprocess.TimeoutExpired:
        status, said = -signal.SIGKILL, f"it was killed after {patience:.0f} s"
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if status == 130 or -status in _ENDED_BY_PEOPLE:
        raise KeyboardInterrupt
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ran(status, (said.strip().splitlines() or [""])[-1], wall, cpu)


def processes(
    question: Question, instances: Sequence[Instance], records: Records, jobs: int = 1, certificates: bool = False
) -> None:
    """One command, and one record of kind ``answer``, for each instance that has none.

    Args:
        question: what is asked.
        instances: of the family.
        records: of the study.
        jobs: how many processes share the search.
        certificates: whether certificates are written and checked.
    """
    from rich.console import Console
    from rich.progress import track

    for instance in track(instances, question.folder.name, console=Console(stderr=True)):
        if records.has("answer", question.of(instance)):
            continue
        onnx, vnnlib = question.files(instance)
        seconds = question.seconds(instance)
        with tempfile.TemporaryDirectory() as folder:
            asked = ("--spec", vnnlib, "--net", onnx, "--method", question.method, "--timeout", str(seconds))
            more = ("--certificates", f"{folder}/certificates") if certificates else ()
            ran = certify(3 * seconds + 120, *asked, "--out", folder, "--quiet", "--jobs", str(jobs), *more)
            result = _results(Path(folder)).get((onnx, vnnlib))
        found = {"seconds": round(ran.wall, 3), "cpu": round(ran.cpu, 3), "load": round(load_average(), 2)}
        complaint = ran.complaint or f"it ended with status {ran.status}"
        records.append("answer", {**question.of(instance), **_told(result, complaint), **found, **_known(instance)})


def sharing(question: Question, instances: Sequence[Instance], records: Records) -> None:
    """As ``processes``, with a search that a process for each core shares."""
    processes(question, instances, records, cores())


def certified(question: Question, instances: Sequence[Instance], records: Records) -> None:
    """As ``processes``, with certificates, which an answer whose trust is ``checked`` has."""
    processes(question, instances, records, 1, True)


def campaign(question: Question, instances: Sequence[Instance], records: Records) -> None:
    """One process for all instances: a record of kind ``answer`` for each, and one ``campaign`` with the whole time.

    The seconds of an instance are those that the campaign charges to it; those of the processor are not known. What the
    command has answered is in ``unfinished`` below the folder of the records until everything is recorded: a campaign
    that was interrupted or killed goes on from there, as long as the package's code is the same. Of such a campaign the
    whole time is not known.
    """
    whole = {**question.title, "count": len(instances)}
    if records.has("campaign", whole) or not instances:
        return
    digest = hashlib.sha256(repr((sorted(whole.items()), code())).encode()).hexdigest()[:16]
    folder = records.folder / "unfinished" / digest
    resumed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "instances.csv"
    limits = [question.seconds(instance) for instance in instances]
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            (*question.files(instance), seconds) for instance, seconds in zip(instances, limits, strict=True)
        )
    load = load_average()
    arguments = ("--spec", str(table), "--method", question.method, "--out", str(folder), "--quiet", "--jobs", "1")
    ran = certify(3 * sum(limits) + 300, *arguments)
    results = _results(folder)
    if not results and not ran.crashed:
        raise InputError(ran.complaint or f"certify ended with status {ran.status}", path=table)
    for instance in instances:
        if not records.has("answer", question.of(instance)):
            result = results.get(question.files(instance))
            complaint = f"the campaign ended before it was answered: {ran.complaint or f'status {ran.status}'}"
            found = {"seconds": result and round(result.seconds, 4), "cpu": None, "load": round(load, 2)}
            records.append("answer", {**question.of(instance), **_told(result, complaint), **found, **_known(instance)})
    unknown = resumed or ran.crashed
    taken = {"seconds": None if unknown else round(ran.wall, 3), "cpu": None if unknown else round(ran.cpu, 3)}
    records.append("campaign", {**whole, **taken, "load": [round(load, 2), round(load_average(), 2)]})
    rmtree(folder)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def code() -> str:
    """A digest of the package's source."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _results(folder: Path) -> dict[tuple[str, str], Result]:
    """What the command has kept in a folder, by network and property."""
    from verifiable_relu.campaign.store import RESULTS
    from verifiable_relu.journal import read_journal

    try:
        found = read_journal(folder, RESULTS)
    except InputError:
        return {}
    return {(result.onnx, result.vnnlib): result for result in found}


def _known(instance: Instance) -> dict[str, Any]:
    return {"truth": instance.truth, "competition": instance.competition, "commit": commit(PACKAGE)}


def _without_folders(text: str) -> str:
    """A message without the folders of the files that it names."""
    return re.sub(r"/(?:[^\s/]+/)+(?=[^\s/]+\.(?:onnx|vnnlib))", "", text)


def _told(result: Result | None, complaint: str) -> dict[str, Any]:
    """What a record has of a result; without one, it is an error."""
    if result is None:
        nothing = dict.fromkeys(("trust", "decided_by", "unstable", "sub_problems", "margin", "version"))
        return {"verdict": "error", "reason": "error", "detail": _without_folders(complaint), "stages": {}, **nothing}
    record = result.to_json()
    return {
        "verdict": "error" if record["reason"] == "error" else str(record["verdict"]),
        "reason": record["reason"],
        "detail": _without_folders(record["detail"]),
        "stages": {name: round(seconds, 4) for name, seconds in record["stages"].items()},
        "trust": record["trust"],
        "decided_by": record["method"],
        "unstable": record["unstable"],
        "sub_problems": record["subproblems"],
        "margin": record["margin"],
        "version": record["versions"]["verifiable_relu"],
    }
