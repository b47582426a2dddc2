"""Does hardening give networks that are easier to verify? The table and the figure of the study ``e1``.

    python -m benchmarks.study e1 --out benchmarks/studies/e1
    python -m benchmarks.verification.easier

The study asks the questions. This script sets the hardened network beside each other arm, in certified accuracy and in
time, and asks whether an arm's effect on the number of sub-problems is more than that of its unstable neurons and
margins, which it computes for each question from the study's networks.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.markup import Interval, Page, Table, spoken
from benchmarks.common.records import Record, Records, notes, of, read_records
from benchmarks.common.study import ROOT, Study

if TYPE_CHECKING:
    from benchmarks.study import joined

ASKED = ROOT / "benchmarks" / "studies" / "e1"
"""The folder of the study."""

ARM = "lambda-gelu"
METHOD = "auto"

SECOND, SAMPLE, SECONDS = "milp", 8, 20.0
"""A second complete method, the questions of each network that it is asked: as many that branched, and as many that did
not; and its time limit."""

POINTS, FACTOR = 0.02, 1.25
"""The margins of equivalence that the study declares: of certified accuracy, and of time as a ratio."""

Rows = list[tuple[int, int, str, float, tuple[float, ...]]]
"""Seed, image, arm, log(1 + sub-problems) and features of questions about images that all arms classify rightly."""


def measure(options: argparse.Namespace, records: Records) -> None:
    """Record the features of all questions, and the verdicts of a second method on a sample."""
    describe(options, records)
    ask_again(options, records)


def describe(options: argparse.Namespace, records: Records) -> None:
    """Record, for each network and radius of the study, the margin and the unstable neurons of each image."""
    import torch

    from benchmarks.study import joined
    from benchmarks.study.training import images_of
    from verifiable_relu.bounds import preactivation_bounds, unstable
    from verifiable_relu.network import read_onnx
    from verifiable_relu.train.losses import ball

    known = {(record["cell"], record["eps"]) for record in of(records.all, "features")}
    for cell in joined.joined(read_records(options.study)).cells:
        for eps in {eps for eps, _ in cell.answers if cell.complete(eps)}:
            name, images = cell.training["cell"], sorted(cell.right)
            if (name, eps) in known:
                continue
            network = read_onnx(options.study / "networks" / f"{name}.onnx").to(torch.float64)
            test = images_of(cell.training["data"])
            counts, margins = [], []
            with torch.inference_mode():
                for x, label in zip(torch.from_numpy(test.images[images]).double(), test.labels[images], strict=True):
                    logits = network(x[None]).flatten()
                    margins.append(float(logits[label] - logits[torch.arange(len(logits)) != label].max()))
                    pre = preactivation_bounds(network, ball(x[None], float(eps)))
                    counts.append(sum(int(unstable(network.nodes[i], pre[i]).sum()) for i in network.activations))
            rounded = [float(f"{margin:.4g}") for margin in margins]
            records.append(
                "features", {"cell": name, "eps": eps, "images": images, "margins": rounded, "unstable": counts}
            )


def ask_again(options: argparse.Namespace, records: Records) -> None:
    """Ask a second complete method about a sample of the questions that were decided, and record both verdicts."""
    from benchmarks.study import joined
    from benchmarks.study.asking import ball
    from benchmarks.study.training import images_of
    from verifiable_relu.network import read_onnx
    from verifiable_relu.spec import Query
    from verifiable_relu.verifiers.base import Limits
    from verifiable_relu.verifiers.docket import answers
    from verifiable_relu.verifiers.registry import make

    before = of(records.all, "second")
    known = {(record["cell"], record["eps"], record["image"]) for record in before}
    full = Counter((record["network"], record["eps"], record["branched"]) for record in before)
    asked: dict[tuple[str, str, bool], list[tuple[joined.Cell, int]]] = defaultdict(list)
    for cell in joined.joined(read_records(options.study)).cells:
        for (eps, method), found in cell.answers.items():
            for image, answer in found.items() if method == METHOD and cell.complete(eps) else ():
                if answer["verdict"] != "unknown":
                    asked[cell.setting.network, eps, bool(answer["subproblems"])].append((cell, image))
    for (of_network, eps, branched), every in asked.items():
        if full[of_network, eps, branched] >= SAMPLE:
            continue
        drawn = random.Random(0).sample(sorted(every, key=lambda one: (one[0].training["cell"], one[1])), SAMPLE)
        for cell, image in drawn:
            name = cell.training["cell"]
            if (name, eps, image) in known:
                continue
            network = read_onnx(options.study / "networks" / f"{name}.onnx")
            query = Query(network, ball(images_of(cell.training["data"]), image, eps, network.output_size))
            (again,) = answers(make(SECOND), [query], Limits(SECONDS))
            verdicts = {"first": cell.answers[eps, METHOD][image]["verdict"], "second": str(again.verdict)}
            about = {"cell": name, "network": cell.setting.network, "eps": eps, "image": image, "branched": branched}
            records.append("second", {**about, **verdicts})


def questions(study: joined.Study, network: str, eps: str, features: Mapping[tuple[str, str], Record]) -> Rows:
    """The questions about images that all arms of a seed classify rightly, with their features."""
    from benchmarks.study.tables import common

    found: Rows = []
    for setting, cells in study.settings.items():
        for cell in cells if setting.network == network else ():
            known = features.get((cell.training["cell"], eps))
            if known is None:
                continue
            of_image = dict(zip(known["images"], zip(known["margins"], known["unstable"], strict=True), strict=True))
            for image in sorted(common(study, cell, eps, METHOD)):
                count = cell.answers[eps, METHOD][image]["subproblems"] or 0
                margin, loose = (math.log(max(each, 1e-6)) for each in (of_image[image][0], of_image[image][1] + 1))
                terms = (margin, loose, margin * margin, loose * loose, margin * loose)
                found.append((cell.seed, image, setting.arm, math.log1p(count), terms))
    return found


def explained(rows: Rows, arms: Sequence[str]) -> dict[str, Any]:
    """What arms and features explain of log(1 + sub-problems), between the arms of one seed and image.

    Returns:
        R² of ``arms``, ``features`` and ``both``, over deviations from the mean over the arms of each seed and image;
        and for each arm the coefficient against ``ARM``, ``alone`` and ``beside`` the features, over the seeds.
    """
    import numpy as np

    from benchmarks.study.statistics import interval

    x = np.array([[arm == other for other in arms if other != ARM] + list(terms) for *_, arm, _, terms in rows], float)
    y, seeds = np.array([row[3] for row in rows]), np.array([row[0] for row in rows])
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (seed, image, *_) in enumerate(rows):
        groups[seed, image].append(number)
    for group in groups.values():
        x[group] -= x[group].mean(0)
        y[group] -= y[group].mean()
    few = len(arms) - 1
    sides = {"arms": x[:, :few], "features": x[:, few:], "both": x}

    def fit(columns: Any, target: Any) -> tuple[Any, float]:
        found, *_ = np.linalg.lstsq(columns, target, rcond=None)
        left = ((target - columns @ found) ** 2).sum()
        return found, 1 - float(left / (target**2).sum()) if target.any() else math.nan

    effects: dict[str, list[Interval]] = {}
    every = sorted(set(seeds.tolist()))
    for name in ("arms", "both"):
        fits = [fit(sides[name][seeds == seed], y[seeds == seed])[0][:few] for seed in every]
        effects[name] = [interval(column) for column in np.transpose(fits).tolist()]
    others = [arm for arm in arms if arm != ARM]
    return {
        **{name: fit(columns, y)[1] for name, columns in sides.items()},
        "alone": dict(zip(others, effects["arms"], strict=True)),
        "beside": dict(zip(others, effects["both"], strict=True)),
    }


def compared(study: joined.Study, network: str, eps: str, other: str) -> dict[str, Interval | None]:
    """Certified accuracy of ``ARM`` minus another arm's, and its time divided by the other's, over the seeds.

    The time is the mean over the images that both classify rightly, an undecided question counted twice its limit; the
    ratio's mean and interval are those of its logarithm.
    """
    from benchmarks.study.statistics import interval

    first, second = (
        {cell.seed: cell for cell in cells if cell.complete(eps, METHOD)}
        for arm in (ARM, other)
        for setting, cells in study.settings.items()
        if (setting.network, setting.arm) == (network, arm)
    )
    points, ratios = [], []
    for seed in sorted(first.keys() & second.keys()):
        pair = first[seed], second[seed]
        one, two = (cell.value("certified", eps, METHOD) for cell in pair)
        times = [cell.costs("seconds", eps, METHOD) or {} for cell in pair]
        shared = times[0].keys() & times[1].keys()
        means = [statistics.fmean(each[image] for image in shared) for each in times]
        if one is not None and two is not None:
            points.append(one - two)
            ratios.append(math.log(means[0] / means[1]))
    ratio = interval(ratios) if ratios else None
    if ratio is not None:
        ratio = Interval(math.exp(ratio.mean), math.exp(ratio.low), math.exp(ratio.high), ratio.n)
    return {"points": interval(points) if points else None, "ratio": ratio}


def page(records: Sequence[Record], folder: Path) -> Page:
    """The page: the table of arms, what explains the sub-problems, and the figure."""
    from benchmarks.study import joined
    from benchmarks.study.statistics import interval

    study = joined.joined(read_records(ASKED))
    features = {(record["cell"], record["eps"]): record for record in of(records, "features")}
    made = Page("easier")
    rows: list[Sequence[Any]] = []
    causes: list[Sequence[Any]] = []
    drawn: dict[str, list[tuple[str, dict[str, Interval | None]]]] = {}
    for network in study.networks:
        arms = study.arms(network)
        radii = study.radii(network)
        middle = radii[len(radii) // 2]
        for eps in radii:
            asked = questions(study, network, eps, features)
            if len({row[0] for row in asked}) < 2:
                continue
            found = explained(asked, arms)
            causes.append((network, eps, len(asked), *(found[name] for name in ("arms", "features", "both"))))
            for arm in arms:
                cells = [
                    cell
                    for setting, group in study.settings.items()
                    for cell in group
                    if (setting.network, setting.arm) == (network, arm) and cell.complete(eps, METHOD)
                ]
                beside = dict.fromkeys(("points", "ratio")) if arm == ARM else compared(study, network, eps, arm)
                if arm != ARM and eps == middle:
                    drawn.setdefault(f"{network}, ε = {eps}", []).append((arm, beside))
                mine = [row for row in asked if row[2] == arm]
                rows.append(
                    (
                        *(network, eps, arm, len(cells)),
                        interval([cell.training["results"]["clean"] for cell in cells]),
                        interval([cell.value("certified", eps, METHOD) or 0.0 for cell in cells]),
                        beside["points"],
                        sum(row[3] > 0 for row in mine) / len(mine),
                        undecided(cells, eps),
                        beside["ratio"],
                        math.expm1(statistics.fmean(row[3] for row in mine)),
                        statistics.fmean(math.expm1(row[4][1]) for row in mine),
                        found["alone"].get(arm),
                        found["beside"].get(arm),
                    )
                )
    columns = ("network", "ε", "arm", "seeds", "clean", "certified", "hardened − arm, certified", "branch", "undecided",
               "time, hardened : arm", "sub-problems", "unstable", "effect", "effect beside features")  # fmt: skip
    forms = {
        "clean": ".1%", "certified": ".1%", "hardened − arm, certified": "+z.1%", "branch": ".0%", "undecided": ".1%",
        "time, hardened : arm": ".2f", "sub-problems": ".2f", "unstable": ".0f", "effect": "+z.2f",
        "effect beside features": "+z.2f",
    }  # fmt: skip
    made.add(
        "# Does hardening give networks that are easier to verify?",
        "Means over the seeds of the study `e1` with 95 % intervals by Student's t. *certified*: of all images that "
        "are asked, by the complete method. *branch*: of the questions about images that all arms of a seed classify "
        "rightly, the part that is not decided by bounds or the attack alone; *sub-problems*: exp of the mean of "
        "log(1 + sub-problems) over the same, those of an undecided question counted as far as they go, minus 1. "
        "*time*: of the images that both arms classify rightly, an undecided question counted twice its limit. "
        "*effect*: log(1 + sub-problems) of the arm minus the hardened network's on the same image, alone, and where "
        "margin and unstable neurons (logarithms, squares and product) are held equal.",
    )
    made.bullets(notes(records))
    made.add(Table(columns, rows, forms))
    made.add(
        "## Do unstable neurons and margins explain the sub-problems?",
        "R² of log(1 + sub-problems) between the arms of one seed and image: of the arms alone, of margin and unstable "
        "neurons, and of both.",
    )
    made.add(Table(("network", "ε", "questions", "R², arms", "R², features", "R², both"), causes))
    again = Counter((r["network"], r["eps"], r["first"], r["second"]) for r in of(records, "second"))
    made.add(
        "## A second complete method",
        f"A sample of the decided questions, half of which branched, asked of `{SECOND}` with {SECONDS:g} s each.",
    )
    made.add(
        Table(("network", "ε", f"{METHOD}", f"{SECOND}", "questions"), [(*k, n) for k, n in sorted(again.items())])
    )
    if drawn:
        draw(drawn, folder)
        made.add("## Figure", "![The hardened network beside each other arm](easier.png)")
    return made


def undecided(cells: Sequence[joined.Cell], eps: str) -> float:
    """The part of the questions about some networks that ended without a verdict."""
    said = Counter(answer["verdict"] for cell in cells for answer in cell.answers[eps, METHOD].values())
    return said["unknown"] / max(said.total(), 1)


def draw(found: Mapping[str, Sequence[tuple[str, Mapping[str, Interval | None]]]], folder: Path) -> None:
    """The figure: differences in certified accuracy and ratios of times, a colour for each network."""
    from benchmarks.common.charts import Axis, Chart, Series
    from benchmarks.common.charts import draw as drawn

    names = list(dict.fromkeys(arm for compared in found.values() for arm, _ in compared))
    panels = []
    axes = {
        "points": Axis("certified accuracy, hardened − arm, points"),
        "ratio": Axis("time, hardened : arm", "log", ends=(0.05, 20)),
    }
    for what, axis in axes.items():
        scale, margins = (100, (-100 * POINTS, 100 * POINTS)) if what == "points" else (1, (1 / FACTOR, FACTOR))
        series = []
        for number, (network, arms) in enumerate(found.items()):
            shift = 0.25 * (number - (len(found) - 1) / 2)
            points = [
                (Interval(scale * value.mean, scale * value.low, scale * value.high, value.n), names.index(arm) + shift)
                for arm, each in arms
                if (value := each[what]) is not None
            ]
            series.append(Series(network, points, joined=False, style=number))
        ends = (-0.6, len(names) - 0.4)
        series += [Series("", [(x, y) for y in ends], style=6) for x in margins]
        ticks = {float(place): spoken(arm) for place, arm in enumerate(names)}
        panels.append(Chart(axis.label, series, axis, Axis("", ends=ends, ticks=ticks)))
    drawn(panels, folder / "easier.png", height=2.8)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the option for the study's folder."""
    parser.add_argument("--study", type=Path, default=ASKED, help="the folder of the study, with its networks")


STUDY = Study("benchmarks.verification.easier", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
