"""Counts of a campaign's results: answers by method, network and radius, and every two methods compared."""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain, combinations, count
from pathlib import Path
from statistics import median

from verifiable_relu.arguments import fraction
from verifiable_relu.campaign.result import REFUSED, Result
from verifiable_relu.errors import InputError
from verifiable_relu.files import on_disk, read_text
from verifiable_relu.report.results import IN_FOLDER, LARGEST_FILE, ExpectedVerdicts, counted
from verifiable_relu.spec.find import named

ANSWERS = ("unsat", "sat", "unknown", "timed-out")
"""The answers of results (``Result.answer``), in the order of charts and tables."""

SHORTEST_TIME = 1e-4  # Seconds below which times are not told apart.
_MOST_NAMED = 5  # Instances with unexpected verdicts that a note names.
_MOST_PAIRS = 6  # Pairs of methods that are compared.
_LARGEST_DENOMINATOR = 1_000  # Of a radius that is printed as a fraction.
_HEAD = 2_000  # Characters of a property file in which comments on radius and image are looked for.

_EPS_IN_COMMENT = re.compile(r"^;.*\beps(?:ilon)?\s*[=:]?\s*([0-9./e-]+)", re.IGNORECASE | re.MULTILINE)
_IMAGE_IN_COMMENT = re.compile(r"^;.*\bimage\s+([0-9]+)", re.IGNORECASE | re.MULTILINE)
_EPS_IN_NAME = re.compile(r"eps_?([0-9]+)_([0-9]+)(?![0-9])|(?:eps_?|_)(0\.[0-9]+)(?![0-9])")

Files = tuple[str, str]
"""An instance: the names of its network and property."""


def is_decided(result: Result) -> bool:
    """Return True for *sat* and *unsat*."""
    return result.answer in ("unsat", "sat")


@dataclass(frozen=True)
class AnswerGroup:
    """Results of one method, about one network or (with an empty name) about all, one for each instance."""

    network: str
    method: str
    results: Sequence[Result]

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
class RadiusCounts:
    """Counts of the instances of one network, method and radius, which are about ``images``."""

    network: str
    method: str
    eps: Fraction
    instances: int
    certified: int
    refuted: int
    images: frozenset[str] = frozenset()


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
    def differences(self) -> list[tuple[Result, str, Result, str]]:
        """Results with contrary verdicts or of one method alone: result, method, and those of the other."""
        pairs = [
            *((0, pair) for pair in self.contrary),
            *((which, pair) for which in (0, 1) for pair in self.only(which)),
        ]
        return [(pair[i], self.names[i], pair[1 - i], self.names[1 - i]) for i, pair in pairs]

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
    expected: ExpectedVerdicts = ExpectedVerdicts()  # noqa: RUF009 -- frozen

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
        return self._groups(lambda result: "")

    @cached_property
    def networks(self) -> Sequence[AnswerGroup]:
        """The answers of each method about each network."""
        return self._groups(lambda result: named(result.onnx))

    def _groups(self, network: Callable[[Result], str]) -> list[AnswerGroup]:
        groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
        for result in self.results:
            groups[network(result), self.names[result.verifier]].append(result)
        return [AnswerGroup(*key, results) for key, results in groups.items()]

    @cached_property
    def stages(self) -> Mapping[tuple[str, str], Sequence[float]]:
        """For each method and stage the seconds of the instances that went through it."""
        seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        for group in self.methods:
            for stage, spent in (item for result in group.results for item in result.stages.items()):
                seconds[group.method, stage].append(spent)
        return seconds

    @cached_property
    def radii(self) -> Sequence[RadiusCounts]:
        """The answers by network, method and radius, for the properties that state a radius."""
        found: dict[tuple[str, str, Fraction], list[Result]] = defaultdict(list)
        for result in self.results:
            if (eps := radius(result.vnnlib)) is not None:
                found[named(result.onnx), self.names[result.verifier], eps].append(result)
        rows = []
        for key, same in sorted(found.items(), key=lambda item: item[0]):
            counts = Counter(result.answer for result in same)
            images = frozenset(image(result.vnnlib) for result in same)
            rows.append(RadiusCounts(*key, len(same), counts["unsat"], counts["sat"], images))
        return rows

    @property
    def shared_radii(self) -> Sequence[RadiusCounts]:
        """The rows of ``radii`` of networks with several instances of a radius; empty for fewer than two radii."""
        several = {(row.network, row.method) for row in self.radii if row.instances > 1}
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
    def verdicts(self) -> Mapping[Files, str | None]:
        """The expected verdict of each instance, or None."""
        return {files: self.expected.verdict(*files) for files in self.instances}

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
        notes = [self.expected.summary([*self.instances])] if self.expected.rows else []
        asked = [[*by.values()] for by in self.instances.values()]
        if disputed := sum(any(result.disputed for result in results) for results in asked):
            notes.append(f"Verifier and checker disagree on {counted(disputed, 'instance')}: {REFUSED}.")
        if contrary := sum(map(_contradict, asked)):
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
        """Conditions of the campaign by name: commands, processors, dates, options of methods, versions."""
        found: dict[str, dict[str, None]] = defaultdict(dict)
        for result in self.results:
            for package, version in result.versions.items():
                found[package][version] = None
        versions = {package: ", ".join(each) for package, each in found.items()}
        verifiers = {name: verifier for verifier, name in self.names.items() if verifier}
        return {**_conditions(self.results), **verifiers, **versions}


