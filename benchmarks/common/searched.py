"""What a verifier says of its search in words."""

from __future__ import annotations

import re

_COUNT = re.compile(r"([0-9]+) sub-problems")


def sub_problems(detail: str) -> int | None:
    """How many sub-problems were bounded, by the sentence of an outcome, all its boxes together; None if it is silent.

    Branch and bound ends with ``24 sub-problems``, or ``the budget ran out after 24 sub-problems``.
    """
    counts = [int(count) for count in _COUNT.findall(detail)]
    return sum(counts) if counts else None
