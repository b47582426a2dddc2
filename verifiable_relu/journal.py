"""A folder's file of records: one line of JSON for each record, appended by one process at a time."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Generic, NoReturn, TypeVar

from verifiable_relu.errors import InputError

LONGEST = 1 << 26
"""The most bytes of a line. The record of a counterexample with a million inputs has about 40 million bytes."""

_SHOWN = 200
"""The most characters of an error's message that ``Line.error`` keeps."""

T = TypeVar("T")


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of record, and how it is written as JSON.

    Attributes:
        start: the bytes with which the line of every record begins. A last line that begins with them, or is a
            beginning of them, and has no end of line was being written when its writer was killed.
        encode: turns a record into a JSON object, without NaN and infinities.
        decode: the inverse of ``encode``; raises a ValueError for a value that is no record.
    """

    start: bytes
    encode: Callable[[T], dict[str, Any]]
    decode: Callable[[Any], T]

    def line(self, record: T) -> bytes:
        """The line of a record, with its end of line.

        Raises:
            ValueError: if the record has NaN or an infinity in it.
        """
        return json.dumps(self.encode(record), allow_nan=False).encode() + b"\n"

    def record(self, line: bytes) -> T:
        """The record that a line holds.

        Raises:
            ValueError: if the line is no record; the message says why.
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
        number: the number of the line in its file, from 1.
        data: the bytes, with the end of line where there is one.
        record: the record that the line holds; None if the line is no record.
        error: why the line is no record.
        torn: whether the line is the beginning of a record whose writer was killed: it is the file's last, has no end
            of line, and begins as records do.
    """

    number: int
    data: bytes
    record: T | None
    error: str = ""
    torn: bool = False

    @property
    def ended(self) -> bool:
        """Whether ``data`` ends with an end of line."""
        return self.data.endswith(b"\n")


def read_lines(file: BinaryIO, kind: Kind[T]) -> Iterator[Line[T]]:
    """The lines of a file from its present position on; a line beyond ``LONGEST`` bytes comes in several pieces."""
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
            torn = inside and (data.startswith(kind.start) or kind.start.startswith(data))
            yield Line(number, data, None, str(error)[:_SHOWN], torn)


NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
"""The flags with which ``os.open`` creates a file for writing, and fails where the file exists."""

_NAME = "records.jsonl"


class Journal(Generic[T]):
    """The file ``records.jsonl`` of a folder: one record per line, in the order in which the records were appended.

    A record is appended in one write. A process that is killed loses no record that it appended before; it leaves at
    most the beginning of another, which the next journal in the folder cuts off. A file with lines that are no records
    is refused unchanged, unless ``repair`` is set.

    While a journal is open, the operating system holds a lock on ``.lock`` in the folder, and no other process can open
    a journal there; the lock ends with the process, however the process ends. A journal is a context manager that
    closes itself.

    Args:
        folder: the folder, which is made if it does not exist.
        kind: the kind of the records.
        repair: whether lines that are no records are moved to a new file, ``records.jsonl.bad-1`` or the next free
            number. Without it, such lines are an error.
        remedy: a text that the error for such a line ends with.
        seen: is told of every record that the file holds, with its place there in bytes (``at``); no record is kept.

    Attributes:
        path: the path of ``records.jsonl``.
        set_aside: the number of lines that were moved and the file that they were moved to; None if none were.

    Raises:
        InputError: if the folder cannot be made, written or locked, if another process holds its lock, or if the file
            has lines that are no records and ``repair`` is not set.
    """

    def __init__(
        self, folder: Path | str, kind: Kind[T], seen: Callable[[int, T], None], repair: bool = False, remedy: str = ""
    ) -> None:
        self.folder = Path(folder)
        self.path = self.folder / _NAME
        self.set_aside: tuple[int, Path] | None = None
        self._kind = kind
        self._seen = seen
        self._file: BinaryIO | None = None
        # Imported here, because the import takes 0.1 s, which commands that keep no records need not wait.
        from filelock import FileLock, Timeout

        # Where the operating system has no locks, filelock would fall back to the mere existence of a file, which
        # outlives its process.
        self._lock = FileLock(self.folder / ".lock", timeout=0, thread_local=False, fallback_to_soft=False)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            # A repair that was killed can have left a half-written file.
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
        """Close the file and release the folder's lock; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lock.release()

    def append(self, record: T) -> int:
        """Write a record to the end of the file; returns its place there (``at``).

        Raises:
            InputError: if the record cannot be written; the file is then as it was before.
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
        return size

    def at(self, place: int) -> T:
        """The record that begins at a byte of the file.

        Raises:
            InputError: if the file cannot be read, or has been changed by another program.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(place)
                return self._kind.record(file.readline(LONGEST))
        except OSError as error:
            raise unusable(self.folder, error) from None
        except ValueError as error:
            raise InputError(f"not a record any more: {error}", path=self.path, place=f"byte {place}") from None

    def replace(self, records: Iterable[T]) -> None:
        """Replace all records of the file at once: a kill at any moment leaves the old ones or the new ones.

        Raises:
            InputError: if the records cannot be written; the file is then as it was before.
        """
        assert self._file is not None, "the journal is closed"
        new = beside(self.path)
        try:
            new.unlink(missing_ok=True)
            with open(os.open(new, NEW, 0o666), "wb") as file:
                file.writelines(map(self._kind.line, records))
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.path)
            self._file.close()
            self._file = self._opened()
        except OSError as error:
            raise unusable(self.folder, error) from None

    def _opened(self) -> BinaryIO:
        """The file of records, opened for reading and appending.

        Raises:
            InputError: if the path leads to something other than a regular file.
            OSError: if the file cannot be opened.
        """
        plain(self.path)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        return open(os.open(self.path, flags, 0o666), "rb+", buffering=0)

    def _load(self, repair: bool, remedy: str) -> None:
        """Read all records first, and mend the file only after that: its last line, or with ``repair`` any line.

        Raises:
            InputError: if a line is no record and ``repair`` is not set.
        """
        assert self._file is not None
        bad: dict[int, int] = {}
        end, last = 0, None
        with open(os.dup(self._file.fileno()), "rb") as file:
            for index, last in enumerate(read_lines(file, self._kind)):
                if last.record is not None:
                    if not bad:
                        self._seen(end, last.record)
                elif repair:
                    bad[index] = last.number
                elif not last.torn:
                    raise _refused(self.path, last, remedy)
                end += len(last.data)
        if bad:
            self.set_aside = len(set(bad.values())), self._move(bad.keys())
            self._look(min(bad))
        elif last is not None and last.record is None:
            self._file.truncate(end - len(last.data))
        elif last is not None and not last.ended:
            self._file.write(b"\n")

    def _look(self, first: int) -> None:
        """Tell ``seen`` of the records from a line's index on: they lie elsewhere since bad lines were moved."""
        assert self._file is not None
        end = 0
        with open(os.dup(self._file.fileno()), "rb") as file:
            file.seek(0)
            for index, line in enumerate(read_lines(file, self._kind)):
                if index >= first and line.record is not None:
                    self._seen(end, line.record)
                end += len(line.data)

    def _move(self, bad: Container[int]) -> Path:
        """Move the lines with the indices ``bad`` to a new file; returns its path.

        The journal's file is replaced only when both new files are on disk: a kill at any moment loses no line.
        """
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
        """Create the file that lines which are no records are moved to; returns its descriptor and path."""
        for number in count(1):
            path = self.path.with_name(f"{self.path.name}.bad-{number}")
            try:
                return os.open(path, NEW, 0o666), path
            except FileExistsError:
                continue
        raise AssertionError


def read_journal(folder: Path | str, kind: Kind[T]) -> list[T]:
    """The records in a folder's ``records.jsonl``, read without taking the lock and without changing the file.

    The beginning of a record in the last line, whose writer was killed or is still writing, is left out.

    Raises:
        InputError: if the file is missing or cannot be read, or if a line is no record.
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
    """The path, in the same folder, at which the replacement of a file is written before it takes the file's place."""
    return path.with_name(f".{path.name}.new")


def plain(path: Path) -> bool:
    """Whether a path leads to a regular file; False if there is nothing at the path.

    Raises:
        InputError: if there is something else at the path, such as a folder, a symbolic link or a pipe.
        OSError: if the operating system does not say.
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
    """The error to raise for a folder that cannot be written."""
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
