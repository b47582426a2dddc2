"""Figures, which matplotlib draws: as SVG in the colours of a page, and as PDF and PNG for papers.

A figure is made of panels: a chart of points and lines, bars of several parts, or a heat map. Series are told apart by
colour, marker and dashes, bars by colour and hatch, so that print without colours will do; the colours are those of
Okabe and Ito, "Color Universal Design" (2008), with grey in place of black. Figures are made without pyplot: they need
no display and leave no global state.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from verifiable_relu.errors import InputError
from verifiable_relu.report.table import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as Drawn

    from verifiable_relu.campaign.result import Result

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a7a7a", "#f0e442")
"""The colours of series, in their order; a page has its own shade of each, the variable ``--c0``, ``--c1`` …"""

MARKERS = "osD^vPX*"
"""The markers of series, by matplotlib's names, in their order."""

GLYPHS = "●■◆▲▼✚✖★"
"""The same markers in text."""

OPEN_GLYPHS = "○□◇△▽✛✕☆"
"""The same markers in text, without a filling."""

HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "--")
"""The hatches of bars, by matplotlib's names, in their order."""

LINES = ("-", "--", "-.", ":")
"""The styles of lines, by matplotlib's names, in their order."""

ANSWERS: Mapping[str, int] = {"unsat": 0, "sat": 1, "unknown": 6, "timed-out": 4}
"""For each answer of ``Result.answer`` the number of its colour, marker and hatch."""

COLUMN = 3.4
"""The width of a paper's column, in inches."""

_PAGE = (6.6, 4.1)
"""Width and height of a chart within a page, in inches of 72 units."""

_MOST = 1e150
"""The largest number that is drawn; larger ones are drawn there."""

_NUMBER = re.compile(r"[0-9]+\.[0-9]{2,}")

_FAR, _WIDEST = 100, 1e6
"""An axis about 0 is logarithmic if half of its values are less than the largest divided by the first number. It then
reaches down to the largest divided by the second number at the least."""

