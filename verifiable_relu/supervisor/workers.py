"""Python processes that answer call after call, and are killed where a call takes too much time or memory.

A library in C or C++ takes down nothing but one call: a ``Worker`` keeps a process, and starts another after it had to
end one. What the process runs is ``serve``. Both sides exchange pickled messages over a socket.
"""

from __future__ import annotations

import atexit
import fcntl
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Literal

from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.supervisor.forks import MEMORY_CHECK_S
from verifiable_relu.supervisor.memory import default_memory, resident

MessageKind = Literal["ready", "question", "done", "memory", "failed"]
"""Kind of a message of the process: the function is imported, an interim question, a result, and two ways to fail."""

_SCRIPT = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve({arguments})"

_ENDING_S = 1.0
"""Seconds that a process which has closed its socket gets to end by itself, so that it can be said how it ended."""

_WORKERS: set[Worker] = set()
"""All workers; each is needed until the end, when its process is ended."""


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
    """Calls one function in another Python process, which serves call after call.

    The process is ended where a call breaks its limits, on any exception while a call lasts (Ctrl-C among them), and
    with this process; the next call starts another. Threads may share a worker; their calls wait for one another. On
    other systems than Linux, memory is not limited, and the process of a parent that was killed ends after its call.

    Args:
        function: ``module:name``; its arguments (``call``) and results must be picklable.
        environment: further variables of the process's environment.
        kept_memory: a process that still holds more than this part of its memory after a call is ended.
        starting_s: the seconds that a process may take to start and to import its library.
        library: a module that the function needs, so that the start of the process takes the time for it.
    """

    def __init__(
        self,
        function: str,
        environment: Mapping[str, str] | None = None,
        kept_memory: float = 1 / 4,
        starting_s: float = 120.0,
        library: str = "",
    ) -> None:
        self._function, self._library, self._environment = function, library, environment or {}
        self._kept_memory, self._starting_s = kept_memory, starting_s
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: Connection[Any, Any]
        self._lifeline = -1
        self._ready = False
        self._end = math.inf
        self._lock = threading.RLock()
        _WORKERS.add(self)
        atexit.register(self.stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._leave_to_parent)

    @property
    def pid(self) -> int | None:
        """The number of the process, None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def resident(self) -> int:
        """Bytes of memory that the process has resident; 0 where that is not known."""
        return resident(self.pid)

    def launch(self) -> None:
        """Start the process, unless there is one, and do not wait until it has imported the function."""
        with self._lock:
            if self._process is None:
                self._ready = False
                self._launch()

    def start(self) -> None:
        """Start the process, unless there is one, and wait until it has imported the function.

        Raises:
            CallFailed: if the function cannot be imported, or takes too long for it.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                # It was ended from outside while it had nothing to do, which does no harm.
                self.stop()
            self.launch()
            if not self._ready:
                try:
                    self.end_after(self._starting_s)
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
        """Return what the function makes of the argument.

        Args:
            argument: of the function.
            seconds: wall-clock time for the call, but for the start of a process.
            memory: bytes that the process may have resident; None for ``default_memory``. A call can exceed it by what
                it fills between two looks, 20 ms apart.
            converse: answers questions of the function, which has a second argument then, a function that asks them;
                the time that this takes counts.

        Raises:
            OutOfTime: if the call takes longer.
            MemoryError: if the process takes more memory, or gets no more.
            CallFailed: if the function raises another exception, or the process ends by itself or from outside.
            KeyboardInterrupt: on Ctrl-C, after the process has been ended.
        """
        memory = default_memory() if memory is None else memory
        with self._lock:
            self.start()
            try:
                self.end_after(seconds)
                self._send((argument, converse is not None))
                kind, value = self._receive(memory)
                while kind == "question" and converse is not None:
                    self._send(converse(value))
                    kind, value = self._receive(memory)
            except BaseException:
                self.stop()
                raise
            if kind == "memory" or self.resident > self._kept_memory * memory:
                self.stop()
        if kind == "memory":
            raise MemoryError("its process got no more memory")
        if kind == "failed":
            raise CallFailed(value)
        return value

    def end_after(self, seconds: float) -> None:
        """From a call's ``converse``: end the call (``OutOfTime``) so many seconds from now, and at no other time."""
        self._end = time.perf_counter() + seconds

    def kill(self) -> None:
        """End the process at once, if there is one, from whatever thread: a call that lasts fails (``CallFailed``)."""
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> int | None:
        """End the process, if there is one; returns its exit status, below zero the signal that ended it."""
        process, self._process = self._process, None
        if process is None:
            return None
        # One that has ended by itself keeps its status.
        process.kill()
        self._close()
        return process.wait()

    def _launch(self) -> None:
        _occupy_standard_streams()
        self._socket, theirs = Pipe()
        held, self._lifeline = os.pipe()
        # Ctrl-C in a terminal is for all its processes, and is for the parent alone to handle: a process inherits which
        # signals are blocked.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            arguments = f"{self._function!r}, {theirs.fileno()}, {held}, {self._library!r}"
            code = _SCRIPT.format(path=sys.path, module=__name__, arguments=arguments)
            # What the library prints or reads is for nobody: HiGHS 1.16 prints its name before it can be told not to.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **self._environment},
                pass_fds=(held, theirs.fileno()),
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(held)
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _send(self, message: object) -> None:
        data = _pickled(message)
        try:
            self._socket.send_bytes(data)
        except OSError:
            raise self._gone() from None

    def _receive(self, memory: int) -> tuple[MessageKind, Any]:
        try:
            while not self._socket.poll(max(0.0, min(MEMORY_CHECK_S, self._end - time.perf_counter()))):
                if time.perf_counter() >= self._end:
                    raise OutOfTime
                if self.resident > memory:
                    raise MemoryError(f"its process took more than {memory / 2**20:.0f} MiB")
            kind, value = pickle.loads(self._socket.recv_bytes())
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._gone() from None
        return kind, value

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

    def _close(self) -> None:
        """Close this side's ends of the socket and the lifeline."""
        self._socket.close()
        os.close(self._lifeline)

    def _leave_to_parent(self) -> None:
        """After a fork, in the new process: what is there belongs to the old one."""
        process, self._process, self._lock = self._process, None, threading.RLock()
        if process is not None:
            self._close()
            process.returncode = 0


def _pickled(message: object) -> bytes:
    """Pickle a message without torch's rules, by which a connection would send tensors in shared memory."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def _occupy_standard_streams() -> None:
    """Open what this process has closed of its three standard streams, whose numbers the socket must not get."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


def serve(function: str, socket: int, lifeline: int, library: str = "") -> None:
    """Import a function and answer the calls of a ``Worker`` until it is gone: what its process runs.

    Args:
        function, library: as of ``Worker``.
        socket: the descriptor of this side's end of the socket.
        lifeline: the reading end of a pipe whose other end the parent holds and never writes to.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        _end_with(lifeline)
    connection: Connection[Any, Any] = Connection(socket)

    def send(kind: MessageKind, value: object) -> None:
        connection.send_bytes(_pickled((kind, value)))

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


def _end_with(lifeline: int) -> None:
    """Have Linux end this process (SIGIO) as soon as the other end of a pipe is closed.

    A thread that waits for that would need the interpreter, which a library may hold; and the signal at the end of a
    parent (prctl) comes at the end of the thread that has started this process, too.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
