"""Copies of this process, which the operating system makes (fork) and which end with it.

``run_limited`` does a command's work in a copy that is killed at its limits, ``run_shares`` deals work out to copies,
and ``survives`` tries what may crash. Only Linux forks safely a process that has loaded numerical libraries; elsewhere
all work is done in this process, without limits.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import math
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from verifiable_relu.supervisor.memory import resident

Found = TypeVar("Found")
"""The result of a share of some work, which must be picklable."""

Pause = Callable[[], bool]
"""Return True once a share should return what it has found so far."""

SetLimits = Callable[[float, float], None]
"""Set the seconds from now on after which the copy is killed, and the bytes it may have resident; infinite for none."""

MEMORY_CHECK_S = 0.02
"""Seconds between two looks at the memory of a process. Touching memory for the first time, a core gets a few GB/s."""

_LATE_S = 1.0
"""Seconds after the end of the time limit in which copies may still return a result before they are killed."""

_LONGEST_TRIAL_S = 120.0
"""Seconds after which work is taken for hanging."""

_MOST_SHARES = 8
"""More processes share a query's work only where that is asked for: every one needs memory."""

_LIMITS = struct.Struct("dd")


@dataclass(frozen=True)
class Ended:
    """End of a copy in which ``run_limited`` has done a command's work.

    Attributes:
        status: the exit status, negative for a signal; None where the copy was killed at a limit.
        limits_set: how many times the copy has set limits.
        out_of_memory: whether it was killed at the limit of memory.
    """

    status: int | None
    limits_set: int = 0
    out_of_memory: bool = False


def run_limited(work: Callable[[SetLimits], int]) -> Ended:
    """Do a command's work in a copy of this process, which is killed at the limits that the work sets.

    The call returns in both processes: the copy goes on to exit with the status that ``work`` has returned, or with its
    exception. It gets Ctrl-C from this process.
    """
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return Ended(work(lambda seconds, memory: None))
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    reading, writing = os.pipe()
    pid = _fork()
    # Ctrl-C in a terminal is for the process that waits, which passes it on.
    with suppress(OSError):
        os.setpgid(pid, pid)
    if pid:
        os.close(writing)
        return _supervise(pid, reading)
    os.close(reading)

    def set_limits(seconds: float, memory: float) -> None:
        os.write(writing, _LIMITS.pack(time.monotonic() + seconds, memory))

    return Ended(work(set_limits))


