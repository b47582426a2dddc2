"""Progress bars on stderr, which leave stdout to tables."""

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
    """A verifier's progress, shown as a bar until the context is left."""

    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self.progress = progress
        self.task: TaskID = progress.add_task(label, total=total)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.remove_task(self.task)

    def stage(self, name: str, done: int, total: int) -> None:
        """Ignore a stage: the bar counts finished queries."""

    def finish(self, query: int, outcome: Outcome) -> None:
        """Count one more query as answered."""
        self.progress.advance(self.task)


def bars() -> Progress:
    """A display to which bars can be added."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))


def say(text: str) -> None:
    """Print a line to stderr."""
    Console(stderr=True).print(text, highlight=False)
