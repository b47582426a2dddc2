"""Complete solvers against the number of unstable neurons: L∞ balls of growing radius on a small digits network.

    python benchmarks/solver_scaling.py

The network is an MLP trained here, in seconds, on scikit-learn's digits (8×8 pixels in [0, 1]). Only questions that
bounds leave open are counted. Writes results/solver_scaling.csv (a row per method, image and radius) and
results/solver_scaling.md (a row per method and number of unstable neurons).
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import torch
from machine import describe
from rich.progress import track
from sklearn.datasets import load_digits
from torch import nn

from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Input, Linear, Node, Relu
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.verifiers.base import Budget, Verdict, Verifier
from verifiable_relu.verifiers.milp import Milp
from verifiable_relu.verifiers.smt import Smt

RESULTS = Path(__file__).parent / "results"
SIZES = (64, 24, 24, 10)
TRAINING = 1500
RADII = ("0.02", "0.03", "0.04", "0.05", "0.06", "0.08", "0.1", "0.12", "0.15")
BINS = (0, 4, 8, 12, 16, 20, 25, 30, 35, 40, 49)


@dataclass(frozen=True)
class Line:
    """One method on one question.

    Attributes:
        seconds: wall clock, bounds included.
        cpu: processor seconds, which other work on the machine disturbs less.
    """

    method: str
    image: int
    radius: str
    unstable: int
    verdict: str
    reason: str
    seconds: float
    cpu: float


def train(seed: int) -> tuple[Network, torch.Tensor, torch.Tensor]:
    """The network, and the images and labels that it was not trained on and classifies correctly."""
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
    kept = TRAINING + (model(images[TRAINING:]).argmax(1) == labels[TRAINING:]).nonzero().squeeze(1)
    return Network(tuple(nodes), name="digits"), images[kept], labels[kept]


def question(network: Network, image: torch.Tensor, label: int, radius: str) -> Query:
    """Does another class reach the score of ``label`` within ``radius`` (in pixels' units, clipped to [0, 1])?"""
    pixels = [Fraction(float(v)) for v in image]
    box = Box.exact([max(Fraction(0), v - Fraction(radius)) for v in pixels],
                    [min(Fraction(1), v + Fraction(radius)) for v in pixels])  # fmt: skip
    unsafe = tuple(
        (Row(tuple(sorted([(label, Fraction(1)), (other, Fraction(-1))])), Fraction(0)),)
        for other in range(network.output_size)
        if other != label
    )
    return Query(network, Property(box, unsafe))


def measure(method: Verifier, queries: dict[tuple[int, str], Query], limit: float, allowance: float) -> Iterator[Line]:
    """One line per question that bounds leave open, smallest radius first, for ``allowance`` seconds in all."""
    start = time.perf_counter()
    for (image, radius), query in track(queries.items(), method.name):
        if time.perf_counter() - start > allowance:
            return
        wall, cpu = time.perf_counter(), time.process_time()
        (outcome,) = method.verify([query], Budget.each(limit, 1))
        wall, cpu = round(time.perf_counter() - wall, 4), round(time.process_time() - cpu, 4)
        if outcome.detail != "decided by bounds alone":
            yield Line(method.name, image, radius, outcome.unstable or 0, outcome.verdict, outcome.reason, wall, cpu)


def table(lines: list[Line]) -> Iterator[str]:
    """The Markdown table."""
    columns = ("unstable neurons", "method", "questions", "sat", "unsat", "undecided")
    columns += ("median s", "slowest s", "median CPU s", "most CPU s")
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for low, high in pairwise(BINS):
        for method in dict.fromkeys(line.method for line in lines):
            mine = [line for line in lines if line.method == method and low <= line.unstable < high]
            if mine:
                sat, unsat = (sum(line.verdict == verdict for line in mine) for verdict in (Verdict.SAT, Verdict.UNSAT))
                wall, cpu = [line.seconds for line in mine], [line.cpu for line in mine]
                counts = f"{len(mine)} | {sat} | {unsat} | {len(mine) - sat - unsat}"
                times = (statistics.median(wall), max(wall), statistics.median(cpu), max(cpu))
                yield f"| {low}–{high - 1} | {method} | {counts} | {' | '.join(f'{v:.2f}' for v in times)} |"


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--limit", type=float, default=10.0, help="seconds per question (default 10)")
    parser.add_argument("--allowance", type=float, default=120.0, help="seconds per method (default 120)")
    options = parser.parse_args()
    machine = describe()
    torch.set_num_threads(1)
    network, images, labels = train(options.seed)
    queries = {
        (image, radius): question(network, images[image], int(labels[image]), radius)
        for radius in RADII
        for image in range(options.images)
    }
    lines = [line for method in (Milp(), Smt()) for line in measure(method, queries, options.limit, options.allowance)]
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "solver_scaling.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Line)])
        writer.writeheader()
        writer.writerows(asdict(line) for line in lines)
    text = "\n".join(table(lines))
    head = (
        f"A {'-'.join(map(str, SIZES))} ReLU network on scikit-learn's digits (seed {options.seed}), {options.images} "
        f"images, radii {', '.join(RADII)}; questions that bounds decide are left out. At most {options.limit:g} s per "
        f"question, {options.allowance:g} s per method, one thread; load average "
        f"{os.getloadavg()[0]:.1f} at the end. {machine}."
    )
    (RESULTS / "solver_scaling.md").write_text(f"{head}\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
