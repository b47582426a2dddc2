"""Numbers of one training, from its record."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Record = Mapping[str, Any]

EARLY = 0.1
"""The fraction of the training after which the OUI and the accuracy are compared with the training's outcome."""


def early(record: Record, form: str = "oui") -> float:
    """The OUI after the fraction ``EARLY`` of the training; NaN for a record without measurements in between."""
    for point in record["results"].get("monitor", ()):
        if point["part"] >= EARLY:
            return float(point.get(form, math.nan))
    return math.nan


def early_accuracy(record: Record) -> float:
    """The accuracy on the training images in the epoch in which the fraction ``EARLY`` is passed; NaN without epochs.

    The accuracy is that of the images as the epoch trained on them, augmented or attacked.
    """
    epochs = record.get("epochs", ())
    return float(epochs[math.ceil(EARLY * len(epochs)) - 1]["accuracy"]) if epochs else math.nan


def run_drift(record: Record) -> float:
    """The mean over layers of |λ at the beginning of the annealing − λ at the start|; NaN without λ."""
    profile = record["results"].get("lam_learned")
    start = record["options"]["lam_init"]
    # λ is a float32 number: a difference below its resolution is no drift.
    return round(statistics.fmean(abs(lam - start) for lam in profile), 6) if profile else math.nan


def _result(*path: str) -> Callable[[Record], float]:
    def number(record: Record) -> float:
        found: Any = record["results"]
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return math.nan if found is None else float(found)

    return number


NUMBERS: Mapping[str, Callable[[Record], float]] = {
    "clean_test": _result("clean"),
    "clean_before_substitution": _result("clean_before_substitution"),
    "clean_after_substitution": _result("clean_after_substitution"),
    "mean_logit_change": _result("mean_logit_change"),
    "worst_logit_change": _result("worst_logit_change"),
    "proven_logit_change": _result("proven_logit_change"),
    "flipped_predictions": _result("flipped_predictions"),
    "drift": run_drift,
    "oui_early": early,
    "oui_batch_early": partial(early, form="oui_batch"),
    "rate": lambda record: float(record["options"]["rate"]),
    "accuracy_early": early_accuracy,
    "patterns_settled": _result("patterns_settled"),
    "weights_settled": _result("weights_settled"),
    "int8": _result("int8", "clean"),
    "pruned_0.5": _result("pruned", "0.5"),
    "pruned_0.7": _result("pruned", "0.7"),
    "pruned_0.9": _result("pruned", "0.9"),
}
"""The numbers by name, as functions of a training's record; NaN where the record has none.

``clean_test`` is the accuracy of the network that is exported on the whole test set, ``int8`` and ``pruned_…`` the same
after compression (``train.export``); for the others see ``train.export.finish``.
"""


SHARES: Mapping[str, tuple[str, ...]] = {"clean": (), "attacked": ("eps",), "certified": ("eps", "method")}
"""The fractions of the asked images (``Cell.holds``), with what else they depend on."""

COSTS: Mapping[str, tuple[str, ...]] = {"seconds": ("eps", "method"), "subproblems": ("eps", "method")}
"""The costs of images that are classified rightly (``Cell.costs``), with what else they depend on."""

CLAIMED: Mapping[str, tuple[str, ...]] = {
    **SHARES,
    **COSTS,
    "unstable": ("eps",),
    **dict.fromkeys(NUMBERS, ()),
}
"""What a claim can be about, with what else it must name.

Of ``COSTS`` the means over images that both arms classify rightly; ``unstable`` is the mean number of unstable neurons
per image; the others are ``NUMBERS``.
"""


def number(record: Record, name: str) -> float | None:
    """One of ``NUMBERS`` of a training's record; None where the record has none."""
    found = NUMBERS[name](record)
    return None if math.isnan(found) else found
