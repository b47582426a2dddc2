"""The queue of a campaign: instances go in parts, which are tasks, to whatever executor there is.

The instances of a part are answered as one batch and share the work on a network. Instances are drawn from a list as
they are needed, and are forgotten when answered. Parts have one size for nearly all of a long list, and the last ones
are single instances: at the end no process should wait long for another.

The process that runs the campaign keeps the records. A part tells it of every answer as soon as there is one
(``Answered``), and asks it what earlier runs have recorded (``Wanted``).
"""

from __future__ import annotations

import math
import os
import pickle
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from verifiable_relu.campaign.inputs import InstanceFiles, Loader
from verifiable_relu.campaign.result import Key, Result, versions
from verifiable_relu.campaign.runner import QUIET, Case, Observer, ResultKeeper, lost, run
from verifiable_relu.campaign.store import Store
from verifiable_relu.errors import InputError, OutOfTime
from verifiable_relu.files import on_disk
from verifiable_relu.search.batch import Verifier, described
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.spec.find import paths
from verifiable_relu.supervisor.forks import limit_memory
from verifiable_relu.supervisor.workers import Deadline, Executor, Report, run_tasks

GRACE_S = 0.8  # Seconds after its time limit in which an instance may still end by itself
_PROGRESS_EVERY_S = 0.2  # The least seconds between two messages about stages
_PARTS_PER_WORKER = 4  # Instances that are drawn make at least so many parts for each worker
_PART = 64  # The most instances of a part
_PART_BYTES = 16 << 20  # The most bytes of the files of a part, as they lie on the disk, unless it is a single instance
_DRAWN = 2 * _PART * _PARTS_PER_WORKER  # Instances drawn ahead of the answers, for each worker
Numbered = tuple[int, InstanceFiles]  # An instance with its number in the campaign


@dataclass(frozen=True)
class Job:
    """The part of a campaign's task that is the same for all instances, which are charged by the budget's clock.

    A worker's process, and each that it starts, may have ``memory`` bytes resident; None for the default.
    """

    verifier: Verifier
    loader: Loader
    certificates: Path | None = None
    memory: int | None = None
    budget: TimeBudget = TimeBudget()  # noqa: RUF009 -- frozen
    debug: bool = False

    @cached_property
    def pickled(self) -> bytes:
        return pickle.dumps(self)


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
    """Instances, with their numbers in the campaign, that are answered as one batch: a task.

    In another process, the job's networks stay prepared from one part to the next. Where questions get no answers
    (``Executor.answers``), earlier ones are ``known``, and answers are returned, too, since messages may be lost.
    """

    job: Job
    entries: Sequence[Numbered]
    known: Mapping[Key, Result] | None = None

    def __call__(self, report: Report) -> list[Answered]:
        """Answer the instances; messages go to the process that runs the campaign."""
        job, messages = self.job, _Messages(self, report)
        timed = job.budget.clock is time.perf_counter
        cases: list[Case | Result] = []
        for number, entry in self.entries:
            if timed:
                report(Deadline(entry.timeout + GRACE_S, number))
            cases.append(job.loader.read(entry, job.debug))
        if timed:
            # Certificates come on top of the limits.
            left = sum(GRACE_S + max(0.0, case.timeout - case.spent) for case in cases if isinstance(case, Case))
            report(Deadline(math.inf if job.certificates is not None else left + GRACE_S))
        certificates = None
        if job.certificates is not None:
            # Imported here, because most campaigns need no checker.
            from verifiable_relu.campaign.certificates import Certificates

            certificates = Certificates(job.certificates)
        run(cases, job.verifier, messages, messages, certificates, job.budget)
        return messages.said

    def __reduce__(self) -> tuple[object, ...]:
        return _part, (self.job.pickled, self.entries, self.known)


@lru_cache(maxsize=1)
def _job(pickled: bytes) -> Job:
    job: Job = pickle.loads(pickled)
    job.loader.clock = job.budget.clock
    if job.memory is not None:
        limit_memory(job.memory)
    return job


def _part(job: bytes, *rest: Any) -> InstancePart:
    return InstancePart(_job(job), *rest)


class _Messages(Observer):
    """The keeper of a part's results and its observer: what it is told becomes messages, or is ``said`` at the end."""

    def __init__(self, part: InstancePart, report: Report) -> None:
        self.said: list[Answered] = []
        self._part, self._report, self._reported = part, report, 0.0

    def find(self, key: Key, timeout: float, checked: bool) -> Result | None:
        found: Result | None
        if self._part.known is None:
            found = self._report(Wanted(key, timeout, checked))
            return found
        found = self._part.known.get(key)
        return found if found is not None and found.answers(timeout, checked) else None

    def keep(self, number: int, result: Result, counterexample: str | None, recorded: bool) -> None:
        answered = Answered(self._part.entries[number][0], result, recorded, counterexample)
        if self._part.known is not None:
            self.said.append(answered)
        self._report(answered)

    def tabulate(self) -> None:
        pass

    def stage(self, name: str, done: int, total: int) -> None:
        if time.monotonic() - self._reported > _PROGRESS_EVERY_S:
            self._reported = time.monotonic()
            self._report(StageReached(name, done, total))


def run_parallel(
    entries: Iterable[InstanceFiles],
    job: Job,
    executor: Executor,
    store: ResultKeeper | None = None,
    observer: Observer = QUIET,
) -> None:
    """Answer all instances, and record each result as soon as it is known.

    A process that fails while it works on an instance, or uses too much memory or time, costs this instance alone: it
    is *unknown*, and the others go to a new process. Instances are drawn as they are needed, and numbered from 0; one
    that a record answers is not asked again. The observer is told from several threads, one at a time. Raises what
    ``run`` raises, or what ``entries`` raise, after the instances before are answered.
    """
    queue = _Queue(enumerate(entries), job, executor, store, observer)
    try:
        queue.draw()
        if queue.fault is None:
            run_tasks(executor, queue.next, queue.end, queue.hear)
    finally:
        if store is not None:
            store.tabulate()
    if queue.fault is not None:
        raise queue.fault


