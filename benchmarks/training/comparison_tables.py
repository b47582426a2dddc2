"""The page of the comparison: tables, figures and sentences, made of its records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measures import reading
from verifiable_relu.report.estimate import Estimate, estimate
from verifiable_relu.report.markdown import Page
from verifiable_relu.report.panels import cactus, levels, pairs, profiles
from verifiable_relu.report.table import Table
from verifiable_relu.study.cells import VARIANTS, architecture, place, variant_name
from verifiable_relu.study.records import Record, notes, of
from verifiable_relu.train.options import ARMS

BOUNDS = ("ibp", "crown", "alpha-crown")
SOLVERS = ("milp", "smt")
LEARNED = next(iter(ARMS))
"""The arm that is compared with all others: the first of the table, learned and hardened λ-GELU."""

HARDENED = tuple(variant for variant, arm in VARIANTS.items() if ARMS[arm].hardness != "none")
RIVALS = tuple(
    sorted(
        (variant for variant, arm in VARIANTS.items() if variant not in HARDENED and ARMS[arm].ends_in_relu),
        key=lambda variant: ARMS[VARIANTS[variant]].swap != "never",
    )
)
"""The variants without a hardness that end as ReLU networks; ReLU from the start is the first."""


def grouped(records: Sequence[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """The records by the values of some fields, with arms in the order of the tables."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda r: (r["data"], r["architecture"], place(r["arm"]), r["seed"])):
        groups[tuple(record[name] for name in names)].append(record)
    return dict(groups)


def share(records: Sequence[Record], eps: str, method: str) -> Estimate:
    """The fraction of the images that ``method`` certifies or, for ``attacked``, that the attack does not refute."""
    return estimate([record["eps"][eps][method] / record["images"] for record in records])


def accuracy_table(records: Sequence[Record]) -> Table:
    """The table of accuracies, with a row for each data set, ε and arm."""
    columns: tuple[str, ...] = ("data", "net", "images", "ε", "arm", "seeds", "clean", "attacked")
    columns += (*(f"certified, {method}" for method in BOUNDS), "unstable", "per layer")
    rows = []
    for (data, net, images), group in grouped(records, "data", "architecture", "images").items():
        for eps in group[0]["eps"]:
            for (arm,), runs in grouped(group, "arm").items():
                neurons = [run["eps"][eps]["unstable"] for run in runs]
                per_layer = " + ".join(f"{np.mean(layer):.1f}" for layer in zip(*neurons, strict=True))
                rows.append(
                    (
                        *(data, net, images, eps, arm, len(runs)),
                        estimate([run["clean"] / images for run in runs]),
                        *(share(runs, eps, method) for method in ("attacked", *BOUNDS)),
                        *(estimate([sum(each) for each in neurons]), per_layer),
                    )
                )
    return Table(
        columns,
        rows,
        caption="Accuracy, certified accuracy and unstable neurons: means over the seeds and 95 % intervals.",
    )


def solver_table(records: Sequence[Record]) -> Table:
    """The table of solvers, with a row for each data set, arm and solver; an unanswered query counts with the limit."""
    columns: tuple[str, ...] = (
        "data",
        "net",
        "ε",
        "arm",
        "seeds",
        "questions",
        "unstable",
        "by bounds",
        "solver",
        "limit, s",
    )
    columns += ("safe", "unsafe", "undecided", "mean s", "median s", "mean s, bounds undecided")
    rows = []
    for (data, net, eps, limit, arm), runs in grouped(records, "data", "architecture", "eps", "limit", "arm").items():
        for method in SOLVERS:
            answers = [answer for run in runs for answer in run["answers"][method]]
            verdicts = [answer["verdict"] for answer in answers]
            seconds = [min(limit, a["seconds"]) if a["verdict"] != "unknown" else limit for a in answers]
            hard = [s for s, answer in zip(seconds, answers, strict=True) if not answer["by_bounds"]]
            neurons = [a["unstable"] for a in answers if a["unstable"] is not None]
            rows.append(
                (
                    *(data, net, eps, arm, len(runs), len(answers), float(np.mean(neurons))),
                    *(len(answers) - len(hard), method, limit),
                    *(verdicts.count(verdict) for verdict in ("unsat", "sat", "unknown")),
                    *(float(np.mean(seconds)), float(np.median(seconds))),
                    float(np.mean(hard)) if hard else None,
                )
            )
    return Table(columns, rows, caption="Questions that complete solvers answered, and their seconds.")


