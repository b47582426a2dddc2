"""The queue of a campaign: its instances go to an executor in parts, each a task.

The instances of a part are answered as one batch and share the work on a network. Parts have one size for nearly all of
a long list, and the last ones are single instances: at the end no process should wait long for another.

The process that runs the campaign keeps the records. A part reports each answer to it at once, and asks
it for those of earlier runs: calls of the part's observer go there as messages. If nobody listens to
a part (``Executor.listens``), each is a single instance, whose answer the task returns.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verifiable_relu.campaign.inputs import InstanceFiles, Loader, unanswered
from verifiable_relu.campaign.result import QUIET, Key, Observer, Result, versions
from verifiable_relu.campaign.runner import Case, open_certificates, run
from verifiable_relu.errors import OutOfTime
from verifiable_relu.files import on_disk
from verifiable_relu.search.batch import Verifier, described
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.spec.find import paths
from verifiable_relu.supervisor.forks import limit_memory
from verifiable_relu.supervisor.workers import Deadline, Executor, Report, run_tasks

GRACE_S = 0.8  # Seconds after its time limit in which an instance may still end by itself
_PROGRESS_EVERY_S = 0.2  # The least seconds between two messages about stages
_PARTS_PER_WORKER = 4  # The least number of parts, for each worker, that the instances left make
_PART = 64  # The most instances of a part
_PART_BYTES = 16 << 20  # The most bytes of the files of a part, as they lie on the disk, unless it is a single instance
Numbered = tuple[int, InstanceFiles]  # An instance with its number in the campaign
Answer = tuple[int, Result, bool]  # The arguments of ``Observer.result``


@dataclass(frozen=True)
class Job:
    """The part of a campaign's task that is the same for all instances.

    A worker's process, and each that it starts, may have ``memory`` bytes resident; None for the default.
    """

    verifier: Verifier
    loader: Loader
    certificates: Path | None = None
    memory: int | None = None
    budget: TimeBudget = TimeBudget()  # noqa: RUF009 -- frozen
    debug: bool = False


@dataclass(frozen=True)
class InstancePart:
    """Instances, with their numbers in the campaign, that are answered as one batch: a task."""

    job: Job
    entries: Sequence[Numbered]

    def __call__(self, report: Report) -> list[Answer]:
        """Answer the instances, with messages to the campaign's process; returns the answers that it does not take."""
        job, observer = self.job, _Reporter([number for number, _ in self.entries], report)
        if job.memory is not None:
            limit_memory(job.memory)
        cases: list[Case | Result] = []
        for number, entry in self.entries:
            report(Deadline(entry.timeout + GRACE_S, number))
            cases.append(job.loader.read(entry, job.debug))
        left = sum(GRACE_S + max(0.0, case.timeout - case.spent) for case in cases if isinstance(case, Case))
        # Certificates come on top of the limits.
        report(Deadline(math.inf if job.certificates is not None else left + GRACE_S))
        run(cases, job.verifier, observer, open_certificates(job.certificates), job.budget)
        return observer.unheard


class _Reporter(Observer):
    """Observer of a part that turns its calls into messages; answers that nobody takes are ``unheard``."""

    def __init__(self, numbers: Sequence[int], report: Report) -> None:
        self.unheard: list[Answer] = []
        self._numbers, self._report, self._reported = numbers, report, 0.0

    def find(self, key: Key, timeout: float, checked: bool) -> Result | None:
        found: Result | None = self._report(("find", key, timeout, checked))
        return found

    def stage(self, name: str, done: int, total: int) -> None:
        if time.monotonic() - self._reported > _PROGRESS_EVERY_S:
            self._reported = time.monotonic()
            self._report(("stage", name, done, total))

    def result(self, number: int, result: Result, recorded: bool) -> None:
        answer = self._numbers[number], result, recorded
        if not self._report(("result", *answer)):
            self.unheard.append(answer)


def run_parallel(entries: Sequence[InstanceFiles], job: Job, executor: Executor, observer: Observer = QUIET) -> None:
    """Answer all instances, and report each result as soon as it is known.

    A process that fails while it works on an instance, or uses too much memory or time, costs this instance alone: it
    is *unknown*, and the others go to a new process. Instances are numbered from 0; one that a record answers is not
    asked again. The observer is told from several threads, one at a time. Raises what ``run`` raises.
    """
    queue = _Queue(entries, job, executor, observer)
    run_tasks(executor, queue.next, queue.end, queue.hear)


