"""What a page says of a campaign's results: counts, curves and tables."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from statistics import median
from urllib.parse import quote

from verifiable_relu.arguments import fraction
from verifiable_relu.campaign.result import Result
from verifiable_relu.campaign.store import counterexample_file
from verifiable_relu.errors import InputError
from verifiable_relu.files import on_disk, read_text
from verifiable_relu.report.expected import Expected, common_end, counted
from verifiable_relu.report.figures import ANSWERS, Axis, Bars, Chart, Series
from verifiable_relu.report.table import Cell, Column, Link, Table, spelled, tabulate
from verifiable_relu.spec.find import named

_SOLVED = ("sat", "unsat")
_SHORTEST = 1e-4
"""Seconds below which times are not told apart in charts."""

_NAMED = 5
"""The most instances with unexpected verdicts that a sentence names."""

_PAIRS = 6
"""The most pairs of methods that are compared."""

_COMMENT = re.compile(r"^;.*\beps(?:ilon)?\s*[=:]?\s*([0-9./e-]+)", re.IGNORECASE | re.MULTILINE)
_IMAGE = re.compile(r"^;.*\bimage\s+([0-9]+)", re.IGNORECASE | re.MULTILINE)
_NAME = re.compile(r"eps_?([0-9]+)_([0-9]+)(?![0-9])|(?:eps_?|_)(0\.[0-9]+)(?![0-9])")
_LARGEST = 1 << 26
_HEAD = 2_000
"""The characters of a property file among which the comment is looked for."""

_OF = " in "
"""Between the method and the folder of a campaign, where several are shown beside each other."""

_TICKS = 10
"""An axis of fewer radii names each of them."""


def verifier_names(results: Sequence[Result]) -> dict[str, str]:
    """A short name for each verifier: that of its class, and a number where several have the same."""
    names: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for result in results:
        if result.verifier not in names:
            method, of, folder = result.verifier.partition(_OF)
            short = (method.partition("(")[0].lower() or "not asked") + of + folder
            counts[short] += 1
            names[result.verifier] = short if counts[short] == 1 else f"{short} {counts[short]}"
    return names


def by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each method, by its short name."""
    groups: dict[str, list[Result]] = {}
    names = verifier_names(results)
    for result in results:
        groups.setdefault(names[result.verifier], []).append(result)
    return groups


