"""Copies of this process, which the operating system makes (fork) and which end with it; memory of processes.

``run_limited`` does a command's work in a copy that is killed at its limits, ``run_shares`` deals work out to copies,
and ``survives`` tries work that may crash. Only Linux can safely fork a process with numerical libraries; elsewhere
all work is done in this process, without limits.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import math
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

Found = TypeVar("Found")  # The result of a share of some work, which must be picklable
Pause = Callable[[], bool]  # Return True once a share should return what it has found so far

SetLimits = Callable[[float, float], None]
"""Set the seconds from now on after which the copy is killed, and the bytes it may have resident; infinite for none."""

MEMORY_CHECK_S = 0.02  # Seconds between two looks at the memory of a process, which a core fills at a few GB/s

CONTROL_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files in which Linux tells a container how much memory it may have (versions 2 and 1 of control groups)."""

_BEYOND_BOUNDS = 512 << 20  # Bytes that a process may have beyond its start and twice what bounds may hold
_LATE_S = 1.0  # Seconds after the time limit in which copies may still return a result before they are killed
_LONGEST_TRIAL_S = 120.0  # Seconds after which work is taken for hanging
_MOST_SHARES = 8  # More processes share a query's work only where that is asked for: every one needs memory

_memory_limit: int | None = None


def resident(pid: int | None) -> int:
    """Return the bytes that a process has resident; 0 where it has ended or the system is not Linux."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def peak_memory() -> int:
    """Return the most bytes that this process has had resident; 0 where the system is not Linux."""
    try:
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10
    except (OSError, IndexError):
        return 0


def limit_memory(size: int) -> None:
    """Set ``default_memory`` of this process."""
    global _memory_limit
    _memory_limit = size


def default_memory() -> int:
    """Return the default memory limit of a worker's process: half of the machine's memory."""
    return _memory_limit or half_of_memory()


@cache
def half_of_memory() -> int:
    """Return half of the memory of this machine, or of the container in which this process runs."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CONTROL_GROUPS:
        with suppress(OSError, ValueError):
            limits.append(int(path.read_text()))
    return min(limits) // 2


def process_memory(process: int | None, bounds: int | None, start: int) -> int:
    """Return the memory limit of a process that begins with ``start`` bytes, from the user's limits."""
    most = default_memory() if process is None else process
    return most if bounds is None else min(most, start + 2 * bounds + _BEYOND_BOUNDS)


@dataclass(frozen=True)
class CopyEnd:
    """End of a copy: its exit status, negative for a signal, None where it was killed at a limit; and limits set."""

    status: int | None
    limits_set: int = 0
    out_of_memory: bool = False


def run_limited(work: Callable[[SetLimits], int], seconds: float = math.inf) -> CopyEnd:
    """Do a command's work in a copy of this process, which is killed at the limits that the work sets.

    Before it sets one, the copy has ``seconds``.

    The call returns in both: the copy goes on to exit with the status of ``work``. It gets Ctrl-C from this process.
    """
    if sys.platform != "linux":
        return CopyEnd(work(lambda seconds, memory: None))
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    reading, writing = Pipe(duplex=False)
    pid = _fork()
    # Ctrl-C in a terminal is for the process that waits, which passes it on.
    with suppress(OSError):
        os.setpgid(pid, pid)
    if not pid:
        return CopyEnd(work(lambda seconds, memory: writing.send((time.monotonic() + seconds, memory))))
    writing.close()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, _: os.kill(pid, number))
    end, memory, limits_set = time.monotonic() + seconds, math.inf, 0
    while True:
        try:
            # The other end is closed when the copy has ended, and its own copies.
            while reading.poll(None if end == memory == math.inf else MEMORY_CHECK_S):
                (end, memory), limits_set = reading.recv(), limits_set + 1
        except EOFError:
            return CopyEnd(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), limits_set)
        out_of_memory = resident(pid) > memory
        if out_of_memory or time.monotonic() > end:
            # Processes that the copy has started are of its group.
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return CopyEnd(None, limits_set, out_of_memory)


