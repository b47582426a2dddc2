"""Campaigns: instances are drawn from a list as they are needed, go out in parts, and are forgotten when answered.

A part is answered as one batch, so that instances of one network share the work on it. Parts have one size for nearly
all of a long list, and the last ones are single instances: at the end no worker should wait long for another.
"""

from __future__ import annotations

import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from verifiable_relu.campaign.inputs import Entry
from verifiable_relu.campaign.result import Result, versions
from verifiable_relu.campaign.runner import QUIET, Late, Observer, Records, keep, lost
from verifiable_relu.campaign.worker import Answered, Job, Limit, Numbered, Stage, Wanted, perform
from verifiable_relu.errors import CallFailed, InputError, OutOfTime
from verifiable_relu.files import on_disk
from verifiable_relu.verifiers.base import described
from verifiable_relu.verifiers.solvers.process import Worker, most_memory

_SHARE = 4
"""A part is at most the instances that are drawn, divided by this number and by that of the workers."""

_PART = 64
"""The most instances of a part."""

_PART_BYTES = 16 << 20
"""The most bytes of the files of a part, as they lie on the disk, unless it is a single instance."""

_DRAWN = 2 * _PART * _SHARE
"""The instances that are drawn from the list ahead of the answers, for each worker."""


class Slot(Protocol):
    """A worker, which answers one part after another."""

    def answer(self, job: bytes, part: Sequence[Numbered], tell: Callable[[Any], Any]) -> None:
        """Answer a part, in this thread or elsewhere, and return when that is done.

        Args:
            job: the ``Job``, pickled.
            part: the instances.
            tell: takes messages (``worker.Ask``), from any thread, the same message possibly twice.

        Raises:
            MemoryError: if the worker has used more memory than it may.
            Late: if the time limit has passed that the worker named last.
            CallFailed: if the worker has ended, whatever the reason.
        """

    def stop(self) -> None:
        """Make ``answer``, which may run in another thread, fail soon."""


class Local:
    """A worker that is a process of this machine.

    Args:
        worker: the process, which calls ``worker.answer``.
        memory: the bytes that the process may have resident; None for half of the machine's memory.
        bounds: the bytes that bounds may hold at once, where the user says so: the process may have twice as much and
            512 MiB on top of what it has at its start (``most_memory``).
    """

    def __init__(self, worker: Worker, memory: int | None = None, bounds: int | None = None) -> None:
        self._memory, self._bounds = memory, bounds
        self._started = 0
        self._reading: int | None = None
        self._worker = worker

    def answer(self, job: bytes, part: Sequence[Numbered], tell: Callable[[Any], Any]) -> None:
        def heard(message: Any) -> Any:
            if isinstance(message, Limit):
                self._worker.until(message.seconds)
                self._reading = message.number
            return tell(message)

        try:
            self._worker.start()
        except OutOfTime:
            raise CallFailed("its process takes too long to start") from None
        self._started = self._started or self._worker.resident
        memory = most_memory(self._memory, self._bounds, self._started)
        try:
            self._worker.call((job, part), memory=memory, converse=heard)
        except OutOfTime:
            raise Late(self._reading) from None

    def stop(self) -> None:
        self._worker.kill()


def run_parallel(
    entries: Iterable[Entry],
    job: Job,
    slots: Sequence[Slot],
    store: Records | None = None,
    observer: Observer = QUIET,
    alone: bool = False,
) -> None:
    """Answer all instances, and record each result as soon as it is known.

    A worker that ends while it works on an instance, or uses too much memory or time, costs this instance alone: it is
    *unknown*, and the others go to a new worker.

    Args:
        entries: the instances, which are drawn as they are needed, and numbered from 0.
        job: what is to be done with each of them.
        slots: the workers; without any, this process answers, and no time limit can end what it does in a library.
        store: an open store for the records, or None. An instance that a record there answers is not asked again.
        observer: the object that is told of stages and results, from several threads, one at a time.
        alone: whether each instance is a part of its own, in the order of ``entries``. The instances of a part share
            its time evenly, and parts differ in size: seconds can be compared only where instances are alone.

    Raises:
        KeyboardInterrupt: if the user interrupts, after all results known so far are recorded.
        InputError: if the store cannot be written; or what ``entries`` raise, after the instances before are answered,
            unless it is raised before any instance is asked.
    """
    campaign = _Campaign(entries, job, slots, store, observer, alone)
    try:
        campaign.draw()
        if campaign.fault is not None:
            raise campaign.fault
        if not slots:
            campaign.work(None)
        else:
            campaign.run()
    finally:
        if store is not None:
            store.tabulate()
    if campaign.fault is not None:
        raise campaign.fault


