"""Where data sets come from: the user's folder, or their official homes, checked and kept.

``VERIFIABLE_RELU_DATA`` names a folder that holds ``mnist/``, ``fashion_mnist/``, ``cifar10/`` or
``adult/``; without it (or
where it lacks the data set) files are downloaded once into the user's cache folder and verified by checksum.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.files import on_disk, read_bytes

VARIABLE = "VERIFIABLE_RELU_DATA"
LARGEST = 256 << 20
"""Bytes of a file of a data set, unpacked; the largest official one has 47 MB."""


@dataclass(frozen=True)
class Source:
    """A data set's home.

    Attributes:
        url: the folder that the files are downloaded from, with a trailing slash.
        files: name → checksum, as ``sha256:…``.
        archive: whether the one file is a tar archive whose members are the data.
    """

    url: str
    files: dict[str, str]
    archive: bool = False


# MNIST's own home (yann.lecun.com/exdb/mnist) refuses automatic downloads; PyTorch's mirror serves the same bytes.
# Fashion-MNIST comes from its authors' repository.
SOURCES = {
    "mnist": Source(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images-idx3-ubyte.gz": "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "fashion_mnist": Source(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        {
            "train-images-idx3-ubyte.gz": "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
    "cifar10": Source(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-10-binary.tar.gz": "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
        archive=True,
    ),
    "adult": Source(
        "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/",
        {
            "adult.data": "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
            "adult.test": "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
        },
    ),
}


def locate(name: str) -> Path:
    """The folder that holds the files of data set ``name``, downloading them if need be.

    Raises:
        InputError: if a file cannot be downloaded or its checksum is wrong.
        UnsupportedError: if it must be downloaded and the optional package pooch is missing.
    """
    named = os.environ.get(VARIABLE)
    if named and (Path(named) / name).is_dir():
        return Path(named) / name
    try:
        import pooch
    except ImportError:
        where = f"the folder {named} ({VARIABLE}) has no '{name}'" if named else f"{VARIABLE} names no folder"
        raise UnsupportedError(f"{where}, and downloading the data set '{name}' needs the package pooch") from None
    cache = Path(pooch.os_cache("verifiable_relu")) / name
    return download(SOURCES[name], cache)


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
