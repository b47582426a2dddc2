"""What does verify cost beside the bounds, for images of k/255, of float32 numbers, and standardised?

    python -m benchmarks.speed.images
    python -m benchmarks.speed.images --network specs/mnist_mlp.onnx --images 10000 --code "as of 0.4"

Random images are asked about by ``verify`` with ``crown`` for ε = 1/255, and the same queries by the verifier alone,
in turn. The seconds are processor time of the process, the least of several runs. Earlier measurements stay among the
records, so that two states of the code (``--code``) stand side by side in the table.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.markup import Page, Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.study import ROOT, Study

if TYPE_CHECKING:
    import numpy as np

EPS = Fraction(1, 255)
WIDE = (-10, 10)
"""The valid range of standardised numbers."""

_COLUMNS = {
    "code": "code",
    "network": "network",
    "images": "images",
    "numbers": "numbers",
    "verify": "verify CPU s",
    "bounds": "bounds alone CPU s",
}


def pictures(count: int, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Random images of each kind of numbers, float32 (count, *shape)."""
    import numpy as np

    rng, whole = np.random.default_rng(0), (count, *shape)
    return {
        "k/255": (rng.integers(0, 256, whole) / np.float32(255)).astype(np.float32),
        "float32": rng.random(whole, dtype=np.float32),
        "standardised": rng.standard_normal(whole, dtype=np.float32),
    }


def seconds(works: Sequence[Callable[[], object]], runs: int) -> list[float]:
    """The least processor seconds of each work, which take turns."""
    found: list[list[float]] = [[] for _ in works]
    for _ in range(runs):
        for work, times in zip(works, found, strict=True):
            start = time.process_time()
            work()
            times.append(time.process_time() - start)
    return [min(times) for times in found]


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Add a record for each kind of numbers."""
    from verifiable_relu import Around, verify
    from verifiable_relu.network import read_onnx
    from verifiable_relu.spec import Query, linf_properties
    from verifiable_relu.verifiers.base import Limits
    from verifiable_relu.verifiers.docket import answers
    from verifiable_relu.verifiers.registry import make

    network = read_onnx(ROOT / asked.network)
    for name, images in pictures(asked.images, network.input_shape).items():
        labels, clip = [0] * len(images), WIDE if name == "standardised" else (0, 1)
        properties = linf_properties(images, labels, EPS, network.output_size, clip)
        queries = [Query(network, prop) for prop in properties]

        def whole(images: np.ndarray = images, labels: list[int] = labels, clip: tuple[int, int] = clip) -> object:
            return verify(network, images, labels, eps=EPS, method="crown", around=Around(clip=clip))

        def bounds(queries: list[Query] = queries) -> object:
            return answers(make("crown"), queries, Limits(600.0))

        total, alone = seconds((whole, bounds), asked.runs)
        found = {"verify": round(total, 2), "bounds": round(alone, 2), "runs": asked.runs}
        place = {"code": asked.code, "network": Path(asked.network).stem, "images": len(images), "numbers": name}
        records.append("images", {**place, **found})


def page(records: Sequence[Record], folder: Path) -> Page:
    """The page with the latest figures of each code, network, number of images and kind of numbers."""
    keys = ("code", "network", "images", "numbers")
    latest = {tuple(record[key] for key in keys): record for record in of(records, "images")}
    made = Page("images")
    made.add("# Many images", "Processor seconds of verify, and of the bounds alone, for the same random images.")
    made.bullets(notes(records))
    rows = [tuple(record[key] for key in _COLUMNS) for record in latest.values()]
    made.add(Table(tuple(_COLUMNS.values()), rows, dict.fromkeys(list(_COLUMNS.values())[-2:], ".2f")))
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the network, the number of images and of runs, and the name of the code."""
    parser.add_argument("--network", default="specs/cifar_cnn.onnx", help="from the root of the clone (cifar_cnn)")
    parser.add_argument("--images", type=int, default=256, help="number of images of each kind (default 256)")
    parser.add_argument("--runs", type=int, default=3, help="of each work (default 3)")
    parser.add_argument("--code", default="present", help="what the table calls the code that runs (present)")


STUDY = Study("benchmarks.speed.images", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(STUDY.main())