class _Queue:
    """The instances of one campaign; ``hear`` is for any thread, the other methods for one."""

    def __init__(
        self, source: Iterator[Numbered], job: Job, executor: Executor, store: ResultKeeper | None, observer: Observer
    ) -> None:
        self._source: Iterator[Numbered] | None = source
        self._job, self._executor, self._store, self._observer = job, executor, store, observer
        # The error with which the list of instances ended.
        self.fault: InputError | None = None
        self._method = described(job.verifier, job.budget)
        # The instances that are drawn and not answered; those of them that no part had yet, with those of one network
        # together; and the parts that are next, before these.
        self._open: dict[int, InstanceFiles] = {}
        self._line: list[int] = []
        self._waiting: list[list[int]] = []
        self._lock = threading.RLock()

    def draw(self) -> None:
        """Draw instances until enough are in line for some parts, or there are no more."""
        most = _DRAWN * self._executor.size
        while self._source is not None and len(self._line) < most // 2:
            taken = 0
            try:
                for number, entry in islice(self._source, most):
                    taken += 1
                    self._open[number] = entry
                    if not self._is_recorded(number, entry):
                        self._line.append(number)
            except InputError as error:
                self.fault = error
            if self.fault is not None or not taken:
                self._source = None
        # Networks keep their order in line, so that a network whose instances are being answered stays the next one.
        of = {number: str(self._open[number].onnx or self._open[number].vnnlib.parent) for number in self._line}
        place = {network: index for index, network in enumerate(dict.fromkeys(of.values()))}
        self._line.sort(key=lambda number: (place[of[number]], number))

    def _is_recorded(self, number: int, entry: InstanceFiles) -> bool:
        """Return True if a record answers an instance, by the bytes of its files, and tell of it."""
        if self._store is None or (isinstance(self._store, Sized) and not len(self._store)):
            return False
        files = self._job.loader.files(entry)
        key = files, self._method, versions()["verifiable_relu"]
        found = self.hear(Wanted(key, entry.timeout, self._job.certificates is not None)) if files else None
        if found is not None:
            self.hear(Answered(number, replace(found, onnx=str(entry.onnx), vnnlib=str(entry.vnnlib)), True))
        return found is not None

    def next(self) -> InstancePart | None:
        """The next part; None if none is left."""
        if self._waiting:
            return self._part(self._waiting.pop())
        if len(self._line) < _DRAWN * self._executor.size // 2:
            self.draw()
        size = min(_PART, math.ceil(len(self._line) / (_PARTS_PER_WORKER * self._executor.size)))
        size = self._within(self._line[:size])
        numbers, self._line = self._line[:size], self._line[size:]
        return self._part(numbers) if numbers else None

    def _part(self, numbers: Sequence[int]) -> InstancePart:
        entries = [(number, self._open[number]) for number in numbers]
        if self._executor.answers:
            return InstancePart(self._job, entries)
        # Where files are named, records have been looked for by their bytes.
        unnamed = any(entry.onnx is None for _, entry in entries)
        known = self._store.known if unnamed and isinstance(self._store, Store) else {}
        # Workers may have another folder.
        here = Path.cwd()
        entries = [(n, replace(e, vnnlib=here / e.vnnlib, onnx=e.onnx and here / e.onnx)) for n, e in entries]
        return InstancePart(self._job, entries, known)

    def _within(self, part: Sequence[int]) -> int:
        """The number of instances at the beginning of a part whose files are small enough together."""
        size, seen = 0, set[Path]()
        for count, number in enumerate(part):
            for path in {self._open[number].vnnlib, *paths(self._open[number].onnx)} - seen:
                seen.add(path)
                with suppress(OSError, ValueError):
                    size += os.stat(on_disk(path)).st_size
            if size > _PART_BYTES:
                return max(1, count)
        return len(part)

    def hear(self, message: object) -> Result | None:
        """Take a message of a part; returns the answer to it."""
        with self._lock:
            if isinstance(message, StageReached):
                self._observer.stage(message.name, message.done, message.total)
            elif isinstance(message, Wanted):
                return None if self._store is None else self._store.find(*message)
            # An answer may come twice, the second time because the first could not be kept.
            elif isinstance(message, Answered) and message.number in self._open:
                entry, result = self._open[message.number], message.result
                if result.vnnlib != str(entry.vnnlib):
                    # A worker in another folder has other names than those that the user gave.
                    here = f"{Path.cwd()}/"
                    onnx = result.onnx.removeprefix(here).replace(f"'{here}", "'")
                    result = replace(result, onnx=onnx, vnnlib=str(entry.vnnlib))
                if self._store is not None:
                    self._store.keep(message.number, result, message.counterexample, message.recorded)
                self._observer.result(message.number, result, message.recorded)
                del self._open[message.number]
            return None

    def end(self, part: InstancePart, result: list[Answered] | Exception) -> None:
        """Take the end of a part. An instance that is not read within its time limit is known to be at fault."""
        with self._lock:
            if not isinstance(result, Exception):
                for message in result:
                    self.hear(message)
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
            entry, job = self._open[guilty], self._job
            asked = str(entry.onnx or ""), str(entry.vnnlib), entry.timeout
            self.hear(Answered(guilty, lost(asked, job.verifier, job.budget, result, job.loader.arithmetic), False))
