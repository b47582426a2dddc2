"""One split of a data set as arrays, with its normalisation kept as numbers so that it can become part of a network."""

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
        name: as given to ``load``.
        images: float32 (n, channels, height, width) in [0, 1]; (n, features, 1, 1) for a table.
        labels: int64 (n,).
        mean, std: one number per channel, of the training images in [0, 1]; 0 and 1 for what needs no scaling.
        exact: bool (n,); False where the pixels are known to differ from the official ones, so that an
            experiment about single images should leave them out.
        note: what is unusual about it (a part of the images only), in one sentence, or empty.
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
        """Number of classes."""
        return int(self.labels.max()) + 1

    def __len__(self) -> int:
        return len(self.labels)


def load(name: str, split: Split) -> Dataset:
    """Read one split of a data set in its official order.

    Args:
        name: a row of ``data.registry.DATASETS``.
        split: ``train`` or ``test``.

    Raises:
        InputError: if a file is missing or damaged, or the name or split is unknown; it names the file.
        UnsupportedError: for ``digits`` without scikit-learn, or where a download needs the package pooch.
    """
    if name not in DATASETS:
        raise InputError(f"no data set '{name}'; there are {', '.join(DATASETS)}")
    if split not in ("train", "test"):
        raise InputError(f"no split '{split}'; there are train and test")
    row = DATASETS[name]
    read = cast(Reader, import_module(f"verifiable_relu.data.{row.module}").read)
    samples = read(None if row.source is None else locate(name), split)
    mean, std = samples.moments or (row.mean, row.std)
    exact = np.ones(len(samples.labels), bool) if samples.exact is None else samples.exact
    images, labels = samples.images.astype(np.float32), samples.labels.astype(np.int64)
    return Dataset(name, images, labels, mean, std, exact, samples.note)
