"""Campaigns on several workers: instances go out in parts, answers come back one by one.

A part is answered as one batch, so that instances of one network share the work on it. The first parts are large and
the last ones single instances: batches bring most where many instances are left, and at the end no worker should wait
long for another.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, Protocol

from verifiable_relu.campaign.inputs import Entry
from verifiable_relu.campaign.result import Result
from verifiable_relu.campaign.runner import QUIET, Ledger, Observer, Records
from verifiable_relu.campaign.worker import Answered, Job, Numbered, Stage, Wanted
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.verifiers.base import Reason, Verdict
from verifiable_relu.verifiers.solvers.process import Worker

_SHARE = 4
"""A part is at most the instances that are left, divided by this number and by that of the workers."""


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
            CallFailed: if the worker has ended, whatever the reason.
        """

    def stop(self) -> None:
        """Make ``answer``, which may run in another thread, fail soon."""


class Local:
    """A worker that is a process of this machine.

    Args:
        memory: the bytes that the process may have resident; None for half of the machine's memory.
        threads: for its computations; None for as many as this process would have.
    """

    def __init__(self, memory: int | None = None, threads: int | None = 1) -> None:
        self._memory = memory
        # A process that is kept between two parts keeps the networks that it has prepared.
        self._worker = Worker(
            "verifiable_relu.campaign.worker:answer",
            {} if threads is None else {"OMP_NUM_THREADS": f"{threads}"},
            kept_memory=1.0,
        )

    def answer(self, job: bytes, part: Sequence[Numbered], tell: Callable[[Any], Any]) -> None:
        try:
            self._worker.call((job, part), memory=self._memory, converse=tell)
        except OutOfTime:
            # The call has no limit of time; the start of the process has one.
            raise CallFailed("its process takes too long to start") from None

    def stop(self) -> None:
        self._worker.kill()


def run_parallel(
    entries: Sequence[Entry],
    job: Job,
    slots: Sequence[Slot],
    store: Records | None = None,
    observer: Observer = QUIET,
) -> list[Result]:
    """Answer all instances on several workers, and record each result as soon as it is known.

    A worker that ends while it works on an instance, or uses too much memory, costs this instance alone: it is
    *unknown*, and the others go to a new worker.

    Args:
        entries: the instances.
        job: what is to be done with each of them.
        slots: the workers, at least one.
        store: an open store for the records, or None. An instance that a record there answers is not asked again.
        observer: the object that is told of stages and results, from several threads, one at a time.

    Returns:
        One result per instance, in their order.

    Raises:
        KeyboardInterrupt: if the user interrupts, after all results known so far are recorded.
        InputError: if the store cannot be written.
    """
    campaign = _Campaign(entries, job, slots, store, observer)
    try:
        with ThreadPoolExecutor(len(slots), "campaign") as threads:
            try:
                working = [threads.submit(campaign.work, slot) for slot in slots]
                wait(working, return_when=FIRST_EXCEPTION)
            finally:
                # The user may have interrupted while threads were started, so that not all are in ``working``.
                campaign.end()
            for one in working:
                one.result()
    finally:
        campaign.ledger.tabulate()
    return campaign.ledger.results()


class _Campaign:
    """The state of one run; its methods are for any thread.

    Attributes:
        entries: the instances.
        job: the job, pickled.
        slots: the workers.
        store: the store of the records, or None.
        observer: the object that is told of stages and results.
        waiting: the parts that are next, before what is left of ``line``.
        line: the numbers of the instances that no part had yet, with those of one network together.
        ledger: the results known so far.
        busy: the number of workers that have a part.
        stopped: whether no further part is given out.
    """

    def __init__(
        self, entries: Sequence[Entry], job: Job, slots: Sequence[Slot], store: Records | None, observer: Observer
    ) -> None:
        self.entries = entries
        self.job = pickle.dumps(job)
        self.name = job.verifier.name
        self.method = repr(job.verifier)
        self.slots = slots
        self.store = store
        self.observer = observer
        self.waiting: list[list[int]] = []
        self.line = _in_line(entries)
        self.ledger = Ledger(store, observer)
        self.busy = 0
        self.stopped = False
        self.lock = threading.RLock()

    def work(self, slot: Slot) -> None:
        """Have a worker answer parts until none is left, or the run is stopped."""
        while part := self.next():
            try:
                slot.answer(self.job, [(number, self.entries[number]) for number in part], self.tell)
            except (CallFailed, MemoryError) as error:
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
                size = math.ceil(len(self.line) / (_SHARE * len(self.slots)))
                part, self.line = self.line[:size], self.line[size:]
            self.busy += bool(part)
            return part

    def tell(self, message: Answered | Wanted | Stage) -> Result | None:
        """Take a message of a worker; returns the answer to it."""
        with self.lock:
            if isinstance(message, Stage):
                self.observer.stage(message.name, message.done, message.total)
            elif isinstance(message, Answered):
                self.keep(message)
            elif self.store is not None:
                return self.store.find(message.key, message.timeout, message.checked)
            return None

    def keep(self, message: Answered) -> None:
        """Record an answer, unless the instance has one already."""
        if message.number not in self.ledger.known:
            self.ledger.keep(message.number, message.result, message.counterexample, message.recorded)

    def failed(self, part: Sequence[int], error: CallFailed | MemoryError) -> None:
        """Take the end of a worker: what is left of its part is asked in halves, and an instance alone is at fault."""
        with self.lock:
            left = [number for number in part if number not in self.ledger.known]
            if self.stopped or not left:
                return
            if len(left) > 1:
                self.waiting += [left[len(left) // 2 :], left[: len(left) // 2]]
                return
            (number,) = left
            entry = self.entries[number]
            memory = isinstance(error, MemoryError)
            reason, detail = (Reason.MEMORY if memory else Reason.ERROR), str(error) or "out of memory"
            # Without the digest of the query, the record is no answer for later runs, which ask again.
            result = Result(
                str(entry.onnx or ""), str(entry.vnnlib), Verdict.UNKNOWN, reason, self.name, 0.0, detail=detail,
                verifier=self.method, timeout=entry.timeout,
            )  # fmt: skip
            self.keep(Answered(number, result, False))

    def end(self) -> None:
        """Give out no further part, stop the workers that are busy, and return when none is."""
        with self.lock:
            self.stopped = True
        while self.busy:
            # A worker that was about to start is stopped by the next attempt.
            for slot in self.slots:
                slot.stop()
            time.sleep(0.1)


def _in_line(entries: Sequence[Entry]) -> list[int]:
    """The numbers of instances, those of one network together, and networks in the order in which they come first."""
    first: dict[str, int] = {}
    places = [first.setdefault(str(entry.onnx or entry.vnnlib.parent), number) for number, entry in enumerate(entries)]
    return sorted(range(len(entries)), key=lambda number: (places[number], number))
