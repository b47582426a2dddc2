"""The user's files, for the whole package: regular files alone are read, gzipped or not, up to a limit of size."""

from __future__ import annotations

import contextlib
import csv
import errno
import gzip
import io
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from verifiable_relu.errors import InputError

_CHUNK = 1 << 20

CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
"""The flags with which ``os.open`` creates a file for writing, and fails where the file exists."""

_CONTROL = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
"""Control characters but tab and line ends, separators of lines, and the byte order mark.

Parsers differ in what such a character does: it may end the text or a line, part two words, or belong to one.
"""


def on_disk(path: Path | str) -> Path:
    """Return ``path``, or ``path.gz`` where that file exists and ``path`` does not."""
    path = Path(path)
    if path.name in ("", "..") or os.path.lexists(path):
        return path
    packed = path.with_name(path.name + ".gz")
    return packed if os.path.lexists(packed) else path


def read_bytes(path: Path | str, limit: int, check: Callable[[bytes], None] | None = None) -> bytes:
    """Return the content of a file, unpacked if its name ends in ``.gz``; of ``path.gz`` where ``path`` is not there.

    At most one byte more than ``limit`` is ever unpacked, whatever size the gzip trailer states. ``check`` is given the
    first bytes, at most 1 MiB, and raises an InputError if a file of the expected kind cannot begin with them.

    Raises:
        InputError: if the file is no regular file, unreadable, damaged or too large, or ``check`` refuses it. Pipes,
            devices and folders are refused without waiting for them.
    """
    with _opened(path) as (stream, size):
        held = io.BytesIO()
        while size <= limit and (part := stream.read(min(_CHUNK, limit + 1 - held.tell()))):
            if check is not None and not held.tell():
                check(part)
            size = max(size, held.tell() + held.write(part))
        if size > limit:
            raise InputError(f"larger than {limit:,} bytes, the most that is read (unpacked, if the file is gzipped)")
        return held.getvalue()


@contextlib.contextmanager
def _opened(path: Path | str) -> Iterator[tuple[gzip.GzipFile | io.RawIOBase, int]]:
    """Open a regular file for reading, unpacked if need be; with its size, or 0 where it has to be unpacked."""
    path = on_disk(path)
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(descriptor, "rb", buffering=0) as raw:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                pipe = "it is a pipe" if stat.S_ISFIFO(status.st_mode) else "it is a device or a socket"
                kind = "it is a folder" if stat.S_ISDIR(status.st_mode) else pipe
                raise InputError(f"cannot be read: {kind}, not a regular file")
            if path.suffix == ".gz":
                with gzip.open(raw, "rb") as unpacked:
                    yield unpacked, 0
            else:
                yield raw, status.st_size
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
    """Return the UTF-8 text of a file, without its byte order mark; an InputError for others and control characters."""
    path = on_disk(path)
    try:
        text = read_bytes(path, limit).decode("utf-8-sig")
        require_plain(text)
    except UnicodeDecodeError as error:
        raise InputError(f"not a text file: byte {error.start} is not UTF-8", path=path) from None
    except InputError as error:
        raise error.located(path) from None
    return text


def require_plain(text: str) -> None:
    """Raise an InputError, with its line, for a character that parsers may differ about (``_CONTROL``)."""
    if match := _CONTROL.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise InputError(f"the control character U+{ord(match[0]):04X} is not read", place=f"line {line}")


def csv_cell(text: str) -> str:
    """Return a text for a table in CSV: one that a spreadsheet would take for a formula has an apostrophe before it."""
    try:
        float(text)
    except ValueError:
        return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
    return text


def csv_line(cells: Iterable[str], end: str = "") -> str:
    """Return a row of a table in CSV, with the ``end`` of its line."""
    text = io.StringIO()
    csv.writer(text, lineterminator=end).writerow(cells)
    return text.getvalue()


def require_writable(path: Path) -> None:
    """Raise an InputError, before work that takes long, if a file, which need not exist, cannot be written."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        # Neither the permissions of a folder nor os.access tell what its file system takes.
        with tempfile.TemporaryFile(dir=path.parent), contextlib.suppress(FileNotFoundError):
            os.lstat(path)
    except FileNotFoundError:
        raise InputError("no such folder", path=path.parent) from None
    except (OSError, ValueError) as error:
        # A null character in the name is a ValueError.
        raise InputError(f"cannot be written: {getattr(error, 'strerror', error)}", path=path) from None


def write_whole(path: Path, data: bytes | Iterable[bytes], lasting: bool = True) -> None:
    """Write a file: a kill at any moment, or a crash if ``lasting``, leaves the old one or the new one, complete."""
    new = replacement(path)
    parts = (data,) if isinstance(data, bytes) else data
    new.unlink(missing_ok=True)
    try:
        with open(os.open(new, CREATE, 0o666), "wb") as file:
            file.writelines(parts)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def replacement(path: Path) -> Path:
    """Return the path, in the same folder, at which a file is written before it takes another file's place."""
    return path.with_name(f".{path.name}.new")
