"""The folder of a campaign's results: the file of its records, and a table of the last run."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from verifiable_relu.campaign.result import Key, Result
from verifiable_relu.errors import InputError
from verifiable_relu.journal import NEW, Journal, Kind, beside, plain, unusable

COLUMNS = ("onnx", "vnnlib", "answer", "seconds", "method", "reason", "trust", "margin")
"""The columns of ``results.csv``."""

RESULTS = Kind(b'{"onnx": "', Result.to_json, Result.from_json)
"""The kind of the records of a campaign."""

_HEAD = b"onnx,vnnlib,"
"""The first bytes of every ``results.csv`` of this package."""

_REMEDY = "; the option --repair moves such lines to another file"


class Store:
    """A folder with ``records.jsonl``, a journal of results, and ``results.csv``, a table of the last run's results.

    While a store is open, no other process can open one in its folder (``Journal``). A store is a context manager that
    closes itself.

    Args:
        folder: the folder, which is made if it does not exist.
        repair: whether lines of ``records.jsonl`` that are no records are moved to another file (``Journal``).

    Attributes:
        table: the path of ``results.csv``.
        records: the path of ``records.jsonl``.
        set_aside: the number of lines that were moved and the file that they were moved to; None if none were.

    Raises:
        InputError: if the folder cannot be made, written or locked, if another process holds its lock, or if a file of
            one of these names in it was not written by this package.
    """

    def __init__(self, folder: Path | str, repair: bool = False) -> None:
        self.folder = Path(folder)
        self.table = self.folder / "results.csv"
        self._known: dict[Key, Result] = {}
        try:
            # The table is checked before the journal is opened, which may change its file: in a folder with a table of
            # another program, no file is changed.
            _check_table(self.table)
        except OSError as error:
            raise unusable(self.folder, error) from None
        self._journal = Journal(self.folder, RESULTS, repair, _REMEDY)
        try:
            # A run that was killed can have left a half-written table.
            beside(self.table).unlink(missing_ok=True)
        except OSError as error:
            self.close()
            raise unusable(self.folder, error) from None
        self.records = self._journal.path
        self.set_aside = self._journal.set_aside
        for result in self._journal.loaded:
            self._remember(result)

    def __len__(self) -> int:
        """The number of final records with different keys."""
        return len(self._known)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the journal and release the folder's lock; a second call does nothing."""
        self._journal.close()

    def find(self, key: Key) -> Result | None:
        """The final record with a key, or None."""
        return self._known.get(key)

    def append(self, result: Result) -> None:
        """Write a record to the end of the journal.

        Raises:
            InputError: if the record cannot be written; the journal is then as it was before.
        """
        self._journal.append(result)
        self._remember(result)

    def tabulate(self, results: Iterable[Result]) -> None:
        """Replace ``results.csv`` by a table of these results; a reader sees the old table or the new one, complete.

        Raises:
            InputError: if the table cannot be written.
        """
        new = beside(self.table)
        try:
            try:
                # File names need not be text.
                with open(
                    os.open(new, NEW, 0o666), "w", newline="", encoding="utf-8", errors="surrogateescape"
                ) as file:
                    writer = csv.writer(file)
                    writer.writerow(COLUMNS)
                    writer.writerows(map(_row, results))
                os.replace(new, self.table)
            finally:
                new.unlink(missing_ok=True)
        except OSError as error:
            raise unusable(self.folder, error) from None

    def _remember(self, result: Result) -> None:
        if result.final:
            self._known[result.key] = result


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


def _row(result: Result) -> tuple[str, ...]:
    """A result in the columns of the table."""
    margin = "" if result.margin is None else repr(result.margin)
    trust = "" if result.trust is None else str(result.trust)
    seconds = f"{result.seconds:.6f}"
    return result.onnx, result.vnnlib, result.answer, seconds, result.method, str(result.reason), trust, margin
