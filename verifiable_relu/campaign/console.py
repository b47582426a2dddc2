"""The display of a campaign on stderr: a progress bar while the campaign runs, a table when it has ended."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from verifiable_relu.campaign.result import Result


class Watcher:
    """An observer of a campaign that shows a progress bar where stderr is a terminal.

    A watcher is a context manager, which shows the bar until it is left.

    Args:
        total: the number of instances.
        quiet: whether the bar is left out.

    Attributes:
        done: the number of instances that are answered.
        answers: the number of instances by answer.
    """

    def __init__(self, total: int, quiet: bool = False) -> None:
        self.done = 0
        self.answers: Counter[str] = Counter()
        console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._reading = self._progress.add_task("reading", total=total, note="")
        self._task = self._progress.add_task("answered", total=total, note="", visible=False)

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
        """Print a line of text above the bar."""
        if self._progress.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stage(self, name: str, done: int, total: int) -> None:
        self._progress.update(self._reading, visible=False)
        self._progress.update(self._task, note=f"{name} {done}/{total}", visible=True)

    def result(self, result: Result) -> None:
        self.done += 1
        self.answers[result.answer] += 1
        counts = ", ".join(f"{count} {answer}" for answer, count in sorted(self.answers.items()))
        self._progress.update(self._reading, visible=False)
        self._progress.update(self._task, completed=self.done, description=f"answered ({counts})", visible=True)


def table(results: Sequence[Result]) -> None:
    """Print a table of results to stderr: for each answer and reason the instances, the seconds and the methods."""
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
        shown.add_row(answer, reason, str(len(members)), f"{sum(seconds):.2f}", f"{max(seconds):.2f}", methods)
    Console(stderr=True).print(shown)
