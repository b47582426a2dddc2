"""The records of a study: one file of JSON lines, which grows by a line for each finished piece of work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from verifiable_relu.journal import Journal, Kind, read_journal

Record = dict[str, Any]
"""What JSON has; ``kind`` says what is recorded."""

NOTE = "note"
"""The kind of the records that say by which command and on which machine the records after them were made."""


def _decode(found: Any) -> Record:
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise ValueError("it has no kind")
    return found


RECORDS: Kind[Record] = Kind(b'{"kind": "', lambda record: record, _decode)


class Records:
    """The records of a study, for a run that adds to them.

    Each is on the disk when ``append`` returns: a run that is interrupted or killed loses none, and the same command
    goes on after them. While it is open, no other process can add to the file. A context manager, which closes it.

    Args:
        folder: of the study; made if it does not exist.
        conditions: says by which command and on which machine this run measures; noted before the first record that it
            adds.

    Raises:
        InputError: if the folder cannot be used, another process has it open, or the file has something else in it.
    """

    def __init__(self, folder: Path, conditions: Callable[[], str] | None = None) -> None:
        self.folder = folder
        self._journal = Journal(folder, RECORDS)
        self._conditions = conditions
        self.all: list[Record] = self._journal.loaded

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()

    def of(self, kind: str) -> list[Record]:
        """Those of a kind, in the order of their coming."""
        return of(self.all, kind)

    def has(self, kind: str, fields: Mapping[str, Any]) -> bool:
        """Whether there is a record of this kind with these values."""
        return any(all(record.get(name) == value for name, value in fields.items()) for record in self.of(kind))

    def append(self, kind: str, record: Mapping[str, Any]) -> None:
        """Keep a record.

        Raises:
            InputError: if it cannot be written.
        """
        if self._conditions is not None:
            noted, self._conditions = self._conditions(), None
            self.append(NOTE, {"text": noted})
        whole = {"kind": kind, **record}
        self._journal.append(whole)
        self.all.append(whole)


def read_records(folder: Path) -> list[Record]:
    """The records of a study, for somebody who only reads them.

    Raises:
        InputError: if there are none, or the file has something else in it.
    """
    return read_journal(folder, RECORDS)


def of(records: Sequence[Record], kind: str) -> list[Record]:
    """Those of a kind, in the order of their coming."""
    return [record for record in records if record["kind"] == kind]


def notes(records: Sequence[Record]) -> Iterator[str]:
    """By which commands and on which machines the records were made, each once."""
    yield from dict.fromkeys(str(record["text"]) for record in of(records, NOTE))
