"""A verifier that does to its process what the name of a property says: it ends it, or fills its memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verifiable_relu.spec import Query
from verifiable_relu.verifiers.base import SILENT, Budget, Outcome, Progress
from verifiable_relu.verifiers.incomplete import Ibp

KILL, FILL, WAIT = 41.0, 43.0, 47.0
"""The bounds of outputs, in a property, at which the process is killed, takes memory without end, and waits."""


@dataclass(frozen=True)
class Hostile:
    """Interval bounds, one query after the other; some bounds of outputs do harm.

    Attributes:
        log: a file to which a line is written for each batch: the process, and the bounds of the batch's properties.
    """

    log: Path | None = None

    name = "hostile"

    def verify(
        self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT, roots: object = None
    ) -> list[Outcome]:
        bounds = [abs(float(query.property.unsafe[0][0].bound)) for query in queries]
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()} {' '.join(f'{bound:g}' for bound in bounds)}\n")
        outcomes = []
        for index, (query, bound) in enumerate(zip(queries, bounds, strict=True)):
            if bound == KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            if bound == WAIT:
                time.sleep(600)
            held = []
            while bound == FILL:
                held.append(bytes(b"x" * (16 << 20)))
            outcomes += Ibp().verify([query], Budget.each(9, 1))
            progress.stage("look", index + 1, len(queries))
            progress.finish(index, outcomes[-1])
        return outcomes
