"""The figures of a comparison, each written as PDF and as PNG, in the style of ``verifiable_relu.report.figures``.

A panel is as wide as a paper's column. The figures need matplotlib (the extra "report").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiable_relu.report.estimate import Estimate, Interval
from verifiable_relu.report.figures import COLUMN, save, style
from verifiable_relu.report.names import spoken
from verifiable_relu.report.palette import COLOURS, HATCHES, LINES, MARKERS
from verifiable_relu.report.radius import spelled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Spread = Estimate | Interval
"""A mean with its interval."""

Series = Sequence[tuple[float, Spread]]
"""Points (x, mean of y)."""


def pairs(path: Path, panels: Mapping[str, Mapping[str, tuple[Estimate, Estimate]]], ylabel: str) -> None:
    """Draw panels of bars: two for each entry, before and after, with intervals; there is at least one panel.

    Raises:
        InputError: without matplotlib.
    """
    with style():
        figure, axes = _panels(len(panels), height=2.9)
        for ax, (title, entries) in zip(axes, panels.items(), strict=True):
            for offset, name in enumerate(("before", "after")):
                chosen = [pair[offset] for pair in entries.values()]
                places = [place + 0.4 * offset - 0.2 for place in range(len(chosen))]
                ax.bar(
                    places, [e.mean for e in chosen], 0.4, yerr=[_half(e) for e in chosen], label=name, capsize=1.5,
                    color=COLOURS[offset], hatch=HATCHES[offset], edgecolor="white", error_kw={"lw": 0.8},
                )  # fmt: skip
            ax.set_xticks(range(len(entries)), [spoken(name) for name in entries], rotation=35, ha="right")
            values = [e.mean + side * _half(e) for pair in entries.values() for e in pair for side in (-1, 1)]
            low, high = min(values), max(values)
            # Accuracies are close together, and bars from zero would all look the same.
            room = 0.2 * (high - low) or 0.01
            ax.set_ylim(max(0.0, low - room), min(1.0, high + room))
            ax.set_title(spoken(title))
            ax.set_ylabel(ylabel)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=2)
        save(figure, path)


def levels(path: Path, panels: Mapping[str, Mapping[str, Series]], ylabel: str) -> None:
    """Draw panels of points with intervals over radii ε, a series for each entry; points of one radius are side by
    side.

    Raises:
        InputError: without matplotlib.
    """
    with style():
        figure, axes = _panels(len(panels))
        for ax, (title, entries) in zip(axes, panels.items(), strict=True):
            ticks = sorted({x for points in entries.values() for x, _ in points})
            gap = min((b - a for a, b in pairwise(ticks)), default=1.0)
            for number, (name, points) in enumerate(entries.items()):
                # The points are not joined: lines between shifted points would suggest differences that do not exist.
                shift = 0.5 * gap * ((number + 0.5) / len(entries) - 0.5)
                ax.errorbar(
                    [x + shift for x, _ in points], [y.mean for _, y in points], _errors([y for _, y in points]),
                    ls="none", capsize=1.5, label=spoken(name), **_look(number),
                )  # fmt: skip
            ax.set_xticks(ticks, [spelled(x) for x in ticks])
            ax.set(title=spoken(title), xlabel="ε", ylabel=ylabel)
        _legend(figure, axes)
        save(figure, path)


def fronts(
    path: Path, panels: Mapping[str, Mapping[str, Sequence[tuple[Spread, Spread, bool]]]], xlabel: str, ylabel: str
) -> None:
    """Draw panels of points with intervals in both directions; those on each entry's front are joined by a line.

    Args:
        path: the file of the figure.
        panels: for each title and name of a line, its points in the order of x: x, y, and whether the point is on the
            front; others are drawn faintly.
        xlabel: what x is, a fraction.
        ylabel: what y is, a fraction.

    Raises:
        InputError: without matplotlib.
    """
    with style():
        from matplotlib.ticker import PercentFormatter

        figure, axes = _panels(len(panels))
        for ax, (title, entries) in zip(axes, panels.items(), strict=True):
            for number, (name, points) in enumerate(entries.items()):
                for front in (False, True):
                    xs, ys = [x for x, _, on in points if on == front], [y for _, y, on in points if on == front]
                    ax.errorbar(
                        [x.mean for x in xs], [y.mean for y in ys], _errors(ys), _errors(xs), elinewidth=0.7,
                        capsize=1.2, ls=LINES[number % len(LINES)] if front else "none", alpha=1.0 if front else 0.35,
                        label=spoken(name) if front else "", **_look(number),
                    )  # fmt: skip
            ax.set(title=spoken(title), xlabel=xlabel, ylabel=ylabel)
            ax.xaxis.set_major_formatter(PercentFormatter(1.0))
            ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        _legend(figure, axes)
        save(figure, path)


def stacks(path: Path, panels: Mapping[str, Mapping[str, Sequence[float]]], xlabel: str) -> None:
    """Draw panels of horizontal bars, one for each entry, each of the entry's parts from left to right.

    Args:
        path: the file of the figure.
        panels: for each title and name of a bar, the lengths of its parts, which are layers.
        xlabel: what the lengths are.

    Raises:
        InputError: without matplotlib.
    """
    with style():
        figure, axes = _panels(len(panels), height=0.9 + 0.24 * max(map(len, panels.values())))
        for ax, (title, entries) in zip(axes, panels.items(), strict=True):
            for place, parts in enumerate(entries.values()):
                for number, length in enumerate(parts):
                    ax.barh(
                        place, length, 0.7, sum(parts[:number]), color=COLOURS[number % len(COLOURS)],
                        hatch=HATCHES[number % len(HATCHES)], edgecolor="white", label=f"layer {number + 1}",
                    )  # fmt: skip
            names = [spoken(name) for name in entries]
            # Panels side by side mostly have the same bars, which are then named once.
            named = ax.get_subplotspec().is_first_col() or list(entries) != list(next(iter(panels.values())))  # type: ignore[union-attr]
            ax.set_yticks(range(len(names)), names if named else [""] * len(names))
            ax.invert_yaxis()
            ax.grid(False, axis="y")
            ax.set(title=spoken(title), xlabel=xlabel)
        _legend(figure, axes)
        save(figure, path)


def cactus(path: Path, panels: Mapping[str, Mapping[str, Sequence[float]]], limit: Mapping[str, float]) -> None:
    """Draw a cactus plot: the number of queries (x) answered within a number of seconds each (y, logarithmic).

    Args:
        path: the file of the figure.
        panels: for each title and name of a line, the seconds of the queries that were answered.
        limit: for each title, the time limit in seconds.

    Raises:
        InputError: without matplotlib.
    """
    with style():
        from matplotlib.ticker import MaxNLocator

        figure, axes = _panels(len(panels))
        for ax, (title, entries) in zip(axes, panels.items(), strict=True):
            for number, (name, seconds) in enumerate(entries.items()):
                ax.plot(
                    range(1, len(seconds) + 1), sorted(seconds), ls=LINES[number % len(LINES)], label=spoken(name),
                    markevery=max(1, len(seconds) // 12), **_look(number),
                )  # fmt: skip
            ax.axhline(limit[title], color="black", lw=0.8, ls=(0, (1, 1)))
            ax.set(title=spoken(title), xlabel="answered", ylabel="seconds", yscale="log")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(figure, axes)
        save(figure, path)


def profiles(path: Path, panels: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Draw heat maps of λ by layer (y) and epoch (x), with logarithmic colours on one scale for all panels.

    Args:
        path: the file of the figure.
        panels: for each title and epoch, λ of each layer.

    Raises:
        InputError: without matplotlib.
    """
    with style():
        from matplotlib.colors import LogNorm

        figure, axes = _panels(len(panels), height=1.9)
        everything = [lam for epochs in panels.values() for layers in epochs for lam in layers]
        norm = LogNorm(min(everything), max(everything))
        for ax, (title, epochs) in zip(axes, panels.items(), strict=True):
            depth = len(epochs[0])
            mesh = ax.pcolormesh([[layers[k] for layers in epochs] for k in range(depth)], norm=norm, cmap="cividis")
            for epoch, layers in enumerate(epochs):
                for k, lam in enumerate(layers):
                    ax.text(
                        epoch + 0.5, k + 0.5, f"{lam:.3g}", ha="center", va="center", fontsize=6,
                        color="black" if norm(lam) > 0.5 else "white",
                    )  # fmt: skip
            ax.grid(False)
            ax.set_xticks([e + 0.5 for e in range(len(epochs))], [str(e + 1) for e in range(len(epochs))])
            ax.set_yticks([k + 0.5 for k in range(depth)], [str(k + 1) for k in range(depth)])
            ax.set(title=spoken(title), xlabel="epoch", ylabel="layer")
        figure.colorbar(mesh, ax=list(axes), label="λ")
        save(figure, path)


