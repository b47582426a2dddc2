"""What a page says of a training's record: curves of losses, λ and unstable neurons, and tables of results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiable_relu.errors import InputError
from verifiable_relu.files import read_text
from verifiable_relu.report.svg import Axis, Chart, Series
from verifiable_relu.report.table import Cell, Table

_LARGEST = 1 << 26

Record = Mapping[str, Any]


def read_record(path: Path) -> Record:
    """The record that ``train`` wrote.

    Raises:
        InputError: if the file cannot be read, or is no such record.
    """
    try:
        record = json.loads(read_text(path, _LARGEST))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"no record of a training: {error}", path=path) from None
    wanted = {"options": dict, "results": dict, "epochs": list}
    if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in wanted.items()):
        raise InputError("no record of a training: 'options', 'results' or 'epochs' is missing", path=path)
    for number, epoch in enumerate(record["epochs"]):
        if not (
            isinstance(epoch, dict)
            and all(isinstance(epoch.get(name), int | float) for name in ("loss", "accuracy"))
            and isinstance(epoch.get("lam"), list)
            and all(isinstance(lam, int | float) for lam in epoch["lam"])
        ):
            raise InputError("'loss', 'accuracy' or 'lam' is missing", path=path, place=f"epoch {number + 1}")
    if not record["epochs"]:
        raise InputError("the training has no epoch", path=path)
    return record


def curves(record: Record) -> dict[str, list[Series]]:
    """The series of each chart that the record has numbers for: ``loss``, ``accuracy``, ``lam`` and ``unstable``."""
    epochs = record["epochs"]
    found = {
        name: [Series(f"training {name}", [(i + 1.0, float(epoch[name])) for i, epoch in enumerate(epochs)])]
        for name in ("loss", "accuracy")
    }
    depth = min(len(epoch["lam"]) for epoch in epochs)
    found["lam"] = [
        Series(f"layer {k + 1}", [(i + 1.0, float(epoch["lam"][k])) for i, epoch in enumerate(epochs)], style=k)
        for k in range(depth)
    ]
    points = [point for point in record["results"].get("monitor", ()) if isinstance(point.get("unstable"), int | float)]
    if points:
        found["unstable"] = [
            Series("unstable neurons", [(len(epochs) * point["part"], float(point["unstable"])) for point in points])
        ]
    return {name: series for name, series in found.items() if series}


LABELS = {
    "loss": "mean loss",
    "accuracy": "accuracy on training images",
    "lam": "λ",
    "unstable": "unstable neurons per image",
}
"""What the vertical axis of each chart shows."""

CAPTIONS = {
    "loss": "Loss: the mean over each epoch.",
    "accuracy": "Accuracy on the images trained on, augmented and attacked if the training does so.",
    "lam": "Hardness: λ of each layer at the end of each epoch. ReLU is the limit of large λ.",
    "unstable": "Unstable neurons: the mean over the measured training images, by intervals of the options' ε.",
}
"""The caption of each chart."""


def charts(record: Record) -> dict[str, Chart]:
    """The charts that the record has numbers for, by the names of ``LABELS``."""
    found = {}
    for name, series in curves(record).items():
        ys = [y for one in series for _, y in one.points]
        x = Axis("epoch", 0.0, float(len(record["epochs"])) + 0.5)
        y = Axis.over(LABELS[name], ys, log=name == "lam", percent=name == "accuracy")
        about = f"{CAPTIONS[name]} From {ys[0]:.4g} to {series[0].points[-1][1]:.4g}."
        found[name] = Chart(LABELS[name], about, series, x, y)
    return found


def results(record: Record) -> Table:
    """A row for each result."""
    return Table(("result", "value"), list(_rows(record["results"], "")), caption="Results")


def options(record: Record) -> Table:
    """A row for each option."""
    rows = [(name.replace("_", " "), _shown(value)) for name, value in record["options"].items()]
    return Table(("option", "value"), rows, caption="Options")


def _rows(values: Mapping[str, Any], before: str) -> Iterator[Sequence[Cell]]:
    for name, value in values.items():
        title = f"{before} {name.replace('_', ' ')}".strip()
        if isinstance(value, dict):
            yield from _rows(value, title)
        elif name != "monitor":
            yield title, _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "–"
    return f"{value:.5g}" if isinstance(value, float) else "–" if value is None else str(value)
