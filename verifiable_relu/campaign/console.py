"""The display of a campaign: rows on stdout as they come, a progress bar and a summary on stderr."""

from __future__ import annotations

import csv
import io
import os
import sys
import time
from collections import Counter
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.control import Control
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from verifiable_relu.campaign.result import Result
from verifiable_relu.errors import printable
from verifiable_relu.files import csv_cell
from verifiable_relu.streams import write
from verifiable_relu.verifiers.base import SearchProgress

_COLOURS = {"sat": "red", "unsat": "green"}

_SHOWN = 1000
"""The most messages that are kept: so that none is shown twice, and for the end."""

_RECENT = 300.0
"""The seconds of the past by which the time that is left is estimated."""

_REDRAWN = 0.2
"""Seconds between two drawings of the line of one question."""

ERASE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


class Line:
    """An observer of one instance, which shows where the work on it stands in a line, if stderr is a terminal.

    A line is a context manager, and gone when it is left. It is drawn when its clock is read, which work does all the
    time: a thread that drew it would be at work while processes are copied.

    Args:
        seconds: the instance's time limit.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._console, self._process = seconds, Console(stderr=True), os.getpid()
        self._shown = self._console.is_terminal and not self._console.is_dumb_terminal
        self._began = time.perf_counter()
        self._due = 0.0
        self._stage, self._done, self._total = "reading", 0, 1
        self._told: dict[str, float] = {}

    def __enter__(self) -> Line:
        self.clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._console.control(ERASE)

    def stage(self, name: str, done: int, total: int) -> None:
        if name != self._stage:
            self._told = {"margin": self._told["margin"]} if "margin" in self._told else {}
        self._stage, self._done, self._total = name, done, total

    def result(self, number: int, result: Result, recorded: bool) -> None:
        pass

    def report_progress(self, progress: SearchProgress) -> None:
        """As ``TimeBudget.report_progress``."""
        self._told |= progress

    def clock(self) -> float:
        """The present time in seconds, by ``time.perf_counter``."""
        now = time.perf_counter()
        # A copy of the process has the same terminal.
        if self._shown and now >= self._due and os.getpid() == self._process:
            self._due = now + _REDRAWN
            self._console.control(ERASE)
            self._console.print(Text(self._text(now)), end="", no_wrap=True, overflow="ellipsis")
        return now

    def _text(self, now: float) -> str:
        parts = [self._stage]
        if self._total > 1:
            parts.append(f"{self._done} of {self._total} boxes")
        elif "margin" in self._told:
            parts.append(f"margin at least {self._told['margin']:.4g}")
        if "sub-problems" in self._told:
            parts.append(f"{self._told['sub-problems']:,.0f} sub-problems")
        if "closed" in self._told:
            parts.append(f"{self._told['closed']:.0%} closed")
        return ", ".join([*parts, f"{max(0.0, self._seconds - now + self._began):.0f} s left"])


class Watcher:
    """An observer of a campaign that shows a progress bar where stderr is a terminal.

    A watcher is a context manager, which shows the bar until it is left.

    Args:
        total: the number of instances.
        quiet: whether the bar is left out.
        out: the file that gets a line ``onnx,vnnlib,answer,seconds`` for each answer as soon as it is known; None for
            no lines.

    Attributes:
        done: the number of instances that are answered.
        recorded: the number of answers that are of earlier runs.
        answers: the number of instances by answer.
        bad: the number of instances whose input was bad.
        faults: property, method and message of the instances at which the program was at fault, the first ones.
        disputed: property and message of the instances whose certificate the checker refused, the first ones.
    """

    def __init__(self, total: int, quiet: bool = False, out: TextIO | None = None) -> None:
        self.done = 0
        self.recorded = 0
        self.answers: Counter[str] = Counter()
        self.bad = 0
        self.faults: list[tuple[str, str, str]] = []
        self.disputed: list[tuple[str, str]] = []
        self._groups: dict[tuple[str, str], _Group] = {}
        self._out = out
        self._complaints: set[str] = set()
        console = Console(stderr=True)
        self._progress = ProgressBar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            console=console,
            transient=True,
            speed_estimate_period=_RECENT,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._progress.add_task("answered", total=total, note="")

    def __enter__(self) -> Watcher:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        """Print a line of text to stderr, above the bar."""
        if self._progress.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stage(self, name: str, done: int, total: int) -> None:
        self._progress.update(self._task, note=f"{name} {done}/{total}")

    def result(self, number: int, result: Result, recorded: bool) -> None:
        self.done += 1
        self.recorded += recorded
        self.answers[result.answer] += 1
        # Many instances can share one bad network, which is reported once. Faults of the program are reported at the
        # end, by whoever started the campaign.
        if result.reason == "error" and not result.method:
            self.bad += 1
            if result.detail not in self._complaints:
                if len(self._complaints) < _SHOWN:
                    self._complaints.add(result.detail)
                self.line(f"certify: {printable(result.detail)}")
        elif result.reason == "error" and len(self.faults) < _SHOWN:
            self.faults.append((result.vnnlib, result.method, result.detail))
        elif result.disputed and len(self.disputed) < _SHOWN:
            self.disputed.append((result.vnnlib, result.detail))
        self._groups.setdefault((result.answer, str(result.reason)), _Group()).add(result)
        self._row(result)
        counts = ", ".join(f"{count} {answer}" for answer, count in sorted(self.answers.items()))
        self._progress.update(self._task, completed=self.done, description=f"answered ({counts})")

    def _row(self, result: Result) -> None:
        """Write the line of an answer, as far as the reader of stdout takes it."""
        if self._out is None:
            return
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(
            (csv_cell(result.onnx), csv_cell(result.vnnlib), result.answer, f"{result.seconds:.3f}")
        )
        if not self._progress.disable and self._out.isatty():
            # Both streams lead to a terminal, which the bar must leave for the line.
            style = _COLOURS.get(result.answer, "yellow")
            self._progress.console.print(Text(printable(line.getvalue()), style), soft_wrap=True, highlight=False)
            return
        write([printable(line.getvalue()) if self._out.isatty() else line.getvalue()], self._out)

    def summary(self) -> None:
        """Print a table to stderr: for each answer and reason the instances, the seconds and the methods."""
        shown = Table()
        for column, side in (("answer", "left"), ("reason", "left"), ("instances", "right"), ("seconds", "right"),
                             ("slowest", "right"), ("methods", "left")):  # fmt: skip
            shown.add_column(column, justify=side)  # type: ignore[arg-type]
        for (answer, reason), group in sorted(self._groups.items()):
            methods = ", ".join(f"{name} {n}" for name, n in group.methods.most_common())
            seconds = f"{group.seconds:.2f}", f"{group.slowest:.2f}"
            shown.add_row(answer, reason, str(group.count), *seconds, Text(printable(methods)))
        Console(stderr=True).print(shown)
        if self.recorded:
            # Of an undecided instance, an earlier answer counts where the time limit was no shorter.
            asked = self.done - self.recorded
            print(f"{self.recorded} of {self.done} answers are from the records; {asked} were asked", file=sys.stderr)


class _Group:
    """The instances with one answer for one reason."""

    def __init__(self) -> None:
        self.count, self.seconds, self.slowest = 0, 0.0, 0.0
        self.methods: Counter[str] = Counter()

    def add(self, result: Result) -> None:
        self.count += 1
        self.seconds += result.seconds
        self.slowest = max(self.slowest, result.seconds)
        self.methods.update([result.method] if result.method else [])
