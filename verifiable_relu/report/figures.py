"""Figures for papers: PDF and PNG, readable at the width of a column, told apart without colours.

matplotlib is the extra "report". Figures are made without pyplot, so that they need no display and leave no global
state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiable_relu.campaign.result import Result
from verifiable_relu.errors import InputError, missing
from verifiable_relu.report import campaign, training
from verifiable_relu.report.palette import ANSWERS, COLOURS, HATCHES, LINES, MARKERS
from verifiable_relu.report.svg import Chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN = 3.4
"""The width of a paper's column, in inches."""

_STYLE = {
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
    # Text stays text in a PDF, in fonts that journals take.
    "pdf.fonttype": 42,
}


@contextmanager
def style() -> Iterator[None]:
    """A block in which matplotlib draws as papers want it.

    Raises:
        InputError: without matplotlib.
    """
    try:
        from cycler import cycler
        from matplotlib import rc_context
    except ModuleNotFoundError:
        raise missing("drawing figures", "matplotlib") from None
    settings: Any = {**_STYLE, "axes.prop_cycle": cycler(color=COLOURS)}
    with rc_context(settings):
        yield


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PDF and PNG (300 dots per inch); returns both files.

    Args:
        figure: the figure.
        path: the files' name; its suffix, if it has one, is replaced.

    Raises:
        InputError: if a file cannot be written.
    """
    made = [path.with_suffix(".pdf"), path.with_suffix(".png")]
    # Without the date, equal records give equal files.
    date: Mapping[str, None] = {"CreationDate": None}
    try:
        figure.savefig(made[0], metadata=dict(date))
        figure.savefig(made[1], dpi=300)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", path=path) from None
    return made


def of_campaign(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw the figures of a campaign into a folder; returns the files.

    The figures are the cactus plot, the answers by network, and the certified accuracy where there are two radii.

    Raises:
        InputError: without matplotlib, without results of a campaign, or if a file cannot be written.
    """
    if not results:
        raise InputError("figures are drawn of campaigns and trainings; those of a study lie beside its records")
    _make(folder)
    charts = {"cactus": campaign.cactus(results), "certified": campaign.certified(campaign.at_radii(results))}
    with style():
        made = save(_answers(results), folder / "answers")
        for name, chart in charts.items():
            if chart is not None:
                made += save(_figure([chart], COLUMN, 2.4), folder / name)
    return made


def of_training(record: training.Record, folder: Path) -> list[Path]:
    """Draw loss, λ of each layer and unstable neurons of a training, side by side; returns the files.

    Raises:
        InputError: without matplotlib, or if a file cannot be written.
    """
    _make(folder)
    charts = training.charts(record)
    shown = [charts[name] for name in ("loss", "lam", "unstable") if name in charts]
    with style():
        return save(_figure(shown, 0.75 * COLUMN, 2.1), folder / "training")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder cannot be made: {error.strerror}", path=folder) from None


def _figure(charts: Sequence[Chart], width: float, height: float) -> Figure:
    """Charts side by side, each of this width and height in inches."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(width * len(charts), height), layout="constrained")
    for place, chart in enumerate(charts):
        axes = figure.add_subplot(1, len(charts), place + 1)
        below: list[float] = []
        for one in chart.series:
            xs, ys = ([point[i] for point in one.points] for i in (0, 1))
            look: dict[str, Any] = {
                "color": COLOURS[one.style % len(COLOURS)],
                "marker": MARKERS[one.style % len(MARKERS)],
            }
            if one.hollow:
                # What is true lies between the series and the one before.
                axes.fill_between(xs, below, ys, color=look["color"], alpha=0.15, lw=0)
                continue
            line = LINES[one.style % len(LINES)] if one.joined else "none"
            axes.plot(xs, ys, line, markevery=max(1, len(xs) // 10), label=one.name, **look)
            below = ys
        for axis, of, whole in ((axes.xaxis, chart.x, True), (axes.yaxis, chart.y, False)):
            axis.set_label_text(of.label)
            if of.percent:
                axis.set_major_formatter(PercentFormatter(1.0))
            elif whole and all(float(x).is_integer() for one in chart.series for x, _ in one.points):
                axis.set_major_locator(MaxNLocator(integer=True))
        axes.set_yscale("log" if chart.y.log else "linear")
        if chart.y.percent:
            axes.set_ylim(chart.y.low, chart.y.high)
        if len(chart.series) > 1:
            axes.legend()
    return figure


def _answers(results: Sequence[Result]) -> Figure:
    from matplotlib.figure import Figure

    table = campaign.by_network(results)
    figure = Figure(figsize=(COLUMN, 0.9 + 0.28 * len(table.rows)), layout="constrained")
    axes = figure.add_subplot()
    several = len({row[1] for row in table.rows}) > 1
    labels = [f"{row[0]}, {row[1]}" if several else str(row[0]) for row in table.rows]
    left = [0.0] * len(labels)
    for number, (answer, (colour, name)) in enumerate(ANSWERS.items()):
        cells = [row[3 + list(ANSWERS).index(answer)] for row in table.rows]
        counts = [float(cell) if isinstance(cell, int) else 0.0 for cell in cells]
        if any(counts):
            axes.barh(
                range(len(labels)), counts, left=left, color=colour, hatch=HATCHES[number], edgecolor="white",
                label=name, height=0.7,
            )  # fmt: skip
        left = [before + more for before, more in zip(left, counts, strict=True)]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlabel("instances")
    figure.legend(loc="outside upper center", ncols=4, handlelength=1.4, columnspacing=1.0)
    return figure
