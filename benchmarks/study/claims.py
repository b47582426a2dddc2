"""The claims that a suite declares beforehand, tested as one family, and what the outcomes say in words."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.common.markup import Interval
from benchmarks.common.records import Record
from benchmarks.study.joined import Cell, Setting, Study
from benchmarks.study.outcomes import COSTS, SHARES
from benchmarks.study.statistics import (
    Paired,
    by_seed,
    equivalence,
    holm,
    interval,
    least_margin,
    mcnemar,
    wilcoxon,
)

LEVEL = 0.05
"""The chance of one false claim or more in a family."""


@dataclass(frozen=True)
class Outcome:
    """What the records say on a claim.

    Attributes:
        claim: the claim.
        first: the mean of the arm that the claim is about, over the seeds that both arms have.
        second: the mean of the other arm.
        difference: the mean over the seeds of the first arm's value minus the second's; None without a seed.
        seeds: the test over seeds.
        images: the test over images; None for a measure without a value for each image.
        least: the least margin within which the seeds alone would show the arms to be equivalent, without a correction:
            a difference, or of ``outcomes.COSTS`` a ratio of at least 1; NaN for one seed.
        equivalent: the p-value of the test of equivalence over the seeds; NaN for a claim without a margin.
        corrected: the larger p-value of the two tests of a difference, after Holm's correction over all claims of the
            suite; NaN if there is none.
        corrected_equivalent: ``equivalent`` after Holm's correction over all claims with a margin.
        void: whether the claim is about seconds that cannot be compared (``Study.timed``).
    """

    claim: Record
    first: float
    second: float
    difference: Interval | None
    seeds: Paired
    images: Paired | None
    least: float = math.nan
    equivalent: float = math.nan
    corrected: float = math.nan
    corrected_equivalent: float = math.nan
    void: bool = False

    @property
    def p(self) -> float:
        """The larger p-value of the two tests.

        A claim that a way of training makes a difference must hold over trainings and over images. The larger of two
        p-values is one for the null hypothesis that either test alone would not reject (an intersection-union test,
        Berger, Technometrics 24:295, 1982).
        """
        tests = [self.seeds, *([] if self.images is None else [self.images])]
        return math.nan if any(math.isnan(test.p) for test in tests) else max(test.p for test in tests)

    @property
    def direction(self) -> str:
        """``more`` or ``fewer`` if a difference is shown, else ``not shown``.

        Without a seed of both arms it is ``not measured``, and with one ``not tested``.

        A difference is shown if the corrected p-value is below ``LEVEL``, and if seeds and images agree in its sign.
        """
        if self.difference is None:
            return "not measured"
        if math.isnan(self.corrected):
            return "not tested"
        sign = math.copysign(1, self.difference.mean)
        agree = self.images is None or self.images.effect * sign > 0
        if not (self.corrected < LEVEL and agree):
            return "not shown"
        return "more" if sign > 0 else "fewer"

    @property
    def reading(self) -> str:
        """What the tests say on the claim's expectation.

        A claim that expects no difference is ``equivalent within`` its margin if the test of equivalence shows it, and
        else, as one without a margin always, ``not shown``, unless a difference is shown. A difference that is shown
        and lies within the margin is both.
        """
        if self.void:
            return "void"
        expected, found = self.claim["expected"], self.direction
        within = f"equivalent within {margin_of(self.claim)}" if self.corrected_equivalent < LEVEL else ""
        if found.startswith("not "):
            return within or found
        if found == expected:
            return "shown"
        return f"{within}, {found}" if within else f"refuted: {found}"


def outcomes(study: Study) -> list[Outcome]:
    """The outcomes of all claims of a study, in the suite's order, with corrected p-values."""
    claims = study.suite.get("claims", ())
    found = [replace(outcome(study, each), void=each["measure"] == "seconds" and not study.timed) for each in claims]
    corrected = holm([each.p for each in found])
    bounded = [each for each in found if each.claim.get("margin")]
    equivalent = dict(zip(map(id, bounded), holm([each.equivalent for each in bounded]), strict=True))
    return [
        replace(each, corrected=p, corrected_equivalent=equivalent.get(id(each), math.nan))
        for each, p in zip(found, corrected, strict=True)
    ]


