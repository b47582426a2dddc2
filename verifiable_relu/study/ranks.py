"""Spearman's rank correlation, with intervals and p-values from resampling."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import stats

RESAMPLES = 5000


@dataclass(frozen=True)
class Rank:
    """Spearman's ρ over n points, its 95 % percentile-bootstrap interval, and its p-value.

    The p-value is the fraction of shuffled data sets whose |ρ| is as large. All numbers are NaN for fewer than three
    points, or if one of the two variables is constant.
    """

    rho: float
    low: float
    high: float
    p: float
    n: int

    @property
    def reading(self) -> str:
        """The sign of ρ in a word if the interval excludes zero and the p-value is below 0.05, else "not shown"."""
        if not (self.p < 0.05 and self.low * self.high > 0):
            return "not shown"
        return "positive" if self.rho > 0 else "negative"


def spearman(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Spearman's ρ of each row of one matrix (m, n) with the same row of the other; NaN where a row is constant."""
    ranks = [stats.rankdata(values, axis=1) - (values.shape[1] + 1) / 2 for values in (one, other)]
    norm = np.sqrt((ranks[0] ** 2).sum(1) * (ranks[1] ** 2).sum(1))
    return np.divide((ranks[0] * ranks[1]).sum(1), norm, out=np.full(len(norm), math.nan), where=norm > 0)


def rank(pairs: Sequence[tuple[float, float]]) -> Rank:
    """Spearman's correlation of the first and the second numbers of pairs; the resampling has a fixed seed."""
    data = np.array(pairs, dtype=float).reshape(-1, 2).T
    n = data.shape[1]
    if n < 3 or (np.ptp(data, axis=1) == 0).any():
        return Rank(math.nan, math.nan, math.nan, math.nan, n)
    (rho,) = spearman(*data[:, None])
    random = np.random.default_rng(0)
    chosen = random.integers(0, n, (RESAMPLES, n))
    low, high = np.nanpercentile(spearman(*(values[chosen] for values in data)), (2.5, 97.5))
    # With few points, the p-value by Student's t would be far too small.
    shuffled = spearman(
        np.broadcast_to(data[0], chosen.shape), random.permuted(data[1][None].repeat(RESAMPLES, 0), axis=1)
    )
    reached = int((abs(shuffled) >= abs(rho) - 1e-9).sum())
    return Rank(float(rho), float(low), float(high), (reached + 1) / (RESAMPLES + 1), n)


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
