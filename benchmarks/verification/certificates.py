"""How many unsats get a certificate that the independent checker accepts, how large is it, and what does it cost?

    python -m benchmarks.verification.certificates
    python -m benchmarks.verification.certificates acasxu mnist --method auto --limit 20 --count 30

Families are folders of the verification competition, of which the instances are drawn at random, and ``mnist`` and
``cifar10``: the networks of specs/ over balls around the first exact test images that they classify rightly. An
instance is answered twice: by a verifier that nobody observes, and by one whose proof is recorded; its certificate is
written, and then checked. Each instance is a record, and is not asked for again. Needs the benchmarks and the data sets
under VERIFIABLE_RELU_DATA.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common.markup import Cell, Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.script import ROOT, Script, data_folder
from benchmarks.common.tables import Page
from benchmarks.verification.competition_instances import instances
from verifiable_relu.errors import InputError

FAMILIES = (
    "test",
    "rl_benchmarks",
    "collins_rul_cnn",
    "safenlp",
    "acasxu",
    "mnist_fc",
    "eran_2021",
    "oval21",
    "mnist",
    "cifar10",
)

SHIPPED = {
    "mnist": (("mnist_mlp", "0.02"), ("mnist_mlp", "0.03"), ("mnist_cnn", "0.05"), ("mnist_cnn", "0.1")),
    "cifar10": (("cifar_cnn", "1/255"), ("cifar_cnn", "2/255")),
}
"""For each data set the networks of specs/ and the radii."""


def measure(asked: argparse.Namespace, records: Records) -> None:
    """A record per instance: the verdict, and what has become of its certificate.

    Seconds are those of the processor. ``read`` are those that the verifier takes to read both files; the checker reads
    them by itself within ``check``. ``again`` are those of proving once more what was not recorded. Time limits are of
    wall-clock time.

    Raises:
        InputError: if data are missing.
    """
    import torch

    torch.set_num_threads(asked.threads)
    with TemporaryDirectory() as folder:
        for family in asked.families:
            for onnx, vnnlib in _instances(family, asked.count, Path(folder)):
                title = {"family": family, "method": asked.method, "limit": asked.limit}
                title |= {"onnx": onnx.name, "vnnlib": vnnlib.name}
                if not records.has("case", title):
                    records.append("case", {**title, **_asked(onnx, vnnlib, asked, Path(folder) / "certificate")})


def _instances(family: str, count: int, folder: Path) -> Iterator[tuple[Path, Path]]:
    """The files of a family's instances; properties that are made here are written into a folder."""
    from verifiable_relu.files import on_disk

    if family in SHIPPED:
        yield from _balls(family, count, folder)
        return
    place = data_folder() / "vnncomp" / family
    found = instances(place)
    random.Random(0).shuffle(found)
    for each in found[:count]:
        yield on_disk(place / each.onnx), on_disk(place / each.vnnlib)


