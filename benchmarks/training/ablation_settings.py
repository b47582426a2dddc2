"""The settings of the ablations and their records, which ``ablations`` tabulates and ``correlations`` correlates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common.measures import runs
from verifiable_relu.study.records import Record, of
from verifiable_relu.train.options import Options

BASE = Options("fashion_mnist", hidden=(128, 128), epochs=6, eps=0.01)
EPS = "0.01"
"""The radius that CROWN certifies: ``BASE.eps`` in the decimals of a property."""

SGD = {"optimizer": "sgd", "rate": 0.05}

Changes = dict[str, Any]
STUDIES: dict[str, dict[str, Changes]] = {
    "Switch point": {f"{part:.0%}": {"switch": part} for part in (0.0, 0.1, 0.25, 0.5, 0.75)},
    "Schedule": {name: {"schedule": name} for name in ("linear", "log", "inverse")},
    "Rate of s under AdamW": {name: {"lam_rate": name} for name in ("raw", "matched", "natural")},
    "Rate of s under SGD": {name: {**SGD, "lam_rate": name} for name in ("raw", "matched", "natural")},
    "λ during the ramp": {name: {"ramp": name} for name in ("frozen", "learning")},
    "The (t, c) grid, raw rate": {
        f"t = {t}, c = {c}": {"lam_rate": "raw", "lam_temperature": t, "lam_factor": float(c)}
        for t in (0.05, 0.1, 0.2, 1.0)
        for c in (1, 9, 25)
    },
    "(t, c), matched rate": {
        f"t = {t}, c = {c}": {"lam_temperature": t, "lam_factor": float(c)}
        for t, c in ((0.1, 1), (0.1, 9), (0.1, 25), (0.05, 9), (1.0, 9))
    },
    "β1, β2 of AdamW": {
        f"{one}, {two}": {"beta1": one, "beta2": two} for one, two in ((0.9, 0.999), (0.9, 0.9), (0.95, 0.95))
    },
}
"""For each study its settings by name: the options that differ from ``BASE``."""


def trained(records: Sequence[Record]) -> list[Record]:
    """The records of the trainings, with ``certified`` (a fraction of the images) and ``unstable`` in their results.

    Records of networks that were not certified lack these two results.

    Raises:
        InputError: if a record of kind ``run`` is not that of a training.
    """
    known = {record["run"]: record for record in of(records, "certified")}
    return [_with_shares(record, known.get(record["run"])) for record in runs(records)]


def _with_shares(record: Record, certified: Record | None) -> Record:
    if certified is None:
        return record
    shares = {"certified": certified["certified"] / certified["images"], "unstable": certified["unstable"]}
    return {**record, "results": {**record["results"], **shares}}