def by_instance(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """The results about each instance, one for each method that was asked, by the names of network and property."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.onnx, result.vnnlib), []).append(result)
    return groups


def _by_network(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    groups: dict[tuple[str, str], list[Result]] = {}
    names = verifier_names(results)
    for result in results:
        groups.setdefault((named(result.onnx), names[result.verifier]), []).append(result)
    return groups


def shares(results: Sequence[Result]) -> dict[str, int]:
    """The number of instances with each answer that there is, in the order of ``ANSWERS``."""
    counts = Counter(result.answer for result in results)
    return {answer: counts[answer] for answer in ANSWERS if counts[answer]}


def by_network(results: Sequence[Result]) -> Table:
    """A row for each network and verifier."""

    def count(answer: str) -> Column[tuple[tuple[str, str], list[Result]]]:
        return answer, "", lambda row: sum(result.answer == answer for result in row[1])

    return tabulate(
        _by_network(results).items(),
        [
            ("network", "", lambda row: row[0][0]),
            ("verifier", "", lambda row: row[0][1]),
            ("instances", "", lambda row: len(row[1])),
            *map(count, ANSWERS),
            ("seconds, decided ones", "", lambda row: sum(r.seconds for r in row[1] if r.answer in _SOLVED)),
            ("slowest, seconds", "", lambda row: max(r.seconds for r in row[1])),
        ],
        "Answers by network",
    )


def answers(results: Sequence[Result]) -> Bars:
    """The answers by network, and by method where there are several."""
    groups = _by_network(results)
    several = len({method for _, method in groups}) > 1
    bars = {
        ", ".join(key) if several else key[0]: [shares(members).get(answer, 0) for answer in ANSWERS]
        for key, members in groups.items()
    }
    return Bars("", bars, [(style, answer) for answer, style in ANSWERS.items()], "instances")


def stages(results: Sequence[Result]) -> Table:
    """A row for each method and stage: the instances that went through it, and its seconds."""
    spent: dict[tuple[str, str], list[float]] = {}
    for method, members in by_method(results).items():
        for result in members:
            for stage, seconds in result.stages.items():
                spent.setdefault((method, stage), []).append(seconds)
    rows = [(*key, len(each), sum(each), max(each)) for key, each in spent.items()]
    heads = ("method", "stage", "instances", "seconds in all", "most for one, seconds")
    return Table(heads, rows, caption="Where the time went")


def cactus(results: Sequence[Result]) -> Chart | None:
    """The number of instances that are decided within a time limit each; None where nothing is decided."""
    lines = {name: [r for r in members if r.answer in _SOLVED] for name, members in by_method(results).items()}
    lines = {name: sorted(members, key=lambda result: result.seconds) for name, members in lines.items() if members}
    if not lines:
        return None
    series = [
        Series(
            name,
            [(float(number), max(result.seconds, _SHORTEST)) for number, result in enumerate(members, 1)],
            tips=[f"{Path(result.vnnlib).name}: {result.seconds:.3g} s" for result in members],
            style=style,
        )
        for style, (name, members) in enumerate(lines.items())
    ]
    total = max(map(len, by_method(results).values()))
    told = "; ".join(f"{name}: {len(members)} decided" for name, members in lines.items())
    return Chart(
        "Instances decided within a time limit",
        series,
        Axis("instances decided", ends=(0.0, float(total))),
        Axis("seconds for each", "log"),
        f"Of {total} instances, {told}.",
    )


def margins(results: Sequence[Result]) -> Chart | None:
    """The margins in ascending order, those of one answer with one marker; None where there are none."""
    known: dict[str, list[tuple[float, Result]]] = {}
    for method, members in by_method(results).items():
        held = [(r.margin, r) for r in members if r.margin is not None and math.isfinite(r.margin)]
        known[method] = sorted(held, key=lambda pair: pair[0])
    every = [margin for held in known.values() for margin, _ in held]
    if not every:
        return None
    series = []
    for method, held in known.items():
        of = f", {method}" if len(known) > 1 else ""
        for answer, style in ANSWERS.items():
            placed = [(place, *pair) for place, pair in enumerate(held, 1) if pair[1].answer == answer]
            if placed:
                points = [(float(place), margin) for place, margin, _ in placed]
                tips = [f"{Path(result.vnnlib).name}: {margin:.4g}" for _, margin, result in placed]
                series.append(Series(answer + of, points, False, tips, style))
    return Chart(
        "Margins of all instances",
        series,
        Axis("instances, by margin", ends=(0.0, max(map(len, known.values())) + 1.0)),
        Axis("margin", "about zero"),
        f"{len(every)} margins from {min(every):.3g} to {max(every):.3g}: the margin at the "
        "counterexample for sat, otherwise a proven lower bound.",
    )


def about(result: Result) -> Result:
    """A result whose verifier is named by the arithmetic of its question, too, where that is of what runs a network."""
    if result.arithmetic == "real":
        return result
    method, *options = result.verifier.partition("(")
    return replace(result, verifier=f"{method} about {result.arithmetic}{''.join(options)}")


def beside(campaigns: Mapping[Path, Sequence[Result]]) -> list[Result]:
    """The results of several campaigns, whose methods have the names of their folders in theirs.

    An instance of a later campaign is that of an earlier one where their paths are equal, or else where the names of
    their files are and they ask the same; files that could not be read say nothing of what they ask. It is named as the
    first campaign names it.
    """
    short = {folder: folder.resolve().name for folder in campaigns}
    known: dict[str, list[Result]] = {}
    found = []
    for folder, results in campaigns.items():
        name = short[folder] if [*short.values()].count(short[folder]) == 1 else str(folder)
        taken: dict[tuple[str, str], set[int]] = {}
        for result in results:
            property_ = Path(result.vnnlib).name
            same, mine = known.setdefault(property_, []), taken.setdefault((result.verifier, property_), set())
            likely = [(order, i) for i, other in enumerate(same) if i not in mine and (order := unlike(result, other))]
            place = min(likely)[1] if likely else len(same)
            same += [result] if place == len(same) else []
            mine.add(place)
            onnx, vnnlib = _paths(same[place])
            found.append(replace(result, onnx=onnx, vnnlib=vnnlib, verifier=f"{result.verifier}{_OF}{name}"))
    return found


def _paths(result: Result) -> tuple[str, str]:
    return result.onnx, result.vnnlib


def unlike(result: Result, other: Result) -> tuple[bool, int, bool] | None:
    """Order results that may be about one instance, the likeliest first; None where they cannot be.

    Equal paths go before equal ends of paths, these before equal questions: copies of a file ask the same.
    """
    equal = _paths(result) == _paths(other)
    # The network of a property that could not be read was not always searched for.
    names = not (result.onnx and other.onnx) or named(result.onnx) == named(other.onnx)
    asked = result.query == other.query
    if not equal and not (names and (asked or not (result.query and other.query))):
        return None
    return not equal, -common_end(result.vnnlib, other.vnnlib) - common_end(result.onnx, other.onnx), not asked


def _expected(result: Result, expected: Expected) -> str | None:
    return expected.verdict(result.onnx, result.vnnlib)


def _wrong(result: Result, expected: Expected) -> bool:
    return result.answer in _SOLVED and _expected(result, expected) not in (None, result.answer)


def contradicted(results: Sequence[Result]) -> int:
    """The number of instances of which one method says *sat* and another *unsat* about the same arithmetic."""
    given = [{(r.answer, r.arithmetic) for r in members} for members in by_instance(results).values()]
    return sum(any(answer == "sat" and ("unsat", of) in each for answer, of in each) for each in given)


def unexpected(results: Sequence[Result], expected: Expected) -> str:
    """A sentence that counts the instances with an unexpected verdict and names some; empty without any."""
    wrong = [members[0] for members in by_instance([r for r in results if _wrong(r, expected)]).values()]
    if not wrong:
        return ""
    named_ = [
        f"{Path(r.vnnlib).name} of {named(r.onnx)} is {r.answer}, expected {_expected(r, expected)}"
        for r in wrong[:_NAMED]
    ]
    more = [f"{len(wrong) - _NAMED} more"] if len(wrong) > _NAMED else []
    return f"{counted(len(wrong), 'instance')} with another verdict than expected: {'; '.join([*named_, *more])}."


def met(results: Sequence[Result], expected: Expected) -> Table:
    """For each method how its answers stand to the expected verdicts."""

    def right(result: Result) -> bool:
        return _expected(result, expected) == result.answer

    return tabulate(
        by_method([result for result in results if _expected(result, expected)]).items(),
        [
            ("method", "", lambda row: row[0]),
            ("expected verdicts", "", lambda row: len(row[1])),
            ("as expected", "", lambda row: sum(map(right, row[1]))),
            ("other verdict", "", lambda row: sum(_wrong(result, expected) for result in row[1])),
            ("undecided", "", lambda row: sum(result.answer not in _SOLVED for result in row[1])),
        ],
        "Answers against the expected verdicts",
    )


@dataclass(frozen=True)
class Pair:
    """The instances that two methods were asked about.

    Attributes:
        names: of the methods.
        results: for each instance the results of both.
    """

    names: tuple[str, str]
    results: Sequence[tuple[Result, Result]]

    @property
    def both(self) -> list[tuple[Result, Result]]:
        """Where both decide."""
        return [(a, b) for a, b in self.results if a.answer in _SOLVED and b.answer in _SOLVED]

    @property
    def contrary(self) -> list[tuple[Result, Result]]:
        """Where they contradict each other about one arithmetic."""
        return [(a, b) for a, b in self.both if a.answer != b.answer and a.arithmetic == b.arithmetic]

    def only(self, which: int) -> list[tuple[Result, Result]]:
        """Where one of them, 0 or 1, decides alone."""
        return [ab for ab in self.results if ab[which].answer in _SOLVED and ab[1 - which].answer not in _SOLVED]

    def scatter(self) -> Chart | None:
        """The seconds of both, for what one of them decides; None where none decides."""
        groups = {f"both: {answer}": [ab for ab in self.both if ab[0].answer == answer] for answer in _SOLVED}
        groups |= {f"{name} alone": self.only(which) for which, name in enumerate(self.names)}
        series = []
        for style, (name, members) in enumerate(groups.items()):
            points = [(_placed(a), _placed(b)) for a, b in members]
            tips = [f"{Path(a.vnnlib).name}: {a.seconds:.3g} s ({a.answer}), {b.seconds:.3g} s ({b.answer})"
                    for a, b in members]  # fmt: skip
            if points:
                series.append(Series(name, points, False, tips, style))
        every = [_placed(result) for members in groups.values() for both in members for result in both]
        if not every:
            return None
        ends = [(value, value) for value in (min(every), max(every))]
        about = f"{len(self.both)} are decided by both; {self._told()}."
        line = Series("equally fast", ends, style=6)
        first, second = self.names
        title = f"{first} against {second}"
        return Chart(title, [*series, line], Axis(f"seconds, {first}", "log"), Axis(f"seconds, {second}", "log"), about)

    def _told(self) -> str:
        return ", ".join(f"{len(self.only(which))} by {name} alone" for which, name in enumerate(self.names))

    def ratio(self) -> float | None:
        """The median of the first one's seconds divided by the second's, where both decide alike."""
        ratios = [_placed(a) / _placed(b) for a, b in self.both if a.answer == b.answer]
        return median(ratios) if ratios else None


def _placed(result: Result) -> float:
    """The seconds of an instance in a chart; for an undecided one its time limit."""
    return max(_SHORTEST, result.seconds if result.answer in _SOLVED else result.timeout)


def pairs(results: Sequence[Result]) -> list[Pair]:
    """The instances of every two methods that were asked about the same ones."""
    names = {verifier: name for verifier, name in verifier_names(results).items() if verifier}
    by_verifier: dict[str, dict[tuple[str, str], Result]] = {verifier: {} for verifier in names}
    for result in results:
        if result.query and result.verifier:
            by_verifier[result.verifier][result.onnx, result.vnnlib] = result
    found = []
    for first, second in combinations(names, 2):
        shared = [(a, b) for key, a in by_verifier[first].items() if (b := by_verifier[second].get(key)) is not None]
        if shared:
            found.append(Pair((names[first], names[second]), shared))
    return found[:_PAIRS]


def paired(found: Sequence[Pair]) -> Table:
    """A row for each pair of methods."""
    return tabulate(
        found,
        [
            ("first", "", lambda pair: pair.names[0]),
            ("second", "", lambda pair: pair.names[1]),
            ("asked of both", "", lambda pair: len(pair.results)),
            ("both decide", "", lambda pair: len(pair.both)),
            ("first alone", "", lambda pair: len(pair.only(0))),
            ("second alone", "", lambda pair: len(pair.only(1))),
            ("contrary verdicts", "", lambda pair: len(pair.contrary)),
            ("seconds, first ÷ second (median)", "", Pair.ratio),
        ],
        "Two methods each",
    )


def alone(found: Sequence[Pair], shown: Mapping[tuple[str, str], str]) -> Table:
    """What only one of two methods decides, and where they contradict each other; ``shown`` as for ``instances``."""
    rows: list[list[Cell]] = []
    for pair in found:
        told = [(one, 0) for one in [*pair.contrary, *pair.only(0)]] + [(one, 1) for one in pair.only(1)]
        for both, which in told:
            mine, other = both[which], both[1 - which]
            name = Link(Path(mine.vnnlib).name, shown.get((mine.onnx, mine.vnnlib), ""))
            row: list[Cell] = [name, mine.answer, pair.names[which], mine.seconds, pair.names[1 - which], other.answer]
            rows.append([*row, str(other.reason), named(mine.onnx)])
    heads = ("property", "answer", "decided by", "seconds", "the other", "its answer", "its reason", "network")
    return Table(heads, rows, caption="What only one decides")


@dataclass(frozen=True)
class AtRadius:
    """The answers to the instances of one network, method and radius; ``images`` says around which images."""

    network: str
    method: str
    eps: Fraction
    instances: int
    certified: int
    refuted: int
    images: frozenset[str] = frozenset()


def at_radii(results: Sequence[Result]) -> list[AtRadius]:
    """The answers by network, method and radius, for the properties that state a radius."""
    found = []
    for key, members in _by_network(results).items():
        by_radius: dict[Fraction, list[Result]] = {}
        for result in members:
            if (eps := radius(result.vnnlib)) is not None:
                by_radius.setdefault(eps, []).append(result)
        for eps, same in by_radius.items():
            counts, images = shares(same), frozenset(image(result.vnnlib) for result in same)
            found.append(AtRadius(*key, eps, len(same), counts.get("unsat", 0), counts.get("sat", 0), images))
    return sorted(found, key=lambda row: (row.network, row.method, row.eps))


def certified(rows: Sequence[AtRadius]) -> Chart | None:
    """The share of instances that is certified against ε, and the share that is not refuted.

    A line joins the radii at which the same images were asked about. Networks whose instances all have different radii
    have no such share. None for less than two radii.
    """
    lines: dict[tuple[str, str], list[AtRadius]] = {}
    for row in rows:
        lines.setdefault((row.network, row.method), []).append(row)
    lines = {line: members for line, members in lines.items() if any(row.instances > 1 for row in members)}
    radii = sorted({row.eps for members in lines.values() for row in members})
    if len(radii) < 2:
        return None
    several = len({method for _, method in lines}) > 1
    series = []
    for style, (line, members) in enumerate(lines.items()):
        name = ", ".join(line) if several else line[0]
        for number, images in enumerate(dict.fromkeys(row.images for row in members)):
            same = [row for row in members if row.images == images]
            proven = [(float(row.eps), row.certified / row.instances) for row in same]
            standing = [(float(row.eps), 1 - row.refuted / row.instances) for row in same]
            texts = ("", "") if number else (f"{name}: certified", f"{name}: not refuted")
            series.append(Series(texts[0], proven, style=style))
            series.append(Series(texts[1], standing, style=style, bound=True))
    return Chart(
        "Certified accuracy against the radius",
        series,
        Axis("radius ε", ticks={float(eps): spelled(eps) for eps in _apart(radii)} if len(radii) < _TICKS else None),
        Axis("share of the instances", percent=True, ends=(0.0, 1.02)),
        "The share of the instances of each radius that is certified (unsat), and the share that is not refuted (no "
        "counterexample was found); the exact share lies between the two.",
    )


def _apart(radii: Sequence[Fraction]) -> list[Fraction]:
    """Those of at least two sorted radii whose texts have room beside each other at an axis."""
    found = [radii[0]]
    for eps in radii[1:]:
        if eps - found[-1] >= (radii[-1] - radii[0]) / _TICKS:
            found.append(eps)
    return found


def radii_table(rows: Sequence[AtRadius]) -> Table:
    """The numbers of ``certified``."""
    return tabulate(
        rows,
        [
            ("network", "", lambda row: row.network),
            ("method", "", lambda row: row.method),
            ("ε", "", lambda row: spelled(row.eps)),
            ("instances", "", lambda row: row.instances),
            ("certified", "", lambda row: row.certified),
            ("refuted", "", lambda row: row.refuted),
            ("undecided", "", lambda row: row.instances - row.certified - row.refuted),
        ],
        "Answers by radius",
    )


@dataclass(frozen=True)
class Evidence:
    """The files to which a page leads.

    Attributes:
        page: the folder of the page; None for a page without links to files.
        folder: that of the results, from which counterexamples are named; None for several.
    """

    page: Path | None = None
    folder: Path | None = None

    def at(self, file: str | Path) -> Link:
        """The name of a counterexample's file, with its address."""
        return self.link(str(file), self.folder and self.folder / file if file else None)

    def link(self, text: str, file: str | Path | None) -> Link:
        """A text that leads to a file, if there is one."""
        if self.page is None or not file or not os.path.isfile(file):
            return Link(text, "")
        try:
            where = os.path.relpath(file, self.page)
        except ValueError:  # Windows knows no way from one drive to another.
            return Link(text, "")
        return Link(text, "./" + quote(os.fsencode(Path(where).as_posix())))

    def records(self) -> list[Link]:
        """The files of the folder."""
        names = () if self.folder is None else ("records.jsonl", "results.csv")
        return [link for name in names if (link := self.at(name)).address]


NOWHERE = Evidence()
"""Of a page without links to files."""


def instances(
    results: Sequence[Result], shown: Mapping[tuple[str, str], str], expected: Expected, evidence: Evidence = NOWHERE
) -> Table:
    """A row for each instance; where there are several methods, each has columns of its own.

    Args:
        results: the results.
        shown: where counterexamples are shown, by network and property: an address within the page.
        expected: the expected verdicts; without any, there is no column for them.
        evidence: where the files are that rows lead to.
    """

    def asked(onnx: str, vnnlib: str) -> Link:
        name, place = Path(vnnlib).name, shown.get((onnx, vnnlib))
        return Link(name, place) if place else evidence.link(name, on_disk(vnnlib))

    names = verifier_names(results)
    if len(names) > 1:
        rows = []
        for (onnx, vnnlib), members in by_instance(results).items():
            row: list[Cell] = [asked(onnx, vnnlib), named(onnx)]
            row += [_expected(members[0], expected)] if expected.rows else []
            for verifier in names:
                mine = next((result for result in members if result.verifier == verifier), None)
                row += [None] * 4 if mine is None else [mine.answer, mine.seconds, mine.margin, mine.detail]
            rows.append(row)
        heads = [f"{what}, {name}" for name in names.values() for what in ("answer", "seconds", "margin", "note")]
        wanted = ["expected"] if expected.rows else []
        return Table(("property", "network", *wanted, *heads), rows, caption="All instances")
    columns: list[Column[Result]] = [
        ("property", "", lambda result: asked(result.onnx, result.vnnlib)),
        ("answer", "", lambda result: result.answer),
        *([("expected", "", lambda result: _expected(result, expected))] if expected.rows else []),
        ("network", "", lambda result: evidence.link(named(result.onnx), on_disk(result.onnx))),
        ("trust", "", lambda result: "" if result.trust is None else str(result.trust)),
        ("reason", "", lambda result: str(result.reason)),
        ("decided by", "", lambda result: result.method),
        ("seconds", "", lambda result: result.seconds),
        ("processor seconds", "", lambda result: result.processor_seconds),
        ("limit, seconds", "", lambda result: result.timeout),
        ("margin", "", lambda result: result.margin),
        ("unstable neurons", "", lambda result: result.unstable),
        ("counterexample", "", lambda result: evidence.at(counterexample_file(result))),
        *(
            [("certificate", "", lambda result: evidence.link(Path(result.certificate).name, result.certificate))]
            if any(result.certificate for result in results)
            else []
        ),
        ("note", "", lambda result: result.detail),
    ]
    return tabulate(results, columns, "All instances")


def facts(results: Sequence[Result]) -> Mapping[str, str]:
    """What the results were computed with, by name."""
    found: dict[str, dict[str, None]] = {}
    for result in results:
        for package, version in result.versions.items():
            found.setdefault(package, {})[version] = None
    versions = {package: ", ".join(each) for package, each in found.items()}
    named = {name: given for given, name in verifier_names(results).items() if given}
    return {**dict(_conditions(results)), **named, **versions}


def _conditions(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    """When, where and how the results came to be, as far as their records say."""
    for name, said in (
        ("command", [result.command for result in results]),
        ("processor", [result.processor for result in results if result.date]),
    ):
        if any(said):
            yield name, "; ".join(dict.fromkeys(filter(None, said)))
    if dates := sorted(result.date for result in results if result.date):
        yield "date", dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    if spent := [result.processor_seconds for result in results if result.processor_seconds is not None]:
        yield "processor time", f"{sum(spent):.4g} s for {len(spent)} instances"
    if most := max((result.memory or 0 for result in results), default=0):
        yield "memory", f"at most {most / 1e6:.0f} MB in one process"


def radius(vnnlib: str) -> Fraction | None:
    """The radius of a property; None if it is not stated.

    The radius is what a comment at the beginning of the file says (``; … eps 1/255``), as the command ``spec`` writes
    it, or else what the file's name says, ``…_eps1_255`` or ``…_0.03``.

    Args:
        vnnlib: the property file, which need not be there any more.
    """
    for text in _radii(Path(vnnlib)):
        with contextlib.suppress(ValueError):
            return fraction(text)
    return None


def image(vnnlib: str) -> str:
    """What a property is about beside its radius: its file's name without that, or the number that a comment states."""
    name = Path(vnnlib).name.removesuffix(".gz")
    if (found := _NAME.search(name)) is not None:
        return name[: found.start()] + name[found.end() :]
    with contextlib.suppress(InputError):
        found = _IMAGE.search(read_text(on_disk(Path(vnnlib)), _LARGEST)[:_HEAD])
    return name if found is None else f"image {found[1]}"


def _radii(path: Path) -> Iterator[str]:
    with contextlib.suppress(InputError):
        yield from _COMMENT.findall(read_text(on_disk(path), _LARGEST)[:_HEAD])
    name = _NAME.search(path.name.removesuffix(".gz").removesuffix(".vnnlib"))
    if name is not None:
        yield name[3] or f"{name[1]}/{name[2]}"
