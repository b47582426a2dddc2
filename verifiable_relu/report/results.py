"""Results of campaigns, each instance once whatever paths name its files, and tables of expected verdicts."""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from verifiable_relu.campaign.result import Result
from verifiable_relu.campaign.store import read_results
from verifiable_relu.errors import InputError
from verifiable_relu.files import csv_cell, read_text
from verifiable_relu.spec.find import named

IN_FOLDER = " in "
"""The separator of method and folder in the names of methods, where several campaigns are compared."""

LARGEST_FILE = 1 << 26
"""The most bytes of a file that a report reads."""

VERDICTS = {"sat": "sat", "violated": "sat", "unsat": "unsat", "holds": "unsat"}
"""Our verdict for each verdict of a table. Every other result, such as ``timeout``, is no verdict."""

_STUDY = b'{"kind": "'
"""The first bytes of the records of a study."""


def read_campaigns(folders: Sequence[Path]) -> list[Result]:
    """Return the results of one campaign or of several, sorted by network and property.

    The methods of several campaigns have the folders' names in theirs.

    Raises:
        InputError: if there are no results, or if a folder has no records or damaged ones.
    """
    if len(folders) > 1 and (records := [folder for folder in folders if folder.suffix == ".json"]):
        raise InputError("no campaign, which alone is compared", path=records[0])
    campaigns = {folder: _read_campaign(folder) for folder in folders}
    results = _merge_campaigns(campaigns) if len(campaigns) > 1 else campaigns[folders[0]]
    if not results:
        raise InputError("no results here", path=folders[0])
    return sorted(results, key=lambda result: (natural(result.onnx), natural(result.vnnlib)))


def _read_campaign(folder: Path) -> list[Result]:
    """Return the results of a folder, those of one instance under two paths once, as the last run named it.

    A campaign that is resumed in another folder names its files by other paths.
    """
    try:
        results = [with_arithmetic(result) for result in read_results(folder)]
    except InputError:
        if _is_study(folder / "records.jsonl"):
            command = f"python -m benchmarks.study {folder.resolve().name} --out {folder} --table"
            raise InputError(f"the folder of a study, of which '{command}' makes the page", path=folder) from None
        raise
    try:
        rows = csv.DictReader(io.StringIO(read_text(folder / "results.csv", LARGEST_FILE)))
        listed = {(row["onnx"], row["vnnlib"]) for row in rows}
    except (InputError, KeyError, csv.Error):
        return results

    def is_listed(result: Result) -> bool:
        return (csv_cell(result.onnx), csv_cell(result.vnnlib)) in listed

    kept: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in [*filter(is_listed, results), *reversed(results)]:
        same = kept[result.verifier, Path(result.vnnlib).name]
        if is_listed(result) or not any(match_order(result, other) for other in same):
            same.append(result)
    chosen = {id(result) for same in kept.values() for result in same}
    return [result for result in results if id(result) in chosen]


def _is_study(records: Path) -> bool:
    with contextlib.suppress(OSError):
        if records.is_file():
            with records.open("rb") as file:
                return file.read(len(_STUDY)) == _STUDY
    return False


def with_arithmetic(result: Result) -> Result:
    """Return a result whose verifier names the arithmetic that the verdict is about, unless that is real numbers."""
    if result.arithmetic == "real":
        return result
    method, parenthesis, options = result.verifier.partition("(")
    return replace(result, verifier=f"{method} about {result.arithmetic}{parenthesis}{options}")


def _merge_campaigns(campaigns: Mapping[Path, Sequence[Result]]) -> list[Result]:
    """Return the results of several campaigns; an instance of several is named as the first of them names it."""
    names = {folder: folder.resolve().name for folder in campaigns}
    known: dict[str, list[Result]] = defaultdict(list)
    merged = []
    for folder, results in campaigns.items():
        label = names[folder] if [*names.values()].count(names[folder]) == 1 else str(folder)
        # A campaign's two results of one method are two instances.
        taken: dict[tuple[str, str], set[int]] = defaultdict(set)
        for result in results:
            file = Path(result.vnnlib).name
            same, mine = known[file], taken[result.verifier, file]
            orders = ((match_order(result, each), i) for i, each in enumerate(same) if i not in mine)
            _, place = min(((order, i) for order, i in orders if order), default=(None, len(same)))
            if place == len(same):
                same.append(result)
            mine.add(place)
            first, verifier = same[place], f"{result.verifier}{IN_FOLDER}{label}"
            merged.append(replace(result, onnx=first.onnx, vnnlib=first.vnnlib, verifier=verifier))
    return merged


def match_order(result: Result, other: Result) -> tuple[bool, int, bool] | None:
    """Return an order among results that may be about one instance, the likeliest first; None if they cannot be.

    Equal paths go before equal ends of paths, and these before equal queries: copies of a file have equal queries. The
    query of a file that could not be read is unknown.
    """
    equal_paths = (result.onnx, result.vnnlib) == (other.onnx, other.vnnlib)
    # A property that could not be read may have no network.
    equal_names = not (result.onnx and other.onnx) or named(result.onnx) == named(other.onnx)
    equal_queries = result.query == other.query
    if not equal_paths and not (equal_names and (equal_queries or not (result.query and other.query))):
        return None
    shared = common_end(result.vnnlib, other.vnnlib) + common_end(result.onnx, other.onnx)
    return not equal_paths, -shared, not equal_queries


def common_end(path: str, other: str) -> int:
    """Return the number of names that two paths share at their ends."""
    ends = [reversed(Path(text.removesuffix(".gz")).parts) for text in (path, other)]
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*ends, strict=False)))


def natural(text: str) -> list[str | int]:
    """Return a sorting key that compares numbers within texts as numbers."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", text))]


def counted(number: int, noun: str) -> str:
    """Return a number and a noun: "1 instance", "2 instances"."""
    return f"{number} {noun}" + "s" * (number != 1)


class ExpectedRow(NamedTuple):
    """Row of a table: the files as the table names them, and ``sat``, ``unsat`` or an empty text."""

    onnx: str
    vnnlib: str
    verdict: str


@dataclass(frozen=True)
class ExpectedVerdicts:
    """Rows of a table, by the names of their files without folders."""

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
    rows: dict[tuple[str, str], list[ExpectedRow]] = defaultdict(list)
    try:
        for fields in csv.reader(io.StringIO(read_text(path, LARGEST_FILE), newline="")):
            stripped = [each.strip() for each in fields]
            for onnx, vnnlib, *later in ([*stripped, "", ""], [*stripped[1:], "", ""]):
                if vnnlib.removesuffix(".gz").endswith(".vnnlib"):
                    verdict = next((VERDICTS[each.lower()] for each in later if each.lower() in VERDICTS), "")
                    rows[_names(onnx, vnnlib)].append(ExpectedRow(onnx, vnnlib, verdict))
                    break
    except csv.Error as error:
        raise InputError(f"no table: {error}", path=path) from None
    if not rows:
        raise InputError("no row has a network and a property (.vnnlib) as its first or second two fields", path=path)
    return ExpectedVerdicts(dict(rows))


def _names(onnx: str, vnnlib: str) -> tuple[str, str]:
    return named(onnx).removesuffix(".gz"), Path(vnnlib).name.removesuffix(".gz")
