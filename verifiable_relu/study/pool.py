"""Tasks in processes of their own, several at once; a task whose process ends is that task's failure alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from verifiable_relu.campaign.parallel import Slot
from verifiable_relu.campaign.worker import Ask, Numbered, answer
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.verifiers.solvers.process import Worker

_STARTING = 3600.0
"""The seconds that a process may take to start. A study may run at idle priority on a busy machine, where the import of
torch has taken more than two minutes."""


class Task(Protocol):
    """A picklable object that is called without arguments in another process."""

    def __call__(self) -> Any:
        """The task's result, which can be pickled."""


T = TypeVar("T", bound=Task)

Done = Callable[[T, Any], None]
"""A function of a task and its result, which is an exception (``CallFailed``, ``MemoryError``) if the task failed."""


class Pool:
    """Processes of this machine, with one thread each; a context manager that ends them.

    A process performs tasks and answers parts of campaigns, one after another: torch is imported once, and data and
    networks are kept.

    Args:
        jobs: the number of processes.
    """

    def __init__(self, jobs: int) -> None:
        one_thread = {"OMP_NUM_THREADS": "1"}
        self._workers = [Worker(f"{__name__}:perform", one_thread, 1.0, _STARTING) for _ in range(jobs)]

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.stop()

    @property
    def slots(self) -> list[Slot]:
        """The processes as workers of a campaign."""
        return [_Slot(worker) for worker in self._workers]

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
        with ThreadPoolExecutor(len(self._workers), "study") as threads:
            working = [threads.submit(run.work, worker) for worker in self._workers]
            try:
                wait(working, return_when=FIRST_EXCEPTION)
            finally:
                run.stopped = True
                # Nothing is left to end, unless the user has interrupted or a thread has failed. A process that was
                # about to start is ended by the next attempt.
                while wait(working, timeout=0.0).not_done:
                    for worker in self._workers:
                        worker.kill()
                    wait(working, timeout=0.1)
        for one in working:
            one.result()


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

    def work(self, worker: Worker) -> None:
        """Have a worker perform tasks until none is left."""
        while (task := self._next()) is not None:
            result: Any
            try:
                # No task asks anything, but all calls of a worker take a function that answers.
                result = worker.call(task, converse=lambda _: None)
            except (CallFailed, MemoryError) as error:
                if self.stopped:
                    return
                result = error
            except OutOfTime:
                result = CallFailed("its process takes too long to start")
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


class _Slot:
    """A process of a pool as the worker of a campaign."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def answer(self, job: bytes, part: Sequence[Numbered], tell: Callable[[Any], Any]) -> None:
        try:
            self._worker.call(_Part(job, tuple(part)), converse=tell)
        except OutOfTime:
            raise CallFailed("its process takes too long to start") from None

    def stop(self) -> None:
        self._worker.kill()


def perform(task: Task | _Part, ask: Ask) -> Any:
    """Perform a task, or answer a part of a campaign, with one thread; this runs in the process of a pool."""
    if isinstance(task, _Part):
        return answer((task.job, task.entries), ask)
    import torch

    torch.set_num_threads(1)
    return task()
