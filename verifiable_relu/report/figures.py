"""Figures of campaigns and trainings: SVG in the colours of a page, PDF and PNG for papers, or axes of matplotlib.

Series are told apart by colour and marker, and bars by colour and hatch, so that print without colours suffices. The
colours are from Okabe and Ito, "Color Universal Design" (2008), with grey in place of black. Figures are made without
pyplot: they need no display and leave no global state.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from verifiable_relu.errors import InputError
from verifiable_relu.report.summary import (
    SHORTEST_TIME,
    AnswerGroup,
    CampaignSummary,
    MethodPair,
    time_or_limit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from verifiable_relu.campaign.result import Result

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a7a7a", "#f0e442")
"""The colours of series; a page has its own shade of each, the variable ``--c0``, ``--c1`` …"""

GLYPHS = {"o": "●○", "s": "■□", "D": "◆◇", "^": "▲△", "v": "▼▽", "P": "✚✛", "X": "✖✕", "*": "★☆", "": "—"}
"""The markers of series by matplotlib's names, each as text, filled and hollow; the last one is a line without any."""

HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "--")

ANSWER_STYLES = {"unsat": 0, "sat": 1, "unknown": 6, "timed-out": 4}
"""The number of the colour, marker and hatch of each answer."""

COLUMN = 3.4  # The width of a paper's column, in inches.

_MARKERS = tuple(GLYPHS)
_LINES = ("-", "--", "-.", ":")
_LARGEST = 1e150  # Larger numbers are drawn there.
_MOST_MARKERS = 25  # Of a joined series: more would hide the line.
_WIDE, _WIDEST = 1e2, 1e6  # Largest to median: an axis about 0 is logarithmic from the first on, cut at the second.

_PAPER, _PAGE = (str(Path(__file__).with_name(f"{name}.mplstyle")) for name in ("paper", "page"))


@dataclass(frozen=True)
class Series:
    """Points (x, y) of one kind.

    Colour, dashes and marker are those of the number ``colour``, unless ``marker`` names another one; empty for none.
    """

    name: str  # In the legend; empty for none.
    points: Sequence[tuple[float, float]]
    colour: int = 0
    marker: str | None = None
    joined: bool = True
    upper: bool = False  # The truth lies between this series, whose markers are hollow, and the one before it.

    @property
    def shape(self) -> str:
        """The name of the marker."""
        return _MARKERS[self.colour % 8] if self.marker is None else self.marker


