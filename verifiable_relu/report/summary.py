"""Results of campaigns, each instance once, and expected verdicts: counts by method, network and radius; pairs."""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain, combinations, count, takewhile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from verifiable_relu.campaign.result import REFUSED, Result
from verifiable_relu.campaign.store import read_results
from verifiable_relu.command_line import fraction
from verifiable_relu.errors import InputError, counted
from verifiable_relu.files import csv_cell, on_disk, read_text
from verifiable_relu.spec.find import named

IN_FOLDER = " in "  # Between method and folder in the names of methods, where several campaigns are compared
LARGEST_FILE = 1 << 26  # The most bytes of a file that a report reads

VERDICTS = {"sat": "sat", "violated": "sat", "unsat": "unsat", "holds": "unsat"}
"""Our verdict for each verdict of a table. Every other result, such as ``timeout``, is no verdict."""


def read_campaigns(folders: Sequence[Path]) -> list[Result]:
    """Return the results of one campaign or of several, sorted by network and property.

    The methods of several campaigns have the folders' names in theirs. Raises an InputError if there are no results, or
    if a folder has no records or damaged ones.
    """
    if len(folders) > 1 and (records := [folder for folder in folders if folder.suffix == ".json"]):
        raise InputError("not a campaign: only campaigns are compared", path=records[0])
    campaigns = {folder: _read_campaign(folder) for folder in folders}
    results = _merge_campaigns(campaigns) if len(campaigns) > 1 else campaigns[folders[0]]
    if not results:
        raise InputError("no results here: expected is a folder with records.jsonl (certify --out)", path=folders[0])
    return sorted(results, key=lambda result: (natural(result.onnx), natural(result.vnnlib)))


def _read_campaign(folder: Path) -> list[Result]:
    """Return the results of a folder, those of one instance under two paths once, as the last run named it.

    A campaign that is resumed in another folder names its files by other paths.
    """
    results = [with_arithmetic(result) for result in read_results(folder)]
    try:
        rows = csv.DictReader(io.StringIO(read_text(folder / "results.csv", LARGEST_FILE)))
        listed = {(row["onnx"], row["vnnlib"]) for row in rows}
    except (InputError, KeyError, csv.Error):
        return results

    def is_listed(result: Result) -> bool:
        return (csv_cell(result.onnx), csv_cell(result.vnnlib)) in listed

    last: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in filter(is_listed, results):
        last[result.verifier, Path(result.vnnlib).name].append(result)
    same = (last.get((result.verifier, Path(result.vnnlib).name), ()) for result in results)
    return [
        r for r, others in zip(results, same, strict=True) if is_listed(r) or not any(is_same(r, o) for o in others)
    ]


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
            same = known[Path(result.vnnlib).name]
            mine = taken[result.verifier, Path(result.vnnlib).name]
            free = [
                (shared_path(result, each), i) for i, each in enumerate(same) if is_same(result, each) and i not in mine
            ]
            _, place = max(free, key=lambda pair: pair[0], default=(None, len(same)))
            if place == len(same):
                same.append(result)
            mine.add(place)
            first, verifier = same[place], f"{result.verifier}{IN_FOLDER}{label}"
            merged.append(replace(result, onnx=first.onnx, vnnlib=first.vnnlib, verifier=verifier))
    return merged


def is_same(result: Result, other: Result) -> bool:
    """Return True if results may be about one instance: the query of a file that could not be read is unknown."""
    # A property that could not be read may have no network.
    equal_names = not (result.onnx and other.onnx) or named(result.onnx) == named(other.onnx)
    equal_queries = not (result.query and other.query) or result.query == other.query
    return (result.onnx, result.vnnlib) == (other.onnx, other.vnnlib) or (equal_names and equal_queries)


def shared_path(result: Result, other: Result) -> tuple[int, bool]:
    """Return by how much the files of two results agree: copies of a file have equal queries."""
    ends = common_end(result.vnnlib, other.vnnlib) + common_end(result.onnx, other.onnx)
    return ends, result.query == other.query


def common_end(path: str, other: str) -> int:
    """Return the number of names that two paths share at their ends."""
    ends = [reversed(Path(text.removesuffix(".gz")).parts) for text in (path, other)]
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*ends, strict=False)))


