"""The reading of images and labels from an ``.npz`` file of the user."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from verifiable_relu.errors import InputError
from verifiable_relu.files import read_bytes

# What zipfile and numpy raise for damaged files; NotImplementedError is a RuntimeError.
_DAMAGED = ArithmeticError, EOFError, LookupError, OSError, RuntimeError, SyntaxError, TypeError, ValueError, zlib.error

LARGEST = 256 << 20
"""The most bytes of the file, and of each array in it unpacked: 10,000 images of 3×32×32 float64 numbers fit."""


@contextmanager
def _opened(path: Path | str) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(io.BytesIO(read_bytes(path, LARGEST))) as archive:
            yield archive
    except InputError as error:
        raise error.located(path) from None
    except zipfile.BadZipFile as error:
        raise InputError(f"not an .npz file: {error}", path=path) from None
    except MemoryError:
        raise InputError("an array takes more memory than there is", path=path) from None
    except _DAMAGED as error:
        raise InputError(f"cannot be read: {error}", path=path) from None


def array_names(path: Path | str) -> list[str]:
    """Return the names of the arrays in an ``.npz`` file; raises InputError."""
    with _opened(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def read_images(path: Path | str, prefix: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Read images (n, …) in [0, 1] and labels (n,) ≥ 0 of an ``.npz`` file; pickled objects are never loaded.

    The arrays are called ``images`` and ``labels`` with a ``prefix`` such as ``test_``.

    Raises:
        InputError: if the file is missing, damaged or too large, or if an array is missing or of another form.
    """
    first, second = f"{prefix}images", f"{prefix}labels"
    found = []
    with _opened(path) as archive:
        for name in (first, second):
            if f"{name}.npy" not in archive.namelist():
                raise InputError(f"there is no array '{name}'; '{first}' and '{second}' are expected")
            if archive.getinfo(f"{name}.npy").file_size > LARGEST:
                raise InputError(f"the array '{name}' is larger than {LARGEST:,} bytes")
            with archive.open(f"{name}.npy") as member:
                array = np.lib.format.read_array(member, allow_pickle=False)
            # PyTorch takes numbers in this machine's order of bytes alone.
            found.append(array.astype(array.dtype.newbyteorder("="), copy=False))
    images, labels = found
    said = place = None
    if images.ndim < 2 or labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        said = f"'{first}' is {images.dtype} of shape {images.shape} and '{second}' {labels.dtype} of shape "
        said += f"{labels.shape}, where shape (n, …) and integers of shape (n,) are expected"
    elif images.dtype.kind not in "fiub" or images.dtype.itemsize > 8:
        said = f"'{first}' is {images.dtype}, where real numbers of at most 64 bits are expected"
    elif not images.size:
        said = f"'{first}' has shape {images.shape} and so no pixel"
    elif len(outside := np.argwhere(~((images >= 0) & (images <= 1)))):
        said, place = f"a pixel is {images[tuple(outside[0])]}, outside of [0, 1]", f"image {outside[0][0]}"
    elif len(below := np.flatnonzero(labels < 0)):
        said, place = f"the label {labels[below[0]]} is below 0", f"image {below[0]}"
    if said is not None:
        raise InputError(said, path=path, place=place)
    return images, labels.clip(0, 2**62).astype(np.int64)
