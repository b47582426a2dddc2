"""The figures of a study, as PDF and PNG in the style of ``report.figures``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiable_relu.report import panels
from verifiable_relu.report.names import spoken
from verifiable_relu.study.accuracy_tables import fronts, undominated
from verifiable_relu.study.joined import Study, joined
from verifiable_relu.study.numbers import mean, share
from verifiable_relu.study.records import Record
from verifiable_relu.study.time_tables import common, decides

Panels = dict[str, dict[str, Any]]
"""For each panel's title, what it shows by the name of a line or bar."""


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw the figures of a study's records, as many as the records suffice for, into a folder.

    Returns:
        The files.

    Raises:
        InputError: without matplotlib, or if a file cannot be written.
    """
    study = joined(records)
    drawn: list[Path] = []
    for name, make in FIGURES.items():
        for network in study.networks:
            path = folder / f"{name}-{network}.png"
            if make(study, network, path):
                drawn += [path.with_suffix(".pdf"), path]
    return drawn


def certified(study: Study, network: str, path: Path) -> bool:
    """Draw certified accuracy against ε, a panel for each objective and weight; whether there is anything to draw.

    A single radius makes no curve: its accuracies are in the tables.
    """
    found: Panels = defaultdict(dict)
    if len(study.radii(network)) < 2:
        return False
    for setting, cells in study.settings.items():
        if setting.network == network:
            known = [(eps, mean(cells, share("certified", eps))) for eps in study.radii(network)]
            points = [(_number(eps), value) for eps, value in known if value is not None]
            if points:
                found[_title(setting.objective, setting.weight)][setting.arm] = points
    if found:
        panels.levels(path, found, "certified accuracy")
    return bool(found)


def pareto(study: Study, network: str, path: Path) -> bool:
    """Draw clean against certified accuracy of each arm's settings and its front, a panel for each ε; whether there
    are any."""
    found: Panels = defaultdict(dict)
    for (of, eps, arm), points in fronts(study).items():
        if of == network:
            kept = undominated(points)
            placed = sorted(points, key=lambda point: point.clean.mean)
            found[f"ε = {eps}"][arm] = [(point.clean, point.certified, point in kept) for point in placed]
    if found:
        panels.fronts(path, found, "clean accuracy", "certified accuracy")
    return bool(found)


def cactus(study: Study, network: str, path: Path) -> bool:
    """Draw the seconds of the strongest method's answers, a panel for each ε; whether there are any.

    The panels are of the first objective and weight. Every arm is asked about the images that all arms classify
    rightly. There are no panels of a network that no complete method is asked about.
    """
    method = next(filter(decides, reversed(study.asked_with(network))), "")
    found: Panels = defaultdict(dict)
    limits: dict[str, float] = {}
    if not method:
        # Bounds and attacks alone decide too little for a time to tell anything.
        return False
    for setting, cells in study.settings.items():
        if setting.network == network and (setting.objective, setting.weight) == _first(study, network):
            for eps in study.radii(network):
                title = f"{method}, ε = {eps}"
                asked = [(cell.answers[eps, method], common(study, cell, eps, method))
                         for cell in cells if cell.complete(eps, method)]  # fmt: skip
                answers = [answers[image] for answers, images in asked for image in images]
                if answers:
                    decided = [max(a["seconds"], 1e-4) for a in answers if a["verdict"] != "unknown"]
                    found[title][setting.arm], limits[title] = decided, answers[0]["limit"]
    if found:
        panels.cactus(path, found, limits)
    return bool(found)


def unstable(study: Study, network: str, path: Path) -> bool:
    """Draw the unstable neurons of each layer and arm, a panel for each ε, of the first objective and weight."""
    found: Panels = defaultdict(dict)
    for setting, cells in study.settings.items():
        if setting.network == network and (setting.objective, setting.weight) == _first(study, network):
            for eps in study.radii(network):
                layers = [known for cell in cells if (known := cell.unstable(eps)) is not None]
                if layers:
                    means = [sum(layer) / len(layer) for layer in zip(*layers, strict=True)]
                    found[f"ε = {eps}"][setting.arm] = means
    if found:
        panels.stacks(path, found, "unstable neurons per image")
    return bool(found)


def profiles(study: Study, network: str, path: Path) -> bool:
    """Draw λ of each layer by epoch, a panel for each arm with a hardness, of the first objective and weight."""
    found: dict[str, list[list[float]]] = {}
    for setting, cells in study.settings.items():
        if setting.network == network and (setting.objective, setting.weight) == _first(study, network):
            histories = [[epoch["lam"] for epoch in cell.training["epochs"]] for cell in cells]
            if histories and all(history and all(history) for history in histories):
                found[setting.arm] = [
                    [sum(layer) / len(layer) for layer in zip(*epochs, strict=True)]
                    for epochs in zip(*histories, strict=True)
                ]
    if found:
        panels.profiles(path, found)
    return bool(found)


FIGURES: Mapping[str, Callable[[Study, str, Path], bool]] = {
    "pareto": pareto,
    "certified": certified,
    "cactus": cactus,
    "unstable": unstable,
    "profiles": profiles,
}
"""The figures by the first part of their files' names; the second is the network's name."""


def _first(study: Study, network: str) -> tuple[str, float]:
    return next((s.objective, s.weight) for s in study.settings if s.network == network)


def _title(objective: str, weight: float) -> str:
    return spoken(objective) + (f", weight {weight:g}" if weight else "")


def _number(eps: str) -> float:
    above, _, below = eps.partition("/")
    return float(above) / float(below or 1)
