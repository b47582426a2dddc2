"""Charts of studies: points with intervals, drawn as the package draws its figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.markup import Interval
from verifiable_relu.report.figures import COLOURS, COLUMN, GLYPHS, write_figure
from verifiable_relu.report.figures import ChartAxis as Axis

__all__ = ["Axis", "Chart", "Series", "draw"]

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = [marker for marker in GLYPHS if marker]
LINES = ("-", "--", "-.", ":")

_LARGEST = 1e150
"""The largest number that is drawn; larger ones are drawn there."""


@dataclass(frozen=True)
class Series:
    """Points of one kind.

    Attributes:
        name: in the legend; empty for none.
        points: pairs (x, y), as numbers or as means with their intervals.
        joined: whether a line joins the points.
        tips: a text for each point, shown where the mouse rests on it; empty for none.
        style: the number of the colour and the marker.
        bound: whether what is true lies between the series and the one before it.
    """

    name: str
    points: Sequence[tuple[float | Interval, float | Interval]]
    joined: bool = True
    tips: Sequence[str] = ()
    style: int = 0
    bound: bool = False


@dataclass(frozen=True)
class Chart:
    """A panel of points and lines.

    Attributes:
        title: its name, above it and for readers of screens.
        series: what is drawn, in this order.
        x: the horizontal axis.
        y: the vertical axis.
        about: what it shows, in a sentence, for readers of screens.
    """

    title: str
    series: Sequence[Series]
    x: Axis
    y: Axis
    about: str = ""

    def draw(self, axes: Axes) -> None:
        """Draw the panel."""
        before: list[float] = []
        every: tuple[list[float], list[float]] = [], []
        for number, one in enumerate(self.series):
            points = [(x, y) for x, y in one.points if math.isfinite(_mean(x)) and math.isfinite(_mean(y))]
            xs, ys = ([max(-_LARGEST, min(_mean(point[i]), _LARGEST)) for point in points] for i in (0, 1))
            look: dict[str, Any] = {"color": COLOURS[one.style % 8], "marker": MARKERS[one.style % 8]}
            look["label"] = "" if one.bound else one.name
            if one.joined:
                # Many markers would hide the line.
                look["markevery"] = _every(len(points))
            if one.bound:
                axes.fill_between(xs, before, ys, color=look["color"], alpha=0.15, lw=0)
                look["markerfacecolor"] = "white"
            line = LINES[one.style % len(LINES)] if one.joined else "none"
            if any(isinstance(value, Interval) for point in points for value in point):
                look |= {f"{'xy'[i]}err": _errors([point[i] for point in points]) for i in (0, 1)}
                look |= {"elinewidth": 0.8, "capsize": 1.5}
                axes.errorbar(xs, ys, ls=line, **look)
            else:
                axes.plot(xs, ys, ls=line, gid=f"series{number}", **look)
            before = ys
            every = every[0] + xs, every[1] + ys
        self.x.apply(axes.xaxis, every[0])
        self.y.apply(axes.yaxis, every[1])


def draw(panels: Sequence[Chart], path: Path, width: float = COLUMN, height: float = 2.5) -> list[Path]:
    """Draw panels side by side as PDF and PNG, with one legend below; returns both files."""
    return write_figure([(panel.title, panel.draw) for panel in panels], path, width, height)


def _mean(value: float | Interval) -> float:
    return value.mean if isinstance(value, Interval) else float(value)


def _every(count: int) -> int:
    """The step between the points of a line that have a marker."""
    return max(1, count // 25)


def _errors(values: Sequence[float | Interval]) -> list[list[float]]:
    """The distances of the intervals' ends from the means, below and above; 0 where there is no interval."""
    ends = [
        (v.mean - v.low, v.high - v.mean) if isinstance(v, Interval) and not math.isnan(v.low) else (0.0, 0.0)
        for v in values
    ]
    # The mean of resampled equal numbers can be off by a rounding error.
    return [[max(0.0, end[side]) for end in ends] for side in (0, 1)]
