"""Where the files of a data set come from: the user's folder, or their official home, checked and kept.

``VERIFIABLE_RELU_DATA`` names a folder with a folder for each data set, of the data set's name. Without it, or where it
lacks the data set, files are downloaded once into the user's cache folder and verified by checksum.
"""

from __future__ import annotations

import os
from pathlib import Path

from verifiable_relu.data.registry import DATASETS, Source
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.files import on_disk, read_bytes

VARIABLE = "VERIFIABLE_RELU_DATA"
LARGEST = 256 << 20
"""Bytes of a file of a data set, unpacked; the largest official one has 47 MB."""


def locate(name: str) -> Path:
    """The folder that holds the files of data set ``name``, downloading them if need be.

    Raises:
        InputError: if a file cannot be downloaded or its checksum is wrong.
        UnsupportedError: if it must be downloaded and the optional package pooch is missing.
    """
    source = DATASETS[name].source
    assert source is not None, f"the data set '{name}' has no files"
    named = os.environ.get(VARIABLE)
    if named and (Path(named) / name).is_dir():
        return Path(named) / name
    try:
        import pooch
    except ImportError:
        where = f"the folder {named} ({VARIABLE}) has no '{name}'" if named else f"{VARIABLE} names no folder"
        raise UnsupportedError(f"{where}, and downloading the data set '{name}' needs the package pooch") from None
    cache = Path(pooch.os_cache("verifiable_relu")) / name
    return download(source, cache)


def download(source: Source, folder: Path) -> Path:
    """Fetch what ``folder`` lacks of ``source``, verify it, and return the folder with the data.

    Raises:
        InputError: if a file cannot be downloaded or its checksum is wrong; it names the file.
    """
    import pooch

    for file, checksum in source.files.items():
        processor = pooch.Untar(extract_dir=".") if source.archive else None
        try:
            pooch.retrieve(source.url + file, checksum, fname=file, path=folder, processor=processor)
        except (OSError, ValueError) as error:
            raise InputError(
                f"could not be downloaded from {source.url} ({error}); {VARIABLE} can name a folder that has it",
                path=folder / file,
            ) from error
    return folder


def either(folder: Path, file: str) -> Path:
    """The path of ``file`` in ``folder``, with ``.gz`` added where only the compressed one exists."""
    return on_disk(folder / file)


def unpacked(path: Path) -> bytes:
    """What the file at ``path`` holds, unpacked if its name ends in ``.gz``.

    Raises:
        InputError: if it is missing, cannot be read, is damaged or larger than ``LARGEST``.
    """
    return read_bytes(path, LARGEST)
