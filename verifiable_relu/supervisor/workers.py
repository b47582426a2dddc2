"""Python processes that answer call after call, and executors that perform tasks in them or on a Dask cluster.

A library in C or C++ takes down nothing but one call: a ``Worker`` keeps a process, is killed where a call takes too
much time or memory, and starts another after that. What the process runs is ``serve``. Both sides exchange pickled
messages over a socket, without torch's rules, by which a connection would send tensors in shared memory.

A training is a task, and so is a part of a campaign. A task that fails, or whose process ends, ends no other. Workers
of a cluster run already, on any number of machines; they need this package, and the files that tasks name under the
same paths. Each of their processes performs one task at a time, whatever its number of threads.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from verifiable_relu.errors import CallFailed, InputError, OutOfTime, missing
from verifiable_relu.supervisor.forks import MEMORY_CHECK_S, default_memory, process_memory, resident, uninterrupted

Report = Callable[[Any], Any]  # Takes a message of a task; returns the answer, if any
Task = Callable[[Report], Any]  # Picklable; sends messages while it works

T = TypeVar("T", bound=Task)

PATIENCE_S = 15.0  # Seconds in which a scheduler that is gone, or a worker after all have ended, has to come back
_START_S = 120.0  # Seconds in which a process has to start and to import its library
_JOB_START_S = 3600.0  # The same for processes of a campaign: at idle priority on a busy machine, torch takes minutes
_CHECK_S = 1.0  # Seconds between two looks at whether an executor can go on
_CALL_S = 5.0  # Seconds in which a scheduler has to answer
_BUSY = threading.Lock()  # Held by a cluster's process at a task: threads of torch's global random numbers would mix
_ENDING_S = 1.0  # Seconds that a process which has closed its socket gets to say how it ended
_WORKERS: set[Worker] = set()  # All workers; each is needed until the end, when its process is ended


def processor_seconds() -> float:
    """Return the processor seconds of this process and its workers; on Linux, workers that still run count, too."""
    running = 0.0
    for worker in list(_WORKERS):
        if sys.platform == "linux" and worker.pid is not None:
            # The clock of another process's time, as clock_getcpuclockid(3) derives it from the number of the process.
            with suppress(OSError):
                running += time.clock_gettime((~worker.pid << 3) | 2)
    ended = os.times()
    return time.process_time() + ended.children_user + ended.children_system + running


class Worker:
    """Another Python process that serves calls of one function.

    The process is ended where a call breaks its limits, on any exception while a call lasts (Ctrl-C among them), and
    with this process; the next call starts another. Threads may share a worker; their calls wait for one another. On
    other systems than Linux, memory is not limited, and the process of a parent that was killed ends after its call.

    The ``function`` is ``module:name``; its arguments (``call``) and results must be picklable. The process, with
    further variables in its ``environment``, may take ``start_s`` seconds to start, when it imports ``library``, too.
    One that still holds more than the part ``kept_memory`` of its memory after a call is ended. (Processes of
    ``multiprocessing`` would import the user's program again, which may have no guard against that.)
    """

    def __init__(
        self,
        function: str,
        environment: Mapping[str, str] | None = None,
        kept_memory: float = 1 / 4,
        library: str = "",
        start_s: float = _START_S,
    ) -> None:
        self._function, self._library, self._start_s = function, library, start_s
        self._environment, self._kept_memory = environment or {}, kept_memory
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: Connection[Any, Any]
        self._ready = False
        self._end = math.inf
        self._lock = threading.RLock()
        _WORKERS.add(self)
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._leave_to_parent)

    @property
    def pid(self) -> int | None:
        """The number of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def launch(self) -> None:
        """Start the process, unless there is one, and do not wait until it has imported the function."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                # It was ended from outside while it had nothing to do, which does no harm.
                self.stop()
            if self._process is not None:
                return
            self._ready = False
            # The socket must not get the number of a standard stream that this process has closed.
            while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
                os.set_inheritable(opened, True)
            os.close(opened)
            self._socket, theirs = Pipe()
            # Ctrl-C in a terminal is for all its processes, and is for the parent alone to handle: a process inherits
            # which signals are blocked.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; "
            code += f"serve({self._function!r}, {theirs.fileno()}, {self._library!r})"
            try:
                # What the library prints is for nobody: HiGHS 1.16 prints its name before it can be told not to.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, **self._environment},
                    pass_fds=(theirs.fileno(),),
                )
            finally:
                theirs.close()
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def start(self) -> None:
        """Start the process, unless there is one, and wait until it has imported the function, or raise CallFailed."""
        with self._lock:
            self.launch()
            if self._ready:
                return
            try:
                self.end_after(self._start_s)
                kind, value = self._receive(sys.maxsize)
                if kind != "ready":
                    raise CallFailed(f"its process does not start: {value}")
                self._ready = True
            except OutOfTime:
                self.stop()
                raise CallFailed("its process takes too long to start") from None
            except BaseException:
                self.stop()
                raise

    def call(
        self,
        argument: object,
        seconds: float = math.inf,
        memory: int | None = None,
        converse: Callable[[Any], object] | None = None,
    ) -> Any:
        """Return the function's result for the argument, within some seconds of wall-clock time, start-up not counted.

        The process may have ``memory`` bytes resident, None for ``default_memory``; a call can exceed it by
        whatever it fills within 20 ms. ``converse`` answers questions of the function, which has a second
        argument then, a function that asks them; the time that this takes counts.

        Raises:
            OutOfTime, MemoryError: if the call takes longer, or the process more memory than it may or gets.
            CallFailed: if the function raises another exception, or the process ends by itself or from outside.
            KeyboardInterrupt: on Ctrl-C, after the process has been ended.
        """
        memory = default_memory() if memory is None else memory
        with self._lock:
            self.start()
            try:
                self.end_after(seconds)
                message: object = argument, converse is not None
                while True:
                    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
                    try:
                        self._socket.send_bytes(data)
                    except OSError:
                        raise self._gone() from None
                    kind, value = self._receive(memory)
                    if kind != "question" or converse is None:
                        break
                    message = converse(value)
                    if time.perf_counter() >= self._end:
                        raise OutOfTime
            except BaseException:
                self.stop()
                raise
            if kind == "memory" or resident(self.pid) > self._kept_memory * memory:
                self.stop()
        if kind == "memory":
            raise MemoryError("its process got no more memory")
        if kind == "failed":
            raise CallFailed(value)
        return value

    def end_after(self, seconds: float) -> None:
        """End the running call (``OutOfTime``) some seconds from now; for a call's ``converse``."""
        self._end = time.perf_counter() + seconds

    def kill(self) -> None:
        """End the process at once, if there is one, from whatever thread: a call that lasts fails (``CallFailed``)."""
        if (process := self._process) is not None:
            process.kill()

    def stop(self) -> int | None:
        """End the process, if there is one; returns its exit status, below zero the signal that ended it."""
        process, self._process = self._process, None
        if process is None:
            return None
        # One that has ended by itself keeps its status.
        process.kill()
        self._close(process)
        return process.wait()

    def _receive(self, memory: int) -> tuple[str, Any]:
        try:
            while not self._socket.poll(max(0.0, min(MEMORY_CHECK_S, self._end - time.perf_counter()))):
                if time.perf_counter() >= self._end:
                    raise OutOfTime
                if resident(self.pid) > memory:
                    raise MemoryError(f"its process took more than {memory / 2**20:.0f} MiB")
            received: tuple[str, Any] = pickle.loads(self._socket.recv_bytes())
            return received
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._gone() from None

    def _gone(self) -> CallFailed:
        """End the process, which does not read or answer; returns the error that says how it ended."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        status = self.stop()
        if status is not None and status < 0:
            with suppress(ValueError):
                return CallFailed(f"its process was ended by the signal {signal.Signals(-status).name}")
        return CallFailed(f"its process ended with the status {status}")

    def _close(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        self._socket.close()

    def _leave_to_parent(self) -> None:
        """Drop the process's handle in a forked copy: it belongs to the parent."""
        process, self._process, self._lock = self._process, None, threading.RLock()
        if process is not None:
            self._close(process)
            process.returncode = 0


def serve(function: str, socket: int, library: str = "") -> None:
    """Import a function and answer the calls of a ``Worker`` until it is gone: what its process runs.

    Messages are pairs of a kind and a value: *ready* once the function is imported, *question*, *done*, and two kinds
    of failure, *memory* and *failed*. ``socket`` is the descriptor of this side's end. Stdin is a pipe whose other end
    the parent holds and never writes to.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lifeline = os.dup(0)
    # What the library reads is for nobody either.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if sys.platform == "linux":
        # Linux ends this process as soon as the parent's end is closed. A thread that waits for that would need the
        # interpreter, which a library may hold; and the signal at the end of a parent (prctl) comes at the end of the
        # thread that has started this process, too.
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    connection: Connection[Any, Any] = Connection(socket)

    def send(kind: str, value: object) -> None:
        connection.send_bytes(pickle.dumps((kind, value), pickle.HIGHEST_PROTOCOL))

    def ask(question: object) -> Any:
        try:
            send("question", question)
            return pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            # The parent was killed: there is nobody to answer, and nothing that went wrong here.
            os._exit(0)

    module, _, name = function.partition(":")
    try:
        if library:
            import_module(library)
        called = getattr(import_module(module), name)
    except Exception as error:
        send("failed", f"{type(error).__name__}: {error}")
        return
    send("ready", None)
    while True:
        try:
            argument, converses = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        except MemoryError:
            send("memory", None)
            return
        try:
            send("done", called(argument, ask) if converses else called(argument))
        except MemoryError:
            send("memory", None)
        except Exception as error:
            send("failed", f"{type(error).__name__}: {error}")
        del argument


@dataclass(frozen=True)
class Deadline:
    """Message of a task: its process is to be ended in some seconds, at work on a subject, unless another comes."""

    seconds: float
    subject: object = None


class Executor:
    """Executor of one task at a time in this process; other executors perform ``size`` at once elsewhere.

    ``listens`` says whether messages of tasks are taken and answered.
    """

    size: int = 1
    listens: bool = True

    def submit(self, task: Task, report: Report) -> Future[Any]:
        """Begin a task, whose messages go to ``report``, from any thread, the same message possibly twice.

        The future raises ``MemoryError`` if the task uses more memory than it may, ``OutOfTime`` if the deadline passes
        that it has named last, and ``CallFailed`` if it raises an exception or its process ends. In this process, what
        the task raises is raised, and no time limit ends what it does in a library.
        """
        future: Future[Any] = Future()
        future.set_result(task(report))
        return future

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
    """Perform tasks, which ``draw`` returns until it returns None. Whatever is raised here ends all tasks first.

    ``done`` is called with every task and its result as soon as there is one, an exception (``CallFailed``,
    ``OutOfTime``, ``MemoryError``) if it failed; ``report`` takes the tasks' messages (``Executor.submit``).
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


class LocalExecutor(Executor):
    """Executor of tasks in ``size`` processes of this machine, within the user's limits (``process_memory``).

    They keep data and networks from one task to the next. Each is started at once, with a number of ``threads``, None
    for torch's choice, and imports the module ``library`` that its tasks need.
    """

    def __init__(
        self,
        size: int,
        memory: int | None = None,
        bounds: int | None = None,
        threads: int | None = 1,
        library: str = "",
    ) -> None:
        self.size, self._memory, self._bounds = size, memory, bounds
        environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self._workers = [Worker("operator:call", environment, 1.0, library, _JOB_START_S) for _ in range(size)]
        for worker in self._workers:
            worker.launch()
        self._idle, self._at_start = deque(self._workers), dict[Worker, int]()
        self._threads, self._stopped = ThreadPoolExecutor(size, "task"), False

    def submit(self, task: Task, report: Report) -> Future[Any]:
        return self._threads.submit(self._perform, task, report)

    def _perform(self, task: Task, report: Report) -> Any:
        # There are as many threads as workers.
        worker, subject = self._idle.popleft(), None

        def hear(message: Any) -> Any:
            nonlocal subject
            if not isinstance(message, Deadline):
                return report(message)
            worker.end_after(message.seconds)
            subject = message.subject
            return None

        try:
            worker.start()
            start = self._at_start.setdefault(worker, resident(worker.pid))
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


class DaskExecutor(Executor):
    """Executor of tasks in the workers of a Dask cluster, as many at once as there are workers.

    The scheduler at ``dask://HOST:PORT`` has to answer within ``patience_s``; without it, workers or Dask, there is an
    InputError. ``advice`` is what the user is told where the cluster is lost. Messages of tasks are dropped.
    """

    listens = False

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
        self._remote: dict[Future[Any], Any] = {}  # What nobody holds any more, the cluster forgets
        self._lost: list[tuple[Task, Future[Any]]] = []
        self._seen = time.monotonic()

    def submit(self, task: Task, report: Report) -> Future[Any]:
        return self._begin(task, Future())

    def _begin(self, task: Task, result: Future[Any]) -> Future[Any]:
        self._remote[result] = remote = self._client.submit(_perform_remotely, task, pure=False)
        remote.add_done_callback(lambda remote: self._end(remote, task, result))
        return result

    def _end(self, remote: Any, task: Task, result: Future[Any]) -> None:
        """Handle the end of a task; a task that the scheduler has lost is begun again."""
        self._remote.pop(result, None)
        try:
            result.set_result(remote.result(timeout=_CALL_S))
        except CancelledError:
            self._lost.append((task, result))
        except (MemoryError, CallFailed) as error:
            result.set_exception(error)
        except BaseException as error:
            # Dask raises what the task raised, and errors of its own if a worker has ended.
            result.set_exception(CallFailed(f"{type(error).__name__}: {error}"))

    def check(self) -> None:
        """Raise an InputError if the scheduler neither answers with workers nor did so ``PATIENCE_S`` seconds ago."""
        scheduler: Any = self._client.scheduler
        said = "does not answer any more"
        # Dask raises errors of many kinds for what is gone, and waits for ever unless it is told not to.
        with suppress(Exception):
            if self._client.sync(scheduler.ncores, callback_timeout=_CALL_S):
                self._seen = time.monotonic()
                while self._lost:
                    self._begin(*self._lost.pop())
                return
            said = "has no workers any more"
        if time.monotonic() > self._seen + PATIENCE_S:
            raise InputError(f"the Dask scheduler at {self._address} {said}: {self._advice}", place="--executor")

    def stop(self) -> None:
        # A scheduler that is gone cancels nothing; a task that a worker has begun is worked on to its end.
        with suppress(Exception):
            self._client.sync(self._client._cancel, list(self._remote.values()), callback_timeout=1)
        self._client.close(timeout=1)


def _perform_remotely(task: Task) -> Any:
    """Perform a task in a worker of a cluster, with one thread."""
    import torch

    with _BUSY:
        torch.set_num_threads(1)
        return task(lambda message: None)
