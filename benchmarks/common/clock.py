"""The measurement of time, with a limit."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Late(BaseException):
    """A measurement took longer than its limit.

    The class is no ``Exception``, because a library that is measured might catch that.
    """


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """A context that raises ``Late`` once its block has taken ``seconds`` of wall-clock time; for the main thread."""

    def ring(number: int, frame: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def seconds(work: Callable[[], Any], least: float = 0.0) -> float:
    """The wall-clock seconds of one call of ``work``: the mean over calls that last ``least`` seconds together."""
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < least:
        work()
        count += 1
    return (time.perf_counter() - start) / count
