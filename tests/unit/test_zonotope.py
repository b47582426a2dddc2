"""Zonotopes hold every exact value, and clipping takes no counterexample away."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import nets
from tests.support.asking import claims
from tests.support.exact import exact_values
from verifiable_relu.bounds import Bounds, crown_relaxation
from verifiable_relu.bounds.zonotope import AffineForm, Zonotopes, chord, mirrors, takes
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Input, Linear, Relu, Sigmoid
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.verifiers.base import Verdict
from verifiable_relu.verifiers.boxes import Clipped, clip, input_error
from verifiable_relu.verifiers.split import InputSplit


def networks(seed: int) -> list[Network]:
    rng = np.random.default_rng(seed)
    made = [
        network
        for draw in (nets.gaussian(rng), nets.uneven(rng))
        for network in (nets.mlp(rng, draw), nets.cnn(rng, draw), nets.residual(rng, draw), nets.normalised(rng, draw))
    ]
    return [network.to(torch.float64) for network in made]


def box_of(network: Network, seed: int, width: float, free: int = 3) -> Bounds:
    """Three boxes around random centres, of which ``free`` inputs vary."""
    rng = np.random.default_rng(seed)
    center = rng.normal(size=(3, network.input_size))
    radius = np.where(rng.permutation(network.input_size) < free, width, 0.0)
    ends = (torch.from_numpy(center + sign * radius).reshape(3, *network.input_shape) for sign in (-1, 1))
    return Bounds(*ends)


def corners(box: Bounds, sample: int) -> list[list[Fraction]]:
    """The corners of one box, exactly, and one point inside."""
    lower, upper = box.lower[sample].flatten().tolist(), box.upper[sample].flatten().tolist()
    ends = [sorted({Fraction(a), Fraction(b)}) for a, b in zip(lower, upper, strict=True)]
    inside = [(2 * Fraction(a) + Fraction(b)) / 3 for a, b in zip(lower, upper, strict=True)]
    return [*map(list, itertools.product(*ends)), inside]


def lost(network: Network, box: Bounds, zonotopes: Zonotopes) -> bool:
    """Whether some exact value at a corner, or inside, is outside its bounds."""
    held = {network.nodes[index].inputs[0]: bounds for index, bounds in zonotopes.pre.items()}
    held[len(network.nodes) - 1] = zonotopes.output.bounds()
    for sample in range(len(box.lower)):
        for point in corners(box, sample):
            values = exact_values(network, point)
            for index, bounds in held.items():
                ends = (side[sample].flatten().tolist() for side in (bounds.lower, bounds.upper))
                for low, value, high in zip(next(ends), values[index].flatten(), next(ends), strict=True):
                    if not Fraction(low) <= value <= Fraction(high):
                        return True
    return False


@pytest.mark.parametrize(("width", "most"), [(0.0, 64), (1e-13, 64), (0.05, 64), (1.0, 64), (0.5, 0), (0.5, 1)])
def test_zonotopes_hold_exact_values_at_corners(width: float, most: int) -> None:
    """Those of few symbols, too: neurons without one of their own count as errors."""
    for network in networks(0):
        box = box_of(network, 1, width, free=2)
        assert not lost(network, box, Zonotopes(network, box, most)), network.name


def linear(source: int, weight: list[list[float]], bias: list[float]) -> Linear:
    parts = torch.tensor(weight, dtype=torch.float64), torch.tensor(bias, dtype=torch.float64)
    return Linear(name="", inputs=(source,), shape=(len(bias),), weight=parts[0], bias=parts[1])


def test_the_difference_of_a_neuron_and_its_negative_is_the_value_before_them() -> None:
    both = linear(0, [[1.0, 2.0], [-1.0, -2.0]], [0.5, -0.5])
    relu = Relu(name="", inputs=(1,), shape=(2,))
    network = Network((Input(name="", inputs=(), shape=(2,)), both, relu, linear(2, [[1.0, -1.0]], [0.0])))
    box = Bounds(torch.tensor([[-1.0, -1.0]]).double(), torch.tensor([[1.0, 1.0]]).double())
    output = Zonotopes(network, box).output.bounds()
    assert -2.5 - 1e-9 < float(output.lower) <= -2.5
    assert 3.5 <= float(output.upper) < 3.5 + 1e-9


def test_neurons_whose_weights_are_not_known_exactly_mirror_nothing() -> None:
    node = linear(0, [[1.0, 2.0], [-1.0, -2.0], [1.0, 2.0], [1.0, 2.5]], [1.0, -1.0, 1.5, 1.0])
    found = mirrors(node)
    assert found is not None
    assert found.first.tolist() == [0, 0, 2, 3]
    assert found.turned.tolist() == [False, True, False, False]
    assert mirrors(replace(node, weight_error=1e-9)) is None
    assert mirrors(replace(node, bias=torch.tensor([1.0, 1.0, 1.5, 1.0]).double())) is None


@pytest.mark.thorough
def test_linear_bounds_of_rows_hold_exact_values_at_corners() -> None:
    for network in networks(4)[:4]:
        for width in (1e-13, 0.3):
            box = box_of(network, 6, width, free=2)
            zonotopes = Zonotopes(network, box)
            matrix = torch.randn(3, network.output_size, generator=torch.Generator().manual_seed(0)).double()
            values, coefficients = zonotopes.lower(matrix, torch.arange(3))
            for sample in range(3):
                slope = [Fraction(c) for c in coefficients[sample].tolist()]
                low, high = (side[sample].flatten().tolist() for side in (box.lower, box.upper))
                least = [Fraction(a if c >= 0 else b) for c, a, b in zip(slope, low, high, strict=True)]
                row = [Fraction(c) for c in matrix[sample].tolist()]
                for point in corners(box, sample):
                    y = exact_values(network, point)[len(network.nodes) - 1].flatten()
                    value = sum(c * v for c, v in zip(row, y, strict=True))
                    along = sum(c * (x - m) for c, x, m in zip(slope, point, least, strict=True))
                    # The coefficients themselves may be off by some units of roundoff.
                    assert value >= Fraction(float(values[sample])) + along * (1 - Fraction(1, 2**45)), network.name


def test_exact_values_are_lost_where_rounding_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(form: AffineForm) -> Bounds:
        reach = form.generators.abs().sum(1)
        return Bounds(form.center - reach, form.center + reach)

    monkeypatch.setattr(AffineForm, "bounds", careless)
    boxes = [(network, box_of(network, 1, 1e-13, free=2)) for network in networks(0)]
    assert any(lost(network, box, Zonotopes(network, box)) for network, box in boxes)


def test_weights_known_up_to_an_error_widen_zonotopes() -> None:
    network = networks(0)[0]
    loose = tuple(replace(node, weight_error=1e-3) if isinstance(node, Linear) else node for node in network.nodes)
    moved = tuple(
        replace(node, weight=node.weight * (1 + 1e-3)) if isinstance(node, Linear) else node for node in network.nodes
    )
    box = box_of(network, 3, 0.1)
    zonotopes = Zonotopes(Network(loose), box)
    assert not lost(Network(moved), box, zonotopes)


def test_a_relu_lies_above_its_chord_by_no_more_than_said() -> None:
    ends = torch.tensor(
        [-1e300, -3.0, -1.0, -1e-200, -5e-324, 0.0, 5e-324, 1e-300, 0.1, 2.0, 1e300], dtype=torch.float64
    )
    lower, upper = (side.flatten() for side in torch.meshgrid(ends, ends, indexing="ij"))
    lower, upper = torch.minimum(lower, upper), torch.maximum(lower, upper)
    _, slope, gap = (found.tolist() for found in chord(Bounds(lower, upper)))
    for low, high, s, q in zip(lower.tolist(), upper.tolist(), slope, gap, strict=True):
        for z in {low, high, min(max(low, 0.0), high)}:
            above = max(Fraction(z), Fraction(0)) - Fraction(s) * Fraction(z)
            assert 0 <= s <= 1
            assert above >= 0
            assert above <= Fraction(q)


def test_nan_and_infinite_bounds_prove_nothing() -> None:
    network = networks(0)[0]
    box = box_of(network, 4, 0.1)
    for value in (torch.nan, torch.inf):
        lower = torch.full_like(box.lower, -value)
        output = Zonotopes(network, Bounds(lower, torch.full_like(box.upper, value))).output.bounds()
        assert not (output.lower > -1e300).any()


def test_networks_with_smooth_activations_are_not_taken() -> None:
    rng = np.random.default_rng(0)
    assert takes(nets.mlp(rng, nets.gaussian(rng)))
    assert not takes(nets.mlp(rng, nets.gaussian(rng), Sigmoid))


def clipping_case(seed: int) -> tuple[Network, list[Property], Bounds]:
    """A network of two inputs, and unions of polytopes that a part of each box reaches."""
    rng = np.random.default_rng(seed)
    chain = nets.Chain((2,))
    draw = nets.gaussian(rng)
    chain.linear(draw((6, 2), 2), draw((6,), 2))
    if seed % 2:
        chain.add(Relu, (6,))
    chain.linear(draw((3, 6), 6), draw((3,), 6))
    network = chain.network("clipped").to(torch.float64)
    box = box_of(network, seed, 0.4, free=2)
    properties = []
    for sample in range(3):
        y = network((box.lower + (box.upper - box.lower) / 4)[sample : sample + 1]).flatten()
        polytopes = []
        for size in ((1,), (2,), (2, 1))[int(rng.integers(3))]:
            rows = []
            for _ in range(size):
                signs = rng.choice([-1, 1, 2], size=3)
                value = float(np.dot(signs, y.numpy()))
                rows.append(Row(tuple((i, Fraction(int(c))) for i, c in enumerate(signs)), Fraction(value)))
            polytopes.append(tuple(rows))
        ends = (side[sample].flatten().numpy() for side in (box.lower, box.upper))
        properties.append(Property(Box(*ends), tuple(polytopes)))
    return network, properties, box


def clipped_away(seed: int, cut: Callable[..., Clipped]) -> tuple[int, int]:
    """How many points of less than the stated margin clipping takes away from a grid; how many boxes it changes."""
    network, properties, box = clipping_case(seed)
    rows = RowBatch.from_properties(properties, network.output_size)
    relaxation = crown_relaxation(network, box)
    values, reached = relaxation.lower(len(network.nodes) - 1, rows.matrix, rows.sample, coefficients=True)
    assert reached is not None
    found = cut(box.flat(), rows, values - rows.bound, relaxation.of_input(reached), input_error(network, values.dtype))
    steps = torch.linspace(0, 1, 17, dtype=torch.float64)
    grid = torch.cartesian_prod(steps, steps)
    gone, smaller = 0, 0
    for sample, prop in enumerate(properties):
        points = torch.lerp(box.lower[sample], box.upper[sample], grid)
        lower, upper = found.box.lower[sample], found.box.upper[sample]
        smaller += bool((lower > box.lower[sample]).any() or (upper < box.upper[sample]).any())
        outside = ((points < lower) | (points > upper)).any(1)
        for point in points[outside].tolist():
            y = exact_values(network, [Fraction(v) for v in point])[-1].flatten()
            margin = prop.margin(list(y))
            gone += margin <= 0 or margin < float(found.margin[sample])
    return gone, smaller


@pytest.mark.thorough
def test_clipping_keeps_every_counterexample() -> None:
    found = [clipped_away(seed, clip) for seed in range(6)]
    assert sum(gone for gone, _ in found) == 0
    assert sum(smaller for _, smaller in found) >= 3


@pytest.mark.thorough
def test_counterexamples_are_lost_where_values_of_rows_are_too_high() -> None:
    def too_high(box: Bounds, rows: RowBatch, values: Tensor, coefficients: Tensor, share: float) -> Clipped:
        return clip(box, rows, values + 0.2 * coefficients.abs().sum(1), coefficients, share)

    assert sum(clipped_away(seed, too_high)[0] for seed in range(6)) > 0


@pytest.mark.parametrize("others", [0, 1])
def test_a_property_that_asks_nothing_of_the_outputs_is_violated(others: int) -> None:
    rng = np.random.default_rng(0)
    network = nets.mlp(rng, nets.gaussian(rng))
    box = Box(np.zeros(3), np.ones(3))
    nothing, unlikely = Property(box, ((),)), Property(box, ((Row(((0, Fraction(1)),), Fraction(-1000)),),))
    queries = [Query(network, prop) for prop in [nothing] + others * [unlikely]]
    found = claims(InputSplit(), queries, math.inf)
    assert [outcome.verdict for outcome in found] == [Verdict.SAT, Verdict.UNSAT][: 1 + others]
