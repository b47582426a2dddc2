"""Do the verification competition's scripts give right answers, and counterexamples that its rules accept?

    python -m benchmarks.verification.competition_scripts
    python -m benchmarks.verification.competition_scripts acasxu --count 5 --limit 300

``prepare_instance.sh`` and ``run_instance.sh`` of ``benchmarks/competition`` are called as the competition calls them,
for some instances of each family, evenly spaced. Verdicts are judged by the competition's consensus, counterexamples by
its rules (``competition_rules``), which use nothing of the package. Each instance is a record. Needs the benchmarks
under VERIFIABLE_RELU_DATA/vnncomp.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common.markup import Cell, Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.script import ROOT, Script, data_folder
from benchmarks.common.tables import Page
from benchmarks.verification.competition_instances import Instance, instances

FAMILIES = ("safenlp", "rl_benchmarks", "acasxu")
SCRIPTS = ROOT / "benchmarks" / "competition"

ACCEPTED = ("correct", "correct up to tolerance")
"""The judgements of counterexamples that the competition counts."""


def some(found: Sequence[Instance], count: int) -> list[Instance]:
    """So many instances, evenly spaced; all if there are no more."""
    return [found[i * len(found) // count] for i in range(count)] if len(found) > count else list(found)


def measure(asked: argparse.Namespace, records: Records) -> None:
    """A record per instance that has none.

    Raises:
        InputError: if the benchmarks are missing.
    """
    from benchmarks.common.progress import bars

    data = data_folder().resolve() / "vnncomp"
    with bars() as bar:
        for family in asked.families:
            chosen = some(instances(data / family), asked.count)
            for instance in bar.track(chosen, description=family):
                title = {"family": family, "onnx": instance.onnx, "vnnlib": instance.vnnlib}
                if not records.has("answer", title):
                    found = answered(data / family, instance, asked.limit or instance.seconds)
                    records.append("answer", {**title, **found})


def answered(folder: Path, instance: Instance, limit: float) -> Record:
    """What the scripts do with an instance.

    Returns:
        The statuses of both scripts, the first line of the result file (``verdict``), the consensus (``truth``), the
        judgement of the ``counterexample`` if there is one, the ``limit`` in seconds and the competition's own, and the
        seconds of running, on the wall and of the processor.
    """
    from benchmarks.verification.competition_rules import judged

    onnx, vnnlib = folder / instance.onnx, folder / instance.vnnlib
    about = ["v1", folder.name, str(onnx), str(vnnlib)]
    environment = {**os.environ, "VERIFIABLE_RELU_PYTHON": sys.executable}
    with tempfile.TemporaryDirectory() as temporary:
        result = Path(temporary) / "result.txt"
        prepared = _status([SCRIPTS / "prepare_instance.sh", *about], environment)
        wall, cpu = time.perf_counter(), _children()
        ran = _status([SCRIPTS / "run_instance.sh", *about, result, str(limit)], environment)
        wall, cpu = time.perf_counter() - wall, _children() - cpu
        said = result.read_text(encoding="utf-8") if result.is_file() else ""
    verdict = said.partition("\n")[0]
    return {
        "prepared": prepared,
        "ran": ran,
        "verdict": verdict,
        "truth": instance.truth,
        "counterexample": judged(onnx, vnnlib, said).value if verdict == "sat" else "",
        "limit": limit,
        "own limit": instance.seconds,
        "seconds": round(wall, 2),
        "cpu": round(cpu, 2),
    }


def _status(line: Sequence[object], environment: Mapping[str, str]) -> int:
    return subprocess.run([str(part) for part in line], env=environment, capture_output=True, check=False).returncode


def _children() -> float:
    """The processor seconds of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(found: Sequence[Record]) -> Table:
    """A row per family."""
    rows: list[tuple[Cell, ...]] = []
    for family in dict.fromkeys(record["family"] for record in found):
        group = [record for record in found if record["family"] == family]
        verdicts = [record["verdict"] for record in group]
        sat, unsat = verdicts.count("sat"), verdicts.count("unsat")
        judgements = [record["counterexample"] for record in group if record["verdict"] == "sat"]
        wrong = sum({record["verdict"], record["truth"]} == {"sat", "unsat"} for record in group)
        failed = sum(record["prepared"] != 0 or record["ran"] != 0 for record in group)
        within = sum(record["verdict"] in ("sat", "unsat") and record["cpu"] <= record["own limit"] for record in group)
        cpu = [record["cpu"] for record in group]
        accepted = [judgements.count(name) for name in ACCEPTED]
        counts = (len(group), sat, unsat, len(group) - sat - unsat, *accepted, sat - sum(accepted))
        rows.append((family, *counts, wrong, failed, within, sum(cpu), max(cpu)))
    columns = ("family", "instances", "sat", "unsat", "open", *ACCEPTED, "rejected", "wrong", "failed")
    return Table((*columns, "within own limit", "CPU s", "most CPU s"), rows, {"CPU s": ".1f", "most CPU s": ".1f"})


def page(records: Sequence[Record]) -> Page:
    """The table."""
    found = of(records, "answer")
    made = Page.headed("# The competition's scripts", notes(records))
    limits = ", ".join(dict.fromkeys(f"{record['limit']:g} s" for record in found))
    made.add(
        f"Limits of wall-clock time, start-up included: {limits}. *correct*, *correct up to tolerance*, *rejected*: "
        "the counterexamples by the competition's rules: onnxruntime's outputs agree with the given ones to 10⁻³ of "
        "the largest, and with the inputs satisfy the property exactly, or with comparisons relaxed by 10⁻⁴. *wrong*: "
        "against the consensus of the competition's tools. *failed*: a script ended with a status other than 0. "
        "*within own limit*: decided in processor seconds, start-up included, that are no more than the competition's "
        "limit.",
        table(found),
    )
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Which families, how many instances, and for how long."""
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help=f"(default {' '.join(FAMILIES)})")
    parser.add_argument("--count", type=int, default=20, help="instances of each family (default 20)")
    parser.add_argument("--limit", type=float, help="seconds for an instance (default: the competition's)")


SCRIPT = Script("benchmarks.verification.competition_scripts", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
