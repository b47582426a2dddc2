"""The progress of a training or a hardening: a bar on stderr, and curves for TensorBoard (the extra "tensorboard")."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verifiable_relu.errors import InputError, missing


@contextmanager
def shown(wanted: bool, steps: int) -> Iterator[Callable[[int, str], None]]:
    """A function that shows the number of steps taken and a line of figures, while the ``with`` block lasts.

    Args:
        wanted: whether anything is shown.
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


class Board:
    """The folder of one training's curves.

    Args:
        folder: made if there is none.

    Raises:
        InputError: without TensorBoard, or if the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing("writing curves", "tensorboard", place="--tensorboard") from None
        try:
            self._writer = SummaryWriter(folder)
        except OSError as error:
            raise InputError(f"the folder cannot be written: {error.strerror}", path=folder) from None

    def epoch(self, number: int, entry: Mapping[str, Any]) -> None:
        """Add an epoch of ``Trained.history``: the loss, the accuracy on the training images, and each layer's λ."""
        self._writer.add_scalar("training/loss", entry["loss"], number)
        self._writer.add_scalar("training/accuracy", entry["accuracy"], number)
        for layer, lam in enumerate(entry["lam"]):
            self._writer.add_scalar(f"λ/layer {layer + 1}", lam, number)
        self._writer.flush()

    def finish(self, points: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> None:
        """Add the measurements during the training, by steps, and the numbers of the results; close the folder."""
        for point in points:
            for name in ("oui", "patterns_changed", "weights_changed", "unstable"):
                if isinstance(point.get(name), int | float):
                    self._writer.add_scalar(f"measured/{name}", point[name], point["step"])
        for name, value in results.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"results/{name}", value)
        self._writer.close()
