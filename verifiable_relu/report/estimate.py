"""The mean over runs with its interval, as a cell of a table."""

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

    SUFFIXES = ("", "_half")
    """What CSV appends to a column's heading, for each of ``numbers``."""

    @property
    def numbers(self) -> tuple[float, float]:
        """The mean and half the width."""
        return self.mean, self.half

    def __format__(self, form: str) -> str:
        form = form or _form(self.mean)
        return f"{self.mean:{form}}" + ("" if math.isnan(self.half) else f" ± {self.half:{form}}")

    def __str__(self) -> str:
        return format(self, "")


@dataclass(frozen=True)
class Interval:
    """The mean of n numbers with the ends of its 95 % interval; both ends are NaN for one number."""

    mean: float
    low: float
    high: float
    n: int

    SUFFIXES = ("", "_low", "_high")
    """What CSV appends to a column's heading, for each of ``numbers``."""

    @property
    def numbers(self) -> tuple[float, float, float]:
        """The mean and the ends."""
        return self.mean, self.low, self.high

    def __format__(self, form: str) -> str:
        form = form or _form(self.mean)
        ends = "" if math.isnan(self.low) else f" [{self.low:{form}}, {self.high:{form}}]"
        return f"{self.mean:{form}}{ends}"

    def __str__(self) -> str:
        return format(self, "")


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one or more numbers, with its 95 % interval."""
    from scipy import stats

    n = len(values)
    half = stats.t.ppf(0.975, n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(statistics.fmean(values), float(half), n)


def _form(mean: float) -> str:
    return ".1e" if 0 < abs(mean) < 1e-3 else ".4f" if abs(mean) < 1 else ".2f"
