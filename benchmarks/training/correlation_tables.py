"""Tables of correlations between the figures in the records of trainings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.common.measures import by_setting, learned, setting, stored_options
from benchmarks.training.ablation_settings import BASE, EPS, STUDIES
from verifiable_relu.report.estimate import estimate
from verifiable_relu.report.markdown import Page
from verifiable_relu.report.table import Table
from verifiable_relu.study.cells import VARIANTS
from verifiable_relu.study.outcomes import early, run_drift
from verifiable_relu.study.records import Record
from verifiable_relu.study.statistics import RESAMPLES, agreement, rank
from verifiable_relu.train.options import ARMS

Row = list[Any]
"""The cells under ``COLUMNS``."""

Number = Callable[[Record], float | None]
"""A function from a record to a number; None or NaN for a record without it."""

OUTCOMES: dict[str, Number] = {
    "mean logit change": lambda record: record["results"].get("mean_logit_change"),
    "worst logit change": lambda record: record["results"].get("worst_logit_change"),
    "proven logit change": lambda record: record["results"].get("proven_logit_change"),
    "flipped predictions": lambda record: record["results"].get("flipped_predictions"),
    "clean accuracy": lambda record: record["results"].get("clean"),
    "certified accuracy": lambda record: record["results"].get("certified"),
    "unstable neurons": lambda record: record["results"].get("unstable"),
}
LATER = ("clean accuracy", "certified accuracy", "unstable neurons")
COLUMNS = ("over", "points", "of", "with", "n", "ρ", "low", "high", "p", "reading")


def rows(
    over: str, groups: Sequence[Sequence[Record]], name: str, of: Number, outcomes: Sequence[str]
) -> Iterator[Row]:
    """Rows of the correlations of a number with each of ``outcomes``: over the runs, and over the settings' means."""
    for outcome in outcomes:
        pairs = [[(_number(of, record), _number(OUTCOMES[outcome], record)) for record in group] for group in groups]
        if not pairs or any(math.isnan(x) or math.isnan(y) for group in pairs for x, y in group):
            continue
        means = [(statistics.fmean(x for x, _ in group), statistics.fmean(y for _, y in group)) for group in pairs]
        for points, chosen in (("runs", [pair for group in pairs for pair in group]), ("means of settings", means)):
            found = rank(chosen)
            yield [over, points, name, outcome, found.n, found.rho, found.low, found.high, found.p, found.reading]


def _number(of: Number, record: Record) -> float:
    found = of(record)
    return math.nan if found is None else found


def studied(records: Sequence[Record], study: str) -> list[list[Record]]:
    """The records of each setting of an ablation."""
    wanted = [replace(BASE, **changes) for changes in STUDIES[study].values()]
    groups = [[r for r in records if replace(stored_options(r), seed=0) == options] for options in wanted]
    return [group for group in groups if group]


