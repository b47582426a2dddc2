"""What the benchmarks share that put test images to the verifiers: what is clean, what counts, and a bar."""

from __future__ import annotations

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from verifiable_relu.network import Network
from verifiable_relu.spec import Query
from verifiable_relu.trust.replay import confirm
from verifiable_relu.verifiers.base import Outcome, Verdict

_BATCH = 256


class Bar:
    """A verifier's progress as a bar."""

    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self.progress = progress
        self.task: TaskID = progress.add_task(label, total=total)

    def stage(self, name: str, done: int, total: int) -> None:
        pass

    def finish(self, query: int, outcome: Outcome) -> None:
        self.progress.advance(self.task)


def bars() -> Progress:
    """On stderr, so that tables can be piped."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def clean(network: Network, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Which images are classified rightly, in the arithmetic that users have: float32."""
    with torch.inference_mode():
        classes = [
            network(torch.from_numpy(images[start : start + _BATCH])).flatten(1).argmax(1).numpy()
            for start in range(0, len(images), _BATCH)
        ]
    return np.concatenate(classes) == labels


def checked(query: Query, outcome: Outcome) -> Verdict:
    """The verdict; a counterexample that exact evaluation and replay do not confirm is none."""
    if outcome.verdict is Verdict.SAT and not (outcome.witness and confirm(query, outcome.witness).confirmed):
        return Verdict.UNKNOWN
    return outcome.verdict
