"""Work that is dealt out among this process and copies of it, which the operating system makes (fork).

A copy begins with everything that this process has prepared, and costs milliseconds, where another Python process
would import torch first. It returns what it has found, and ends; it also ends with this process, however that ends.
"""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import torch

Found = TypeVar("Found")
"""The result of a share of some work."""

_PATIENCE = 1.0
"""The seconds after the end of the time limit in which copies may still return a result before they are killed."""

_ENDING = 5.0
"""The seconds that a copy that has been killed may take to end."""

_SHARING = 8
"""More processes than so many share a query's work only where that is asked for: every one needs memory."""


def most(processes: int) -> int:
    """The number of processes that can share work: ``processes``, but 1 where processes cannot be copied safely."""
    # Forks of processes that use the graphical or numerical libraries of macOS may fail, and Windows has none.
    return max(1, processes) if sys.platform == "linux" else 1


def sharing() -> int:
    """The number of processes that may share a query's work where nothing else is asked for: torch's threads, or 8."""
    return min(torch.get_num_threads(), _SHARING)


def at_once(
    shares: Sequence[Callable[[Callable[[], bool]], Found]], left: Callable[[], float], whole: bool = False
) -> list[Found | None]:
    """Do several shares of some work at once: the first in this process, each of the others in a copy of it.

    What the others change in memory is lost but for what they return, which must be picklable. Ctrl-C is for this
    process alone: copies are killed when an exception ends this function.

    Args:
        shares: the shares, at least one. Each looks often at its argument, and returns soon once that is true.
        left: tells how many seconds are left; a copy that has not returned soon after these is killed.
        whole: whether every share is to be done to its end, rather than until the first one has ended.

    Returns:
        What each share has found; None for one whose process could not be made, failed or came too late, so that
        nothing is known of this share.
    """
    threads = torch.get_num_threads()
    copies: list[_Copy[Found]] = []
    try:
        # More threads would not get more cores, and those that this process has started do not exist in a copy.
        torch.set_num_threads(1)
        # Where the system allows no further process, pipe or memory, the rest is left to those that there are.
        with _uninterrupted(), suppress(OSError):
            for share in shares[1:]:
                copies.append(_Copy(share, copies))
        mine = shares[0](lambda: not whole and any(copy.has_ended() for copy in copies))
        if not whole:
            for copy in copies:
                copy.hurry()
        missing = len(shares) - 1 - len(copies)
        return [mine, *(copy.found(left) for copy in copies), *[None] * missing]
    finally:
        with _uninterrupted():
            for copy in copies:
                copy.end()
            torch.set_num_threads(threads)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals that come meanwhile are handled when this has ended.

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


class _Copy(Generic[Found]):
    """A copy of this process that does a share of the work.

    Args:
        share: the share.
        others: the copies that were made before.
    """

    def __init__(self, share: Callable[[Callable[[], bool]], Found], others: Sequence[_Copy[Found]]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        ours = [*(other._pipe for other in others), self._pipe]
        self._process = context.Process(target=_serve, args=(share, theirs, ours), daemon=True)
        mine = multiprocessing.current_process()
        daemonic = mine.daemon
        try:
            # A daemonic process may have no children, since Python would leave them behind when it ends the process. A
            # copy sees that its pipe is closed, and ends by itself.
            if daemonic:
                mine.daemon = False
            with warnings.catch_warnings():
                # Python 3.12 and later warn of threads that hold locks: those of torch and BLAS wait for work by now.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        finally:
            if daemonic:
                mine.daemon = True
            theirs.close()

    def has_ended(self) -> bool:
        """Whether there is a result, or no process any more."""
        return self._pipe.poll()

    def hurry(self) -> None:
        """Have the copy return what there is by now."""
        with suppress(OSError):
            self._pipe.send_bytes(b"now")

    def found(self, left: Callable[[], float]) -> Found | None:
        """What the copy returns; None if it fails, or returns nothing before the time is up."""
        while not self._pipe.poll(0.05):
            if left() < -_PATIENCE:
                return None
        with suppress(EOFError, OSError):
            found: Found | None = pickle.loads(self._pipe.recv_bytes())
            return found
        return None

    def end(self) -> None:
        """End the copy's process."""
        self._process.kill()
        self._process.join(_ENDING)
        self._pipe.close()


def _serve(share: Callable[[Callable[[], bool]], Found], pipe: Connection, ours: Sequence[Connection]) -> None:
    """In a copy: do a share and send what it finds.

    Args:
        share: the share.
        pipe: this process's end of the pipe to the process that it is a copy of.
        ours: that process's ends of its pipes, which stay open with that process alone.
    """
    # Ctrl-C in a terminal is for all its processes, and is for the first one alone to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Objects whose threads stay behind, onnxruntime's sessions for one, would crash or hang where they are collected.
    gc.freeze()
    for end in ours:
        end.close()
    # What fails here is done again by the other process, which fails too if the share is at fault, and reports it.
    with suppress(Exception):
        # Where the other process has gone, there is something to be read as well: the end of the pipe.
        pipe.send_bytes(pickle.dumps(share(pipe.poll), pickle.HIGHEST_PROTOCOL))
