"""Where results live: a file of records that only grows, and a table made from it."""

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
"""Of ``results.csv``."""

RESULTS = Kind(b'{"onnx": "', Result.to_json, Result.from_json)
"""The records of a campaign."""

_HEAD = b"onnx,vnnlib,"
"""How every ``results.csv`` of this package begins."""

_REMEDY = "; the option --repair moves such lines to another file"


class Store:
    """A folder with ``records.jsonl``, a journal of results, and ``results.csv``.

    While a store is open, no other process can open one there (``Journal``). A store is a context manager, which closes
    it.

    Args:
        folder: made if it does not exist.
        repair: as ``Journal`` has it.

    Attributes:
        table: the path of ``results.csv``.
        records: the path of ``records.jsonl``.
        set_aside: as ``Journal`` has it.

    Raises:
        InputError: if the folder cannot be made, written or locked, if another campaign has it locked, or if it holds
            something under these names that is not of this package.
    """

    def __init__(self, folder: Path | str, repair: bool = False) -> None:
        self.folder = Path(folder)
        self.table = self.folder / "results.csv"
        self._known: dict[Key, Result] = {}
        try:
            # Before the journal, which may mend its own file: where the table is somebody else's, nothing is changed.
            _check_table(self.table)
        except OSError as error:
            raise unusable(self.folder, error) from None
        self._journal = Journal(self.folder, RESULTS, repair, _REMEDY)
        try:
            # What a process that was killed was about to put in its place.
            beside(self.table).unlink(missing_ok=True)
        except OSError as error:
            self.close()
            raise unusable(self.folder, error) from None
        self.records = self._journal.path
        self.set_aside = self._journal.set_aside
        for result in self._journal.loaded:
            self._remember(result)

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
        self._journal.close()

    def find(self, key: Key) -> Result | None:
        """The final record of the same run, if there is one."""
        return self._known.get(key)

    def append(self, result: Result) -> None:
        """Keep a record.

        Raises:
            InputError: if it cannot be written; then nothing of it is.
        """
        self._journal.append(result)
        self._remember(result)

    def tabulate(self, results: Iterable[Result]) -> None:
        """Write ``results.csv`` anew; a reader sees the old one or the new one, whole.

        Raises:
            InputError: if it cannot be written.
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
    """Refuse to replace a table that is somebody else's.

    Raises:
        InputError: if it is.
        OSError: if it cannot be read.
    """
    if plain(path):
        with path.open("rb") as file:
            if file.read(len(_HEAD)) not in (_HEAD, b""):
                raise InputError("not a table of this program, which would write its own there", path=path)


def _row(result: Result) -> tuple[str, ...]:
    """A result in the columns of the table."""
    margin = "" if result.margin is None else repr(result.margin)
    trust = "" if result.trust is None else str(result.trust)
    seconds = f"{result.seconds:.6f}"
    return result.onnx, result.vnnlib, result.answer, seconds, result.method, str(result.reason), trust, margin
