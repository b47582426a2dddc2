"""The readers of files of data, which raise an InputError for bad ones; those of data sets take folder and split.

* ``idx``: MNIST's format: magic number, dimensions, bytes. Source: yann.lecun.com/exdb/mnist ("FILE FORMATS").
* ``cifar``: CIFAR-10's binary format, records of 1 label byte and 3,072 pixel bytes: the red, the green and the blue
  plane, each row by row. Source: www.cs.toronto.edu/~kriz/cifar.html ("Binary version").
* ``adult``: UCI Adult, whose question is whether a person earns over 50,000 dollars a year, with 32,561 rows for
  training and 16,281 for testing. Source: Becker and Kohavi, Adult, UCI Machine Learning Repository, 1996, whose file
  ``adult.names`` describes the columns.
* ``digits``: scikit-learn's 1,797 images of 8×8 pixels; the first 1,347 are for training.
* ``npz``: a user's own arrays, in a file of numpy.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import struct
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from verifiable_relu.data import Split
from verifiable_relu.errors import InputError, missing
from verifiable_relu.files import on_disk, read_bytes, read_text

_LARGEST = 256 << 20
"""The most bytes of a file and of an array, unpacked; the largest official file has 47 MB."""


@dataclass(frozen=True, eq=False)
class Samples:
    """One split as read from its files: as ``Dataset``, of any type of number.

    ``exact`` is None if all images are; ``moments`` are mean and standard deviation, if the reader computes them.
    """

    images: np.ndarray
    labels: np.ndarray
    exact: np.ndarray | None = None
    note: str = ""
    moments: tuple[tuple[float, ...], tuple[float, ...]] | None = None


def idx(folder: Path, split: Split) -> Samples:
    """Read a split from a file of images and a file of labels under MNIST's names."""
    prefix = "train" if split == "train" else "t10k"
    paths = [on_disk(folder / f"{prefix}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")]
    images, labels = (_idx_array(path, rank) for path, rank in zip(paths, (3, 1), strict=True))
    if len(images) != len(labels) or not len(labels):
        raise InputError(f"there are {len(labels)} labels for {len(images)} images", path=paths[1])
    return Samples(images[:, None] / np.float32(255), labels)


def _idx_array(path: Path, rank: int) -> np.ndarray:
    data = read_bytes(path, _LARGEST)
    if len(data) < 4 or data[:2] != b"\0\0":
        raise InputError("not an IDX file: it does not begin with two zero bytes", path=path, place="byte 0")
    if data[2] != 0x08:
        message = f"the element type is 0x{data[2]:02x} where 0x08 (unsigned byte) is expected"
        raise InputError(message, path=path, place="byte 2")
    if data[3] != rank:
        raise InputError(f"the file has {data[3]} dimension(s) where {rank} are expected", path=path, place="byte 3")
    start = 4 + 4 * rank
    if len(data) < start:
        raise InputError(f"the file ends within its header of {start} bytes", path=path, place=f"byte {len(data)}")
    shape = struct.unpack(f">{rank}I", data[4:start])
    expected = start + math.prod(shape)
    if len(data) != expected:
        raise InputError(f"the file has {len(data)} bytes, but its shape {shape} makes {expected}", path=path)
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


_RECORD = 1 + 3 * 32 * 32
_BATCH = 10_000


def cifar(folder: Path, split: Split) -> Samples:
    """Read a split; that of training from the batches that exist, at least one of five."""
    batches = folder / "cifar-10-batches-bin"
    files = {1: "test_batch.bin"}
    if split == "train":
        numbers = [n for n in range(1, 6) if on_disk(batches / f"data_batch_{n}.bin").is_file()]
        files = {n: f"data_batch_{n}.bin" for n in numbers or [1]}
    records = {number: _cifar_records(on_disk(batches / file)) for number, file in files.items()}
    official = [np.arange(len(part)) + (number - 1) * _BATCH for number, part in records.items()]
    data = np.concatenate(list(records.values()))
    exact = ~np.isin(np.concatenate(official), _listed(folder / f"{split}_lossy_indices.txt"))
    note = f"{len(files)} of 5 training batches, {len(data):,} images" if split == "train" and len(files) < 5 else ""
    return Samples(data[:, 1:].reshape(-1, 3, 32, 32) / np.float32(255), data[:, 0], exact, note)


def _cifar_records(path: Path) -> np.ndarray:
    data = np.frombuffer(read_bytes(path, _LARGEST), np.uint8)
    if not len(data) or len(data) % _RECORD:
        raise InputError(f"the file has {len(data)} bytes, no whole number of {_RECORD}-byte records", path=path)
    records = data.reshape(-1, _RECORD)
    index = int((records[:, 0] > 9).argmax())
    if records[index, 0] > 9:
        raise InputError(f"the label is {records[index, 0]}, outside of 0 to 9", path=path, place=f"record {index}")
    return records


def _listed(path: Path) -> list[int]:
    """Read the indices of images that differ from the official ones, one in each line with comments after ``#``."""
    listed = []
    for number, line in enumerate(read_text(path, _LARGEST).splitlines() if path.is_file() else (), 1):
        entry = line.split("#")[0].strip()
        if entry and not re.fullmatch("[0-9]{1,9}", entry):
            raise InputError(f"'{entry}' is not an index", path=path, place=f"line {number}")
        if entry:
            listed.append(int(entry))
    return listed


_NUMBERS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country"),
)


