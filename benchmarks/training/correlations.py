"""What goes with what, over the records of arms.py and ablations.py and the bounds of comparison.py.

    python benchmarks/correlations.py

Hardness drift against the disruption by the swap and against certified accuracy; the OUI after a tenth of the training
against the outcome; how early activation patterns settle beside weights; whether seeds agree on the layers' λ. Trains
nothing, measures nothing: results/correlations.md and .csv follow from the saved records.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
from ablations import BASE, EPS, STUDIES, joined, lines_in
from arms import ARMS, RESULTS, setting
from comparison import Lines
from measures import Record, by_setting, early, learned, read_records, run_drift, stored_options
from scipy import stats

from verifiable_relu.errors import InputError
from verifiable_relu.report import Table, estimate

RESAMPLES = 5000
Number = Callable[[Record], float | None]
"""A number of a record; None or NaN where it has none."""


@dataclass(frozen=True)
class Rank:
    """Spearman's ρ over n points, its 95 % percentile-bootstrap interval, and how often shuffled points reach |ρ|.

    NaN where it is undefined: under three points, or one of the two without variation.
    """

    rho: float
    low: float
    high: float
    p: float
    n: int

    @property
    def reading(self) -> str:
        """*positive* or *negative* where both interval and p-value (below 0.05) say so, else *not shown*."""
        if not (self.p < 0.05 and self.low * self.high > 0):
            return "not shown"
        return "positive" if self.rho > 0 else "negative"


def spearman(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """ρ of each row of two (m, n) with that of the other; NaN where a row is constant."""
    ranks = [stats.rankdata(values, axis=1) - (values.shape[1] + 1) / 2 for values in (one, other)]
    norm = np.sqrt((ranks[0] ** 2).sum(1) * (ranks[1] ** 2).sum(1))
    return np.divide((ranks[0] * ranks[1]).sum(1), norm, out=np.full(len(norm), math.nan), where=norm > 0)


def rank(pairs: Sequence[tuple[float, float]]) -> Rank:
    """Spearman's correlation of the two numbers of each pair, always with the same resamples."""
    data = np.array(pairs, dtype=float).reshape(-1, 2).T
    n = data.shape[1]
    if n < 3 or (np.ptp(data, axis=1) == 0).any():
        return Rank(math.nan, math.nan, math.nan, math.nan, n)
    (rho,) = spearman(*data[:, None])
    random = np.random.default_rng(0)
    chosen = random.integers(0, n, (RESAMPLES, n))
    low, high = np.nanpercentile(spearman(*(values[chosen] for values in data)), (2.5, 97.5))
    # Over a handful of points the p-value by Student's t would be far too small.
    shuffled = spearman(
        np.broadcast_to(data[0], chosen.shape), random.permuted(data[1][None].repeat(RESAMPLES, 0), axis=1)
    )
    reached = int((abs(shuffled) >= abs(rho) - 1e-9).sum())
    return Rank(float(rho), float(low), float(high), (reached + 1) / (RESAMPLES + 1), n)


def agreement(profiles: Sequence[Sequence[float]]) -> tuple[float, float, float, float]:
    """Of runs whose layers' λ are ``profiles``: mean, least and greatest Spearman correlation over all pairs of runs.

    And how often layers in an order drawn at random for each run have a mean as high: 0.05 or less would be rare.
    """
    ranks = stats.rankdata(np.array(profiles), axis=1)
    pairs = list(combinations(range(len(ranks)), 2))
    of = [float(stats.spearmanr(ranks[i], ranks[j]).statistic) for i, j in pairs]
    random = np.random.default_rng(0)
    drawn = random.permuted(np.broadcast_to(ranks, (RESAMPLES, *ranks.shape)), axis=2)
    # The mean over pairs grows with the variance of the layers' summed ranks (Kendall's W); without ties it is it.
    spread, chance = ranks.sum(0).var(), drawn.sum(1).var(1)
    return statistics.fmean(of), min(of), max(of), float((chance >= spread - 1e-9).sum() + 1) / (RESAMPLES + 1)


