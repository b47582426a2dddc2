"""The display of commands that answer: rows on stdout as they come, a line of progress and a summary on stderr."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from datetime import timedelta
from typing import Self, TextIO

from verifiable_relu.campaign.result import BAD_INPUT, DISPUTED, FAULT, Observer, Result
from verifiable_relu.command_line import ERASE, coloured, complain, write
from verifiable_relu.errors import printable
from verifiable_relu.files import csv_cell, csv_line
from verifiable_relu.search.budget import SearchProgress

_RED, _GREEN, _YELLOW = 31, 32, 33
_COLOURS = {"sat": _RED, "unsat": _GREEN}

_SHOWN = 1000  # The most messages that are kept: so that none is shown twice, and for the end
_REDRAWN_S = 0.2  # Seconds between two drawings of a line


class TerminalLine(Observer):
    """Observer whose ``text`` is a line at the end of a terminal's stderr until it is left; nothing if ``quiet``.

    The line is drawn when the clock is read, which work does all the time: a thread that drew it would be running while
    processes are copied.
    """

    def __init__(self, quiet: bool = False) -> None:
        terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._shown, self._process, self._due = terminal and not quiet, os.getpid(), 0.0
        self._began = time.perf_counter()

    def __enter__(self) -> Self:
        self.clock()
        return self

    def __exit__(self, *_: object) -> None:
        self.draw("")

    def text(self, seconds: float) -> str:
        """Return the line's text some seconds after the beginning."""
        raise NotImplementedError

    def clock(self) -> float:
        """Return the present time in seconds, by ``time.perf_counter``."""
        now = time.perf_counter()
        if now >= self._due:
            self._due = now + _REDRAWN_S
            self.draw(printable(self.text(now - self._began))[: shutil.get_terminal_size().columns - 1])
        return now

    def draw(self, text: str) -> None:
        # A copy of the process has the same terminal.
        if self._shown and os.getpid() == self._process:
            print(f"{ERASE}{text}", end="", file=sys.stderr, flush=True)


class ProgressLine(TerminalLine):
    """Observer of one instance: a line with its progress."""

    def __init__(self, seconds: float, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._seconds, self._stage, self._done, self._total = seconds, "reading", 0, 1
        self._told: dict[str, float] = {}

    def stage(self, name: str, done: int, total: int) -> None:
        if name != self._stage:
            self._told = {"margin": self._told["margin"]} if "margin" in self._told else {}
        self._stage, self._done, self._total = name, done, total

    def report_progress(self, progress: SearchProgress) -> None:
        """Take a report of progress (``TimeBudget.report_progress``)."""
        self._told |= progress

    def text(self, seconds: float) -> str:
        parts, told = [self._stage], self._told
        if self._total > 1:
            parts.append(f"{self._done} of {self._total} boxes")
        elif "margin" in told:
            parts.append(f"margin at least {told['margin']:.4g}")
        if "sub-problems" in told:
            parts.append(f"{told['sub-problems']:,.0f} sub-problems")
        if "closed" in told:
            parts.append(f"{told['closed']:.0%} closed")
        return ", ".join([*parts, f"{max(0.0, self._seconds - seconds):.0f} s left"])


class Watcher(TerminalLine):
    """Observer of a campaign: rows of answers, a line with its progress, and a summary.

    The file ``out`` gets a line ``onnx,vnnlib,answer,seconds`` for each answer.

    Attributes:
        done: the number of instances that are answered.
        complaints: the first lines of ``Result.complaint``, each once, by exit status. Those about bad input are
            printed at once, the others by the command at the end.
    """

    def __init__(self, total: int, quiet: bool = False, out: TextIO | None = None) -> None:
        super().__init__(quiet)
        self.done = self.recorded = 0
        self.complaints: dict[int, dict[str, None]] = {DISPUTED: {}, BAD_INPUT: {}, FAULT: {}}
        self._methods: dict[tuple[str, str], Counter[str]] = {}
        self._seconds: dict[tuple[str, str], list[float]] = {}
        self._total, self._out, self._note = total, out, ""

    def text(self, seconds: float) -> str:
        answers: Counter[str] = Counter()
        for (answer, _), each in self._seconds.items():
            answers[answer] += len(each)
        counts = ", ".join(f"{count} {answer}" for answer, count in sorted(answers.items()))
        parts = [f"answered {self.done} of {self._total}{f' ({counts})' if counts else ''}", self._note]
        if asked := self.done - self.recorded:
            left = round(seconds / asked * (self._total - self.done))
            parts.insert(1, f"{timedelta(seconds=left)} left")
        return ", ".join(filter(None, parts))

    def stage(self, name: str, done: int, total: int) -> None:
        self._note = f"{name} {done}/{total}"
        self.clock()

    def result(self, number: int, result: Result, recorded: bool) -> None:
        self.done += 1
        self.recorded += recorded
        group = result.answer, str(result.reason)
        self._seconds.setdefault(group, []).append(result.seconds)
        self._methods.setdefault(group, Counter()).update([result.method] if result.method else [])
        status, said = result.complaint
        # Many instances can share one bad network, which is reported once.
        if status and said not in self.complaints[status]:
            if len(self.complaints[status]) < _SHOWN:
                self.complaints[status][said] = None
            if status == BAD_INPUT:
                self.draw("")
                complain("certify", said)
        if self._out is not None:
            row = csv_line((csv_cell(result.onnx), csv_cell(result.vnnlib), result.answer, f"{result.seconds:.3f}"))
            if self._out.isatty():
                self.draw("")
                row = coloured(printable(row), _COLOURS.get(result.answer, _YELLOW), self._out)
            write([row], self._out)
        self._due = 0.0
        self.clock()

    def summary(self) -> None:
        """Print a table to stderr: for each answer and reason the instances, the seconds and the methods."""
        rows = [("answer", "reason", "instances", "seconds", "slowest", "methods")]
        for group, seconds in sorted(self._seconds.items()):
            methods = ", ".join(f"{name} {n}" for name, n in self._methods[group].most_common())
            times = str(len(seconds)), f"{sum(seconds):.2f}", f"{max(seconds):.2f}"
            rows.append((*group, *times, printable(methods)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [
                cell.rjust(n) if 1 < i < 5 else cell.ljust(n)
                for i, (cell, n) in enumerate(zip(row, widths, strict=True))
            ]
            print("  ".join(cells).rstrip(), file=sys.stderr)
        if self.recorded:
            # Of an undecided instance, an earlier answer counts where the time limit was no shorter.
            asked = self.done - self.recorded
            print(f"{self.recorded} of {self.done} answers are from the records; {asked} were asked", file=sys.stderr)