@dataclass(frozen=True)
class ChartAxis:
    """Axis of a chart: its label has the unit."""

    label: str
    scale: str = "linear"  # Or log, or symlog: logarithmic above the median of magnitudes if others are far larger.
    percent: bool = False
    ends: tuple[float, float] | None = None  # None for the ends of the points.
    ticks: Mapping[float, str] | None = None  # Texts by values; None for round numbers.

    def apply(self, axis: Axis, values: Sequence[float]) -> None:
        """Give an axis of matplotlib label, scale and ticks for these values."""
        from matplotlib import ticker

        axis.set_label_text(self.label)
        sizes = sorted(abs(value) for value in values if value)
        set_scale = getattr(axis.axes, f"set_{axis.axis_name}scale")  # type: ignore[attr-defined]
        if self.scale == "log" and sizes:
            set_scale("log")
            first, last = math.floor(math.log10(sizes[0])), math.ceil(math.log10(sizes[-1]))
            axis.set_view_interval(10.0**first, 10.0 ** max(last, first + 1), ignore=True)
        elif self.scale == "symlog" and sizes and sizes[-1] > _WIDE * sizes[len(sizes) // 2]:
            set_scale("symlog", linthresh=max(sizes[len(sizes) // 2], sizes[-1] / _WIDEST))
        if axis.get_scale() != "linear":
            axis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(ticker.NullFormatter())
        elif self.percent:
            axis.set_major_formatter(ticker.PercentFormatter(1.0))
            low, high = axis.get_view_interval()
            axis.set_view_interval(low, min(high, 1.02), ignore=True)
        elif all(value.is_integer() for value in values):
            axis.set_major_locator(ticker.MaxNLocator(integer=True))
        if self.ticks is not None:
            axis.set_ticks(list(self.ticks), labels=list(self.ticks.values()))
        if self.ends is not None:
            axis.set_view_interval(*self.ends, ignore=True)


@dataclass(frozen=True)
class Chart:
    """A panel of points and lines."""

    title: str
    series: Sequence[Series]
    x: ChartAxis
    y: ChartAxis

    @property
    def legend(self) -> list[Series]:
        """The first series of each name that has points; empty if nothing is to be drawn."""
        named = {series.name: series for series in reversed(self.series) if series.name and series.points}
        return list(named.values())[::-1]

    def draw(self, axes: Axes) -> None:
        """Draw the panel."""
        drawn = [np.zeros((0, 2))]
        for series in self.series:
            points = np.array(series.points, float).reshape(-1, 2)
            points = points[np.isfinite(points).all(1)].clip(-_LARGEST, _LARGEST)
            colour, line = COLOURS[series.colour % 8], _LINES[series.colour % 4] if series.joined else "none"
            step = max(1, len(points) // _MOST_MARKERS) if series.joined else 1
            look: dict[str, Any] = {"color": colour, "marker": series.shape, "markevery": step, "ls": line}
            if series.upper:
                axes.fill_between(points[:, 0], drawn[-1][:, 1], points[:, 1], color=colour, alpha=0.15, lw=0)
                look |= {"markerfacecolor": "white", "zorder": 1.9}
            (markers,) = axes.plot(*points.T, label=series.name, **look)
            if series.upper:
                # A larger ring below a filled marker at the same place leaves both visible.
                markers.set_markersize(1.6 * markers.get_markersize())
            drawn.append(points)
        for way, axis, values in zip((self.x, self.y), (axes.xaxis, axes.yaxis), np.concatenate(drawn).T, strict=True):
            way.apply(axis, values.tolist())

    def svg(self) -> Markup:
        """Return the content of an SVG element within a page, whose colours and fonts it takes."""
        from matplotlib import style
        from matplotlib.figure import Figure

        text = io.StringIO()
        with style.context([_PAPER, _PAGE, {"svg.hashsalt": self.title}]):
            figure = Figure(layout="constrained", frameon=False)
            self.draw(figure.add_subplot(frameon=False))
            for artist in figure.findobj():
                artist.set_clip_on(False)
            figure.savefig(text, format="svg", transparent=True)
        drawn = text.getvalue()
        drawn = drawn[drawn.index("<g ", drawn.index("</defs>")) : drawn.rindex("</g>") + 4]
        # Coordinates are rounded, the numbers that readers see are not.
        rounded = re.compile(r"[0-9]+\.[0-9]{2,}")
        drawn = re.sub(r"<[^>]+>", lambda tag: rounded.sub(lambda found: f"{float(found[0]):.1f}", tag[0]), drawn)
        # Other names than those of markers would be those of another chart, too; fonts are the page's.
        drawn = re.sub(r' id="(?!m[0-9a-f]{10}")[^"]*"|font(-size|-family)?: [^;"]*(; )?', "", drawn)
        drawn = re.sub(r'</?g>|<!--.*?-->|\s*\n\s*| transform="rotate\(-0 [^"]*"', "", drawn, flags=re.S)
        variables = {colour: f"var(--c{number})" for number, colour in enumerate(COLOURS)}
        variables |= {"#000000": "var(--text)", "#dddddd": "var(--line)", "#ffffff": "var(--page)"}
        return Markup(re.sub('#[0-9a-f]{6}(?=[;"])', lambda found: variables.get(found[0], found[0]), drawn))


def draw_answers(groups: Sequence[AnswerGroup], axes: Axes) -> None:
    """Draw a bar for each group, with a part for each answer that occurs."""
    from matplotlib import ticker

    several = len({group.method for group in groups}) > 1
    for place, group in enumerate(groups):
        left = 0
        for answer, number in group.counts.items():
            style = ANSWER_STYLES[answer]
            look: dict[str, Any] = {"color": COLOURS[style], "hatch": HATCHES[style], "edgecolor": "white"}
            axes.barh(place, number, 0.7, left, label=answer, **look)
            left += number
    names = [f"{group.network}, {group.method}" if several else group.network for group in groups]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    axes.set_xlabel("instances")


def cactus(groups: Sequence[AnswerGroup]) -> Chart:
    """Return the chart of instances decided within a time limit."""
    series = []
    for colour, group in enumerate(group for group in groups if group.decided):
        times = sorted(max(result.seconds, SHORTEST_TIME) for result in group.decided)
        series.append(Series(group.method, [*enumerate(times, 1)], colour))
    x = ChartAxis("instances decided", ends=(0.0, max((len(group.results) for group in groups), default=1)))
    return Chart("Instances decided within a time limit", series, x, ChartAxis("time [s]", "log"))


def margins(groups: Sequence[AnswerGroup]) -> Chart:
    """Return the chart of margins in ascending order, with a colour for each answer and a marker for each method."""
    series = []
    for place, group in enumerate(groups):
        known = [(r.margin, r.answer) for r in group.results if r.margin is not None and math.isfinite(r.margin)]
        known.sort()
        for answer, style in ANSWER_STYLES.items():
            points = [(n, margin) for n, (margin, given) in enumerate(known, 1) if given == answer]
            name, marker = (f"{answer}, {group.method}", _MARKERS[place % 8]) if len(groups) > 1 else (answer, None)
            series.append(Series(name, points, style, marker, joined=False))
    last = max((x for each in series for x, _ in each.points), default=0) + 1
    x = ChartAxis("instances, by margin", ends=(0.0, last))
    return Chart("Margins of all instances", series, x, ChartAxis("margin", "symlog"))


def certified(rows: Sequence[AnswerGroup]) -> Chart:
    """Return the chart of the certified share, and of the share that is not refuted, against ε."""
    several, series = len({row.method for row in rows}) > 1, []
    for colour, (network, method) in enumerate(dict.fromkeys((row.network, row.method) for row in rows)):
        lower, upper = [], []
        for row in (row for row in rows if (row.network, row.method) == (network, method)):
            proven, refuted = (row.counts.get(answer, 0) / len(row.results) for answer in ("unsat", "sat"))
            lower.append((float(row.eps or 0), proven))
            upper.append((float(row.eps or 0), 1 - refuted))
        name = f"{network}, {method}" if several else network
        series.append(Series(f"{name}: certified", lower, colour))
        series.append(Series("hollow: not refuted", upper, colour, upper=True))
    y = ChartAxis("share of the instances", percent=True, ends=(0.0, 1.02))
    return Chart("Certified accuracy against the radius", series, ChartAxis("radius ε"), y)


def scatter(pair: MethodPair) -> Chart:
    """Return the chart of the seconds of two methods, for the instances that one of them decides."""
    groups = {f"both: {answer}": [ab for ab in pair.both if ab[0].answer == answer] for answer in ("sat", "unsat")}
    groups |= {f"{name} alone": pair.only(which) for which, name in enumerate(pair.names)}
    series = []
    for colour, (name, results) in enumerate(groups.items()):
        points = [(time_or_limit(a), time_or_limit(b)) for a, b in results]
        series.append(Series(name, points, colour, joined=False))
    if times := [time for each in series for point in each.points for time in point]:
        series.append(Series("equal time", [(time, time) for time in (min(times), max(times))], 6, ""))
    x, y = (ChartAxis(f"{name}: time [s]", "log") for name in pair.names)
    return Chart(" against ".join(pair.names), series, x, y)


def training_charts(record: Mapping[str, Any]) -> dict[str, Chart]:
    """Return the charts of a training's record (``page.read_training``), by the names of its numbers."""
    epochs = record["epochs"]

    def curve(name: str, values: Iterable[float], colour: int = 0) -> Series:
        return Series(name, [*enumerate(map(float, values), 1)], colour)

    axes = {
        "loss": ChartAxis("mean loss"),
        "accuracy": ChartAxis("accuracy on training images", percent=True),
        "lam": ChartAxis("λ", "log"),
    }
    lines = {name: [curve(f"training {name}", (epoch[name] for epoch in epochs))] for name in ("loss", "accuracy")}
    layers = zip(*(epoch["lam"] for epoch in epochs), strict=False)
    lines["lam"] = [curve(f"layer {k + 1}", lam, k) for k, lam in enumerate(layers)]
    x = ChartAxis("epoch", ends=(0.0, len(epochs) + 0.5))
    return {name: Chart(axes[name].label, series, x, axes[name]) for name, series in lines.items() if series}


def plot_times(results: Mapping[str, Sequence[Result]], ax: Axes | None = None) -> Axes:
    """Plot how many instances (x) are decided within a number of seconds each (y): a cactus plot.

    ``results`` has for each name in the legend what ``verify`` returned; ``ax``, by default pyplot's current axes, are
    returned.
    """
    return _plotted(cactus([AnswerGroup("", name, each) for name, each in results.items()]), ax)


def plot_certified(
    radii: Sequence[Fraction | float | str], results: Mapping[str, Sequence[Sequence[Result]]], ax: Axes | None = None
) -> Axes:
    """Plot the share of images that is certified against the radius, and above it the share that is not refuted.

    ``radii`` are in ascending order; ``results`` has for each name in the legend what ``verify_radii`` returned for
    them; ``ax``, by default pyplot's current axes, are returned. Raises an InputError if there is another number of
    results than of radii, or a radius without results.
    """
    rows = []
    for name, each in results.items():
        if len(each) != len(radii) or not all(each):
            raise InputError(f"{name} has results for {sum(map(bool, each))} of {len(radii)} radii")
        rows += [AnswerGroup(name, "", found, Fraction(eps)) for eps, found in zip(radii, each, strict=True)]
    return _plotted(certified(rows), ax)


def _plotted(chart: Chart, ax: Axes | None) -> Axes:
    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.gca()
    chart.draw(ax)
    ax.legend()
    return ax


def write_campaign_figures(summary: CampaignSummary, folder: Path) -> list[Path]:
    """Write the figures of a campaign (answers, cactus, certified) as PDF and PNG; returns the files."""
    bars = partial(draw_answers, summary.networks)
    made = write_figure([("", bars)], folder / "answers", height=0.6 + 0.28 * len(summary.networks))
    for name, chart in {"cactus": cactus(summary.methods), "certified": certified(summary.shared_radii)}.items():
        if chart.legend:
            made += write_figure([("", chart.draw)], folder / name, height=2.4)
    return made


def write_training_figures(charts: Mapping[str, Chart], folder: Path) -> list[Path]:
    """Write the curves of a training as one PDF and one PNG; returns the files."""
    shown = [(charts[name].title, charts[name].draw) for name in ("loss", "lam") if name in charts]
    return write_figure(shown, folder / "training", 0.75 * COLUMN, 2.1)


def write_figure(
    panels: Sequence[tuple[str, Callable[[Axes], None]]], path: Path, width: float = COLUMN, height: float = 2.5
) -> list[Path]:
    """Write panels side by side as PDF and PNG (300 dots per inch), with one legend below; returns both files.

    Each panel is a title, shown where there are several panels, and a function that draws; ``width`` and ``height`` are
    inches of each panel. ``path`` is the files' name, whose suffix is replaced; its folder is made if it does not
    exist. Raises an InputError if a file cannot be written.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(_PAPER):
        columns = {4: 2}.get(len(panels), min(len(panels), 3))
        rows = math.ceil(len(panels) / columns)
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        entries: dict[str, Any] = {}
        for place, (title, draw) in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, place)
            draw(axes)
            if len(panels) > 1 and title != axes.get_ylabel():
                axes.set_title(title)
            handles, labels = axes.get_legend_handles_labels()
            if len(labels) > 1:
                entries |= dict(zip(labels, handles, strict=True))
        if entries:
            # A character of the legend is about 0.055 inches wide; its marker and the gaps, 0.55 inches.
            fits = int(figure.get_figwidth() / (0.55 + 0.055 * max(map(len, entries))))
            below = max(1, min(len(entries), fits))
            figure.set_figheight(height * rows + 0.1 + 0.17 * math.ceil(len(entries) / below))
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
