"""The folder of a campaign's results: the file of its records, counterexamples, and a table of the last run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from fractions import Fraction
from hashlib import blake2b
from itertools import chain
from pathlib import Path

from verifiable_relu.campaign.result import QUIET, Key, Observer, Result
from verifiable_relu.errors import InputError, printable
from verifiable_relu.files import csv_cell, csv_line, replacement, write_whole
from verifiable_relu.journal import Journal, RecordFormat, is_plain_file, read_journal, unusable
from verifiable_relu.search.outcomes import Verdict
from verifiable_relu.spec.specfile import SpecFile, Variable, exact_text, stem

COLUMNS = (
    "onnx", "vnnlib", "answer", "trust", "seconds", "limit", "method", "reason", "margin", "unstable",
    "counterexample", "detail",
)  # fmt: skip
"""The first columns of ``results.csv``; after them comes one for the seconds of each stage."""

COUNTEREXAMPLES = "counterexamples"  # The folder, in a store's folder, with a file for each counterexample

_LONGEST_NAME = 80

RESULTS = RecordFormat(b'{"onnx": "', Result.to_json, Result.from_json)  # The format of the records of a campaign
_HEAD = b"onnx,vnnlib,"  # The first bytes of every results.csv of this package

_REMEDY = "; the option --repair moves such lines to another file"


class Store(Observer, AbstractContextManager["Store"]):
    """A folder with ``records.jsonl``, a journal of results, and ``results.csv``, a table of the last run's results.

    Each counterexample is a file of its own in the folder ``counterexamples``. Of its records and of the table's rows,
    a store keeps the places in the journal alone. While a store is open, no other process can open one in its folder
    (``Journal``, which also says what ``repair`` does). Records name the ``command`` that asked. What a store is told,
    it tells an ``observer`` then. A folder that cannot be used, or with a file of one of these names that this package
    did not write, is an InputError.
    """

    def __init__(self, folder: Path | str, repair: bool = False, command: str = "", observer: Observer = QUIET) -> None:
        self.folder, self.command, self.observer = Path(folder), command, observer
        self._table = self.folder / "results.csv"
        # Places in the journal: of answers by their keys and of records by their names, with the time limits of answers
        # that are no verdicts, infinite for others; and of the table's rows by number.
        self._places: dict[bytes, tuple[int, float]] = {}
        self._rows: dict[int, int] = {}
        self._stages: dict[str, None] = {}
        self._count = 0
        try:
            # The table is checked before the journal is opened, which may change its file: in a folder with a table of
            # another program, no file is changed.
            if is_plain_file(self._table):
                with self._table.open("rb") as file:
                    if file.read(len(_HEAD)) not in (_HEAD, b""):
                        said = "not a table of this program, which would be replaced by one"
                        raise InputError(said, path=self._table)
            self._journal = Journal(self.folder, RESULTS, self._remember, repair, _REMEDY)
            # A run that was killed can have left half-written files.
            for half in (replacement(self._table), *(self.folder / COUNTEREXAMPLES).glob(".*.new")):
                half.unlink(missing_ok=True)
        except OSError as error:
            raise unusable(self.folder, error) from None
        self.records, self.set_aside = self._journal.path, self._journal.set_aside

    def __len__(self) -> int:
        return self._count

    @property
    def has_records(self) -> bool:  # type: ignore[override]
        return self._count > 0

    def __exit__(self, *_: object) -> None:
        """Replace ``results.csv`` by a table of the results of this run, in the order of their numbers, and close."""
        results = self._journal.at(*(place for _, place in sorted(self._rows.items())))
        head = [*COLUMNS, *(f"{stage} seconds" for stage in self._stages)]
        rows = chain([head], (_row(result, self._stages) for result in results))
        try:
            if self._rows:
                self._write(self._table, (csv_line(row, "\r\n") for row in rows))
        finally:
            self.close()

    def close(self) -> None:
        """Close the journal and release the folder's lock; a second call does nothing."""
        self._journal.close()

    def find(self, key: Key, timeout: float, checked: bool = False) -> Result | None:
        place, _ = self._places.get(_short(key), (None, 0.0))
        found = None if place is None else next(self._journal.at(place))
        return found if found is not None and found.answers(timeout, checked) else None

    def stage(self, name: str, done: int, total: int) -> None:
        self.observer.stage(name, done, total)

    def result(self, number: int, result: Result, recorded: bool) -> None:
        """Take the result of an instance, by its number in this run, into the table, and keep a record of it.

        One that is ``recorded`` is known from an earlier run, or from an equal question in other files: it is recorded
        under the names of these files, if it is not yet. The table is written at the end.
        """
        known = map(self._places.get, map(_short, (result.key, _names(result)))) if recorded else ()
        places = [each[0] for each in known if each is not None]
        records = zip(places, self._journal.at(*places), strict=True)
        place = next((each for each, record in records if _said(record) == _said(result)), None)
        self._rows[number] = self.append(result) if place is None else place
        self._stages |= dict.fromkeys(result.stages)
        self.observer.result(number, result, recorded)

    def append(self, result: Result) -> int:
        """Write a counterexample to a file of its own, and a record to the journal; returns its place there."""
        if result.verdict is Verdict.SAT:
            text = result.assignment or "\n".join(assignment(result))
            self._write(self.folder / counterexample_file(result), [text, "\n"])
        if self.command and not result.command:
            result = replace(result, command=self.command)
        place = self._journal.append(result)
        self._remember(place, result)
        return place

    def _write(self, path: Path, parts: Iterable[str]) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            is_plain_file(path)
            # File names need not be text.
            write_whole(path, (part.encode(errors="surrogateescape") for part in parts), lasting=False)
        except OSError as error:
            raise unusable(self.folder, error) from None

    def _remember(self, place: int, result: Result) -> None:
        if result.query:
            self._places[_short(_names(result))] = place, math.inf
        if not result.final:
            return
        self._count += _short(result.key) not in self._places
        decided = result.verdict is not Verdict.UNKNOWN
        for short in map(_short, result.keys):
            # A verdict outweighs none, and a longer run a shorter one.
            if decided or self._places.get(short, (0, 0.0))[1] <= result.timeout:
                self._places[short] = place, math.inf if decided else result.timeout


