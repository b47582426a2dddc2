"""The first comparison: does hardening give networks that are easier to verify? Asked of the arms of arms.py.

    python benchmarks/comparison.py
    python benchmarks/comparison.py --data fashion_mnist --images 200 --solver-images 0
    python benchmarks/comparison.py --table

The options that choose the networks are those of arms.py, which must have trained them: the network after the swap of
every arm and seed. Each is asked for clean, attacked and certified accuracy at three ε and for its unstable neurons per
layer by CROWN's bounds; then the complete solvers get the first images that all these networks classify rightly. Every
network leaves a line in results/comparison/bounds.jsonl and solvers.jsonl and is never asked the same twice. Tables
(CSV, Markdown, LaTeX) and figures in results/comparison/ are made of the saved records alone. Needs the data sets (see
README.md), and matplotlib for the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import ARMS, architecture, arm_name, grid_of, grid_parser, run_name
from machine import command, describe, load_average
from measures import reading
from questions import Bar, bars, checked, clean
from rich.progress import Progress

from verifiable_relu.bounds import Bounds, Relaxation, unstable
from verifiable_relu.data import Dataset, load
from verifiable_relu.errors import InputError
from verifiable_relu.network import Network, read_onnx
from verifiable_relu.report import Estimate, Table, estimate
from verifiable_relu.report.figures import cactus, levels, pairs, profiles
from verifiable_relu.spec import Property, Query, linf_properties
from verifiable_relu.train.options import Options
from verifiable_relu.verifiers.base import Budget, Verdict, Verifier
from verifiable_relu.verifiers.incomplete import Crown
from verifiable_relu.verifiers.registry import make

RESULTS = Path(__file__).parent / "results" / "comparison"
EPS = {"mnist": ("0.01", "0.02", "0.03"), "fashion_mnist": ("0.005", "0.01", "0.02")}
BOUNDS = ("ibp", "crown", "alpha-crown")
SOLVERS = ("milp", "smt")
HARDENED = "lambda-gelu"
RIVALS = ("relu", "gelu-swap", "gelu-swap-finetune", "gelu-swap-finetune-extra")
ANNEALED = ("lambda-gelu", "lambda-gelu-frozen", "swish")
IMAGES, SOLVER_IMAGES = 1000, 50

Record = dict[str, Any]


# Measuring


@dataclass(frozen=True)
class Arm:
    """A trained network and where it comes from."""

    options: Options
    network: Network

    @property
    def title(self) -> Record:
        """What every record of it begins with."""
        options = asdict(self.options)
        return {
            "run": run_name(self.options),
            "network": self.network.digest,
            "data": self.options.data,
            "architecture": architecture(options),
            "arm": arm_name(options),
            "seed": self.options.seed,
        }


class Lines:
    """Records in a file of JSON lines. A last line that a killed run left unfinished is dropped."""

    def __init__(self, path: Path, key: Sequence[str]) -> None:
        self.path, self.key = path, key
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.is_file() else ""
        try:
            self.records: list[Record] = [json.loads(line) for line in whole.splitlines()]
            self.known = {self._of(record) for record in self.records}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"no records of a comparison ({error})", path=path) from error
        if path.is_file() and path.read_text(encoding="utf-8") != whole + "\n":
            path.write_text(whole + "\n" if whole else "", encoding="utf-8")

    def _of(self, record: Record) -> str:
        return json.dumps([record[name] for name in self.key])

    def __contains__(self, record: Record) -> bool:
        return self._of(record) in self.known

    def append(self, record: Record) -> None:
        """Keep it for good."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.records.append(record)
        self.known.add(self._of(record))


@dataclass(frozen=True)
class Counting(Crown):
    """CROWN that remembers how many neurons of each layer were unstable, in all queries of a batch together."""

    counts: list[list[int]] = field(default_factory=list)

    def relaxation(self, network: Network, box: Bounds, stop: Callable[[], bool]) -> Relaxation:
        found = super().relaxation(network, box, stop)
        self.counts.append([int(unstable(network.nodes[i], found.pre[i]).sum()) for i in sorted(found.pre)])
        return found