def _supervise(pid: int, reading: int) -> Ended:
    """Wait for the end of the copy, or kill it and its own processes, which are of its group."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, _: os.kill(pid, number))
    end = memory = math.inf
    limits_set = 0
    process = os.pidfd_open(pid)
    awaited = [process, reading]
    while True:
        limited = math.isfinite(end) or math.isfinite(memory)
        ready = select.select(awaited, (), (), MEMORY_CHECK_S if limited else None)[0]
        if process in ready:
            return Ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), limits_set)
        if reading in ready:
            message = os.read(reading, _LIMITS.size)
            if message:
                (end, memory), limits_set = _LIMITS.unpack(message), limits_set + 1
                continue
            awaited.remove(reading)
        out_of_memory = resident(pid) > memory
        if out_of_memory or time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Ended(None, limits_set, out_of_memory)


def survives(work: Callable[[], object]) -> bool:
    """Return True if a copy of this process survives some work, whose results and exceptions are lost.

    Without memory for another process, nothing is tried, and the work is taken for harmless.
    """
    if sys.platform != "linux":
        return True

    def tried(_: Pause) -> bool:
        with suppress(Exception):
            work()
        return True

    try:
        fork = _Fork(tried)
    except OSError:
        return True
    try:
        return fork.has_ended(_LONGEST_TRIAL_S) and fork.result() is True
    finally:
        fork.end()


def most_shares(processes: int) -> int:
    """Return how many processes can share work: ``processes``, but 1 where processes cannot be copied safely."""
    return max(1, processes) if sys.platform == "linux" else 1


def default_shares() -> int:
    """Return how many processes share a query's work where nothing else is asked for: torch's threads, at most 8."""
    import torch

    return min(torch.get_num_threads(), _MOST_SHARES)


def run_shares(
    shares: Sequence[Callable[[Pause], Found]], left: Callable[[], float], whole: bool = False
) -> list[Found | None]:
    """Do several shares of some work at once: the first in this process, each of the others in a copy of it.

    Copies change nothing here but by what they return. Ctrl-C is for this process alone: copies are killed when an
    exception ends this function.

    Args:
        shares: the shares, at least one. Each looks often at its argument, and returns soon once that is true.
        left: returns the seconds that are left; a copy that has not returned soon after these is killed.
        whole: whether every share is done to its end, rather than until the first one has ended.

    Returns:
        What each share has found; None for one whose process could not be made, failed or came too late.
    """
    forks: list[_Fork[Found]] = []
    with _single_threaded():
        try:
            # Where the system allows no further process, pipe or memory, the rest is left to those that there are.
            with uninterrupted(), suppress(OSError):
                for share in shares[1:]:
                    forks.append(_Fork(share))
            mine = shares[0](lambda: not whole and any(fork.has_ended() for fork in forks))
            if not whole:
                for fork in forks:
                    fork.hurry()
            for fork in forks:
                while not fork.has_ended(0.05) and left() >= -_LATE_S:
                    pass
            return [mine, *(fork.result() for fork in forks), *[None] * (len(shares) - 1 - len(forks))]
        finally:
            with uninterrupted():
                for fork in forks:
                    fork.end()


class _Fork(Generic[Found]):
    """A copy of this process that does some work, returns the result and ends.

    Args:
        work: a function that is told when it should return.
    """

    def __init__(self, work: Callable[[Pause], Found]) -> None:
        (self._reading, writing), (told, self._telling) = os.pipe(), os.pipe()
        try:
            self._pid = _fork()
        except OSError:
            for end in (self._reading, writing, told, self._telling):
                os.close(end)
            raise
        if not self._pid:
            _work(work, writing, told)
        os.close(writing)
        os.close(told)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Return True once there is a result, or no process any more; waits for it for some seconds."""
        return _readable(self._reading, seconds)

    def hurry(self) -> None:
        """Have the copy return what there is by now."""
        with suppress(OSError):
            os.write(self._telling, b"!")

    def result(self) -> Found | None:
        """Return the result; None where there is none by now."""
        if self.has_ended():
            with suppress(EOFError, OSError, pickle.UnpicklingError), open(self._reading, "rb", closefd=False) as file:
                found: Found | None = pickle.load(file)
                return found
        return None

    def end(self) -> None:
        """Kill the process, if it is there still."""
        # Where the user has SIGCHLD ignored, a process that has ended is gone.
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._reading)
        os.close(self._telling)


def _work(work: Callable[[Pause], object], writing: int, told: int) -> None:
    """In a copy: do the work, send its result, and end."""
    try:
        # Ctrl-C in a terminal is for all its processes, and is for the first one alone to handle.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # What a library says of its crash is for nobody.
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        # Objects whose threads stay behind, as onnxruntime's sessions, would crash or hang where they are collected.
        gc.freeze()
        # What fails here is done again by the other process, which fails too if the work is at fault, and reports it.
        with _single_threaded(), suppress(Exception):
            data = pickle.dumps(work(lambda: _readable(told)), pickle.HIGHEST_PROTOCOL)
            with open(writing, "wb") as file:
                file.write(data)
    finally:
        os._exit(0)


def _readable(pipe: int, seconds: float = 0.0) -> bool:
    """Return True once there is something to read from a pipe, its end included; waits for it for some seconds."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1e3 * seconds))


def _fork() -> int:
    """Fork; in the copy, which the operating system ends with this process however that ends, returns 0."""
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl
    with warnings.catch_warnings():
        # Python 3.12 and later warn of threads that hold locks: those of torch and BLAS wait for work by now.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        # PR_SET_PDEATHSIG of prctl(2).
        prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    return pid


@contextmanager
def _single_threaded() -> Iterator[None]:
    """A block in which torch, where it is loaded, has one thread: processes share the cores.

    Other threads than the one that forks do not exist in a copy, which would wait for them.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A block after which signals are handled that came meanwhile.

    A signal that one thread blocks comes by way of another, so that a handler takes note of them instead. Threads other
    than the main one have none to handle.
    """
    came: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda sent, _: came.append(sent))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for sent in came:
            signal.raise_signal(sent)
