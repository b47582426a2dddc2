"""The display of a campaign: rows on stdout as they come, a progress bar and a summary on stderr."""

from __future__ import annotations

import csv
import io
import sys
from collections import Counter
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from verifiable_relu.campaign.result import Observer, Result
from verifiable_relu.command_line import write
from verifiable_relu.errors import printable
from verifiable_relu.files import csv_cell

_COLOURS = {"sat": "red", "unsat": "green"}

_SHOWN = 1000  # The most messages that are kept: so that none is shown twice, and for the end
_RECENT = 300.0  # The seconds of the past by which the time that is left is estimated


class Watcher(Observer):
    """An observer of a campaign that shows a progress bar where stderr is a terminal, until it is left.

    The file ``out`` gets a line ``onnx,vnnlib,answer,seconds`` for each answer.

    Attributes:
        done, bad: the numbers of instances that are answered, and of those whose input was bad.
        faults, disputed: property, method and message of the first instances at which the program was at fault, and
            property and message of those whose certificate the checker refused.
    """

    def __init__(self, total: int, quiet: bool = False, out: TextIO | None = None) -> None:
        self.done = self.recorded = self.bad = 0
        self.faults: list[tuple[str, str, str]] = []
        self.disputed: list[tuple[str, str]] = []
        self._answers: Counter[str] = Counter()
        self._methods: dict[tuple[str, str], Counter[str]] = {}
        self._seconds: dict[tuple[str, str], tuple[int, float, float]] = {}
        self._out = out
        self._complaints: set[str] = set()
        console = Console(stderr=True)
        self._progress = ProgressBar(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}", style="dim"), console=console,
            transient=True, speed_estimate_period=_RECENT, disable=quiet or not console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("answered", total=total, note="")

    def __enter__(self) -> Watcher:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, name: str, done: int, total: int) -> None:
        self._progress.update(self._task, note=f"{name} {done}/{total}")

    def result(self, number: int, result: Result, recorded: bool) -> None:
        self.done += 1
        self.recorded += recorded
        self._answers[result.answer] += 1
        # Many instances can share one bad network, which is reported once. Faults of the program are reported at the
        # end, by whoever started the campaign.
        if result.reason == "error" and not result.method:
            self.bad += 1
            if result.detail not in self._complaints:
                if len(self._complaints) < _SHOWN:
                    self._complaints.add(result.detail)
                self._complain(f"certify: {printable(result.detail)}")
        elif result.reason == "error" and len(self.faults) < _SHOWN:
            self.faults.append((result.vnnlib, result.method, result.detail))
        elif result.disputed and len(self.disputed) < _SHOWN:
            self.disputed.append((result.vnnlib, result.detail))
        group = result.answer, str(result.reason)
        count, spent, slowest = self._seconds.get(group, (0, 0.0, 0.0))
        self._seconds[group] = count + 1, spent + result.seconds, max(slowest, result.seconds)
        self._methods.setdefault(group, Counter()).update([result.method] if result.method else [])
        self._row(result)
        counts = ", ".join(f"{count} {answer}" for answer, count in sorted(self._answers.items()))
        self._progress.update(self._task, completed=self.done, description=f"answered ({counts})")

    def _complain(self, text: str) -> None:
        """Print a line to stderr, above the bar."""
        if self._progress.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _row(self, result: Result) -> None:
        if self._out is None:
            return
        row = io.StringIO()
        cells = csv_cell(result.onnx), csv_cell(result.vnnlib), result.answer, f"{result.seconds:.3f}"
        csv.writer(row, lineterminator="").writerow(cells)
        line = printable(row.getvalue()) if self._out.isatty() else row.getvalue()
        if self._progress.disable or not self._out.isatty():
            write([line], self._out)
        else:
            # Both streams lead to a terminal, which the bar must leave for the line.
            text = Text(line, _COLOURS.get(result.answer, "yellow"))
            self._progress.console.print(text, soft_wrap=True, highlight=False)

    def summary(self) -> None:
        """Print a table to stderr: for each answer and reason the instances, the seconds and the methods."""
        shown = Table()
        for column in ("answer", "reason", "instances", "seconds", "slowest", "methods"):
            shown.add_column(column, justify="right" if column in ("instances", "seconds", "slowest") else "left")
        for (answer, reason), (count, spent, slowest) in sorted(self._seconds.items()):
            methods = ", ".join(f"{name} {n}" for name, n in self._methods[answer, reason].most_common())
            shown.add_row(answer, reason, str(count), f"{spent:.2f}", f"{slowest:.2f}", Text(printable(methods)))
        Console(stderr=True).print(shown)
        if self.recorded:
            # Of an undecided instance, an earlier answer counts where the time limit was no shorter.
            asked = self.done - self.recorded
            print(f"{self.recorded} of {self.done} answers are from the records; {asked} were asked", file=sys.stderr)
