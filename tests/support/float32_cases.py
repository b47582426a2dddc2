"""Random networks and boxes, exact values and geometries for tests of float32 within bounds in float64."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import torch
from torch import Tensor

from tests.support.draws import draws
from verifiable_relu.bounds import TUNING, Bounds, Relaxation, Tuning
from verifiable_relu.bounds.operators import ConvolutionOperator, prepared
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.trust.exact import evaluate_exact

SEEDS = range(draws(32))


class Draw:
    """A source of random tensors in float64; weights are float32 numbers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        value = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        if self.random.random() < 0.3:
            value = value * 2.0 ** torch.randint(-6, 7, shape, generator=self.generator)
        return value * 10 ** self.random.uniform(-8, 8) if self.random.random() < 0.2 else value

    def weight(self, *shape: int) -> Tensor:
        return self(*shape).float().double()

    def integers(self, *shape: int) -> Tensor:
        """Random integers that are small enough for their sums in float32 to be exact."""
        return torch.randint(-9, 10, shape, generator=self.generator).double()


def rounded(weight: Tensor) -> Tensor:
    """A tensor rounded to float32 numbers, in float64."""
    return weight.float().double()


def exact(net: Network, index: int, x: Tensor) -> list[Fraction]:
    """The exact values of a node at a point."""
    part = Network(net.nodes[: index + 1], name="part")
    return evaluate_exact(part, [Fraction(v) for v in x.flatten().tolist()])


def excluded(bound: Tensor, values: list[Fraction]) -> int:
    """The number of values below their lower bounds; a bound of NaN excludes none."""
    return sum(b > v for b, v in zip(bound.tolist(), values, strict=True) if not math.isnan(b))


def box_of(draw: Draw, net: Network) -> Bounds:
    """A batch of two boxes, one that is a million times narrower, and one point.

    The width of the first two is drawn: from zero to 30 times the distance from zero.
    """
    center = draw(4, *net.input_shape)
    share = draw.random.choice((0, 1e-6, 0.3, 1, 1, 30))
    width = share * center.abs().amax() * torch.rand(center.shape, generator=draw.generator, dtype=torch.float64)
    width = width * torch.tensor([1, 1, 1e-6, 0]).double().reshape(-1, *[1] * len(net.input_shape))
    return Bounds(center - width, center + width)


def last_in_float32(net: Network, box: Bounds, every: bool = False, tuning: Tuning = TUNING) -> int:
    """The last node with coefficients in float32, all nodes up to which may have them if ``every``; −1 if none has."""
    return Relaxation(net, box, float32=every, tuning=tuning).backward.float32.last_node


Geometry = tuple[tuple[int, int], tuple[int, int], tuple[int, int, int, int], tuple[int, int]]
"""The kernel, stride and padding of a convolution, and the height and width of its input."""


GEOMETRIES: list[Geometry] = [
    ((1, 1), (1, 1), (0, 0, 0, 0), (3, 4)),
    ((3, 2), (1, 1), (1, 0, 2, 1), (4, 5)),
    ((3, 3), (2, 2), (1, 1, 1, 1), (6, 7)),
    ((2, 3), (2, 3), (0, 0, 0, 0), (5, 8)),
    ((1, 2), (3, 4), (0, 1, 0, 0), (8, 9)),
    ((4, 4), (2, 3), (0, 3, 1, 2), (5, 6)),
    ((2, 2), (1, 2), (5, 0, 0, 4), (2, 3)),
    ((5, 3), (1, 2), (2, 1, 2, 1), (3, 1)),
]


def convolution(
    draw: Draw, geometry: Geometry, channels: int = 3, out: int = 4, tuning: Tuning = TUNING
) -> tuple[Network, ConvolutionOperator]:
    """A convolution whose weights are small integers."""
    kernel, stride, padding, size = geometry
    build = Builder((channels, *size))
    weight = draw.integers(out, channels, *kernel)
    net = build.network(build.conv2d(0, weight, None, "conv", padding=padding, stride=stride), name="conv")
    operator = prepared(net, tuning)[1]
    assert isinstance(operator, ConvolutionOperator)
    return net, operator
