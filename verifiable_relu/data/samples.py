"""What the reader of a format hands over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

Split = Literal["train", "test"]

Moments = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation per channel."""


@dataclass(frozen=True, eq=False)
class Samples:
    """One split as its files have it.

    Attributes:
        images: numbers (n, channels, height, width) in [0, 1]; (n, features, 1, 1) for a table.
        labels: integers (n,).
        exact: as ``Dataset.exact``; None: all are.
        note: as ``Dataset.note``.
        moments: where these follow from the files; None: they are those of the data set's row.
    """

    images: np.ndarray
    labels: np.ndarray
    exact: np.ndarray | None = None
    note: str = ""
    moments: Moments | None = None


Reader = Callable[[Path | None, Split], Samples]
"""Of the folder with the files (None for data that a library brings) and the split."""