class _Campaign:
    """The state of one run; its methods are for any thread.

    Attributes:
        source: the instances that are not drawn yet, with their numbers; None if there are no more.
        fault: the error with which the list of instances ended.
        job: the job.
        method: the text by which records know its verifier.
        slots: the workers.
        store: the store of the records, or None.
        observer: the object that is told of stages and results.
        alone: whether each instance is a part of its own.
        open: the instances that are drawn and not answered, by number.
        line: those of them that no part had yet, with those of one network together.
        waiting: the parts that are next, before ``line``.
        busy: the number of workers that have a part.
        stopped: whether no further part is given out.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        job: Job,
        slots: Sequence[Slot],
        store: Records | None,
        observer: Observer,
        alone: bool,
    ) -> None:
        self.alone = alone
        self.source: Iterator[tuple[int, Entry]] | None = enumerate(entries)
        self.fault: InputError | None = None
        self.job = job
        self.method = described(job.verifier, job.limits)
        self.slots = slots
        self.store = store
        self.observer = observer
        self.open: dict[int, Entry] = {}
        self.line: list[int] = []
        self.waiting: list[list[int]] = []
        self.busy = 0
        self.stopped = False
        self.lock = threading.RLock()

    @cached_property
    def pickled(self) -> bytes:
        return pickle.dumps(self.job)

    def run(self) -> None:
        """Have all workers answer parts until none is left."""
        with ThreadPoolExecutor(len(self.slots), "campaign") as threads:
            try:
                working = [threads.submit(self.work, slot) for slot in self.slots]
                wait(working, return_when=FIRST_EXCEPTION)
            finally:
                # The user may have interrupted while threads were started, so that not all are in ``working``.
                self.end()
            for one in working:
                one.result()

    def draw(self) -> None:
        """Draw instances until enough are in line for some parts, or there are no more."""
        most = _DRAWN * max(1, len(self.slots))
        while self.source is not None and len(self.line) < most // 2 and not self.stopped:
            taken = 0
            try:
                for number, entry in islice(self.source, most):
                    taken += 1
                    if not self.recorded(number, entry):
                        self.open[number] = entry
                        self.line.append(number)
                    if self.stopped:
                        break
            except InputError as error:
                self.fault = error
            if self.fault is not None or not taken:
                self.source = None
        if self.alone:
            return
        # Networks keep their order in line, so that a network whose instances are being answered stays the next one.
        of = {number: str(self.open[number].onnx or self.open[number].vnnlib.parent) for number in self.line}
        place = {network: index for index, network in enumerate(dict.fromkeys(of.values()))}
        self.line.sort(key=lambda number: (place[of[number]], number))

    def recorded(self, number: int, entry: Entry) -> bool:
        """Whether a record answers an instance, by the bytes of its files; if so, tell of it."""
        if self.store is None or (isinstance(self.store, Sized) and not len(self.store)):
            return False
        files = self.job.loader.files(entry)
        key = files, self.method, versions()["verifiable_relu"]
        found = self.store.find(key, entry.timeout, self.job.certificates is not None) if files else None
        if found is None:
            return False
        named = replace(found, onnx=str(entry.onnx), vnnlib=str(entry.vnnlib))
        keep(self.store, self.observer, number, named, recorded=True)
        return True

    def work(self, slot: Slot | None) -> None:
        """Have a worker, or this process, answer parts until none is left, or the run is stopped."""
        while part := self.next():
            numbered = [(number, self.open[number]) for number in part]
            try:
                if slot is None:
                    perform(self.job, numbered, self.tell)
                else:
                    slot.answer(self.pickled, numbered, self.tell)
            except (CallFailed, Late, MemoryError) as error:
                if slot is None:
                    raise
                self.failed(part, error)
            finally:
                with self.lock:
                    self.busy -= 1

    def next(self) -> list[int]:
        """The next part, for a worker that is busy from now on; empty if none is left."""
        with self.lock:
            if self.stopped:
                return []
            if self.waiting:
                part = self.waiting.pop()
            else:
                if len(self.line) < _DRAWN * max(1, len(self.slots)) // 2:
                    self.draw()
                size = min(_PART, math.ceil(len(self.line) / (_SHARE * max(1, len(self.slots)))))
                size = min(1, size) if self.alone else self.within(self.line[:size])
                part, self.line = self.line[:size], self.line[size:]
            self.busy += bool(part)
            return part

    def within(self, part: Sequence[int]) -> int:
        """The number of instances at the beginning of a part whose files are small enough together."""
        size, seen = 0, set[Path]()
        for count, number in enumerate(part):
            for path in (self.open[number].vnnlib, self.open[number].onnx):
                if path is not None and path not in seen:
                    seen.add(path)
                    with suppress(OSError, ValueError):
                        size += os.stat(on_disk(path)).st_size
            if size > _PART_BYTES:
                return max(1, count)
        return len(part)

    def tell(self, message: Answered | Wanted | Stage | Limit) -> Result | None:
        """Take a message of a worker; returns the answer to it."""
        with self.lock:
            if isinstance(message, Stage):
                self.observer.stage(message.name, message.done, message.total)
            elif isinstance(message, Answered):
                self.keep(message)
            elif isinstance(message, Wanted) and self.store is not None:
                return self.store.find(message.key, message.timeout, message.checked)
            return None

    def keep(self, message: Answered) -> None:
        """Record an answer, unless the instance has one already."""
        if self.open.pop(message.number, None) is not None:
            keep(
                self.store, self.observer, message.number, message.result, message.counterexample, message.recorded
            )  # fmt: skip

    def failed(self, part: Sequence[int], error: CallFailed | Late | MemoryError) -> None:
        """Take the end of a worker: what is left of its part is asked in halves, and an instance alone is at fault.

        An instance that is not read within its time limit is known to be at fault.
        """
        with self.lock:
            left = [number for number in part if number in self.open]
            if self.stopped or not left:
                return
            late = error.number if isinstance(error, Late) and error.number in left else None
            if late is not None:
                others = [number for number in left if number != late]
                self.waiting += [others] if others else []
            elif len(left) > 1:
                self.waiting += [left[len(left) // 2 :], left[: len(left) // 2]]
                return
            number = left[0] if late is None else late
            entry = self.open[number]
            asked = str(entry.onnx or ""), str(entry.vnnlib), entry.timeout
            error = Late(None) if late is None and isinstance(error, Late) else error
            result = lost(*asked, self.job.verifier, self.job.limits, error)
            self.keep(Answered(number, result, False))

    def end(self) -> None:
        """Give out no further part, stop the workers that are busy, and return when none is."""
        # Drawing, which may go on for long where records answer all, holds the lock.
        self.stopped = True
        while self.busy:
            # A worker that was about to start is stopped by the next attempt.
            for slot in self.slots:
                slot.stop()
            time.sleep(0.1)
