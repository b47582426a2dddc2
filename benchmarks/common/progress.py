"""Bars on stderr, so that tables can be piped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from verifiable_relu.verifiers.base import Outcome


class Bar:
    """A verifier's progress as a bar, which goes when the verifier is done."""

    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self.progress = progress
        self.task: TaskID = progress.add_task(label, total=total)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.remove_task(self.task)

    def stage(self, name: str, done: int, total: int) -> None:
        """Nothing: only finished queries are shown."""

    def finish(self, query: int, outcome: Outcome) -> None:
        """One more query is answered."""
        self.progress.advance(self.task)


def bars() -> Progress:
    """Bars that can be added to."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))


def say(text: str) -> None:
    """A line on stderr."""
    Console(stderr=True).print(text, highlight=False)
