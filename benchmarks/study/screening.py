"""Rules that tell early which trainings end well: bands of numbers, chosen on some trainings and tried on others."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

RECALL = 0.8
"""The fraction of good trainings that a rule must keep of those on which it is chosen."""


def band(scores: Sequence[float], good: Sequence[bool], recall: float = RECALL) -> tuple[float, float]:
    """The ends of the band of a number that keeps the fraction ``recall`` of the good trainings, and the fewest others.

    A band has two sides: neither a high nor a low number need be good.

    Args:
        scores: a number for each training; NaN for one that has none, which no band keeps.
        good: whether each ended well.
        recall: the least fraction of the good ones that is kept.

    Returns:
        The lower and the upper end; those of an empty band if too few of the good ones have a number.
    """
    numbers, well = np.asarray(scores, float), np.asarray(good, bool)
    known, ends = np.sort(numbers[~np.isnan(numbers)]), np.sort(numbers[well & ~np.isnan(numbers)])
    need = max(1, math.ceil(recall * well.sum() - 1e-9))
    best, found = -1.0, (math.inf, -math.inf)
    for first in range(len(ends) - need + 1):
        for last in range(first + need - 1, len(ends)):
            low, high = float(ends[first]), float(ends[last])
            inside = np.searchsorted(known, high, "right") - np.searchsorted(known, low, "left")
            hits = np.searchsorted(ends, high, "right") - np.searchsorted(ends, low, "left")
            if hits / inside > best:
                best, found = hits / inside, (low, high)
    return found


@dataclass(frozen=True)
class Screened:
    """What a rule kept of trainings on which it was not chosen.

    Attributes:
        kept: the trainings that it kept.
        hits: the good ones among them.
        good: all good ones.
    """

    kept: int
    hits: int
    good: int

    @property
    def precision(self) -> float:
        """The fraction of good trainings among those that were kept; NaN if none was."""
        return self.hits / self.kept if self.kept else math.nan

    @property
    def recall(self) -> float:
        """The fraction of the good trainings that was kept."""
        return self.hits / self.good if self.good else math.nan

    def __str__(self) -> str:
        if not self.kept:
            return "– / 0"
        from scipy.stats import binomtest

        low, high = binomtest(self.hits, self.kept).proportion_ci(method="wilson")
        return f"{100 * self.precision:.0f} [{100 * low:.0f}, {100 * high:.0f}] / {100 * self.recall:.0f}"


def screened(rule: Sequence[Sequence[float]], good: Sequence[bool], folds: Sequence[Hashable]) -> Screened:
    """Try a rule on the trainings of each fold with the bands that are chosen on all others.

    Args:
        rule: for each of its numbers, which must all lie in their bands, that of each training. Bands of several
            numbers are each chosen for so much recall that they have ``RECALL`` together if they are independent.
        good: whether each training ended well.
        folds: the fold of each training, such as its seed: no rule is tried on a seed on which it was chosen.
    """
    numbers, well = np.asarray(rule, float), np.asarray(good, bool)
    of = np.array([list(dict.fromkeys(folds)).index(fold) for fold in folds])
    kept = np.zeros(len(well), bool)
    for fold in range(of.max() + 1):
        held_out = of == fold
        within = held_out.copy()
        for number in numbers:
            low, high = band(number[~held_out], well[~held_out], RECALL ** (1 / len(numbers)))
            within &= (number >= low) & (number <= high)
        kept |= within
    return Screened(int(kept.sum()), int((kept & well).sum()), int(well.sum()))
