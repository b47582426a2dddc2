"""Charts of studies: points with intervals, stacked bars and heat maps, drawn as the package draws its figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.markup import Interval
from verifiable_relu.report.figures import COLOURS, COLUMN, GLYPHS, HATCHES, write_figure
from verifiable_relu.report.figures import ChartAxis as Axis

__all__ = ["Axis", "Bars", "Chart", "Panel", "Profiles", "Series", "cactus", "draw"]

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
        faint: whether the points matter less than others.
    """

    name: str
    points: Sequence[tuple[float | Interval, float | Interval]]
    joined: bool = True
    tips: Sequence[str] = ()
    style: int = 0
    bound: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """A panel of points and lines.

    Attributes:
        title: its name, above it and for readers of screens.
        series: what is drawn, in this order.
        x: the horizontal axis.
        y: the vertical axis.
        about: what it shows, in a sentence, for readers of screens.
        limit: where a horizontal line is; None for none.
        limit_name: of that line, in the legend; empty for none.
    """

    title: str
    series: Sequence[Series]
    x: Axis
    y: Axis
    about: str = ""
    limit: float | None = None
    limit_name: str = ""

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
                look |= {"elinewidth": 0.8, "capsize": 1.5, "alpha": 0.35 if one.faint else 1.0}
                axes.errorbar(xs, ys, ls=line, **look)
            else:
                axes.plot(xs, ys, ls=line, gid=f"series{number}", **look)
            before = ys
            every = every[0] + xs, every[1] + ys
        if self.limit is not None:
            axes.axhline(self.limit, color="black", lw=0.8, ls=(0, (1, 1)), label=self.limit_name)
        self.x.apply(axes.xaxis, every[0])
        self.y.apply(axes.yaxis, every[1])


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars, each of several parts from left to right.

    Attributes:
        title: above it.
        bars: for each name the lengths of its parts.
        parts: for each part the number of its colour and hatch, and its name.
        label: what the lengths are.
    """

    title: str
    bars: Mapping[str, Sequence[float]]
    parts: Sequence[tuple[int, str]]
    label: str

    def draw(self, axes: Axes) -> None:
        """Draw the panel."""
        for place, lengths in enumerate(self.bars.values()):
            for number, (length, (style, name)) in enumerate(zip(lengths, self.parts, strict=False)):
                axes.barh(
                    place, length, 0.7, sum(lengths[:number]), color=COLOURS[style % 8], hatch=HATCHES[style % 8],
                    edgecolor="white", label=name,
                )  # fmt: skip
        axes.set_yticks(range(len(self.bars)), list(self.bars))
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_xlabel(self.label)


@dataclass(frozen=True)
class Profiles:
    """A panel of λ by layer (y) and epoch (x), as a heat map with logarithmic colours.

    Attributes:
        title: above it.
        epochs: for each epoch, λ of each layer.
        ends: the least and the largest λ of the scale of colours.
    """

    title: str
    epochs: Sequence[Sequence[float]]
    ends: tuple[float, float]

    def draw(self, axes: Axes) -> None:
        """Draw the panel."""
        from matplotlib.colors import LogNorm

        norm, depth = LogNorm(*self.ends), len(self.epochs[0])
        values = [[layers[k] for layers in self.epochs] for k in range(depth)]
        shades = axes.pcolormesh(values, norm=norm, cmap="cividis")
        axes.get_figure().colorbar(shades, ax=axes, label="λ", format="{x:g}")  # type: ignore[union-attr]
        for epoch, layers in enumerate(self.epochs):
            for k, lam in enumerate(layers):
                axes.text(
                    epoch + 0.5, k + 0.5, f"{lam:.3g}", ha="center", va="center", fontsize=6,
                    color="black" if norm(lam) > 0.5 else "white",
                )  # fmt: skip
        axes.grid(False)
        axes.set_xticks([e + 0.5 for e in range(len(self.epochs))], [str(e + 1) for e in range(len(self.epochs))])
        axes.set_yticks([k + 0.5 for k in range(depth)], [str(k + 1) for k in range(depth)])
        axes.set(xlabel="epoch", ylabel="layer")


Panel = Chart | Bars | Profiles


def cactus(title: str, lines: Mapping[str, Sequence[float]], limit: float | None = None) -> Chart:
    """The number of questions (x) that are answered within a number of seconds each (y, logarithmic).

    Args:
        title: above the chart.
        lines: for each name, the seconds of the questions that were answered.
        limit: the time limit in seconds.
    """
    series = [
        Series(name, [(float(number), time) for number, time in enumerate(sorted(seconds), 1)], style=style)
        for style, (name, seconds) in enumerate(lines.items())
    ]
    axes = Axis("questions answered"), Axis("seconds for each", "log")
    return Chart(title, series, *axes, limit=limit, limit_name="time limit")


def draw(panels: Sequence[Panel], path: Path, width: float = COLUMN, height: float = 2.5) -> list[Path]:
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
