"""Does training for verifiability help λ-GELU more than ReLU? Stability terms, and certified training.

    python -m benchmarks.training.certified_training
    python -m benchmarks.training.certified_training --parts stability --seeds 5
    python -m benchmarks.training.certified_training --table

Two parts, on MNIST. *stability*: an MLP 2×128 whose loss has the ReLU-stability term at ε = 0.02, at four weights that
grow over the first half of the ramp of λ. *certified*: a small CNN trained by IBP, CROWN-IBP and SABR for ε = 0.1.
Each training, and the bounds of each trained network, leave a record; nothing is trained or measured twice. The script
needs the data sets (see README.md).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.runs import network_path, run_name, train_all
from benchmarks.common.study import NETWORKS, Study
from verifiable_relu.errors import InputError
from verifiable_relu.report.estimate import Estimate, estimate
from verifiable_relu.report.markdown import Page
from verifiable_relu.report.table import Table
from verifiable_relu.study.records import Record, Records, notes, of
from verifiable_relu.study.variants import architecture
from verifiable_relu.train.options import Options

if TYPE_CHECKING:
    from rich.progress import Progress

    from verifiable_relu.data import Dataset
    from verifiable_relu.network import Network

COMPARED = ("lambda-gelu", "relu")
"""The arms."""

EPS = {"stability": "0.02", "certified": "0.1"}
SUMMED = (0.0, 3e-4, 1e-3, 3e-3)
"""Weights of the stability term in the form of a sum over all neurons; the trainer's term is their mean."""


def stability_grid(seed: int) -> list[Options]:
    """The trainings of the part *stability*: both arms at each weight of the stability term."""
    hidden = (128, 128)
    base = {"hidden": hidden, "epochs": 8, "eps": float(EPS["stability"]), "seed": seed}
    grown = [{"stability": weight * sum(hidden), "terms_grow": "ramp"} for weight in SUMMED if weight]
    return [Options("mnist", arm=arm, **base, **term) for term in ({}, *grown) for arm in COMPARED]  # type: ignore[arg-type]


def certified_grid(seed: int) -> list[Options]:
    """The trainings of the part *certified*: both arms twice by IBP, then shorter and narrower ones by each bound.

    The networks are trained at a radius a little larger than the one at which they are measured.
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
    by: tuple[dict[str, Any], ...] = ({}, {"certified_by": "sabr", "attack_steps": 4}, {"certified_by": "crown-ibp"})
    narrow = [{"channels": (8, 16), "epochs": 6, **bound} for bound in by]
    wide = [{"channels": (16, 32), "epochs": epochs, "rate": rate} for epochs, rate in ((12, 2e-3), (20, 5e-3))]
    return [Options("mnist", arm=arm, **base, **setting) for setting in (*wide, *narrow) for arm in COMPARED]  # type: ignore[arg-type]


GRIDS = {"stability": stability_grid, "certified": certified_grid}


def measured(network: Network, test: Dataset, eps: str, many: int, few: int, bar: Progress) -> Record:
    """The numbers of images certified: of the first ``many`` by intervals, of the first ``few`` by CROWN and α-CROWN.

    The attack, too, runs on the first ``few`` images.
    """
    from benchmarks.common.questions import Balls, climb, first_exact
    from verifiable_relu.verifiers.base import Verdict
    from verifiable_relu.verifiers.registry import make

    balls = Balls.around(network, test, first_exact(test, many), eps)
    found: Record = {"clean": len(balls), "ibp": balls.ask(make("ibp"), bar).count(Verdict.UNSAT)}
    balls = Balls.around(network, test, first_exact(test, few), eps)
    ladder = climb(balls, make, bar)
    found["few"] = {
        "clean": len(balls),
        "attacked": ladder.standing,
        "crown": ladder.crown,
        "alpha-crown": ladder.alpha,
        "unstable": round(sum(ladder.layers) / max(1, len(balls)), 3),
    }
    return found


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Train the networks without a record, then bound and attack each of them.

    Raises:
        InputError: for an unknown part, or for a network or data that cannot be used.
    """
    if unknown := [part for part in asked.parts if part not in GRIDS]:
        raise InputError(f"no part '{unknown[0]}'; there are {', '.join(GRIDS)}")
    import torch

    from benchmarks.common.progress import bars
    from verifiable_relu.data import load
    from verifiable_relu.network import read_onnx

    torch.set_num_threads(1)
    grids = {part: [options for seed in range(asked.seeds) for options in GRIDS[part](seed)] for part in asked.parts}
    by_seed = sorted((options for grid in grids.values() for options in grid), key=lambda options: options.seed)
    train_all(by_seed, records, asked.networks, asked.workers)
    with bars() as bar:
        for part, grid in grids.items():
            for options in bar.track(grid, description=part):
                network = read_onnx(network_path(asked.networks, options))
                title = {"run": run_name(options), "network": network.digest}
                about = {"part": part, **title, "eps": EPS[part], "images": [asked.many, asked.few]}
                if not records.has("measured", about):
                    test = load(options.data, "test")
                    found = measured(network, test, EPS[part], asked.many, asked.few, bar)
                    records.append("measured", {**about, **found})


