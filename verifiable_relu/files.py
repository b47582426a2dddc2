"""The one way in which files of the user are read: regular files only, gzipped or not, up to a size."""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from verifiable_relu.errors import InputError

_CHUNK = 1 << 20


def on_disk(path: Path | str) -> Path:
    """``path``, or ``path.gz`` where only that exists."""
    path = Path(path)
    if path.name in ("", "..") or os.path.lexists(path):
        return path
    packed = path.with_name(path.name + ".gz")
    return packed if os.path.lexists(packed) else path


def read_bytes(path: Path | str, limit: int, check: Callable[[bytes], None] | None = None) -> bytes:
    """What a file holds, unpacked if its name ends in ``.gz``; ``name`` stands for ``name.gz`` where only that exists.

    At most one byte more than ``limit`` is ever unpacked, whatever the file says of its own size. Pipes, devices and
    folders are refused without waiting for them.

    Args:
        path: the file.
        limit: the most bytes that the file may hold once it is unpacked.
        check: is given the first bytes, at most 1 MiB of them, and raises an InputError if no file of the kind that
            is expected begins so. A large file of another kind is then refused before more of it is unpacked.

    Raises:
        InputError: if the file is missing, not a regular file, cannot be read, is damaged, holds more than ``limit``
            bytes, or is refused by ``check``; it names the file.
    """
    path = on_disk(path)
    try:
        # A pipe that nobody writes to would block when it is opened.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(descriptor, "rb", buffering=0) as raw:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"cannot be read: {_kind(status.st_mode)}, not a file")
            if path.suffix == ".gz":
                with gzip.open(raw, "rb") as unpacked:
                    return _all(unpacked, limit, check)
            if status.st_size > limit:
                raise _too_large(limit)
            return _all(raw, limit, check)
    except InputError as error:
        raise error.located(path) from None
    except FileNotFoundError:
        raise InputError("no such file", path=path) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"damaged gzip file: {error}", path=path) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", path=path) from None
    except ValueError as error:  # A null character in the name.
        raise InputError(f"not a file name: {error}", path=path) from None


def read_text(path: Path | str, limit: int) -> str:
    """The text of a file, UTF-8 with or without a byte order mark; otherwise as :func:`read_bytes`.

    Raises:
        InputError: as :func:`read_bytes` does, and for bytes that are no UTF-8.
    """
    path = on_disk(path)
    try:
        return read_bytes(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"not a text file: byte {error.start} is not UTF-8", path=path) from None


def _all(stream: BinaryIO | gzip.GzipFile | io.RawIOBase, limit: int, check: Callable[[bytes], None] | None) -> bytes:
    held = io.BytesIO()
    while part := stream.read(min(_CHUNK, limit + 1 - held.tell())):
        if check is not None and not held.tell():
            check(part)
        held.write(part)
        if held.tell() > limit:
            raise _too_large(limit)
    return held.getvalue()


def _too_large(limit: int) -> InputError:
    return InputError(f"larger than {limit:,} bytes, the most that is read (unpacked, if it is gzipped)")


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "it is a folder"
    return "it is a pipe" if stat.S_ISFIFO(mode) else "it is a device or a socket"
