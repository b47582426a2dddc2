"""A part of a campaign as a task: instances are read, answered and certified wherever an executor performs it.

The process that runs the campaign keeps the records. It is told of every answer as soon as there is one (``Answered``),
and is asked what earlier runs have recorded (``Wanted``).
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

from verifiable_relu.campaign.inputs import Entry, Loader
from verifiable_relu.campaign.result import Key, Result
from verifiable_relu.campaign.runner import Case, run
from verifiable_relu.campaign.store import recall
from verifiable_relu.supervisor.executors import Deadline, Report
from verifiable_relu.supervisor.memory import limit_memory
from verifiable_relu.verifiers.base import TimeBudget, Verifier

PROGRESS_EVERY_S = 0.2
"""The least seconds between two messages about stages."""

GRACE_S = 0.8
"""Seconds after its time limit in which an instance may still end by itself."""


@dataclass(frozen=True)
class Job:
    """The part of a campaign's task that is the same for all instances.

    Attributes:
        verifier: the verifier, which records proofs if certificates are wanted.
        loader: the reader of the instances, which has read none.
        certificates: the folder of certificates; None where none are wanted.
        memory: the bytes that a worker's process, and each process that it starts, may have resident; None for half of
            the machine's memory.
        limits: of the verifier's work. Instances are charged, and their time limits count, by its clock.
        debug: whether an exception of reading that is a fault of the program is raised.
    """

    verifier: Verifier
    loader: Loader
    certificates: Path | None = None
    memory: int | None = None
    budget: TimeBudget = TimeBudget()  # noqa: RUF009 -- frozen
    debug: bool = False

    @cached_property
    def pickled(self) -> bytes:
        """The job for another process, made once for all parts."""
        return pickle.dumps(self)


Numbered = tuple[int, Entry]
"""An instance with its number in the campaign."""


class Answered(NamedTuple):
    """Message that an instance is answered, perhaps by an earlier run; with the text of a new counterexample."""

    number: int
    result: Result
    recorded: bool
    counterexample: str | None = None


class Wanted(NamedTuple):
    """Question for an earlier answer; the fields are the arguments of ``Store.find``."""

    key: Key
    timeout: float
    checked: bool


class StageReached(NamedTuple):
    """Message that ``done`` of ``total`` queries of a part have been through a stage."""

    name: str
    done: int
    total: int


@dataclass(frozen=True)
class InstancePart:
    """Instances of a campaign that are answered as one batch: a task.

    Attributes:
        job: the job. In another process, its networks stay prepared from one part to the next.
        entries: the instances.
        folder: the one from which relative paths are taken; None for that of the process.
        known: earlier answers, where questions get none (``Executor.answers``); answers are then returned, too, since
            messages may be lost.
    """

    job: Job
    entries: Sequence[Numbered]
    folder: Path | None = None
    known: Mapping[Key, Result] | None = None

    def __call__(self, report: Report) -> list[Answered]:
        """Answer the instances; messages go to the process that runs the campaign."""
        messages = _Messages(self, report)
        perform(self.job, messages.entries, messages)
        return messages.said

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self.job.pickled, self.entries, self.folder, self.known)


def _unpickled(job: bytes, *rest: object) -> InstancePart:
    return InstancePart(_job(job), *rest)  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def _job(pickled: bytes) -> Job:
    job: Job = pickle.loads(pickled)
    job.loader.clock = job.budget.clock
    if job.memory is not None:
        limit_memory(job.memory)
    return job


def perform(job: Job, entries: Sequence[Numbered], messages: _Messages) -> None:
    """Answer instances as one batch."""
    timed = job.budget.clock is time.perf_counter
    cases: list[Case | Result] = []
    for number, entry in entries:
        if timed:
            messages.report(Deadline(entry.timeout + GRACE_S, number))
        cases.append(job.loader.read(entry, job.debug))
    if timed:
        # Certificates come on top of the limits.
        left = sum(GRACE_S + max(0.0, case.timeout - case.spent) for case in cases if isinstance(case, Case))
        messages.report(Deadline(math.inf if job.certificates is not None else left + GRACE_S))
    certificates = None
    if job.certificates is not None:
        # Imported here, because most campaigns need no checker.
        from verifiable_relu.campaign.certificates import Certificates

        certificates = Certificates(job.certificates)
    run(cases, job.verifier, messages, messages, certificates, job.budget)


class _Messages:
    """The records and the observer of a part's run: what it is told becomes messages.

    Args:
        part: the part.
        report: sends a message.

    Attributes:
        entries: the part's instances, with paths that are right in this process.
        said: the answers, where they are returned.
    """

    def __init__(self, part: InstancePart, report: Report) -> None:
        self.report, self.said = report, list[Answered]()
        self.entries, self._known = part.entries, part.known
        self._moved = ""
        if part.folder is not None and part.folder != Path.cwd():
            self._moved = f"{part.folder}/"
            self.entries = [(number, _below(part.folder, entry)) for number, entry in part.entries]
        self._counterexample: str | None = None
        self._reported = 0.0

    def find(self, key: Key, timeout: float, checked: bool) -> Result | None:
        if self._known is not None:
            return recall(self._known, key, timeout, checked)
        found: Result | None = self.report(Wanted(key, timeout, checked))
        return found

    def holds(self, result: Result) -> bool:
        # The process that runs the campaign sees to it.
        return True

    def append(self, result: Result, counterexample: str | None) -> None:
        # It goes with the message about the result, which comes next.
        self._counterexample = counterexample

    def result(self, number: int, result: Result, recorded: bool) -> None:
        text, self._counterexample = self._counterexample, None
        if self._moved:
            onnx = result.onnx.removeprefix(self._moved).replace(f"'{self._moved}", "'")
            result = replace(result, onnx=onnx, vnnlib=result.vnnlib.removeprefix(self._moved))
        answered = Answered(self.entries[number][0], result, recorded, text)
        if self._known is not None:
            self.said.append(answered)
        self.report(answered)

    def enter(self, number: int, result: Result) -> None:
        pass

    def tabulate(self) -> None:
        pass

    def stage(self, name: str, done: int, total: int) -> None:
        if time.monotonic() - self._reported > PROGRESS_EVERY_S:
            self._reported = time.monotonic()
            self.report(StageReached(name, done, total))


def _below(folder: Path, entry: Entry) -> Entry:
    """The instance with relative paths taken from a folder."""
    return replace(entry, vnnlib=folder / entry.vnnlib, onnx=None if entry.onnx is None else folder / entry.onnx)
