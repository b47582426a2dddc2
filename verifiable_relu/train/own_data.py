"""A user's own arrays as the data of a training."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from verifiable_relu.data import Dataset, load
from verifiable_relu.errors import InputError
from verifiable_relu.files import read_bytes
from verifiable_relu.spec.arrays import LARGEST, array_names, read_images

_EVERY = 10
"""Where a file has no test images, one image in this number is one."""

_MOST_CLASSES = 100_000
"""The most classes of a file; the network has an output for each number up to the largest label."""


def training_and_test(source: str) -> tuple[Dataset, Dataset]:
    """The images to train on, and those to test on.

    Args:
        source: the name of a data set (``data.load``), or an ``.npz`` file with the arrays ``images`` (n, …), in
            [0, 1], and ``labels`` (n,), and for the test ``test_images`` and ``test_labels``. Without these, every
            tenth image is kept for the test. Images are (n, height, width) or (n, channels, height, width); arrays
            (n, features) are a table.

    Raises:
        InputError: if the data set or the file cannot be read, or if its arrays do not fit together.
    """
    if not source.endswith(".npz"):
        return load(source, "train"), load(source, "test")
    images, labels = read_images(source)
    if labels.max() >= _MOST_CLASSES:
        index = labels.argmax()
        said = f"the label is {labels[index]}, where classes from 0 to {_MOST_CLASSES - 1:,} are expected"
        raise InputError(said, path=source, place=f"image {index}")
    digest = hashlib.sha256(read_bytes(Path(source), LARGEST)).hexdigest()
    note = f"{Path(source).name}, SHA-256 {digest}"
    if "test_images" in array_names(source):
        tests = read_images(source, "test_")
    else:
        kept = np.arange(len(labels)) % _EVERY == _EVERY - 1
        if not kept.any():
            raise InputError(f"of {len(labels)} images none can be kept for the test", path=source)
        images, labels, tests = images[~kept], labels[~kept], (images[kept], labels[kept])
        note += f"; every {_EVERY}th image is a test image"
    if tests[0].shape[1:] != images.shape[1:]:
        raise InputError(f"images of shape {images.shape[1:]}, but test images of {tests[0].shape[1:]}", path=source)
    if tests[1].max() > labels.max():
        raise InputError(f"the test label {tests[1].max()} is beyond all labels", path=source)
    if labels.max() < 1:
        raise InputError("there is one class only", path=source)
    pixels = _shaped(images, source)
    axes = (0, *range(2, pixels.ndim))
    mean, std = pixels.mean(axes, dtype=np.float64), pixels.std(axes, dtype=np.float64)
    moments = tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())
    name = Path(source).stem
    return (
        Dataset(name, pixels, labels, *moments, np.ones(len(labels), bool), note),
        Dataset(name, _shaped(tests[0], source), tests[1], *moments, np.ones(len(tests[1]), bool), note),
    )


def _shaped(images: np.ndarray, source: str) -> np.ndarray:
    """Images as float32 (n, channels, height, width), tables as (n, features, 1, 1)."""
    if images.ndim > 4:
        raise InputError(f"images of shape {images.shape[1:]} have more than three axes", path=source)
    if images.ndim == 3:
        images = images[:, None]
    return images.reshape(*images.shape, *[1] * (4 - images.ndim)).astype(np.float32)
