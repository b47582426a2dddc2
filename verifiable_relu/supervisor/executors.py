"""Executors: tasks for this process, for several processes of this machine, or for a Dask cluster (``cluster``).

A training is a task, and so is a part of a campaign. A task that fails, or whose process ends, ends no other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.supervisor.forks import uninterrupted
from verifiable_relu.supervisor.memory import process_memory
from verifiable_relu.supervisor.workers import Worker

Report = Callable[[Any], Any]
"""Take a message of a task; returns the answer, where the executor has one (``Executor.answers``)."""

Task = Callable[[Report], Any]
"""A picklable function that sends messages while it works, and returns a result that can be pickled."""

T = TypeVar("T", bound=Task)

_STARTING_S = 3600.0
"""Seconds that a process may take to start: at idle priority on a busy machine the import of torch takes minutes."""

_CHECK_S = 1.0
"""Seconds between two looks at whether an executor can go on."""


@dataclass(frozen=True)
class Deadline:
    """Message of a task: its process is to be ended unless another such message comes in time.

    Attributes:
        seconds: from now on, by the wall clock; infinite for no limit.
        subject: what the task does until then, which ``OutOfTime`` names.
    """

    seconds: float
    subject: object = None


class Executor:
    """Performs tasks, ``size`` at once; ``answers`` says whether messages of tasks are answered."""

    size: int = 1
    answers: bool = True

    def submit(self, task: Task, report: Report) -> Future[Any]:
        """Begin a task, whose messages go to ``report``, from any thread, the same message possibly twice.

        The future raises ``MemoryError`` if the task uses more memory than it may, ``OutOfTime`` if the deadline passes
        that it has named last, and ``CallFailed`` if it raises an exception or its process ends.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise an InputError if no further task can be performed."""

    def stop(self) -> None:
        """End all tasks at once; none can be begun after that."""


def run_tasks(
    executor: Executor,
    draw: Callable[[], T | None],
    done: Callable[[T, Any], None],
    report: Report = lambda message: None,
) -> None:
    """Perform tasks until none is left. A task that fails ends no other.

    Args:
        executor: who performs them.
        draw: returns the next task, None if none is left; asked again after each task that has ended.
        done: called with every task and its result as soon as there is one, which is an exception (``CallFailed``,
            ``OutOfTime``, ``MemoryError``) if the task failed.
        report: takes the tasks' messages (``Executor.submit``).

    Raises:
        KeyboardInterrupt: if the user interrupts; all tasks have been ended then.
        Exception: what ``draw``, ``done`` and ``Executor.check`` raise, likewise.
    """
    running: dict[Future[Any], T] = {}
    try:
        while True:
            while len(running) < executor.size and (task := draw()) is not None:
                running[executor.submit(task, report)] = task
            if not running:
                return
            for future in wait(running, _CHECK_S, FIRST_COMPLETED).done:
                task = running.pop(future)
                try:
                    result = future.result()
                except (CallFailed, OutOfTime, MemoryError) as error:
                    result = error
                done(task, result)
            executor.check()
    except BaseException:
        executor.stop()
        raise


class InlineExecutor(Executor):
    """Performs one task after another in this process, where no time limit can end what it does in a library."""

    def submit(self, task: Task, report: Report) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(task(report))
        return future


class LocalExecutor(Executor):
    """Performs tasks in processes of this machine.

    Args:
        workers: the processes (``launch_workers``). One that is kept from one task to the next keeps the data and
            networks that it has prepared.
        memory: the bytes that a process may have resident; None for half of the machine's memory.
        bounds: the bytes that bounds may hold at once, where the user says so (``process_memory``).
    """

    def __init__(self, workers: Sequence[Worker], memory: int | None = None, bounds: int | None = None) -> None:
        self.size = len(workers)
        self._memory, self._bounds = memory, bounds
        self._workers, self._idle = workers, deque(workers)
        self._at_start: dict[Worker, int] = {}
        self._threads = ThreadPoolExecutor(self.size, "task")
        self._stopped = False

    def submit(self, task: Task, report: Report) -> Future[Any]:
        return self._threads.submit(self._perform, task, report)

    def _perform(self, task: Task, report: Report) -> Any:
        # There are as many threads as workers.
        worker, subject = self._idle.popleft(), None

        def hear(message: Any) -> Any:
            nonlocal subject
            if isinstance(message, Deadline):
                worker.end_after(message.seconds)
                subject = message.subject
                return None
            return report(message)

        try:
            worker.start()
            start = self._at_start.setdefault(worker, worker.resident)
            if self._stopped:
                raise CallFailed("it was stopped")
            return worker.call(task, memory=process_memory(self._memory, self._bounds, start), converse=hear)
        except OutOfTime:
            raise OutOfTime(subject) from None
        finally:
            self._idle.append(worker)

    def stop(self) -> None:
        with uninterrupted():
            self._stopped = True
            self._threads.shutdown(wait=False, cancel_futures=True)
            while len(self._idle) < self.size:
                # A process that was about to start is ended by the next attempt.
                for worker in self._workers:
                    worker.kill()
                time.sleep(0.02)
            for worker in self._workers:
                worker.stop()


def launch_workers(jobs: int, threads: int | None = 1, library: str = "") -> list[Worker]:
    """Start processes that perform tasks, and do not wait until they have imported what they need.

    Args:
        jobs: how many.
        threads: of each; None for as many as torch takes.
        library: a module that tasks need.
    """
    environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    function = f"{__name__}:{perform_task.__name__}"
    workers = [Worker(function, environment, 1.0, _STARTING_S, library) for _ in range(jobs)]
    for worker in workers:
        worker.launch()
    return workers


def perform_task(task: Task, report: Report) -> Any:
    """Perform a task in a worker's process."""
    return task(report)


@contextmanager
def open_executor(jobs: int, address: str | None) -> Iterator[Executor]:
    """An executor that is stopped at the end of the block.

    Args:
        jobs: the number of processes of this machine, with one thread each, if there is no address.
        address: of a Dask cluster's scheduler, ``dask://HOST:PORT``.

    Raises:
        InputError: if there is no such cluster (``cluster.DaskExecutor``).
    """
    executor: Executor
    if address is None:
        executor = LocalExecutor(launch_workers(jobs))
    else:
        # Imported here, because few users have Dask.
        from verifiable_relu.supervisor.cluster import DaskExecutor

        executor = DaskExecutor(address)
    try:
        yield executor
    finally:
        executor.stop()
