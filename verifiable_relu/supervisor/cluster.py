"""An executor on a Dask cluster: tasks go to workers that run already, on any number of machines.

Workers need this package, and the files that tasks name under the same paths. Each worker's process performs one task
at a time, whatever its number of threads.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
import zlib
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any
from uuid import uuid4

from verifiable_relu.errors import CallFailed, InputError, missing
from verifiable_relu.supervisor.executors import Deadline, Executor, Report, Task

PATIENCE_S = 15.0
"""Seconds in which a scheduler that is gone, or a worker after all have ended, has to come back."""

_CALL_S = 5.0
"""Seconds in which a scheduler has to answer."""

_BUSY = threading.Lock()
"""Held while this process performs a task: threads of torch's global random numbers would mix."""


class DaskExecutor(Executor):
    """Performs tasks in the workers of a Dask cluster, as many at once as there are workers.

    Args:
        address: of the scheduler, ``dask://HOST:PORT``.
        advice: what the user is told where the cluster is lost.
        patience_s: the seconds in which the scheduler has to answer.

    Raises:
        InputError: without Dask, if there is no scheduler at the address, or if it has no workers.
    """

    answers = False

    def __init__(self, address: str, advice: str = "the same command resumes", patience_s: float = 10.0) -> None:
        try:
            from distributed import Client
        except ModuleNotFoundError:
            raise missing("a Dask cluster", "distributed", place="--executor") from None
        # Whatever is to be said of a lost connection is said here, in one line.
        logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
        try:
            self._client = Client(address.replace("dask://", "tcp://", 1), timeout=patience_s, set_as_default=False)
        except OSError as error:
            raise InputError(f"no Dask scheduler answers at {address}: {error}", place="--executor") from None
        self.size = len(self._client.ncores())
        if not self.size:
            self._client.close()
            raise InputError(f"the Dask scheduler at {address} has no workers", place="--executor")
        self._address, self._advice = address, advice
        self._reports: dict[str, Report] = {}
        self._remote: dict[str, Any] = {}
        self._lost: list[tuple[str, Task, Future[Any]]] = []
        self._seen = time.monotonic()
        self._topic = f"verifiable-relu-{uuid4()}"
        self._client.subscribe_topic(self._topic, lambda event: self._hear(*_unpacked(event[1])))

    def submit(self, task: Task, report: Report) -> Future[Any]:
        name, result = f"task-{uuid4()}", Future[Any]()
        self._reports[name] = report
        self._submit(name, task, result)
        return result

    def _submit(self, name: str, task: Task, result: Future[Any]) -> None:
        self._remote[name] = self._client.submit(_perform, name, task, self._topic, pure=False)
        self._remote[name].add_done_callback(lambda remote: self._end(remote, name, task, result))

    def _end(self, remote: Any, name: str, task: Task, result: Future[Any]) -> None:
        """Take the end of a task; one that the scheduler has lost, which is not its fault, is begun again."""
        # What nobody holds any more, the cluster forgets.
        self._remote.pop(name, None)
        try:
            found = remote.result(timeout=_CALL_S)
        except CancelledError:
            self._lost.append((name, task, result))
            return
        except (MemoryError, CallFailed) as error:
            result.set_exception(error)
        except BaseException as error:
            # Dask raises what the task raised, and errors of its own if a worker has ended.
            result.set_exception(CallFailed(f"{type(error).__name__}: {error}"))
        else:
            result.set_result(found)
        del self._reports[name]

    def _hear(self, name: str, message: Any) -> None:
        if name in self._reports:
            self._reports[name](message)

    def check(self) -> None:
        """As ``Executor.check``: the scheduler answers and has workers, or did so ``PATIENCE_S`` seconds ago."""
        scheduler: Any = self._client.scheduler
        said = "does not answer any more"
        # Dask raises errors of many kinds for what is gone, and waits for ever unless it is told not to.
        with suppress(Exception):
            if self._client.sync(scheduler.ncores, callback_timeout=_CALL_S):
                self._seen = time.monotonic()
                while self._lost:
                    self._submit(*self._lost.pop())
                return
            said = "has no workers any more"
        if time.monotonic() > self._seen + PATIENCE_S:
            raise InputError(f"the Dask scheduler at {self._address} {said}: {self._advice}", place="--executor")

    def stop(self) -> None:
        # A scheduler that is gone cancels nothing; a task that a worker has begun is worked on to its end.
        with suppress(Exception):
            self._client.sync(self._client._cancel, list(self._remote.values()), callback_timeout=1)
        self._client.close(timeout=1)


def _perform(name: str, task: Task, topic: str) -> Any:
    """Perform a task in a worker of the cluster, with one thread.

    Args:
        name: the task's, which its messages carry.
        task: the task.
        topic: the topic for messages as soon as they are known.
    """
    import torch
    from distributed import get_worker

    worker = get_worker()

    def report(message: Any) -> None:
        if not isinstance(message, Deadline):
            worker.log_event(topic, zlib.compress(pickle.dumps((name, message)), 1))

    with _BUSY:
        torch.set_num_threads(1)
        try:
            return task(report)
        except InputError as error:
            # Of the cluster itself, such an error would end all work.
            raise CallFailed(f"{type(error).__name__}: {error}") from None


def _unpacked(data: bytes) -> Any:
    return pickle.loads(zlib.decompress(data))
