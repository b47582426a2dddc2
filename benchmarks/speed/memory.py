"""How much memory the methods take that bound, under the limits that ``--memory`` sets.

    python benchmarks/memory.py
    python benchmarks/memory.py --seconds 60

Every run is a process of its own, one thread. Its figure is the largest resident memory while the method works (VmHWM)
less the resident memory before, when everything is imported and the network and its properties are there. So what the
libraries set up at their first use counts too. The properties are L∞ balls around uniformly random images, the radius
such that some of them stay open. The networks are those of the verification competition, in the folder that
VERIFIABLE_RELU_DATA names, and one in ``nets``. Linux only. Writes results/memory.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import command, describe, load_average
from rich.progress import track

from verifiable_relu.campaign.inputs import verifier
from verifiable_relu.network import read_onnx
from verifiable_relu.spec import Query, linf_properties
from verifiable_relu.verifiers.base import Budget

HERE = Path(__file__).parent
RESULTS = HERE / "results"
METHODS = ("crown", "alpha-crown", "split")
LIMITS = {"64M": 64 << 20, "256M": 256 << 20, "1G": 1 << 30}


@dataclass(frozen=True)
class Task:
    """A network, by its path here or below the data's folder, and how many balls of which radius are asked about."""

    onnx: str
    count: int
    eps: float

    def path(self) -> Path:
        """Where the network is."""
        here = HERE / self.onnx
        return here if here.exists() else Path(os.environ["VERIFIABLE_RELU_DATA"]) / self.onnx


TASKS = {
    "MLP 9×200": Task("vnncomp/eran_2021/onnx/mnist_relu_9_200.onnx.gz", 256, 0.005),
    "CIFAR-10 CNN, 6,244 neurons": Task("vnncomp/oval21/onnx/cifar_wide_kw.onnx.gz", 128, 0.04),
    "CIFAR-10 residual network, 9,280 neurons": Task("nets/cifar_residual.onnx.gz", 64, 1 / 255),
}


def measure(task: Task, method: str, limit: int, seconds: float) -> dict[str, Any]:
    """In this process: MiB that the method takes beyond what is there before it, the seconds, and the verdicts."""
    torch.set_num_threads(1)
    network = read_onnx(task.path())
    chosen = verifier(method, memory=limit)
    images = torch.rand(task.count, *network.input_shape, generator=torch.Generator().manual_seed(0))
    labels = network(images).flatten(1).argmax(1).numpy()
    properties = linf_properties(images.double().numpy(), labels, task.eps, network.output_size)
    queries = [Query(network, p) for p in properties]
    # The high-water mark falls to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _peak(), time.perf_counter()
    outcomes = chosen.verify(queries, Budget.each(seconds / task.count, task.count))
    taken = _peak() - before
    verdicts = Counter(str(o.verdict) for o in outcomes)
    return {"MiB": taken, "seconds": time.perf_counter() - start, "verdicts": dict(sorted(verdicts.items()))}


def _peak() -> float:
    """The high-water mark of this process's resident memory, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20, help="for a run's properties together (default 20)")
    parser.add_argument("--one", nargs=3, metavar=("NETWORK", "METHOD", "LIMIT"), help="measure this one, print JSON")
    options = parser.parse_args()
    if options.one:
        network, method, limit = options.one
        print(json.dumps(measure(TASKS[network], method, LIMITS[limit], options.seconds)))
        return
    runs = [(network, method, limit) for network in TASKS for method in METHODS for limit in LIMITS]
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for run in track(runs, "runs"):
        arguments = [sys.executable, __file__, "--seconds", str(options.seconds), "--one", *run]
        done = subprocess.run(
            arguments, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        found[run] = json.loads(done.stdout)
    lines = [f"| network | balls | method | {' | '.join(f'`--memory {limit}`' for limit in LIMITS)} |"]
    lines.append("|---" * (3 + len(LIMITS)) + "|")
    for network, task in TASKS.items():
        for method in METHODS:
            cells = [found[network, method, limit] for limit in LIMITS]
            shown = " | ".join(f"{c['MiB']:.0f} MiB, {c['seconds']:.0f} s, {_verdicts(c)}" for c in cells)
            lines.append(f"| {network} | {task.count} of {task.eps:.2g} | `{method}` | {shown} |")
    text = "\n".join(lines)
    head = (
        f"`{command()}`: largest resident memory while the method works, less that before it, at most "
        f"{options.seconds:g} s a run. {load_average()} {describe()}."
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "memory.md").write_text(f"{head}\n\n{text}\n")
    print(text)


def _verdicts(cell: dict[str, Any]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in cell["verdicts"].items())


if __name__ == "__main__":
    main()
