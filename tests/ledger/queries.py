"""The questions of the ledger, as lists of instances that the command ``certify`` takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from tests.support import nets
from verifiable_relu.ir.network import Network
from verifiable_relu.readers import write_onnx
from verifiable_relu.spec import SpecFile, Variable, read_instances, write_vnnlib
from verifiable_relu.spec.find import Instance, write_instances
from verifiable_relu.spec.property import Box, Property, Row

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
"""How many instances of each family of the verification competition are asked, spread over the family."""

TIMEOUT = 20.0
"""The time limit of an instance, in seconds."""


def lists(folder: Path, only: str = "") -> Iterator[tuple[str, Path]]:
    """Write the lists of instances whose names contain a text, and return their names and files.

    Args:
        folder: where networks, properties and lists are written.
        only: the text.
    """
    made = {"specs": _shipped, "drawn": _drawn, "smooth": _smooth}
    for name, instances in made.items():
        if only in name:
            yield name, _written(instances(folder), folder / f"{name}.csv")
    data = os.environ.get("VERIFIABLE_RELU_DATA")
    for family in FAMILIES if data else ():
        if only in family:
            rows = read_instances(Path(data) / "vnncomp" / family / "instances.csv")
            yield family, _written(rows[:: max(1, len(rows) // FAMILIES[family])], folder / f"{family}.csv")


def _written(instances: Iterator[Instance] | list[Instance], path: Path) -> Path:
    write_instances(path, [Instance(one.onnx, one.vnnlib, TIMEOUT) for one in instances])
    return path


def _shipped(folder: Path) -> list[Instance]:
    return read_instances(ROOT / "specs" / "instances.csv")


def _drawn(folder: Path) -> Iterator[Instance]:
    """Random piecewise-linear networks of all architectures."""
    rng = np.random.default_rng(38)
    for name, draw in (
        ("gaussian", nets.gaussian(rng)),
        ("eighths", nets.eighths(rng)),
        ("uneven", nets.uneven(rng, 3)),
    ):
        networks = [*nets.pieces(rng, draw), nets.image(rng, draw), nets.windows(rng, draw)]
        networks += [nets.opposed(rng, draw, images, relu) for images in (False, True) for relu in (False, True)]
        for network in networks:
            yield from _asked(network, rng, folder, f"{name}-{network.name}")
    for front in ("plain", "scale", "conv", "residual"):
        network = nets.needle(rng, nets.dyadic(rng, 3, 4), 0.25, 1.5, decoys=3, front=front)
        yield from _asked(network, rng, folder, network.name)


def _smooth(folder: Path) -> Iterator[Instance]:
    """Networks with smooth activations."""
    rng = np.random.default_rng(39)
    for number in range(2):
        draw = nets.gaussian(rng)
        for network in (*nets.smooth(rng, draw), nets.image(rng, draw, "GELU")):
            yield from _asked(network, rng, folder, f"smooth{number}-{network.name}")


def _asked(network: Network, rng: np.random.Generator, folder: Path, name: str) -> Iterator[Instance]:
    """Ask whether a difference of outputs gets as low as at samples of a box, a little less or a little more."""
    name = name.replace("/", "-").replace(" ", "-")
    onnx = folder / f"{name}.onnx"
    write_onnx(network, onnx)
    center = np.round(rng.normal(size=network.input_size) * 8) / 16
    radius = np.where(rng.permutation(network.input_size) < 6, float(rng.choice([1 / 16, 1 / 4])), 0.0)
    points = center - radius + 2 * radius * rng.random((512, network.input_size))
    with torch.no_grad():
        y = network(torch.from_numpy(points)).numpy()
    row = {0: 1, 1: -1} if network.output_size > 1 else {0: 1}
    value = sum(c * y[:, i] for i, c in row.items())
    least, spread = float(value.min()), float(value.std()) + 2**-8
    for offset in (-1.0, -0.25, 0.1):
        # Rounded, so that the last bits of a sample do not change the question.
        bound = Fraction(round((least + offset * spread) * 512), 512)
        unsafe = ((Row(tuple((i, Fraction(c)) for i, c in row.items()), bound),),)
        path = folder / f"{name}{offset:+}.vnnlib"
        asked = Property(Box(center - radius, center + radius), unsafe)
        shapes = Variable("X", (network.input_size,)), Variable("Y", (network.output_size,))
        write_vnnlib(SpecFile(path, "1.0", (asked,), *shapes), path)
        yield Instance(onnx, path, TIMEOUT)
