"""Calls of a foreign library in another process, which is ended when it takes too much time or memory.

A library in C or C++ cannot be stopped from Python, may crash, and may use up all memory. In a process of its own it
takes down nothing but one call: a ``Worker`` keeps such a process, and starts another after it had to end one. What the
process runs is ``serve``. Both sides exchange pickled messages over pipes.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.watched import resident

Kind = Literal["ready", "question", "done", "memory", "failed"]
"""What a message of the process is: the function is imported, an interim question, a result, and two ways to fail."""

_SCRIPT = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve({function!r}, {lifeline}, {library!r})"

_STARTING = 120.0
"""Seconds that a process may take to start and to import its library, by default."""

_ENDING = 1.0
"""Seconds that a process which has closed its pipes gets to end by itself, so that it can be said how it ended."""

_TICK = 0.02
"""Seconds between two looks at the memory of a process. Touching memory for the first time, a core gets a few GB/s."""

_KEPT = 1 / 4
"""The part of its memory that a process may hold after a call, by default."""

CONTROL_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux tells a container how many bytes it may have (versions 2 and 1 of control groups)."""

_WORKERS: set[Worker] = set()
"""All workers; each is needed until the end, when its process is ended."""


_granted: int | None = None


def limit_memory(size: int) -> None:
    """Set ``default_memory`` of this process to a number of bytes."""
    global _granted
    _granted = size


def default_memory() -> int:
    """Bytes that a worker's process may have resident unless its caller says otherwise.

    These are what ``limit_memory`` was given, or else half of the machine's memory.
    """
    return half_of_memory() if _granted is None else _granted


_BEYOND = 512 << 20
"""The bytes that a process may have beyond twice what bounds may hold, and beyond what it has at its start."""


def most_memory(process: int | None, bounds: int | None, start: int) -> int:
    """The bytes that a process may have resident.

    Args:
        process: what the user says that it may have; None for ``default_memory``.
        bounds: what the user says that bounds may hold at once: everything else, what the user's files need among it,
            may take as much again and 512 MiB. None where the user says nothing.
        start: what the process has when it begins.
    """
    most = default_memory() if process is None else process
    return most if bounds is None else min(most, start + 2 * bounds + _BEYOND)


