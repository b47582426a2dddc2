"""The figures of a study: certified accuracy against ε, and the first arm beside each other arm."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from benchmarks.common.charts import Axis, Chart, Series, draw
from benchmarks.common.tables import spoken
from benchmarks.study.frames import Study
from benchmarks.study.statistics import scaled
from benchmarks.study.tables import mean, versus
from verifiable_relu.command_line import fraction
from verifiable_relu.report.summary import radius_text as spelled


def write(study: Study, folder: Path) -> list[str]:
    """Draw the figures for which the records suffice into a folder; returns the names of the files."""
    drawn = {f"certified-{network.name}": list(certified(study, network.name)) for network in study.suite.network}
    drawn["versus"] = list(beside(study))
    made = [
        path
        for name, panels in drawn.items()
        if panels
        for path in draw(panels, folder / f"{study.name}-{name}.png", height=2.8 if name == "versus" else 2.5)
    ]
    for path in made:
        if path.suffix != ".png":
            path.unlink()
    return [path.name for path in made if path.suffix == ".png"]


def certified(study: Study, network: str) -> Iterator[Chart]:
    """Certified accuracy against ε, a panel for each objective and weight; points of one radius are side by side."""
    radii = {eps: float(fraction(eps)) for eps in study.suite.architecture(network).eps}
    if len(radii) == 1:
        return
    gap = min(b - a for a, b in pairwise(sorted(radii.values())))
    frame = study.overall[study.overall.network == network]
    for (objective, weight), rows in frame.groupby(["objective", "weight"], sort=False):
        series = []
        arms = study.suite.architecture(network).arms
        for number, arm in enumerate(arms):
            shift = gap / 2 * ((number + 0.5) / len(arms) - 0.5)
            mine = rows[rows.arm == arm]
            known = [(x + shift, mean(mine[mine.eps == eps].certified)) for eps, x in radii.items()]
            points = [(x, value) for x, value in known if value is not None]
            if points:
                # Lines between shifted points would suggest differences that do not exist.
                series.append(Series(spoken(arm), points, joined=False, style=number))
        if series:
            title = f"trained by: {spoken(objective)}" + (f", weight {weight:g}" if weight else "")
            ticks = {x: spelled(x) for x in radii.values()}
            yield Chart(title, series, Axis("radius ε", ticks=ticks), Axis("certified accuracy", percent=True))


def beside(study: Study) -> Iterator[Chart]:
    """Differences in certified accuracy and ratios of times at the middle radius, a colour for each network.

    Grey lines are the margins within which claims call arms equivalent.
    """
    middle = {each.name: each.eps[len(each.eps) // 2] for each in study.suite.network}
    found = [(network, arm, each) for (network, eps, _, arm), each in versus(study) if eps == middle[network]]
    names = list(dict.fromkeys(arm for _, arm, _ in found))
    first = spoken(study.suite.network[0].arms[0])
    for what, measure, axis in (
        ("points", "certified", Axis(f"certified accuracy, {first} − arm, points")),
        ("ratio", "seconds", Axis(f"time, {first} : arm", "log", ends=(0.05, 20))),
    ):
        series = []
        factor = 100.0 if what == "points" else 1.0
        margin = max((claim.margin for claim in study.suite.claim if claim.measure == measure), default=0.0)
        for number, network in enumerate(middle):
            shift = 0.25 * (number - (len(middle) - 1) / 2)
            known = [(each[what], names.index(arm) + shift) for of, arm, each in found if of == network]
            points = [(scaled(v, factor.__mul__), y) for v, y in known if v is not None]
            if points:
                series.append(Series(f"{network}, ε = {middle[network]}", points, joined=False, style=number))
        if not series:
            return
        ends = (-0.6, len(names) - 0.4)
        for x in () if not margin else (-100 * margin, 100 * margin) if what == "points" else (1 / margin, margin):
            series.append(Series("", [(x, y) for y in ends], style=6))
        ticks = {float(place): spoken(arm) for place, arm in enumerate(names)}
        yield Chart(axis.label, series, axis, Axis("", ends=ends, ticks=ticks))
