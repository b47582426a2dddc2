"""What a page says of a campaign's results: counts, curves and tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from verifiable_relu.campaign.result import Result
from verifiable_relu.report.palette import ANSWERS
from verifiable_relu.report.radius import radius, spelled
from verifiable_relu.report.svg import Axis, Chart, Series
from verifiable_relu.report.table import Cell, Table


def verifier_names(results: Sequence[Result]) -> dict[str, str]:
    """A short name for each verifier: that of its class, and a number where several have the same."""
    names: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for result in results:
        if result.verifier not in names:
            short = result.verifier.partition("(")[0].lower() or "not asked"
            counts[short] += 1
            names[result.verifier] = short if counts[short] == 1 else f"{short} {counts[short]}"
    return names


def asked(results: Sequence[Result]) -> list[Result]:
    """The results with files that could not be read counted for every method, since they were given to all of them.

    Args:
        results: at most one for each verifier and instance; those of files that could not be read have no verifier.
    """
    verifiers = [verifier for verifier in verifier_names(results) if verifier]
    known = {(result.verifier, result.onnx, result.vnnlib) for result in results}
    found = []
    for result in results:
        if result.verifier or not verifiers:
            found.append(result)
            continue
        lacking = (v for v in verifiers if (v, result.onnx, result.vnnlib) not in known)
        found += [replace(result, verifier=verifier) for verifier in lacking]
    return found


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


def answer_style(answer: str) -> int:
    """The number of an answer's colour and marker."""
    return {"unsat": 0, "sat": 1, "timed-out": 4, "unknown": 6}.get(answer, 6)


@dataclass(frozen=True)
class Share:
    """The instances with one answer.

    Attributes:
        answer: the answer, as the commands print it.
        name: the answer in words.
        count: the instances.
        part: the same as a fraction of all.
    """

    answer: str
    name: str
    count: int
    part: float


def shares(results: Sequence[Result]) -> list[Share]:
    """The answers, in the order of the palette."""
    counts = Counter(result.answer for result in results)
    return [
        Share(answer, name, counts[answer], counts[answer] / len(results))
        for answer, (_, name) in ANSWERS.items()
        if counts[answer]
    ]


def by_network(results: Sequence[Result]) -> Table:
    """A row for each network and verifier."""
    names = verifier_names(results)
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((Path(result.onnx).name, names[result.verifier]), []).append(result)
    rows = []
    for (network, verifier), members in groups.items():
        counts = Counter(result.answer for result in members)
        solved = [result.seconds for result in members if result.answer in ("sat", "unsat")]
        rows.append((network, verifier, len(members), *(counts[answer] for answer in ANSWERS), sum(solved),
                     max((result.seconds for result in members), default=0.0)))  # fmt: skip
    heads = [name for _, name in ANSWERS.values()]
    return Table(
        ("network", "method", "instances", *heads, "seconds, decided ones", "slowest, seconds"),
        rows,
        caption="Answers by network",
    )


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
    names = verifier_names(results)
    lines: dict[str, list[Result]] = {}
    for result in results:
        if result.answer in ("sat", "unsat"):
            lines.setdefault(names[result.verifier], []).append(result)
    if not lines:
        return None
    series = []
    for style, (name, members) in enumerate(lines.items()):
        members.sort(key=lambda result: result.seconds)
        points = [(number + 1, max(result.seconds, 1e-4)) for number, result in enumerate(members)]
        tips = [f"{Path(result.vnnlib).name}: {result.seconds:.3g} s" for result in members]
        series.append(Series(name, points, True, tips, style))
    total = max(Counter(names[result.verifier] for result in results).values())
    seconds = [point[1] for one in series for point in one.points]
    about = "; ".join(f"{name}: {len(members)} decided" for name, members in lines.items())
    return Chart(
        "Instances decided within a time limit",
        f"Of {total} instances, {about}.",
        series,
        Axis("instances decided", 0.0, float(total)),
        Axis.over("seconds for each", seconds, log=True),
    )


def margins(results: Sequence[Result]) -> Chart | None:
    """The margins in ascending order, those of one answer with one marker; None where there are none."""
    known = sorted(
        (result for result in results if result.margin is not None and math.isfinite(result.margin)),
        key=lambda result: result.margin or 0.0,
    )
    if not known:
        return None
    series = []
    names = verifier_names(results)
    for verifier, method in names.items():
        of = f", {method}" if len(names) > 1 else ""
        mine = [result for result in known if result.verifier == verifier]
        for answer, (_, name) in ANSWERS.items():
            placed = [(place, result) for place, result in enumerate(mine, 1) if result.answer == answer]
            if placed:
                points = [(float(place), result.margin or 0.0) for place, result in placed]
                tips = [f"{Path(result.vnnlib).name}: {result.margin:.4g}" for _, result in placed]
                series.append(Series(name + of, points, False, tips, answer_style(answer)))
    return Chart(
        "Margins of all instances",
        f"{len(known)} margins from {known[0].margin:.3g} to {known[-1].margin:.3g}: proven lower bounds for what is "
        "verified or undecided, and the margin at the counterexample for what is violated.",
        series,
        Axis("instances, by margin", 0.0, max(len(one) for one in by_method(known).values()) + 1.0),
        Axis.about_zero("margin", [result.margin or 0.0 for result in known]),
    )