@cache
def half_of_memory() -> int:
    """Half of the bytes that this machine, or the container that this process runs in, has."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else []
    for path in CONTROL_GROUPS:
        with suppress(OSError, ValueError):
            limits.append(int(path.read_text()))
    return min(limits, default=sys.maxsize) // 2


def processor_seconds() -> float:
    """Processor time of this process since it started, and of its workers, in seconds.

    ``time.process_time`` counts nothing of what a solver does in its own process. The time of a worker that runs is
    known on Linux alone, and of one that has ended everywhere.
    """
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

    The process is started by the first call, or by ``start``. It is ended where a call breaks its limits, on any
    exception while a call lasts (Ctrl-C among them), and with this process, however that ends; the next call starts
    another. Threads may share a worker; their calls wait for one another.

    The limit of memory and the end with a parent that is killed are for Linux. Elsewhere memory is not limited, and
    the process of a parent that was killed ends after the call that it works on.

    Args:
        function: ``module:name``. It is called with one argument, or with two where there is a conversation
            (``call``); arguments and results must be picklable.
        environment: variables of the process's environment that this process need not have.
        kept_memory: a process that still holds more than this part of its memory after a call is ended, and the next
            call starts another one.
        starting: the seconds that a process may take to start and to import its library.
        library: a module that the function imports, so that the start of the process takes the time for it.
    """

    def __init__(
        self,
        function: str,
        environment: Mapping[str, str] | None = None,
        kept_memory: float = _KEPT,
        starting: float = _STARTING,
        library: str = "",
    ) -> None:
        self._function = function
        self._library = library
        self._starting = starting
        self._environment = environment or {}
        self._kept_memory = kept_memory
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline = -1
        self._ready = False
        self._watch: _Watch | None = None
        self._lock = threading.RLock()
        _WORKERS.add(self)
        atexit.register(self.stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._leave_to_parent)

    @property
    def pid(self) -> int | None:
        """The number of the process, None while there is none."""
        return None if self._process is None else self._process.pid

    def launch(self) -> None:
        """Start the process, unless there is one, and do not wait until it has imported the function."""
        with self._lock:
            if self._process is None:
                self._ready = False
                self._launch()

    def start(self) -> None:
        """Start the process, unless there is one, and wait until it has imported the function.

        Raises:
            CallFailed: if the function cannot be imported.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                # It was ended from outside while it had nothing to do, which does no harm.
                self.stop()
            self.launch()
            if not self._ready:
                with self._limited(self._starting, sys.maxsize):
                    kind, value = self._receive()
                if kind != "ready":
                    self.stop()
                    raise CallFailed(f"its process does not start: {value}")
                self._ready = True

    def call(
        self,
        argument: object,
        seconds: float = math.inf,
        memory: int | None = None,
        converse: Callable[[Any], object] | None = None,
    ) -> Any:
        """What the function makes of the argument.

        Args:
            argument: of the function.
            seconds: wall-clock time for the call, transfers included. The start of a process is not.
            memory: most bytes that the process may have resident, its libraries included; None for
                ``default_memory``. A call can exceed it by what it fills between two looks, 20 ms apart.
            converse: answers questions of the function, which has a second argument then: a function that sends a
                question and returns the answer. The time that ``converse`` takes counts.

        Raises:
            OutOfTime: if the call takes longer.
            MemoryError: if the process takes more memory, or gets no more.
            CallFailed: if the function raises another exception, or the process ends by itself or from outside.
            KeyboardInterrupt: on Ctrl-C, after the process has been ended.
        """
        memory = default_memory() if memory is None else memory
        with self._lock:
            self.start()
            with self._limited(seconds, memory):
                self._send((argument, converse is not None))
                kind, value = self._receive()
                while kind == "question" and converse is not None:
                    self._send(converse(value))
                    kind, value = self._receive()
            if kind == "memory" or resident(self.pid) > self._kept_memory * memory:
                self.stop()
        if kind == "memory":
            raise MemoryError("its process got no more memory")
        if kind == "failed":
            raise CallFailed(value)
        return value

    def until(self, seconds: float) -> None:
        """From a call's ``converse``: end the call (``OutOfTime``) so many seconds from now, and at no other time."""
        if self._watch is not None:
            self._watch.end = time.perf_counter() + seconds

    @property
    def resident(self) -> int:
        """Bytes of memory that the process has resident; 0 where that is not known."""
        return resident(self.pid)

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
        self._close(process)
        return process.wait()

    @contextmanager
    def _limited(self, seconds: float, memory: int) -> Iterator[None]:
        """A block that exchanges messages: its process is watched, and ended where the block does not."""
        assert self._process is not None
        watch = self._watch = _Watch(self._process, seconds, memory)
        try:
            with watch:
                yield
        except _Gone:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING)
            status = self.stop()
            raise watch.broken or CallFailed(_ended(status)) from None
        except BaseException:
            self.stop()
            raise
        if watch.broken:
            # The last message came as the process was being ended.
            self.stop()

    def _launch(self) -> None:
        # Ctrl-C in a terminal is for all its processes, and is for the parent alone to handle: a process inherits which
        # signals are blocked.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if sys.platform != "win32" else set()
        held, self._lifeline = _lifeline()
        try:
            code = _SCRIPT.format(
                path=sys.path, module=__name__, function=self._function, lifeline=held, library=self._library
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **self._environment},
                pass_fds=(held,) if sys.platform != "win32" else (),
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(held)
            if sys.platform != "win32":
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _send(self, message: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError as error:
            raise _Gone from error

    def _receive(self) -> tuple[Kind, Any]:
        assert self._process is not None and self._process.stdout is not None
        try:
            kind, value = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise _Gone from error
        return kind, value

    def _close(self, process: subprocess.Popen[bytes]) -> None:
        """Close this side's ends of the pipes."""
        os.close(self._lifeline)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()

    def _leave_to_parent(self) -> None:
        """After a fork, in the new process: what is there belongs to the old one."""
        process, self._process, self._lock = self._process, None, threading.RLock()
        if process is not None:
            self._close(process)
            process.returncode = 0


class _Gone(Exception):
    """The process did not read, or did not answer."""


class _Watch:
    """Ends a process that breaks a limit while a block lasts: a context manager.

    A thread of its own looks at the clock and the memory, since sending and receiving can both wait for ever. It ends
    with the block.

    Attributes:
        broken: what is to be raised if a limit was broken.
        end: the time on ``time.perf_counter`` at which the process is ended.
    """

    def __init__(self, process: subprocess.Popen[bytes], seconds: float, memory: int) -> None:
        self.broken: OutOfTime | MemoryError | None = None
        self._process, self._memory = process, memory
        self.end = time.perf_counter() + seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(min(_TICK, max(0.0, self.end - time.perf_counter()))):
            if time.perf_counter() >= self.end:
                self.broken = OutOfTime()
            elif resident(self._process.pid) > self._memory:
                self.broken = MemoryError(f"its process took more than {self._memory / 2**20:.0f} MiB")
            if self.broken or self._process.poll() is not None:
                self._process.kill()
                return


def _lifeline() -> tuple[int, int]:
    """A pipe, its reading end first, whose descriptors are none of the three that a process has from the start.

    Where this process has closed one of these, it would be given to the pipe, and to another stream in the child.
    """
    ends = os.pipe()
    if sys.platform == "win32" or min(ends) > 2:
        return ends
    import fcntl

    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


def _ended(status: int | None) -> str:
    """How a process ended that was not told to."""
    if status is not None and status < 0:
        with suppress(ValueError):
            return f"its process was ended by the signal {signal.Signals(-status).name}"
    return f"its process ended with the status {status}"


def serve(function: str, lifeline: int, library: str = "") -> None:
    """Import a function and answer the calls of a ``Worker`` until it is gone: what its process runs.

    Args:
        function: ``module:name``.
        lifeline: the reading end of a pipe whose other end the parent holds and never writes to.
        library: a module that is imported first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        _end_with(lifeline)
    # What the library prints or reads must not get among the messages. The parent may have closed its stderr, and the
    # number must not become that of anything else here.
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        os.fstat(2)
    except OSError:
        os.dup2(nowhere, 2)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(nowhere, 0)
    # HiGHS 1.16, for one, prints its name before it can be told not to.
    os.dup2(nowhere, 1)

    def send(kind: Kind, value: object) -> None:
        replies.write(pickle.dumps((kind, value), pickle.HIGHEST_PROTOCOL))
        replies.flush()

    def ask(question: object) -> Any:
        try:
            send("question", question)
            return pickle.load(requests)
        except (EOFError, BrokenPipeError):
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
            argument, converses = pickle.load(requests)
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
    """Have the kernel end this process as soon as the other end of a pipe is closed.

    Linux sends SIGIO when that happens, and the signal ends the process whatever it does: a thread that waits for the
    end of the pipe would need the interpreter, which the library's code may hold.
    """
    import fcntl

    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
