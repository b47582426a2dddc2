"""The figures of a study, as PDF and PNG in the style of ``report.figures``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.common.charts import Axis, Bars, Chart, Panel, Profiles, Series, cactus, draw
from benchmarks.common.markup import spoken
from benchmarks.study.joined import Cell, Setting, Study
from benchmarks.study.tables import common, decides, fronts, mean, undominated
from verifiable_relu.arguments import fraction
from verifiable_relu.report.summary import radius_text as spelled

DOMINATED = "faint: dominated"
"""What a legend says of settings that another of their arm surpasses in both accuracies."""


def write(study: Study, folder: Path) -> list[Path]:
    """Draw the figures of a study, as many as its records suffice for, into a folder.

    Returns:
        The files.

    Raises:
        InputError: if a file cannot be written.
    """
    drawn: list[Path] = []
    for name, make in FIGURES.items():
        for network in study.networks:
            panels = list(make(study, network))
            if panels:
                bars = [len(panel.bars) for panel in panels if isinstance(panel, Bars)]
                height = 1.9 if name == "profiles" else 0.9 + 0.24 * max(bars) if bars else 2.5
                drawn += draw(panels, folder / f"{name}-{network}.png", height=height)
    return drawn


def _settings(study: Study, network: str) -> list[tuple[Setting, Sequence[Cell]]]:
    return [(setting, cells) for setting, cells in study.settings.items() if setting.network == network]


def _first(study: Study, network: str) -> list[tuple[Setting, Sequence[Cell]]]:
    """The settings of a network's first objective and weight."""
    every = _settings(study, network)
    return [each for each in every if each[0][:3] == every[0][0][:3]]


def certified(study: Study, network: str) -> Iterator[Panel]:
    """Certified accuracy against ε, a panel for each objective and weight; points of one radius are side by side.

    A single radius makes no curve: its accuracies are in the tables.
    """
    radii = {eps: float(fraction(eps)) for eps in study.radii(network)}
    gap = min((b - a for a, b in pairwise(sorted(radii.values()))), default=0.0)
    aims: dict[str, dict[str, Sequence[Cell]]] = {}
    for setting, cells in _settings(study, network) if len(radii) > 1 else ():
        title = f"trained by: {spoken(setting.objective)}" + (f", weight {setting.weight:g}" if setting.weight else "")
        aims.setdefault(title, {})[setting.arm] = cells
    for title, arms in aims.items():
        series = []
        for number, (arm, cells) in enumerate(arms.items()):
            shift = gap / 2 * ((number + 0.5) / len(arms) - 0.5)
            known = [(x + shift, mean(cells, "certified", eps)) for eps, x in radii.items()]
            points = [(x, value) for x, value in known if value is not None]
            if points:
                # Lines between shifted points would suggest differences that do not exist.
                series.append(Series(spoken(arm), points, joined=False, style=number))
        if series:
            ticks = {x: spelled(x) for x in radii.values()}
            yield Chart(title, series, Axis("radius ε", ticks=ticks), Axis("certified accuracy", percent=True))


def pareto(study: Study, network: str) -> Iterator[Panel]:
    """Clean against certified accuracy of each arm's settings, joined on its front, a panel for each ε."""
    panels: dict[str, list[Series]] = {}
    for (of, eps, arm), points in fronts(study).items():
        if of == network:
            series, kept = panels.setdefault(eps, []), undominated(points)
            style, rest = len(series) // 2, [point for point in points if point not in kept]
            series += [
                Series(name, [(point.clean, point.certified) for point in each], not faint, (), style, faint=faint)
                for name, each, faint in ((DOMINATED if rest else "", rest, True), (spoken(arm), kept, False))
            ]
    for eps, series in panels.items():
        yield Chart(
            f"ε = {eps}", series, Axis("clean accuracy", percent=True), Axis("certified accuracy", percent=True)
        )


def times(study: Study, network: str) -> Iterator[Panel]:
    """The seconds of the strongest method's answers, a panel for each ε, of the first objective and weight.

    Every arm is asked about the images that all arms classify rightly. There are no panels of a network that no
    complete method is asked about: bounds and attacks alone decide too little for a time to tell anything; nor of one
    whose seconds are void (``Study.timed``).
    """
    method = next(filter(decides, reversed(study.asked_with(network))), "") if study.timed else ""
    for eps in study.radii(network) if method else ():
        lines, limit = {}, 0.0
        for setting, cells in _first(study, network):
            asked = [(cell, common(study, cell, eps, method)) for cell in cells if cell.complete(eps, method)]
            answers = [cell.answers[eps, method][image] for cell, images in asked for image in images]
            if answers:
                limit = answers[0]["limit"]
                lines[spoken(setting.arm)] = [max(a["seconds"], 1e-4) for a in answers if a["verdict"] != "unknown"]
        if lines:
            yield cactus(spoken(f"{method}, ε = {eps}"), lines, limit)


def unstable(study: Study, network: str) -> Iterator[Panel]:
    """The unstable neurons of each layer and arm, a panel for each ε, of the first objective and weight."""
    for eps in study.radii(network):
        bars = {}
        for setting, cells in _first(study, network):
            layers = [known for cell in cells if (known := cell.unstable(eps)) is not None]
            if layers:
                bars[spoken(setting.arm)] = [sum(layer) / len(layer) for layer in zip(*layers, strict=True)]
        if bars:
            parts = [(number, f"layer {number + 1}") for number in range(max(map(len, bars.values())))]
            yield Bars(f"ε = {eps}", bars, parts, "unstable neurons per image")


def profiles(study: Study, network: str) -> Iterator[Panel]:
    """λ of each layer by epoch, a panel for each arm with a hardness, of the first objective and weight."""
    found: dict[str, list[list[float]]] = {}
    for setting, cells in _first(study, network):
        histories = [[epoch["lam"] for epoch in cell.training["epochs"]] for cell in cells]
        if histories and all(history and all(history) for history in histories):
            found[spoken(setting.arm)] = [
                [sum(layer) / len(layer) for layer in zip(*epochs, strict=True)]
                for epochs in zip(*histories, strict=True)
            ]
    every = [lam for epochs in found.values() for layers in epochs for lam in layers]
    for title, epochs in found.items():
        yield Profiles(title, epochs, (min(every), max(every)))


FIGURES: Mapping[str, Callable[[Study, str], Iterator[Panel]]] = {
    "pareto": pareto,
    "certified": certified,
    "cactus": times,
    "unstable": unstable,
    "profiles": profiles,
}
"""The figures by the first part of their files' names; the second is the network's name."""
