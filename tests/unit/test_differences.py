"""Bounds of two networks that are compared: against samples, exact values, and each by itself."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.support.draws import draws
from tests.support.families import NETWORKS, Random, boxes, members, points
from tests.support.nets import Chain
from verifiable_relu.bounds.alpha import Ascent, ascend
from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.differences import Secants
from verifiable_relu.bounds.linear_bounds import bound_by_crown, lower_of_rows
from verifiable_relu.ir.families import harden
from verifiable_relu.ir.functions.function import Function
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.functions.smooth import Hardened, Smooth
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Dense
from verifiable_relu.ir.network import Affine, Elementwise, Network
from verifiable_relu.ir.transform import NetworkPart, combine

DTYPES = (torch.float64, torch.float32, None)
RELU, LEAKY = PiecewiseLinear(), PiecewiseLinear(torch.tensor(0.1))
KINDS: dict[str, tuple[Function, Function]] = {
    "relu": (RELU, RELU),
    "gelu to relu": (Smooth("GELU", 3.0), RELU),
    "silu": (Smooth("SiLU"), Smooth("SiLU")),
    "leaky": (LEAKY, LEAKY),
}


def changed(network: Network, share: float, seed: int = 1) -> Network:
    """The network with weights that are off by about this share of themselves."""
    rng = torch.Generator().manual_seed(seed)
    moved = lambda t: t * (1 + share * torch.randn(t.shape, generator=rng, dtype=torch.float64).to(t.dtype))  # noqa: E731
    ops = [
        replace(op, map=op.map.with_weight(moved(op.map.weight)), bias=None if op.bias is None else moved(op.bias))
        if isinstance(op, Affine) and op.map.weight.numel() > 1
        else op
        for op in network.ops
    ]
    return replace(network, ops=tuple(ops))


def with_function(network: Network, function: Function) -> Network:
    ops = (replace(op, function=function) if isinstance(op, Elementwise) else op for op in network.ops)
    return replace(network, ops=tuple(ops))


def compared(f: Network, g: Network, paired: bool = True) -> Network:
    """Both at the same inputs."""
    parts = [NetworkPart(name, network, range(f.input_size)) for name, network in (("f", f), ("g", g))]
    return combine(parts, f.input_size, lambda network, x: x, paired=paired)


def differences(outputs: int) -> Tensor:
    """Rows that are the differences of outputs and their negatives."""
    one = torch.eye(outputs, dtype=torch.float64)
    rows = torch.cat([-one, one], 1)
    return torch.cat([rows, -rows])


def crown(network: Network, box: Interval, rows: Tensor, dtype: torch.dtype | None = torch.float64) -> Tensor:
    """(batch, rows) lower bounds."""
    relaxation = bound_by_crown(Relaxation(network, box, dtype=dtype))
    value, _ = lower_of_rows(relaxation, rows.repeat(len(box.lower), 1))
    return value.unflatten(0, (len(box.lower), -1))


def sampled(network: Network, box: Interval, rows: Tensor) -> Tensor:
    """(batch, rows) the least values at points."""
    x = points(box)
    return (network(x.flatten(0, 1)) @ rows.T).unflatten(0, x.shape[:2]).amin(0)


@pytest.mark.combined
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("share", [0.0, 1e-3, 0.05, 1.0])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_sampled_difference_is_larger(name: str, share: float, kinds: str, dtype: torch.dtype | None) -> None:
    for seed in range(draws(1)):
        first, second = KINDS[kinds]
        f = NETWORKS[name](seed)
        mine, box = (with_function(f, first), with_function(changed(f, share), second)), boxes(f)
        rows = differences(f.output_size)
        both = compared(*mine)
        assert len(both.pairs) == len(f.activations)
        found = crown(both, box, rows, dtype)
        assert bool((found <= sampled(both, box, rows) + 1e-12).all()) and bool(found.isfinite().all())
        apart = crown(compared(*mine, paired=False), box, rows, dtype)
        assert float((-found).sum()) <= 1.1 * float((-apart).sum()) + 1e-9
        if share <= 1e-3 and first is second:
            assert float((-found).sum()) < 0.2 * float((-apart).sum())


@pytest.mark.parametrize("name", ["mlp", "residual"])
@pytest.mark.parametrize("single", [False, True])
def test_what_is_equal_cancels(name: str, single: bool) -> None:
    """Equal networks do not differ, but for rounding; a small change counts as it is, not as the box is wide."""
    f = NETWORKS[name](2)
    if single:
        f = changed(f, 0.0)
        ops = [replace(op, map=op.map.with_weight(op.map.weight.float())) if isinstance(op, Affine) else op
               for op in f.ops]  # fmt: skip
        f = replace(f, ops=tuple(ops))
    for share, most in ((0.0, 1e-8), (1e-6, 1e-3)):
        assert float(-crown(compared(f, changed(f, share)), boxes(f), differences(f.output_size)).min()) < most


def test_every_member_of_a_family_is_meant() -> None:
    first = NETWORKS["mlp"](0)
    families = harden(first, 5.0), harden(changed(first, 0.01), 5.0)
    box, rows = boxes(first), differences(first.output_size)
    found = crown(compared(*families), box, rows)
    x = points(box)
    for f, g in zip(*map(members, families), strict=True):
        for h in (f, first):
            outputs = torch.cat([h(x.flatten(0, 1)), g(x.flatten(0, 1))], 1)
            assert bool((found <= (outputs @ rows.T).unflatten(0, x.shape[:2]).amin(0) + 1e-12).all())


@pytest.mark.parametrize("share", [1e-3, 0.05])
def test_searched_slopes_hold_and_are_no_worse(share: float) -> None:
    for seed in range(draws(2)):
        f = NETWORKS["mlp"](seed)
        both, box, rows = compared(f, changed(f, share)), boxes(f), differences(f.output_size)
        relaxation = bound_by_crown(Relaxation(both, box))
        sample = torch.arange(len(box.lower)).repeat_interleave(len(rows))
        last = len(both.ops) - 1
        found = ascend(relaxation, last, rows.repeat(len(box.lower), 1), sample, Ascent(steps=5)).lower
        found, before = found.unflatten(0, (len(box.lower), -1)), crown(both, box, rows, None)
        assert bool((found <= sampled(both, box, rows) + 1e-12).all()) and bool((found >= before - 1e-6).all())
        assert float(found.sum()) > float(before.sum())


FUNCTIONS: list[tuple[Function, Function]] = [
    *KINDS.values(),
    (RELU, Smooth("GELU", 0.7)),
    (Smooth("GELU", 2.0), Smooth("GELU", 9.0)),
    (Smooth("SiLU"), Smooth("Mish")),
    (Smooth("Sigmoid"), Smooth("Sigmoid")),
    (Smooth("Exp"), Smooth("Exp")),
    (PiecewiseLinear(torch.tensor(-0.5)), PiecewiseLinear(torch.tensor(-0.5))),
    (Hardened(Smooth("GELU", 3.0)), Hardened(Smooth("GELU", 3.0))),
]


def assert_lines_hold(f: Function, g: Function, dtype: torch.dtype) -> None:
    """Hold the lines of g(z + d) − f(z) against values at drawn z and d, and at the ends of both."""
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    count = 400
    scale = 10 ** (2 * torch.rand(count, generator=rng, dtype=torch.float64) - 1)
    z = torch.sort(draw(2, count) * scale, 0).values
    d = torch.sort(draw(2, count) * scale * 10 ** draw(count), 0).values
    d[:, ::9], z[:, ::7] = d[:1, ::9], 0
    first, apart = Interval(z[:1], z[1:]), Interval(d[:1], d[1:])
    second = Interval(first.lower + apart.lower, first.upper + apart.upper)
    lines = Secants.from_functions(f, g, first, second).relaxation(apart, dtype)
    shares = torch.rand(200, 2, count, generator=rng, dtype=torch.float64)
    shares[:4] = torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]]).double()[:, :, None]
    at, by = (ends[0] + shares[:, i] * (ends[1] - ends[0]) for i, ends in enumerate((z, d)))
    at, by = at.clamp(z[0], z[1]), by.clamp(d[0], d[1])
    every = [RELU, f.least, Smooth("GELU", 20.0)] if isinstance(f, Hardened) else []
    for one, other in [(a, b) for a in every for b in every] or [(f, g)]:
        moved = other.value(at + by) - one.value(at)
        noise = 1e-13 * (1 + moved.abs() + one.value(at).abs() + (at + by).abs())
        # Lines of infinite slopes say nothing, and are taken for no lines.
        assert not bool((lines.lower_slope * by + lines.lower_offset > moved + noise).any())
        assert not bool((moved - noise > lines.upper_slope * by + lines.upper_offset).any())


@pytest.mark.parametrize("pair", FUNCTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lines_hold_for_every_difference(pair: tuple[Function, Function], dtype: torch.dtype) -> None:
    assert_lines_hold(*pair, dtype)


Layers = list[tuple[list[list[Fraction]], list[Fraction]]]
"""Weights and biases of dense layers with ReLUs between them."""


def layers_of(network: Network) -> Layers:
    layers = [op for op in network.ops if isinstance(op, Affine) and isinstance(op.map, Dense) and op.bias is not None]
    return [
        ([[Fraction(w) for w in row] for row in op.map.weight.tolist()], [Fraction(b) for b in op.bias.tolist()])
        for op in layers
        if op.bias is not None
    ]


def exactly(layers: Layers, x: Fraction) -> list[Fraction]:
    """The value of the last layer at an input."""
    values = [x]
    for number, (weight, bias) in enumerate(layers):
        values = values if number == 0 else [max(v, Fraction(0)) for v in values]
        sums = [sum((w * v for w, v in zip(row, values, strict=True)), Fraction(0)) for row in weight]
        values = [total + b for total, b in zip(sums, bias, strict=True)]
    return values


def kinks(layers: Layers, cuts: list[Fraction]) -> list[Fraction]:
    """The inputs between the first and the last of ``cuts`` where the network may not be linear, and ``cuts``."""
    for count in range(1, len(layers)):
        more = set(cuts)
        for left, right in pairwise(cuts):
            pairs = zip(exactly(layers[:count], left), exactly(layers[:count], right), strict=True)
            more.update(left + (right - left) * a / (a - b) for a, b in pairs if a * b < 0)
        cuts = sorted(more)
    return cuts


@pytest.mark.parametrize("share", (0.01, 0.3))
def test_exact_differences_of_networks_of_one_input(share: float) -> None:
    """The difference of piecewise-linear functions is extreme at a kink of either, in rational numbers."""
    for seed in range(draws(4)):
        rng, chain = Random(seed), Chain(1)
        for inputs, outputs in ((1, 4), (4, 4), (4, 2)):
            chain.linear(rng.normal(outputs, inputs), rng.normal(outputs))
            if outputs == 4:
                chain.act()
        f = chain.network("f")
        g = changed(f, share, seed)
        for end in (0.25, 2.0):
            box = Interval(torch.tensor([[-end]], dtype=torch.float64), torch.tensor([[end]], dtype=torch.float64))
            # Between two of these both networks are linear.
            cuts = kinks(layers_of(g), kinks(layers_of(f), [Fraction(-end), Fraction(end)]))
            values = [(exactly(layers_of(f), x), exactly(layers_of(g), x)) for x in cuts]
            apart = [[v - u for u, v in zip(*pair, strict=True)] for pair in values]
            least = [min(sign * d[k] for d in apart) for sign in (1, -1) for k in range(2)]
            for dtype in DTYPES:
                found = crown(compared(f, g), box, differences(2), dtype)[0]
                assert all(Fraction(value) <= exact for value, exact in zip(found.tolist(), least, strict=True))
                assert float(-found.sum()) < 60 * float(-sum(least)) + 1e-9


RIGHT = Secants.relaxation