def _balls(data_set: str, count: int, folder: Path) -> Iterator[tuple[Path, Path]]:
    from benchmarks.common.questions import Balls, first_exact
    from verifiable_relu.data import load
    from verifiable_relu.readers import read_onnx
    from verifiable_relu.spec.specfile import vnnlib_text

    data, questions = load(data_set, "test"), SHIPPED[data_set]
    for name, eps in questions:
        onnx = ROOT / "specs" / f"{name}.onnx"
        balls = Balls.around(read_onnx(onnx), data, first_exact(data, -(-count // len(questions))), eps)
        for index, query in zip(balls.indices, balls.queries, strict=True):
            path = folder / f"{name}-{index}-{eps.replace('/', '_')}.vnnlib"
            path.write_text(vnnlib_text(query.property), encoding="utf-8")
            yield onnx, path


def _asked(onnx: Path, vnnlib: Path, asked: argparse.Namespace, path: Path) -> dict[str, Any]:
    """What becomes of one instance."""
    from verifiable_relu.campaign.certificates import proved
    from verifiable_relu.campaign.inputs import InstanceFiles, Loader
    from verifiable_relu.campaign.result import join
    from verifiable_relu.check import BadInput, Refused, check
    from verifiable_relu.files import read_bytes
    from verifiable_relu.proof.encoding import NotToldError
    from verifiable_relu.proof.recorder import Recorder
    from verifiable_relu.proof.write import Subject, write_unsat
    from verifiable_relu.search.batch import QueryBatch
    from verifiable_relu.search.budget import TimeBudget
    from verifiable_relu.search.outcomes import Outcome
    from verifiable_relu.search.registry import make
    from verifiable_relu.spec.limits import BYTES
    from verifiable_relu.supervisor.workers import processor_seconds

    clock = [processor_seconds()]

    def lap() -> float:
        clock.append(processor_seconds())
        return round(clock[-1] - clock[-2], 4)

    def ask(observer: Recorder | None) -> Outcome:
        batch = QueryBatch(queries, TimeBudget(asked.limit), observer=observer)
        return join([batch.outcomes[number] for number in sorted(set(batch.ask(make(asked.method))))])

    case = Loader().case(InstanceFiles(vnnlib, onnx, asked.limit))
    reading, queries, told = lap(), [query.without_head for query in case.queries], Recorder()
    plain, plain_seconds = ask(None), lap()
    outcome = ask(told)
    found: dict[str, Any] = {"verdict": str(outcome.verdict), "read": reading, "prove": lap()}
    found |= {"subproblems": outcome.subproblems, "plain": str(plain.verdict), "plain_prove": plain_seconds}
    found["plain_subproblems"] = plain.subproblems
    if found["verdict"] != "unsat":
        return found
    found |= {"recorded": True, "accepted": False, "again": 0.0}
    try:
        if (network := case.queries[0].network.source.onnx) is None:
            raise InputError("the network is not that of its file")
        subject, numbers = Subject(network, read_bytes(vnnlib, BYTES)), range(len(queries))
        try:
            write_unsat(path, subject, queries, numbers, told)
        except NotToldError:
            lap()
            told = proved(queries, asked.limit)
            found |= {"recorded": False, "again": lap()}
            write_unsat(path, subject, queries, numbers, told)
        found |= {"write": lap(), "bytes": path.stat().st_size}
        found |= {"detail": check(path, onnx, vnnlib), "accepted": True, "check": lap()}
    except InputError as error:
        found["detail"] = str(error)
    except (Refused, BadInput) as error:
        found |= {"detail": f"refused: {error}", "check": lap()}
    return found


def table(cases: Sequence[Record]) -> Table:
    """A row per family, method and limit."""
    counts = ("instances", "other verdict", "other search", "unsat", "recorded", "written", "accepted", "share")
    sizes = ("median kB", "largest kB")
    times = ("read s", "plain s", "prove s", "again s", "write s", "check s", "write/prove", "check/prove")
    rows: list[tuple[Cell, ...]] = []
    for key in dict.fromkeys((case["family"], case["method"], case["limit"]) for case in cases):
        mine = [case for case in cases if (case["family"], case["method"], case["limit"]) == key]
        unsat = [case for case in mine if case["verdict"] == "unsat"]
        verdicts = sum(case["verdict"] != case["plain"] for case in mine)
        counted = [(case["subproblems"] or 0, case["plain_subproblems"] or 0) for case in unsat]
        searches = sum(abs(recorded - plain) > 0.1 * plain for recorded, plain in counted)
        done = [case for case in unsat if "check" in case]
        accepted = sum(case["accepted"] for case in unsat)
        recorded = sum(case["recorded"] for case in unsat)
        share = accepted / len(unsat) if unsat else None
        found: list[Cell] = [*key, len(mine), verdicts, searches, len(unsat), recorded, len(done), accepted, share]
        if done:
            size = [case["bytes"] / 1000 for case in done]
            parts = ("read", "plain_prove", "prove", "again", "write", "check")
            sums = [sum(case[name] for case in done) for name in parts]
            whole = [max(case["read"] + case["prove"], 1e-3) for case in done]
            extra = [(case["again"] + case["write"]) / seconds for case, seconds in zip(done, whole, strict=True)]
            ratio = [case["check"] / seconds for case, seconds in zip(done, whole, strict=True)]
            found += [statistics.median(size), max(size), *sums, statistics.median(extra), statistics.median(ratio)]
        else:
            found += [None] * (len(sizes) + len(times))
        rows.append(tuple(found))
    forms = {"share": ".1%", **dict.fromkeys((*sizes, *times[:6]), ".1f"), **dict.fromkeys(times[6:], ".2f")}
    return Table(("family", "method", "limit s", *counts, *sizes, *times), rows, forms)


def reasons(cases: Sequence[Record]) -> list[str]:
    """Why unsats have no certificate that is accepted, each reason with the number of instances."""
    without = [case for case in cases if case["verdict"] == "unsat" and not case["accepted"]]
    found = Counter((case["family"], case.get("detail", "")[:160]) for case in without)
    return [f"{family}: {detail} ({count})" for (family, detail), count in found.items()]


def page(records: Sequence[Record]) -> Page:
    """The table, the reasons."""
    cases = of(records, "case")
    made = Page.headed("# Certificates of unsat", notes(records))
    made.add(
        table(cases),
        "*other verdict*: instances whose recorded search ends in another verdict than the plain one. *other search*: "
        "unsats whose recorded search took a tenth more or fewer sub-problems. *plain s*: the search with no recorder. "
        "*recorded*: unsats whose proof was kept as it was found; the others are proven once more (*again*). *share*: "
        "of the unsats, those whose certificate the checker has accepted. Seconds are the processor's, of all "
        "certificates together, start-up of programs left out; *write/prove*, in which *again* counts as writing, and "
        "*check/prove* are medians over instances, with the reading of both files on either side: what the verifier "
        "reads counts as a part of the proof, as what the checker reads is a part of its check.",
    )
    made.bullets(reasons(cases))
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Which families, how many instances, and how they are answered."""
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help=f"(default {' '.join(FAMILIES)})")
    parser.add_argument("--method", default="auto", help="of certify (default auto)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per instance and second proof (default 60)")
    parser.add_argument("--count", type=int, default=1000, help="instances of each family at most (default 1000)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")


SCRIPT = Script("benchmarks.verification.certificates", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
