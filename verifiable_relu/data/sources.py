"""The search for a data set's files: in the user's folder, or else in a cache that is filled from their official place.

The environment variable ``VERIFIABLE_RELU_DATA`` names a folder with a folder for each data set, of the data set's
name. Without the variable, or if the data set has no folder there, the files are downloaded once into the user's cache
folder and verified by checksum.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from types import ModuleType

from verifiable_relu.data.registry import DATASETS, Source
from verifiable_relu.errors import InputError, missing

VARIABLE = "VERIFIABLE_RELU_DATA"
LARGEST = 256 << 20
"""The most bytes of a data set's file, unpacked; the largest official one has 47 MB."""


def locate(name: str) -> Path:
    """The folder with the files of a data set, which are downloaded if need be.

    Raises:
        InputError: if a file cannot be downloaded or its checksum is wrong, or without pooch.
    """
    source = DATASETS[name].source
    assert source is not None, f"the data set '{name}' has no files"
    named = os.environ.get(VARIABLE)
    if named and (Path(named) / name).is_dir():
        return Path(named) / name
    return download(source, Path(_pooch().os_cache("verifiable_relu")) / name)


def _pooch() -> ModuleType:
    """Pooch, which is imported when it is needed: the user's folder mostly has the files."""
    try:
        return import_module("pooch")
    except ModuleNotFoundError:
        raise missing(f"a data set that no folder of {VARIABLE} has", "pooch") from None


def download(source: Source, folder: Path) -> Path:
    """Download the files of a source that a folder lacks, and verify all of them; returns the folder.

    Raises:
        InputError: if a file cannot be downloaded or its checksum is wrong, which the error names, or without pooch.
    """
    pooch = _pooch()
    for file, checksum in source.files.items():
        processor = pooch.Untar(extract_dir=".") if source.archive else None
        try:
            pooch.retrieve(source.url + file, checksum, fname=file, path=folder, processor=processor)
        except (OSError, ValueError) as error:
            raise InputError(
                f"the file cannot be downloaded from {source.url} ({error}); {VARIABLE} can name a folder that has it",
                path=folder / file,
            ) from error
    return folder
