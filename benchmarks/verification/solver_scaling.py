"""How do complete solvers scale with the number of unstable neurons? L∞ balls of growing radius on a small network.

    python -m benchmarks.verification.solver_scaling

The network is an MLP trained here, in seconds, on scikit-learn's digits (8×8 pixels in [0, 1]). Only questions that
bounds leave open are counted. Each answer is a record, and is not asked for again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.study import Study
from benchmarks.report import Cell, Table
from benchmarks.report.page import Page

if TYPE_CHECKING:
    from verifiable_relu.data import Dataset
    from verifiable_relu.network import Network

SIZES = (64, 24, 24, 10)
TRAINING = 1500
"""Of the 1,797 digits; the others are asked about."""

RADII = ("0.02", "0.03", "0.04", "0.05", "0.06", "0.08", "0.1", "0.12", "0.15")
METHODS = ("milp", "smt", "smt-exact")
BINS = (0, 4, 8, 12, 16, 20, 25, 30, 35, 40, 49)
"""Numbers of unstable neurons at which a row of the table ends and the next begins."""


def train(seed: int) -> tuple[Network, Dataset]:
    """The network, and the digits that it was not trained on."""
    import numpy as np
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    from verifiable_relu.data import Dataset
    from verifiable_relu.network.graph import Network
    from verifiable_relu.network.nodes import Input, Linear, Node, Relu

    torch.manual_seed(seed)
    digits = load_digits()
    images = torch.from_numpy(digits.data / 16).float()
    labels = torch.from_numpy(digits.target)
    layers: list[nn.Module] = []
    for before, after in pairwise(SIZES):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[:TRAINING]), labels[:TRAINING]).backward()
        optimizer.step()
    nodes: list[Node] = [Input(name="x", inputs=(), shape=(SIZES[0],))]
    for index, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            weight, bias = layer.weight.detach(), layer.bias.detach()
            nodes.append(Linear(name=f"fc{index}", inputs=(index,), shape=(len(bias),), weight=weight, bias=bias))
        else:
            nodes.append(Relu(name=f"relu{index}", inputs=(index,), shape=nodes[-1].shape))
    held = Dataset(
        "digits", images[TRAINING:].numpy(), labels[TRAINING:].numpy(), (0.0,), (1.0,), np.ones(len(images), bool)
    )
    return Network(tuple(nodes), name="digits"), held


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Ask each solver, smallest radius first, for at most ``asked.allowance`` seconds in all."""
    import numpy as np
    import torch

    from benchmarks.common.progress import bars
    from benchmarks.common.questions import Balls, clean, timed
    from verifiable_relu.verifiers.registry import make

    torch.set_num_threads(1)
    network, data = train(asked.seed)
    first = np.flatnonzero(clean(network, data.images, data.labels))[: asked.images]
    queries = [
        (image, radius, query)
        for radius in RADII
        for image, query in enumerate(Balls.around(network, data, first, radius).queries)
    ]
    with bars() as bar:
        for method in METHODS:
            about = {"method": method, "seed": asked.seed, "limit": asked.limit}
            known = [r for r in records.of("answer") if {name: r[name] for name in about} == about]
            taken = sum(record["seconds"] for record in known)
            answered = {(record["image"], record["radius"]) for record in known}
            for image, radius, query in bar.track(queries, description=method):
                if taken > asked.allowance:
                    break
                if (image, radius) in answered:
                    continue
                outcome, wall, cpu = timed(query, make(method), asked.limit)
                taken += wall
                if outcome.detail != "decided by bounds alone":
                    records.append(
                        "answer",
                        {
                            **about,
                            "image": image,
                            "radius": radius,
                            "unstable": outcome.unstable or 0,
                            "verdict": outcome.verdict.value,
                            "reason": outcome.reason.value,
                            "seconds": round(wall, 4),
                            "cpu": round(cpu, 4),
                        },
                    )


def table(answers: Sequence[Record]) -> Table:
    """A row per method and range of numbers of unstable neurons."""
    columns = ("unstable neurons", "method", "questions", "sat", "unsat", "undecided")
    times = ("median s", "slowest s", "median CPU s", "most CPU s")
    rows: list[tuple[Cell, ...]] = []
    for low, high in pairwise(BINS):
        for method in METHODS:
            mine = [r for r in answers if r["method"] == method and low <= r["unstable"] < high]
            if mine:
                verdicts = [record["verdict"] for record in mine]
                counts = [verdicts.count(verdict) for verdict in ("sat", "unsat", "unknown")]
                wall, cpu = ([record[name] for record in mine] for name in ("seconds", "cpu"))
                taken = (statistics.median(wall), max(wall), statistics.median(cpu), max(cpu))
                rows.append((f"{low}–{high - 1}", method, len(mine), *counts, *taken))
    return Table((*columns, *times), rows, dict.fromkeys(times, ".2f"))


def page(records: Sequence[Record], folder: Path) -> Page:
    """The table, and the answers as CSV."""
    answers = of(records, "answer")
    made = Page("solver_scaling")
    made.add("# Complete solvers against the number of unstable neurons")
    made.bullets(notes(records))
    seeds, limits = ({record[name] for record in answers} for name in ("seed", "limit"))
    made.add(
        f"A {'-'.join(map(str, SIZES))} ReLU network on scikit-learn's digits (seed {', '.join(map(str, seeds))}), "
        f"{len({record['image'] for record in answers})} images, radii {', '.join(RADII)}; questions that bounds "
        f"decide are left out. At most {', '.join(f'{limit:g}' for limit in limits)} s per question, one thread.",
        table(answers),
    )
    names = ("method", "image", "radius", "unstable", "verdict", "reason", "seconds", "cpu")
    made.save("solver_scaling", Table(names, [[record[name] for name in names] for record in answers]))
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """How much is asked."""
    parser.add_argument("--seed", type=int, default=0, help="of the network's weights (default 0)")
    parser.add_argument("--images", type=int, default=12, help="that are asked about (default 12)")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds per question (default 10)")
    parser.add_argument("--allowance", type=float, default=120.0, help="seconds per method (default 120)")


STUDY = Study("benchmarks.verification.solver_scaling", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
