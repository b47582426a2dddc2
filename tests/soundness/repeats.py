"""Neurons that repeat or mirror others, nearly or exactly, are merged and share symbols only where they may.

Networks are drawn in which most neurons are copies of others: the same, negated, scaled, or one unit in the last place
off; with rows of zeros; with dense layers that follow each other, ReLUs at either end, and weights whose sums round or
do not. Exact values at corners of boxes are held against the network without repeated neurons, and against zonotopes.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from tests.support import nets
from tests.support.exact import exact_values
from verifiable_relu.bounds import Bounds
from verifiable_relu.bounds.zonotope import Zonotopes
from verifiable_relu.network import simplify
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Linear, Relu

from .judge import Report

COUNT = 40
"""How many networks are drawn by default."""


def _numbers(rng: np.random.Generator) -> nets.Weights:
    """Weights of one network: of any bits, of very different magnitudes, or so small that products underflow."""
    kinds = (nets.gaussian(rng), nets.uneven(rng, 12), nets.uneven(rng, 45))
    tiny = lambda shape, fan: nets.gaussian(rng)(shape, fan).double() * 1e-160  # noqa: E731
    return (*kinds, tiny)[int(rng.choice(4, p=[0.6, 0.15, 0.15, 0.1]))]


def _copied(rng: np.random.Generator, rows: Tensor) -> Tensor:
    """The rows, most of them replaced by copies of others: the same, negated, scaled, or nearly the same."""
    rows = rows.clone()
    for target in range(len(rows)):
        source, kind = int(rng.integers(len(rows))), rng.random()
        copy = rows[source].clone()
        if kind < 0.15:
            continue
        if kind < 0.2:
            copy = torch.zeros_like(copy)
        elif kind < 0.4:
            copy = -copy
        elif kind < 0.5:
            copy = 2 * copy
        elif kind < 0.7:
            at = int(rng.integers(len(copy)))
            copy[at] = torch.nextafter(copy[at], copy.new_tensor(float(rng.choice([-np.inf, np.inf]))))
        elif kind < 0.75:
            copy[-1] = -copy[-1]
        rows[target] = copy
    return rows


def network(rng: np.random.Generator) -> Network:
    """A fully connected network in which neurons repeat and mirror others."""
    dyadic = rng.random() < 0.4
    draw = nets.eighths(rng) if dyadic else _numbers(rng)
    dtype = torch.float64 if rng.random() < 0.5 else torch.float32
    chain = nets.Chain((2,))
    if rng.random() < 0.1:
        chain.add(Relu, (2,))
    layers = int(rng.integers(2, 5))
    for layer in range(layers):
        fan, out = chain.nodes[-1].size, int(rng.integers(2, 7))
        rows = torch.cat([draw((out, fan), fan), draw((out, 1), 4)], 1).to(dtype)
        if not dyadic:
            # Float64 weights have as many bits as they can.
            rows *= 1 + torch.from_numpy(rng.uniform(size=rows.shape) * 2.0**-24).to(dtype)
        if rng.random() < 0.8:
            rows = _copied(rng, rows)
        weight, bias = rows[:, :-1].contiguous(), rows[:, -1].contiguous()
        chain.add(Linear, (out,), weight=weight, bias=bias)
        if rng.random() < (0.5 if layer == layers - 1 else 0.7):
            chain.add(Relu, (out,))
    return chain.network(f"copies-{len(chain.nodes)}")


def repeats(*, seed: int = 0, count: int = COUNT, report: Report | None = None) -> Report:
    """Exact values of networks of copies against what is made of these networks."""
    rng, report = np.random.default_rng(seed), report or Report()
    for number in range(count):
        given = network(rng)
        center = torch.from_numpy(rng.normal(size=2)).double()
        radius = float(rng.choice([0.0, 1e-13, 0.1, 1.0]))
        box = Bounds((center - radius)[None], (center + radius)[None])
        ends = [
            sorted({Fraction(float(a)), Fraction(float(b))}) for a, b in zip(box.lower[0], box.upper[0], strict=True)
        ]
        points = [list(point) for point in itertools.product(*ends)]
        points.append([(2 * side[0] + side[-1]) / 3 for side in ends])
        values = [exact_values(given, point) for point in points]
        name = f"{given.name} of seed {seed}, number {number}"
        smaller = simplify.without_repeated(given)
        for point, value in zip(points, values, strict=True):
            if not np.array_equal(exact_values(smaller, point)[-1], value[-1]):
                report.note(name, "another function without repeated neurons")
        exact = given.to(torch.float64)
        with torch.no_grad():
            found = Zonotopes(exact, box, int(rng.choice([1, 64])))
        held = {exact.nodes[index].inputs[0]: bounds for index, bounds in found.pre.items()}
        held[len(exact.nodes) - 1] = found.output.bounds()
        for index, bounds in held.items():
            lower, upper = bounds.lower.flatten().tolist(), bounds.upper.flatten().tolist()
            for value in values:
                for low, inside, high in zip(lower, value[index].flatten(), upper, strict=True):
                    if math.isfinite(low + high) and not Fraction(low) <= inside <= Fraction(high):
                        report.note(name, f"the zonotope of node {index} holds [{low!r}, {high!r}] alone")
        matrix = torch.from_numpy(rng.integers(-2, 3, (2, exact.output_size))).double()
        least, _ = found.lower(matrix, torch.zeros(2, dtype=torch.long))
        for row, low in zip(matrix.tolist(), least.tolist(), strict=True):
            for value in values:
                if Fraction(low) > sum(Fraction(c) * y for c, y in zip(row, value[-1].flatten(), strict=True)):
                    report.note(name, f"a row of the outputs is said to be above {low!r}")
    return report
