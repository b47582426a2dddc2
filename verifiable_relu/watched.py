"""A command's work in a copy of its process, which is ended where it takes too much time or memory.

What a library in C++ does cannot be interrupted from Python. The copy is made before anything is imported, and costs
milliseconds; this process only waits for it. (Linux alone; elsewhere the work is done here, without these limits.)
"""

from __future__ import annotations

import math
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_TICK = 0.02
"""Seconds between two looks at the memory of the copy."""

_MESSAGE = struct.Struct("dd")

Until = Callable[[float, float], None]
"""A function of the seconds within which the next message of the copy has to come, and of the bytes it may have."""


class Ended:
    """How the copy ended.

    Attributes:
        status: its exit status, negative for a signal; None where it was ended because of a limit.
        memory: whether that was the limit of memory.
        named: how many times the copy had named limits.
    """

    def __init__(self, status: int | None, named: int, memory: bool = False) -> None:
        self.status = status
        self.named = named
        self.memory = memory


def copied() -> Until | Ended:
    """Go on in a copy of this process, in which a function is returned; here, return when the copy has ended.

    The copy has no limits until it names some, and none any more once it names infinite ones. It returns to its caller
    as this process would have, gets Ctrl-C from this process, and ends with it, however it ends.
    """
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return lambda seconds, memory: None
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    mine = os.getpid()
    pid = os.fork()
    if pid:
        with suppress(OSError):
            os.setpgid(pid, pid)
        os.close(writing)
        return _wait(pid, reading)
    os.close(reading)
    # Ctrl-C in a terminal is for the process that waits, which passes it on.
    with suppress(OSError):
        os.setpgid(0, 0)
    _end_with(mine)

    def until(seconds: float, memory: float) -> None:
        os.write(writing, _MESSAGE.pack(time.monotonic() + seconds, memory))

    return until


def _wait(pid: int, reading: int) -> Ended:
    """Wait for the end of the copy, or end it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, _: os.kill(pid, number))
    end = memory = math.inf
    named = 0
    process = os.pidfd_open(pid)
    watched = [process, reading]
    while True:
        limited = math.isfinite(end) or math.isfinite(memory)
        ready = select.select(watched, (), (), _TICK if limited else None)[0]
        if process in ready:
            return Ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), named)
        if reading in ready:
            message = os.read(reading, _MESSAGE.size)
            if message:
                (end, memory), named = _MESSAGE.unpack(message), named + 1
                continue
            watched.remove(reading)
        late, large = time.monotonic() > end, resident(pid) > memory
        if late or large:
            # Its own processes are of its group.
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Ended(None, named, large)


def resident(pid: int | None) -> int:
    """Bytes of memory that a process has resident; 0 where it has ended or the system is not Linux."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """The most bytes of memory that this process has had resident; 0 where the system is not Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def _end_with(parent: int) -> None:
    """Have the operating system end this process when its parent ends, however that ends."""
    import ctypes

    # PR_SET_PDEATHSIG of prctl(2).
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
