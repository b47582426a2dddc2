"""Where results live: a file of records that only grows, and a table made from it."""

from __future__ import annotations

import csv
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from verifiable_relu.campaign.result import Key, Result
from verifiable_relu.errors import InputError

COLUMNS = ("onnx", "vnnlib", "verdict", "seconds", "method", "reason")
"""Of ``results.csv``."""


class Store:
    """A folder with ``records.jsonl`` (a record a line, in the order of their coming) and ``results.csv``.

    A record is one write to a file opened for appending, so that whoever is killed loses none that was made.

    Args:
        folder: made if it does not exist.

    Raises:
        InputError: if it cannot be made or written, or holds a line that is no record.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.records = self.folder / "records.jsonl"
        self.table = self.folder / "results.csv"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.records.touch()
            data = self.records.read_bytes()
            whole = data.rfind(b"\n") + 1
            # The rest was being written when its process was killed.
            if whole < len(data):
                os.truncate(self.records, whole)
        except OSError as error:
            raise self._unusable(error) from None
        self._known: dict[Key, Result] = {}
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                self._remember(Result.from_json(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"not a record: {error}", path=self.records, place=f"line {number}") from None

    def __len__(self) -> int:
        """Number of different final records."""
        return len(self._known)

    def find(self, key: Key) -> Result | None:
        """The final record of the same run, if there is one."""
        return self._known.get(key)

    def append(self, result: Result) -> None:
        """Keep a record.

        Raises:
            InputError: if it cannot be written.
        """
        try:
            with self.records.open("ab") as file:
                file.write(json.dumps(result.to_json(), allow_nan=False).encode() + b"\n")
        except OSError as error:
            raise self._unusable(error) from None
        self._remember(result)

    def tabulate(self, results: Iterable[Result]) -> None:
        """Write ``results.csv`` anew; a reader sees the old one or the new one, whole.

        Raises:
            InputError: if it cannot be written.
        """
        try:
            with tempfile.NamedTemporaryFile(
                "w", newline="", encoding="utf-8", dir=self.folder, prefix=".results-", delete=False
            ) as file:
                writer = csv.writer(file)
                writer.writerow(COLUMNS)
                writer.writerows((r.onnx, r.vnnlib, r.verdict, f"{r.seconds:.6f}", r.method, r.reason) for r in results)
            os.replace(file.name, self.table)
        except OSError as error:
            raise self._unusable(error) from None

    def _remember(self, result: Result) -> None:
        if result.final:
            self._known[result.key] = result

    def _unusable(self, error: OSError) -> InputError:
        return InputError(f"cannot keep results here: {error.strerror or error}", path=self.folder)
