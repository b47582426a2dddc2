"""The measurements of the comparison: bounds, the attack and the complete solvers on trained networks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
from rich.progress import Progress

from benchmarks.common.progress import Bar, bars
from benchmarks.common.questions import Balls, checked, clean, climb, first_exact, timed
from benchmarks.common.runs import grid_of, network_path, run_name
from benchmarks.training.comparison_tables import SOLVERS
from verifiable_relu.data import Dataset, load
from verifiable_relu.data.registry import DATASETS
from verifiable_relu.network import Network, read_onnx
from verifiable_relu.spec import Query
from verifiable_relu.study.records import Record, Records
from verifiable_relu.study.variants import architecture, variant_name
from verifiable_relu.train.options import Options
from verifiable_relu.verifiers.base import Verdict
from verifiable_relu.verifiers.registry import make


@dataclass(frozen=True)
class Trained:
    """A trained network, and the options of its training."""

    options: Options
    network: Network

    @property
    def title(self) -> Record:
        """The fields with which every record of the network begins."""
        options = asdict(self.options)
        return {
            "run": run_name(self.options),
            "network": self.network.digest,
            "data": self.options.data,
            "architecture": architecture(options),
            "arm": variant_name(options),
            "seed": self.options.seed,
        }


def bounded(trained: Trained, data: Dataset, chosen: np.ndarray, bar: Progress) -> Iterator[tuple[str, Record]]:
    """For each radius the numbers of images that are certified and not refuted, and the unstable neurons per layer.

    Args:
        trained: the network.
        data: the test images.
        chosen: the indices of the images that are asked about.
        bar: the display on which progress is shown.
    """
    for eps in DATASETS[trained.options.data].radii:
        balls = Balls.around(trained.network, data, chosen, eps)
        ibp = balls.ask(make("ibp"), bar)
        found = climb(balls, make, bar)
        yield (
            eps,
            {
                "seconds": {"ibp": round(ibp.wall, 3), **found.seconds},
                "ibp": ibp.count(Verdict.UNSAT),
                "crown": found.crown,
                "alpha-crown": found.alpha,
                "attacked": found.standing,
                "unstable": [round(layer / max(1, len(balls)), 3) for layer in found.layers],
            },
        )


def solved(network: Network, data: Dataset, record: Record, bar: Progress) -> Record:
    """The solvers' answers to the images of ``record``; each query is asked alone, and its time includes the bounds."""
    balls = Balls.around(network, data, np.array(record["images"]), record["eps"])
    answers: Record = {}
    for method in SOLVERS:
        with Bar(bar, f"{record['run']} ε={record['eps']} {method}", len(balls)) as shown:
            answers[method] = []
            for query in balls.queries:
                answers[method].append(_answer(query, method, record["limit"]))
                bar.advance(shown.task)
    return {**record, "answers": answers}


def _answer(query: Query, method: str, limit: float) -> Record:
    outcome, wall, cpu = timed(query, make(method), limit)
    return {
        "verdict": checked(query, outcome).value,
        "reason": outcome.reason.value,
        "by_bounds": outcome.detail == "decided by bounds alone",
        "unstable": outcome.unstable,
        "seconds": round(wall, 4),
        "cpu": round(cpu, 4),
    }


def contradicted(record: Record) -> list[int]:
    """The images of a record for which one solver answers *sat* and another *unsat*."""
    verdicts = zip(*([a["verdict"] for a in record["answers"][method]] for method in SOLVERS), strict=True)
    return [index for index, said in zip(record["images"], verdicts, strict=True) if {"sat", "unsat"} <= set(said)]


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Measure what has no record: first the bounds of all networks, ordered by seed, then the solvers.

    Raises:
        InputError: for a network or data that cannot be used.
        SystemExit: if solvers contradict each other, after their answers are recorded.
    """
    data = {name: load(name, "test") for name in asked.data}
    grid = grid_of(asked)
    networks = [Trained(options, read_onnx(network_path(asked.networks, options))) for options in grid]
    right: dict[str, set[int]] = {}
    with bars() as bar:
        task = bar.add_task("networks", total=2 * len(networks))
        for trained in networks:
            name = trained.options.data
            chosen = first_exact(data[name], asked.images)
            good = chosen[clean(trained.network, data[name].images[chosen], data[name].labels[chosen])]
            right[name] = right.get(name, set(good.tolist())) & set(good.tolist())
            about = {"run": run_name(trained.options), "network": trained.network.digest, "images": len(chosen)}
            if not records.has("bounds", about):
                counts = {"images": len(chosen), "clean": len(good)}
                found = dict(bounded(trained, data[name], good, bar))
                records.append("bounds", {**trained.title, **counts, "eps": found})
            bar.advance(task)
        for trained in networks:
            name, title = trained.options.data, trained.title
            images = sorted(right[name])[: asked.solver_images]
            if images and trained.options.seed < asked.solver_seeds and title["arm"] in asked.solver_arms:
                about = {**title, "eps": DATASETS[name].radii[-1], "limit": asked.limit, "images": images}
                if not records.has("solvers", about):
                    record = solved(trained.network, data[name], about, bar)
                    records.append("solvers", record)
                    if wrong := contradicted(record):
                        raise SystemExit(f"{title['run']}, test image {wrong[0]}: {' and '.join(SOLVERS)} contradict")
            bar.advance(task)
