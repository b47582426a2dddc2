"""Campaigns on a Dask cluster: the instances go to workers that run already, on any number of machines.

Workers need this package, and the networks and properties under the same paths. Each worker's process answers one part
at a time, whatever its number of threads.
"""

from __future__ import annotations

import pickle
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

from verifiable_relu.campaign.result import Key, Result
from verifiable_relu.campaign.store import Store, recall
from verifiable_relu.campaign.worker import Answered, Numbered, Stage, Wanted, answer
from verifiable_relu.errors import CallFailed, InputError, missing

_BUSY = threading.Lock()
"""Held while this process answers a part."""


class Cluster:
    """The workers of a Dask cluster; a context manager that closes the connection.

    Args:
        address: of the scheduler, ``dask://HOST:PORT``.
        store: the store whose records are known before the campaign; None for none.
        patience: the seconds in which the scheduler has to answer.

    Attributes:
        slots: one for each of the workers that the cluster has now.

    Raises:
        InputError: without Dask, if there is no scheduler at the address, or if it has no workers.
    """

    def __init__(self, address: str, store: Store | None = None, patience: float = 10.0) -> None:
        try:
            from distributed import Client
        except ModuleNotFoundError:
            raise missing("a Dask cluster", "distributed", place="--executor") from None
        try:
            self._client = Client(address.replace("dask://", "tcp://", 1), timeout=patience, set_as_default=False)
        except OSError as error:
            raise InputError(f"no Dask scheduler answers at {address}: {error}", place="--executor") from None
        workers = self._client.ncores()
        if not workers:
            self._client.close()
            raise InputError(f"the Dask scheduler at {address} has no workers", place="--executor")
        topic = f"verifiable-relu-{uuid4()}"
        # Dask would scatter a dict's values one by one.
        (known,) = self._client.scatter([dict(store.known) if store is not None else {}], broadcast=True, hash=False)
        self._tell: Callable[[Answered], Any] = lambda message: None
        self.slots = [_Slot(self, topic, known) for _ in workers]
        # Answers that come before their part is done.
        self._client.subscribe_topic(topic, lambda event: self._tell(pickle.loads(zlib.decompress(event[1]))))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    @property
    def executor(self) -> Executor:
        """The cluster as an executor of ``concurrent.futures``."""
        made: Executor = self._client.get_executor(pure=False)
        return made

    def submit(self, tell: Callable[[Answered], Any], *arguments: object) -> Any:
        """Dask's future of ``_answer`` with these arguments; ``tell`` takes answers of any part as they come."""
        self._tell = tell
        return self._client.submit(_answer, *arguments, pure=False)


class _Slot:
    """One part at a time for the cluster, which decides on the worker.

    Args:
        cluster: the cluster.
        topic: the topic under which answers are sent as soon as they are known.
        known: the scattered records.
    """

    def __init__(self, cluster: Cluster, topic: str, known: Any) -> None:
        self._cluster = cluster
        self._topic = topic
        self._known = known
        self._future: Any = None

    def answer(self, job: bytes, part: Sequence[Numbered], tell: Callable[[Any], Any]) -> None:
        self._future = self._cluster.submit(tell, job, part, str(Path.cwd()), self._known, self._topic)
        try:
            said = self._future.result()
        except MemoryError:
            raise
        # Dask raises what the task raised, and errors of its own if a worker has ended or the task was cancelled.
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise CallFailed(f"{type(error).__name__}: {error}") from None
        for message in said:
            tell(message)

    def stop(self) -> None:
        if self._future is not None:
            self._future.cancel()


def _answer(
    job: bytes, part: Sequence[Numbered], folder: str, known: Mapping[Key, Result], topic: str
) -> list[Answered]:
    """Answer a part in a worker of the cluster; returns all answers.

    Args:
        job: the ``Job``, pickled.
        part: the instances, with paths relative to ``folder``.
        folder: the current folder of the process that runs the campaign.
        known: the records.
        topic: the topic for answers as soon as they are known.
    """
    from distributed import get_worker

    worker = get_worker()
    said: list[Answered] = []
    base = Path(folder)

    def ask(message: Answered | Wanted | Stage) -> Result | None:
        if isinstance(message, Wanted):
            return recall(known, message.key, message.timeout, message.checked)
        if isinstance(message, Answered):
            named = replace(message, result=_named(message.result, folder))
            said.append(named)
            worker.log_event(topic, zlib.compress(pickle.dumps(named), 1))
        return None

    there = [(n, replace(e, vnnlib=base / e.vnnlib, onnx=None if e.onnx is None else base / e.onnx)) for n, e in part]
    with _BUSY:
        answer((job, there), ask)
    return said


def _named(result: Result, folder: str) -> Result:
    """A result with file names relative to the folder in which the campaign was started, where they are below it."""
    start = f"{folder}/"
    return replace(result, onnx=result.onnx.removeprefix(start), vnnlib=result.vnnlib.removeprefix(start))