def survives(work: Callable[[], object]) -> bool:
    """Return True if a copy of this process survives some work, or none could be made; results are lost."""

    def tried(_: Pause) -> bool:
        with suppress(Exception):
            work()
        return True

    if sys.platform != "linux":
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
    """Return the number of processes that can share work: ``processes``, or 1 if forks are not safe."""
    return max(1, processes) if sys.platform == "linux" else 1


def default_shares() -> int:
    """Return the default number of processes that share a query's work: torch's threads, at most 8."""
    import torch

    return min(torch.get_num_threads(), _MOST_SHARES)


def run_shares(
    shares: Sequence[Callable[[Pause], Found]], left: Callable[[], float], whole: bool = False
) -> list[Found | None]:
    """Run shares of work at once: the first in this process, each of the others in a copy of it.

    Copies change nothing here: they only return results. Ctrl-C is for this process alone: copies are killed when an
    exception ends this function, or soon after the seconds that ``left`` returns. Each share looks often at its
    argument, and returns soon once that is true: when the first one has ended, unless each is done ``whole``. Returns
    what each share has found; None for one whose process could not be made, failed or came too late.
    """
    forks: list[_Fork[Found]] = []
    with _single_threaded():
        try:
            # Where the system allows no further process, pipe or memory, the rest is left to those that there are.
            with uninterrupted(), suppress(OSError):
                for share in shares[1:]:
                    forks.append(_Fork(share))
            mine = shares[0](lambda: not whole and any(fork.has_ended() for fork in forks))
            for fork in forks if not whole else ():
                with suppress(OSError):
                    fork.pipe.send_bytes(b"")
            for fork in forks:
                while not fork.has_ended(0.05) and left() >= -_LATE_S:
                    pass
            return [mine, *(fork.result() for fork in forks), *[None] * (len(shares) - 1 - len(forks))]
        finally:
            with uninterrupted():
                for fork in forks:
                    fork.end()


class _Fork(Generic[Found]):
    """A copy of this process that does some work, sends the result and ends; a message tells it to return early."""

    def __init__(self, work: Callable[[Pause], Found]) -> None:
        self.pipe, theirs = Pipe()
        # Where the process cannot be made, both ends are closed when they are forgotten.
        self._pid = _fork()
        if not self._pid:
            _work(work, theirs)
        theirs.close()

        # Return True once there is a result, or no process any more; waits for it for some seconds.
        self.has_ended = self.pipe.poll

    def result(self) -> Found | None:
        found: Found | None = None
        if self.has_ended():
            with suppress(EOFError, OSError, pickle.UnpicklingError):
                found = pickle.loads(self.pipe.recv_bytes())
        return found

    def end(self) -> None:
        # Where the user has SIGCHLD ignored, a process that has ended is gone.
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self.pipe.close()


def _work(work: Callable[[Pause], object], pipe: Connection[Any, Any]) -> None:
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
            pipe.send_bytes(pickle.dumps(work(pipe.poll), pickle.HIGHEST_PROTOCOL))
    finally:
        os._exit(0)


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
    """Run a block with one thread for torch, if loaded: a copied process has no others, and would wait for them."""
    torch: Any = sys.modules.get("torch")
    threads = 1 if torch is None else torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Run a block, and handle signals that come meanwhile after it."""
    # A signal that one thread blocks comes by way of another, so that a handler takes note of them instead. Threads
    # other than the main one have none to handle.
    main = threading.current_thread() is threading.main_thread()
    held = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if main}
    handlers = {number: handler for number, handler in held.items() if callable(handler)}
    came: list[int] = []
    for number in handlers:
        signal.signal(number, lambda sent, _: came.append(sent))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for sent in came:
            signal.raise_signal(sent)
