"""The records of a study: a file of JSON lines, one for each finished piece of work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from verifiable_relu.journal import Journal, Kind, read_journal

Record = dict[str, Any]
"""A JSON object, whose field ``kind`` says what it records."""

NOTE = "note"
"""The kind of records that name the command and the machine of the records after them."""


def _decode(found: Any) -> Record:
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise ValueError("it has no kind")
    return found


RECORDS: Kind[Record] = Kind(b'{"kind": "', lambda record: record, _decode)


class Records:
    """The records of a study, open for a run that adds to them.

    Each record is on the disk when ``append`` returns: a run that is interrupted or killed loses none, and the same
    command resumes after them. While the records are open, no other process can add to the file. The object is a
    context manager that closes itself.

    Args:
        folder: the folder of the study, which is made if it does not exist.
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
        """Whether there is a record of a kind whose fields have these values."""
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

    def replace(self, records: Sequence[Record]) -> None:
        """Replace all records by others, which say the same: a kill at any moment leaves the old ones or the new ones.

        Raises:
            InputError: if the records cannot be written; the file is then as it was before.
        """
        self._journal.replace(records)
        self.all = list(records)


def read_records(folder: Path) -> list[Record]:
    """The records of a study, read without opening them for a run.

    Raises:
        InputError: if there is no file of records, or if the file has lines that are no records.
    """
    return read_journal(folder, RECORDS)


def of(records: Sequence[Record], kind: str) -> list[Record]:
    """The records of a kind, in their order."""
    return [record for record in records if record["kind"] == kind]


def notes(records: Sequence[Record]) -> Iterator[str]:
    """The lines on the commands and the machines of the records, each once."""
    yield from dict.fromkeys(str(record["text"]) for record in of(records, NOTE))
