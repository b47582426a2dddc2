"""Records of measurements: a file of JSON lines while something is measured, one compressed file when it is finished.

A record is a JSON object whose field ``kind`` says what it records. What must be found again is named by a *versioned
key*: the version, the name of the method (of an arm, a verifier, …) and those of its options that differ from their
defaults. Nothing depends on how a class is written: whoever renames an option, or changes a default, raises ``VERSION``
and has ``upgraded`` translate the keys of earlier versions.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from verifiable_relu.errors import InputError
from verifiable_relu.files import write_whole
from verifiable_relu.journal import Journal, RecordFormat, read_journal

Record = dict[str, Any]
"""A JSON object, whose field ``kind`` says what it records."""

NOTE = "note"
"""The kind of records that name the command and the machine of the records after them."""

SUFFIX = ".jsonl.xz"
"""The suffix of a file of compressed records."""

VERSION = 1
"""The version of the names and defaults in keys."""


def versioned_key(method: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Record:
    """The key of a method with options, as it stands in records."""
    changed = {name: value for name, value in sorted(options.items()) if value != defaults.get(name)}
    # As JSON has it: tuples are lists.
    found: Record = json.loads(json.dumps({"version": VERSION, "method": method, "options": changed}))
    return found


def upgraded(key: Record) -> Record:
    """A key in the names of the present version.

    Raises:
        InputError: for a version that is not known.
    """
    if key["version"] != VERSION:
        raise InputError(f"a key of version {key['version']}, where {VERSION} is known")
    return key


def _decode(found: Any) -> Record:
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise ValueError("it has no kind")
    return found


RECORDS: RecordFormat[Record] = RecordFormat(b'{"kind": "', lambda record: record, _decode)


class Records:
    """The records of a folder, open for a run that adds to them; a context manager.

    Each record is on the disk when ``append`` returns: a run that is interrupted or killed loses none, and the same
    command resumes after them. While the records are open, no other process can add to the file.

    Args:
        folder: the folder, which is made if it does not exist.
        conditions: returns a line on the command and the machine of this run, which is noted before the first record
            that the run adds; None notes nothing.

    Attributes:
        all: all records, in the order in which they were added.

    Raises:
        InputError: if the folder cannot be used, if another process has the records open, or if the file has lines that
            are no records.
    """

    def __init__(self, folder: Path, conditions: Callable[[], str] | None = None) -> None:
        self.folder = folder
        self.all: list[Record] = []
        self._journal = Journal(folder, RECORDS, lambda place, record: self.all.append(record))
        self._conditions = conditions

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()

    def of(self, kind: str) -> list[Record]:
        """The records of a kind, in the order in which they were added."""
        return of(self.all, kind)

    def has(self, kind: str, fields: Mapping[str, Any]) -> bool:
        """Return True if there is a record of a kind whose fields have these values."""
        return any(all(record.get(name) == value for name, value in fields.items()) for record in self.of(kind))

    def append(self, kind: str, record: Mapping[str, Any]) -> None:
        """Add a record of a kind.

        Raises:
            InputError: if the record cannot be written.
        """
        if self._conditions is not None:
            noted, self._conditions = self._conditions(), None
            self.append(NOTE, {"text": noted})
        whole = {"kind": kind, **record}
        self._journal.append(whole)
        self.all.append(whole)


def read_records(place: Path) -> list[Record]:
    """The records of a folder, or of a compressed file.

    Raises:
        InputError: if there are none, or if the file has lines that are no records.
    """
    if not place.name.endswith(SUFFIX):
        return read_journal(place, RECORDS)
    try:
        with lzma.open(place, "rb") as file:
            return [RECORDS.record(line) for line in file]
    except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", path=place) from None


def keep_records(records: Sequence[Record], path: Path) -> None:
    """Write records to a compressed file, completely or not at all."""
    write_whole(path, lzma.compress(b"".join(map(RECORDS.line, records)), preset=9 | lzma.PRESET_EXTREME))


def of(records: Sequence[Record], kind: str) -> list[Record]:
    """The records of a kind, in their order."""
    return [record for record in records if record["kind"] == kind]


def notes(records: Sequence[Record]) -> Iterator[str]:
    """The lines on the commands and the machines of the records, each once."""
    yield from dict.fromkeys(str(record["text"]) for record in of(records, NOTE))


def grouped(records: Sequence[Record], *names: str) -> dict[Any, list[Record]]:
    """Return records by the values of some fields: a tuple, or the value alone of one field."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        key = tuple(record[name] for name in names)
        groups.setdefault(key if len(names) > 1 else key[0], []).append(record)
    return groups
