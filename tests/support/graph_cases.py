"""Small networks and properties for the complete methods, with answers by enumeration of activation patterns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import numpy as np
import torch
from scipy.optimize import linprog
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Conv2d,
    Input,
    LeakyRelu,
    Linear,
    Node,
    Permute,
    Relu,
    Reshape,
    Scale,
)

from tests.support.graph_exact import exact_outputs
from verifiable_relu.search.outcomes import Outcome, Verdict
from verifiable_relu.spec.property import Box, Polytope, Property, Query, Row

UNIT = Box(np.array([-1.0]), np.array([1.0]))


def chain(nodes: Sequence[Node]) -> Network:
    """The network of some nodes in their order, named by their positions."""
    return Network(tuple(nodes))


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], dyadic: bool) -> torch.Tensor:
    if dyadic:
        return torch.from_numpy(rng.integers(-8, 9, shape).astype(np.float32) / 8)
    return torch.from_numpy(rng.normal(size=shape).astype(np.float32))


def mlp(rng: np.random.Generator, sizes: Sequence[int], *, leaky: bool = False, dyadic: bool = False) -> Network:
    """A random MLP. With ``leaky`` it has LeakyReLU, whose slopes vary by neuron, and may be above 1 or below 0."""
    nodes: list[Node] = [Input(name="x", inputs=(), shape=(sizes[0],))]
    for layer, (before, after) in enumerate(itertools.pairwise(sizes)):
        if layer:
            source, shape = len(nodes) - 1, nodes[-1].shape
            if leaky:
                slope = torch.from_numpy(rng.choice([-0.5, 0.25, 0.5, 1.5], shape).astype(np.float32))
                nodes.append(LeakyRelu(name=f"act{layer}", inputs=(source,), shape=shape, slope=slope))
            else:
                nodes.append(Relu(name=f"act{layer}", inputs=(source,), shape=shape))
        nodes.append(
            Linear(
                name=f"fc{layer}",
                inputs=(len(nodes) - 1,),
                shape=(after,),
                weight=_numbers(rng, (after, before), dyadic),
                bias=_numbers(rng, (after,), dyadic),
            )
        )
    return chain(nodes)


def residual(rng: np.random.Generator) -> Network:
    """A network with every operator; its convolutions have strides, groups, dilation and unequal padding."""
    nodes: list[Node] = [
        Input(name="x", inputs=(), shape=(2, 3, 2)),
        Scale(
            name="norm",
            inputs=(0,),
            shape=(2, 3, 2),
            center=_numbers(rng, (2, 1, 1), True),
            scale=_numbers(rng, (2, 1, 1), True) + 0.5,
            shift=_numbers(rng, (2, 1, 1), True),
        ),
        Conv2d(
            name="c0",
            inputs=(1,),
            shape=(2, 2, 2),
            weight=_numbers(rng, (2, 1, 2, 2), False) / 2,
            bias=_numbers(rng, (2,), False) / 2,
            stride=(2, 1),
            padding=(1, 0, 0, 1),
            groups=2,
        ),
        Relu(name="r0", inputs=(2,), shape=(2, 2, 2)),
        Conv2d(
            name="c1",
            inputs=(3,),
            shape=(2, 2, 2),
            weight=_numbers(rng, (2, 2, 2, 2), False) / 2,
            bias=_numbers(rng, (2,), False) / 2,
            dilation=(2, 2),
            padding=(1, 1, 1, 1),
        ),
        Add(name="add", inputs=(3, 4), shape=(2, 2, 2)),
        Permute(name="perm", inputs=(5,), shape=(2, 2, 2), axes=(1, 2, 0)),
        Reshape(name="flat", inputs=(6,), shape=(8,)),
        LeakyRelu(name="r1", inputs=(7,), shape=(8,), slope=torch.tensor(0.25)),
        Linear(
            name="fc", inputs=(8,), shape=(2,), weight=_numbers(rng, (2, 8), False), bias=_numbers(rng, (2,), False)
        ),
    ]
    return chain(nodes)


def hinge(weight: float = 1.0, bias: float = 0.0) -> list[Node]:
    """The nodes of y = relu(weight·x + bias)."""
    return [
        Input(name="x", inputs=(), shape=(1,)),
        Linear(name="fc", inputs=(0,), shape=(1,), weight=torch.tensor([[weight]]), bias=torch.tensor([bias])),
        Relu(name="act", inputs=(1,), shape=(1,)),
    ]


def _twice(bias: torch.Tensor) -> list[Node]:
    """The nodes of relu(x + bias), for two biases."""
    return [
        Input(name="x", inputs=(), shape=(1,)),
        Linear(name="copy", inputs=(0,), shape=(2,), weight=torch.ones(2, 1), bias=bias),
        Relu(name="act", inputs=(1,), shape=(2,)),
    ]


def union_in_order() -> Query:
    """A query of two polytopes of which one is reached, and of which bounds rank the other, unreachable one first.

    Only a solver can exclude the unreachable polytope. The outputs are relu(x) − relu(x), which is zero, and relu(x),
    over [−1, 1].
    """
    nodes = _twice(torch.zeros(2))
    weight = torch.tensor([[1.0, -1.0], [1.0, 0.0]])
    nodes.append(Linear(name="fc", inputs=(2,), shape=(2,), weight=weight, bias=torch.zeros(2)))
    unreached, reached = (row({0: -1}, -0.5),), (row({1: -1}, -0.875),)
    return Query(chain(nodes), Property(UNIT, (unreached, reached)))


def barely_unstable() -> Query:
    """A query whose counterexample needs the inactive phase of a neuron whose pre-activation is never below −1/64.

    The outputs are relu(x + 63/64) and relu(x + 1) over [−1, 1]; at x = −1 both are zero.
    """
    unsafe = ((row({0: -1}, 0), row({1: 1}, 1 / 128)),)
    return Query(chain(_twice(torch.tensor([63 / 64, 1.0]))), Property(UNIT, unsafe))


def ball(center: np.ndarray, eps: float) -> Box:
    """An L∞ ball as a box with float64 bounds."""
    return Box(center - eps, center + eps)


def row(coefficients: dict[int, float], bound: float | Fraction, strict: bool = False) -> Row:
    """The row with these exact coefficients."""
    return Row(tuple(sorted((i, Fraction(c)) for i, c in coefficients.items())), Fraction(bound), strict)


def _slopes(node: Activation) -> np.ndarray:
    if isinstance(node, LeakyRelu):
        return np.broadcast_to(node.slope.double().numpy(), node.shape).reshape(-1)
    return np.zeros(node.size)


def least(network: Network, box: Box, polytope: Polytope) -> float:
    """The minimum over a box of the maximum over rows of A·y − b, by one linear program for every pattern of phases.

    The function does not use the package's encoding: it finds the affine map of a pattern by evaluating the network
    under fixed phases at unit vectors.
    """
    net = network.to(torch.float64)
    sizes = [net.nodes[i].size for i in net.activations]
    found = []
    for pattern in itertools.product((False, True), repeat=sum(sizes)):
        sides = dict(zip(net.activations, np.split(np.array(pattern), np.cumsum(sizes)[:-1]), strict=True))
        a_ub, b_ub, output = _affine(net, sides)
        rows_a = np.zeros((len(polytope), network.output_size))
        for r, one in enumerate(polytope):
            for i, c in one.coefficients:
                rows_a[r, i] = float(c)
        bounds = np.array([float(one.bound) for one in polytope])
        matrix, offset = output
        cost = np.zeros(box.size + 1)
        cost[-1] = 1
        upper = np.vstack(
            [np.hstack([a_ub, np.zeros((len(a_ub), 1))]), np.hstack([rows_a @ matrix, -np.ones((len(bounds), 1))])]
        )
        limits = np.concatenate([b_ub, bounds - rows_a @ offset])
        answer = linprog(cost, upper, limits, bounds=[*zip(box.lower, box.upper, strict=True), (None, None)])
        # There may be no point of the box with these phases.
        found.append(answer.fun if answer.status == 0 else np.inf)
    return min(found)


def _affine(net: Network, sides: dict[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """For fixed phases the constraints A·x ≤ b under which the phases hold, and the output as matrix and offset."""
    points = torch.cat([torch.zeros(1, net.input_size), torch.eye(net.input_size)]).double()
    values: list[torch.Tensor] = []
    constraints: list[np.ndarray] = []
    for index, node in enumerate(net.nodes):
        if isinstance(node, Input):
            values.append(points.reshape(-1, *node.shape))
        elif isinstance(node, Activation):
            pre = values[node.inputs[0]].flatten(1)
            side = torch.from_numpy(sides[index])
            constraints.append(torch.where(side, -pre, pre).numpy())
            after = torch.where(side, pre, pre * torch.from_numpy(_slopes(node).copy()))
            values.append(after.reshape(-1, *node.shape))
        else:
            values.append(node.forward(*(values[i] for i in node.inputs)))
    held = np.hstack([np.zeros((len(points), 0)), *constraints])
    last = values[-1].flatten(1).numpy()
    return (held[1:] - held[0]).T, -held[0], ((last[1:] - last[0]).T, last[0])


@cache
def random_query(seed: int, *, leaky: bool = False, dyadic: bool = False) -> tuple[Query, float]:
    """A random query near its decision boundary, and its least margin by enumeration, which is small, of any sign."""
    rng = np.random.default_rng(seed)
    network = mlp(rng, (2, 2, 3, 2), leaky=leaky, dyadic=dyadic)
    box = ball(rng.integers(-8, 9, 2) / 8, 0.5)
    shape = seed % 3
    polytopes: list[Polytope] = [(row({0: 1, 1: -1}, 0),)]
    if shape == 1:
        polytopes = [(row({0: 1}, 0), row({1: -1}, 0))]
    if shape == 2:
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
