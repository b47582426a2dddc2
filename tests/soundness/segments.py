"""No node of branch and bound over smooth neurons denies a point that lies in it.

At points of a box, the values of a network are known to 80 digits. Nodes are split on smooth neurons again and again,
and each time one of the two halves must hold the point; no bound of such a node, be it by multipliers of a search or by
any others, may exceed the value there. Points are those at which the objective is nearly least over the box, so that
bounds of small nodes come close to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from tests.support import nets
from tests.support.exact import DIGITS, exact_values
from verifiable_relu.bounds import crown_relaxation, input_box
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Gelu, Relu, Sigmoid, Smooth, Tanh
from verifiable_relu.spec.property import Box, Property
from verifiable_relu.verifiers.bab.ascent import DualAscent, Nodes
from verifiable_relu.verifiers.bab.curves import SEGMENTS
from verifiable_relu.verifiers.bab.folding import fold
from verifiable_relu.verifiers.bab.proof import Proofs
from verifiable_relu.verifiers.bab.slopes import Slopes
from verifiable_relu.verifiers.bab.strip import TreeRelaxation

from .judge import Report, scale

KINDS: tuple[type[Activation], ...] = (Sigmoid, Tanh, Gelu, Smooth, Smooth)

_ROUNDS = 10
"""How often each node is split."""

_POINTS = 6
"""How many points of each box are looked at."""


def mixed(rng: np.random.Generator, kind: type[Activation]) -> Network:
    """Layers of smooth neurons and of ReLUs in turn, added up."""
    draw = nets.gaussian(rng)
    chain = nets.Chain((3,))
    chain.linear(draw((5, 3), 3), draw((5,), 4))
    first = nets.activation(chain, kind, rng)
    chain.linear(draw((5, 5), 5), draw((5,), 4))
    second = chain.add(Relu, (5,))
    chain.linear(draw((4, 5), 5), draw((4,), 4), chain.add(nets.Add, (5,), first, second))
    nets.activation(chain, kind, rng)
    chain.linear(draw((2, 4), 4), draw((2,), 4))
    return chain.network(f"mixed-{kind.op}")


def networks(rng: np.random.Generator, count: int) -> Iterator[Network]:
    """Networks of each kind in turn: a small one, whose bounds are tight, and a dense, convolutional or mixed one."""
    for number in range(count):
        kind, draw = KINDS[number % len(KINDS)], nets.gaussian(rng)
        yield nets.mlp(rng, draw, kind, (1, 2, 2))
        shape = (number + number // len(KINDS)) % 3
        yield mixed(rng, kind) if shape == 2 else (nets.mlp, nets.cnn)[shape](rng, draw, kind)


def low_points(rng: np.random.Generator, network: Network, box: Box, row: Tensor) -> np.ndarray:
    """Points of a box, (points, inputs), at which row·y is about least, some of them the best of a few hundred."""
    share = rng.random((300, box.size))
    share[::2] = rng.integers(0, 2, share[::2].shape)
    x = np.clip(box.lower + share * (box.upper - box.lower), box.lower, box.upper)
    net = network.to(torch.float64)
    with torch.no_grad():
        y = net(torch.from_numpy(x).reshape(-1, *network.input_shape)).flatten(1) @ row
    return x[np.concatenate([y.argsort()[: _POINTS - 2], rng.integers(0, len(x), 2)])]


def segments(*, seed: int = 0, count: int = 5, report: Report | None = None) -> Report:
    """Nodes of random smooth networks against values at points that lie in them."""
    rng, report = np.random.default_rng(seed), report or Report()
    for network in report.of(networks(rng, count)):
        center = rng.normal(size=network.input_size) * 0.7
        radius = rng.choice([0.05, 0.3, 1.0]) * rng.uniform(0.5, 1, size=network.input_size)
        box = Box(center - radius, center + radius)
        with torch.no_grad():
            _examine(rng, network, box, report)
    return report


def _examine(rng: np.random.Generator, network: Network, box: Box, report: Report) -> None:
    """Split and bound nodes that hold some points of the box."""
    matrix = torch.from_numpy(rng.integers(-3, 4, (2, network.output_size))).double()
    matrix[0, 0] += 4
    relaxation = crown_relaxation(network.to(torch.float64), input_box([Property(box, ())], network))
    folded, rows = fold(relaxation, 0, box, matrix)
    strip = TreeRelaxation(folded, rows, Slopes().search(folded, rows, lambda: False)[0][0])
    strip.prefer()
    points = low_points(rng, network, box, matrix[0])
    values, exact = _exact(network, points, folded.places, matrix)
    every = torch.ones(folded.size, dtype=torch.bool)
    ascents = [DualAscent(strip, adaptive, torch.float64) for adaptive in (every, ~every)]
    proofs = Proofs(strip)
    nodes = Nodes.roots(folded.size, 1)[torch.zeros(len(points), dtype=torch.long)]
    nodes.mu = torch.from_numpy(rng.choice([0.0, 0.0, 0.5, 3.0], (len(points), 1))).float()
    for step in range(_ROUNDS):
        found = ascents[step % 2].run(nodes, 12)
        anything = torch.from_numpy(rng.normal(size=(len(points), folded.size))) * (1 + found.w.abs().sum())
        _compare(network, proofs.lower(nodes.split, found.columns, found.w, nodes.mu), exact, nodes.mu, report)
        every = torch.arange(folded.size)
        _compare(network, proofs.lower(nodes.split, every, anything, nodes.mu), exact, nodes.mu, report)
        if not folded.size:
            return
        neuron = torch.from_numpy(rng.integers(0, folded.size, len(points)))
        neuron = torch.where(found.blame.amax(1) > 0, found.blame.argmax(1), neuron) if step % 3 else neuron
        here = nodes.split.gather(1, neuron[:, None])[:, 0]
        # A phase is split once, a segment several times.
        todo = torch.where(folded.smooth[neuron], here < SEGMENTS // 2, here == 0).nonzero().flatten()
        both = nodes[todo].split_on(neuron[todo], strip.curves)
        for at, number in enumerate(todo.tolist()):
            halves = (at, at + len(todo))
            mine = [half for half in halves if _holds(strip, both.split[half], neuron[number], values[number])]
            if not mine:
                report.note(network.name, f"neither half of neuron {int(neuron[number])} holds a point")
                continue
            nodes.split[number], nodes.multipliers[number] = both.split[mine[0]], both.multipliers[mine[0]]


def _exact(
    network: Network, points: np.ndarray, places: Tensor, matrix: Tensor
) -> tuple[list[list[Fraction]], list[list[Fraction]]]:
    """The pre-activations at some places, and the values of matrix·y, for each point."""
    values, exact = [], []
    for point in points:
        at = exact_values(network, nets.as_fractions(point))
        values.append([at[network.nodes[i].inputs[0]].reshape(-1)[k] for i, k in places.tolist()])
        y = at[-1].reshape(-1)
        exact.append([sum(Fraction(c) * v for c, v in zip(row, y, strict=True)) for row in matrix.tolist()])
    return values, exact


def _holds(strip: TreeRelaxation, split: Tensor, neuron: Tensor, z: list[Fraction]) -> bool:
    """Whether the pre-activation of one neuron is where a node (m,) says."""
    value = z[int(neuron)]
    segments = None if strip.curves is None else strip.curves.of(neuron[None], split[None], torch.float64)
    if segments is None:
        return value >= 0 if split[neuron] > 0 else value <= 0
    return Fraction(float(segments.lower)) <= value <= Fraction(float(segments.upper))


def _compare(network: Network, lower: Tensor, exact: list[list[Fraction]], mu: Tensor, report: Report) -> None:
    """Note each bound of objective + μ·row that is above the value at the node's point."""
    for low, (objective, row), weight in zip(lower.tolist(), exact, mu[:, 0].tolist(), strict=True):
        value = objective + Fraction(weight) * row
        if not low <= value + Fraction(10.0 ** (5 - DIGITS)) * Fraction(scale(objective, row)):
            report.note(network.name, f"a node is said to be above {low!r}, and has a point of {float(value)!r}")
