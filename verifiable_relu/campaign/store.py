"""The folder of a campaign's results: the file of its records, and a table of the last run."""

from __future__ import annotations

import csv
import io
import math
import os
import tempfile
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import TracebackType

from verifiable_relu.campaign.result import Key, Result
from verifiable_relu.errors import InputError, printable
from verifiable_relu.files import csv_cell
from verifiable_relu.journal import NEW, Journal, Kind, beside, plain, read_journal, unusable
from verifiable_relu.spec.specfile import stem
from verifiable_relu.verifiers.base import Verdict

COLUMNS = (
    "onnx", "vnnlib", "answer", "trust", "seconds", "limit", "method", "reason", "margin", "unstable",
    "counterexample", "detail",
)  # fmt: skip
"""The first columns of ``results.csv``; after them comes one for the seconds of each stage."""

COUNTEREXAMPLES = "counterexamples"
"""The folder, in a store's folder, with a file for each counterexample."""

_LONGEST_NAME = 80

TABLE_EVERY = 1.0
"""The least seconds between two writings of the table during a run; records are written at once."""

_PATIENCE = 50
"""Between two writings of the table lie at least this many times the seconds that one takes."""

RESULTS = Kind(b'{"onnx": "', Result.to_json, Result.from_json)
"""The kind of the records of a campaign."""

_HEAD = b"onnx,vnnlib,"
"""The first bytes of every ``results.csv`` of this package."""

_REMEDY = "; the option --repair moves such lines to another file"


class Store:
    """A folder with ``records.jsonl``, a journal of results, and ``results.csv``, a table of the last run's results.

    Each counterexample is a file of its own in the folder ``counterexamples``. Of its records, a store keeps the places
    in the journal alone, and of the table's rows, those in a file without a name: 0.4 kB for each instance.

    While a store is open, no other process can open one in its folder (``Journal``). A store is a context manager that
    closes itself.

    Args:
        folder: the folder, which is made if it does not exist.
        repair: whether lines of ``records.jsonl`` that are no records are moved to another file (``Journal``).
        command: the command line by which results are asked for; records name it.

    Attributes:
        table: the path of ``results.csv``.
        records: the path of ``records.jsonl``.
        set_aside: the number of lines that were moved and the file that they were moved to; None if none were.

    Raises:
        InputError: if the folder cannot be made, written or locked, if another process holds its lock, or if a file of
            one of these names in it was not written by this package.
    """

    def __init__(self, folder: Path | str, repair: bool = False, command: str = "") -> None:
        self.folder = Path(folder)
        self.command = command
        self.table = self.folder / "results.csv"
        self._places: dict[bytes, int] = {}
        # The time limits of those of the records that say nothing else.
        self._limits: dict[bytes, float] = {}
        self._named: set[bytes] = set()
        self._count = 0
        self._due = 0.0
        try:
            # The table is checked before the journal is opened, which may change its file: in a folder with a table of
            # another program, no file is changed.
            _check_table(self.table)
        except OSError as error:
            raise unusable(self.folder, error) from None
        self._journal = Journal(self.folder, RESULTS, self._remember, repair, _REMEDY)
        self._rows = _Rows()
        try:
            # A run that was killed can have left half-written files.
            for half in (beside(self.table), *(self.folder / COUNTEREXAMPLES).glob(".*.new")):
                half.unlink(missing_ok=True)
        except OSError as error:
            self.close()
            raise unusable(self.folder, error) from None
        self.records = self._journal.path
        self.set_aside = self._journal.set_aside

    def __len__(self) -> int:
        """The number of final records with different keys."""
        return self._count

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the journal and release the folder's lock; a second call does nothing."""
        self._journal.close()
        self._rows.close()

    def find(self, key: Key, timeout: float, checked: bool = False) -> Result | None:
        """The record that answers an instance, or None (``recall``)."""
        place = self._places.get(_short(key))
        return None if place is None else recall({key: self._journal.at(place)}, key, timeout, checked)

    @property
    def known(self) -> Mapping[Key, Result]:
        """The records that say most, by their keys; all are read from the journal."""
        read = map(self._journal.at, set(self._places.values()))
        return {key: result for result in read for key in result.keys}

    def holds(self, result: Result) -> bool:
        """Whether there is a record of the same verifier for files of the same names, which it could read."""
        return _short(_names(result)) in self._named

    def append(self, result: Result, counterexample: str | None = None) -> None:
        """Write a counterexample's text to a file of its own, and a record to the end of the journal.

        Raises:
            InputError: if either cannot be written; the journal is then as it was before.
        """
        if counterexample is not None:
            self._write(self.folder / counterexample_file(result), [counterexample])
        # An older version's record without a date is of another command.
        if self.command and result.date and not result.command:
            result = replace(result, command=self.command)
        self._remember(self._journal.append(result), result)

    def enter(self, number: int, result: Result) -> None:
        """Take the result of an instance, by its number from 0 in this run, into the table, which is written soon.

        Raises:
            InputError: if the table cannot be written.
        """
        self._rows.add(number, result)
        if time.perf_counter() > self._due:
            self.tabulate()

    def tabulate(self) -> None:
        """Replace ``results.csv`` by a table of the results of this run, in the order of their numbers.

        A reader sees the old table or the new one, complete.

        Raises:
            InputError: if the table cannot be written.
        """
        start = time.perf_counter()
        self._write(self.table, self._rows.lines())
        # The rows of a long list take long to write: nearly all of the time is for the instances.
        self._due = time.perf_counter() + max(TABLE_EVERY, _PATIENCE * (time.perf_counter() - start))

    def _write(self, path: Path, parts: Iterable[str]) -> None:
        """Replace a file; a reader sees the old one or the new one, complete."""
        new = beside(path)
        try:
            path.parent.mkdir(exist_ok=True)
            plain(path)
            try:
                # File names need not be text.
                with open(
                    os.open(new, NEW, 0o666), "w", newline="", encoding="utf-8", errors="surrogateescape"
                ) as file:
                    file.writelines(parts)
                os.replace(new, path)
            finally:
                new.unlink(missing_ok=True)
        except OSError as error:
            raise unusable(self.folder, error) from None

    def _remember(self, place: int, result: Result) -> None:
        if result.query:
            self._named.add(_short(_names(result)))
        if not result.final:
            return
        self._count += _short(result.key) not in self._places
        decided = result.verdict is not Verdict.UNKNOWN
        for short in map(_short, result.keys):
            # A verdict outweighs none, and a longer run a shorter one.
            if short not in self._places or decided or self._limits.get(short, math.inf) <= result.timeout:
                self._places[short] = place
                self._limits.pop(short, None)
                if not decided:
                    self._limits[short] = result.timeout


