"""The limits of a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verifiable_relu.verifiers.base import Told, untold

ALONE = 3e9
"""A work of some tenths of a second; to make copies of a process takes some hundredths."""


@dataclass(frozen=True)
class Limits:
    """What a search may use.

    Attributes:
        memory: bytes of open nodes.
        left: tells how many seconds are left.
        processes: how many processes share the work.
        alone: the work (``loop.Progress``) that one process does alone before others share the rest.
        done: how much has been done already.
        tell: as ``base.Limits.tell``.
    """

    memory: int
    left: Callable[[], float]
    processes: int = 1
    alone: float = ALONE
    done: float = 0.0
    tell: Callable[[Told], None] = untold

    def over(self) -> bool:
        """Whether no time is left."""
        return self.left() <= 0
