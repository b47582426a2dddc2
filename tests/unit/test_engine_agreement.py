"""Bounds of the relaxation engine beside those of the graph's bounds, op by op."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from verifiable_relu.bounds import Ascent as OldAscent
from verifiable_relu.bounds import Bounds, crown_relaxation, input_box
from verifiable_relu.bounds import ascend as old_ascend
from verifiable_relu.bounds.alpha import Ascent, ascend
from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.linear_bounds import bound_by_crown, lower_of_rows
from verifiable_relu.bounds.tuning import PLAIN
from verifiable_relu.ir.flatten import flatten
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Elementwise
from verifiable_relu.network.graph import Network
from verifiable_relu.network.onnx.read import read_onnx
from verifiable_relu.spec import queries, read_vnnlib

SPECS = Path(__file__).parents[2] / "specs"
NAMES = {
    "mnist_mlp": "mnist_mlp_mnist_0_eps3_100.vnnlib.gz",
    "mnist_cnn": "mnist_cnn_mnist_0_eps1_10.vnnlib.gz",
    "cifar_cnn": "cifar_cnn_cifar10_0_eps1_255.vnnlib.gz",
}


@pytest.fixture(params=NAMES)
def query(request: pytest.FixtureRequest) -> tuple[Network, Bounds]:
    """A shipped network, and three parts of the box of one of its properties."""
    network = read_onnx(SPECS / f"{request.param}.onnx")
    (first, *_) = queries(read_vnnlib(SPECS / NAMES[request.param]), network)
    network = network.to(torch.float64)
    box = input_box([first.property], network)
    width = box.upper - box.lower
    parts = torch.rand(3, *box.lower.shape[1:], generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 2
    return network, Bounds(box.lower + parts * width, box.lower + (parts + 0.5) * width)


def both_sides(network: Network, samples: int) -> Tensor:
    unit = torch.eye(network.output_size, dtype=torch.float64)
    return torch.cat([unit, -unit]).repeat(samples, 1)


def relaxed(network: Network, box: Bounds, dtype: torch.dtype | None) -> Relaxation:
    return bound_by_crown(Relaxation(flatten(network), Interval(*vars(box.flat()).values()), dtype=dtype))


def excess(lower: Tensor, upper: Tensor, old: Bounds) -> float:
    """How far bounds are beyond others, as a part of their width or of a hundredth of the layer's largest number."""
    old = old.flat()
    width = torch.maximum(old.upper - old.lower, 0.01 * torch.maximum(old.lower.abs(), old.upper.abs()).amax())
    return float(torch.maximum((old.lower - lower) / width, (upper - old.upper) / width).max())


@torch.no_grad()
def test_bounds_in_float64_are_those_of_the_graph(query: tuple[Network, Bounds]) -> None:
    network, box = query
    old, new = crown_relaxation(network, box, tuning=PLAIN), relaxed(network, box, torch.float64)
    inputs = [op.inputs[0] for op in new.network.ops if isinstance(op, Elementwise)]
    for activation, index in zip(network.activations, inputs, strict=True):
        interval = new.bounds[index].interval
        assert excess(interval.lower, interval.upper, old.pre[activation]) < 1e-9
    matrix = both_sides(network, 3)
    before, after = old.outputs(matrix), lower_of_rows(new, matrix)[0]
    assert bool((after > before - 1e-9 * (1 + before.abs())).all())


@torch.no_grad()
def test_float32_widens_bounds_by_little(query: tuple[Network, Bounds]) -> None:
    network, box = query
    matrix = both_sides(network, 3)
    wide, auto = (lower_of_rows(relaxed(network, box, dtype), matrix)[0] for dtype in (torch.float64, None))
    width = -wide.view(3, 2, -1).sum(1)
    assert bool((-auto.view(3, 2, -1).sum(1) < 1.0005 * width).all())


@torch.no_grad()
def test_slopes_are_found_as_well_as_before(query: tuple[Network, Bounds]) -> None:
    network, box = query
    matrix, sample = both_sides(network, 3), torch.arange(3).repeat_interleave(2 * network.output_size)
    old, new = crown_relaxation(network, box), relaxed(network, box, None)
    target, rows = len(network.nodes) - 1, matrix.reshape(-1, *network.output_shape)
    before = old_ascend(old, target, rows, sample, OldAscent(steps=5)).lower.view(3, 2, -1).sum(1)
    after = ascend(new, len(new.network.ops) - 1, matrix, sample, Ascent(steps=5)).lower.view(3, 2, -1).sum(1)
    assert bool((after > 1.001 * before).all())
