"""The mean over runs, with its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """The mean over ``n`` runs and half the width of its 95 % interval by Student's t (NaN for one run)."""

    mean: float
    half: float
    n: int

    def __str__(self) -> str:
        form = ".1e" if 0 < abs(self.mean) < 1e-3 else ".4f" if abs(self.mean) < 1 else ".2f"
        return f"{self.mean:{form}}" + ("" if math.isnan(self.half) else f" ± {self.half:{form}}")


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one or more numbers, with its 95 % interval."""
    from scipy import stats

    n = len(values)
    half = stats.t.ppf(0.975, n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(statistics.fmean(values), float(half), n)
