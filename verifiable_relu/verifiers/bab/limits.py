"""The limits of a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a search may use.

    Attributes:
        memory: bytes of open nodes.
        left: tells how many seconds are left.
        processes: how many processes share the work.
    """

    memory: int
    left: Callable[[], float]
    processes: int = 1

    def over(self) -> bool:
        """Whether no time is left."""
        return self.left() <= 0