def table(records: Sequence[Record], part: str) -> Table:
    """The table of a part, with a row for each objective and arm.

    Raises:
        InputError: if a network that was measured has no record of its training.
    """
    trained = {record["run"]: record for record in of(records, "run")}
    groups: dict[tuple[Any, ...], list[tuple[Record, Record]]] = defaultdict(list)
    for record in of(records, "measured"):
        if record["part"] == part:
            run = trained.get(record["run"])
            if run is None:
                raise InputError("no record of this training", place=record["run"])
            options = run["options"]
            objective = (
                f"{options['stability'] / sum(options['hidden']):.2g}"
                if part == "stability"
                else f"{options['certified_by']}, w = {options['certified']:g}"
            )
            setting = (architecture(options), options["epochs"], options["rate"], options["eps"], *record["images"])
            groups[(*setting, record["eps"], objective, options["arm"])].append((record, run))
    columns: tuple[str, ...] = ("net", "epochs", "rate", "ε in training", "images, IBP", "images, others", "ε")
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
                statistics.fmean(1e3 * run["results"]["seconds_per_step"] for _, run in group),
            )
        )
    return Table(columns, rows)


def page(records: Sequence[Record], folder: Path) -> Page:
    """The page with a table for each of the two parts."""
    made = Page("certified_training")
    tables = {part: table(records, part) for part in GRIDS}
    for part, each in tables.items():
        made.save(part, each)
    made.add("# Training for verifiability")
    made.bullets(notes(records))
    made.add(
        """\
MNIST; means over the seeds ± half a 95 % interval (Student's t), parts of all images asked. *clean* and IBP over the
first test images as many as *images, IBP* says, the rest over as many as *images, others*. *attacked*: classified
rightly and not refuted by the project's attack. *certified*: proven for the ReLU network, rounding accounted for.
*unstable*: neurons per rightly classified image whose input can have either sign by CROWN's bounds. The first test
images are harder than the rest, so that CROWN over few may lie below IBP over all. One seed has no interval, and shows
no difference between arms. ms/step (median of the epochs' means) was measured beside other work on the machine.""",
        f"""## ReLU stability at ε = {EPS["stability"]}, its weight growing over the first half of the ramp of λ""",
        """ReLU has no λ, and the same growth of the weight over the same steps.""",
        tables["stability"],
        f"""## Certified training for ε = {EPS["certified"]}""",
        """\
Rate 0.005 was the best for ReLU of a few trials of 5 epochs, judged on the test images by IBP at ε = 0.1 (rates 0.002,
0.005 and 0.01, ε in training 0.1, 0.12 and 0.15, batches of 64 and 128); nothing was tuned for λ-GELU.""",
        tables["certified"],
    )
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the parts, seeds and images."""
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=list(GRIDS), help=f"of {', '.join(GRIDS)}"
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on (default 3)")
    parser.add_argument("--many", type=int, default=10_000, help="test images for intervals (default all)")
    parser.add_argument("--few", type=int, default=1000, help="for the attack, CROWN and α-CROWN (default 1000)")
    parser.add_argument("--workers", type=int, default=1, help="trainings at once (default 1)")
    networks = NETWORKS / "certified_training"
    parser.add_argument("--networks", type=Path, default=networks, help="folder of the trained networks")


STUDY = Study("benchmarks.training.certified_training", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