def natural(text: str) -> list[str | int]:
    """Return a sorting key that compares numbers within texts as numbers."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", text))]


class ExpectedRow(NamedTuple):
    """Row of a table: the files as the table names them, and ``sat``, ``unsat`` or an empty text."""

    onnx: str
    vnnlib: str
    verdict: str


def read_expected(path: Path) -> list[ExpectedRow]:
    """Read a table whose rows begin with network and property, or with a category and these.

    The verdict is the first later field that is one of ``VERDICTS``: ``onnx,vnnlib,timeout,verdict``, the competition's
    ``category,onnx,vnnlib,prepare,result,time``, or the ``results.csv`` of ``certify``.

    Raises:
        InputError: if the file cannot be read, or no row names a network and a property.
    """
    rows: list[ExpectedRow] = []
    try:
        for fields in csv.reader(io.StringIO(read_text(path, LARGEST_FILE), newline="")):
            stripped = [each.strip() for each in fields]
            for onnx, vnnlib, *later in ([*stripped, "", ""], [*stripped[1:], "", ""]):
                if vnnlib.removesuffix(".gz").endswith(".vnnlib"):
                    verdict = next((VERDICTS[each.lower()] for each in later if each.lower() in VERDICTS), "")
                    rows.append(ExpectedRow(onnx, vnnlib, verdict))
                    break
    except csv.Error as error:
        raise InputError(f"no table: {error}", path=path) from None
    if not rows:
        raise InputError("no row has a network and a property (.vnnlib) as its first or second two fields", path=path)
    return rows


def _names(onnx: str, vnnlib: str) -> tuple[str, str]:
    return named(onnx).removesuffix(".gz"), Path(vnnlib).name.removesuffix(".gz")


ANSWERS = ("unsat", "sat", "unknown", "timed-out")
"""The answers of results (``Result.answer``), in the order of charts and tables."""

SHORTEST_TIME = 1e-4  # Seconds below which times are not told apart.
_MOST_NAMED = 5  # Instances with unexpected verdicts that a note names.
_MOST_PAIRS = 6  # Pairs of methods that are compared.
_LARGEST_DENOMINATOR = 1_000  # Of a radius that is printed as a fraction.
_HEAD = 2_000  # Characters of a property file in which a comment on the radius is looked for.

_EPS_IN_COMMENT = re.compile(r"^;.*\beps(?:ilon)?\s*[=:]?\s*([0-9./e-]+)", re.IGNORECASE | re.MULTILINE)
_EPS_IN_NAME = re.compile(r"eps_?([0-9]+)_([0-9]+)(?![0-9])|(?:eps_?|_)(0\.[0-9]+)(?![0-9])")

Files = tuple[str, str]
"""An instance: the names of its network and property."""


def is_decided(result: Result) -> bool:
    """Return True for *sat* and *unsat*."""
    return result.answer in ("unsat", "sat")


@dataclass(frozen=True)
class AnswerGroup:
    """Results of one method, about one network or (with an empty name) about all, one for each instance.

    ``eps`` is the radius of all of them, or None.
    """

    network: str
    method: str
    results: Sequence[Result]
    eps: Fraction | None = None

    @property
    def counts(self) -> dict[str, int]:
        """The number of instances with each answer that occurs, in the order of ``ANSWERS``."""
        counts = Counter(result.answer for result in self.results)
        return {answer: counts[answer] for answer in ANSWERS if counts[answer]}

    @property
    def decided(self) -> list[Result]:
        """The results that are *sat* or *unsat*."""
        return [result for result in self.results if is_decided(result)]


@dataclass(frozen=True)
class MethodPair:
    """The instances that two methods were asked about: the methods' names, and pairs of results."""

    names: tuple[str, str]
    results: Sequence[tuple[Result, Result]]

    @property
    def both(self) -> list[tuple[Result, Result]]:
        """The instances that both decide."""
        return [(a, b) for a, b in self.results if is_decided(a) and is_decided(b)]

    @property
    def contrary(self) -> list[tuple[Result, Result]]:
        """The instances with contrary verdicts about one arithmetic."""
        return [(a, b) for a, b in self.both if a.answer != b.answer and a.arithmetic == b.arithmetic]

    def only(self, which: int) -> list[tuple[Result, Result]]:
        """Return the instances that one of the two, 0 or 1, decides alone."""
        return [pair for pair in self.results if is_decided(pair[which]) and not is_decided(pair[1 - which])]

    @property
    def time_ratio(self) -> float | None:
        """The median ratio of the first one's seconds to the second's, where both give the same verdict."""
        ratios = [time_or_limit(a) / time_or_limit(b) for a, b in self.both if a.answer == b.answer]
        return median(ratios) if ratios else None


def time_or_limit(result: Result) -> float:
    """Return the seconds of a decided instance, and the time limit of an undecided one."""
    return max(SHORTEST_TIME, result.seconds if is_decided(result) else result.timeout)


