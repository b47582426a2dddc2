"""Pareto fronts of clean against certified accuracy, over the objectives and weights with which an arm is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verifiable_relu.report.estimate import Interval
from verifiable_relu.study.joined import Setting, Study
from verifiable_relu.study.numbers import mean, share

_DIGITS = 9
"""The decimals of means that count: fractions of fewer than a million images differ before the ninth decimal."""


@dataclass(frozen=True)
class Point:
    """Clean and certified accuracy of a setting at a radius, over the seeds that have both."""

    setting: Setting
    clean: Interval
    certified: Interval


def fronts(study: Study) -> dict[tuple[str, str, str], list[Point]]:
    """By network, radius and arm: the points of all settings, in the order of the suite."""
    found: dict[tuple[str, str, str], list[Point]] = {}
    for setting, cells in study.settings.items():
        for eps in study.radii(setting.network):
            asked = [cell for cell in cells if cell.complete(eps)]
            clean, certified = mean(asked, share("clean")), mean(asked, share("certified", eps))
            if clean is not None and certified is not None:
                found.setdefault((setting.network, eps, setting.arm), []).append(Point(setting, clean, certified))
    return found


def undominated(points: Sequence[Point]) -> list[Point]:
    """Those of the points whose means no other point's dominate, by their clean accuracy.

    A point dominates another one if it is at least as good in both means, and better in one. Means that differ by
    rounding alone, since the same numbers were added in another order, are equal.
    """
    means = [(round(point.clean.mean, _DIGITS), round(point.certified.mean, _DIGITS)) for point in points]
    kept = [
        point
        for point, (x, y) in zip(points, means, strict=True)
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in means)
    ]
    return sorted(kept, key=lambda point: point.clean.mean)
