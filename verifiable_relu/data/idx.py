"""The IDX format of MNIST: magic number, dimensions, bytes. Source: yann.lecun.com/exdb/mnist ("FILE FORMATS")."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from verifiable_relu.data.sources import unpacked
from verifiable_relu.errors import InputError

UNSIGNED_BYTE = 0x08
LARGEST_RANK = 4


def read_idx(path: Path) -> np.ndarray:
    """The array of unsigned bytes in an IDX file, gzipped if its name ends in ``.gz``.

    Raises:
        InputError: if the file is missing, damaged, cut short or too long, or holds another type.
    """
    data = unpacked(path)
    if len(data) < 4 or data[:2] != b"\0\0":
        raise InputError("not an IDX file: it does not begin with two zero bytes", path=path, place="byte 0")
    kind, rank = data[2], data[3]
    if kind != UNSIGNED_BYTE:
        raise InputError(f"element type 0x{kind:02x} where 0x08 (unsigned byte) is expected", path=path, place="byte 2")
    if not 1 <= rank <= LARGEST_RANK:
        raise InputError(f"{rank} dimensions where 1 to {LARGEST_RANK} are expected", path=path, place="byte 3")
    start = 4 + 4 * rank
    if len(data) < start:
        raise InputError(f"cut short in its header of {start} bytes", path=path, place=f"byte {len(data)}")
    shape = struct.unpack(f">{rank}I", data[4:start])
    expected = start + math.prod(shape)
    if len(data) != expected:
        raise InputError(f"{len(data)} bytes where its shape {shape} makes {expected}", path=path)
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