# The questions

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
) -> Iterator[list]:
    """Correlations of a number with each of ``outcomes``: over the runs, and over the settings' means."""
    for outcome in outcomes:
        pairs = [[(of(record), OUTCOMES[outcome](record)) for record in group] for group in groups]
        if not pairs or not all(_known(x) and _known(y) for group in pairs for x, y in group):
            continue
        means = [tuple(map(statistics.fmean, zip(*group, strict=True))) for group in pairs]
        for points, chosen in (("runs", [pair for group in pairs for pair in group]), ("means of settings", means)):
            found = rank(chosen)
            yield [over, points, name, outcome, found.n, found.rho, found.low, found.high, found.p, found.reading]


def _known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def studied(records: Sequence[Record], study: str) -> list[list[Record]]:
    """The records of each setting of an ablation."""
    wanted = [replace(BASE, **changes) for changes in STUDIES[study].values()]
    groups = [[r for r in records if replace(stored_options(r), seed=0) == options] for options in wanted]
    return [group for group in groups if group]


def with_bounds(records: Sequence[Record], lines: Sequence[Record]) -> list[Record]:
    """The records with what CROWN certified at the middle ε of comparison.py, and the neurons unstable there."""
    known = {line["run"]: line for line in lines}
    found = []
    for record in records:
        if (line := known.get(record["run"])) is not None:
            answers = list(line["eps"].values())[len(line["eps"]) // 2]
            more = {"certified": answers["crown"] / line["images"], "unstable": sum(answers["unstable"])}
            record = {**record, "results": {**record["results"], **more}}
        found.append(record)
    return found


def drift_rows(ablations: Sequence[Record]) -> Iterator[list]:
    """Hardness drift against what the swap does, and against what can be proven afterwards."""
    for study in ("The (t, c) grid, raw rate", "(t, c), matched rate"):
        yield from rows(study, studied(ablations, study), "drift Δλ", run_drift, tuple(OUTCOMES))


def oui_rows(ablations: Sequence[Record], arms: Sequence[Record]) -> Iterator[list]:
    """The OUI after a tenth of the training against the outcome.

    Only over settings that differ within that tenth: what differs later has the same OUI there by construction.
    """
    yield from rows("The (t, c) grid, raw rate", studied(ablations, "The (t, c) grid, raw rate"), OUI, early, LATER)
    for (data, net, epochs, changed), group in by_setting(arms, lambda record: setting(record)[:4]).items():
        over = f"arms, {data}, {net}, {epochs} epochs" + (f", {changed}" if changed else "")
        apart = [record for record in group if not record["options"]["arm"].startswith("gelu-swap-")]
        yield from rows(over, list(by_setting(apart, setting).values()), OUI, early, LATER)


OUI = "OUI at 10 %"


def settled_table(records: Sequence[Record]) -> Table:
    """When nine tenths of all change are made, of patterns and of weights, per arm; and the pairs' ratio."""
    columns = ("data", "net", "changed", "arm", "seeds", "patterns", "weights", "weights : patterns", "first")
    found = []
    for (data, net, _, changed, _, place), group in by_setting(records, setting).items():
        pairs = [[record["results"].get(f"{name}_settled") for name in ("patterns", "weights")] for record in group]
        if any(None in pair or 0 in pair for pair in pairs):
            continue
        early = sum(one < other for one, other in pairs)
        parts = [estimate(list(column)) for column in zip(*pairs, strict=True)]
        ratio = estimate([other / one for one, other in pairs])
        found.append((data, net, changed, ARMS[place], len(pairs), *parts, ratio, f"patterns in {early}"))
    return Table(columns, found)


def agreement_table(records: Sequence[Record]) -> Table:
    """Whether seeds agree on the order of the layers' λ, for networks of three layers or more."""
    columns = ("data", "net", "changed", "arm", "seeds", "mean ρ", "least", "greatest", "p", "λ per layer")
    found = []
    for (data, net, _, changed, _, place), group in by_setting(records, setting).items():
        profiles = learned(group)
        if len(profiles) < 2 or len(profiles[0]) < 3 or len(set(profiles[0])) == 1:
            continue
        means = " ".join(f"{statistics.fmean(layer):.2f}" for layer in zip(*profiles, strict=True))
        found.append((data, net, changed, ARMS[place], len(group), *agreement(profiles), means))
    return Table(columns, found)


def answer(table: Table) -> Iterator[str]:
    """What the rows of a table of correlations say, a sentence for each pair of numbers and kind of points."""
    by: dict[tuple[str, str, str], list[tuple[str, float]]] = {}
    for _, points, of, other, _, rho, _, _, _, reading in table.rows:
        by.setdefault((of, other, points), []).append((reading, rho))
    for (of, other, points), found in by.items():
        said = [reading for reading, _ in found]
        rhos = [rho for _, rho in found if not math.isnan(rho)]
        span = f"ρ from {min(rhos):+.2f} to {max(rhos):+.2f}" if rhos else "ρ undefined"
        counts = ", ".join(f"{reading} in {said.count(reading)}" for reading in ("positive", "negative", "not shown"))
        yield f"- {of} and {other}, over {points}: {counts} of {len(said)} sets ({span})."


def write(results: Path, ablations: Sequence[Record], arms: Sequence[Record]) -> str:
    """``correlations.md`` and ``correlations.csv`` in ``results``; the Markdown."""
    drifts, ouis = Table(COLUMNS, list(drift_rows(ablations))), Table(COLUMNS, list(oui_rows(ablations, arms)))
    text = f"""# What goes with what

From {len(ablations)} records in results/ablations/ and {len(arms)} in results/arms/.

ρ is Spearman's rank correlation, *low* to *high* its 95 % percentile-bootstrap interval over {RESAMPLES} resamples of
the points, *p* how often shuffled points reach |ρ|. It is read as shown only where the interval leaves out 0 and
p < 0.05; nothing is corrected for the number of questions. Runs of one setting or one seed are not independent, so that
the intervals over runs are too narrow; those over the means of settings have few points. A correlation over settings
says that a choice moves both numbers, not that one moves the other. Certified accuracy is CROWN's: on Fashion-MNIST at
ε = {EPS} for the ablations, and at the middle ε of `comparison.py` for the arms.

## Hardness drift

Δλ: mean over layers of |λ where the annealing began − λ at the start|, over the grid of t and c.

{chr(10).join(answer(drifts))}

{drifts.markdown()}
## The OUI after a tenth of the training

How varied the activation patterns of 200 training images are, against the outcome; only settings that differ within
that tenth (of GELU's arms the direct swap alone).

{chr(10).join(answer(ouis))}

{ouis.markdown()}
## When activation patterns settle, and when weights do

The part of the training after which 90 % of the way was made: of the patterns' changes on 200 training images, and of
the weights' relative changes, each summed over twentieths of the training. *weights : patterns* above 1 means that
patterns settled first.

{settled_table(arms).markdown()}
## Do seeds agree on the layers' λ?

Spearman's correlation of λ per layer, where the annealing began, over all pairs of seeds. *p*: how often layers in
random order agree as well.

{agreement_table(arms).markdown()}"""
    (results / "correlations.md").write_text(text, encoding="utf-8")
    (results / "correlations.csv").write_text(Table(COLUMNS, [*drifts.rows, *ouis.rows]).csv(), encoding="utf-8")
    return text


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--results", type=Path, default=RESULTS, help="folder that holds arms/, ablations/, comparison/")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Tabulate; 0 when done, 2 for bad input."""
    results: Path = parser().parse_args(arguments).results
    try:
        folder = results / "ablations"
        ablations = joined(read_records(folder), lines_in(folder).records)
        bounds = Lines(results / "comparison" / "bounds.jsonl", ("run", "network", "images"))
        arms = with_bounds(read_records(results / "arms"), bounds.records)
        print(write(results, ablations, arms))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
