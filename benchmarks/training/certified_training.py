"""Training for verifiability, with λ-GELU and with ReLU: stability terms that grow with the hardening, and certified
training by the project's own bounds.

    python benchmarks/certified_training.py
    python benchmarks/certified_training.py --parts stability --seeds 5
    python benchmarks/certified_training.py --table

Two parts, on MNIST. *stability*: an MLP 2×128 whose loss has the ReLU-stability term at ε = 0.02, at four weights that
grow over the first half of the ramp of λ. *certified*: a small CNN trained by IBP, CROWN-IBP and SABR for ε = 0.1.
Runs and records are those of arms.py, in results/certified_training/; what each network proves is a line in
measured.jsonl there. Nothing is trained or measured twice, and the tables are made of the saved records alone. Needs
the data sets (see README.md).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import architecture, run_name, train_all
from comparison import Counting, Lines
from machine import command, describe, load_average
from questions import Bar, bars, checked, clean
from rich.console import Console
from rich.progress import Progress

from verifiable_relu.data import Dataset, load
from verifiable_relu.errors import InputError
from verifiable_relu.network import Network, read_onnx
from verifiable_relu.report import Estimate, Table, estimate
from verifiable_relu.spec import Query, linf_properties
from verifiable_relu.train.options import Options
from verifiable_relu.verifiers.base import Budget, Verdict, Verifier
from verifiable_relu.verifiers.registry import make

RESULTS = Path(__file__).parent / "results" / "certified_training"
RUNS = Path(__file__).parent.parent / "runs" / "certified_training"
ARMS = ("lambda-gelu", "relu")
EPS = {"stability": "0.02", "certified": "0.1"}
SUMMED = (0.0, 3e-4, 1e-3, 3e-3)
"""Weights of the stability term in the form of a sum over all neurons; the trainer's term is their mean."""

Record = dict[str, Any]


def stability_grid(seed: int) -> list[Options]:
    """Both arms at each weight of the stability term."""
    hidden = (128, 128)
    base = {"hidden": hidden, "epochs": 8, "eps": float(EPS["stability"]), "seed": seed}
    grown = [{"stability": weight * sum(hidden), "terms_grow": "ramp"} for weight in SUMMED if weight]
    return [Options("mnist", arm=arm, **base, **term) for term in ({}, *grown) for arm in ARMS]  # type: ignore[arg-type]


def certified_grid(seed: int) -> list[Options]:
    """Both arms by IBP, twice, then a narrower and shorter training by each of the bounds.

    Trained at a radius a little larger than what they are asked for.
    """
    base = {
        "model": "cnn",
        "hidden": (100,),
        "batch": 64,
        "warmup": 2,
        "eps": 0.12,
        "certified": 1.0,
        "initialisation": "ibp",
        "seed": seed,
    }
    by = ({}, {"certified_by": "sabr", "attack_steps": 4}, {"certified_by": "crown-ibp"})
    narrow = [{"channels": (8, 16), "epochs": 6, **bound} for bound in by]
    wide = [{"channels": (16, 32), "epochs": epochs, "rate": rate} for epochs, rate in ((12, 2e-3), (20, 5e-3))]
    return [Options("mnist", arm=arm, **base, **setting) for setting in (*wide, *narrow) for arm in ARMS]  # type: ignore[arg-type]


GRIDS = {"stability": stability_grid, "certified": certified_grid}


# Measuring


def proven(
    network: Network, images: np.ndarray, labels: np.ndarray, eps: str, verifier: Verifier, bar: Progress
) -> np.ndarray:
    """Which of the images are certified, or for the attack: which are refuted, each refutation confirmed."""
    queries = [Query(network, prop) for prop in linf_properties(images, labels, Fraction(eps), network.output_size)]
    shown = Bar(bar, f"ε={eps} {verifier.name}", len(queries))
    outcomes = verifier.verify(queries, Budget.each(math.inf, len(queries)), shown)
    bar.remove_task(shown.task)
    decided = Verdict.SAT if verifier.name == "attack" else Verdict.UNSAT
    return np.array([checked(q, o) is decided for q, o in zip(queries, outcomes, strict=True)], bool)


