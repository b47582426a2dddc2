"""Statistics of two arms that are compared in pairs: by seed, and by image.

Two sources of chance are told apart. *Seeds* say whether a difference between two ways of training is more than the
chance of one training: the pair is the two networks of one seed, which start from equal weights and see equal data.
*Images* say whether it is more than the chance of the test images: the pair is one image, over all seeds together, so
that an image that is asked of five seeds counts once.

Not-a-number stands for what cannot be computed, such as an interval of one seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import stats

from benchmarks.common.markup import Interval

RESAMPLES = 5000
"""The number of shuffled data sets."""


def interval(values: Sequence[float]) -> Interval:
    """The mean of one or more numbers, one for each seed, with its 95 % interval by Student's t.

    Of normal numbers it holds the true mean in 95 % of cases for any n; a percentile bootstrap does in about 75 % for 3
    seeds, 86 % for 5 and 90 % for 10, since it knows no values but those that there are. It goes with the test
    ``by_seed``: it leaves out zero if and only if the p-value is below 0.05.

    Args:
        values: at least one number.
    """
    given = np.asarray(values, dtype=float)
    mean, n = float(given.mean()), len(given)
    half = _reach(given, 0.975)
    return Interval(mean, mean - half, mean + half, n)


def _reach(given: np.ndarray, quantile: float) -> float:
    """A quantile of Student's t times the standard error of a mean; NaN for one number."""
    n = len(given)
    return float(stats.t.ppf(quantile, n - 1) * given.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan


@dataclass(frozen=True)
class Paired:
    """A difference of two arms over pairs.

    Attributes:
        p: the two-sided p-value of the null hypothesis that the arms do not differ; NaN if it cannot be computed.
        effect: the size of the effect, in the unit that the function which returns it names; its sign is that of the
            difference.
        n: the number of pairs that the test uses.
        test: the name of the test.
    """

    p: float
    effect: float
    n: int
    test: str


def by_seed(differences: Sequence[float]) -> Paired:
    """Student's paired t-test of the differences of two arms, one for each seed.

    A bootstrap would find differences in noise three times as often as it should with five seeds (Colas et al., How
    Many Random Seeds?, arXiv 1806.08295). If all seeds differ by the same number, Student's test has no spread to go
    by, and the exact test takes its place in which each difference's sign is a toss of a coin: with five seeds, its
    p-value is at least 1/16.

    Returns:
        The p-value, with Cohen's d_z as the effect: the mean difference divided by the standard deviation of the
        differences (Lakens, Frontiers in Psychology 4:863, 2013, formula 6). NaN for both for one seed.
    """
    given, n = np.asarray(differences, dtype=float), len(differences)
    if n < 2:
        return Paired(math.nan, math.nan, n, "")
    mean, spread = float(given.mean()), float(given.std(ddof=1))
    if spread <= 1e-12 * abs(mean) or spread == 0:
        p = 1.0 if mean == 0 else 2.0 ** (1 - n)
        return Paired(p, 0.0 if mean == 0 else math.copysign(math.inf, mean), n, "signs")
    p = float(2 * stats.t.sf(abs(mean) / spread * math.sqrt(n), n - 1))
    return Paired(p, mean / spread, n, "paired t")


def equivalence(differences: Sequence[float], margin: float) -> float:
    """The p-value of the null hypothesis that the mean difference of two arms is as large as a margin, or larger.

    Two one-sided paired t-tests over the seeds, the larger of whose p-values counts (Schuirmann, Journal of
    Pharmacokinetics and Biopharmaceutics 15:657, 1987).

    Args:
        differences: one for each seed.
        margin: the least difference that counts as one, above 0.

    Returns:
        The p-value; NaN for one seed. Equal differences, which have no spread to go by, are tested by their signs (as
        in ``by_seed``): with five seeds, the p-value is at least 1/32.
    """
    given, n = np.asarray(differences, dtype=float), len(differences)
    if n < 2:
        return math.nan
    mean, spread = float(given.mean()), float(given.std(ddof=1))
    if spread <= 1e-12 * max(abs(mean), margin):
        return 2.0**-n if abs(mean) < margin else 1.0
    return float(stats.t.sf((margin - abs(mean)) / spread * math.sqrt(n), n - 1))


def least_margin(differences: Sequence[float]) -> float:
    """The margin from which on ``equivalence`` alone is below 0.05: the farther end of the mean's 90 % interval."""
    given = np.asarray(differences, dtype=float)
    return abs(float(given.mean())) + _reach(given, 0.95)


def mcnemar(first: int, second: int) -> Paired:
    """McNemar's exact test of two arms' verdicts on the same images.

    Images on which the arms agree say nothing about their difference. Of the others, either arm has half if they do not
    differ: the p-value is the binomial's (McNemar, Psychometrika 12:153, 1947; exact as in Agresti, Categorical Data
    Analysis, 2013, section 11.1.2).

    Args:
        first: the number of images for which the first arm alone is right.
        second: the same of the second arm.

    Returns:
        The p-value, and as the effect Cohen's g: the first arm's fraction of these images minus ½.
    """
    n = first + second
    if n == 0:
        return Paired(1.0, 0.0, 0, "McNemar")
    return Paired(float(stats.binomtest(first, n, 0.5).pvalue), first / n - 0.5, n, "McNemar")


def wilcoxon(differences: Sequence[float]) -> Paired:
    """Wilcoxon's signed-rank test of differences, one for each image.

    Differences of zero are left out (Wilcoxon, Biometrics Bulletin 1:80, 1945). The p-value is exact for up to 50
    differences without ties, else that of the normal approximation with a correction for ties.

    Returns:
        The p-value, and as the effect the matched-pairs rank-biserial correlation, in [−1, 1]: the fraction of the sum
        of ranks that belongs to positive differences minus that of negative ones (Kerby, Comprehensive Psychology 3,
        2014).
    """
    given = np.asarray(differences, dtype=float)
    given = given[given != 0]
    n = len(given)
    if n == 0:
        return Paired(1.0, 0.0, 0, "Wilcoxon")
    ranks = stats.rankdata(abs(given))
    exact = n <= 50 and len(set(ranks.tolist())) == n
    p = float(stats.wilcoxon(given, method="exact" if exact else "approx").pvalue)
    return Paired(p, float((ranks * np.sign(given)).sum() / ranks.sum()), n, "Wilcoxon")


def par2(seconds: float, decided: bool, limit: float) -> float:
    """The time of a query, in which an undecided one counts as twice its limit (PAR-2).

    A time limit censors times. Counting twice the limit makes a query that either arm decides shorter than one that it
    does not, which is all that a test of ranks needs of censored times if the limits are equal.
    """
    return min(seconds, limit) if decided else 2 * limit


def holm(values: Sequence[float]) -> list[float]:
    """The p-values of a family of claims, corrected so that the chance of one false claim or more is at most that read.

    The k-th smallest of m p-values is multiplied by m + 1 − k, is no smaller than the one before, and at most 1 (Holm,
    Scandinavian Journal of Statistics 6:65, 1979). A claim whose p-value is NaN was declared and not tested: it counts
    among the m, and stays NaN.
    """
    order = sorted(range(len(values)), key=lambda i: (math.isnan(values[i]), values[i]))
    corrected, largest = [math.nan] * len(values), 0.0
    for place, index in enumerate(order):
        if not math.isnan(values[index]):
            largest = max(largest, min(1.0, (len(values) - place) * values[index]))
            corrected[index] = largest
    return corrected


def agreement(profiles: Sequence[Sequence[float]]) -> tuple[float, float, float, float]:
    """The agreement of runs on the order of their layers by λ.

    Args:
        profiles: for each run the λ of each layer.

    Returns:
        The mean, the least and the greatest Spearman correlation over all pairs of runs, and a p-value: the fraction of
        random orders of the layers, drawn for each run, whose mean correlation is as high.
    """
    ranks = stats.rankdata(np.array(profiles), axis=1)
    pairs = list(combinations(range(len(ranks)), 2))
    of = [float(stats.spearmanr(ranks[i], ranks[j]).statistic) for i, j in pairs]
    random = np.random.default_rng(0)
    drawn = random.permuted(np.broadcast_to(ranks, (RESAMPLES, *ranks.shape)), axis=2)
    # Without ties, the mean over pairs is an increasing function of the variance of the layers' summed ranks, as
    # Kendall's W is.
    spread, chance = ranks.sum(0).var(), drawn.sum(1).var(1)
    return statistics.fmean(of), min(of), max(of), float((chance >= spread - 1e-9).sum() + 1) / (RESAMPLES + 1)
