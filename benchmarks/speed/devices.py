"""How fast is verification on a GPU beside a processor, and does it find the same?

    python -m benchmarks.speed.devices --device cuda --threads 1 16

Each network is asked about L∞ balls around test images, in one batch, by bounds and by ``auto``, on the processor with
each number of threads and on the device. The least wall-clock seconds of several runs count; the first run on each,
which loads libraries, does not. The margins found on the device are compared with the processor's.

The data are looked for in VERIFIABLE_RELU_DATA; networks whose data are missing are asked about random images.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from benchmarks.common.markup import Table
from benchmarks.common.networks import network_file
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.script import Script
from benchmarks.common.tables import Page
from verifiable_relu.errors import InputError

if TYPE_CHECKING:
    from verifiable_relu.search.outcomes import Outcome
    from verifiable_relu.spec import Query

CASES = {
    "mnist_mlp": ("mnist", Fraction(3, 100)),
    "mnist_6x100": ("mnist", Fraction(1, 100)),
    "cifar_cnn": ("cifar10", Fraction(1, 255)),
    "cifar_residual": ("cifar10", Fraction(1, 510)),
}
"""For each network (``benchmarks.common.networks``) its data set and the radius of the balls."""

METHODS = ("crown", "alpha-crown", "auto")

_COLUMNS = ("network", "method", "images", "where", "seconds", "unsat", "sat", "rounded", "apart")


def queries(name: str, count: int) -> list[Query]:
    """Queries about a network: the balls around the first images, each with the class that the network gives it."""
    import numpy as np
    import torch

    from verifiable_relu.data import load
    from verifiable_relu.readers import read_onnx
    from verifiable_relu.spec import Query, linf_properties

    network = read_onnx(network_file(name))
    kind, eps = CASES[name]
    try:
        images = load(kind, "test").images[:count]
    except InputError:
        images = np.random.default_rng(0).random((count, *network.source.input_shape), dtype=np.float32)
    with torch.inference_mode():
        labels = network(torch.from_numpy(images).flatten(1)).argmax(1).numpy()
    shaped = images.reshape(-1, *network.source.input_shape)
    return [Query(network, prop) for prop in linf_properties(shaped, labels, eps, network.output_size)]


def timed(method: str, asked: list[Query], device: str, limit: float, runs: int) -> tuple[float, list[Outcome]]:
    """The least wall-clock seconds of several runs after one that does not count, and the outcomes of the last."""
    from verifiable_relu.search.batch import answers
    from verifiable_relu.search.registry import limited, make

    budget, times = replace(limited(method, device), seconds=limit), []
    for _ in range(runs + 1):
        start = time.perf_counter()
        found = list(answers(make(method), asked, budget))
        times.append(time.perf_counter() - start)
    return min(times[1:]), found


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Add a record for each network, method, number of images and place of the work."""
    import torch

    for name in asked.net:
        for method in METHODS:
            for count in asked.images:
                questions, beside = queries(name, count), None
                for place in (*(f"{threads} threads" for threads in asked.threads), asked.device):
                    if place != asked.device:
                        torch.set_num_threads(int(place.split()[0]))
                    device = asked.device if place == asked.device else "cpu"
                    seconds, found = timed(
                        method, questions, device, asked.limit, 1 if method == "auto" else asked.runs
                    )
                    beside = beside or found
                    verdicts = [outcome.verdict.value for outcome in found]
                    record = {
                        "network": name,
                        "method": method,
                        "images": count,
                        "where": place,
                        "seconds": round(seconds, 4),
                        "unsat": verdicts.count("unsat"),
                        "sat": verdicts.count("sat"),
                        "rounded": sum(outcome.trust == "rounded" for outcome in found),
                        "apart": 0.0 if method == "auto" else _apart(beside, found),
                    }
                    records.append("devices", record)
                    print(*record.values(), file=sys.stderr, flush=True)


def _apart(one: Sequence[Outcome], other: Sequence[Outcome]) -> float:
    """By how much margins differ, at most: in units of 1 + |margin|."""
    pairs = [(a.margin, b.margin) for a, b in zip(one, other, strict=True)]
    return max((abs(a - b) / (1 + abs(a)) for a, b in pairs if a is not None and b is not None), default=0.0)


def page(records: Sequence[Record]) -> Page:
    """The page with the seconds of each network, method, number of images and place of the work."""
    made = Page()
    made.add(
        "# Devices",
        "Wall-clock seconds for a batch of images; *rounded* are the verdicts whose rounding errors are accounted for, "
        "*apart* is the largest difference of a margin from the first row's, in units of 1 + |margin|.",
    )
    made.bullets(notes(records))
    rows = [tuple(record[key] for key in _COLUMNS) for record in of(records, "devices")]
    made.add(Table(_COLUMNS, rows, {"seconds": ".4f", "apart": ".1e"}))
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the device, the threads, the networks, the limit and the number of runs."""
    parser.add_argument("--device", default="cuda", help="the torch device beside the processor (cuda)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="numbers of threads on the processor (1)")
    parser.add_argument("--net", nargs="+", choices=tuple(CASES), default=list(CASES), help="networks (all)")
    parser.add_argument("--images", type=int, nargs="+", default=[1, 16, 256], help="images in a batch (1 16 256)")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for each question (default 20)")
    parser.add_argument("--runs", type=int, default=3, help="runs of bounds (default 3)")


SCRIPT = Script("benchmarks.speed.devices", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
