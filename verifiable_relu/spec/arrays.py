"""The reading of images and labels from an ``.npz`` file of the user."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import numpy as np

from verifiable_relu.errors import InputError
from verifiable_relu.files import read_bytes

# What zipfile and numpy raise for damaged files; NotImplementedError is a RuntimeError.
_DAMAGED = ArithmeticError, EOFError, LookupError, OSError, RuntimeError, SyntaxError, TypeError, ValueError, zlib.error

LARGEST = 256 << 20
"""The most bytes of the file, and of each array in it unpacked: 10,000 images of 3×32×32 float64 numbers fit."""


def array_names(path: Path | str) -> list[str]:
    """Return the names of the arrays in an ``.npz`` file; raises InputError."""
    try:
        with zipfile.ZipFile(io.BytesIO(read_bytes(path, LARGEST))) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except zipfile.BadZipFile as error:
        raise InputError(f"not an .npz file: {error}", path=path) from None


def read_images(path: Path | str, prefix: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Read images (n, …) in [0, 1] and labels (n,) ≥ 0 of an ``.npz`` file; pickled objects are never loaded.

    The arrays are called ``images`` and ``labels`` with a ``prefix`` such as ``test_``.

    Raises:
        InputError: if the file is missing, damaged or too large, or if an array is missing or of another form.
    """
    images, labels = _arrays(path, (f"{prefix}images", f"{prefix}labels"))
    outside = said = place = None
    if images.ndim < 2 or labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        said = (
            f"'{prefix}images' is {images.dtype} of shape {images.shape} and '{prefix}labels' {labels.dtype} of shape "
            f"{labels.shape}, where shape (n, …) and integers of shape (n,) are expected"
        )
    elif images.dtype.kind not in "fiub" or images.dtype.itemsize > 8:
        said = f"'{prefix}images' is {images.dtype}, where real numbers of at most 64 bits are expected"
    elif not images.size:
        said = f"'{prefix}images' has shape {images.shape} and so no pixel"
    elif len(outside := np.argwhere(~((images >= 0) & (images <= 1)))):
        said, place = f"a pixel is {images[tuple(outside[0])]}, outside of [0, 1]", f"image {outside[0][0]}"
    elif (labels < 0).any():
        index = int((labels < 0).argmax())
        said, place = f"the label {labels[index]} is below 0", f"image {index}"
    if said is not None:
        raise InputError(said, path=path, place=place)
    return images, labels.clip(0, 2**62).astype(np.int64)


def _arrays(path: Path | str, names: tuple[str, str]) -> list[np.ndarray]:
    found = []
    try:
        with zipfile.ZipFile(io.BytesIO(read_bytes(path, LARGEST))) as archive:
            for name in names:
                if f"{name}.npy" not in archive.namelist():
                    said = f"there is no array '{name}'; '{names[0]}' and '{names[1]}' are expected"
                    raise InputError(said, path=path)
                if archive.getinfo(f"{name}.npy").file_size > LARGEST:
                    raise InputError(f"the array '{name}' is larger than {LARGEST:,} bytes", path=path)
                with archive.open(f"{name}.npy") as member:
                    array = np.lib.format.read_array(member, allow_pickle=False)
                # PyTorch takes numbers in this machine's order of bytes alone.
                found.append(array.astype(array.dtype.newbyteorder("="), copy=False))
    except InputError:
        raise
    except zipfile.BadZipFile as error:
        raise InputError(f"not an .npz file: {error}", path=path) from None
    except MemoryError:
        raise InputError("an array takes more memory than there is", path=path) from None
    except _DAMAGED as error:
        raise InputError(f"cannot be read: {error}", path=path) from None
    return found