@dataclass(frozen=True)
class CampaignSummary:
    """Counts of the results of a campaign, or of several that are compared, and of expected verdicts."""

    results: Sequence[Result]
    expected: Sequence[ExpectedRow] = ()

    @cached_property
    def names(self) -> Mapping[str, str]:
        """A short name for each verifier: that of its class, with a number where several have the same."""
        names: dict[str, str] = {}
        for verifier in dict.fromkeys(result.verifier for result in self.results):
            method, separator, folder = verifier.partition(IN_FOLDER)
            short = (method.partition("(")[0].lower() or "not asked") + separator + folder
            numbered = (f"{short} {number}" for number in count(2))
            names[verifier] = next(name for name in chain([short], numbered) if name not in names.values())
        return names

    @cached_property
    def instances(self) -> Mapping[Files, Mapping[str, Result]]:
        """For each instance the result of each verifier that was asked."""
        found: dict[Files, dict[str, Result]] = defaultdict(dict)
        for result in self.results:
            found[result.onnx, result.vnnlib][result.verifier] = result
        return found

    @cached_property
    def methods(self) -> Sequence[AnswerGroup]:
        """The answers of each method."""
        return self._groups(lambda result: ("", self.names[result.verifier]))

    @cached_property
    def networks(self) -> Sequence[AnswerGroup]:
        """The answers of each method about each network."""
        return self._groups(lambda result: (named(result.onnx), self.names[result.verifier]))

    @cached_property
    def radii(self) -> Sequence[AnswerGroup]:
        """The answers by network, method and radius, for the properties that state a radius."""
        stated = {vnnlib: radius(vnnlib) for _, vnnlib in self.instances}
        found = self._groups(lambda r: (named(r.onnx), self.names[r.verifier], stated[r.vnnlib]))
        rows = (group for group in found if group.eps is not None)
        return sorted(rows, key=lambda row: (row.network, row.method, row.eps or 0))

    def _groups(self, key: Callable[[Result], tuple[Any, ...]]) -> list[AnswerGroup]:
        """Return the groups of results with the same network, method and perhaps radius, which ``key`` gives."""
        groups: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
        for result in self.results:
            groups[key(result)].append(result)
        return [AnswerGroup(network, method, found, *eps) for (network, method, *eps), found in groups.items()]

    @cached_property
    def stages(self) -> Mapping[tuple[str, str], Sequence[float]]:
        """For each method and stage the seconds of the instances that went through it."""
        seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        for group in self.methods:
            for stage, spent in (item for result in group.results for item in result.stages.items()):
                seconds[group.method, stage].append(spent)
        return seconds

    @property
    def shared_radii(self) -> Sequence[AnswerGroup]:
        """The rows of ``radii`` of networks with several instances of a radius; empty for fewer than two radii."""
        several = {(row.network, row.method) for row in self.radii if len(row.results) > 1}
        rows = [row for row in self.radii if (row.network, row.method) in several]
        return rows if len({row.eps for row in rows}) > 1 else []

    @cached_property
    def pairs(self) -> Sequence[MethodPair]:
        """The first pairs of methods that were asked about the same instances."""
        found = []
        for first, second in combinations(filter(None, self.names), 2):
            both = [(by[first], by[second]) for by in self.instances.values() if first in by and second in by]
            if shared := [(a, b) for a, b in both if a.query and b.query]:
                found.append(MethodPair((self.names[first], self.names[second]), shared))
        return found[:_MOST_PAIRS]

    @cached_property
    def matching(self) -> Mapping[Files, Sequence[ExpectedRow]]:
        """For each instance, of the rows of expected verdicts with its names, those that share most folders with it."""
        rows: dict[tuple[str, str], list[ExpectedRow]] = defaultdict(list)
        for row in self.expected:
            rows[_names(row.onnx, row.vnnlib)].append(row)
        found = {}
        for onnx, vnnlib in self.instances:
            same = rows.get(_names(onnx, vnnlib), [])
            shared = [common_end(row.onnx, onnx) + common_end(row.vnnlib, vnnlib) for row in same]
            found[onnx, vnnlib] = [row for row, count in zip(same, shared, strict=True) if count == max(shared)]
        return found

    @cached_property
    def verdicts(self) -> Mapping[Files, str | None]:
        """The expected verdict of each instance; None without any, and where rows contradict each other."""
        found = {files: {row.verdict for row in rows} - {""} for files, rows in self.matching.items()}
        return {files: verdicts.pop() if len(verdicts) == 1 else None for files, verdicts in found.items()}

    def is_unexpected(self, result: Result) -> bool:
        """Return True if a verdict is contrary to the expected one."""
        return is_decided(result) and self.verdicts[result.onnx, result.vnnlib] not in (None, result.answer)

    @property
    def expected_counts(self) -> Iterator[tuple[str, int, int, int, int]]:
        """For each method its instances with an expected verdict: all, equal, contrary and undecided ones."""
        for group in self.methods:
            if known := [result for result in group.results if self.verdicts[result.onnx, result.vnnlib]]:
                contrary, decided = sum(map(self.is_unexpected, known)), sum(map(is_decided, known))
                yield group.method, len(known), decided - contrary, contrary, len(known) - decided

    @cached_property
    def refuted(self) -> Sequence[Result]:
        """For each instance with a counterexample, the first result that has one."""
        found = ([r for r in by.values() if r.counterexample is not None] for by in self.instances.values())
        return [results[0] for results in found if results]

    @cached_property
    def notes(self) -> Sequence[str]:
        """Sentences about matching rows of expected verdicts, refused certificates, and contrary verdicts."""
        notes = []
        if self.expected:
            # Equal rows count each, which a set of them would not.
            matching = {id(row): row for rows in self.matching.values() for row in rows}.values()
            parts = [counted(len(self.expected), "row"), f"{len(matching)} match an instance"]
            if undecided := sum(not row.verdict for row in matching):
                parts.append(f"{undecided} of these without a verdict")
            if contrary := sum({"sat", "unsat"} <= {row.verdict for row in rows} for rows in self.matching.values()):
                parts.append(f"{counted(contrary, 'instance')} with rows that contradict each other")
            notes.append(f"Expected verdicts: {', '.join(parts)}.")
        asked = [[*by.values()] for by in self.instances.values()]
        if disputed := sum(any(result.disputed for result in results) for results in asked):
            notes.append(f"Verifier and checker disagree on {counted(disputed, 'instance')}: {REFUSED}.")
        sat, unsat = ([{r.arithmetic for r in rs if r.answer == answer} for rs in asked] for answer in ("sat", "unsat"))
        if contrary := sum(not a.isdisjoint(b) for a, b in zip(sat, unsat, strict=True)):
            notes.append(f"Methods contradict each other (sat and unsat) about {counted(contrary, 'instance')}.")
        if wrong := [first[0] for results in asked if (first := [*filter(self.is_unexpected, results)])]:
            shown = [
                f"{Path(r.vnnlib).name} of {named(r.onnx)} is {r.answer}, expected {self.verdicts[r.onnx, r.vnnlib]}"
                for r in wrong[:_MOST_NAMED]
            ]
            shown += [f"{len(wrong) - _MOST_NAMED} more"] if len(wrong) > _MOST_NAMED else []
            verdicts = f"{counted(len(wrong), 'instance')} with another verdict than expected"
            notes.append(f"{verdicts}: {'; '.join(shown)}.")
        return notes

    @cached_property
    def facts(self) -> Mapping[str, str]:
        """The options of methods by their names, and versions by package."""
        found: dict[str, dict[str, None]] = {
            name: {verifier: None} for verifier, name in self.names.items() if verifier
        }
        for package, version in (item for result in self.results for item in result.versions.items()):
            found.setdefault(package, {})[version] = None
        return {name: ", ".join(each) for name, each in found.items()}


def radius(vnnlib: str) -> Fraction | None:
    """Return the radius that a property states, or None; the file need not exist any more.

    A comment at the beginning of the file (``; … eps 1/255``, as ``spec`` writes it) goes before the file's name
    (``…_eps1_255`` or ``…_0.03``).
    """
    texts: list[str] = []
    with contextlib.suppress(InputError):
        texts = _EPS_IN_COMMENT.findall(read_text(on_disk(vnnlib), LARGEST_FILE)[:_HEAD])
    if found := _EPS_IN_NAME.search(Path(vnnlib).name.removesuffix(".gz").removesuffix(".vnnlib")):
        texts.append(found[3] or f"{found[1]}/{found[2]}")
    for text in texts:
        with contextlib.suppress(ValueError):
            return fraction(text)
    return None


def radius_text(eps: Fraction | float) -> str:
    """Return a radius as people write it: a decimal of at most six digits, or ``1/255`` where no such is equal.

    A radius that is neither is rounded to six digits.
    """
    decimal, nearest = f"{float(eps):g}", Fraction(eps).limit_denominator(_LARGEST_DENOMINATOR)
    return str(nearest) if float(nearest) == float(eps) and Fraction(decimal) != nearest else decimal