_STYLE: Any = {
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "legend.fontsize": 7.0,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
    # Names of files are no mathematics.
    "text.parse_math": False,
    # Text stays text in a PDF, in fonts that journals take.
    "pdf.fonttype": 42,
}
_STYLE_OF_PAGE: Any = {
    **_STYLE,
    "font.size": 12.0,
    "lines.linewidth": 1.8,
    "lines.markersize": 6.0,
    "xtick.bottom": False,
    "ytick.left": False,
    "svg.fonttype": "none",
}


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
class Axis:
    """An axis.

    Attributes:
        label: what it shows, with the unit.
        scale: ``linear``, ``log``, or ``about zero``: logarithmic on both sides of 0 where most values are far below
            the largest.
        percent: whether its numbers are shown as percentages.
        ends: its first and last value; None for those of the points.
        ticks: the values with a text at the axis, and these texts; empty for round numbers.
    """

    label: str
    scale: str = "linear"
    percent: bool = False
    ends: tuple[float, float] | None = None
    ticks: Mapping[float, str] | None = None

    def applied(self, drawn: Drawn, values: Sequence[float]) -> None:
        """Give an axis of matplotlib label, scale and ticks for these values."""
        from matplotlib import ticker

        drawn.set_label_text(self.label)
        linear = self.linear(values)
        if self.scale == "log" and values:
            drawn.axes.set(**{f"{drawn.axis_name}scale": "log"})  # type: ignore[attr-defined]
            low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
            drawn.set_view_interval(10.0**low, 10.0 ** max(high, low + 1), ignore=True)
        elif linear:
            drawn._set_axes_scale("symlog", linthresh=linear)  # type: ignore[attr-defined]
        if self.scale == "log" or linear:
            drawn.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
            drawn.set_minor_formatter(ticker.NullFormatter())
        elif self.percent:
            drawn.set_major_formatter(ticker.PercentFormatter(1.0))
        elif all(value.is_integer() for value in values):
            drawn.set_major_locator(ticker.MaxNLocator(integer=True))
        if self.ticks is not None:
            drawn.set_ticks(list(self.ticks), labels=list(self.ticks.values()))
        if self.ends is not None:
            drawn.set_view_interval(*self.ends, ignore=True)

    def linear(self, values: Sequence[float]) -> float:
        """For an axis that is logarithmic on both sides of 0, the magnitude below which it is linear; 0 for others."""
        sizes = sorted(abs(value) for value in values if value)
        if self.scale != "about zero" or not sizes or sizes[len(sizes) // 2] >= sizes[-1] / _FAR:
            return 0.0
        return 10.0 ** math.floor(math.log10(max(sizes[len(sizes) // 10], sizes[-1] / _WIDEST)))


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
            xs, ys = ([max(-_MOST, min(_mean(point[i]), _MOST)) for point in points] for i in (0, 1))
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
        self.x.applied(axes.xaxis, every[0])
        self.y.applied(axes.yaxis, every[1])

    def svg(self) -> Markup:
        """The chart within a page, whose colours it takes, with its legend."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        with rc_context({**_STYLE_OF_PAGE, "svg.hashsalt": self.title}):
            figure = Figure(figsize=_PAGE, layout="constrained", frameon=False)
            self.draw(figure.add_subplot(frameon=False))
            for artist in figure.findobj():
                artist.set_clip_on(False)
            text = io.StringIO()
            figure.savefig(text, format="svg", transparent=True)
        drawn = text.getvalue()
        drawn = drawn[drawn.index("<g ", drawn.index("</defs>")) : drawn.rindex("</g>") + 4]
        # Coordinates are rounded, the numbers that readers see are not.
        drawn = re.sub(r"<[^>]+>", lambda tag: _NUMBER.sub(lambda found: f"{float(found[0]):.1f}", tag[0]), drawn)
        # What else than markers and series has a name would have that of another chart; fonts are the page's.
        drawn = re.sub(r' id="(?!m[0-9a-f]{10}"|series)[^"]*"|font(-size|-family)?: [^;"]*(; )?', "", drawn)
        drawn = re.sub(r'</?g>|<!--.*?-->|\s*\n\s*| transform="rotate\(-0 [^"]*"', "", drawn, flags=re.S)
        variables = {colour: f"var(--c{number})" for number, colour in enumerate(COLOURS)}
        variables |= {"#000000": "var(--text)", "#dddddd": "var(--line)", "#ffffff": "var(--page)"}
        drawn = re.sub('#[0-9a-f]{6}(?=[;"])', lambda found: variables.get(found[0], found[0]), drawn)
        for number, one in enumerate(self.series):
            before, _, after = drawn.partition(f'<g id="series{number}">')
            drawn = before + _tipped(after, one.tips[:: _every(len(one.points))] if one.joined else one.tips)
        width, height = (72 * size for size in _PAGE)
        legend = (
            Markup('<li><span class="s{}" aria-hidden="true">{}</span> {}</li>').format(
                one.style % 8, (OPEN_GLYPHS if one.bound else GLYPHS)[one.style % 8], one.name
            )
            for one in self.series
            if one.name
        )
        return Markup(
            '<svg class="chart" viewBox="0 0 {:g} {:g}" role="img"><title>{}</title><desc>{}</desc>{}</svg>'
            '<ul class="legend">{}</ul>'
        ).format(width, height, self.title, self.about, Markup(drawn), Markup("").join(legend))


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
        axes.pcolormesh([[layers[k] for layers in self.epochs] for k in range(depth)], norm=norm, cmap="cividis")
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


def plot_times(results: Mapping[str, Sequence[Result]], ax: Axes | None = None) -> Axes:
    """Plot how many questions (x) are decided within a number of seconds each (y): a cactus plot.

    Args:
        results: for each name in the legend, what ``verify`` returned.
        ax: where to draw; by default pyplot's current axes.

    Returns:
        The axes.
    """
    lines = {name: [one.seconds for one in each if one.verdict != "unknown"] for name, each in results.items()}
    return _plotted(cactus("", lines), ax)


def plot_certified(
    radii: Sequence[Fraction | float | str], results: Mapping[str, Sequence[Sequence[Result]]], ax: Axes | None = None
) -> Axes:
    """Plot the share of images that is certified against the radius, and above it the share that is not violated.

    Args:
        radii: the radii, in ascending order.
        results: for each name in the legend, what ``verify_radii`` returned for them.
        ax: where to draw; by default pyplot's current axes.

    Returns:
        The axes.

    Raises:
        InputError: if there is another number of results than of radii, or a radius without results.
    """
    places = [float(Fraction(radius)) for radius in radii]
    series = []
    for style, (name, each) in enumerate(results.items()):
        if len(each) != len(places) or not all(each):
            raise InputError(f"{name} has results for {sum(map(bool, each))} of {len(places)} radii")
        counts = [Counter(str(one.verdict) for one in found) for found in each]
        certified = [(x, count["unsat"] / count.total()) for x, count in zip(places, counts, strict=True)]
        standing = [(x, 1 - count["sat"] / count.total()) for x, count in zip(places, counts, strict=True)]
        series += [Series(name, certified, style=style), Series("", standing, style=style, bound=True)]
    shown = Chart("", series, Axis("radius ε"), Axis("certified", percent=True, ends=(0.0, 1.02)))
    return _plotted(shown, ax)


def _plotted(chart: Chart, ax: Axes | None) -> Axes:
    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.gca()
    chart.draw(ax)
    ax.legend()
    return ax


def draw(panels: Sequence[Panel], path: Path, width: float = COLUMN, height: float = 2.5) -> list[Path]:
    """Draw panels side by side as PDF and PNG (300 dots per inch), with one legend below; returns both files.

    Args:
        panels: at least one; titles are shown where there are several.
        path: the files' name; its suffix, if it has one, is replaced. The folder is made if it does not exist.
        width: of each panel, in inches.
        height: the same.

    Raises:
        InputError: if a file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        columns = len(panels) if len(panels) < 4 else 2 if len(panels) == 4 else 3
        rows = math.ceil(len(panels) / columns)
        figure = Figure(figsize=(width * columns, height * rows + 0.3), layout="constrained")
        entries: dict[str, Any] = {}
        every = [figure.add_subplot(rows, columns, place + 1) for place in range(len(panels))]
        for axes, panel in zip(every, panels, strict=True):
            panel.draw(axes)
            if len(panels) > 1 and panel.title != axes.get_ylabel():
                axes.set_title(panel.title)
            handles, labels = axes.get_legend_handles_labels()
            if len(labels) > 1:
                entries |= dict(zip(labels, handles, strict=True))
        if isinstance(panels[0], Profiles):
            figure.colorbar(every[0].collections[0], ax=every, label="λ", format="{x:g}")
        if entries:
            # A character of the legend is about 0.055 inches wide; its marker and the gaps, 0.55 inches.
            fits = int(figure.get_figwidth() / (0.55 + 0.055 * max(map(len, entries))))
            below = max(1, min(len(entries), fits))
            figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=below)
        made = [path.with_suffix(".pdf"), path.with_suffix(".png")]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Without the date, equal records give equal files.
            figure.savefig(made[0], metadata={"CreationDate": None})
            figure.savefig(made[1], dpi=300)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", path=path) from None
    return made


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


def _tipped(drawn: str, tips: Sequence[str]) -> str:
    """SVG with texts for its first markers."""
    first, *others = re.split("(?=<use )", drawn)
    told = [
        mark.replace("/>", Markup("><title>{}</title></use>").format(tip), 1)
        for mark, tip in zip(others, tips, strict=False)
    ]
    return "".join([first, *told, *others[len(told) :]])
