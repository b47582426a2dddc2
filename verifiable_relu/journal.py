"""A folder's file of records: one line of JSON for each record, appended by one process at a time."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from verifiable_relu.errors import InputError
from verifiable_relu.files import CREATE, replacement, write_whole

LONGEST = 1 << 26  # Most bytes of a line; a counterexample with a million inputs has about 40 million
_SHOWN = 200  # The most characters of an error's message that JournalLine.error keeps

_NAME = "records.jsonl"

T = TypeVar("T")


@dataclass(frozen=True)
class RecordFormat(Generic[T]):
    """A format of records, which are JSON objects without NaN and infinities.

    Every line begins with the bytes ``start``: a last line that begins with them, or is a beginning of them, and has no
    end of line was being written when its writer was killed. ``decode`` raises a ValueError for what is no record.
    """

    start: bytes
    encode: Callable[[T], dict[str, Any]]
    decode: Callable[[Any], T]

    def line(self, record: T) -> bytes:
        """Return the line of a record, with its end of line; raises a ValueError for NaN or an infinity."""
        return json.dumps(self.encode(record), allow_nan=False).encode() + b"\n"

    def record(self, line: bytes) -> T:
        """Return the record that a line holds; raises a ValueError, which says why, if it is none."""
        if not line.startswith(self.start):
            raise ValueError(f"it does not begin with {self.start.decode()}")
        try:
            found = json.loads(line.decode(), object_pairs_hook=_unique, parse_constant=_unique)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        return self.decode(found)


@dataclass(frozen=True)
class JournalLine(Generic[T]):
    """Line of a file, from 1, or a piece of a very long one, that holds a record, or not for the reason ``error``.

    It is ``torn`` if it is the beginning of a record whose writer was killed: the file's last line, without an end.
    """

    number: int
    data: bytes
    record: T | None
    error: str = ""
    torn: bool = False


def journal_lines(path: Path, kind: RecordFormat[T]) -> Iterator[JournalLine[T]]:
    """Yield the lines of a file; one beyond ``LONGEST`` bytes comes in several pieces, which count as lines."""
    with path.open("rb") as file:
        lines = iter(partial(file.readline, LONGEST), b"")
        for number, data in enumerate(lines, 1):
            ended = data.endswith(b"\n")
            try:
                if not ended and len(data) == LONGEST:
                    raise ValueError(f"it is longer than {LONGEST} bytes")
                yield JournalLine(number, data, kind.record(data))
            except ValueError as error:
                torn = not ended and (data.startswith(kind.start) or kind.start.startswith(data))
                yield JournalLine(number, data, None, str(error)[:_SHOWN], torn and len(data) < LONGEST)


class Journal(Generic[T]):
    """The file ``records.jsonl`` of a folder: one record per line, in the order in which the records were appended.

    A record is appended in one write. A process that is killed loses no record that it appended before; it leaves at
    most the beginning of another, which the next journal in the folder cuts off. A file with lines that are no records
    is refused unchanged, with an error that ends with ``remedy``. With ``repair`` these are moved to a new file,
    ``records.jsonl.bad-1`` or the next free number: ``set_aside`` has how many, and the file.

    While a journal is open, the operating system holds a lock on ``.lock`` in the folder, and no other process can open
    a journal there. ``seen`` is told of every record that the file holds, with its place there in bytes (``at``). A
    folder that cannot be used, or that another process has locked, is an InputError.
    """

    def __init__(
        self,
        folder: Path | str,
        kind: RecordFormat[T],
        seen: Callable[[int, T], None],
        repair: bool = False,
        remedy: str = "",
    ) -> None:
        # Imported here, because the import takes 0.1 s, which commands that keep no records need not wait.
        from filelock import FileLock, Timeout

        self.folder = Path(folder)
        self.path = self.folder / _NAME
        self.set_aside: tuple[int, Path] | None = None
        self._kind = kind
        self._file: BinaryIO | None = None
        # Where the operating system has no locks, filelock would fall back to the mere existence of a file, which
        # outlives its process.
        self._lock = FileLock(self.folder / ".lock", timeout=0, thread_local=False, fallback_to_soft=False)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            # A repair that was killed can have left a half-written file.
            replacement(self.path).unlink(missing_ok=True)
            if is_plain_file(self.path) and repair:
                self._move_bad_lines()
            self._load(seen, remedy)
        except BaseException as error:
            self.close()
            if isinstance(error, Timeout):
                raise InputError("another campaign runs in this folder: choose another", path=self.folder) from None
            if isinstance(error, OSError):
                raise unusable(self.folder, error) from None
            raise

    def close(self) -> None:
        """Close the file and release the folder's lock; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lock.release()

    def append(self, record: T) -> int:
        """Write a record to the end of the file, or raise an InputError and leave it as it is; returns its place."""
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

    def at(self, *places: int) -> Iterator[T]:
        """Yield the records that begin at bytes of the file; raises an InputError if another program has changed it."""
        place = None
        try:
            with self.path.open("rb") as file:
                for place in places:
                    file.seek(place)
                    yield self._kind.record(file.readline(LONGEST))
        except OSError as error:
            raise unusable(self.folder, error) from None
        except ValueError as error:
            raise InputError(f"not a record any more: {error}", path=self.path, place=f"byte {place}") from None

    def _load(self, seen: Callable[[int, T], None], remedy: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        self._file = open(os.open(self.path, flags, 0o666), "rb+", buffering=0)  # noqa: SIM115 -- open as long as this
        end, whole = 0, True
        for record, data in _records(self.path, self._kind, remedy):
            seen(end, record)
            end, whole = end + len(data), data.endswith(b"\n")
        self._file.truncate(end)
        if not whole:
            self._file.write(b"\n")

    def _move_bad_lines(self) -> None:
        """Move the lines that are no records to a new file; a kill at any moment loses no line."""
        bad = {line.number for line in journal_lines(self.path, self._kind) if line.record is None}
        if not bad:
            return
        names = (self.path.with_name(f"{self.path.name}.bad-{number}") for number in count(1))
        aside = next(path for path in names if not os.path.lexists(path))

        def kept() -> Iterator[bytes]:
            for line in journal_lines(self.path, self._kind):
                if line.record is None:
                    moved.write(line.data)
                else:
                    yield line.data if line.data.endswith(b"\n") else line.data + b"\n"
            moved.flush()
            os.fsync(moved.fileno())

        with open(os.open(aside, CREATE, 0o666), "wb") as moved:
            write_whole(self.path, kept())
        self.set_aside = len(bad), aside


def read_journal(folder: Path | str, kind: RecordFormat[T]) -> list[T]:
    """Return the records in a folder's ``records.jsonl``, read without the lock; an InputError if a line is no record.

    A last record whose writer was killed or is still writing is left out.
    """
    path = Path(folder) / _NAME
    try:
        if not is_plain_file(path):
            raise InputError("no such file", path=path)
        return [record for record, _ in _records(path, kind)]
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", path=path) from None


def is_plain_file(path: Path) -> bool:
    """Return True if a path leads to a regular file, False if to nothing; an InputError if to something else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "no plain file"
        raise InputError(f"{kind}, where a plain file is to be kept", path=path)
    return True


def unusable(folder: Path, error: OSError) -> InputError:
    """Return the error to raise for a folder that cannot be written."""
    return InputError(f"cannot keep results here: {error.strerror or error}", path=folder)


def _records(path: Path, kind: RecordFormat[T], remedy: str = "") -> Iterator[tuple[T, bytes]]:
    """Yield the records of a file with their lines; an InputError, which ends with ``remedy``, for another line."""
    for line in journal_lines(path, kind):
        if line.record is not None:
            yield line.record, line.data
        elif not line.torn:
            raise InputError(f"not a record: {line.error}{remedy}", path=path, place=f"line {line.number}")


def _unique(found: list[tuple[str, Any]] | str) -> dict[str, Any]:
    """Return an object of JSON; a ValueError for a key that it has twice, and for NaN and infinities, given by name."""
    if isinstance(found, str):
        raise ValueError(f"{found} is no JSON")
    if len(dict(found)) < len(found):
        raise ValueError("it has a key twice")
    return dict(found)
