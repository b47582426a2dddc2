"""How do complete methods scale with the number of unstable neurons? L∞ balls of growing radius on growing networks.

    python -m benchmarks.verification.solver_scaling

The networks are MLPs trained here, in a minute, on scikit-learn's digits (8×8 pixels in [0, 1]). Only questions that
bounds leave open are counted. Each answer is a record, and is not asked for again. Marabou is asked where it is
installed. At the most that takes methods × widths × ALLOWANCE seconds, which is 16 minutes for the defaults, and a
minute of training.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.markup import Cell, Page, Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.study import Study

if TYPE_CHECKING:
    from verifiable_relu.data import Dataset
    from verifiable_relu.network import Network
    from verifiable_relu.spec import Query

WIDTHS = (24, 80, 300, 1000)
"""Neurons of each of the two hidden layers of a network."""

TRAINING = 1500
"""Of the 1,797 digits; the others are asked about."""

HARDENED = 0.1
"""Radius of the perturbations that networks are trained against: without, most open questions are refuted at once."""

RADII = ("0.05", "0.08", "0.1", "0.12", "0.15", "0.2")
METHODS = ("bab", "milp", "smt", "smt-exact", "marabou")
ASKED = ("bab", "milp", "smt", "marabou")
"""The methods that are asked by default: the exact referee is slow beyond ten unstable neurons."""

BINS = (0, 5, 10, 15, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 2001)
"""Numbers of unstable neurons at which a row of the table ends and the next begins."""


def train(seed: int, width: int) -> tuple[Network, Dataset]:
    """A network with two hidden layers of this width, and the digits that it was not trained on.

    It is trained against perturbations, which take a step along the sign of the loss's gradient in every step of the
    training and are kept for the next.
    """
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
    for before, after in pairwise((64, width, width, 10)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2 * (24 / width) ** 0.5)
    shift = torch.zeros_like(images[:TRAINING])
    for _ in range(150):
        shifted = (images[:TRAINING] + shift).clamp(0, 1).requires_grad_()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(shifted), labels[:TRAINING]).backward()
        optimizer.step()
        assert shifted.grad is not None
        shift = (shift + HARDENED * shifted.grad.sign()).clamp(-HARDENED, HARDENED)
    nodes: list[Node] = [Input(name="x", inputs=(), shape=(64,))]
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
    """Ask each method about each network, smallest radius first, for ``asked.allowance`` seconds at the most."""
    import torch

    from benchmarks.common.progress import bars, say

    torch.set_num_threads(1)
    missing = [method for method in asked.methods if method == "marabou" and find_spec("maraboupy") is None]
    if missing:
        say("not asked, for the package maraboupy is not installed: marabou")
    with bars() as bar:
        for width in asked.widths:
            queries = _queries(width, asked.seed, asked.images)
            for method in asked.methods:
                if method not in missing:
                    title = {"method": method, "width": width, "seed": asked.seed, "limit": asked.limit}
                    _ask(title, bar.track(queries, description=f"{method}, width {width}"), asked.allowance, records)


def _queries(width: int, seed: int, images: int) -> list[tuple[int, str, Query]]:
    """Images, radii, and balls of these radii around the images, smallest radius first."""
    import numpy as np

    from benchmarks.common.questions import Balls, clean

    network, data = train(seed, width)
    first = np.flatnonzero(clean(network, data.images, data.labels))[:images]
    return [
        (image, radius, query)
        for radius in RADII
        for image, query in enumerate(Balls.around(network, data, first, radius).queries)
    ]


def _ask(title: dict[str, Any], queries: Iterable[tuple[int, str, Query]], allowance: float, records: Records) -> None:
    """Ask one method what has no answer, until that has taken ``allowance`` seconds."""
    from benchmarks.common.questions import timed
    from verifiable_relu.verifiers.registry import make

    known = [r for r in records.of("answer") if {name: r[name] for name in title} == title]
    taken = sum(record["seconds"] for record in known)
    answered = {(record["image"], record["radius"]) for record in known}
    for image, radius, query in queries:
        if taken > allowance:
            break
        if (image, radius) in answered:
            continue
        outcome, wall, cpu = timed(query, make(title["method"]), title["limit"])
        taken += wall
        if outcome.detail != "decided by bounds alone":
            found = {
                "unstable": outcome.unstable or 0,
                "verdict": outcome.verdict.value,
                "reason": outcome.reason.value,
                "trust": outcome.trust and outcome.trust.value,
                "sub_problems": outcome.subproblems,
                "seconds": round(wall, 4),
                "cpu": round(cpu, 4),
            }
            records.append("answer", {**title, "image": image, "radius": radius, **found})


def table(answers: Sequence[Record]) -> Table:
    """A row per method and range of numbers of unstable neurons."""
    columns = ("unstable neurons", "method", "questions", "sat", "unsat", "proven", "undecided")
    times = ("median s", "slowest s", "median CPU s", "most CPU s")
    rows: list[tuple[Cell, ...]] = []
    for low, high in pairwise(BINS):
        for method in METHODS:
            mine = [r for r in answers if r["method"] == method and low <= r["unstable"] < high]
            if mine:
                count = Counter(record["verdict"] for record in mine)
                proven = sum(r["verdict"] == "unsat" and r["trust"] != "float" for r in mine)
                wall, cpu = ([record[name] for record in mine] for name in ("seconds", "cpu"))
                taken = (statistics.median(wall), max(wall), statistics.median(cpu), max(cpu))
                counts = (len(mine), count["sat"], count["unsat"], proven, count["unknown"])
                searched = [r["sub_problems"] for r in mine if r["sub_problems"] is not None]
                middle = statistics.median(searched) if searched else None
                rows.append((f"{low}–{high - 1}", method, *counts, *taken, middle))
    forms = {**dict.fromkeys(times, ".2f"), "median sub-problems": ".0f"}
    return Table((*columns, *times, "median sub-problems"), rows, forms)


def page(records: Sequence[Record], folder: Path) -> Page:
    """The table, and the answers as CSV."""
    answers = of(records, "answer")
    made = Page("solver_scaling")
    made.add("# Complete methods against the number of unstable neurons")
    made.bullets(notes(records))

    def values(name: str) -> str:
        return ", ".join(f"{value:g}" for value in sorted({record[name] for record in answers}))

    missing = [method for method in ASKED if not any(record["method"] == method for record in answers)]
    made.add(
        f"ReLU networks with two hidden layers of {values('width')} neurons on scikit-learn's digits (seed "
        f"{values('seed')}; trained against perturbations of {HARDENED:g}), "
        f"{len({record['image'] for record in answers})} images, radii {', '.join(RADII)}; questions that bounds "
        f"decide are left out. At most {values('limit')} s per question, one thread. Each method is asked about a "
        "network, smallest radius first, until its time for that network is spent; an undecided question counts with "
        "the time that it took. *proven*: those of the unsats that do not rest on floating point as it comes.",
        f"Not asked: {', '.join(missing)}." if missing else "",
        table(answers),
    )
    names: tuple[str, ...] = (
        "method",
        "width",
        "image",
        "radius",
        "unstable",
        "verdict",
        "reason",
        "trust",
        "sub_problems",
    )
    names += ("seconds", "cpu")
    made.save("solver_scaling", Table(names, [[record[name] for name in names] for record in answers]))
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """How much is asked."""
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=ASKED, help=f"(default {' '.join(ASKED)})")
    parser.add_argument(
        "--widths", nargs="+", type=int, default=WIDTHS, help=f"of the networks (default {' '.join(map(str, WIDTHS))})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the networks' weights (default 0)")
    parser.add_argument("--images", type=int, default=12, help="that are asked about (default 12)")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds per question (default 10)")
    parser.add_argument("--allowance", type=float, default=60.0, help="seconds per method and network (default 60)")


STUDY = Study("benchmarks.verification.solver_scaling", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
