"""Limits of the work on queries: time, memory, device and processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from verifiable_relu.errors import OutOfTime

MEMORY = 1 << 30  # Bytes that bounds, boxes and trees may hold at once by default
SOLO_WORK = 3e9  # Work of some tenths of a second; to make copies of a process takes some hundredths
OVERTIME_S = 0.5  # Seconds after its time limit in which work may still return a result before it is broken off

SearchProgress = Mapping[str, float]
"""Progress of the work on a query: the best lower bound of its ``margin``, how many ``sub-problems`` have been bounded
and which part of them is ``closed``, or some of these."""


def ignore_progress(progress: SearchProgress) -> None:
    """Ignore a report of progress; a function, since budgets are pickled."""


@dataclass(frozen=True)
class TimeBudget:
    """Time, memory, device and processes that work may use, handed down to the innermost loop.

    Attributes:
        seconds: from ``start`` on; infinite for no limit.
        memory: the bytes that bounds, boxes and trees may hold at once, approximately.
        device: the torch device of bounds and searches, for methods that can choose.
        processes: how many processes may share the work on a query, where it takes long and the operating system can
            copy processes (Linux). The process that asks should have no other threads at work then.
        clock: returns the present time in seconds, by which work is charged: wall-clock time by default.
        start: when the work began, by the clock.
        overtime_s: the seconds after its time in which the work may still return a result: more where the work is a
            part of a larger one that has time left.
        solo_work: the work of branch and bound (``loop.TreeProgress``) that one process does before others share it.
        report_progress: called now and then with the progress, in the process that was asked.
        named: the limits that are part of a record's key (``batch.described``).
    """

    seconds: float = math.inf
    memory: int = MEMORY
    device: str = "cpu"
    processes: int = 1
    clock: Callable[[], float] = time.perf_counter
    start: float = 0.0
    overtime_s: float = OVERTIME_S
    solo_work: float = SOLO_WORK
    report_progress: Callable[[SearchProgress], None] = field(default=ignore_progress, repr=False, compare=False)
    named: tuple[str, ...] = ()

    def begun(self, seconds: float) -> TimeBudget:
        """Return the budget of work that begins now and may take ``seconds``."""
        return replace(self, seconds=seconds, start=self.clock())

    def share(self, part: float) -> TimeBudget:
        """Return the budget of work that begins now and may take a part of the time that is left."""
        return self.begun(part * self.left())

    def elapsed(self) -> float:
        return self.clock() - self.start

    def left(self) -> float:
        """Return the seconds that are left; negative once they are spent."""
        return self.seconds - self.elapsed()

    def over(self) -> bool:
        return self.left() <= 0

    def stop(self) -> bool:
        """Return True if no time is left, for work to ask between its steps.

        Raises:
            OutOfTime: once the work has gone on for ``overtime_s`` beyond that.
        """
        left = self.left()
        if left < -self.overtime_s:
            raise OutOfTime
        return left <= 0
