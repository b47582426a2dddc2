"""Data sets as arrays, with their normalisation kept as numbers so that it can become part of the network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from verifiable_relu.data import adult, cifar
from verifiable_relu.data.idx import read_idx
from verifiable_relu.data.sources import either, locate
from verifiable_relu.errors import InputError, UnsupportedError

Split = Literal["train", "test"]

# Mean and standard deviation per channel over the training images in [0, 1].
MOMENTS = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "digits": ((0.3053,), (0.3760,)),
}
NAMES = (*MOMENTS, "adult")
DIGITS_TRAIN = 1_347


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
    """Read one split of ``mnist``, ``fashion_mnist``, ``cifar10``, ``adult`` or ``digits`` in its official order.

    ``digits`` (scikit-learn's 1,797 8×8 images, needs that package) is split into the first 1,347 and the rest.

    Raises:
        InputError: if a file is missing or damaged, or the name or split is unknown; it names the file.
        UnsupportedError: for ``digits`` without scikit-learn, or where a download needs the package pooch.
    """
    if name not in NAMES:
        raise InputError(f"no data set '{name}'; there are {', '.join(NAMES)}")
    if split not in ("train", "test"):
        raise InputError(f"no split '{split}'; there are train and test")
    if name == "digits":
        return _digits(split)
    folder = locate(name)
    if name == "adult":
        inputs, labels, mean, std = adult.read(folder, split)
        return Dataset(name, inputs[:, :, None, None], labels.astype(np.int64), mean, std, np.ones(len(labels), bool))
    return _cifar(folder, split) if name == "cifar10" else _mnist(name, folder, split)


def _dataset(name: str, images: np.ndarray, labels: np.ndarray, exact: np.ndarray | None, note: str = "") -> Dataset:
    mean, std = MOMENTS[name]
    exact = np.ones(len(labels), bool) if exact is None else exact
    return Dataset(name, images.astype(np.float32), labels.astype(np.int64), mean, std, exact, note)


def _mnist(name: str, folder: Path, split: Split) -> Dataset:
    prefix = "train" if split == "train" else "t10k"
    paths = [either(folder, f"{prefix}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")]
    images, labels = (read_idx(path) for path in paths)
    for path, array, rank in zip(paths, (images, labels), (3, 1), strict=True):
        if array.ndim != rank:
            raise InputError(f"shape {array.shape} where {rank} dimension(s) are expected", path=path)
    if len(images) != len(labels) or not len(labels):
        raise InputError(f"{len(labels)} labels for {len(images)} images", path=paths[1])
    return _dataset(name, images[:, None] / np.float32(255), labels, None)


def _cifar(folder: Path, split: Split) -> Dataset:
    batches = folder / "cifar-10-batches-bin"
    numbers = cifar.training_batches(batches) if split == "train" else []
    names = [f"data_batch_{number}.bin" for number in numbers or (1,)] if split == "train" else ["test_batch.bin"]
    parts = [cifar.read_batch(either(batches, file)) for file in names]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    indices = [
        np.arange(len(part[1])) + (number - 1) * cifar.BATCH for number, part in zip(numbers or [1], parts, strict=True)
    ]
    exact = cifar.read_exact(folder / f"{split}_lossy_indices.txt", np.concatenate(indices))
    note = f"{len(numbers)} of 5 training batches, {len(labels):,} images" if 0 < len(numbers) < 5 else ""
    return _dataset("cifar10", images / np.float32(255), labels, exact, note)


def _digits(split: Split) -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UnsupportedError("the data set 'digits' needs the package scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    part = slice(None, DIGITS_TRAIN) if split == "train" else slice(DIGITS_TRAIN, None)
    return _dataset("digits", images[part].reshape(-1, 1, 8, 8) / 16, labels[part], None)
