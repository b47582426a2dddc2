"""Do seconds depend on the place of an arm in the list? One network under two names, listed in both orders.

    python -m benchmarks.speed.arms_order
    python -m benchmarks.speed.arms_order --images 40

The arms are copies of ``specs/mnist_mlp.onnx``, so that every difference is one of measuring. Each list is asked twice:
as a campaign asks it, in parts that shrink along the list and share their time evenly; and as a study asks it, each
question by itself, images in random order and the arms in random order for each image. Seconds are processor time.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.markup import Page, Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.study import ROOT, Study

if TYPE_CHECKING:
    from verifiable_relu.campaign.result import Result

NETWORK = ROOT / "specs" / "mnist_mlp.onnx"
DATA = "mnist"
ARMS = ("a", "b")
WAYS = {"in parts": "as a campaign", "alone": "as a study"}
LIMIT = 10.0
"""The processor seconds for each question."""


class Kept:
    """An observer that keeps all results, by arm and image."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Result]] = {arm: {} for arm in ARMS}

    def stage(self, name: str, done: int, total: int) -> None:
        """Do nothing."""

    def result(self, number: int, result: Result, recorded: bool) -> None:
        """Keep the result of an instance."""
        self.found[Path(result.onnx).stem][result.vnnlib] = result


def asked(first: str, way: str, images: int, eps: str, folder: Path) -> Kept:
    """The answers to the questions of both arms, those of the arm ``first`` at the head of the list."""
    from benchmarks.study import asking
    from benchmarks.study.training import images_of
    from verifiable_relu.campaign.queue import Local, run_parallel
    from verifiable_relu.campaign.worker import Job
    from verifiable_relu.network import read_onnx
    from verifiable_relu.verifiers.base import Limits
    from verifiable_relu.verifiers.registry import make
    from verifiable_relu.verifiers.solvers.process import processor_seconds

    test, network = images_of(DATA), read_onnx(NETWORK)
    right = asking.right(network, test, asking.exact_images(test, images)).tolist()
    balls = [
        asking.Ball(folder / str(image), folder / f"{arm}.onnx", LIMIT, DATA, eps, image, network.output_size)
        for arm in (first, *(arm for arm in ARMS if arm != first))
        for image in right
    ]
    kept, job = Kept(), Job(make("auto"), asking.Balls(), limits=Limits(clock=processor_seconds))
    alone, hand = way == "alone", Local()
    order = asking.shuffled(balls, f"{first} {images}") if alone else balls
    run_parallel(order, job, [hand], None, kept, alone=alone)
    hand.stop()
    return kept


def compared(found: Mapping[str, Mapping[str, Result]]) -> dict[str, Any]:
    """Seconds, sub-problems and verdicts of the two arms, and Wilcoxon's test of their seconds."""
    from benchmarks.study.statistics import wilcoxon

    pairs = [(found["a"][image], found["b"][image]) for image in found["a"]]
    test = wilcoxon([one.seconds - other.seconds for one, other in pairs])
    return {
        "questions": len(pairs),
        "branched": sum((one.subproblems or 0) > 0 for one, _ in pairs),
        **{
            f"{what} {arm}": round(of_all([result.seconds for result in found[arm].values()]), 4)
            for what, of_all in (("median", statistics.median), ("sum", sum))
            for arm in ARMS
        },
        "effect": round(test.effect, 3),
        "p": float(f"{test.p:.2g}"),
        "other verdicts": sum(one.verdict is not other.verdict for one, other in pairs),
        "other sub-problems": sum(one.subproblems != other.subproblems for one, other in pairs),
    }


def measure(options: argparse.Namespace, records: Records) -> None:
    """Ask all lists that have no record yet."""
    names = ("way", "first", "eps", "images")
    known = [tuple(record[name] for name in names) for record in of(records.all, "list")]
    for way in WAYS:
        for first in ARMS:
            about = {"way": way, "first": first, "eps": options.eps, "images": options.images}
            if tuple(about.values()) in known:
                continue
            with tempfile.TemporaryDirectory() as name:
                for arm in ARMS:
                    shutil.copy(NETWORK, Path(name) / f"{arm}.onnx")
                kept = asked(first, way, options.images, options.eps, Path(name))
            records.append("list", {**about, **compared(kept.found)})


def page(records: Sequence[Record], folder: Path) -> Page:
    """The page: a row for each list."""
    made = Page("arms_order")
    made.add(
        "# The place of an arm in the list",
        "One network under the names a and b. The effect is the rank-biserial correlation of the seconds of a minus "
        "those of b, in [−1, 1]; without an influence of the place it is near 0, whichever arm is listed first.",
    )
    made.bullets(notes(records))
    columns = ("questions", "branched", "median a", "median b", "sum a", "sum b", "effect", "p",
               "other verdicts", "other sub-problems")  # fmt: skip
    rows = [(WAYS[r["way"]], r["eps"], r["first"], *(r[name] for name in columns)) for r in of(records, "list")]
    titles = tuple(f"{name} s" if name.startswith(("median", "sum")) else name for name in columns)
    made.add(Table(("asked", "ε", "listed first", *titles), rows, {"effect": "+.2f", "p": ".2g"}))
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the questions."""
    parser.add_argument("--images", type=int, default=100, help="the first test images that are asked about (100)")
    parser.add_argument("--eps", default="0.05", help="the radius of the balls (0.05)")


STUDY = Study("benchmarks.speed.arms_order", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
