"""The one queue: work that goes to other processes, of this machine (``Local``) or of a cluster (``cluster``).

A hand performs one task after another. A training is a task, and so is a part of a campaign (``worker.Part``), whose
instances are answered as one batch and share the work on a network. Instances are drawn from a list as they are needed,
and are forgotten when answered. Parts have one size for nearly all of a long list, and the last ones are single
instances: at the end no hand should wait long for another.
"""

from __future__ import annotations

import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from verifiable_relu.campaign.inputs import Entry
from verifiable_relu.campaign.result import Result, versions
from verifiable_relu.campaign.runner import QUIET, Late, Observer, Records, keep, lost
from verifiable_relu.campaign.worker import Answered, Ask, Job, Limit, Part, Stage, Wanted, perform
from verifiable_relu.errors import CallFailed, InputError, OutOfTime
from verifiable_relu.files import on_disk
from verifiable_relu.spec.find import paths
from verifiable_relu.verifiers.base import described
from verifiable_relu.verifiers.solvers.process import Worker, most_memory

_SHARE = 4
"""A part is at most the instances that are drawn, divided by this number and by that of the hands."""

_PART = 64
"""The most instances of a part."""

_PART_BYTES = 16 << 20
"""The most bytes of the files of a part, as they lie on the disk, unless it is a single instance."""

_DRAWN = 2 * _PART * _SHARE
"""The instances that are drawn from the list ahead of the answers, for each hand."""

SERVE = "verifiable_relu.campaign.worker:perform_task"
"""The function of a process that performs tasks."""

_STARTING = 3600.0
"""The seconds that a process may take to start. A study may run at idle priority on a busy machine, where the import of
torch has taken more than two minutes."""

Task = Callable[[Ask], Any]
"""A picklable function, which sends messages while it works, and returns a result that can be pickled."""

T = TypeVar("T", bound=Task)


class Hand(Protocol):
    """Who performs one task after another."""

    def perform(self, task: Task, ask: Ask) -> Any:
        """The result of a task.

        Args:
            task: the task.
            ask: takes the task's messages, from any thread, the same message possibly twice.

        Raises:
            MemoryError: if the task has used more memory than it may.
            Late: if the time limit has passed that the task named last.
            CallFailed: if the task raised an exception, or if its process has ended, whatever the reason.
        """

    def stop(self) -> None:
        """Make ``perform``, which may run in another thread, fail soon."""


class Local:
    """A hand that is a process of this machine.

    Args:
        worker: the process, which serves ``SERVE``; None for one with one thread.
        memory: the bytes that the process may have resident; None for half of the machine's memory.
        bounds: the bytes that bounds may hold at once, where the user says so: the process may have twice as much and
            512 MiB on top of what it has at its start (``most_memory``).
    """

    def __init__(self, worker: Worker | None = None, memory: int | None = None, bounds: int | None = None) -> None:
        self._memory, self._bounds = memory, bounds
        self._started = 0
        # A process that is kept from one task to the next keeps the data and networks that it has prepared.
        self._worker = worker or Worker(SERVE, {"OMP_NUM_THREADS": "1"}, kept_memory=1.0, starting=_STARTING)

    def perform(self, task: Task, ask: Ask) -> Any:
        reading: int | None = None

        def heard(message: Any) -> Any:
            nonlocal reading
            if isinstance(message, Limit):
                self._worker.until(message.seconds)
                reading = message.number
            return ask(message)

        try:
            self._worker.start()
        except OutOfTime:
            raise CallFailed("its process takes too long to start") from None
        self._started = self._started or self._worker.resident
        memory = most_memory(self._memory, self._bounds, self._started)
        try:
            return self._worker.call(task, memory=memory, converse=heard)
        except OutOfTime:
            raise Late(reading) from None

    def stop(self) -> None:
        self._worker.kill()


@contextmanager
def hired(jobs: int, address: str | None) -> Iterator[Sequence[Hand]]:
    """Hands that are stopped at the end of the block.

    Args:
        jobs: the number of processes of this machine, with one thread each, if there is no address.
        address: of a Dask cluster's scheduler, ``dask://HOST:PORT``.

    Raises:
        InputError: if there is no such cluster (``cluster.Cluster``).
    """
    if address is not None:
        from verifiable_relu.campaign.cluster import Cluster

        with Cluster(address) as cluster:
            yield cluster.hands
        return
    made = [Local() for _ in range(jobs)]
    try:
        yield made
    finally:
        for hand in made:
            hand.stop()


def share(
    hands: Sequence[Hand],
    draw: Callable[[], T | None],
    done: Callable[[T, Any], None],
    ask: Ask = lambda message: None,
    over: threading.Event | None = None,
) -> None:
    """Have hands perform tasks until none is left. A task that fails ends no other.

    Args:
        hands: the hands.
        draw: returns the next task, None if none is left; called from several threads, one at a time.
        done: called as ``draw`` is, with every task and its result as soon as there is one, which is an exception
            (``CallFailed``, ``Late``, ``MemoryError``) if the task failed.
        ask: takes the tasks' messages (``Hand.perform``).
        over: is set as soon as no further task is begun.

    Raises:
        KeyboardInterrupt: if the user interrupts; ``done`` has then been called for all tasks that had ended.
        Exception: what ``draw`` and ``done`` raise; no further task is begun after that.
    """
    over = over or threading.Event()
    lock, busy = threading.Lock(), list[Hand]()

    def work(hand: Hand) -> None:
        busy.append(hand)
        try:
            while not over.is_set():
                with lock:
                    task = None if over.is_set() else draw()
                if task is None:
                    return
                try:
                    result = hand.perform(task, ask)
                except (CallFailed, Late, MemoryError) as error:
                    if over.is_set():
                        return
                    result = error
                with lock:
                    done(task, result)
        finally:
            busy.remove(hand)

    with ThreadPoolExecutor(len(hands), "hand") as threads:
        try:
            working = [threads.submit(work, hand) for hand in hands]
            wait(working, return_when=FIRST_EXCEPTION)
        finally:
            # The user may have interrupted while threads were started, so that not all are in ``working``.
            over.set()
            while busy:
                # A process that was about to start is ended by the next attempt.
                for hand in list(busy):
                    hand.stop()
                time.sleep(0.1)
        for one in working:
            one.result()