class _Rows:
    """The rows of the table of a run, which come in any order: on the disk, since a list may be long."""

    def __init__(self) -> None:
        self._stages: dict[str, int] = {}
        # By number, where a row begins, its bytes, of which a number without a row has none, and its columns.
        self._places, self._sizes, self._widths = array("q"), array("l"), array("l")
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 -- open as long as the store

    def close(self) -> None:
        self._file.close()

    def add(self, number: int, result: Result) -> None:
        for stage in result.stages:
            self._stages.setdefault(stage, len(self._stages))
        for column in (self._places, self._sizes, self._widths):
            column.extend([0] * (number + 1 - len(column)))
        row = _line(_row(result, self._stages)).encode(errors="surrogateescape")
        self._places[number] = self._file.seek(0, os.SEEK_END)
        self._sizes[number], self._widths[number] = len(row), len(self._stages)
        self._file.write(row)

    def lines(self) -> Iterator[str]:
        """The table, line by line."""
        yield _line([*COLUMNS, *(f"{stage} seconds" for stage in self._stages)])
        for place, size, width in zip(self._places, self._sizes, self._widths, strict=True):
            if size:
                if place != self._file.tell():
                    self._file.seek(place)
                row = self._file.read(size).decode(errors="surrogateescape")
                # Columns for stages that came later.
                yield row.removesuffix("\r\n") + "," * (len(self._stages) - width) + "\r\n"


def _line(row: Iterable[str]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(row)
    return text.getvalue()


def _names(result: Result) -> tuple[str, ...]:
    return result.verifier, result.onnx, result.vnnlib, result.arithmetic


def _short(key: tuple[str, ...]) -> bytes:
    """A digest of a key or of names, since they are long."""
    return blake2b("\0".join(key).encode(errors="surrogateescape"), digest_size=16).digest()


def recall(known: Mapping[Key, Result], key: Key, timeout: float, checked: bool) -> Result | None:
    """The record that answers an instance, or None (``Result.answers``).

    Args:
        known: records by their keys.
        key: what is asked.
        timeout: the time limit of the instance, in seconds.
        checked: whether a verdict without a checked certificate is no answer.
    """
    found = known.get(key)
    return found if found is not None and found.answers(timeout) and (found.certain or not checked) else None


def _check_table(path: Path) -> None:
    """Check that a file may be replaced by a table of this package: that it is one, is empty or does not exist.

    Raises:
        InputError: if the file is anything else.
        OSError: if the file cannot be read.
    """
    if plain(path):
        with path.open("rb") as file:
            if file.read(len(_HEAD)) not in (_HEAD, b""):
                raise InputError("not a table of this program, which would be replaced by one", path=path)


def counterexample_file(result: Result) -> str:
    """The file of a result's counterexample, relative to the folder; empty if the result has none."""
    if result.verdict is not Verdict.SAT:
        return ""
    return f"{COUNTEREXAMPLES}/{stem(result.vnnlib)[:_LONGEST_NAME]}-{result.query[:12]}.txt"


def read_results(folder: Path | str) -> list[Result]:
    """The results that a folder holds: the latest of each verifier, arithmetic and instance, by its two files' names.

    Raises:
        InputError: if the folder has no records, or if one is damaged.
    """
    found: dict[tuple[str, ...], Result] = {}
    for result in read_journal(folder, RESULTS):
        found[_names(result)] = result
    return list(found.values())


def _row(result: Result, stages: Iterable[str]) -> Iterator[str]:
    """A result in the columns of the table."""
    yield from (csv_cell(result.onnx), csv_cell(result.vnnlib), result.answer, str(result.trust or ""))
    yield from (f"{result.seconds:.6f}", f"{result.timeout:g}", csv_cell(result.method), str(result.reason))
    yield "" if result.margin is None else repr(result.margin)
    yield "" if result.unstable is None else str(result.unstable)
    yield from (counterexample_file(result), csv_cell(printable(result.detail)))
    yield from (f"{result.stages[stage]:.6f}" if stage in result.stages else "" for stage in stages)
