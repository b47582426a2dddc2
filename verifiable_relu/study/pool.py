"""Tasks on several hands at once: processes of this machine or an executor's. A task that fails ends no other.

A hand performs tasks and answers parts of campaigns, one after another: torch is imported once, and data and networks
are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from verifiable_relu.campaign.parallel import Slot
from verifiable_relu.campaign.worker import Answered, Ask, Numbered, answer
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.verifiers.solvers.process import Worker

_STARTING = 3600.0
"""The seconds that a process may take to start. A study may run at idle priority on a busy machine, where the import of
torch has taken more than two minutes."""

_BUSY = threading.Lock()
"""Held while this process, if it is an executor's, works: threads of torch's global random numbers would mix."""


class Task(Protocol):
    """A picklable object that is called without arguments in another process."""

    def __call__(self) -> Any:
        """The task's result, which can be pickled."""


T = TypeVar("T", bound=Task)

Done = Callable[[T, Any], None]
"""A function of a task and its result, which is an exception (``CallFailed``, ``MemoryError``) if the task failed."""


class Hand(Slot, Protocol):
    """Who performs one task after another, and answers one part of a campaign after another."""

    def perform(self, task: Task) -> Any:
        """The result of a task.

        Raises:
            MemoryError: if the task has used more memory than there is.
            CallFailed: if the task raised an exception, or if its process has ended, whatever the reason.
        """


class Pool:
    """Hands that share tasks; a context manager that stops them.

    Args:
        slots: the hands, at least one.
    """

    def __init__(self, slots: Sequence[Hand]) -> None:
        self.slots = slots

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hand in self.slots:
            hand.stop()

    def perform(self, tasks: Sequence[T], done: Done[T]) -> None:
        """Perform tasks.

        Args:
            tasks: the tasks, which are begun in this order.
            done: called with every task and its result as soon as there is one, from several threads, one at a time.

        Raises:
            KeyboardInterrupt: if the user interrupts; ``done`` has then been called for all tasks that had ended.
            Exception: what ``done`` raises; no further task is begun after that.
        """
        run = _Run(tasks, done)
        with ThreadPoolExecutor(len(self.slots), "study") as threads:
            working = [threads.submit(run.work, hand) for hand in self.slots]
            try:
                wait(working, return_when=FIRST_EXCEPTION)
            finally:
                run.stopped = True
                # Nothing is left to end, unless the user has interrupted or a thread has failed. A process that was
                # about to start is ended by the next attempt.
                while wait(working, timeout=0.0).not_done:
                    for hand in self.slots:
                        hand.stop()
                    wait(working, timeout=0.1)
        for one in working:
            one.result()


def processes(jobs: int) -> Pool:
    """A pool of as many processes of this machine, with one thread each."""
    return Pool([_Process() for _ in range(jobs)])


def executed(executor: Executor, jobs: int) -> Pool:
    """A pool that hands at most ``jobs`` tasks or parts at a time to an executor, which is not shut down.

    The executor's processes need this package, and the study's folder and data under the same absolute paths. A process
    works on one task at a time, whatever its number of threads. The answers of a part are recorded when all are there.
    """
    return Pool([Submitted(executor) for _ in range(jobs)])


@contextmanager
def hands(jobs: int, address: str | None) -> Iterator[Pool]:
    """The pool of as many processes of this machine, or of a Dask cluster's workers, whose answers come one by one.

    Args:
        jobs: the number of processes, if there is no address.
        address: of the cluster's scheduler, ``dask://HOST:PORT``.

    Raises:
        InputError: if there is no such cluster (``campaign.cluster.Cluster``).
    """
    if address is None:
        with processes(jobs) as pool:
            yield pool
        return
    from verifiable_relu.campaign.cluster import Cluster

    with Cluster(address) as cluster, Pool([_OnCluster(cluster.executor, slot) for slot in cluster.slots]) as pool:
        yield pool


class _Run(Generic[T]):
    """The tasks that are left, for any thread.

    Attributes:
        stopped: whether no further task is begun, and what fails from now on is no failure of a task.
    """

    def __init__(self, tasks: Sequence[T], done: Done[T]) -> None:
        self.stopped = False
        self._left = list(reversed(tasks))
        self._done = done
        self._lock = threading.Lock()

    def work(self, hand: Hand) -> None:
        """Have a hand perform tasks until none is left."""
        while (task := self._next()) is not None:
            result: Any
            try:
                result = hand.perform(task)
            except (CallFailed, MemoryError) as error:
                if self.stopped:
                    return
                result = error
            with self._lock:
                self._done(task, result)

    def _next(self) -> T | None:
        with self._lock:
            return self._left.pop() if self._left and not self.stopped else None


@dataclass(frozen=True)
class _Part:
    """A part of a campaign: the job, pickled, and the instances."""

    job: bytes
    entries: tuple[Numbered, ...]


class _Process:
    """A process of this machine, with one thread."""

    def __init__(self) -> None:
        self._worker = Worker(f"{__name__}:perform", {"OMP_NUM_THREADS": "1"}, 1.0, _STARTING)

    def perform(self, task: Task) -> Any:
        # No task asks anything, but all calls of a worker take a function that answers.
        return self._call(task, lambda _: None)

    def answer(self, job: bytes, part: Sequence[Numbered], tell: Callable[[Any], Any]) -> None:
        self._call(_Part(job, tuple(part)), tell)

    def stop(self) -> None:
        self._worker.kill()

    def _call(self, task: Task | _Part, tell: Callable[[Any], Any]) -> Any:
        try:
            return self._worker.call(task, converse=tell)
        except OutOfTime:
            raise CallFailed("its process takes too long to start") from None


class Submitted:
    """One task or part at a time for an executor, which decides where it is worked on."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._future: Future[Any] | None = None

    def perform(self, task: Task) -> Any:
        return self._result(_alone, task)

    def answer(self, job: bytes, part: Sequence[Numbered], tell: Callable[[Any], Any]) -> None:
        for message in self._result(_answers, job, tuple(part)):
            tell(message)

    def stop(self) -> None:
        if self._future is not None:
            self._future.cancel()

    def _result(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            self._future = self._executor.submit(function, *arguments)
            return self._future.result()
        except MemoryError:
            raise
        # An executor raises what the task raised, and errors of its own if a process has ended or was never there.
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise CallFailed(f"{type(error).__name__}: {error}") from None


class _OnCluster(Submitted):
    """One task or part at a time for a Dask cluster."""

    def __init__(self, executor: Executor, slot: Slot) -> None:
        super().__init__(executor)
        self._slot = slot

    def answer(self, job: bytes, part: Sequence[Numbered], tell: Callable[[Any], Any]) -> None:
        self._slot.answer(job, part, tell)

    def stop(self) -> None:
        super().stop()
        self._slot.stop()


def perform(task: Task | _Part, ask: Ask) -> Any:
    """Perform a task, or answer a part of a campaign, with one thread; this runs in the process of a pool."""
    if isinstance(task, _Part):
        return answer((task.job, task.entries), ask)
    import torch

    torch.set_num_threads(1)
    return task()


def _alone(task: Task) -> Any:
    """Perform a task in a process of an executor."""
    with _BUSY:
        return perform(task, lambda _: None)


def _answers(job: bytes, entries: tuple[Numbered, ...]) -> list[Answered]:
    """The answers of a part of a campaign, in a process of an executor."""
    said: list[Answered] = []

    def ask(message: Any) -> None:
        if isinstance(message, Answered):
            said.append(message)

    with _BUSY:
        perform(_Part(job, entries), ask)
    return said