def run_parallel(
    entries: Iterable[Entry],
    job: Job,
    hands: Sequence[Hand],
    store: Records | None = None,
    observer: Observer = QUIET,
    alone: bool = False,
) -> None:
    """Answer all instances, and record each result as soon as it is known.

    A hand that fails while it works on an instance, or uses too much memory or time, costs this instance alone: it is
    *unknown*, and the others go to a new process.

    Args:
        entries: the instances, which are drawn as they are needed, and numbered from 0.
        job: what is to be done with each of them.
        hands: who answers; without any, this process does, and no time limit can end what it does in a library.
        store: an open store for the records, or None. An instance that a record there answers is not asked again.
        observer: the object that is told of stages and results, from several threads, one at a time.
        alone: whether each instance is a part of its own, in the order of ``entries``. The instances of a part share
            its time evenly, and parts differ in size: seconds can be compared only where instances are alone.

    Raises:
        KeyboardInterrupt: if the user interrupts, after all results known so far are recorded.
        InputError: if the store cannot be written; or what ``entries`` raise, after the instances before are answered,
            unless it is raised before any instance is asked.
    """
    queue = _Queue(enumerate(entries), job, max(1, len(hands)), store, observer, alone)
    try:
        queue.draw()
        if queue.fault is not None:
            raise queue.fault
        if hands:
            share(hands, queue.part, queue.failed, queue.tell, queue.over)
        while not hands and (numbers := queue.next()):
            perform(job, [(number, queue.open[number]) for number in numbers], queue.tell)
    finally:
        if store is not None:
            store.tabulate()
    if queue.fault is not None:
        raise queue.fault


@dataclass
class _Queue:
    """The instances of one campaign; its methods are for any thread.

    Attributes:
        source: the instances that are not drawn yet, with their numbers; None if there are no more.
        job: the job.
        hands: the number of hands.
        store: the store of the records, or None.
        observer: the object that is told of stages and results.
        alone: whether each instance is a part of its own.
        fault: the error with which the list of instances ended.
        open: the instances that are drawn and not answered, by number.
        line: those of them that no part had yet, with those of one network together.
        waiting: the parts that are next, before ``line``.
        over: whether no further part is given out.
    """

    source: Iterator[tuple[int, Entry]] | None
    job: Job
    hands: int
    store: Records | None
    observer: Observer
    alone: bool
    fault: InputError | None = None
    open: dict[int, Entry] = field(default_factory=dict)
    line: list[int] = field(default_factory=list)
    waiting: list[list[int]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @cached_property
    def pickled(self) -> bytes:
        return pickle.dumps(self.job)

    @cached_property
    def method(self) -> str:
        return described(self.job.verifier, self.job.limits)

    def draw(self) -> None:
        """Draw instances until enough are in line for some parts, or there are no more."""
        most = _DRAWN * self.hands
        while self.source is not None and len(self.line) < most // 2 and not self.over.is_set():
            taken = 0
            try:
                for number, entry in islice(self.source, most):
                    taken += 1
                    if not self.recorded(number, entry):
                        self.open[number] = entry
                        self.line.append(number)
                    if self.over.is_set():
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

    def part(self) -> Part | None:
        """The next part, as a task; None if none is left."""
        with self.lock:
            numbers = self.next()
            return Part(self.pickled, [(number, self.open[number]) for number in numbers]) if numbers else None

    def next(self) -> list[int]:
        """The instances of the next part; none if none are left."""
        if self.waiting:
            return self.waiting.pop()
        if len(self.line) < _DRAWN * self.hands // 2:
            self.draw()
        size = min(_PART, math.ceil(len(self.line) / (_SHARE * self.hands)))
        size = min(1, size) if self.alone else self.within(self.line[:size])
        part, self.line = self.line[:size], self.line[size:]
        return part

    def within(self, part: Sequence[int]) -> int:
        """The number of instances at the beginning of a part whose files are small enough together."""
        size, seen = 0, set[Path]()
        for count, number in enumerate(part):
            for path in (self.open[number].vnnlib, *paths(self.open[number].onnx)):
                if path not in seen:
                    seen.add(path)
                    with suppress(OSError, ValueError):
                        size += os.stat(on_disk(path)).st_size
            if size > _PART_BYTES:
                return max(1, count)
        return len(part)

    def tell(self, message: Answered | Wanted | Stage | Limit) -> Result | None:
        """Take a message of a part; returns the answer to it."""
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

    def failed(self, part: Part, error: Exception | None) -> None:
        """Take the end of a part. If it failed, what is left is asked in halves, and an instance alone is at fault.

        An instance that is not read within its time limit is known to be at fault.
        """
        with self.lock:
            left = [number for number, _ in part.entries if number in self.open]
            if error is None or not left:
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
            result = lost(*asked, self.job.verifier, self.job.limits, error, self.job.loader.arithmetic)
            self.keep(Answered(number, result, False))
