"""The reader of MNIST's IDX format: magic number, dimensions, bytes.

Source: yann.lecun.com/exdb/mnist ("FILE FORMATS").
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from verifiable_relu.data.samples import Samples, Split
from verifiable_relu.data.sources import LARGEST
from verifiable_relu.errors import InputError
from verifiable_relu.files import on_disk, read_bytes

UNSIGNED_BYTE = 0x08
LARGEST_RANK = 4


def read(folder: Path | None, split: Split) -> Samples:
    """The samples of a split, from a file of images and a file of labels under MNIST's names.

    Raises:
        InputError: if a file is missing or damaged, or if the two files do not fit together.
    """
    assert folder is not None
    prefix = "train" if split == "train" else "t10k"
    paths = [on_disk(folder / f"{prefix}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")]
    images, labels = (read_idx(path) for path in paths)
    for path, array, rank in zip(paths, (images, labels), (3, 1), strict=True):
        if array.ndim != rank:
            raise InputError(f"the shape is {array.shape} where {rank} dimension(s) are expected", path=path)
    if len(images) != len(labels) or not len(labels):
        raise InputError(f"there are {len(labels)} labels for {len(images)} images", path=paths[1])
    return Samples(images[:, None] / np.float32(255), labels)


def read_idx(path: Path) -> np.ndarray:
    """The array of unsigned bytes in an IDX file, gzipped if its name ends in ``.gz``.

    Raises:
        InputError: if the file is missing, damaged, too short or too long, or has another element type.
    """
    data = read_bytes(path, LARGEST)
    if len(data) < 4 or data[:2] != b"\0\0":
        raise InputError("not an IDX file: it does not begin with two zero bytes", path=path, place="byte 0")
    kind, rank = data[2], data[3]
    if kind != UNSIGNED_BYTE:
        message = f"the element type is 0x{kind:02x} where 0x08 (unsigned byte) is expected"
        raise InputError(message, path=path, place="byte 2")
    if not 1 <= rank <= LARGEST_RANK:
        raise InputError(
            f"the file has {rank} dimensions where 1 to {LARGEST_RANK} are expected", path=path, place="byte 3"
        )
    start = 4 + 4 * rank
    if len(data) < start:
        raise InputError(f"the file ends within its header of {start} bytes", path=path, place=f"byte {len(data)}")
    shape = struct.unpack(f">{rank}I", data[4:start])
    expected = start + math.prod(shape)
    if len(data) != expected:
        raise InputError(f"the file has {len(data)} bytes, but its shape {shape} makes {expected}", path=path)
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
