"""Where data sets come from: the user's folder, or their official homes, checked and kept.

``VERIFIABLE_RELU_DATA`` names a folder that holds ``mnist/``, ``fashion_mnist/``, ``cifar10/`` or
``adult/``; without it (or
where it lacks the data set) files are downloaded once into the user's cache folder and verified by checksum.
"""

from __future__ import annotations

import gzip
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from verifiable_relu.errors import InputError, UnsupportedError

VARIABLE = "VERIFIABLE_RELU_DATA"


@dataclass(frozen=True)
class Source:
    """A data set's home.

    Attributes:
        url: the folder that the files are downloaded from, with a trailing slash.
        files: name → checksum, as ``md5:…`` or ``sha256:…``.
        archive: whether the one file is a tar archive whose members are the data.
    """

    url: str
    files: dict[str, str]
    archive: bool = False


# MNIST's own home (yann.lecun.com/exdb/mnist) refuses automatic downloads; PyTorch's mirror serves the same bytes,
# and torchvision checks the same MD5 sums.
SOURCES = {
    "mnist": Source(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion_mnist": Source(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        {
            "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "cifar10": Source(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530"},
        archive=True,
    ),
    "adult": Source(
        "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/",
        {
            "adult.data": "md5:5d7c39d7b8804f071cdd1f2a7c460872",
            "adult.test": "md5:35238206dfdf7f1fe215bbb874adecdc",
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
    packed = folder / f"{file}.gz"
    return packed if packed.is_file() and not (folder / file).is_file() else folder / file


def unpacked(path: Path) -> bytes:
    """What the file at ``path`` holds, unpacked if its name ends in ``.gz``.

    Raises:
        InputError: if it is missing, cannot be read or is damaged.
    """
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except FileNotFoundError:
        raise InputError("no such file", path=path) from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot be read: {error}", path=path) from error
