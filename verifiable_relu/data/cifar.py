"""The reader of CIFAR-10's binary format: records of 1 label byte and 3,072 pixel bytes.

The pixels of a record are the red, the green and the blue plane, each row by row.

Source: www.cs.toronto.edu/~kriz/cifar.html ("Binary version").
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from verifiable_relu.data.samples import Samples, Split
from verifiable_relu.data.sources import LARGEST
from verifiable_relu.errors import InputError
from verifiable_relu.files import on_disk, read_bytes, read_text

PIXELS = 3 * 32 * 32
RECORD = 1 + PIXELS
BATCH = 10_000


def read(folder: Path | None, split: Split) -> Samples:
    """The samples of a split; those of the training split come from the batches that exist, at least one of five.

    Raises:
        InputError: if a file is missing or damaged.
    """
    assert folder is not None
    batches = folder / "cifar-10-batches-bin"
    numbers = training_batches(batches) if split == "train" else []
    names = [f"data_batch_{number}.bin" for number in numbers or (1,)] if split == "train" else ["test_batch.bin"]
    parts = [read_batch(on_disk(batches / file)) for file in names]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    indices = [
        np.arange(len(part[1])) + (number - 1) * BATCH for number, part in zip(numbers or [1], parts, strict=True)
    ]
    exact = read_exact(folder / f"{split}_lossy_indices.txt", np.concatenate(indices))
    note = f"{len(numbers)} of 5 training batches, {len(labels):,} images" if 0 < len(numbers) < 5 else ""
    return Samples(images / np.float32(255), labels, exact, note)


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 3, 32, 32) and labels (n,) of one batch file, as unsigned bytes.

    Raises:
        InputError: if the file is missing, is no whole number of records, or has a label above 9.
    """
    data = np.frombuffer(read_bytes(path, LARGEST), np.uint8)
    if not len(data) or len(data) % RECORD:
        raise InputError(f"the file has {len(data)} bytes, no whole number of {RECORD}-byte records", path=path)
    records = data.reshape(-1, RECORD)
    labels = records[:, 0]
    if (labels > 9).any():
        index = int((labels > 9).argmax())
        raise InputError(f"the label is {labels[index]}, outside of 0 to 9", path=path, place=f"record {index}")
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def training_batches(folder: Path) -> list[int]:
    """The numbers, from 1 to 5, of the training batches in a folder."""
    return [number for number in range(1, 6) if on_disk(folder / f"data_batch_{number}.bin").is_file()]


def read_exact(path: Path, indices: np.ndarray) -> np.ndarray:
    """Whether each image equals the official one, by a list of the images that do not.

    Args:
        path: the list, with one official index per line and comments after ``#``; without the file, all images equal
            the official ones.
        indices: the official index of each image.

    Returns:
        A bool for each image.

    Raises:
        InputError: if a line of the list is no index.
    """
    if not path.is_file():
        return np.ones(len(indices), bool)
    listed = []
    for number, line in enumerate(read_text(path, LARGEST).splitlines(), 1):
        entry = line.split("#")[0].strip()
        if entry and not re.fullmatch("[0-9]{1,9}", entry):
            raise InputError(f"'{entry}' is no index", path=path, place=f"line {number}")
        if entry:
            listed.append(int(entry))
    return ~np.isin(indices, listed)
