"""How many cases the tests draw."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

SHARE = float(os.environ.get("VERIFIABLE_RELU_CASES") or 1 / 4)
"""So many times the number of cases that are wanted: all with ``dev.py check --all``, else a quarter."""


def draws(every: int) -> int:
    """The number of cases to draw where ``every`` are wanted."""
    return math.ceil(every * SHARE)


def some(cases: Iterable[T], first: int = 0) -> Iterator[T]:
    """The cases to ask about of those that there are: all, or every seventh, from one of the first seven on.

    Seven has no factor in common with the 2 to 6 or 10 variants that cases have in turn, so that each variant is asked.
    """
    return iter(cases) if SHARE >= 1 else islice(cases, first % 7, None, 7)
