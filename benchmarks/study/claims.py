"""The claims that a suite declares beforehand, tested as one family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd

from benchmarks.common.markup import Interval
from benchmarks.study.frames import Study
from benchmarks.study.measures import COSTS, SHARES
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
from benchmarks.study.suite import Claim

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
            a difference, or of costs a ratio of at least 1; NaN for one seed.
        equivalent: the p-value of the test of equivalence over the seeds; NaN for a claim without a margin.
        corrected: the larger p-value of the two tests of a difference, after Holm's correction over all claims.
        corrected_equivalent: ``equivalent`` after Holm's correction over all claims with a margin.
    """

    claim: Claim
    first: float
    second: float
    difference: Interval | None
    seeds: Paired
    images: Paired | None
    least: float = math.nan
    equivalent: float = math.nan
    corrected: float = math.nan
    corrected_equivalent: float = math.nan

    @property
    def p(self) -> float:
        """The larger p-value of the two tests.

        A claim that a way of training makes a difference must hold over trainings and over images. The larger of two
        p-values is one for the null hypothesis that either test alone would not reject (an intersection-union test,
        Berger, Technometrics 24:295, 1982).
        """
        ps = [self.seeds.p, *([] if self.images is None else [self.images.p])]
        return math.nan if any(map(math.isnan, ps)) else max(ps)

    @property
    def reading(self) -> str:
        """What the tests say on the claim's expectation.

        A difference is shown if the corrected p-value is below ``LEVEL``, and seeds and images agree in its sign. A
        claim that expects no difference is ``equivalent`` if the test of equivalence within its margin shows it.
        """
        within = f"equivalent within {self.claim.margin:g}" if self.corrected_equivalent < LEVEL else ""
        if self.difference is None or math.isnan(self.corrected):
            return within or ("not measured" if self.difference is None else "not tested")
        sign = math.copysign(1, self.difference.mean)
        agree = self.images is None or self.images.effect * sign > 0
        if not (self.corrected < LEVEL and agree):
            return within or "not shown"
        found = "more" if sign > 0 else "fewer"
        if found == self.claim.expected:
            return "shown"
        return f"{within}, {found}" if within else f"refuted: {found}"


def outcomes(study: Study) -> list[Outcome]:
    """The outcomes of all claims of a study, in the suite's order, with corrected p-values."""
    found = [outcome(study, claim) for claim in study.suite.claim]
    bounded = [number for number, each in enumerate(found) if each.claim.margin]
    equivalent = dict(zip(bounded, holm([found[number].equivalent for number in bounded]), strict=True))
    return [
        replace(each, corrected=p, corrected_equivalent=equivalent.get(number, math.nan))
        for number, (each, p) in enumerate(zip(found, holm([each.p for each in found]), strict=True))
    ]


def cells_of(study: Study, network: str, objective: str, weight: float | None, arm: str) -> pd.Series[str]:
    """The names of the trained cells of a setting, by seed."""
    frame = study.trained
    where = (frame.network == network) & (frame.objective == objective) & (frame.weight == weight) & (frame.arm == arm)
    return pd.Series(frame.index[where], index=frame.seed[where])


def outcome(study: Study, claim: Claim) -> Outcome:
    """The outcome of a claim by itself, without a correction."""
    group = partial(cells_of, study, objective=claim.objective, weight=claim.weight)
    first = group(network=claim.network, arm=claim.arm)
    second = group(network=claim.against_network or claim.network, arm=claim.against)
    pairs, images = [], []
    for seed in sorted(set(first.index) & set(second.index)):
        if claim.measure in (*SHARES, *COSTS):
            sides = [study.by_image(cells[seed], claim.measure, claim.eps, claim.method) for cells in (first, second)]
            ours, theirs = sides[0].align(sides[1], join="inner")
            images.append(ours - theirs)
            pair = ours.mean(), theirs.mean()
        else:
            pair = (
                study.value(first[seed], claim.measure, claim.eps),
                study.value(second[seed], claim.measure, claim.eps),
            )
        if not any(map(math.isnan, pair)):
            pairs.append(pair)
    test = over_images(claim.measure, images)
    if not pairs:
        return Outcome(claim, math.nan, math.nan, None, by_seed([]), test)
    values = np.array(pairs)
    differences, margin = values[:, 0] - values[:, 1], claim.margin or math.nan
    compared, bound = differences, margin
    if claim.measure in COSTS:
        compared, bound = (np.log(values[:, 0] / values[:, 1]) if values.all() else np.empty(0)), math.log(margin)
    least = least_margin(compared) if len(compared) > 1 else math.nan
    return Outcome(
        claim,
        float(values[:, 0].mean()),
        float(values[:, 1].mean()),
        interval(differences),
        by_seed(differences),
        test,
        math.exp(least) if claim.measure in COSTS else least,
        math.nan if math.isnan(margin) else equivalence(compared, bound),
    )


def over_images(measure: str, differences: Sequence[pd.Series[float]]) -> Paired | None:
    """The test over images of the differences of each seed; None without an image.

    An image that is asked of several seeds is one pair: seeds share it, and are not independent in it.
    """
    every = pd.concat(differences) if differences else pd.Series(dtype=float)
    if every.empty:
        return None
    means = every.groupby(level=0).mean()
    if measure in SHARES:
        return mcnemar(int((means > 0).sum()), int((means < 0).sum()))
    return wilcoxon(means.tolist())
