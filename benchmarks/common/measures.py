"""What the records of trainings say, as the columns of tables: each column takes the records of one setting."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

from benchmarks.common.records import Record, of
from benchmarks.report import Cell, Estimate, Table, estimate
from verifiable_relu.errors import InputError
from verifiable_relu.train.options import Options

Column = Callable[[Sequence[Record]], Cell]
"""A cell, from the records of one setting: a seed each, in the order of the seeds."""

EARLY = 0.1
"""The part of the training after which the OUI is asked whether it foretells the outcome."""


def stored_options(record: Record) -> Options:
    """The options of a record, with today's defaults for those it does not know.

    Raises:
        KeyError, TypeError: if it is no record.
    """
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in record["options"].items()}
    return Options(**fields)


def runs(records: Iterable[Record]) -> list[Record]:
    """The records of trainings, in the order of their names, their options completed by today's defaults.

    Raises:
        InputError: if a record of kind ``run`` is no record of a training.
    """
    found = []
    for record in of(list(records), "run"):
        try:
            found.append({**record, "run": str(record["run"]), "options": asdict(stored_options(record))})
        except (KeyError, TypeError) as error:
            raise InputError(f"no record of a training ({error})", place=str(record.get("run"))) from error
    return sorted(found, key=lambda record: record["run"])


def by_setting(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """The records of each setting, which is what ``key`` says of a record; settings sorted, records by their seeds."""
    groups: dict[Any, list[Record]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return {setting: sorted(group, key=lambda r: r["options"]["seed"]) for setting, group in sorted(groups.items())}


def table(
    titles: Sequence[str], columns: Mapping[str, Column], rows: Iterable[tuple[Sequence[Cell], Sequence[Record]]]
) -> Table:
    """A row per setting: what it is called, the number of its seeds, and each column's value."""
    return Table(
        (*titles, "seeds", *columns),
        [(*title, len(group), *(column(group) for column in columns.values())) for title, group in rows],
    )


def result(name: str, part: str | None = None, factor: float = 1.0) -> Column:
    """The mean of one of a record's ``results``, or of a part of it; None if any record has none."""

    def column(group: Sequence[Record]) -> Estimate | None:
        values = [record["results"].get(name) for record in group]
        if part is not None:
            values = [None if value is None else value.get(part) for value in values]
        return None if None in values else estimate([factor * value for value in values])

    return column


def difference(name: str, base: Sequence[Record]) -> Column:
    """The mean over the seeds of one result minus that of the same seed in ``base``."""
    known = {record["options"]["seed"]: record["results"].get(name) for record in base}

    def column(group: Sequence[Record]) -> Estimate | None:
        pairs = [(record["results"].get(name), known.get(record["options"]["seed"])) for record in group]
        if group is base or any(None in pair for pair in pairs):
            return None
        return estimate([one - other for one, other in pairs])

    return column


def reading(difference: Estimate, better: str, worse: str) -> str:
    """What an interval says: which side of zero it lies on, or nothing.

    Nothing, too, of fewer than three seeds, or where all differ by the same number of images: that is chance, and no
    interval of width 0.
    """
    if difference.n < 3 or not 1e-9 < difference.half < abs(difference.mean):
        return "not shown"
    return better if difference.mean > 0 else worse


def early(record: Record) -> float:
    """The OUI after ``EARLY`` of the training; NaN for a record without monitors."""
    for point in record["results"].get("monitor", ()):
        if point["part"] >= EARLY:
            return float(point["oui"])
    return math.nan


def early_oui(group: Sequence[Record]) -> Estimate | None:
    """``early``, mean over the seeds."""
    values = [early(record) for record in group]
    return None if any(map(math.isnan, values)) else estimate(values)


def learned(group: Sequence[Record]) -> list[list[float]]:
    """For each record λ of each layer where the annealing began."""
    return [record["results"]["lam_learned"] for record in group]


def profile(group: Sequence[Record]) -> str | None:
    """λ of each layer where the annealing began, mean over the seeds."""
    means = [statistics.fmean(layer) for layer in zip(*learned(group), strict=True)]
    return " ".join(f"{lam:.2f}" for lam in means) or None


def run_drift(record: Record) -> float:
    """Mean over layers of |λ where the annealing began − λ at the start|; NaN without λ."""
    profile = record["results"]["lam_learned"]
    start = record["options"]["lam_init"]
    # λ is a float32: what moved by less than that was never learned.
    return round(statistics.fmean(abs(lam - start) for lam in profile), 6) if profile else math.nan


def drift(group: Sequence[Record]) -> Estimate | None:
    """Δλ: ``run_drift``, mean over the seeds."""
    return estimate([run_drift(record) for record in group]) if all(learned(group)) else None


def correlation(profiles: Sequence[Sequence[float]]) -> float:
    """Mean over all pairs of profiles of their Spearman correlation; NaN for one profile, under 3 layers or equal λ."""
    if len(profiles) < 2 or len(profiles[0]) < 3 or any(len(set(profile)) == 1 for profile in profiles):
        return math.nan
    from scipy import stats

    return statistics.fmean(float(stats.spearmanr(a, b).statistic) for a, b in combinations(profiles, 2))
