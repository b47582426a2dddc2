"""The questions of a study: balls around test images, asked of trained networks as campaigns do it."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.records import Records
from benchmarks.study.state import ONE, fields
from benchmarks.study.training import data_of, images_of
from verifiable_relu.campaign.inputs import Entry, Loader, believe
from verifiable_relu.campaign.result import Key, Result
from verifiable_relu.campaign.runner import Case
from verifiable_relu.data import Dataset
from verifiable_relu.files import write_whole
from verifiable_relu.network import Network
from verifiable_relu.spec.balls import linf_property
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.train.export import CALIBRATED, quantize
from verifiable_relu.verifiers.base import Reason

DECIMALS = 9
"""The decimals to which bounds of boxes are rounded outward, so that property files need no quotients."""

_BATCH = 250


def shuffled(balls: Iterable[Ball], seed: str) -> list[Ball]:
    """Balls in an order that ``seed`` draws, whatever order they are given in: images in random order, and each of them
    asked of all networks, before the next.

    An arm that comes first would meet another state of process and machine than the last one. Answers that are compared
    are next to each other, so that a machine that gets slower touches all arms alike. The first question about an image
    takes longer than the others: each network is early as often as late, and chance decides the rest.
    """
    blocks: dict[tuple[str, str, int], list[Ball]] = {}
    for one in sorted(balls, key=lambda one: (one.source, one.eps, one.image, str(one.onnx))):
        blocks.setdefault((one.source, one.eps, one.image), []).append(one)
    drawn, order = random.Random(seed), list(blocks.values())
    drawn.shuffle(order)
    late: Counter[str] = Counter()
    for block in order:
        drawn.shuffle(block)
        block.sort(key=lambda one: -late[str(one.onnx)])
        for place, one in enumerate(block):
            late[str(one.onnx)] += 2 * place - len(block) + 1
    return [one for block in order for one in block]


@dataclass(frozen=True)
class Ball(Entry):
    """The question about the L∞ ball around a test image; ``vnnlib`` is the file that asks the same.

    Attributes:
        source: the data, a name or the path of a file.
        eps: the radius, as text.
        image: the number of the test image.
        outputs: the number of the network's outputs.
    """

    source: str = ""
    eps: str = ""
    image: int = 0
    outputs: int = 0


def ball(test: Dataset, image: int, eps: str, outputs: int) -> Property:
    """The property that a test image keeps its class within the L∞ ball of radius ``eps``, clipped to [0, 1]."""
    label = int(test.labels[image])
    return linf_property(test.images[image], label, Fraction(eps), outputs, name=f"image {image}", decimals=DECIMALS)


class Balls(Loader):
    """A reader of instances that makes the property of a ``Ball`` from the data: large files take long to read."""

    def files(self, entry: Entry) -> str:
        """No digest: earlier answers are no part of a campaign."""
        return ""

    def case(self, entry: Entry) -> Case:
        """The instance of a ball; the first of each network is used to compare the network with its ONNX file."""
        assert isinstance(entry, Ball) and isinstance(entry.onnx, Path)
        new = not self.knows(entry.onnx)
        network = self.network(entry.onnx)
        asked = ball(images_of(entry.source), entry.image, entry.eps, entry.outputs)
        if new:
            believe(network, (asked,), entry.onnx)
        return Case(str(entry.onnx), str(entry.vnnlib), (Query(network, asked),), entry.timeout)


class Answers:
    """The keeper of a campaign's results that writes each as a record of kind ``answer``.

    Args:
        records: the records of the study.
        about: the fields with which the record of an instance begins, by the absolute paths of its two files.

    Attributes:
        results: the results so far.
    """

    def __init__(self, records: Records, about: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
        self._records = records
        self._about = about
        self.results: list[Result] = []

    def find(self, key: Key, timeout: float, checked: bool) -> Result | None:
        """None: instances with an answer are not part of the campaign."""
        return None

    def holds(self, result: Result) -> bool:
        """True: no answer here is of an earlier run."""
        return True

    def append(self, result: Result, counterexample: str | None) -> None:
        """Write the record of a result, unless the user interrupted the work on it."""
        if result.reason is not Reason.INTERRUPTED:
            files = str(Path(result.onnx).resolve()), str(Path(result.vnnlib).resolve())
            self._records.append(ONE, {**self._about[files], **fields(result)})

    def enter(self, number: int, result: Result) -> None:
        """Take a result, which was recorded before."""
        self.results.append(result)

    def tabulate(self) -> None:
        """Do nothing: the tables are made at the end."""


def right(network: Network, test: Dataset, images: np.ndarray) -> np.ndarray:
    """Those of the test images, given by their numbers, that a network classifies rightly."""
    with torch.inference_mode():
        classes = [
            network(torch.from_numpy(test.images[part])).flatten(1).argmax(1).numpy()
            for part in np.split(images, range(_BATCH, len(images), _BATCH))
        ]
    return images[np.concatenate(classes) == test.labels[images]]


def exact_images(test: Dataset, count: int) -> np.ndarray:
    """The numbers of the first ``count`` test images whose pixels equal the official ones."""
    return np.flatnonzero(test.exact)[:count]


def int8_file(path: Path, network: Path, source: str) -> str:
    """Write the int8 network made of a network unless it is there; returns the file's SHA-256.

    Args:
        path: the file.
        network: the file of the network.
        source: the data, on whose training images the ranges of activations are calibrated.
    """
    if not path.is_file():
        write_whole(path, quantize(network.read_bytes(), data_of(source)[0].images[:CALIBRATED]))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def property_file(path: Path, test: Dataset, image: int, eps: str, outputs: int) -> None:
    """Write the property file of a ball, unless it is there.

    Raises:
        InputError: if it cannot be written.
    """
    from verifiable_relu.spec.specfile import write_vnnlib

    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}")
        write_vnnlib(ball(test, image, eps, outputs), part)
        part.replace(path)
