"""Small networks and properties for the complete methods, with answers by enumeration of activation patterns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import numpy as np
import torch
from scipy.optimize import linprog

from tests.support import nets
from tests.support.exact import exact_outputs
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.network import Elementwise, Input, Network
from verifiable_relu.search.outcomes import Outcome, Verdict
from verifiable_relu.spec.property import Box, Polytope, Property, Query, Row

UNIT = Box(np.array([-1.0]), np.array([1.0]))


def _numbers(rng: np.random.Generator, dyadic: bool) -> nets.Draw:
    def draw(shape: Sequence[int], fan: int) -> torch.Tensor:
        size = tuple(shape)
        numbers = rng.integers(-8, 9, size) / 8 if dyadic else rng.normal(size=size)
        return torch.from_numpy(numbers).float()

    return draw


def mlp(rng: np.random.Generator, sizes: Sequence[int], *, leaky: bool = False, dyadic: bool = False) -> Network:
    """A random MLP. With ``leaky`` it has LeakyReLU, whose slopes vary by neuron, and may be above 1 or below 0."""
    return nets.mlp(rng, _numbers(rng, dyadic), "PRelu" if leaky else "Relu", sizes)


def residual(rng: np.random.Generator) -> Network:
    """A network with every affine operator; its convolutions have strides, groups, dilation and unequal padding."""
    draw, dyadic = _numbers(rng, False), _numbers(rng, True)
    chain = nets.Chain(2, 3, 2)
    chain.scale(center=dyadic((2, 1, 1), 1), factor=dyadic((2, 1, 1), 1) + 0.5, shift=dyadic((2, 1, 1), 1))
    chain.conv(draw((2, 1, 2, 2), 1) / 2, draw((2,), 1) / 2, stride=(2, 1), padding=(1, 0, 0, 1), groups=2)
    first = chain.act()
    chain.add(first, chain.conv(draw((2, 2, 2, 2), 1) / 2, draw((2,), 1) / 2, dilation=(2, 2), padding=(1, 1, 1, 1)))
    chain.transpose(1, 2, 0)
    chain.reshape(8)
    chain.act(PiecewiseLinear(torch.tensor(0.25)))
    chain.linear(draw((2, 8), 1), draw((2,), 1))
    return chain.network("residual")


def hinge(weight: float = 1.0, bias: float = 0.0) -> Network:
    """y = relu(weight·x + bias)."""
    chain = nets.Chain(1)
    chain.linear(torch.tensor([[weight]]), torch.tensor([bias]))
    chain.act()
    return chain.network("hinge")


def _twice(bias: Sequence[float]) -> nets.Chain:
    """relu(x + bias), for two biases."""
    chain = nets.Chain(1)
    chain.linear(torch.ones(2, 1), torch.tensor(bias))
    chain.act()
    return chain


def union_in_order() -> Query:
    """A query of two polytopes of which one is reached, and of which bounds rank the other, unreachable one first.

    Only a solver can exclude the unreachable polytope. The outputs are relu(x) − relu(x), which is zero, and relu(x),
    over [−1, 1].
    """
    chain = _twice([0.0, 0.0])
    chain.linear(torch.tensor([[1.0, -1.0], [1.0, 0.0]]))
    unreached, reached = (row({0: -1}, -0.5),), (row({1: -1}, -0.875),)
    return Query(chain.network(), Property(UNIT, (unreached, reached)))


def barely_unstable() -> Query:
    """A query whose counterexample needs the inactive phase of a neuron whose pre-activation is never below −1/64.

    The outputs are relu(x + 63/64) and relu(x + 1) over [−1, 1]; at x = −1 both are zero.
    """
    unsafe = ((row({0: -1}, 0), row({1: 1}, 1 / 128)),)
    return Query(_twice([63 / 64, 1.0]).network(), Property(UNIT, unsafe))


def ball(center: np.ndarray, eps: float) -> Box:
    """An L∞ ball as a box with float64 bounds."""
    return Box(center - eps, center + eps)


def row(coefficients: dict[int, float], bound: float | Fraction, strict: bool = False) -> Row:
    """The row with these exact coefficients."""
    return Row(tuple(sorted((i, Fraction(c)) for i, c in coefficients.items())), Fraction(bound), strict)


def least(network: Network, box: Box, polytope: Polytope) -> float:
    """The minimum over a box of the maximum over rows of A·y − b, by one linear program for every pattern of phases.

    The function does not use the package's encoding: it finds the affine map of a pattern by evaluating the network
    under fixed phases at unit vectors.
    """
    places = [(index, i) for index in network.activations for i in range(network.ops[index].size)]
    rows_a = np.zeros((len(polytope), network.output_size))
    for r, one in enumerate(polytope):
        for i, c in one.coefficients:
            rows_a[r, i] = float(c)
    bounds, cost = np.array([float(one.bound) for one in polytope]), np.append(np.zeros(box.size), 1.0)
    found = []
    for pattern in itertools.product((False, True), repeat=len(places)):
        a_ub, b_ub, matrix, offset = _affine(network, dict(zip(places, pattern, strict=True)))
        upper = np.vstack(
            [np.hstack([a_ub, np.zeros((len(a_ub), 1))]), np.hstack([rows_a @ matrix, -np.ones((len(bounds), 1))])]
        )
        limits = np.concatenate([b_ub, bounds - rows_a @ offset])
        answer = linprog(cost, upper, limits, bounds=[*zip(box.lower, box.upper, strict=True), (None, None)])
        # There may be no point of the box with these phases.
        found.append(answer.fun if answer.status == 0 else np.inf)
    return min(found)


def _affine(network: Network, active: dict[tuple[int, int], bool]) -> tuple[np.ndarray, ...]:
    """For fixed phases the constraints A·x ≤ b under which the phases hold, and the output as matrix and offset."""
    points = torch.cat([torch.zeros(1, network.input_size), torch.eye(network.input_size)]).double()
    values: list[torch.Tensor] = []
    constraints: list[torch.Tensor] = []
    for index, op in enumerate(network.ops):
        xs = [values[i] for i in op.inputs]
        if isinstance(op, Input):
            values.append(points)
        elif isinstance(op, Elementwise):
            assert isinstance(op.function, PiecewiseLinear)
            side = torch.tensor([active[index, i] for i in range(op.size)])
            constraints.append(torch.where(side, -xs[0], xs[0]))
            values.append(torch.where(side, xs[0], xs[0] * op.function.slope_below.double()))
        else:
            values.append(op.value(*xs))
    held, last = torch.cat([points[:, :0], *constraints], 1).numpy(), values[-1].numpy()
    return (held[1:] - held[0]).T, -held[0], (last[1:] - last[0]).T, last[0]


@cache
def random_query(seed: int, *, leaky: bool = False, dyadic: bool = False) -> tuple[Query, float]:
    """A random query near its decision boundary, and its least margin by enumeration, which is small, of any sign."""
    rng = np.random.default_rng(seed)
    network = mlp(rng, (2, 2, 3, 2), leaky=leaky, dyadic=dyadic)
    box = ball(rng.integers(-8, 9, 2) / 8, 0.5)
    polytopes: list[Polytope] = [(row({0: 1, 1: -1}, 0),)]
    if seed % 3 == 1:
        polytopes = [(row({0: 1}, 0), row({1: -1}, 0))]
    if seed % 3 == 2:
        polytopes = [(row({0: 1}, 0), row({0: 0.5, 1: -2}, 1)), (row({1: 1}, 0),)]
    # The bounds are moved so that the least margin is a little above or below zero.
    distance = [least(network, box, polytope) for polytope in polytopes]
    gap = float(rng.choice([-1e-2, -1e-4, 1e-4, 1e-2]))
    moved = tuple(
        tuple(row({i: float(c) for i, c in one.coefficients}, float(one.bound) + d - gap) for one in polytope)
        for polytope, d in zip(polytopes, distance, strict=True)
    )
    return Query(network, Property(box, moved)), gap


def planted(seed: int) -> Query:
    """A query with a corner of its box as counterexample: for even seeds by a tiny margin, for odd ones by none."""
    rng = np.random.default_rng(seed)
    network = mlp(rng, (6, 16, 16, 3))
    box = ball(rng.normal(size=6).round(3), 0.3)
    corner = np.where(rng.random(6) < 0.5, box.lower, box.upper)
    y = exact_outputs(network, [Fraction(float(v)) for v in corner])
    spare = Fraction(1, 10**8) if seed % 2 == 0 else Fraction(0)
    return Query(network, Property(box, ((row({0: 1, 1: -1}, y[0] - y[1] + spare), row({2: 1}, y[2] + spare)),)))


def check(query: Query, outcome: Outcome, margin: float) -> None:
    """The verdict is the sign of the least margin, and what comes with it is true in exact arithmetic."""
    assert outcome.verdict is (Verdict.SAT if margin <= 0 else Verdict.UNSAT), outcome
    if outcome.verdict is Verdict.SAT:
        assert outcome.witness is not None and query.property.box.contains(outcome.witness)
        assert query.property.violated(exact_outputs(query.network, outcome.witness))
    elif outcome.margin is not None:
        assert 0 <= outcome.margin <= margin + 1e-7
