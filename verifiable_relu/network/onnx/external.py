"""Tensors whose numbers lie in a file beside the ONNX file, as exporters write them by default.

Such a file may be named by a plain relative path that stays in the ONNX file's folder, symbolic links followed: a
network from elsewhere must not have other files of the machine read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath

from onnx import TensorProto

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.files import read_bytes


def load_external(tensors: Iterable[tuple[str, TensorProto]], folder: Path | None, limit: int) -> bool:
    """Put the numbers that lie in other files into the tensors themselves.

    Args:
        tensors: with how messages name them.
        folder: of the ONNX file; None if it has none.
        limit: most bytes of all these files together, and of all tensors.

    Returns:
        Whether there were any.

    Raises:
        InputError: if a file is missing, too large, not in the folder, or shorter than a tensor says.
        UnsupportedError: if there is no folder.
    """
    held: dict[str, bytes] = {}
    total = 0
    for place, tensor in tensors:
        if tensor.data_location != TensorProto.EXTERNAL:
            if tensor.external_data:
                raise InputError("names a file for its data, which it holds itself", place=place)
            continue
        if folder is None:
            raise UnsupportedError("its data lies in another file, and where is not known", place=place)
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if location not in held:
            rest = limit - sum(len(part) for part in held.values())
            try:
                held[location] = read_bytes(_beside(folder, location), rest)
            except InputError as error:
                raise InputError(f"its data: {error}", place=place) from None
        part = _part(held[location], entries, place)
        total += len(part)
        if total > limit:
            raise InputError(f"tensors of more than {limit:,} bytes together", place=place)
        tensor.raw_data = part
        del tensor.external_data[:]
        tensor.data_location = TensorProto.DEFAULT
    return bool(held)


def _beside(folder: Path, location: str) -> Path:
    """The path of a file in a folder.

    Raises:
        InputError: if the name leads elsewhere.
    """
    named = PurePosixPath(location)
    if not location or "\0" in location or named.is_absolute() or PureWindowsPath(location).anchor:
        raise InputError(f"'{location}' is no name of a file beside the network's")
    if ".." in named.parts or "\\" in location or location.endswith(".gz"):
        raise InputError(f"'{location}' is no name of a file beside the network's")
    found = folder / named
    if not found.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"'{location}' leads out of the network's folder")
    return found


def _part(data: bytes, entries: dict[str, str], place: str) -> bytes:
    """The bytes of one tensor in a file.

    Raises:
        InputError: if they are not there.
    """
    numbers = [entries.get("offset", "0"), entries.get("length", "")]
    if not all(number.isascii() and (number.isdigit() or not number) and len(number) < 20 for number in numbers):
        raise InputError(f"its data lies at {numbers[0]!r} with a length of {numbers[1]!r}", place=place)
    start = int(numbers[0] or 0)
    end = start + int(numbers[1]) if numbers[1] else len(data)
    if not start <= end <= len(data):
        raise InputError(f"bytes {start} to {end} of a file of {len(data)} bytes", place=place)
    return data[start:end]
