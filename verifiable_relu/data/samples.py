"""The samples that the readers of data sets return."""

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
    """One split of a data set, as read from its files.

    Attributes:
        images: numbers (n, channels, height, width) in [0, 1]; (n, features, 1, 1) for a table.
        labels: integers (n,).
        exact: as ``Dataset.exact``; None means that all images are exact.
        note: as ``Dataset.note``.
        moments: the moments of the training images if the reader computes them; None if ``registry.DATASETS`` has them.
    """

    images: np.ndarray
    labels: np.ndarray
    exact: np.ndarray | None = None
    note: str = ""
    moments: Moments | None = None


Reader = Callable[[Path | None, Split], Samples]
"""A function from the folder with the files (None for data that a library brings) and the split to the samples."""
