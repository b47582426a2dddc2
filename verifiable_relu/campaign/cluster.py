"""Hands on a Dask cluster: tasks go to workers that run already, on any number of machines.

Workers need this package, and the files that tasks name under the same paths. Each worker's process performs one task
at a time, whatever its number of threads.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

from verifiable_relu.campaign.queue import Task
from verifiable_relu.campaign.result import Key, Result
from verifiable_relu.campaign.store import Store, recall
from verifiable_relu.campaign.worker import Answered, Ask, Limit, Part, Stage, Wanted
from verifiable_relu.errors import CallFailed, InputError, missing

PATIENCE = 15.0
"""The seconds in which a scheduler that is gone, or a worker after all have ended, has to come back."""

_CALL = 5.0
"""The seconds in which a scheduler has to answer."""

_LOOK = 1.0
"""The seconds between two looks at whether there are a scheduler and workers."""

_BUSY = threading.Lock()
"""Held while this process performs a task: threads of torch's global random numbers would mix."""


class Cluster:
    """The workers of a Dask cluster; a context manager that closes the connection.

    Args:
        address: of the scheduler, ``dask://HOST:PORT``.
        store: the store whose records are known before the campaign; None for none.
        patience: the seconds in which the scheduler has to answer.

    Attributes:
        hands: one for each of the workers that the cluster has now.

    Raises:
        InputError: without Dask, if there is no scheduler at the address, or if it has no workers.
    """

    def __init__(self, address: str, store: Store | None = None, patience: float = 10.0) -> None:
        try:
            from distributed import Client
        except ModuleNotFoundError:
            raise missing("a Dask cluster", "distributed", place="--executor") from None
        # Whatever is to be said of a lost connection is said here, in one line.
        logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
        try:
            self._client = Client(address.replace("dask://", "tcp://", 1), timeout=patience, set_as_default=False)
        except OSError as error:
            raise InputError(f"no Dask scheduler answers at {address}: {error}", place="--executor") from None
        workers = self._client.ncores()
        if not workers:
            self._client.close()
            raise InputError(f"the Dask scheduler at {address} has no workers", place="--executor")
        self._address = address
        self._store = store
        self._topic = f"verifiable-relu-{uuid4()}"
        self._folder = Path.cwd()
        self._ask: Ask = lambda message: None
        self.hands = [_Hand(self) for _ in workers]
        # Answers that come before their part is done.
        self._client.subscribe_topic(self._topic, lambda event: self.tell(_unpacked(event[1])))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close(timeout=1)

    @cached_property
    def _known(self) -> bytes:
        """The records, packed. They go with a part, since what is scattered is lost with all workers."""
        return _packed({} if self._store is None else dict(self._store.known))

    def submit(self, task: Task, ask: Ask) -> Any:
        """Dask's future of a task's result and answers; ``ask`` takes answers of any task as they come."""
        self._ask, known = ask, b""
        if isinstance(task, Part):
            # Where files are named, the process that runs the campaign has looked for records by itself.
            known = self._known if any(entry.onnx is None for _, entry in task.entries) else b""
            task = task.below(self._folder)
        return self._client.submit(_perform, task, known, self._topic, pure=False)

    def tell(self, message: Answered) -> None:
        """Hand on an answer, with file names relative to the current folder where they are below it."""
        start, told = f"{self._folder}/", message.result
        onnx = told.onnx.removeprefix(start).replace(f"'{start}", "'")
        named = replace(told, onnx=onnx, vnnlib=told.vnnlib.removeprefix(start))
        self._ask(replace(message, result=named))

    def await_workers(self) -> None:
        """Return when the scheduler answers and has workers, as a rule at once.

        Raises:
            InputError: if it does not within ``PATIENCE`` seconds.
        """
        scheduler: Any = self._client.scheduler
        end, said = time.monotonic() + PATIENCE, "does not answer any more"
        while True:
            # Dask raises errors of many kinds for what is gone, and waits for ever unless it is told not to.
            with suppress(Exception):
                if self._client.sync(scheduler.ncores, callback_timeout=_CALL):
                    return
                said = "has no workers any more"
            if time.monotonic() > end:
                break
            time.sleep(_LOOK)
        kept = "answers so far are lost" if self._store is None else "answers so far are kept, the same command resumes"
        raise InputError(f"the Dask scheduler at {self._address} {said}: {kept}", place="--executor")


class _Hand:
    """One task at a time for the cluster, which decides on the worker.

    Args:
        cluster: the cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._future: Any = None
        self._stopped = False

    def perform(self, task: Task, ask: Ask) -> Any:
        self._stopped = False
        while True:
            self._cluster.await_workers()
            try:
                self._future = self._cluster.submit(task, ask)
                while not self._stopped:
                    with suppress(TimeoutError):
                        self._future.result(timeout=_LOOK)
                    if self._future.done():
                        break
                    self._cluster.await_workers()
                result, said = self._future.result(timeout=_CALL)
            except (InputError, MemoryError, CallFailed):
                raise
            # Dask raises what the task raised, and errors of its own if a worker has ended or the task was cancelled.
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                if isinstance(error, CancelledError) and not self._stopped:
                    # The scheduler has lost the task, which is not the task's fault, or is gone itself.
                    continue
                raise CallFailed(f"{type(error).__name__}: {error}") from None
            for message in said:
                self._cluster.tell(message)
            return result

    def stop(self) -> None:
        self._stopped = True
        if self._future is not None:
            # A scheduler that is gone cancels nothing.
            with suppress(Exception):
                self._future.client.sync(self._future.client._cancel, [self._future], callback_timeout=_LOOK)


def _perform(task: Task, packed: bytes, topic: str) -> tuple[Any, list[Answered]]:
    """Perform a task in a worker of the cluster, with one thread; returns its result and all answers.

    Args:
        task: the task.
        packed: the records that are known, packed; empty where none can be of use.
        topic: the topic for answers as soon as they are known.
    """
    import torch
    from distributed import get_worker

    worker = get_worker()
    known: Mapping[Key, Result] = _unpacked(packed) if packed else {}
    said: list[Answered] = []

    def ask(message: Answered | Wanted | Stage | Limit) -> Result | None:
        if isinstance(message, Wanted):
            return recall(known, message.key, message.timeout, message.checked)
        if isinstance(message, Answered):
            said.append(message)
            worker.log_event(topic, _packed(message))
        return None

    with _BUSY:
        torch.set_num_threads(1)
        try:
            return task(ask), said
        except InputError as error:
            # Of the cluster itself, such an error would end all work.
            raise CallFailed(f"{type(error).__name__}: {error}") from None


def _packed(value: object) -> bytes:
    return zlib.compress(pickle.dumps(value), 1)


def _unpacked(data: bytes) -> Any:
    return pickle.loads(zlib.decompress(data))