def share_gained(gained: Sequence[int], images: int) -> Estimate:
    """The mean difference of numbers of images, as a fraction of all images.

    The mean is taken over whole numbers, so that differences that cancel out give exactly 0.
    """
    found = estimate(gained)
    return Estimate(found.mean / images, found.half / images, found.n)


def difference_table(records: Sequence[Record]) -> Table:
    """The table of differences: hardened λ-GELU minus each rival, paired by seed."""
    columns: tuple[str, ...] = (
        "data",
        "ε",
        "λ-GELU hardened minus",
        "seeds",
        "Δ clean",
        "Δ attacked",
        "Δ certified, alpha-crown",
    )
    columns += ("certified", "Δ unstable", "unstable neurons")
    rows = []
    for (data, _, images), group in grouped(records, "data", "architecture", "images").items():
        by = {(run["arm"], run["seed"]): run for run in group}
        for eps in group[0]["eps"]:
            for rival in RIVALS:
                seeds = [seed for arm, seed in by if arm == LEARNED and (rival, seed) in by]
                if not seeds:
                    continue
                matched = [(by[LEARNED, seed], by[rival, seed]) for seed in seeds]
                correct = share_gained([a["clean"] - b["clean"] for a, b in matched], images)
                attacked, certified = (
                    share_gained([a["eps"][eps][method] - b["eps"][eps][method] for a, b in matched], images)
                    for method in ("attacked", "alpha-crown")
                )
                neurons = estimate(
                    [sum(a["eps"][eps]["unstable"]) - sum(b["eps"][eps]["unstable"]) for a, b in matched]
                )
                rows.append(
                    (
                        *(data, eps, rival, len(seeds), correct, attacked, certified),
                        *(reading(certified, "more", "fewer"), neurons, reading(neurons, "more", "fewer")),
                    )
                )
    return Table(columns, rows, caption="Differences between the hardened network and its rivals, paired by seed.")


def answer(differences: Table) -> Iterator[str]:
    """A sentence for each rival on what the differences show."""
    for rival in dict.fromkeys(row[2] for row in differences.rows):
        rows = [row for row in differences.rows if row[2] == rival]
        certified, neurons = [row[7] for row in rows], [row[9] for row in rows]
        yield (
            f"- Against `{rival}`, over {len(rows)} pairs of data set and ε: more images certified (α-CROWN) in "
            f"{certified.count('more')}, fewer in {certified.count('fewer')}, no difference shown in "
            f"{certified.count('not shown')}; fewer unstable neurons in {neurons.count('fewer')}, more in "
            f"{neurons.count('more')}, no difference shown in {neurons.count('not shown')}. Means of the differences: "
            f"certified {_range(rows, 6, '.4f')}, unstable neurons {_range(rows, 8, '.1f')}."
        )


def _range(rows: Sequence[Sequence[Any]], column: int, form: str) -> str:
    means = [row[column].mean for row in rows]
    return f"from {min(means):+{form}} to {max(means):+{form}}"


def figures(folder: Path, bounds: Sequence[Record], solvers: Sequence[Record], runs: Sequence[Record]) -> None:
    """Draw all figures of the comparison into a folder.

    Raises:
        InputError: without matplotlib.
    """
    panels: dict[str, Any] = defaultdict(dict)
    heat: dict[str, list[list[float]]] = {}
    for (data, net, arm), group in grouped(runs, "data", "architecture", "arm").items():
        swap = [[run["results"].get(f"clean_{side}_substitution") for run in group] for side in ("before", "after")]
        if None not in swap[0] + swap[1]:
            panels[f"{data}, {net}"][arm] = (estimate(swap[0]), estimate(swap[1]))
        if arm in HARDENED:
            epochs = [[epoch["lam"] for epoch in run["epochs"]] for run in group]
            heat[f"{data}, {net}, {arm}"] = np.mean(epochs, axis=0).tolist()
    if panels:
        pairs(folder / "swap.png", panels, "test accuracy")
    if heat:
        profiles(folder / "profiles.png", heat)
    panels = defaultdict(dict)
    for (data, net, arm), group in grouped(bounds, "data", "architecture", "arm").items():
        panels[f"{data}, {net}"][arm] = [(float(eps), share(group, eps, "alpha-crown")) for eps in group[0]["eps"]]
    if panels:
        levels(folder / "certified.png", panels, "certified accuracy, α-CROWN")
    panels = defaultdict(dict)
    limits: dict[str, float] = {}
    for (data, net, eps, limit, arm), group in grouped(solvers, "data", "architecture", "eps", "limit", "arm").items():
        for method in SOLVERS:
            title = f"{data}, {net}, ε = {eps}, {method}"
            limits[title] = limit
            answers = [a for run in group for a in run["answers"][method] if a["verdict"] != "unknown"]
            panels[title][arm] = [a["seconds"] for a in answers]
    if panels:
        cactus(folder / "solvers.png", panels, limits)


