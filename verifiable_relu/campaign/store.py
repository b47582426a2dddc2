"""The folder of a campaign's results: the file of its records, and a table of the last run."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping
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

RESULTS = Kind(b'{"onnx": "', Result.to_json, Result.from_json)
"""The kind of the records of a campaign."""

_HEAD = b"onnx,vnnlib,"
"""The first bytes of every ``results.csv`` of this package."""

_REMEDY = "; the option --repair moves such lines to another file"


class Store:
    """A folder with ``records.jsonl``, a journal of results, and ``results.csv``, a table of the last run's results.

    Each counterexample is a file of its own in the folder ``counterexamples``.

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
            # A run that was killed can have left half-written files.
            for half in (beside(self.table), *(self.folder / COUNTEREXAMPLES).glob(".*.new")):
                half.unlink(missing_ok=True)
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

    def find(self, key: Key, timeout: float, checked: bool = False) -> Result | None:
        """The record that answers an instance, or None (``recall``)."""
        return recall(self._known, key, timeout, checked)

    @property
    def known(self) -> Mapping[Key, Result]:
        """The records that say most, by their keys."""
        return self._known

    def append(self, result: Result, counterexample: str | None = None) -> None:
        """Write a counterexample's text to a file of its own, and a record to the end of the journal.

        Raises:
            InputError: if either cannot be written; the journal is then as it was before.
        """
        if counterexample is not None:
            self._write(self.folder / counterexample_file(result), [counterexample])
        self._journal.append(result)
        self._remember(result)

    def tabulate(self, results: Iterable[Result]) -> None:
        """Replace ``results.csv`` by a table of these results; a reader sees the old table or the new one, complete.

        Raises:
            InputError: if the table cannot be written.
        """
        known = list(results)
        stages = list(dict.fromkeys(stage for result in known for stage in result.stages))
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow([*COLUMNS, *(f"{stage} seconds" for stage in stages)])
        writer.writerows(_row(result, stages) for result in known)
        self._write(self.table, [text.getvalue()])

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

    def _remember(self, result: Result) -> None:
        before = self._known.get(result.key)
        if result.final and (before is None or _weight(result) >= _weight(before)):
            self._known[result.key] = result


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


def _weight(result: Result) -> tuple[bool, float]:
    """What decides between two records of one key: a verdict outweighs none, and a longer run a shorter one."""
    decided = result.verdict is not Verdict.UNKNOWN
    return decided, 0.0 if decided else result.timeout


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
    """The results that a folder holds: the latest of each verifier and instance, by the names of its two files.

    Raises:
        InputError: if the folder has no records, or if one is damaged.
    """
    return list(
        {(result.verifier, result.onnx, result.vnnlib): result for result in read_journal(folder, RESULTS)}.values()
    )


def _row(result: Result, stages: Iterable[str]) -> Iterator[str]:
    """A result in the columns of the table."""
    yield from (csv_cell(result.onnx), csv_cell(result.vnnlib), result.answer, str(result.trust or ""))
    yield from (f"{result.seconds:.6f}", f"{result.timeout:g}", csv_cell(result.method), str(result.reason))
    yield "" if result.margin is None else repr(result.margin)
    yield "" if result.unstable is None else str(result.unstable)
    yield from (counterexample_file(result), csv_cell(printable(result.detail)))
    yield from (f"{result.stages[stage]:.6f}" if stage in result.stages else "" for stage in stages)
