"""What do the networks of specs/ prove? Clean, unrefuted and certified accuracy over test images, and what each took.

    python -m benchmarks.verification.shipped_networks
    python -m benchmarks.verification.shipped_networks --network mnist_mlp --images 100 --budget 5

An image counts as *not refuted* if it is classified rightly and the project's own attack finds no counterexample, and
as *certified* by a method if that proves that there is none. Images known to differ from the official ones are left
out. Each method's answers for a network and radius are a record, and are not asked for again. Needs the data sets (see
README.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common.markup import Cell, Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.script import ROOT, Script
from benchmarks.common.tables import Page

PLAN = {
    "mnist_mlp": ("mnist", ("0.01", "0.02", "0.03")),
    "mnist_cnn": ("mnist", ("0.05", "0.1")),
    "cifar_cnn": ("cifar10", ("1/255", "2/255")),
}
"""For each network its data set and the radii."""

METHODS = ("attack", "ibp", "crown-ibp", "crown", "alpha-crown", "auto")
JOINT = (160, 20, 5)
"""λ from which on the smooth networks share the certificates that CROWN gives of the ReLU network."""

_FIELDS = ("network", "eps", "method", "images", "clean", "certified", "refuted", "undecided", "unstable", "seconds")


def joint(lam: float) -> str:
    """What CROWN on all networks with λ'-GELU, λ' ≥ λ, is called among the methods."""
    return f"crown, λ ≥ {lam}"


def measure(asked: argparse.Namespace, records: Records) -> None:
    """A record per network, radius and method.

    Its ``clean`` are the images put to the method: those that are classified rightly, or for the networks of all λ'
    those that CROWN certifies for the ReLU network. ``unstable`` is the mean number of unstable neurons by the
    method's bounds. ``seconds`` are wall clock for all images together, ``cpu`` those of the processor, which other
    work on the machine disturbs less. ``verdicts`` has a letter per image: u(nsat), s(at) or – (unknown).

    Raises:
        InputError: for a network or data that cannot be used.
        SystemExit: if one method certifies what another refutes, when their answers are recorded.
    """
    import numpy as np
    import torch

    from benchmarks.common.progress import bars
    from benchmarks.common.questions import Answers, Balls, first_exact
    from verifiable_relu.data import load
    from verifiable_relu.ir.families import harden
    from verifiable_relu.readers import read_onnx
    from verifiable_relu.search.outcomes import Verdict
    from verifiable_relu.search.registry import make
    from verifiable_relu.spec import Query

    if asked.threads:
        torch.set_num_threads(asked.threads)
    letters = {Verdict.UNSAT: "u", Verdict.SAT: "s", Verdict.UNKNOWN: "–"}

    def asked_of(balls: Balls, method: str, about: dict[str, Any]) -> str:
        """The verdicts, from the records or by asking now."""
        title = {**about, "method": method}
        for record in records.of("answers"):
            if {name: record[name] for name in title} == title and "verdicts" in record:
                return str(record["verdicts"])
        verifier = make("crown" if method.startswith("crown, ") else method)
        answers: Answers = balls.ask(verifier, bar, asked.budget)
        sat, unsat = (answers.count(verdict) for verdict in (Verdict.SAT, Verdict.UNSAT))
        verdicts = "".join(letters[verdict] for verdict in answers.verdicts)
        counts = {"certified": unsat, "refuted": sat, "undecided": len(balls) - sat - unsat}
        unstable = None if answers.unstable is None else round(answers.unstable, 1)
        times = {"seconds": round(answers.wall, 2), "cpu": round(answers.cpu, 2)}
        found = {"clean": len(balls), **counts, "unstable": unstable, **times, "threads": torch.get_num_threads()}
        records.append("answers", {**title, **found, "verdicts": verdicts})
        return verdicts

    with bars() as bar:
        for name in asked.network:
            data = load(PLAN[name][0], "test")
            network = read_onnx(ROOT / "specs" / f"{name}.onnx")
            for eps in PLAN[name][1]:
                chosen = first_exact(data, asked.images)
                about = {"network": name, "eps": eps, "images": len(chosen), "budget": asked.budget}
                balls = Balls.around(network, data, chosen, eps)
                verdicts = {method: asked_of(balls, method, about) for method in METHODS}
                proven = balls.those(np.array([verdict == "u" for verdict in verdicts["crown"]], bool))
                for lam in JOINT:
                    family = harden(network, lam)
                    queries = tuple(Query(family, query.property) for query in proven.queries)
                    asked_of(Balls(family, eps, proven.indices, queries), joint(lam), about)
                for index, said in zip(balls.indices, zip(*verdicts.values(), strict=True), strict=True):
                    if {"u", "s"} <= set(said):
                        claims = ", ".join(map(" ".join, zip(METHODS, said, strict=True)))
                        raise SystemExit(f"{name}, test image {index}, ε = {eps}: verdicts contradict ({claims})")


def table(answers: Sequence[Record]) -> Table:
    """A row per network and radius. Accuracies are parts of all images."""
    shares = ("clean", "not refuted", *(f"certified, {method}" for method in METHODS[1:]), "undecided")
    unstable, seconds = ("unstable, ibp", "unstable, crown"), tuple(f"{method} s" for method in METHODS)
    rows: list[tuple[Cell, ...]] = []
    for (name, eps), by in by_method(answers).items():
        attack, *provers = (by[method] for method in METHODS)
        counts = (attack["clean"], attack["clean"] - attack["refuted"], *(record["certified"] for record in provers))
        accuracies = (count / attack["images"] for count in (*counts, by["auto"]["undecided"]))
        neurons = (by["ibp"]["unstable"], by["crown"]["unstable"])
        rows.append((name, eps, attack["images"], *accuracies, *neurons, *(by[m]["seconds"] for m in METHODS)))
    forms = {**dict.fromkeys(shares, ".1%"), **dict.fromkeys((*unstable, *seconds), ".1f")}
    return Table(("network", "ε", "images", *shares, *unstable, *seconds), rows, forms)


def joint_table(answers: Sequence[Record]) -> Table:
    """What part of the images that CROWN certifies is certified for all networks with λ ≥ a number, too."""
    shares, seconds = (tuple(f"{what} λ ≥ {lam}" for lam in JOINT) for what in ("also for", "s,"))
    rows: list[tuple[Cell, ...]] = []
    for (name, eps), by in by_method(answers).items():
        families = [by[joint(lam)] for lam in JOINT]
        parts = (family["certified"] / max(1, family["clean"]) for family in families)
        rows.append((name, eps, by["crown"]["certified"], *parts, *(family["seconds"] for family in families)))
    forms = {**dict.fromkeys(shares, ".1%"), **dict.fromkeys(seconds, ".1f")}
    return Table(("network", "ε", "certified, crown", *shares, *seconds), rows, forms)


def by_method(answers: Sequence[Record]) -> dict[tuple[str, str], dict[str, Record]]:
    """The records of each network and radius that all methods have answered, by method; the latest of each."""
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for record in answers:
        found.setdefault((record["network"], record["eps"]), {})[record["method"]] = record
    wanted = {*METHODS, *map(joint, JOINT)}
    return {place: by for place, by in found.items() if wanted <= set(by)}


def page(records: Sequence[Record]) -> Page:
    """Both tables."""
    answers = of(records, "answers")
    made = Page.headed("# The networks of specs/", notes(records))
    budgets = ", ".join(f"{budget:g}" for budget in dict.fromkeys(record["budget"] for record in answers))
    threads = ", ".join(str(count) for count in dict.fromkeys(record["threads"] for record in answers))
    made.add(
        f"The first exact test images, {budgets} s per image and method, the attack's seed 0, threads: {threads}.",
        table(answers),
        "*clean*: classified rightly. *not refuted*: of these, not refuted by `attack`, each refutation confirmed. "
        "*certified*: proven by the method. *undecided*: neither proven nor refuted by `auto`. *unstable*: mean number "
        "of ReLUs per image whose input can have either sign. Every method starts from nothing; seconds are for all "
        "images together.",
        joint_table(answers),
        "*also for λ ≥ …*: of the images that CROWN certifies for the ReLU network, the part for which one CROWN "
        "certificate holds for that network and every network with λ'-GELU, λ' ≥ λ in each layer, in its place; then "
        "the seconds.",
    )
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Which networks, and how much is asked."""
    parser.add_argument("--network", nargs="+", choices=PLAN, default=list(PLAN), help="(default all)")
    parser.add_argument("--images", type=int, default=1000, help="first exact images of the test split (default 1000)")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds per image and method (default 2)")
    parser.add_argument("--threads", type=int, help="of torch (default: as many as it takes)")


SCRIPT = Script("benchmarks.verification.shipped_networks", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