def bounded(arm: Arm, images: np.ndarray, labels: np.ndarray, bar: Progress) -> Iterator[tuple[str, Record]]:
    """For each ε the numbers of images that are certified and attacked, and unstable neurons per layer.

    What a weaker bound proves is not put to a stronger one that starts from it, and what is proven is not attacked.
    """
    for eps in EPS[arm.options.data]:
        properties = linf_properties(images, labels, Fraction(eps), arm.network.output_size)
        answers: Record = {"seconds": {}}
        crown = Counting()
        for method in BOUNDS:
            verifier = crown if method == "crown" else make(method)
            answers[method], answers["seconds"][method], rest = _proven(arm, properties, verifier, eps, bar)
            if method == "crown":
                properties = rest
            elif method == "alpha-crown":
                answers[method] += answers["crown"]
        queries = [Query(arm.network, prop) for prop in rest]
        start = time.perf_counter()
        outcomes = make("attack").verify(queries, Budget.each(math.inf, len(queries)))
        answers["seconds"]["attack"] = round(time.perf_counter() - start, 3)
        refuted = [checked(q, o) for q, o in zip(queries, outcomes, strict=True)].count(Verdict.SAT)
        answers["attacked"] = len(images) - refuted
        layers = zip(*crown.counts, strict=True)
        answers["unstable"] = [round(sum(layer) / len(images), 3) for layer in layers]
        yield eps, answers


def _proven(
    arm: Arm, properties: Sequence[Property], verifier: Verifier, eps: str, bar: Progress
) -> tuple[int, float, list[Property]]:
    """How many are proven, the seconds, and the rest."""
    queries = [Query(arm.network, prop) for prop in properties]
    shown = Bar(bar, f"{run_name(arm.options)} ε={eps} {verifier.name}", len(queries))
    start = time.perf_counter()
    outcomes = verifier.verify(queries, Budget.each(math.inf, len(queries)), shown)
    seconds = round(time.perf_counter() - start, 3)
    bar.remove_task(shown.task)
    rest = [p for p, outcome in zip(properties, outcomes, strict=True) if outcome.verdict is not Verdict.UNSAT]
    return len(properties) - len(rest), seconds, rest


def solved(arm: Arm, data: Dataset, record: Record, bar: Progress) -> Record:
    """The solvers' answers to the images of ``record``, each question alone, bounds included in its time."""
    chosen = record["images"]
    properties = linf_properties(
        data.images[chosen], data.labels[chosen], Fraction(record["eps"]), arm.network.output_size
    )
    answers: Record = {}
    for method in SOLVERS:
        shown = Bar(bar, f"{run_name(arm.options)} ε={record['eps']} {method}", len(chosen))
        answers[method] = []
        for prop in properties:
            query = Query(arm.network, prop)
            wall, cpu = time.perf_counter(), time.process_time()
            (outcome,) = make(method).verify([query], Budget.each(record["limit"], 1))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            answers[method].append(
                {
                    "verdict": checked(query, outcome).value,
                    "reason": outcome.reason.value,
                    "by_bounds": outcome.detail == "decided by bounds alone",
                    "unstable": outcome.unstable,
                    "seconds": round(wall, 4),
                    "cpu": round(cpu, 4),
                }
            )
            bar.advance(shown.task)
        bar.remove_task(shown.task)
    verdicts = zip(*([a["verdict"] for a in answers[method]] for method in SOLVERS), strict=True)
    for index, pair in zip(chosen, verdicts, strict=True):
        if set(pair) >= {"sat", "unsat"}:
            raise SystemExit(
                f"{run_name(arm.options)}, test image {index}: {' and '.join(SOLVERS)} contradict each other"
            )
    return {**record, "answers": answers}


def measure(asked: argparse.Namespace, bounds: Lines, solvers: Lines) -> None:
    """Ask what has not been asked yet: bounds of all networks first, seed by seed, then the solvers.

    Raises:
        InputError: for a network or data that cannot be used.
    """
    data = {name: load(name, "test") for name in asked.data}
    grid = grid_of(asked)
    arms = [Arm(options, read_onnx(asked.networks / f"{run_name(options)}.onnx")) for options in grid]
    right: dict[str, np.ndarray] = {}
    with bars() as bar:
        task = bar.add_task("networks", total=2 * len(arms))
        for arm in arms:
            test = data[arm.options.data]
            chosen = np.flatnonzero(test.exact)[: asked.images]
            good = clean(arm.network, test.images[chosen], test.labels[chosen])
            right[arm.options.data] = right.get(arm.options.data, True) & good
            record: Record = {**arm.title, "images": len(chosen), "clean": int(good.sum())}
            if record not in bounds:
                members = chosen[good]
                found = dict(bounded(arm, test.images[members], test.labels[members], bar))
                bounds.append({**record, "eps": found})
            bar.advance(task)
        for arm in arms:
            name = arm.options.data
            chosen = np.flatnonzero(data[name].exact)[: asked.images][right[name]][: asked.solver_images]
            if len(chosen) and arm.options.seed < asked.solver_seeds and arm.title["arm"] in asked.solver_arms:
                eps = EPS[name][-1]
                record = {**arm.title, "eps": eps, "limit": asked.limit, "images": chosen.tolist()}
                if record not in solvers:
                    solvers.append(solved(arm, data[name], record, bar))
            bar.advance(task)