def measured(network: Network, test: Dataset, eps: str, many: int, few: int, bar: Progress) -> Record:
    """Numbers of images, of the first ``many`` by intervals and of the first ``few`` by more costly means."""

    def asked(count: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = np.flatnonzero(test.exact)[:count]
        images, labels = test.images[chosen], test.labels[chosen]
        good = clean(network, images, labels)
        return images[good], labels[good]

    images, labels = asked(many)
    found: Record = {"clean": len(images)}
    found["ibp"] = int(proven(network, images, labels, eps, make("ibp"), bar).sum())
    images, labels = asked(few)
    right, crown = len(images), Counting()
    by_crown = proven(network, images, labels, eps, crown, bar)
    unstable = sum(sum(layers) for layers in crown.counts) / max(1, right)
    images, labels = images[~by_crown], labels[~by_crown]
    by_alpha = proven(network, images, labels, eps, make("alpha-crown"), bar)
    images, labels = images[~by_alpha], labels[~by_alpha]
    refuted = proven(network, images, labels, eps, make("attack"), bar)
    crowned = int(by_crown.sum())
    found["few"] = {
        "clean": right,
        "attacked": right - int(refuted.sum()),
        "crown": crowned,
        "alpha-crown": crowned + int(by_alpha.sum()),
        "unstable": round(unstable, 3),
    }
    return found


def measure(asked: argparse.Namespace, kept: Lines) -> None:
    """Ask each trained network what it has not been asked yet.

    Raises:
        InputError: for a network or data that cannot be used.
    """
    with bars() as bar:
        for part in asked.parts:
            for options in (options for seed in range(asked.seeds) for options in GRIDS[part](seed)):
                test = load(options.data, "test")
                network = read_onnx(asked.networks / f"{run_name(options)}.onnx")
                record: Record = {
                    "part": part,
                    "run": run_name(options),
                    "network": network.digest,
                    "eps": EPS[part],
                    "images": [asked.many, asked.few],
                }
                if record not in kept:
                    kept.append({**record, **measured(network, test, EPS[part], asked.many, asked.few, bar)})


# Tables


def of_run(records: Path, run: str) -> Record:
    """The record that the training left.

    Raises:
        InputError: if it is missing or unreadable.
    """
    path = records / f"{run}.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InputError(f"no record of a run ({error})", path=path) from error


def table(kept: Sequence[Record], records: Path, part: str) -> Table:
    """A row per objective and arm."""
    groups: dict[tuple[Any, ...], list[tuple[Record, Record]]] = defaultdict(list)
    for record in kept:
        if record["part"] == part:
            run = of_run(records, record["run"])
            options = run["options"]
            objective = (
                f"{options['stability'] / sum(options['hidden']):.2g}"
                if part == "stability"
                else f"{options['certified_by']}, w = {options['certified']:g}"
            )
            setting = (architecture(options), options["epochs"], options["rate"], options["eps"], *record["images"])
            groups[(*setting, record["eps"], objective, options["arm"])].append((record, run))
    columns = ("net", "epochs", "rate", "ε in training", "images, IBP", "images, others", "ε")
    columns += ("stability, summed" if part == "stability" else "trained by", "arm", "seeds")
    columns += ("clean", "attacked", "certified, IBP", "CROWN", "α-CROWN", "unstable", "ms/step")
    rows = []
    for key, group in groups.items():
        many, few = key[4:6]

        def share(name: str, of: int, group: Sequence[tuple[Record, Record]] = group) -> Estimate:
            return estimate([(r if name in r else r["few"])[name] / of for r, _ in group])

        rows.append(
            (
                *(*key, len(group), share("clean", many), share("attacked", few), share("ibp", many)),
                *(share("crown", few), share("alpha-crown", few), share("unstable", 1)),
                float(np.mean([1e3 * run["results"]["seconds_per_step"] for _, run in group])),
            )
        )
    return Table(columns, rows)


def write(folder: Path, kept: Sequence[Record], records: Path, head: str) -> str:
    """CSV and Markdown in ``folder``; the Markdown."""
    tables = {part: table(kept, records, part) for part in GRIDS}
    for part, made in tables.items():
        (folder / f"{part}.csv").write_text(made.csv(), encoding="utf-8")
    text = f"""# Training for verifiability

{head}

MNIST; means over the seeds ± half a 95 % interval (Student's t), parts of all images asked. *clean* and IBP over the
first test images as many as *images, IBP* says, the rest over as many as *images, others*. *attacked*: classified
rightly and not refuted by the project's attack. *certified*: proven for the ReLU network, rounding accounted for.
*unstable*: neurons per rightly classified image whose input can have either sign by CROWN's bounds. The first test
images are harder than the rest, so that CROWN over few may lie below IBP over all. One seed has no interval, and shows
no difference between arms. ms/step (median of the epochs' means) was measured beside other work on the machine.

## ReLU stability at ε = {EPS["stability"]}, its weight growing over the first half of the ramp of λ

ReLU has no λ, and the same growth of the weight over the same steps.

{tables["stability"].markdown()}
## Certified training for ε = {EPS["certified"]}

Rate 0.005 was the best for ReLU of a few trials of 5 epochs, judged on the test images by IBP at ε = 0.1 (rates 0.002,
0.005 and 0.01, ε in training 0.1, 0.12 and 0.15, batches of 64 and 128); nothing was tuned for λ-GELU.

{tables["certified"].markdown()}"""
    (folder / "certified_training.md").write_text(text, encoding="utf-8")
    return text


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--parts", type=lambda text: text.split(","), default=list(GRIDS))
    made.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    made.add_argument("--many", type=int, default=10_000, help="test images for intervals (default all)")
    made.add_argument("--few", type=int, default=1000, help="for the attack, CROWN and α-CROWN (default 1000)")
    made.add_argument("--workers", type=int, default=1, help="trainings at once (default 1)")
    made.add_argument("--table", action="store_true", help="train and measure nothing, only make the tables")
    made.add_argument("--results", type=Path, default=RESULTS)
    made.add_argument("--networks", type=Path, default=RUNS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, measure and tabulate; 0 when done, 2 for bad input, 130 after Ctrl-C."""
    asked = parser().parse_args(arguments)
    records = asked.results / "runs"
    torch.set_num_threads(1)
    try:
        if unknown := [part for part in asked.parts if part not in GRIDS]:
            raise InputError(f"no part '{unknown[0]}'; there are {', '.join(GRIDS)}")
        records.mkdir(parents=True, exist_ok=True)
        kept = Lines(asked.results / "measured.jsonl", ("run", "network", "eps", "images"))
        about = asked.results / "measured.txt"
        if not asked.table:
            for seed in range(asked.seeds):
                grid = [options for part in asked.parts for options in GRIDS[part](seed)]
                train_all(grid, records, asked.networks, asked.workers, Console(stderr=True))
            measure(asked, kept)
            with about.open("a", encoding="utf-8") as file:
                file.write(f"- `{command()}`. {load_average()} {describe()}.\n")
        head = about.read_text(encoding="utf-8").strip() if about.is_file() else ""
        print(write(asked.results, kept.records, records, head))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on: {command()}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
