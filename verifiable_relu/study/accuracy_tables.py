"""Tables of a study's accuracies: the main table, the declared claims, differences between arms, Pareto fronts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from verifiable_relu.report.estimate import Interval
from verifiable_relu.report.table import Cell as Value
from verifiable_relu.report.table import Table
from verifiable_relu.study.claims import Outcome, other
from verifiable_relu.study.joined import Cell, Setting, Study, proves
from verifiable_relu.study.numbers import difference, mean, result, share, unstable

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


def seeds(study: Study, setting: Setting, cells: Sequence[Cell]) -> str:
    """How many seeds are trained of how many, and how many failed: such as ``4 of 5, 1 failed``."""
    failed = study.failed(setting)
    return f"{len(cells)} of {study.planned(setting.network)}" + (f", {failed} failed" if failed else "")


def main_table(study: Study) -> Table:
    """Clean, attacked and certified accuracy by setting and radius, on the asked images."""
    methods = [method for method in study.methods if proves(method)]
    shares = ("clean", "attacked", *(f"certified, {method}" for method in methods))
    rows: list[Sequence[Value]] = []
    for setting, cells in study.settings.items():
        for eps in study.radii(setting.network):
            answered = sum(cell.complete(eps) for cell in cells)
            rows.append(
                (
                    *(*setting, eps, seeds(study, setting, cells), answered),
                    mean(cells, share("clean")),
                    mean(cells, share("attacked", eps)),
                    *(mean(cells, share("certified", eps, method)) for method in methods),
                    mean(cells, result("clean_test")),
                )
            )
    columns = (*Setting._fields, "ε", "seeds", "answered", *shares, "clean, test set")
    caption = "Clean, attacked and certified accuracy: means over the seeds with 95 % bootstrap intervals."
    return Table(columns, rows, dict.fromkeys((*shares, "clean, test set"), ".1%"), caption)


def claim_table(found: Sequence[Outcome]) -> Table:
    """The claims that the suite declares, with both tests and Holm's correction over all of them."""
    columns: tuple[str, ...] = ("claim", *Setting._fields, "against", "measure", "ε", "method", "expected")
    columns += ("of arm", "of the other", "difference", "seeds", "d_z", "p, seeds")
    columns += ("images", "effect, images", "p, images", "p, corrected", "outcome")
    rows: list[Sequence[Value]] = []
    for each in found:
        claim, images = each.claim, each.images
        rows.append(
            (
                *(claim["name"], claim["network"], claim["objective"], claim["weight"], claim["arm"], other(claim)),
                *(claim["measure"], claim["eps"], claim["method"], claim["expected"]),
                *(each.first, each.second, each.difference, each.seeds.n, each.seeds.effect, each.seeds.p),
                *((None, None, None) if images is None else (images.n, images.effect, images.p)),
                *(each.corrected, each.reading),
            )
        )
    return Table(columns, rows, caption="The claims that were declared beforehand, and what the records say on them.")


def pareto_table(study: Study) -> Table:
    """Clean against certified accuracy of each arm over objectives and weights; dominated settings are marked."""
    rows: list[Sequence[Value]] = []
    for (network, eps, arm), points in fronts(study).items():
        kept = undominated(points)
        for point in points:
            setting = point.setting
            rows.append(
                (
                    *(network, eps, arm, setting.objective, setting.weight, point.clean.n, point.clean),
                    *(point.certified, "front" if point in kept else "dominated"),
                )
            )
    columns = ("network", "ε", "arm", "objective", "weight", "seeds", "clean", "certified", "of its arm")
    caption = "Clean against certified accuracy (by any method) over the objectives' weights."
    return Table(columns, rows, dict.fromkeys(("clean", "certified"), ".1%"), caption)


def difference_table(study: Study) -> Table:
    """Each arm with a hardness minus each other arm of the same objective and weight, paired by seed.

    These differences were not declared beforehand. They describe, and carry no p-value.
    """
    rows: list[Sequence[Value]] = []
    for setting, cells in study.settings.items():
        rivals = [arm for arm in study.arms(setting.network) if arm != setting.arm and not study.hardened(arm)]
        for eps, rival in product(study.radii(setting.network), rivals if study.hardened(setting.arm) else ()):
            others = study.group(setting._replace(arm=rival))
            pairs = [(cell, others[cell.seed]) for cell in cells if cell.seed in others]
            if pairs:
                numbers = (share("clean"), share("attacked", eps), share("certified", eps), unstable(eps))
                rows.append((*setting, rival, eps, len(pairs), *(difference(pairs, value) for value in numbers)))
    shares = ("Δ clean", "Δ attacked", "Δ certified")
    columns = (*Setting._fields, "minus", "ε", "seeds", *shares, "Δ unstable")
    caption = "Differences between arms, paired by seed; certified by any method. Not declared beforehand."
    return Table(columns, rows, {**dict.fromkeys(shares, "+z.2%"), "Δ unstable": "+z.1f"}, caption)
