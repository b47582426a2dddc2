"""The questions of a study: balls around test images, each asked by itself of a trained network."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.common.records import Record
from benchmarks.study.suite import INT8, Method
from benchmarks.study.training import images_of
from verifiable_relu.campaign.inputs import compare_on_boxes
from verifiable_relu.data import Dataset
from verifiable_relu.execution.model import as_executed
from verifiable_relu.ir.network import Network
from verifiable_relu.readers import read_onnx
from verifiable_relu.search.batch import answers
from verifiable_relu.search.outcomes import Verdict
from verifiable_relu.search.registry import limited, make
from verifiable_relu.spec.balls import linf_properties
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.supervisor.workers import processor_seconds

DECIMALS = 9
"""The decimals to which bounds of boxes are rounded outward, so that property files need no quotients."""

DIGITS = 3
"""The significant digits of seconds and margins, which are told for tables and prove nothing."""


@dataclass(frozen=True)
class Question:
    """The task of deciding whether a test image keeps its class within an L∞ ball.

    Attributes:
        cell: the name of the cell.
        onnx: the file of its network.
        method: the method that is asked.
        source: the data (``training.source_of``).
        eps: the radius, as text.
        image: the number of the test image.
    """

    cell: str
    onnx: Path
    method: Method
    source: str
    eps: str
    image: int

    def __call__(self) -> Record:
        """The fields of the record of the answer; a limit is one of processor time."""
        network = network_of(self.onnx, self.method.arithmetic, self.source, self.image, self.eps)
        query = Query(network, ball(images_of(self.source), self.image, self.eps, network.output_size))
        began = processor_seconds()
        limits = replace(limited(self.method.name), seconds=self.method.limit, clock=processor_seconds)
        (outcome,) = answers(make(self.method.name), [query], limits)
        return {
            "cell": self.cell,
            "eps": self.eps,
            "method": self.method.label,
            "image": self.image,
            "limit": self.method.limit,
            "verdict": str(outcome.verdict),
            "reason": str(outcome.reason),
            "by": outcome.method,
            "trust": None if outcome.trust is None else str(outcome.trust),
            "detail": outcome.detail if outcome.verdict is Verdict.UNKNOWN else "",
            "seconds": short(processor_seconds() - began),
            "subproblems": outcome.subproblems,
            "unstable": outcome.unstable,
            "margin": short(outcome.margin),
        }


def ball(test: Dataset, image: int, eps: str, outputs: int) -> Property:
    """The property that a test image keeps its class within the L∞ ball of radius ``eps``, clipped to [0, 1]."""
    chosen = slice(image, image + 1)
    names = [f"image {image}"]
    x, labels = test.images[chosen], test.labels[chosen]
    return linf_properties(x, labels, Fraction(eps), outputs, names=names, decimals=DECIMALS)[0]


def network_of(onnx: Path, arithmetic: str, source: str, image: int, eps: str) -> Network:
    """A network as an arithmetic runs it, compared with its file at points of a ball when it is read."""
    network, new = _network(onnx, arithmetic)
    if new:
        new.clear()
        compare_on_boxes(network, (ball(images_of(source), image, eps, network.output_size),), onnx)
    return network


@lru_cache(maxsize=64)
def _network(onnx: Path, arithmetic: str) -> tuple[Network, list[bool]]:
    network = read_onnx(onnx)
    return network if arithmetic == INT8 else as_executed(network, arithmetic), [True]


def short(number: float | None) -> float | None:
    """A number with ``DIGITS`` digits; None for none and for one that is not finite."""
    return None if number is None or not math.isfinite(number) else float(f"{number:.{DIGITS}g}")


def shuffled(questions: Iterable[Question], seed: str) -> list[Question]:
    """Questions in an order that ``seed`` draws: images in random order, each asked of all networks before the next.

    Answers that are compared are next to each other, so that a machine that gets slower touches all arms alike. The
    first question about an image takes longest: each network is early as often as late, and chance decides the rest.
    """
    blocks: dict[tuple[str, str, int], list[Question]] = {}
    for one in sorted(questions, key=lambda one: (one.source, one.eps, one.image, one.cell)):
        blocks.setdefault((one.source, one.eps, one.image), []).append(one)
    drawn, order = random.Random(seed), list(blocks.values())
    drawn.shuffle(order)
    late: Counter[str] = Counter()
    for block in order:
        drawn.shuffle(block)
        block.sort(key=lambda one: -late[one.cell])
        for place, one in enumerate(block):
            late[one.cell] += 2 * place - len(block) + 1
    return [one for block in order for one in block]


def is_final(answer: Record | None, limit: float) -> bool:
    """Return True if another run with a time limit in seconds would add nothing to an answer."""
    if answer is None or answer["reason"] in ("error", "memory"):
        return False
    return bool(answer["verdict"] != "unknown" or answer["limit"] >= limit)


def failed(question: Question, error: Exception) -> dict[str, Any]:
    """The fields of the record of a question whose work failed."""
    about = {"cell": question.cell, "eps": question.eps, "method": question.method.label, "image": question.image}
    told = {"verdict": "unknown", "reason": "error", "by": "", "trust": None, "limit": question.method.limit}
    numbers = dict.fromkeys(("seconds", "subproblems", "unstable", "margin"))
    return {**about, **told, "detail": f"{type(error).__name__}: {error}", **numbers}
