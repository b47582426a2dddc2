"""The queue of a campaign: instances go in parts to whatever executor there is.

The instances of a part are answered as one batch and share the work on a network. Instances are drawn from a list as
they are needed, and are forgotten when answered. Parts have one size for nearly all of a long list, and the last ones
are single instances: at the end no process should wait long for another.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from verifiable_relu.campaign.inputs import Entry
from verifiable_relu.campaign.result import Result, versions
from verifiable_relu.campaign.runner import QUIET, Observer, Records, keep, lost
from verifiable_relu.campaign.store import Store
from verifiable_relu.campaign.worker import Answered, InstancePart, Job, StageReached, Wanted
from verifiable_relu.errors import InputError, OutOfTime
from verifiable_relu.files import on_disk
from verifiable_relu.spec.find import paths
from verifiable_relu.supervisor.executors import Executor, run_tasks
from verifiable_relu.verifiers.base import described

_PARTS_PER_WORKER = 4
"""A part is at most the instances that are drawn, divided by this number and by that of the workers."""

_PART = 64
"""The most instances of a part."""

_PART_BYTES = 16 << 20
"""The most bytes of the files of a part, as they lie on the disk, unless it is a single instance."""

_DRAWN = 2 * _PART * _PARTS_PER_WORKER
"""The instances that are drawn from the list ahead of the answers, for each worker."""


def run_parallel(
    entries: Iterable[Entry],
    job: Job,
    executor: Executor,
    store: Records | None = None,
    observer: Observer = QUIET,
    alone: bool = False,
) -> None:
    """Answer all instances, and record each result as soon as it is known.

    A process that fails while it works on an instance, or uses too much memory or time, costs this instance alone: it
    is *unknown*, and the others go to a new process.

    Args:
        entries: the instances, which are drawn as they are needed, and numbered from 0.
        job: what is to be done with each of them.
        executor: who answers.
        store: an open store for the records, or None. An instance that a record there answers is not asked again.
        observer: the object that is told of stages and results, from several threads, one at a time.
        alone: whether each instance is a part of its own, in the order of ``entries``. The instances of a part share
            its time evenly, and parts differ in size: seconds can be compared only where instances are alone.

    Raises:
        KeyboardInterrupt: if the user interrupts, after all results known so far are recorded.
        InputError: if the store cannot be written; or what ``entries`` raise, after the instances before are answered,
            unless it is raised before any instance is asked.
    """
    queue = _Queue(enumerate(entries), job, executor, store, observer, alone)
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
    """The instances of one campaign; ``hear`` is for any thread, the other methods for one.

    Args:
        source: the instances, with their numbers.
        job, executor, store, observer, alone: as of ``run_parallel``.

    Attributes:
        fault: the error with which the list of instances ended.
    """

    def __init__(
        self,
        source: Iterator[tuple[int, Entry]],
        job: Job,
        executor: Executor,
        store: Records | None,
        observer: Observer,
        alone: bool,
    ) -> None:
        self._source: Iterator[tuple[int, Entry]] | None = source
        self._job, self._executor, self._store, self._observer, self._alone = job, executor, store, observer, alone
        self.fault: InputError | None = None
        self._method = described(job.verifier, job.budget)
        # The instances that are drawn and not answered; those of them that no part had yet, with those of one network
        # together; and the parts that are next, before these.
        self._open: dict[int, Entry] = {}
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
                    if not self._is_recorded(number, entry):
                        self._open[number] = entry
                        self._line.append(number)
            except InputError as error:
                self.fault = error
            if self.fault is not None or not taken:
                self._source = None
        if self._alone:
            return
        # Networks keep their order in line, so that a network whose instances are being answered stays the next one.
        of = {number: str(self._open[number].onnx or self._open[number].vnnlib.parent) for number in self._line}
        place = {network: index for index, network in enumerate(dict.fromkeys(of.values()))}
        self._line.sort(key=lambda number: (place[of[number]], number))

    def _is_recorded(self, number: int, entry: Entry) -> bool:
        """Return True if a record answers an instance, by the bytes of its files, and tell of it."""
        if self._store is None or (isinstance(self._store, Sized) and not len(self._store)):
            return False
        files = self._job.loader.files(entry)
        key = files, self._method, versions()["verifiable_relu"]
        with self._lock:
            found = self._store.find(key, entry.timeout, self._job.certificates is not None) if files else None
            if found is not None:
                named = replace(found, onnx=str(entry.onnx), vnnlib=str(entry.vnnlib))
                keep(self._store, self._observer, number, named, recorded=True)
        return found is not None

    def next(self) -> InstancePart | None:
        """The next part; None if none is left."""
        if self._waiting:
            return self._part(self._waiting.pop())
        if len(self._line) < _DRAWN * self._executor.size // 2:
            self.draw()
        size = min(_PART, math.ceil(len(self._line) / (_PARTS_PER_WORKER * self._executor.size)))
        size = min(1, size) if self._alone else self._within(self._line[:size])
        numbers, self._line = self._line[:size], self._line[size:]
        return self._part(numbers) if numbers else None

    def _part(self, numbers: Sequence[int]) -> InstancePart:
        entries = [(number, self._open[number]) for number in numbers]
        if self._executor.answers:
            return InstancePart(self._job, entries)
        # Where files are named, records have been looked for by their bytes.
        unnamed = any(entry.onnx is None for _, entry in entries)
        known = self._store.known if unnamed and isinstance(self._store, Store) else {}
        return InstancePart(self._job, entries, Path.cwd(), known)

    def _within(self, part: Sequence[int]) -> int:
        """The number of instances at the beginning of a part whose files are small enough together."""
        size, seen = 0, set[Path]()
        for count, number in enumerate(part):
            for path in (self._open[number].vnnlib, *paths(self._open[number].onnx)):
                if path not in seen:
                    seen.add(path)
                    with suppress(OSError, ValueError):
                        size += os.stat(on_disk(path)).st_size
            if size > _PART_BYTES:
                return max(1, count)
        return len(part)

    def hear(self, message: Answered | Wanted | StageReached) -> Result | None:
        """Take a message of a part; returns the answer to it."""
        with self._lock:
            if isinstance(message, StageReached):
                self._observer.stage(message.name, message.done, message.total)
            elif isinstance(message, Answered):
                # An answer may come twice, the second time because the first could not be kept.
                if message.number in self._open:
                    rest = message.counterexample, message.recorded
                    keep(self._store, self._observer, message.number, message.result, *rest)
                    del self._open[message.number]
            elif isinstance(message, Wanted) and self._store is not None:
                return self._store.find(message.key, message.timeout, message.checked)
            return None

    def end(self, part: InstancePart, result: list[Answered] | Exception) -> None:
        """Take the end of a part. An instance that is not read within its time limit is known to be at fault."""
        with self._lock:
            if isinstance(result, Exception):
                self._divide([number for number, _ in part.entries if number in self._open], result)
                return
            for message in result:
                self.hear(message)

    def _divide(self, left: list[int], error: Exception) -> None:
        """Have what is left of a part that failed asked in halves; an instance alone is at fault."""
        if isinstance(error, OutOfTime) and error.subject in left:
            guilty = left.pop(left.index(error.subject))
            self._waiting += [left] if left else []
        elif len(left) != 1:
            self._waiting += [half for half in (left[len(left) // 2 :], left[: len(left) // 2]) if half]
            return
        else:
            (guilty,) = left
            error = OutOfTime() if isinstance(error, OutOfTime) else error
        entry = self._open[guilty]
        asked, arithmetic = (str(entry.onnx or ""), str(entry.vnnlib), entry.timeout), self._job.loader.arithmetic
        self.hear(Answered(guilty, lost(*asked, self._job.verifier, self._job.budget, error, arithmetic), False))