def outcome(study: Study, claim: Record) -> Outcome:
    """The outcome of a claim by itself, without a correction."""
    aim = claim["objective"], claim["weight"]
    first = study.group(Setting(claim["network"], *aim, claim["arm"]))
    second = study.group(Setting(claim.get("against_network") or claim["network"], *aim, claim["against"]))
    measure, eps, method = claim["measure"], claim["eps"], claim["method"]
    pairs: dict[int, tuple[float, float]] = {}
    images: dict[int, list[float]] = defaultdict(list)
    for seed in sorted(first.keys() & second.keys()):
        one, other = first[seed], second[seed]
        if measure in (*SHARES, *COSTS):
            ours, theirs = (by_image(cell, measure, eps, method) for cell in (one, other))
            shared = ours.keys() & theirs.keys()
            for image in shared:
                images[image].append(ours[image] - theirs[image])
            values = [statistics.fmean(side[i] for i in shared) if shared else None for side in (ours, theirs)]
        else:
            values = [cell.value(measure, eps, method) for cell in (one, other)]
        if values[0] is not None and values[1] is not None:
            pairs[seed] = values[0], values[1]
    differences = [a - b for a, b in pairs.values()]
    means = [statistics.fmean(side) for side in zip(*pairs.values(), strict=True)] or [math.nan, math.nan]
    # An image that is asked of several seeds is one pair: seeds share it, and are not independent in it.
    over = [math.fsum(each) for each in images.values()]
    test = None
    if images and measure in SHARES:
        test = mcnemar(sum(d > 0 for d in over), sum(d < 0 for d in over))
    elif images:
        test = wilcoxon([statistics.fmean(each) for each in images.values()])
    if not differences:
        return Outcome(claim, means[0], means[1], None, by_seed(differences), test)
    margin = claim.get("margin") or math.nan
    logs = [math.log(a / b) for a, b in pairs.values()] if measure in COSTS and all(map(min, pairs.values())) else []
    compared, bound = (logs, math.log(margin)) if measure in COSTS else (differences, margin)
    within = least_margin(compared) if len(compared) > 1 else math.nan
    least = math.exp(within) if measure in COSTS else within
    equivalent = math.nan if math.isnan(margin) else equivalence(compared, bound)
    mean, over_seeds = interval(differences), by_seed(differences)
    return Outcome(claim, means[0], means[1], mean, over_seeds, test, least, equivalent)


def by_image(cell: Cell, measure: str, eps: str, method: str) -> Mapping[int, float]:
    """The value of ``SHARES`` or ``COSTS`` for each image; empty if it is unknown."""
    found = cell.costs(measure, eps, method) if measure in COSTS else cell.holds(measure, eps, method)
    return {} if found is None else {image: float(value) for image, value in found.items()}


def margin_of(claim: Record) -> str:
    """The margin of a claim in words: points of a percentage, a ratio or a number."""
    margin, measure = claim["margin"], claim["measure"]
    if measure in COSTS:
        return f"a factor of {margin:g}"
    return f"{100 * margin:g} points" if _form(measure) == ".2%" else f"{margin:g}"


def findings(found: Sequence[Outcome]) -> list[str]:
    """A sentence for each claim: what was claimed, whether it is shown, and by which row of the table of claims."""
    return list(map(_sentence, found))


def other(claim: Record) -> str:
    """The arm with which a claim compares, and its network where that is another one."""
    network = claim.get("against_network")
    return f"{claim['against']}, {network}" if network else str(claim["against"])


def _sentence(found: Outcome) -> str:
    claim = found.claim
    said = f"{claim['says'].rstrip('.')}: **{found.reading}**"
    if found.difference is None:
        return f"{said}; no seed of both arms has been measured (row `{claim['name']}`)."
    tests = f"p = {found.seeds.p:.2g} over {found.seeds.n} seeds"
    if math.isnan(found.seeds.p):
        tests = "one seed is no test"
    elif found.images is not None:
        tests += f" and {found.images.p:.2g} over {found.images.n} images ({found.images.test})"
    if not math.isnan(found.corrected):
        tests += f", {found.corrected:.2g} corrected"
    if not math.isnan(found.equivalent):
        tests += f"; equivalence within {margin_of(claim)}: p = {found.equivalent:.2g}"
        tests += f", {found.corrected_equivalent:.2g} corrected"
    form = _form(claim["measure"])
    return (
        f"{said}; {claim['arm']} {found.first:{form}} against {other(claim)} {found.second:{form}}, "
        f"difference {found.difference:+z{form}}, {tests} (row `{claim['name']}`)."
    )


def _form(measure: str) -> str:
    return ".2%" if measure in SHARES or "clean" in measure or measure in ("int8",) else ".3g"
