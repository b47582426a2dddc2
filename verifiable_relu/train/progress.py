"""The progress of a training or a hardening: a bar on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def shown(wanted: bool, steps: int) -> Iterator[Callable[[int, str], None]]:
    """Yield a function that shows the number of steps taken and a line of figures, while the ``with`` block lasts.

    Args:
        wanted: False shows nothing.
        steps: the number of steps in all.
    """
    if not wanted:
        yield lambda taken, text: None
        return
    # Imported here, because the bar alone needs the library rich.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=steps)
        yield lambda taken, text: bar.update(task, completed=taken, description=text)
