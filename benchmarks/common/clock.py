"""How long something takes, and stopping what takes too long."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Late(BaseException):
    """A measurement took longer than its limit. It is no ``Exception``: a library that is measured might catch that."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise ``Late`` where the block takes longer than ``seconds``; in the main thread only."""

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
    """Wall-clock seconds of one call of ``work``: the mean of as many calls as take ``least`` seconds together."""
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < least:
        work()
        count += 1
    return (time.perf_counter() - start) / count
