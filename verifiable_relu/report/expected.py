"""Expected verdicts: a table of another tool, or of the verification competition, and its rows for an instance."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from verifiable_relu.errors import InputError
from verifiable_relu.files import read_text
from verifiable_relu.spec.find import named

LARGEST_FILE = 1 << 26
"""The most bytes of a file that a report reads."""

VERDICTS = {"sat": "sat", "violated": "sat", "unsat": "unsat", "holds": "unsat"}
"""Our verdict for each verdict of a table. Every other result, such as ``timeout``, is no verdict."""


class ExpectedRow(NamedTuple):
    """A row of a table: the files as the table names them, and ``sat``, ``unsat`` or an empty text."""

    onnx: str
    vnnlib: str
    verdict: str


@dataclass(frozen=True)
class ExpectedVerdicts:
    """The rows of a table, by the names of their files without folders."""

    rows: Mapping[tuple[str, str], Sequence[ExpectedRow]] = field(default_factory=dict)

    def matching(self, onnx: str, vnnlib: str) -> list[ExpectedRow]:
        """Return the rows about an instance: of the rows with its names, those that share most folders with it."""
        rows = self.rows.get(_names(onnx, vnnlib), ())
        shared = [common_end(row.onnx, onnx) + common_end(row.vnnlib, vnnlib) for row in rows]
        return [row for row, count in zip(rows, shared, strict=True) if count == max(shared)]

    def verdict(self, onnx: str, vnnlib: str) -> str | None:
        """Return the expected verdict of an instance; None without any, and where rows contradict each other."""
        verdicts = {row.verdict for row in self.matching(onnx, vnnlib)} - {""}
        return verdicts.pop() if len(verdicts) == 1 else None

    def summary(self, instances: Sequence[tuple[str, str]]) -> str:
        """Return a sentence that counts the rows, the matching ones, and those without a usable verdict."""
        found = [self.matching(*files) for files in instances]
        # Equal rows count each, which a set of them would not.
        matching = {id(row): row for rows in found for row in rows}.values()
        parts = [counted(sum(map(len, self.rows.values())), "row"), f"{len(matching)} match an instance"]
        if undecided := sum(not row.verdict for row in matching):
            parts.append(f"{undecided} of these without a verdict")
        if contrary := sum({"sat", "unsat"} <= {row.verdict for row in rows} for rows in found):
            parts.append(f"{counted(contrary, 'instance')} with rows that contradict each other")
        return f"Expected verdicts: {', '.join(parts)}."


def read_expected(path: Path) -> ExpectedVerdicts:
    """Read a table whose rows begin with network and property, or with a category and these.

    The verdict is the first later field that is one of ``VERDICTS``: ``onnx,vnnlib,timeout,verdict``, the competition's
    ``category,onnx,vnnlib,prepare,result,time``, or the ``results.csv`` of ``certify``.

    Raises:
        InputError: if the file cannot be read, or no row names a network and a property.
    """
    rows: dict[tuple[str, str], list[ExpectedRow]] = {}
    try:
        for fields in csv.reader(io.StringIO(read_text(path, LARGEST_FILE), newline="")):
            if (row := _row([each.strip() for each in fields])) is not None:
                rows.setdefault(_names(row.onnx, row.vnnlib), []).append(row)
    except csv.Error as error:
        raise InputError(f"no table: {error}", path=path) from None
    if not rows:
        raise InputError("no row has a network and a property (.vnnlib) as its first or second two fields", path=path)
    return ExpectedVerdicts(rows)


def _row(fields: Sequence[str]) -> ExpectedRow | None:
    """Return the row of these fields; None for headings."""
    for start in (0, 1):
        onnx, vnnlib, *later = [*fields[start:], "", ""]
        if vnnlib.removesuffix(".gz").endswith(".vnnlib"):
            return ExpectedRow(onnx, vnnlib, next((v for each in later if (v := VERDICTS.get(each.lower()))), ""))
    return None


def _names(onnx: str, vnnlib: str) -> tuple[str, str]:
    return named(onnx).removesuffix(".gz"), Path(vnnlib).name.removesuffix(".gz")


def common_end(path: str, other: str) -> int:
    """Return the number of names that two paths share at their ends."""
    ends = [reversed(Path(text.removesuffix(".gz")).parts) for text in (path, other)]
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*ends, strict=False)))


def counted(number: int, noun: str) -> str:
    """Return a number and a noun: "1 instance", "2 instances"."""
    return f"{number} {noun}" + "s" * (number != 1)
