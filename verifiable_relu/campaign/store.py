"""Where results live: a file of records that only grows, and a table made from it."""

from __future__ import annotations

import csv
import os
import stat
from collections.abc import Container, Iterable
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from verifiable_relu.campaign import records
from verifiable_relu.campaign.result import Key, Result
from verifiable_relu.errors import InputError

COLUMNS = ("onnx", "vnnlib", "answer", "seconds", "method", "reason", "trust", "margin")
"""Of ``results.csv``."""

_HEAD = b"onnx,vnnlib,"
"""How every ``results.csv`` of this package begins."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class Store:
    """A folder with ``records.jsonl`` (a record a line, in the order of their coming) and ``results.csv``.

    A record is one write to a file opened for appending: whoever is killed loses none that was made, and at most leaves
    the beginning of another, which the next store cuts off. No other file is ever changed, and nothing of a file that
    has anything else in it than records.

    While a store is open, the operating system holds a lock on ``.lock`` in the folder, and no other process can open
    one there; the lock ends with the process, however that ends. A store is a context manager, which closes it.

    Args:
        folder: made if it does not exist.
        repair: move lines that are no records to a new file, ``records.jsonl.bad-1`` or the next free number, instead
            of refusing the folder for them.

    Attributes:
        set_aside: how many lines were moved, and to which file; None if all were records.

    Raises:
        InputError: if the folder cannot be made, written or locked, if another campaign has it locked, or if it holds
            something under these names that is not of this package.
    """

    def __init__(self, folder: Path | str, repair: bool = False) -> None:
        self.folder = Path(folder)
        self.records = self.folder / "records.jsonl"
        self.table = self.folder / "results.csv"
        self.set_aside: tuple[int, Path] | None = None
        self._known: dict[Key, Result] = {}
        self._file: BinaryIO | None = None
        # Imported here, because a tenth of a second is much for an answer that is not kept.
        from filelock import FileLock, Timeout

        # Where the operating system has no locks, a mere file would take their place, and outlive its process.
        self._lock = FileLock(self.folder / ".lock", timeout=0, thread_local=False, fallback_to_soft=False)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            self._check_table()
            # What a process that was killed was about to put in their place.
            for path in (self.table, self.records):
                _beside(path).unlink(missing_ok=True)
            self._file = self._opened()
            self._load(repair)
        except BaseException as error:
            self.close()
            if isinstance(error, Timeout):
                raise InputError("another campaign is running in this folder", path=self.folder) from None
            if isinstance(error, OSError):
                raise self._unusable(error) from None
            raise

    def __len__(self) -> int:
        """Number of different final records."""
        return len(self._known)

    def __enter__(self) -> Store:
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

    def find(self, key: Key) -> Result | None:
        """The final record of the same run, if there is one."""
        return self._known.get(key)

    def append(self, result: Result) -> None:
        """Keep a record.

        Raises:
            InputError: if it cannot be written; then nothing of it is.
        """
        assert self._file is not None, "the store is closed"
        line = records.write(result)
        size = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            self._file.truncate(size)
            raise self._unusable(error) from None
        self._remember(result)

    def tabulate(self, results: Iterable[Result]) -> None:
        """Write ``results.csv`` anew; a reader sees the old one or the new one, whole.

        Raises:
            InputError: if it cannot be written.
        """
        new = _beside(self.table)
        try:
            try:
                # File names need not be text.
                with open(
                    os.open(new, _NEW, 0o666), "w", newline="", encoding="utf-8", errors="surrogateescape"
                ) as file:
                    writer = csv.writer(file)
                    writer.writerow(COLUMNS)
                    writer.writerows(map(_row, results))
                os.replace(new, self.table)
            finally:
                new.unlink(missing_ok=True)
        except OSError as error:
            raise self._unusable(error) from None

    def _check_table(self) -> None:
        """Refuse to replace a table that is somebody else's.

        Raises:
            InputError: if it is.
        """
        if _plain(self.table):
            with self.table.open("rb") as file:
                if file.read(len(_HEAD)) not in (_HEAD, b""):
                    raise InputError("not a table of this program, which would write its own there", path=self.table)

    def _opened(self) -> BinaryIO:
        """The file of records, opened for reading and appending.

        Raises:
            InputError: if it is no plain file.
            OSError: if it cannot be opened.
        """
        _plain(self.records)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        return open(os.open(self.records, flags, 0o666), "rb+", buffering=0)

    def _load(self, repair: bool) -> None:
        """Read the records; then alone, mend the file.

        Raises:
            InputError: if a line is no record, and that is not to be repaired.
        """
        assert self._file is not None
        bad: dict[int, int] = {}
        end, last = 0, None
        with open(os.dup(self._file.fileno()), "rb") as file:
            for index, last in enumerate(records.read(file)):
                if last.result is not None:
                    self._remember(last.result)
                elif repair:
                    bad[index] = last.number
                elif not last.torn:
                    wrong = f"not a record: {last.error}; the option --repair moves such lines to another file"
                    raise InputError(wrong, path=self.records, place=f"line {last.number}")
                end += len(last.data)
        if bad:
            self.set_aside = len(set(bad.values())), self._move(bad.keys())
        elif last is not None and last.result is None:
            self._file.truncate(end - len(last.data))
        elif last is not None and not last.ended:
            self._file.write(b"\n")

    def _move(self, bad: Container[int]) -> Path:
        """Move the lines with these indices to a new file, and say to which; whenever it is killed, no line is lost."""
        assert self._file is not None
        descriptor, aside = self._free()
        new = _beside(self.records)
        with (
            open(descriptor, "wb") as moved,
            open(os.open(new, _NEW, 0o666), "wb") as kept,
            open(os.dup(self._file.fileno()), "rb") as file,
        ):
            file.seek(0)
            for index, line in enumerate(records.read(file)):
                (moved if index in bad else kept).write(line.data)
                if index not in bad and not line.ended:
                    kept.write(b"\n")
            for written in (moved, kept):
                written.flush()
                os.fsync(written.fileno())
        os.replace(new, self.records)
        self._file.close()
        self._file = self._opened()
        return aside

    def _free(self) -> tuple[int, Path]:
        """A new file for lines that are no records: its descriptor and path."""
        for number in count(1):
            path = self.records.with_name(f"{self.records.name}.bad-{number}")
            try:
                return os.open(path, _NEW, 0o666), path
            except FileExistsError:
                continue
        raise AssertionError

    def _remember(self, result: Result) -> None:
        if result.final:
            self._known[result.key] = result

    def _unusable(self, error: OSError) -> InputError:
        return InputError(f"cannot keep results here: {error.strerror or error}", path=self.folder)


def _beside(path: Path) -> Path:
    """Where what is to replace a file is written."""
    return path.with_name(f".{path.name}.new")


def _plain(path: Path) -> bool:
    """Whether there is a file of this name.

    Raises:
        InputError: if there is something else, such as a folder, a symbolic link or a pipe.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "no plain file"
        raise InputError(f"{kind}, where a plain file is to be kept", path=path)
    return True


def _row(result: Result) -> tuple[str, ...]:
    """A result in the columns of the table."""
    margin = "" if result.margin is None else repr(result.margin)
    trust = "" if result.trust is None else str(result.trust)
    seconds = f"{result.seconds:.6f}"
    return result.onnx, result.vnnlib, result.answer, seconds, result.method, str(result.reason), trust, margin