def read_results(folder: Path | str) -> list[Result]:
    """Return the last result of each verifier, arithmetic and instance in a folder; an InputError if one is damaged."""
    return list({_names(result): result for result in read_journal(folder, RESULTS)}.values())


def counterexample_file(result: Result) -> str:
    """Return the file of a result's counterexample, relative to the folder; empty if the result has none."""
    if result.verdict is not Verdict.SAT:
        return ""
    return f"{COUNTEREXAMPLES}/{stem(result.vnnlib)[:_LONGEST_NAME]}-{result.query[:12]}.txt"


def assignment(result: Result, spec: SpecFile | None = None) -> Iterator[str]:
    """Yield the lines of a counterexample: exact inputs, and the outputs that onnxruntime computes for them.

    The form is that of the verification competition for the property file's version of VNN-LIB, by default 1.0 with
    inputs ``X`` and outputs ``Y``. A number that no decimal equals is written as a quotient, ``(/ 1.0 3.0)``.
    """
    version = "1.0" if spec is None else spec.version
    lines = [
        f"{name} {value}"
        for variable, values in tensors(result, spec, exact_text)
        for name, value in zip(variable.elements(version), values, strict=True)
    ]
    if version == "1.0":
        lines = [f" ({line})" for line in lines]
        lines[0], lines[-1] = "(" + lines[0][1:], lines[-1] + ")"
    yield from lines


def tensors(
    result: Result, spec: SpecFile | None, text: Callable[[Fraction], str]
) -> Iterator[tuple[Variable, list[str]]]:
    """Yield the inputs, written by ``text``, and outputs of a counterexample by variables."""
    assert result.witness is not None and result.outputs is not None
    witness, outputs = [text(v) for v in result.witness], [repr(float(v)) for v in result.outputs]
    if spec is None or spec.joined is None:
        yield Variable("X", (len(witness),)) if spec is None else spec.inputs, witness
        yield Variable("Y", (len(outputs),)) if spec is None else spec.outputs, outputs
        return
    for declared in spec.joined.networks:
        inputs, given = [witness[i] for i in declared.places], outputs[declared.start :]
        for each, values in ((declared.inputs, inputs), (declared.given, given)):
            start = 0
            for tensor in each:
                yield tensor, values[start : start + tensor.size]
                start += tensor.size


def _names(result: Result) -> tuple[str, ...]:
    return result.verifier, result.onnx, result.vnnlib, result.arithmetic


def _said(result: Result) -> tuple[object, ...]:
    return *_names(result), result.query, result.verdict, result.reason, result.trust, result.timeout


def _short(key: tuple[str, ...]) -> bytes:
    # Keys and names are long.
    return blake2b("\0".join(key).encode(errors="surrogateescape"), digest_size=16).digest()


def _row(result: Result, stages: Iterable[str]) -> Iterator[str]:
    yield from (csv_cell(result.onnx), csv_cell(result.vnnlib), result.answer, str(result.trust or ""))
    yield from (f"{result.seconds:.6f}", f"{result.timeout:g}", csv_cell(result.method), str(result.reason))
    yield "" if result.margin is None else repr(result.margin)
    yield "" if result.unstable is None else str(result.unstable)
    yield from (counterexample_file(result), csv_cell(printable(result.detail)))
    yield from (f"{result.stages[stage]:.6f}" if stage in result.stages else "" for stage in stages)
