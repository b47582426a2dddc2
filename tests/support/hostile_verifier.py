"""A verifier that does to its process what the name of a property says: it ends it, or fills its memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verifiable_relu.search.batch import QueryBatch
from verifiable_relu.search.outcomes import Outcome
from verifiable_relu.search.registry import make

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

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        bounds = [abs(float(query.property.unsafe[0][0].bound)) for query in batch.queries.values()]
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()} {' '.join(f'{bound:g}' for bound in bounds)}\n")
        for done, (number, bound) in enumerate(zip(batch.queries, bounds, strict=True), start=1):
            if bound == KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            if bound == WAIT:
                time.sleep(600)
            held = []
            while bound == FILL:
                held.append(bytes(b"x" * (16 << 20)))
            batch.stage("look", done, len(batch.queries))
            yield from make("ibp").claims(batch.part([number]))
