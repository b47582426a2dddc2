"""The figures of a comparison, each written to a file whose suffix decides the format.

The figures need matplotlib (the extra "report"). They are made without pyplot, so that they need no display and leave
no global state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report.estimate import Estimate
from verifiable_relu.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = Sequence[tuple[float, Estimate]]
"""Points (x, estimate of y)."""


def pairs(path: Path, panels: Mapping[str, Mapping[str, tuple[Estimate, Estimate]]], ylabel: str) -> None:
    """Draw panels of bars: two for each entry, before and after, with intervals; there is at least one panel.

    Raises:
        InputError: without matplotlib.
    """
    figure, axes = _panels(len(panels), height=4.2)
    for ax, (title, entries) in zip(axes, panels.items(), strict=True):
        for offset, name in enumerate(("before", "after")):
            chosen = [pair[offset] for pair in entries.values()]
            places = [place + 0.4 * offset - 0.2 for place in range(len(chosen))]
            ax.bar(places, [e.mean for e in chosen], 0.4, yerr=[_half(e) for e in chosen], label=name, capsize=2)
        ax.set_xticks(range(len(entries)), list(entries), rotation=35, ha="right")
        values = [e.mean + side * _half(e) for pair in entries.values() for e in pair for side in (-1, 1)]
        low, high = min(values), max(values)
        # Accuracies are close together, and bars from zero would all look the same.
        room = 0.2 * (high - low) or 0.01
        ax.set_ylim(max(0.0, low - room), min(1.0, high + room))
        ax.set_title(title)
        ax.set_ylabel(ylabel)
        ax.legend(loc="upper left", ncols=2, fontsize="small")
    figure.savefig(path, dpi=120)


def levels(path: Path, panels: Mapping[str, Mapping[str, Series]], xlabel: str, ylabel: str) -> None:
    """Draw panels of points with intervals, a series for each entry; points of the same x are side by side.

    Raises:
        InputError: without matplotlib.
    """
    figure, axes = _panels(len(panels))
    for ax, (title, entries) in zip(axes, panels.items(), strict=True):
        ticks = sorted({x for points in entries.values() for x, _ in points})
        gap = min((b - a for a, b in pairwise(ticks)), default=1.0)
        for number, (name, points) in enumerate(entries.items()):
            # The points are not joined: lines between shifted points would suggest differences that do not exist.
            shift = 0.5 * gap * ((number + 0.5) / len(entries) - 0.5)
            xs = [x + shift for x, _ in points]
            ys = [y.mean for _, y in points]
            ax.errorbar(
                xs, ys, [_half(y) for _, y in points], marker=_mark(number), ms=4, ls="none", capsize=2, label=name
            )
        ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
        ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)


def cactus(path: Path, panels: Mapping[str, Mapping[str, Sequence[float]]], limit: Mapping[str, float]) -> None:
    """Draw a cactus plot: the number of queries (x) that were answered within so many seconds each (y, logarithmic).

    Args:
        path: the file of the figure.
        panels: for each title and name of a line, the seconds of the queries that were answered.
        limit: for each title, the time limit in seconds.

    Raises:
        InputError: without matplotlib.
    """
    figure, axes = _panels(len(panels))
    from matplotlib.ticker import MaxNLocator

    for ax, (title, entries) in zip(axes, panels.items(), strict=True):
        for number, (name, seconds) in enumerate(entries.items()):
            ax.plot(range(1, len(seconds) + 1), sorted(seconds), marker=_mark(number), ms=3, lw=1, label=name)
        ax.axhline(limit[title], color="grey", ls=":")
        ax.set(title=title, xlabel="answered", ylabel="seconds", yscale="log")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)


def profiles(path: Path, panels: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Draw heat maps of λ by layer (y) and epoch (x), with logarithmic colours on one scale for all panels.

    Args:
        path: the file of the figure.
        panels: for each title and epoch, λ of each layer.

    Raises:
        InputError: without matplotlib.
    """
    figure, axes = _panels(len(panels), height=2.6)
    from matplotlib.colors import LogNorm

    everything = [lam for epochs in panels.values() for layers in epochs for lam in layers]
    norm = LogNorm(min(everything), max(everything))
    for ax, (title, epochs) in zip(axes, panels.items(), strict=True):
        depth = len(epochs[0])
        mesh = ax.pcolormesh([[layers[k] for layers in epochs] for k in range(depth)], norm=norm)
        for epoch, layers in enumerate(epochs):
            for k, lam in enumerate(layers):
                ax.text(epoch + 0.5, k + 0.5, f"{lam:.3g}", ha="center", va="center", fontsize=6, color="white",
                        bbox={"facecolor": "black", "alpha": 0.35, "pad": 1, "lw": 0})  # fmt: skip
        ax.set_xticks([e + 0.5 for e in range(len(epochs))], [str(e + 1) for e in range(len(epochs))])
        ax.set_yticks([k + 0.5 for k in range(depth)], [str(k + 1) for k in range(depth)])
        ax.set_title(title, fontsize="small")
        ax.set(xlabel="epoch", ylabel="layer")
    figure.colorbar(mesh, ax=list(axes), label="λ")
    figure.savefig(path, dpi=120)


def _panels(count: int, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InputError('figures need matplotlib: pip install "verifiable-relu[report]"') from error
    columns = count if count < 4 else 2 if count == 4 else 3
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(5 * columns + 1.5, height * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(count)]
    return figure, axes


def _half(value: Estimate) -> float:
    return 0.0 if math.isnan(value.half) else value.half


def _mark(number: int) -> str:
    return "osD^vPX*<>"[number % 10]
