"""The queries of the ledger."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from math import inf
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.support import families, nets
from verifiable_relu.network import read_onnx
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Gelu
from verifiable_relu.spec import queries, read_instances, read_vnnlib
from verifiable_relu.spec.property import Box, Property, Query, Row

ROOT = Path(__file__).resolve().parents[2]

FAMILIES = {
    "test": 5,
    "acasxu": 10,
    "rl_benchmarks": 10,
    "safenlp": 10,
    "collins_rul_cnn": 5,
    "tllverifybench": 4,
    "mnist_fc": 8,
    "oval21": 4,
    "eran_2021": 4,
}
"""How many instances of each family of the verification competition are asked, of networks that are not too large."""

MOST_WEIGHTS = 2_000_000
"""Where there are more, a query takes minutes."""


@dataclass(frozen=True, eq=False)
class Question:
    """A query and its name; with the files that ask nothing else, where there are any."""

    name: str
    query: Query
    onnx: Path | None = None
    vnnlib: Path | None = None


def shipped(only: str = "") -> Iterator[Question]:
    """Those of the properties in ``specs/``."""
    for row in read_instances(ROOT / "specs" / "instances.csv"):
        yield from _of_files("specs", row.onnx, row.vnnlib, only)


def drawn(only: str = "") -> Iterator[Question]:
    """Those of random piecewise-linear networks of all architectures, some of which barely hold or barely fail."""
    rng = np.random.default_rng(38)
    for name, draw in (
        ("gaussian", nets.gaussian(rng)),
        ("eighths", nets.eighths(rng)),
        ("uneven", nets.uneven(rng, 3)),
    ):
        networks = [*nets.pieces(rng, draw), nets.image(rng, draw), nets.windows(rng, draw)]
        networks += [nets.opposed(rng, draw, images, relu) for images in (False, True) for relu in (False, True)]
        for network in networks:
            yield from _asked(network, rng, f"{name}/{network.name}")
    for front in ("plain", "scale", "conv", "residual"):
        network = nets.needle(rng, nets.dyadic(rng, 3, 4), 0.25, 1.5, decoys=3, front=front)
        yield from _asked(network, rng, network.name)
    for name, make in {**families.NETWORKS, **families.COUPLED}.items():
        yield from _asked(make(1), rng, f"families/{name}")


def smooth(only: str = "") -> Iterator[Question]:
    """Those of 20 networks with smooth activations."""
    rng = np.random.default_rng(39)
    for number in range(2):
        draw = nets.gaussian(rng)
        for network in (*nets.smooth(rng, draw), nets.image(rng, draw, Gelu)):
            yield from _asked(network, rng, f"smooth{number}/{network.name}")


def competition(only: str = "") -> Iterator[Question]:
    """Those of instances of the verification competition, if the data sets are there, spread over each family."""
    data = os.environ.get("VERIFIABLE_RELU_DATA")
    if not data:
        return
    for family, count in FAMILIES.items():
        rows = read_instances(Path(data) / "vnncomp" / family / "instances.csv")
        for row in islice(rows, 0, None, max(1, len(rows) // count)):
            yield from _of_files(family, row.onnx, row.vnnlib, only, MOST_WEIGHTS)


def _of_files(family: str, onnx: Path, vnnlib: Path, only: str, most: float = inf) -> Iterator[Question]:
    """Those of the first two boxes of a property file, where the network has no more than ``most`` numbers."""
    name = f"{family}/{onnx.name.split('.onnx')[0]} {vnnlib.name.split('.vnnlib')[0]}"
    if only not in name:
        return
    network = read_onnx(onnx)
    if sum(part.numel() for node in network.nodes for part in vars(node).values() if isinstance(part, Tensor)) > most:
        return
    found = list(queries(read_vnnlib(vnnlib), network))
    if len(found) == 1:
        yield Question(name, found[0], onnx, vnnlib)
    else:
        # A certificate would have to be one of all boxes.
        yield from (Question(f"{name} #{number}", query) for number, query in enumerate(found[:2]))


def _asked(network: Network, rng: np.random.Generator, name: str) -> Iterator[Question]:
    """Whether a difference of outputs gets as low as it gets at samples of a box, a little less or a little more."""
    center = np.round(rng.normal(size=network.input_size) * 8) / 16
    radius = np.where(rng.permutation(network.input_size) < 6, float(rng.choice([1 / 16, 1 / 4])), 0.0)
    points = center - radius + 2 * radius * rng.random((512, network.input_size))
    with torch.no_grad():
        y = network(torch.from_numpy(points.reshape(-1, *network.input_shape))).flatten(1).numpy()
    row = {0: 1, 1: -1} if network.output_size > 1 else {0: 1}
    value = sum(c * y[:, i] for i, c in row.items())
    least, spread = float(value.min()), float(value.std()) + 2**-8
    coefficients = tuple((i, Fraction(c)) for i, c in row.items())
    for offset in (-1.0, -0.25, 0.1):
        # Rounded, so that the last bits of a sample do not change the question.
        bound = Fraction(round((least + offset * spread) * 512), 512)
        prop = Property(Box(center - radius, center + radius), ((Row(coefficients, bound),),))
        yield Question(f"{name} {offset:+}", Query(network, prop))


PARTS: dict[str, Callable[..., Iterator[Question]]] = {
    "shipped": shipped,
    "drawn": drawn,
    "smooth": smooth,
    "competition": competition,
}


WITHOUT_DATA = ("shipped", "drawn", "smooth")


def everything(only: str = "") -> Iterator[Question]:
    """All questions whose names contain a text: of a file, the name without the number of the box."""
    for part in PARTS.values():
        yield from (question for question in part(only) if only in question.name)


def few(count: int) -> Iterator[Question]:
    """About so many of those that need no data set, the same ones when others come or go."""
    chosen = [one for part in WITHOUT_DATA for one in PARTS[part]()]
    every = len(chosen) // count
    yield from (one for one in chosen if zlib.crc32(one.name.encode()) % every == 0)
