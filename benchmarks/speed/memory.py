"""How much memory do the methods that bound take, under the limits that ``--memory`` sets?

    python -m benchmarks.speed.memory
    python -m benchmarks.speed.memory --seconds 60

Every run is a process of its own with one thread, and leaves a record. Its figure is the largest resident memory while
the method works (VmHWM) minus the resident memory before, when everything is imported and the network and its
properties are read. Memory that libraries allocate at their first use therefore counts too. The properties are L∞ balls
around uniformly random images, with a radius at which some of them stay undecided. The networks are those of the
verification competition, in the folder that VERIFIABLE_RELU_DATA names, and one in ``nets``. The script needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common.markup import Table
from benchmarks.common.networks import network_file
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.script import ROOT, Script
from benchmarks.common.tables import Page

METHODS = ("crown", "alpha-crown", "split")
LIMITS = {"64M": 64 << 20, "256M": 256 << 20, "1G": 1 << 30}


@dataclass(frozen=True)
class Task:
    """A network (``common.networks``), and the number and the radius of the balls that are asked about."""

    network: str
    count: int
    eps: float


TASKS = {
    "MLP 9×200": Task("mnist_9x200", 256, 0.005),
    "CIFAR-10 CNN, 6,244 neurons": Task("cifar_wide_kw", 128, 0.04),
    "CIFAR-10 residual network, 9,280 neurons": Task("cifar_residual", 64, 1 / 255),
}


def measured(task: Task, method: str, limit: int, seconds: float) -> Record:
    """Run a method in this process: the MiB that it takes on top of the memory before it, the seconds, the verdicts."""
    import torch

    from verifiable_relu.readers import read_onnx
    from verifiable_relu.search.batch import answers
    from verifiable_relu.search.registry import limited, make
    from verifiable_relu.spec import Query, linf_properties

    torch.set_num_threads(1)
    network = read_onnx(network_file(task.network))
    chosen, limits = make(method), limited(method, memory=limit)
    images = torch.rand(task.count, *network.source.input_shape, generator=torch.Generator().manual_seed(0))
    labels = network(images).flatten(1).argmax(1).numpy()
    properties = linf_properties(images.double().numpy(), labels, task.eps, network.output_size)
    queries = [Query(network, p) for p in properties]
    # The high-water mark falls to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _peak(), time.perf_counter()
    outcomes = answers(chosen, queries, replace(limits, seconds=seconds / task.count))
    taken = _peak() - before
    verdicts = Counter(str(o.verdict) for o in outcomes)
    spent = round(time.perf_counter() - start, 2)
    return {"MiB": round(taken, 1), "seconds": spent, "verdicts": dict(sorted(verdicts.items()))}


def _peak() -> float:
    """The high-water mark of this process's resident memory, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024


_CHILD = """\
import json, sys
from benchmarks.speed.memory import LIMITS, TASKS, measured
network, method, limit, seconds = sys.argv[1:]
print(json.dumps(measured(TASKS[network], method, LIMITS[limit], float(seconds))))
"""


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Run what has no record for this time limit.

    Raises:
        InputError: if a network is missing.
    """
    from rich.progress import track

    for task in TASKS.values():
        network_file(task.network)
    runs = [(network, method, limit) for network in TASKS for method in METHODS for limit in LIMITS]
    for network, method, limit in track(runs, "runs"):
        about = {"network": network, "method": method, "limit": limit, "at_most": asked.seconds}
        if records.has("run", about):
            continue
        line = [sys.executable, "-c", _CHILD, network, method, limit, str(asked.seconds)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        task = TASKS[network]
        records.append("run", {**about, "balls": task.count, "eps": task.eps, **json.loads(done.stdout)})


def page(records: Sequence[Record]) -> Page:
    """The page with a row for each network and method, by the latest record of each limit."""
    by = {(record["network"], record["method"], record["limit"]): record for record in of(records, "run")}
    rows = []
    for network, method in dict.fromkeys(key[:2] for key in by):
        found = [by.get((network, method, limit)) for limit in LIMITS]
        first = next(record for record in found if record is not None)
        balls = f"{first['balls']} of {first['eps']:.2g}"
        rows.append((network, balls, f"`{method}`", *(_cell(record) for record in found)))
    made = Page.headed("# Memory", notes(records))
    longest = ", ".join(f"{seconds:g}" for seconds in dict.fromkeys(record["at_most"] for record in by.values()))
    made.add(
        f"Largest resident memory while the method works, less that before it, at most {longest} s a run.",
        Table(("network", "balls", "method", *(f"`--memory {limit}`" for limit in LIMITS)), rows),
    )
    return made


def _cell(record: Record | None) -> str | None:
    if record is None:
        return None
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in record["verdicts"].items())
    return f"{record['MiB']:.0f} MiB, {record['seconds']:.0f} s, {verdicts}"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the option of the time limit."""
    parser.add_argument("--seconds", type=float, default=20, help="for a run's properties together (default 20)")


SCRIPT = Script("benchmarks.speed.memory", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
