"""A folder's file of records, a line of JSON for each, which only grows and which one process at a time may write."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Generic, NoReturn, TypeVar

from verifiable_relu.errors import InputError

LONGEST = 1 << 26
"""Bytes in a line. The record of a counterexample with a million inputs has about 40 million."""

_SHOWN = 200
"""Characters of an error's message that are passed on."""

T = TypeVar("T")


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What the records of a file are.

    Attributes:
        start: how the line of every record begins. A line that ends with the file and begins so was being written when
            its writer was killed.
        encode: a record as what JSON has; NaN and infinities are not part of it.
        decode: the inverse, which raises a ValueError for what is no record.
    """

    start: bytes
    encode: Callable[[T], dict[str, Any]]
    decode: Callable[[Any], T]

    def line(self, record: T) -> bytes:
        """The line of a record.

        Raises:
            ValueError: for NaN or an infinity in it.
        """
        return json.dumps(self.encode(record), allow_nan=False).encode() + b"\n"

    def record(self, line: bytes) -> T:
        """The record that a line holds.

        Raises:
            ValueError: if it is no record.
        """
        if not line.startswith(self.start):
            raise ValueError(f"it does not begin with {self.start.decode()}")
        try:
            found = json.loads(line.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        return self.decode(found)


@dataclass(frozen=True)
class Line(Generic[T]):
    """A line of a file, or a piece of one that is longer than ``LONGEST`` bytes.

    Attributes:
        number: the line's, from 1.
        data: its bytes, with the end of the line where there is one.
        record: the record that it holds; None if it is no record.
        error: why it is none.
        torn: whether it is none because its writer was killed: it ends with the file, and begins as records do.
    """

    number: int
    data: bytes
    record: T | None
    error: str = ""
    torn: bool = False

    @property
    def ended(self) -> bool:
        """Whether the end of the line is part of it."""
        return self.data.endswith(b"\n")


def read_lines(file: BinaryIO, kind: Kind[T]) -> Iterator[Line[T]]:
    """The lines of a file, from its present position."""
    number, inside = 0, False
    while data := file.readline(LONGEST):
        number += not inside
        whole = not inside and (data.endswith(b"\n") or len(data) < LONGEST)
        inside = not data.endswith(b"\n")
        if not whole:
            yield Line(number, data, None, f"it is longer than {LONGEST} bytes")
            continue
        try:
            yield Line(number, data, kind.record(data))
        except ValueError as error:
            torn = inside and data.startswith(kind.start)
            yield Line(number, data, None, str(error)[:_SHOWN], torn)


NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
"""The flags with which a file is made that must not exist."""

_NAME = "records.jsonl"


class Journal(Generic[T]):
    """The file ``records.jsonl`` of a folder: a record a line, in the order of their coming.

    A record is one write to a file opened for appending: whoever is killed loses none that was made, and at most leaves
    the beginning of another, which the next journal cuts off. No other file is ever changed, and nothing of a file that
    has anything else in it than records.

    While a journal is open, the operating system holds a lock on ``.lock`` in the folder, and no other process can open
    one there; the lock ends with the process, however that ends. A journal is a context manager, which closes it.

    Args:
        folder: made if it does not exist.
        kind: of the records.
        repair: move lines that are no records to a new file, ``records.jsonl.bad-1`` or the next free number, instead
            of refusing the folder for them.
        remedy: what the message says, after its reason, when a line that is no record is refused.

    Attributes:
        path: of the file.
        loaded: the records that the file held when it was opened.
        set_aside: how many lines were moved, and to which file; None if all were records.

    Raises:
        InputError: if the folder cannot be made, written or locked, if another process has it locked, or if the file is
            no file of such records.
    """

    def __init__(self, folder: Path | str, kind: Kind[T], repair: bool = False, remedy: str = "") -> None:
        self.folder = Path(folder)
        self.path = self.folder / _NAME
        self.set_aside: tuple[int, Path] | None = None
        self.loaded: list[T] = []
        self._kind = kind
        self._file: BinaryIO | None = None
        # Imported here, because a tenth of a second is much for an answer that is not kept.
        from filelock import FileLock, Timeout

        # Where the operating system has no locks, a mere file would take their place, and outlive its process.
        self._lock = FileLock(self.folder / ".lock", timeout=0, thread_local=False, fallback_to_soft=False)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            # What a process that was killed was about to put in its place.
            beside(self.path).unlink(missing_ok=True)
            self._file = self._opened()
            self._load(repair, remedy)
        except BaseException as error:
            self.close()
            if isinstance(error, Timeout):
                raise InputError("another campaign is running in this folder", path=self.folder) from None
            if isinstance(error, OSError):
                raise unusable(self.folder, error) from None
            raise

    def __enter__(self) -> Journal[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let others have the folder; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lock.release()

    def append(self, record: T) -> None:
        """Keep a record.

        Raises:
            InputError: if it cannot be written; then nothing of it is.
        """
        assert self._file is not None, "the journal is closed"
        line = self._kind.line(record)
        size = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            self._file.truncate(size)
            raise unusable(self.folder, error) from None

    def _opened(self) -> BinaryIO:
        """The file of records, opened for reading and appending.

        Raises:
            InputError: if it is no plain file.
            OSError: if it cannot be opened.
        """
        plain(self.path)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        return open(os.open(self.path, flags, 0o666), "rb+", buffering=0)

    def _load(self, repair: bool, remedy: str) -> None:
        """Read the records; then alone, mend the file.

        Raises:
            InputError: if a line is no record, and that is not to be repaired.
        """
        assert self._file is not None
        bad: dict[int, int] = {}
        end, last = 0, None
        with open(os.dup(self._file.fileno()), "rb") as file:
            for index, last in enumerate(read_lines(file, self._kind)):
                if last.record is not None:
                    self.loaded.append(last.record)
                elif repair:
                    bad[index] = last.number
                elif not last.torn:
                    raise _refused(self.path, last, remedy)
                end += len(last.data)
        if bad:
            self.set_aside = len(set(bad.values())), self._move(bad.keys())
        elif last is not None and last.record is None:
            self._file.truncate(end - len(last.data))
        elif last is not None and not last.ended:
            self._file.write(b"\n")

    def _move(self, bad: Container[int]) -> Path:
        """Move the lines with these indices to a new file, and say to which; whenever it is killed, no line is lost."""
        assert self._file is not None
        descriptor, aside = self._free()
        new = beside(self.path)
        with (
            open(descriptor, "wb") as moved,
            open(os.open(new, NEW, 0o666), "wb") as kept,
            open(os.dup(self._file.fileno()), "rb") as file,
        ):
            file.seek(0)
            for index, line in enumerate(read_lines(file, self._kind)):
                (moved if index in bad else kept).write(line.data)
                if index not in bad and not line.ended:
                    kept.write(b"\n")
            for written in (moved, kept):
                written.flush()
                os.fsync(written.fileno())
        os.replace(new, self.path)
        self._file.close()
        self._file = self._opened()
        return aside

    def _free(self) -> tuple[int, Path]:
        """A new file for lines that are no records: its descriptor and path."""
        for number in count(1):
            path = self.path.with_name(f"{self.path.name}.bad-{number}")
            try:
                return os.open(path, NEW, 0o666), path
            except FileExistsError:
                continue
        raise AssertionError


def read_journal(folder: Path | str, kind: Kind[T]) -> list[T]:
    """The records in a folder, without a lock and without a change to anything; a torn last line is passed over.

    Raises:
        InputError: if there is no such file, it cannot be read, or a line is no record.
    """
    path = Path(folder) / _NAME
    found = []
    try:
        if not plain(path):
            raise InputError("no such file", path=path)
        with path.open("rb") as file:
            for line in read_lines(file, kind):
                if line.record is not None:
                    found.append(line.record)
                elif not line.torn:
                    raise _refused(path, line)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", path=path) from None
    return found


def beside(path: Path) -> Path:
    """Where what is to replace a file is written."""
    return path.with_name(f".{path.name}.new")


def plain(path: Path) -> bool:
    """Whether there is a file of this name.

    Raises:
        InputError: if there is something else, such as a folder, a symbolic link or a pipe.
        OSError: if that cannot be found out.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "no plain file"
        raise InputError(f"{kind}, where a plain file is to be kept", path=path)
    return True


def unusable(folder: Path, error: OSError) -> InputError:
    """The error for a folder that cannot be written."""
    return InputError(f"cannot keep results here: {error.strerror or error}", path=folder)


def _refused(path: Path, line: Line[T], remedy: str = "") -> InputError:
    return InputError(f"not a record: {line.error}{remedy}", path=path, place=f"line {line.number}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a key twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
