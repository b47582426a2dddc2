"""The loading of a data set's split as arrays.

The normalisation is kept as numbers rather than applied, so that it can become part of a network.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import cast

import numpy as np

from verifiable_relu.data.registry import DATASETS
from verifiable_relu.data.samples import Reader, Split
from verifiable_relu.data.sources import locate
from verifiable_relu.errors import InputError


@dataclass(frozen=True, eq=False)
class Dataset:
    """One split of a data set.

    Attributes:
        name: the name given to ``load``.
        images: float32 (n, channels, height, width) in [0, 1]; (n, features, 1, 1) for a table.
        labels: int64 (n,).
        mean: the mean of each channel of the training images; 0 for a channel that needs no normalisation.
        std: the standard deviation of each channel of the training images; 1 for a channel that needs none.
        exact: bool (n,), False for images whose pixels are known to differ from the official ones. Experiments on
            single images should leave these out.
        note: a remark, such as that some of the images are missing; mostly empty.
    """

    name: str
    images: np.ndarray
    labels: np.ndarray
    mean: tuple[float, ...]
    std: tuple[float, ...]
    exact: np.ndarray
    note: str = ""

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.labels.max()) + 1

    def __len__(self) -> int:
        return len(self.labels)


def load(name: str, split: Split) -> Dataset:
    """Read one split of a data set, in the official order of its samples.

    Args:
        name: a name in ``data.registry.DATASETS``.
        split: ``train`` or ``test``.

    Raises:
        InputError: if the name or the split is unknown, or if a file is missing or damaged, which the error names.
        UnsupportedError: for ``digits`` without scikit-learn.
    """
    if name not in DATASETS:
        raise InputError(f"no data set '{name}'; there are {', '.join(DATASETS)}")
    if split not in ("train", "test"):
        raise InputError(f"no split '{split}'; there are train and test")
    entry = DATASETS[name]
    read = cast(Reader, import_module(f"verifiable_relu.data.{entry.module}").read)
    samples = read(None if entry.source is None else locate(name), split)
    mean, std = samples.moments or (entry.mean, entry.std)
    exact = np.ones(len(samples.labels), bool) if samples.exact is None else samples.exact
    images, labels = samples.images.astype(np.float32), samples.labels.astype(np.int64)
    return Dataset(name, images, labels, mean, std, exact, samples.note)