@dataclass(frozen=True)
class AtRadius:
    """The answers to the instances of one network, method and radius."""

    network: str
    method: str
    eps: Fraction
    instances: int
    verified: int
    violated: int


def at_radii(results: Sequence[Result]) -> list[AtRadius]:
    """The answers by network, method and radius, for the properties that state a radius."""
    names = verifier_names(results)
    groups: dict[tuple[str, str, Fraction], list[Result]] = {}
    for result in results:
        eps = radius(result.vnnlib)
        if eps is not None:
            groups.setdefault((Path(result.onnx).name, names[result.verifier], eps), []).append(result)
    return [
        AtRadius(*key, len(members), *(sum(r.answer == answer for r in members) for answer in ("unsat", "sat")))
        for key, members in sorted(groups.items())
    ]


def certified(rows: Sequence[AtRadius]) -> Chart | None:
    """The share of instances that is verified against ε, and the share that is not violated.

    Networks whose instances all have different radii have no such share. None for less than two radii.
    """
    lines: dict[tuple[str, str], list[AtRadius]] = {}
    for row in rows:
        lines.setdefault((row.network, row.method), []).append(row)
    lines = {line: members for line, members in lines.items() if any(row.instances > 1 for row in members)}
    rows = [row for members in lines.values() for row in members]
    if len({row.eps for row in rows}) < 2:
        return None
    several = len({method for _, method in lines}) > 1
    series = []
    for style, ((network, method), members) in enumerate(lines.items()):
        name = f"{network}, {method}" if several else network
        for what, share in (("verified", _verified), ("not violated", _not_violated)):
            points = [(float(row.eps), share(row)) for row in members]
            series.append(Series(f"{name}: {what}", points, True, (), style, what != "verified"))
    return Chart(
        "Certified accuracy against the radius",
        "The share of the instances of each radius that is verified, and the share for which no counterexample was "
        "found; the exact share lies between the two.",
        series,
        Axis.over("radius ε", [0.0, *(float(row.eps) for row in rows)]),
        Axis("share of the instances", 0.0, 1.02, percent=True),
    )


def _verified(row: AtRadius) -> float:
    return row.verified / row.instances


def _not_violated(row: AtRadius) -> float:
    return 1 - row.violated / row.instances


def radii_table(rows: Sequence[AtRadius]) -> Table:
    """The numbers of ``certified``."""
    return Table(
        ("network", "method", "ε", "instances", "verified", "violated", "undecided"),
        [
            (row.network, row.method, spelled(row.eps), row.instances, row.verified, row.violated,
             row.instances - row.verified - row.violated)
            for row in rows
        ],
        caption="Answers by radius",
    )  # fmt: skip


def instances(results: Sequence[Result]) -> Table:
    """A row for each instance; where there are several methods, each has columns of its own."""
    names = verifier_names(results)
    if len(names) > 1:
        table = []
        for (onnx, vnnlib), members in by_instance(results).items():
            row: list[Cell] = [Path(vnnlib).name, Path(onnx).name]
            for verifier in names:
                mine = next((result for result in members if result.verifier == verifier), None)
                row += [None] * 4 if mine is None else [mine.answer, mine.seconds, mine.margin, mine.detail]
            table.append(row)
        heads = [f"{what}, {name}" for name in names.values() for what in ("answer", "seconds", "margin", "note")]
        return Table(("property", "network", *heads), table, caption="All instances")
    rows = [
        (
            Path(result.vnnlib).name, Path(result.onnx).name, names[result.verifier], result.answer,
            "" if result.trust is None else str(result.trust), str(result.reason), result.method, result.seconds,
            result.timeout, result.margin, result.unstable, result.detail,
        )
        for result in results
    ]  # fmt: skip
    return Table(
        ("property", "network", "asked", "answer", "trust", "reason", "decided by", "seconds", "limit, seconds",
         "margin", "unstable neurons", "note"),
        rows,
        caption="All instances",
    )  # fmt: skip


def facts(results: Sequence[Result]) -> Mapping[str, str]:
    """What the results were computed with, by name."""
    found: dict[str, dict[str, None]] = {}
    for result in results:
        for package, version in result.versions.items():
            found.setdefault(package, {})[version] = None
    versions = {package: ", ".join(each) for package, each in found.items()}
    return {**dict(_verifiers(results)), **versions}


def _verifiers(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    for given, name in verifier_names(results).items():
        if given:
            yield name, given
