"""Progress bars on stderr, which leave stdout to tables."""

from __future__ import annotations

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


class Bar:
    """A verifier's progress, shown as a bar until the context is left."""

    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self.progress = progress
        self.task: TaskID = progress.add_task(label, total=total)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.remove_task(self.task)

    def advance(self) -> None:
        """Count one more query as answered."""
        self.progress.advance(self.task)


def bars() -> Progress:
    """A display to which bars can be added."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))


def say(text: str) -> None:
    """Print a line to stderr."""
    Console(stderr=True).print(text, highlight=False)
