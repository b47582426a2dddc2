"""The display of a campaign: rows on stdout as they come, a progress bar and a summary on stderr."""

from __future__ import annotations

import csv
import io
import sys
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from verifiable_relu.campaign.result import Result
from verifiable_relu.errors import printable
from verifiable_relu.files import csv_cell
from verifiable_relu.streams import write

_COLOURS = {"sat": "red", "unsat": "green"}

_RECENT = 300.0
"""The seconds of the past by which the time that is left is estimated."""


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
    """

    def __init__(self, total: int, quiet: bool = False, out: TextIO | None = None) -> None:
        self.done = 0
        self.recorded = 0
        self.answers: Counter[str] = Counter()
        self._out = out
        self._complaints: set[str] = set()
        console = Console(stderr=True)
        self._progress = Progress(
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
        self._reading = self._progress.add_task("reading", total=total, note="")
        self._task = self._progress.add_task("answered", total=total, note="", visible=False, start=False)

    def __enter__(self) -> Watcher:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def read(self) -> None:
        """Count one more instance as read from its files."""
        self._progress.advance(self._reading)

    def line(self, text: str) -> None:
        """Print a line of text to stderr, above the bar."""
        if self._progress.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stage(self, name: str, done: int, total: int) -> None:
        self._show(note=f"{name} {done}/{total}")

    def result(self, number: int, result: Result, recorded: bool) -> None:
        self.done += 1
        self.recorded += recorded
        self.answers[result.answer] += 1
        # Many instances can share one bad network, which is reported once. Faults of the program are reported at the
        # end, by whoever started the campaign.
        if result.reason == "error" and not result.method and result.detail not in self._complaints:
            self._complaints.add(result.detail)
            self.line(f"certify: {printable(result.detail)}")
        self._row(result)
        counts = ", ".join(f"{count} {answer}" for answer, count in sorted(self.answers.items()))
        self._show(completed=self.done, description=f"answered ({counts})")

    def _show(self, **fields: object) -> None:
        """Change the bar of answers, which takes the place of the bar of instances read."""
        self._progress.update(self._reading, visible=False)
        self._progress.start_task(self._task)
        self._progress.update(self._task, visible=True, **fields)  # type: ignore[arg-type]

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


def summary(results: Sequence[Result], recorded: int = 0) -> None:
    """Print a table of results to stderr: for each answer and reason the instances, the seconds and the methods.

    Args:
        results: all results of the campaign.
        recorded: the number of results that are of earlier runs.
    """
    shown = Table()
    for column, side in (("answer", "left"), ("reason", "left"), ("instances", "right"), ("seconds", "right"),
                         ("slowest", "right"), ("methods", "left")):  # fmt: skip
        shown.add_column(column, justify=side)  # type: ignore[arg-type]
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.answer, str(result.reason)), []).append(result)
    for (answer, reason), members in sorted(groups.items()):
        seconds = [r.seconds for r in members]
        methods = ", ".join(f"{name} {n}" for name, n in Counter(r.method for r in members if r.method).most_common())
        shown.add_row(
            answer, reason, str(len(members)), f"{sum(seconds):.2f}", f"{max(seconds):.2f}", Text(printable(methods))
        )
    if disputed := sum(result.disputed for result in results):
        print(f"certify: the checker refuses the certificates of {disputed} verdicts", file=sys.stderr)
    Console(stderr=True).print(shown)
    if recorded:
        # Of an undecided instance, an earlier answer counts where the time limit was no shorter.
        asked = len(results) - recorded
        print(f"{recorded} of {len(results)} answers are from the records; {asked} were asked", file=sys.stderr)