def cut(bounds: Sequence[Record], solvers: Sequence[Record], full: tuple[int, int]) -> str:
    """A sentence on the numbers of images, seeds and arms of the records, beside those of a full run.

    Args:
        bounds: the records of bounds and the attack.
        solvers: the records of the solvers.
        full: the numbers of images in a full run, for bounds and for the solvers.
    """
    images = sorted({record["images"] for record in bounds})
    said = [f"{', '.join(map(str, images))} test images for the bounds (a full run: {full[0]})"]
    for (data, eps), group in grouped(solvers, "data", "eps").items():
        counts = [len(group[0]["images"]), len({r["seed"] for r in group}), len({r["arm"] for r in group})]
        said.append(
            "on {}, {} images, {} seed(s), {} arms for the solvers (a full run: {}, 3 and {}), at ε = {}".format(
                data, *counts, full[1], len(VARIANTS), eps
            )
        )
    return f"Asked: {'; '.join(said)}."


def page(records: Sequence[Record], runs: Sequence[Record], folder: Path, full: tuple[int, int]) -> Page:
    """The page with tables, figures and sentences.

    Args:
        records: the records of the study.
        runs: the records of the networks' trainings.
        folder: the folder of the figures.
        full: the numbers of images in a full run, for bounds and for the solvers.

    Raises:
        InputError: without matplotlib.
    """
    bounds, solvers = of(records, "bounds"), of(records, "solvers")
    accuracy, differences, times = accuracy_table(bounds), difference_table(bounds), solver_table(solvers)
    made = Page("comparison")
    for name, table in (("accuracy", accuracy), ("differences", differences), ("solvers", times)):
        made.save(name, table, latex=True)
    figures(folder, bounds, solvers, runs)
    made.add("# The first comparison: does hardening give networks that are easier to verify?")
    made.bullets(notes(records))
    made.add(cut(bounds, solvers, full), "## What the figures say", "\n".join(answer(differences)))
    made.add(
        """\
A difference is *shown* where the 95 % interval of the paired difference (same seed: same initial weights and data
order) leaves out zero and has a width. The intervals are Student's t over the seeds, not corrected for the number of
comparisons; few seeds show large differences only.""",
        differences,
        "## Accuracy and unstable neurons",
        """\
Mean over the seeds ± half a 95 % interval (Student's t), parts of all images. *attacked*: classified rightly and not
refuted by the project's attack, each refutation confirmed by exact evaluation and replay; images that α-CROWN proves
are not attacked. *certified*: classified rightly and proven by the method with rounding accounted for. *unstable*:
neurons per image, classified rightly, whose input can have either sign by CROWN's bounds. Every network is the one
after the swap, ReLU throughout, but `prelu`, which is never swapped.""",
        accuracy,
        "![certified accuracy against ε](certified.png)",
        "## Accuracy before and after the swap",
        "Over the whole test set, from the records of `arms.py`. Axes do not begin at zero.",
        "![accuracy before and after the swap](swap.png)",
        "## Solvers",
        """\
The same images for all arms: the first that all networks of the data set classify rightly. Wall clock, each question
alone, bounds included; an undecided question counts with the limit. *by bounds*: decided before the solver began.""",
        times,
        "![seconds by which questions were answered](solvers.png)",
        "## λ per layer and epoch",
        "Mean over the seeds, at the end of each epoch.",
        "![λ profiles](profiles.png)",
    )
    return made


def titled(run: Record) -> Record:
    """The record of a training, with the fields by which the comparison's records name its network."""
    options = run["options"]
    title = {name: options[name] for name in ("data", "seed")}
    return {**title, "architecture": architecture(options), "arm": variant_name(options), **run}