def adult(folder: Path, split: Split) -> Samples:
    """Read a split, with moments that standardise the inputs.

    Each category becomes one input (one-hot), and the mark "?" of a missing value counts as a category; the moments of
    such an input are mean 0 and deviation 1, which leave it as it is. Numbers are scaled linearly such that the least
    and the greatest value among the training rows become 0 and 1, and are clipped to [0, 1].
    """
    source = on_disk(folder / "adult.data")
    asked = source if split == "train" else on_disk(folder / "adult.test")
    training, labels = _adult_rows(source)
    wanted = training
    if split == "test":
        wanted, labels = _adult_rows(asked)
    parts: list[np.ndarray] = []
    means: list[float] = []
    deviations: list[float] = []
    for column, known, values in zip(_COLUMNS, training.T, wanted.T, strict=True):
        if column in _NUMBERS:
            seen = _adult_numbers(known, column, source)
            least, width = seen.min(), max(np.ptp(seen), 1.0)
            parts.append(((_adult_numbers(values, column, asked) - least) / width).clip(0, 1)[:, None])
            scaled = (seen - least) / width
            means.append(float(scaled.mean()))
            deviations.append(float(scaled.std()) or 1.0)
        else:
            categories = np.unique(known)
            parts.append(values[:, None] == categories)
            means += [0.0] * len(categories)
            deviations += [1.0] * len(categories)
    inputs = np.concatenate(parts, 1)[:, :, None, None]
    return Samples(inputs, labels, moments=(tuple(means), tuple(deviations)))


def _adult_rows(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the 14 entries of each row as text, and the labels (n,), which are 1 for over 50,000 dollars."""
    rows, labels = [], []
    for number, line in enumerate(read_text(path, _LARGEST).splitlines(), 1):
        if not line.strip() or line.startswith("|"):
            continue
        *row, label = (entry.strip() for entry in line.split(","))
        if len(row) != len(_COLUMNS):
            message = f"the row has {len(row) + 1} entries where {len(_COLUMNS) + 1} are expected"
            raise InputError(message, path=path, place=f"line {number}")
        if label.removesuffix(".") not in ("<=50K", ">50K"):
            raise InputError(f"'{label}' is neither <=50K nor >50K", path=path, place=f"line {number}")
        rows.append(row)
        labels.append(label.startswith(">"))
    if not rows:
        raise InputError("the file has no rows", path=path)
    return np.array(rows), np.array(labels)


def _adult_numbers(entries: np.ndarray, column: str, path: Path) -> np.ndarray:
    try:
        numbers = entries.astype(float)
    except ValueError as error:
        raise InputError(str(error), path=path, place=f"column {column}") from None
    if not np.isfinite(numbers).all():
        raise InputError("a number is NaN or infinite", path=path, place=f"column {column}")
    return numbers


def digits(folder: Path, split: Split) -> Samples:
    """Read a split of what scikit-learn brings; ``folder`` is not used."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise missing("the data set 'digits'", "scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    part = slice(None, 1_347) if split == "train" else slice(1_347, None)
    return Samples(images[part].reshape(-1, 1, 8, 8) / 16, labels[part])


# What zipfile and numpy raise for damaged files; NotImplementedError is a RuntimeError.
_DAMAGED = ArithmeticError, EOFError, LookupError, OSError, RuntimeError, SyntaxError, TypeError, ValueError, zlib.error


def npz(path: Path) -> list[Samples]:
    """Read the images (n, …) in [0, 1] and the labels (n,) ≥ 0 of each split in an ``.npz`` file, training first.

    The arrays ``images`` and ``labels`` are for training, and ``test_images`` and ``test_labels``, which need not be
    there, for the test. Pickled objects are never loaded.
    """
    data = read_bytes(path, _LARGEST)
    note = f"{path.name}, SHA-256 {hashlib.sha256(data).hexdigest()}"
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            prefixes = ["", "test_"] if "test_images.npy" in archive.namelist() else [""]
            return [replace(_arrays(archive, prefix), note=note) for prefix in prefixes]
    except InputError as error:
        raise error.located(path) from None
    except zipfile.BadZipFile as error:
        raise InputError(f"not an .npz file: {error}", path=path) from None
    except MemoryError:
        raise InputError("there is not enough memory for an array", path=path) from None
    except _DAMAGED as error:
        raise InputError(f"cannot be read: {error}", path=path) from None


def _arrays(archive: zipfile.ZipFile, prefix: str) -> Samples:
    first, second = f"{prefix}images", f"{prefix}labels"
    found = []
    for name in (first, second):
        if f"{name}.npy" not in archive.namelist():
            raise InputError(f"there is no array '{name}'; '{first}' and '{second}' are expected")
        if archive.getinfo(f"{name}.npy").file_size > _LARGEST:
            raise InputError(f"the array '{name}' is larger than {_LARGEST:,} bytes")
        with archive.open(f"{name}.npy") as member:
            array = np.lib.format.read_array(member, allow_pickle=False)
        # PyTorch takes numbers in this machine's order of bytes alone.
        found.append(array.astype(array.dtype.newbyteorder("="), copy=False))
    images, labels = found
    if images.ndim < 2 or labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        said = f"'{first}' is {images.dtype} of shape {images.shape} and '{second}' {labels.dtype} of shape "
        raise InputError(f"{said}{labels.shape}, where shape (n, …) and integers of shape (n,) are expected")
    if images.dtype.kind not in "fiub" or images.dtype.itemsize > 8:
        raise InputError(f"'{first}' is {images.dtype}, where real numbers of at most 64 bits are expected")
    if not images.size:
        raise InputError(f"'{first}' has shape {images.shape} and so no pixel")
    if len(outside := np.argwhere(~((images >= 0) & (images <= 1)))):
        said, place = f"a pixel is {images[tuple(outside[0])]}, outside of [0, 1]", f"image {outside[0][0]}"
        raise InputError(said, place=place)
    if len(below := np.flatnonzero(labels < 0)):
        raise InputError(f"the label {labels[below[0]]} is below 0", place=f"image {below[0]}")
    return Samples(images, labels.clip(0, 2**62))
