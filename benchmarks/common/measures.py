"""Columns of tables about trainings: functions from the records of one setting, a seed each, to a cell."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

from verifiable_relu.errors import InputError
from verifiable_relu.report.estimate import Estimate, estimate
from verifiable_relu.report.table import Cell, Table
from verifiable_relu.study.cells import architecture, place, variant_name
from verifiable_relu.study.outcomes import early, run_drift
from verifiable_relu.study.records import Record, of
from verifiable_relu.train.options import Options

Column = Callable[[Sequence[Record]], Cell]
"""A function from the records of one setting, in the order of their seeds, to a cell of a table."""


def stored_options(record: Record) -> Options:
    """The options of a training's record; an option that the record lacks has its default.

    Raises:
        KeyError, TypeError: if the record is not that of a training.
    """
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in record["options"].items()}
    return Options(**fields)


def runs(records: Iterable[Record]) -> list[Record]:
    """The records of trainings, in the order of their names; an option that a record lacks has its default.

    Raises:
        InputError: if a record of kind ``run`` is not that of a training.
    """
    found = []
    for record in of(list(records), "run"):
        try:
            found.append({**record, "run": str(record["run"]), "options": asdict(stored_options(record))})
        except (KeyError, TypeError) as error:
            raise InputError(f"not the record of a training ({error})", place=str(record.get("run"))) from error
    return sorted(found, key=lambda record: record["run"])


_TOLD = {"data", "model", "width", "hidden", "channels", "arm", "finetune_extra", "epochs", "eps", "seed"}
"""The options that have a part of their own in a ``setting``."""


def setting(record: Record) -> tuple[Any, ...]:
    """The setting of a training's record; two have the same setting if their options differ in the seed alone.

    Returns:
        The data set, the architecture, the number of epochs, the other options that differ from their defaults, ε, and
        the place of the variant in tables.
    """
    options, default = record["options"], asdict(Options(""))
    changed = ", ".join(
        f"{name}={value}" for name, value in options.items() if name not in _TOLD and value != default[name]
    )
    net, where = architecture(options), place(variant_name(options))
    return options["data"], net, options["epochs"], changed, options["eps"], where


def by_setting(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """The records by setting, the value of ``key`` for a record: settings in their order, records by seed."""
    groups: dict[Any, list[Record]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return {setting: sorted(group, key=lambda r: r["options"]["seed"]) for setting, group in sorted(groups.items())}


def table(
    titles: Sequence[str], columns: Mapping[str, Column], rows: Iterable[tuple[Sequence[Cell], Sequence[Record]]]
) -> Table:
    """A table with a row for each setting: its titles, the number of its seeds, and the value of each column.

    Args:
        titles: the headings of the columns that name a setting.
        columns: the further columns, by heading.
        rows: for each setting the cells that name it, and its records.
    """
    return Table(
        (*titles, "seeds", *columns),
        [(*title, len(group), *(column(group) for column in columns.values())) for title, group in rows],
    )


def result(name: str, part: str | None = None, factor: float = 1.0) -> Column:
    """The column of the mean of one of the records' ``results``; None if a record lacks it.

    Args:
        name: the name of the result.
        part: the key within the result, if the result is a dict.
        factor: what the value is multiplied by.
    """

    def column(group: Sequence[Record]) -> Estimate | None:
        values = [record["results"].get(name) for record in group]
        if part is not None:
            values = [None if value is None else value.get(part) for value in values]
        return None if None in values else estimate([factor * value for value in values])

    return column


def difference(name: str, base: Sequence[Record]) -> Column:
    """The column of the mean over the seeds of a result minus the same seed's result in ``base``."""
    known = {record["options"]["seed"]: record["results"].get(name) for record in base}

    def column(group: Sequence[Record]) -> Estimate | None:
        pairs = [(record["results"].get(name), known.get(record["options"]["seed"])) for record in group]
        if group is base or any(None in pair for pair in pairs):
            return None
        return estimate([one - other for one, other in pairs])

    return column


def reading(difference: Estimate, better: str, worse: str) -> str:
    """The word for a difference: ``better`` if its interval lies above zero, ``worse`` if below, else "not shown".

    The word is "not shown", too, for fewer than three seeds, and for an interval of width 0: that all seeds differ by
    the same number of images is chance.
    """
    if difference.n < 3 or not 1e-9 < difference.half < abs(difference.mean):
        return "not shown"
    return better if difference.mean > 0 else worse


def early_oui(group: Sequence[Record]) -> Estimate | None:
    """The mean of ``early`` over the seeds; None if a seed has none."""
    values = [early(record) for record in group]
    return None if any(map(math.isnan, values)) else estimate(values)


def learned(group: Sequence[Record]) -> list[list[float]]:
    """For each record, the λ of each layer at the beginning of the annealing."""
    return [record["results"]["lam_learned"] for record in group]


def profile(group: Sequence[Record]) -> str | None:
    """The mean over the seeds of each layer's λ at the beginning of the annealing, as text; None without λ."""
    means = [statistics.fmean(layer) for layer in zip(*learned(group), strict=True)]
    return " ".join(f"{lam:.2f}" for lam in means) or None


def drift(group: Sequence[Record]) -> Estimate | None:
    """The mean of ``run_drift`` over the seeds; None without λ."""
    return estimate([run_drift(record) for record in group]) if all(learned(group)) else None


def correlation(profiles: Sequence[Sequence[float]]) -> float:
    """The mean Spearman correlation over all pairs of profiles.

    The result is NaN for one profile, for fewer than 3 layers, and if a profile has the same λ in all layers.
    """
    if len(profiles) < 2 or len(profiles[0]) < 3 or any(len(set(profile)) == 1 for profile in profiles):
        return math.nan
    from scipy import stats

    return statistics.fmean(float(stats.spearmanr(a, b).statistic) for a, b in combinations(profiles, 2))
