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
    with style():
        made = save(_cactus(results), folder / "cactus") + save(_answers(results), folder / "answers")
        rows = campaign.at_radii(results)
        if len({row.eps for row in rows}) > 1:
            made += save(_certified(rows), folder / "certified")
    return made


def of_training(record: training.Record, folder: Path) -> list[Path]:
    """Draw loss, λ of each layer and unstable neurons of a training, side by side; returns the files.

    Raises:
        InputError: without matplotlib, or if a file cannot be written.
    """
    _make(folder)
    curves = training.curves(record)
    shown = [name for name in ("loss", "lam", "unstable") if name in curves]
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(COLUMN * len(shown) * 0.75, 2.1), layout="constrained")
        for place, name in enumerate(shown):
            axes = figure.add_subplot(1, len(shown), place + 1)
            for number, series in enumerate(curves[name]):
                axes.plot(
                    *zip(*series.points, strict=True), LINES[number % len(LINES)], label=series.name,
                    color=COLOURS[number % 8], marker=MARKERS[number % 8],
                    markevery=max(1, len(series.points) // 8),
                )  # fmt: skip
            axes.set(xlabel="epoch", ylabel=training.LABELS[name], yscale="log" if name == "lam" else "linear")
            if len(curves[name]) > 1:
                axes.legend()
        return save(figure, folder / "training")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder cannot be made: {error.strerror}", path=folder) from None


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(COLUMN, height), layout="constrained")


def _cactus(results: Sequence[Result]) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure = _figure(2.4)
    axes = figure.add_subplot()
    names = campaign.verifier_names(results)
    lines: dict[str, list[float]] = {}
    for result in results:
        if result.answer in ("sat", "unsat"):
            lines.setdefault(names[result.verifier], []).append(max(result.seconds, 1e-4))
    for number, (name, seconds) in enumerate(lines.items()):
        axes.plot(
            range(1, len(seconds) + 1), sorted(seconds), LINES[number % len(LINES)], color=COLOURS[number % 8],
            marker=MARKERS[number % 8], markevery=max(1, len(seconds) // 12), label=name,
        )  # fmt: skip
    axes.set(xlabel="instances decided", ylabel="seconds for each", yscale="log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(lines) > 1:
        axes.legend()
    return figure


def _answers(results: Sequence[Result]) -> Figure:
    table = campaign.by_network(results)
    figure = _figure(0.9 + 0.28 * len(table.rows))
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


def _certified(rows: Sequence[campaign.AtRadius]) -> Figure:
    from matplotlib.ticker import PercentFormatter

    figure = _figure(2.4)
    axes = figure.add_subplot()
    lines: dict[tuple[str, str], list[campaign.AtRadius]] = {}
    for row in rows:
        lines.setdefault((row.network, row.method), []).append(row)
    several = len({method for _, method in lines}) > 1
    for number, ((network, method), members) in enumerate(lines.items()):
        eps = [float(row.eps) for row in members]
        verified = [row.verified / row.instances for row in members]
        upper = [1 - row.violated / row.instances for row in members]
        name = f"{network}, {method}" if several else network
        colour = COLOURS[number % 8]
        axes.plot(eps, verified, LINES[number % 4], color=colour, marker=MARKERS[number % 8], label=name)
        axes.fill_between(eps, verified, upper, color=colour, alpha=0.15, lw=0)
    axes.set(xlabel="radius ε", ylabel="verified instances", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend()
    return figure
