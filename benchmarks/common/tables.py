"""Means over few runs as cells of tables, and how well runs agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from benchmarks.common.markup import Interval


@dataclass(frozen=True)
class Estimate(Interval):
    """The mean over n runs and its 95 % interval by Student's t, of which half the width is shown (NaN for one run)."""

    half: float

    SUFFIXES: ClassVar[tuple[str, ...]] = ("", "_half")

    @property
    def numbers(self) -> tuple[float, ...]:
        """The mean and half the width."""
        return self.mean, self.half

    def shown(self, form: str) -> str:
        """Half the width behind the mean, in a format of numbers."""
        return f" ± {self.half:{form}}"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one or more numbers, with its 95 % interval."""
    from scipy import stats

    n, mean = len(values), statistics.fmean(values)
    half = float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(mean, mean - half, mean + half, n, half)


def correlation(profiles: Sequence[Sequence[float]]) -> float:
    """The mean Spearman correlation over all pairs of profiles.

    The result is NaN for one profile, for fewer than 3 layers, and if a profile has the same λ in all layers.
    """
    if len(profiles) < 2 or len(profiles[0]) < 3 or any(len(set(profile)) == 1 for profile in profiles):
        return math.nan
    from scipy import stats

    return statistics.fmean(float(stats.spearmanr(a, b).statistic) for a, b in combinations(profiles, 2))