def with_bounds(records: Sequence[Record], bounds: Sequence[Record]) -> list[Record]:
    """The records, with the images that CROWN certifies and the unstable neurons at the middle ε of comparison.py."""
    known = {line["run"]: line for line in bounds}
    found = []
    for record in records:
        if (line := known.get(record["run"])) is not None:
            answers = list(line["eps"].values())[len(line["eps"]) // 2]
            more = {"certified": answers["crown"] / line["images"], "unstable": sum(answers["unstable"])}
            record = {**record, "results": {**record["results"], **more}}
        found.append(record)
    return found


def drift_rows(ablations: Sequence[Record]) -> Iterator[Row]:
    """Rows of the correlations of the hardness drift with the effect of the swap and with certified accuracy."""
    for study in ("The (t, c) grid, raw rate", "(t, c), matched rate"):
        yield from rows(study, studied(ablations, study), "drift Δλ", run_drift, tuple(OUTCOMES))


def oui_rows(ablations: Sequence[Record], arms: Sequence[Record]) -> Iterator[Row]:
    """Rows of the correlations of the OUI after a tenth of the training with the outcome.

    They are taken only over settings that differ within that tenth; settings that differ later have the same OUI there.
    """
    yield from rows("The (t, c) grid, raw rate", studied(ablations, "The (t, c) grid, raw rate"), OUI, early, LATER)
    for (data, net, epochs, changed), group in by_setting(arms, lambda record: setting(record)[:4]).items():
        over = f"arms, {data}, {net}, {epochs} epochs" + (f", {changed}" if changed else "")
        apart = [record for record in group if ARMS[record["options"]["arm"]].swap != "switch"]
        yield from rows(over, list(by_setting(apart, setting).values()), OUI, early, LATER)


OUI = "OUI at 10 %"


def settled_table(records: Sequence[Record]) -> Table:
    """The table of the times by which patterns and weights have made nine tenths of their change, for each arm."""
    columns = ("data", "net", "changed", "arm", "seeds", "patterns", "weights", "weights : patterns", "first")
    found = []
    for (data, net, _, changed, _, place), group in by_setting(records, setting).items():
        pairs = [[record["results"].get(f"{name}_settled") for name in ("patterns", "weights")] for record in group]
        if any(None in pair or 0 in pair for pair in pairs):
            continue
        early = sum(one < other for one, other in pairs)
        parts = [estimate(list(column)) for column in zip(*pairs, strict=True)]
        ratio = estimate([other / one for one, other in pairs])
        found.append((data, net, changed, list(VARIANTS)[place], len(pairs), *parts, ratio, f"patterns in {early}"))
    return Table(columns, found)


def agreement_table(records: Sequence[Record]) -> Table:
    """The table of the agreement of seeds on the order of the layers' λ, for networks of at least three layers."""
    columns = ("data", "net", "changed", "arm", "seeds", "mean ρ", "least", "greatest", "p", "λ per layer")
    found = []
    for (data, net, _, changed, _, place), group in by_setting(records, setting).items():
        profiles = learned(group)
        if len(profiles) < 2 or len(profiles[0]) < 3 or len(set(profiles[0])) == 1:
            continue
        means = " ".join(f"{statistics.fmean(layer):.2f}" for layer in zip(*profiles, strict=True))
        found.append((data, net, changed, list(VARIANTS)[place], len(group), *agreement(profiles), means))
    return Table(columns, found)


def answer(table: Table) -> Iterator[str]:
    """A sentence for each pair of numbers and kind of points of a table of correlations."""
    by: dict[tuple[str, str, str], list[tuple[str, float]]] = {}
    rows: Sequence[Sequence[Any]] = table.rows
    for _, points, of, other, _, rho, _, _, _, reading in rows:
        by.setdefault((of, other, points), []).append((reading, rho))
    for (of, other, points), found in by.items():
        said = [reading for reading, _ in found]
        rhos = [rho for _, rho in found if not math.isnan(rho)]
        span = f"ρ from {min(rhos):+.2f} to {max(rhos):+.2f}" if rhos else "ρ undefined"
        counts = ", ".join(f"{reading} in {said.count(reading)}" for reading in ("positive", "negative", "not shown"))
        yield f"- {of} and {other}, over {points}: {counts} of {len(said)} sets ({span})."


def page(ablations: Sequence[Record], arms: Sequence[Record]) -> Page:
    """The page with all tables and sentences."""
    drifts, ouis = Table(COLUMNS, list(drift_rows(ablations))), Table(COLUMNS, list(oui_rows(ablations, arms)))
    made = Page("correlations")
    made.add(
        "# What goes with what",
        f"From {len(ablations)} records of ablations.py and {len(arms)} of arms.py.",
        f"""\
ρ is Spearman's rank correlation, *low* to *high* its 95 % percentile-bootstrap interval over {RESAMPLES} resamples of
the points, *p* how often shuffled points reach |ρ|. It is read as shown only where the interval leaves out 0 and
p < 0.05; nothing is corrected for the number of questions. Runs of one setting or one seed are not independent, so that
the intervals over runs are too narrow; those over the means of settings have few points. A correlation over settings
says that a choice moves both numbers, not that one moves the other. Certified accuracy is CROWN's: on Fashion-MNIST at
ε = {EPS} for the ablations, and at the middle ε of `comparison.py` for the arms.""",
        "## Hardness drift",
        """Δλ: mean over layers of |λ where the annealing began − λ at the start|, over the grid of t and c.""",
        "\n".join(answer(drifts)),
        drifts,
        "## The OUI after a tenth of the training",
        """\
How varied the activation patterns of 200 training images are, against the outcome; only settings that differ within
that tenth (of GELU's arms the direct swap alone).""",
        "\n".join(answer(ouis)),
        ouis,
        "## When activation patterns settle, and when weights do",
        """\
The part of the training after which 90 % of the way was made: of the patterns' changes on 200 training images, and of
the weights' relative changes, each summed over twentieths of the training. *weights : patterns* above 1 means that
patterns settled first.""",
        settled_table(arms),
        "## Do seeds agree on the layers' λ?",
        """\
Spearman's correlation of λ per layer, where the annealing began, over all pairs of seeds. *p*: how often layers in
random order agree as well.""",
        agreement_table(arms),
    )
    made.save("correlations", Table(COLUMNS, [*drifts.rows, *ouis.rows]))
    return made
