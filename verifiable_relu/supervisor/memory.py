"""Memory of processes in bytes: how much one has, and how much it may have."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

CONTROL_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files in which Linux tells a container how much memory it may have (versions 2 and 1 of control groups)."""

_BEYOND_BOUNDS = 512 << 20
"""Bytes that a process may have beyond twice what bounds may hold, and beyond what it has at its start."""

_limit: int | None = None


def resident(pid: int | None) -> int:
    """Return the memory that a process has resident; 0 where it has ended or the system is not Linux."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """Return the most memory that this process has had resident; 0 where the system is not Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def limit_memory(size: int) -> None:
    """Set ``default_memory`` of this process."""
    global _limit
    _limit = size


def default_memory() -> int:
    """Return what a worker's process may have unless its caller says otherwise: half of the machine's memory."""
    return half_of_memory() if _limit is None else _limit


@cache
def half_of_memory() -> int:
    """Return half of the memory of this machine, or of the container in which this process runs."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else []
    for path in CONTROL_GROUPS:
        with suppress(OSError, ValueError):
            limits.append(int(path.read_text()))
    return min(limits, default=sys.maxsize) // 2


def process_memory(process: int | None, bounds: int | None, start: int) -> int:
    """Return what a process may have resident.

    Args:
        process: the user's limit of the process; None for ``default_memory``.
        bounds: the user's limit of what bounds may hold at once: everything else, such as what the user's files need,
            may take as much again and 512 MiB. None for no such limit.
        start: what the process has when it begins.
    """
    most = default_memory() if process is None else process
    return most if bounds is None else min(most, start + 2 * bounds + _BEYOND_BOUNDS)