def _contradict(results: Sequence[Result]) -> bool:
    """Return True if one method says *sat* and another *unsat* about the same arithmetic."""
    given = {(result.answer, result.arithmetic) for result in results}
    return any(answer == "sat" and ("unsat", arithmetic) in given for answer, arithmetic in given)


def _conditions(results: Sequence[Result]) -> dict[str, str]:
    """Return when, where and how the results were computed, as far as their records say."""
    dated = [result for result in results if result.date]
    dates = sorted(result.date for result in dated)
    spent = [result.processor_seconds for result in results if result.processor_seconds is not None]
    most = max((result.memory or 0 for result in results), default=0)
    conditions = {
        "command": "; ".join(dict.fromkeys(filter(None, (result.command for result in results)))),
        "processor": "; ".join(dict.fromkeys(filter(None, (result.processor for result in dated)))),
        "date": " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])),
        "processor time": f"{sum(spent):.4g} s for {counted(len(spent), 'instance')}" if spent else "",
        "memory": f"at most {most / 1e6:.0f} MB in one process" if most else "",
    }
    return {name: value for name, value in conditions.items() if value}


def radius(vnnlib: str) -> Fraction | None:
    """Return the radius that a property states, or None.

    A comment at the beginning of the file (``; … eps 1/255``, as ``spec`` writes it) goes before the file's name
    (``…_eps1_255`` or ``…_0.03``). The file need not exist any more.
    """
    texts = _EPS_IN_COMMENT.findall(_head(vnnlib))
    if found := _EPS_IN_NAME.search(Path(vnnlib).name.removesuffix(".gz").removesuffix(".vnnlib")):
        texts.append(found[3] or f"{found[1]}/{found[2]}")
    for text in texts:
        with contextlib.suppress(ValueError):
            return fraction(text)
    return None


def image(vnnlib: str) -> str:
    """Return the name of what a property is about: its file's name without radius, or the image of its comment."""
    name = Path(vnnlib).name.removesuffix(".gz")
    if _EPS_IN_NAME.search(name):
        return _EPS_IN_NAME.sub("", name, count=1)
    found = _IMAGE_IN_COMMENT.search(_head(vnnlib))
    return name if found is None else f"image {found[1]}"


def _head(vnnlib: str) -> str:
    """Return the beginning of a property file; empty if it cannot be read."""
    with contextlib.suppress(InputError):
        return read_text(on_disk(vnnlib), LARGEST_FILE)[:_HEAD]
    return ""


def radius_text(eps: Fraction | float) -> str:
    """Return a radius as people write it: a decimal of at most six digits, or ``1/255`` where no such is equal.

    A radius that is neither is rounded to six digits.
    """
    decimal, nearest = f"{float(eps):g}", Fraction(eps).limit_denominator(_LARGEST_DENOMINATOR)
    return str(nearest) if float(nearest) == float(eps) and Fraction(decimal) != nearest else decimal