# Tables


def grouped(records: Sequence[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """By the values of some fields, the arms in their order."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda r: (r["data"], r["architecture"], ARMS.index(r["arm"]), r["seed"])):
        groups[tuple(record[name] for name in names)].append(record)
    return dict(groups)


def share(records: Sequence[Record], eps: str, method: str) -> Estimate:
    """The part of the images that survives ``method`` (attacked, or a bound's name)."""
    return estimate([record["eps"][eps][method] / record["images"] for record in records])


def accuracy_table(records: Sequence[Record]) -> Table:
    """A row per data set, ε and arm."""
    columns = ("data", "net", "images", "ε", "arm", "seeds", "clean", "attacked")
    columns += (*(f"certified, {method}" for method in BOUNDS), "unstable", "per layer")
    rows = []
    for (data, net, images), group in grouped(records, "data", "architecture", "images").items():
        for eps in EPS[data]:
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
    return Table(columns, rows)


def solver_table(records: Sequence[Record]) -> Table:
    """A row per data set, arm and solver; an unanswered question counts with the limit."""
    columns = ("data", "net", "ε", "arm", "seeds", "questions", "unstable", "by bounds", "solver", "limit, s")
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
    return Table(columns, rows)


def share_gained(gained: Sequence[int], images: int) -> Estimate:
    """Of whole numbers of images, so that differences that cancel out are 0, as a part of all."""
    found = estimate(gained)
    return Estimate(found.mean / images, found.half / images, found.n)


def difference_table(records: Sequence[Record]) -> Table:
    """λ-GELU hardened minus each rival, paired by seed."""
    columns = ("data", "ε", "λ-GELU hardened minus", "seeds", "Δ clean", "Δ attacked", "Δ certified, alpha-crown")
    columns += ("certified", "Δ unstable", "unstable neurons")
    rows = []
    for (data, _, images), group in grouped(records, "data", "architecture", "images").items():
        by = {(run["arm"], run["seed"]): run for run in group}
        for eps in EPS[data]:
            for rival in RIVALS:
                seeds = [seed for arm, seed in by if arm == HARDENED and (rival, seed) in by]
                if not seeds:
                    continue
                matched = [(by[HARDENED, seed], by[rival, seed]) for seed in seeds]
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
    return Table(columns, rows)


def answer(differences: Table) -> Iterator[str]:
    """What the differences say about the question, a sentence per rival."""
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


def trained(records: Path, runs: Sequence[str]) -> list[Record]:
    """The records that arms.py left of these runs.

    Raises:
        InputError: if one is missing or unreadable.
    """
    found = []
    for run in runs:
        path = records / f"{run}.json"
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            options = record["options"]
            title = {name: options[name] for name in ("data", "seed")}
            found.append({**title, "architecture": architecture(options), "arm": arm_name(options), **record})
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"no record of a run ({error})", path=path) from error
    return found


def figures(folder: Path, bounds: Sequence[Record], solvers: Sequence[Record], runs: Sequence[Record]) -> None:
    """Every figure, from records.

    Raises:
        InputError: without matplotlib.
    """
    panels: dict[str, Any] = defaultdict(dict)
    heat: dict[str, list[list[float]]] = {}
    for (data, net, arm), group in grouped(runs, "data", "architecture", "arm").items():
        swap = [[run["results"].get(f"clean_{side}_substitution") for run in group] for side in ("before", "after")]
        if None not in swap[0] + swap[1]:
            panels[f"{data}, {net}"][arm] = (estimate(swap[0]), estimate(swap[1]))
        if arm in ANNEALED:
            epochs = [[epoch["lam"] for epoch in run["epochs"]] for run in group]
            heat[f"{data}, {net}, {arm}"] = np.mean(epochs, axis=0).tolist()
    if panels:
        pairs(folder / "swap.png", panels, "test accuracy")
    if heat:
        profiles(folder / "profiles.png", heat)
    panels = defaultdict(dict)
    for (data, net, arm), group in grouped(bounds, "data", "architecture", "arm").items():
        panels[f"{data}, {net}"][arm] = [(float(eps), share(group, eps, "alpha-crown")) for eps in EPS[data]]
    if panels:
        levels(folder / "certified.png", panels, "ε", "certified accuracy, α-CROWN")
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


def cut(bounds: Sequence[Record], solvers: Sequence[Record]) -> str:
    """What was asked of fewer images, seeds or arms than a full run asks, as a sentence."""
    images = sorted({record["images"] for record in bounds})
    said = [f"{', '.join(map(str, images))} test images for the bounds (a full run: {IMAGES})"]
    for (data, eps), group in grouped(solvers, "data", "eps").items():
        counts = [len(group[0]["images"]), len({r["seed"] for r in group}), len({r["arm"] for r in group})]
        said.append(
            "on {}, {} images, {} seed(s), {} arms for the solvers (a full run: {}, 3 and {}), at ε = {}".format(
                data, *counts, SOLVER_IMAGES, len(ARMS), eps
            )
        )
    return f"Asked: {'; '.join(said)}."


def write(folder: Path, bounds: Sequence[Record], solvers: Sequence[Record], runs: Sequence[Record], head: str) -> str:
    """Tables and figures in ``folder``; the Markdown."""
    accuracy, differences, times = accuracy_table(bounds), difference_table(bounds), solver_table(solvers)
    for name, table in (("accuracy", accuracy), ("differences", differences), ("solvers", times)):
        (folder / f"{name}.csv").write_text(table.csv(), encoding="utf-8")
        (folder / f"{name}.tex").write_text(table.latex(), encoding="utf-8")
    figures(folder, bounds, solvers, runs)
    text = f"""# The first comparison: does hardening give networks that are easier to verify?

{head}

{cut(bounds, solvers)}

## What the figures say

{chr(10).join(answer(differences))}

A difference is *shown* where the 95 % interval of the paired difference (same seed: same initial weights and data
order) leaves out zero and has a width. The intervals are Student's t over the seeds, not corrected for the number of
comparisons; few seeds show large differences only.

{differences.markdown()}
## Accuracy and unstable neurons

Mean over the seeds ± half a 95 % interval (Student's t), parts of all images. *attacked*: classified rightly and not
refuted by the project's attack, each refutation confirmed by exact evaluation and replay; images that α-CROWN proves
are not attacked. *certified*: classified rightly and proven by the method with rounding accounted for. *unstable*:
neurons per image, classified rightly, whose input can have either sign by CROWN's bounds. Every network is the one
after the swap, ReLU throughout, but `prelu`, which is never swapped.

{accuracy.markdown()}
![certified accuracy against ε](certified.png)

## Accuracy before and after the swap

Over the whole test set, from the records of `arms.py`. Axes do not begin at zero.

![accuracy before and after the swap](swap.png)

## Solvers

The same images for all arms: the first that all networks of the data set classify rightly. Wall clock, each question
alone, bounds included; an undecided question counts with the limit. *by bounds*: decided before the solver began.

{times.markdown()}
![seconds by which questions were answered](solvers.png)

## λ per layer and epoch

Mean over the seeds, at the end of each epoch.

![λ profiles](profiles.png)
"""
    (folder / "comparison.md").write_text(text, encoding="utf-8")
    return text


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = grid_parser(__doc__)
    made.add_argument(
        "--images", type=int, default=IMAGES, help=f"first exact images of the test split (default {IMAGES})"
    )
    made.add_argument(
        "--solver-images", type=int, default=SOLVER_IMAGES, help=f"for MILP and SMT (default {SOLVER_IMAGES})"
    )
    made.add_argument("--solver-seeds", type=int, default=3, help="how many seeds the solvers are asked of (default 3)")
    made.add_argument("--solver-arms", type=lambda text: text.split(","), default=list(ARMS), help="(default all)")
    made.add_argument("--limit", type=float, default=5.0, help="seconds per question and solver (default 5)")
    made.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    made.add_argument("--table", action="store_true", help="measure nothing, only make tables and figures")
    made.add_argument("--results", type=Path, default=RESULTS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and tabulate; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    asked = parser().parse_args(arguments)
    torch.set_num_threads(asked.threads)
    asked.results.mkdir(parents=True, exist_ok=True)
    try:
        if unknown := [name for name in asked.data if name not in EPS]:
            raise InputError(f"no ε for the data set '{unknown[0]}'; there are {', '.join(EPS)}")
        bounds = Lines(asked.results / "bounds.jsonl", ("run", "network", "images"))
        solvers = Lines(asked.results / "solvers.jsonl", ("run", "network", "eps", "limit", "images"))
        about = asked.results / "measured.txt"
        if not asked.table:
            measure(asked, bounds, solvers)
            with about.open("a", encoding="utf-8") as file:
                file.write(f"- `{command()}`; one process. {load_average()} {describe()}.\n")
        head = about.read_text(encoding="utf-8").strip() if about.is_file() else ""
        runs = trained(asked.records, list(dict.fromkeys(record["run"] for record in bounds.records)))
        print(write(asked.results, bounds.records, solvers.records, runs, head))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on: {command()}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