class _Queue:
    """The instances of one campaign; ``hear`` is for any thread, the other methods for one."""

    def __init__(self, entries: Sequence[InstanceFiles], job: Job, executor: Executor, observer: Observer) -> None:
        self._job, self._executor, self._observer = job, executor, observer
        self._method = described(job.verifier, job.budget)
        self._open = dict(enumerate(entries))  # The instances that are not answered
        # Those of them that no part had yet, from the last one on, with those of one network together.
        networks = [str(entry.onnx or entry.vnnlib.parent) for entry in entries]
        place = {network: index for index, network in enumerate(dict.fromkeys(networks))}
        self._line = sorted(self._open, key=lambda number: (place[networks[number]], number), reverse=True)
        self._waiting: list[list[int]] = []  # The parts that are next, before these
        self._lock = threading.RLock()

    def _is_recorded(self, number: int, entry: InstanceFiles) -> bool:
        """Return True if a record answers an instance, by the bytes of its files, and report it."""
        if not self._observer.has_records:
            return False
        known = self._job.loader.files(entry)
        if not known and not self._executor.listens and isinstance(case := self._job.loader.read(entry), Case):
            # No part can ask whether there is a record.
            known = case.digest
        wanted = (known, self._method, versions()["verifiable_relu"]), entry.timeout, self._job.certificates is not None
        if not known or (found := self._observer.find(*wanted)) is None:
            return False
        # A certificate speaks of its own files, which equal ones of another name are not.
        if self._job.certificates is not None and Path(found.vnnlib).resolve() != entry.vnnlib.resolve():
            return False
        self._answer(number, replace(found, onnx=str(entry.onnx or found.onnx), vnnlib=str(entry.vnnlib)), True)
        return True

    def next(self) -> InstancePart | None:
        """Return the next part; None if none is left."""
        if self._waiting:
            return self._part(self._waiting.pop())
        while self._line:
            most = math.ceil(len(self._line) / (_PARTS_PER_WORKER * self._executor.size))
            part = self._line[: -1 - (min(_PART, most) if self._executor.listens else 1) : -1]
            part = part[: self._within(part)]
            del self._line[-len(part) :]
            with self._lock:
                if part := [number for number in part if not self._is_recorded(number, self._open[number])]:
                    return self._part(part)
        return None

    def _part(self, numbers: Sequence[int]) -> InstancePart:
        # Workers may have another folder.
        here = Path() if self._executor.listens else Path.cwd()
        entries = [(number, self._open[number]) for number in numbers]
        entries = [(n, replace(e, vnnlib=here / e.vnnlib, onnx=e.onnx and here / e.onnx)) for n, e in entries]
        return InstancePart(self._job, entries)

    def _within(self, part: Sequence[int]) -> int:
        """Return the number of instances at the beginning of a part whose files are small enough together."""
        size, seen = 0, set[Path]()
        for count, number in enumerate(part):
            for path in {self._open[number].vnnlib, *paths(self._open[number].onnx)} - seen:
                seen.add(path)
                with suppress(OSError, ValueError):
                    size += os.stat(on_disk(path)).st_size
            if size > _PART_BYTES:
                return max(1, count)
        return len(part)

    def hear(self, message: Any) -> Any:
        """Call the method of the observer that a part's message names, and return its result."""
        if isinstance(message, Deadline):
            # In this process, nothing can be ended.
            return None
        with self._lock:
            kind, *about = message
            return self._answer(*about) if kind == "result" else getattr(self._observer, kind)(*about)

    def _answer(self, number: int, result: Result, recorded: bool) -> bool:
        # An answer may come twice, the second time because the first could not be kept.
        if (entry := self._open.get(number)) is not None:
            if result.vnnlib != str(entry.vnnlib):
                # A worker in another folder has other names than those that the user gave.
                here = f"{Path.cwd()}/"
                onnx = result.onnx.removeprefix(here).replace(f"'{here}", "'")
                result = replace(result, onnx=onnx, vnnlib=str(entry.vnnlib))
            self._observer.result(number, result, recorded)
            del self._open[number]
        return True

    def end(self, part: InstancePart, result: list[Answer] | Exception) -> None:
        """Handle the end of a part. An instance that is not read within its time limit is at fault."""
        with self._lock:
            if not isinstance(result, Exception):
                for answer in result:
                    self._answer(*answer)
                return
            left = [number for number, _ in part.entries if number in self._open]
            if isinstance(result, OutOfTime) and result.subject in left:
                guilty = left.pop(left.index(result.subject))
                self._waiting += [left] if left else []
            elif len(left) == 1:
                guilty, result = left[0], OutOfTime() if isinstance(result, OutOfTime) else result
            else:
                # What is left is asked in halves: an instance that is alone is at fault.
                self._waiting += [half for half in (left[len(left) // 2 :], left[: len(left) // 2]) if half]
                return
            of = self._job.loader.arithmetic, self._job.verifier.name, self._method
            self._answer(guilty, unanswered(self._open[guilty], result, *of), False)
