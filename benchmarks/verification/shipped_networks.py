"""The networks of specs/ over the first test images: clean, attacked and certified accuracy, and what each took.

    python benchmarks/shipped_networks.py
    python benchmarks/shipped_networks.py --network mnist_mlp --images 100 --budget 5

An image counts as *attacked* if it is classified rightly and the project's own attack finds no counterexample, and as
*certified* by a method if that proves that there is none. Images known to differ from the official ones are left out.
Needs the data sets (see README.md). Writes results/shipped_networks.csv (a row per network, radius and method) and
results/shipped_networks.md (a row per network and radius).
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from machine import command, describe, load_average
from questions import Bar, bars, checked, clean
from rich.progress import Progress

from verifiable_relu.data import load
from verifiable_relu.network import hardened, read_onnx
from verifiable_relu.spec import Query, linf_properties
from verifiable_relu.verifiers.base import Budget, Verdict
from verifiable_relu.verifiers.registry import make

RESULTS = Path(__file__).parent / "results"
SPECS = Path(__file__).parent.parent / "specs"
PLAN = {
    "mnist_mlp": ("mnist", ("0.01", "0.02", "0.03")),
    "mnist_cnn": ("mnist", ("0.05", "0.1")),
    "cifar_cnn": ("cifar10", ("1/255", "2/255")),
}
METHODS = ("attack", "ibp", "crown-ibp", "crown", "alpha-crown", "auto")
JOINT = (160, 20, 5)
"""λ from which on the smooth networks share the certificates that CROWN gives of the ReLU network."""


@dataclass(frozen=True)
class Line:
    """One method on one network and radius.

    Attributes:
        clean: images that are classified rightly; only these are put to the method.
        certified, refuted, undecided: how many of the clean ones were.
        unstable: mean number of unstable neurons per clean image by the method's bounds; NaN where it has none.
        seconds: wall clock for all images together.
        cpu: processor seconds, which other work on the machine disturbs less.
    """

    network: str
    eps: str
    method: str
    images: int
    clean: int
    certified: int
    refuted: int
    undecided: int
    unstable: float
    seconds: float
    cpu: float


def measure(name: str, eps: str, count: int, budget: float, progress: Progress) -> Iterator[Line]:
    """One line per method.

    Raises:
        SystemExit: if one method certifies what another refutes: one of them is wrong.
    """
    data = load(PLAN[name][0], "test")
    network = read_onnx(SPECS / f"{name}.onnx")
    chosen = np.flatnonzero(data.exact)[:count]
    images, labels = data.images[chosen], data.labels[chosen]
    right = clean(network, images, labels)
    properties = linf_properties(images[right], labels[right], Fraction(eps), network.output_size)
    queries = [Query(network, prop) for prop in properties]
    verdicts: list[list[Verdict]] = []
    for method in METHODS:
        bar = Bar(progress, f"{name} ε={eps} {method}", len(queries))
        wall, cpu = time.perf_counter(), time.process_time()
        outcomes = make(method).verify(queries, Budget.each(budget, len(queries)), bar)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        verdicts.append([checked(query, outcome) for query, outcome in zip(queries, outcomes, strict=True)])
        sat, unsat = (verdicts[-1].count(verdict) for verdict in (Verdict.SAT, Verdict.UNSAT))
        known = [outcome.unstable for outcome in outcomes if outcome.unstable is not None]
        unstable = round(float(np.mean(known)), 1) if known else float("nan")
        undecided = len(queries) - sat - unsat
        sizes = (len(chosen), len(queries), unsat, sat, undecided)
        yield Line(name, eps, method, *sizes, unstable, round(wall, 2), round(cpu, 2))
    proven = [q for q, v in zip(queries, verdicts[METHODS.index("crown")], strict=True) if v is Verdict.UNSAT]
    for lam in JOINT:
        family = hardened(network, lam)
        bar = Bar(progress, f"{name} ε={eps} crown, λ ≥ {lam}", len(proven))
        wall, cpu = time.perf_counter(), time.process_time()
        outcomes = make("crown").verify(
            [Query(family, q.property) for q in proven], Budget.each(budget, len(proven)), bar
        )
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        certified = sum(outcome.verdict is Verdict.UNSAT for outcome in outcomes)
        sizes = (len(chosen), len(proven), certified, 0, len(proven) - certified)
        unstable = round(float(np.mean([outcome.unstable or 0 for outcome in outcomes])), 1)
        yield Line(name, eps, f"crown, λ ≥ {lam}", *sizes, unstable, round(wall, 2), round(cpu, 2))
    for index, answers in zip(chosen[right], zip(*verdicts, strict=True), strict=True):
        if {Verdict.SAT, Verdict.UNSAT} <= set(answers):
            claims = ", ".join(f"{method}: {answer}" for method, answer in zip(METHODS, answers, strict=True))
            raise SystemExit(f"{name}, test image {index}, ε = {eps}: verdicts contradict each other ({claims})")


def table(lines: Sequence[Line]) -> Iterator[str]:
    """The Markdown table: one row per network and radius. Accuracies are parts of all images."""
    columns = ("network", "ε", "images", "clean", "attacked", *(f"certified, {m}" for m in METHODS[1:]))
    columns += ("undecided", "unstable, ibp", "unstable, crown", *(f"{m} s" for m in METHODS))
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for name, eps in dict.fromkeys((line.network, line.eps) for line in lines):
        by = {line.method: line for line in lines if (line.network, line.eps) == (name, eps)}
        attack, *provers = (by[method] for method in METHODS)
        ibp, crown, auto = by["ibp"], by["crown"], by["auto"]
        survived = attack.clean - attack.refuted
        accuracies = (attack.clean, survived, *(line.certified for line in provers), auto.undecided)
        parts = " | ".join(f"{100 * part / attack.images:.1f} %" for part in accuracies)
        times = " | ".join(f"{by[method].seconds:.1f}" for method in METHODS)
        yield f"| {name} | {eps} | {attack.images} | {parts} | {ibp.unstable:.1f} | {crown.unstable:.1f} | {times} |"


def joint_table(lines: Sequence[Line]) -> Iterator[str]:
    """What part of the images that CROWN certifies is certified for all networks with λ ≥ a number, too."""
    yield f"| network | ε | certified, crown | {' | '.join(f'also for λ ≥ {lam}' for lam in JOINT)} | s |"
    yield "|---" * (len(JOINT) + 4) + "|"
    for name, eps in dict.fromkeys((line.network, line.eps) for line in lines):
        by = {line.method: line for line in lines if (line.network, line.eps) == (name, eps)}
        families = [by[f"crown, λ ≥ {lam}"] for lam in JOINT]
        shares = " | ".join(f"{100 * line.certified / max(1, line.clean):.1f} %" for line in families)
        times = " + ".join(f"{line.seconds:.1f}" for line in families)
        yield f"| {name} | {eps} | {by['crown'].certified} | {shares} | {times} |"


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", nargs="+", choices=PLAN, default=list(PLAN))
    parser.add_argument("--images", type=int, default=1000, help="first exact images of the test split (default 1000)")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds per image and method (default 2)")
    parser.add_argument("--threads", type=int, help="of torch (default: as many as it takes)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with bars() as progress:
        lines = [
            line
            for name in options.network
            for eps in PLAN[name][1]
            for line in measure(name, eps, options.images, options.budget, progress)
        ]
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "shipped_networks.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Line)])
        writer.writeheader()
        writer.writerows(asdict(line) for line in lines)
    text, joint = "\n".join(table(lines)), "\n".join(joint_table(lines))
    head = (
        f"`{command()}`: the first {options.images} exact test images, {options.budget:g} s per image and method, "
        f"the attack's seed 0, {torch.get_num_threads()} threads. {load_average()} {describe()}."
    )
    notes = (
        "*clean*: classified rightly. *attacked*: of these, not refuted by `attack`, each refutation confirmed. "
        "*certified*: proven by the method. *undecided*: neither proven nor refuted by `auto`. *unstable*: mean number "
        "of ReLUs per image whose input can have either sign. Every method starts from nothing; seconds are for all "
        "images together."
    )
    about = (
        "*also for λ ≥ …*: of the images that CROWN certifies for the ReLU network, the part for which one CROWN "
        "certificate holds for that network and every network with λ'-GELU, λ' ≥ λ in each layer, in its place."
    )
    (RESULTS / "shipped_networks.md").write_text(f"{head}\n\n{text}\n\n{notes}\n\n{joint}\n\n{about}\n")
    print(f"{text}\n\n{joint}")


if __name__ == "__main__":
    main()