def _panels(count: int, height: float = 2.5) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    columns = count if count < 4 else 2 if count == 4 else 3
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(COLUMN * columns, height * rows + 0.3), layout="constrained")
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(count)]
    return figure, axes


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend below all panels, with each name once."""
    entries = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    # A character of the legend is about 0.055 inches wide; its marker and the gaps, 0.55 inches.
    widest = 0.55 + 0.055 * max(map(len, entries), default=0)
    columns = max(1, min(len(entries), int(figure.get_figwidth() / widest)))
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns)


def _look(number: int) -> dict[str, Any]:
    """The colour and the marker of a series."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def _errors(values: Sequence[Spread]) -> list[list[float]]:
    """The distances of the intervals' ends from the means, below and above; 0 where there is no interval."""
    ends = [(y.low, y.high) if isinstance(y, Interval) else (y.mean - y.half, y.mean + y.half) for y in values]
    known = [(y.mean, y.mean) if math.isnan(low) else (low, high) for y, (low, high) in zip(values, ends, strict=True)]
    # The mean of resampled equal numbers can be off by a rounding error.
    below = [max(0.0, y.mean - low) for y, (low, _) in zip(values, known, strict=True)]
    return [below, [max(0.0, high - y.mean) for y, (_, high) in zip(values, known, strict=True)]]


def _half(value: Estimate) -> float:
    return 0.0 if math.isnan(value.half) else value.half
