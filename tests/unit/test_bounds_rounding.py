"""Bounds against exact rational values where only rounding separates them: points, tiny and huge numbers."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.draws import draws
from tests.support.hooks import Hook
from tests.support.summation import in_order
from verifiable_relu.bounds import TUNING, Bounds, Relaxation, Tuning, crown_relaxation, interval_bounds, rounding, sums
from verifiable_relu.bounds.activations import TABLE
from verifiable_relu.bounds.slack import Slack
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Affine, LeakyRelu, Linear, Node, Relu, Scale, Sigmoid
from verifiable_relu.rounding import unit_roundoff
from verifiable_relu.trust.exact import evaluate_exact

SEEDS = range(draws(60))
DTYPES = (torch.float64, torch.float32)

Situation = Callable[[int, torch.dtype], int]
"""A function from seed and dtype to the number of exact values that bounds exclude."""

Without = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function that turns a function of ``rounding`` into one without slack."""


def _none_of(full: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given: 0 * full(*given)


class Numbers:
    """A source of random tensors with full mantissas and very different magnitudes."""

    def __init__(self, seed: int, decades: float) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.decades = decades

    def tensor(self, *shape: int) -> Tensor:
        value = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        spread = self.random.choice((0, 1, 8))
        value = value * 2.0 ** torch.randint(-spread, spread + 1, shape, generator=self.generator)
        return value * 10 ** self.random.uniform(-self.decades, self.decades) if self.random.random() < 0.5 else value


def network(numbers: Numbers, images: bool) -> Network:
    """A network with reordered and scaled inputs, residual sums, ReLU and PReLU; with convolutions if ``images``."""
    rng, draw = numbers.random, numbers.tensor
    build = Builder((2, 3, 2))
    x = build.scale(0, "scale", center=draw(2, 1, 1), scale=draw(2, 3, 2), shift=draw(1, 1, 2))
    x = build.permute(x, (2, 0, 1), "permute")

    def act(x: int) -> int:
        name = f"act{len(build.nodes)}"
        if rng.random() < 0.7:
            return build.activation(x, Relu, name)
        return build.activation(x, LeakyRelu, name, slope=2 * draw(*build.shape(x)))

    if images:
        x = act(build.conv2d(x, draw(3, 2, 2, 2), draw(3), "conv1", padding=(1, 0, 1, 2), stride=(1, 2)))
        y = build.conv2d(x, draw(3, 3, 3, 3), draw(3), "conv2", padding=(1, 1, 1, 1))
        x = act(build.add(y, x, "add"))
        x = act(build.conv2d(x, draw(3, 1, 1, 2), None, "conv3", groups=3))
    x = build.reshape(x, (math.prod(build.shape(x)),), "flatten")
    for i in range(rng.randint(1, 3)):
        x = build.linear(x, draw(6, build.shape(x)[0]), draw(6), f"fc{i}")
        kind, before = rng.random(), x
        x = act(x)
        if kind < 0.2:
            x = build.add(x, x, f"twice{i}")
        elif kind < 0.4:
            x = build.add(before, x, f"around{i}")
        elif kind < 0.6:
            x = build.scale(x, f"flip{i}", scale=draw(6), center=draw(6))
        elif kind < 0.8:
            x = build.add(act(build.linear(x, draw(6, 6), None, f"inner{i}")), x, f"block{i}")
    return build.network(build.linear(x, draw(2, build.shape(x)[0]), draw(2), "out"), name="uneven")


def stored(net: Network, dtype: torch.dtype) -> Network:
    """A network in another dtype, whose rounded weights count as the true ones."""
    nodes = tuple(replace(n, weight_error=0.0) if isinstance(n, Affine) else n for n in net.to(dtype).nodes)
    return replace(net, nodes=nodes)


def boxes(numbers: Numbers, net: Network, dtype: torch.dtype, batch: int = 2) -> Bounds:
    """Points, and boxes of any width."""
    center = numbers.tensor(batch, *net.input_shape)
    width = 10 ** numbers.random.uniform(-17, 1) * center.abs() * (numbers.random.random() < 0.5)
    return Bounds((center - width).to(dtype), (center + width).to(dtype))


def corners(box: Bounds, sample: int, count: int = 2) -> list[Tensor]:
    """Some corners of one sample's box."""
    lower, upper = box.lower[sample], box.upper[sample]
    mix = torch.rand(count, *lower.shape, generator=torch.Generator().manual_seed(sample)) < 0.5
    return [lower, *(torch.where(m, lower, upper) for m in mix)] if bool((lower < upper).any()) else [lower]


def exact(net: Network, x: Tensor) -> list[Fraction]:
    return evaluate_exact(net, [Fraction(v) for v in x.flatten().tolist()])


def excluded(bound: Tensor, values: list[Fraction]) -> int:
    """The number of values below their lower bounds; a bound of NaN excludes none."""
    return sum(not math.isnan(b) and b > v for b, v in zip(bound.tolist(), values, strict=True))


def count(net: Network, box: Bounds, tuning: Tuning = TUNING) -> tuple[int, int]:
    """The number of exact values that the network's bounds exclude, and the number of those compared."""
    wrong = compared = 0
    relaxation, intervals = crown_relaxation(net, box, tuning=tuning), interval_bounds(net, box, tuning=tuning)[-1]
    last, outputs = len(net.nodes) - 1, net.output_size
    mix = torch.tensor([1.0, -3.0]).to(box.lower)
    rows = torch.cat([torch.eye(outputs), -torch.eye(outputs)]).to(box.lower)
    rows = torch.cat([rows, mix[None]])
    for sample in range(len(box.lower)):
        which = torch.tensor([sample])
        found = [relaxation.lower(last, rows, which)[0], relaxation.by_intervals(rows, which)]
        for x in corners(box, sample):
            y = exact(net, x)
            values = [*y, *(-v for v in y), y[0] - 3 * y[1]]
            for bound in found:
                wrong += excluded(bound, values)
                compared += len(values)
            wrong += excluded(intervals.lower[sample], y) + excluded(-intervals.upper[sample], [-v for v in y])
    return wrong, compared


def cases(dtype: torch.dtype, seeds: range = SEEDS) -> Iterator[tuple[Network, Bounds]]:
    for seed in seeds:
        # In float32 eight decades in every layer leave its range.
        numbers = Numbers(seed, 8 if dtype == torch.float64 else 3)
        net = stored(network(numbers, images=dtype == torch.float64 and seed % 2 == 0), dtype)
        yield net, boxes(numbers, net, dtype)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_exact_value_is_excluded(dtype: torch.dtype) -> None:
    for seed, (net, box) in enumerate(cases(dtype)):
        wrong, compared = count(net, box)
        assert compared and not wrong, seed


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", (0.0, 1 / 64))
def test_without_slack_many_exact_values_are_excluded(dtype: torch.dtype, share: float) -> None:
    """The test above can fail: without slack, bounds exclude exact values."""
    with Hook("rounding:unit_roundoff", lambda right, dtype: share * right(dtype)).applied():
        wanted, wrong = 16 if share == 0 else 1, (1 for net, box in cases(dtype, range(30)) if count(net, box)[0])
        assert sum(itertools.islice(wrong, wanted)) == wanted


def _shifted(node: Node, rng: random.Random, error: float) -> Node:
    """A true operator of which the node is an approximation: each weight is off by ``weight_error``, up or down."""

    def off(weight: Tensor) -> Tensor:
        signs = torch.tensor([rng.choice((-1.0, 1.0)) for _ in range(weight.numel())], dtype=weight.dtype)
        return weight * (1 + error * signs.reshape(weight.shape))

    match node:
        case Linear():
            return replace(node, weight=off(node.weight), weight_error=0.0)
        case Scale():
            return replace(node, scale=off(node.scale), weight_error=0.0)
    return node


def _off(factor: float) -> int:
    """The number of values of true operators that bounds exclude if the network states ``factor``·``weight_error``."""
    # A power of two less than rounding leaves in float64.
    error, wrong = 2.0**-20, 0
    for seed in range(6):
        numbers = Numbers(seed, 1)
        draw = numbers.tensor
        build = Builder((1,))
        x = build.scale(0, "scale", scale=draw(1))
        x = build.linear(x, draw(2, 1).float().double(), None, "fc")
        net = build.network(x, name="rough")
        admitted = tuple(replace(n, weight_error=factor * error) if isinstance(n, Affine) else n for n in net.nodes)
        point = draw(1, 1)
        box = Bounds(point, point)
        for choice in range(8):
            rng = random.Random(choice)
            other = replace(net, nodes=tuple(_shifted(n, rng, error) for n in net.nodes))
            y = exact(other, point)
            relaxation = Relaxation(replace(net, nodes=admitted), box)
            rows = torch.cat([torch.eye(2), -torch.eye(2)]).double()
            relaxation.advance(2)
            found = relaxation.lower(2, rows, torch.tensor([0]))[0]
            bounds = relaxation.nodes.values[2]
            wrong += excluded(found, [*y, *(-v for v in y)])
            wrong += excluded(bounds.lower[0], y) + excluded(-bounds.upper[0], [-v for v in y])
    return wrong


def test_operators_within_the_weight_error_are_enclosed() -> None:
    assert not _off(1.0)
    assert _off(0.4), "weights that are off by more than twice what is admitted must show"


def _fractions(values: Tensor) -> list[Fraction]:
    return [Fraction(v) for v in values.flatten().tolist()]


def _times(a: Tensor, values: list[Fraction]) -> Fraction:
    """The exact products of a row with values."""
    return sum((c * v for c, v in zip(_fractions(a), values, strict=True)), Fraction(0))


def _outside(net: Network, box: Bounds, target: int, a: Tensor, x: Tensor, constant: Tensor | None = None) -> int:
    """Whether the bound of a row of node ``target`` excludes its value at x."""
    relaxation = crown_relaxation(net, box)
    found = relaxation.lower(target, a, torch.tensor([0]), constant=constant)[0]
    part = Network(net.nodes[: target + 1], name="part")
    value = _times(a, exact(part, x)) + (0 if constant is None else Fraction(float(constant)))
    return excluded(found, [value])


def _cancelling(seed: int, place: str, dtype: torch.dtype) -> int:
    """Whether a bound of one row excludes the row's value at a point, if large numbers cancel at one ``place`` only."""
    numbers = Numbers(seed, 0)
    weight = numbers.tensor(2, 2).to(dtype)
    point, a = numbers.tensor(1, 2).to(dtype), numbers.tensor(1, 2).to(dtype)
    constant = torch.zeros(1, dtype=dtype)
    match place:
        case "value":
            # The row's own products cancel.
            a[0, 1] = -a[0, 0] * point[0, 0] / point[0, 1]
        case "backward_affine":
            # The coefficients of what is before the map cancel, both.
            weight[1] = weight[0] * -a[0, 0] / a[0, 1]
        case "total":
            constant += 1e6 * numbers.tensor(1)
    build = Builder((2,))
    net = build.network(build.linear(0, weight, torch.zeros(2, dtype=dtype), "fc"), name="cancelling")
    return _outside(net, Bounds(point, point), 1 if place == "backward_affine" else 0, a, point, constant)


def _before_relu(seed: int, dtype: torch.dtype) -> int:
    """Whether a bound excludes a value if products before a ReLU cancel, whose size only its outward lines know."""
    numbers = Numbers(seed, 0)
    weight, point = 1e6 * numbers.tensor(1, 2).to(dtype), numbers.tensor(1, 2).to(dtype)
    weight[0, 1] = -weight[0, 0] * point[0, 0] / point[0, 1]
    build = Builder((2,))
    x = build.activation(build.linear(0, weight, torch.full((1,), 2.0, dtype=dtype), "fc"), Relu, "act")
    out = (1 if seed % 2 else -1) * numbers.tensor(1, 1).abs().to(dtype)
    net = build.network(build.linear(x, out, None, "out"), name="before")
    return _outside(net, Bounds(point, point), 3, torch.ones(1, 1, dtype=dtype), point)


def _many_uses(seed: int, dtype: torch.dtype) -> int:
    """Whether a bound excludes a value if many rows, each below the sum's resolution, are summed and nearly cancel."""
    build, uses = Builder((1,)), 200
    small = 0.99 * unit_roundoff(dtype)
    # Rows come in the opposite order.
    weights = [-1.0] + [small] * (uses - 2) + [1.0]
    parts = [
        build.scale(0, f"part{i}", scale=torch.full((1,), weight, dtype=dtype)) for i, weight in enumerate(weights)
    ]
    # The small ones first, so that most sums are small and round by little.
    x, *others = [*parts[1:-1], parts[0], parts[-1]]
    for i, part in enumerate(others):
        x = build.add(x, part, f"sum{i}")
    one = torch.ones(1, 1, dtype=dtype)
    return _outside(build.network(x, name="shared"), Bounds(-one, one), x, one, -one)


def _underflowing(seed: int, dtype: torch.dtype) -> int:
    """Whether a bound excludes a value if the only coefficient of the input underflows."""
    out, inner, value = (1e-30, 1e-17, 1e25) if dtype == torch.float32 else (1e-300, 1.1e-26, 1e100)
    build = Builder((1,))
    x = build.linear(0, torch.full((1, 1), inner, dtype=dtype), None, "fc")
    net = build.network(build.linear(x, torch.full((1, 1), out, dtype=dtype), None, "out"), name="small")
    end = torch.full((1, 1), value, dtype=dtype)
    return _outside(net, Bounds(-end, end), 2, torch.ones(1, 1, dtype=dtype), -end)


SLACKS: dict[str, tuple[Situation, Without]] = {
    "value": (lambda seed, dtype: _cancelling(seed, "value", dtype), _none_of),
    "backward_affine": (lambda seed, dtype: _cancelling(seed, "backward_affine", dtype), _none_of),
    "total": (
        lambda seed, dtype: _cancelling(seed, "total", dtype),
        lambda full: lambda found, lost, constant=None: found - lost,
    ),
    "outward": (
        _before_relu,
        lambda full: lambda top, floor, error, terms: (top, torch.zeros_like(top) if floor is None else floor),
    ),
    "accumulate": (_many_uses, _none_of),
    "lost": (_underflowing, _none_of),
}
"""For each function of ``rounding`` a situation that needs its slack, and the function without slack."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", SLACKS)
def test_each_slack_is_needed_somewhere(place: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    situation, without = SLACKS[place]
    if place == "accumulate":
        # What is granted to so many sums of values would do for those of their coefficients, too.
        monkeypatch.setattr(Slack, "sums", 0)
    seeds = range(20 if situation not in (_many_uses, _underflowing) else 1)
    assert not any(situation(seed, dtype) for seed in seeds)
    monkeypatch.setattr(rounding, place, without(getattr(rounding, place)))
    assert any(situation(seed, dtype) for seed in seeds)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_upper_line_rises_twice_as_far_as_a_lower_one_falls(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative coefficients use the upper line, which must cover the slack of the lower line and its own."""
    assert not any(_before_relu(seed, dtype) for seed in range(20))
    full = rounding.outward
    monkeypatch.setattr(rounding, "outward", lambda top, *others: (top, full(top, *others)[1]))
    assert any(_before_relu(seed, dtype) for seed in range(20))


def _by_intervals(seed: int, place: str, dtype: torch.dtype) -> int:
    """The number of ends of a row's range that its bound by intervals excludes, if only one operation rounds."""
    numbers, low = Numbers(seed, 0), 0.0
    weight, a = numbers.tensor(2, 2).to(dtype), numbers.tensor(1, 2).to(dtype)
    point = numbers.tensor(1, 2).to(dtype)
    match place:
        case "values":
            # The row's products cancel at a point, and no map is merged.
            a[0, 1] = -a[0, 0] * point[0, 0] / point[0, 1]
            return _rows_outside(None, Bounds(point, point), a)
        case "coefficients":
            # Those before the map do, both, at the ends of a box about zero: values there are 0.
            weight[1], low = weight[0] * -a[0, 0] / a[0, 1], -1.0
        case "center":
            # A sum over the map's inputs cancels, and the row is one of its own.
            weight[0, 1], low = -weight[0, 0] * point[0, 0] / point[0, 1], 1.0
            a[0, 1] = 0
        case "radius":
            # The centre of a narrow box is rounded, and the radius does not reach both ends; centres cancel.
            point = 1 + torch.tensor([[seed, seed + 3]], dtype=dtype) * torch.finfo(dtype).eps
            a = torch.tensor([[1.0, -1.0]], dtype=dtype)
            return _rows_outside(torch.eye(2, dtype=dtype), Bounds(*(point[:, [i, i]] for i in range(2))), a)
        case "underflow":
            out, inner, value = (1e-30, 1e-17, 1e25) if dtype == torch.float32 else (1e-300, 1.1e-26, 1e100)
            weight, a = torch.full_like(weight, inner), torch.full_like(a, out)
            point, low = torch.full_like(point, value), -1.0
        case "subnormal radius":
            # The smallest number there is: between two of them lies none.
            point = (seed + torch.tensor([[0.0, 1.0]], dtype=dtype)) * torch.finfo(dtype).smallest_normal
            point = point * torch.finfo(dtype).eps
            weight = torch.eye(2, dtype=dtype) * (1e20 if dtype == torch.float32 else 1e200)
            return _rows_outside(weight, Bounds(*(point[:, [i, i]] for i in range(2))), a)
    ends = torch.cat([point, low * point])
    return _rows_outside(weight, Bounds(ends.amin(0, keepdim=True), ends.amax(0, keepdim=True)), a)


def _rows_outside(weight: Tensor | None, box: Bounds, a: Tensor) -> int:
    """The number of values of a row and its negative, at the corners of a box of two inputs, that bounds exclude."""
    build = Builder((2,))
    x = 0 if weight is None else build.linear(0, weight, None, "fc")
    net = build.network(build.reshape(x, (2, 1), "column"), name="rows")
    found = crown_relaxation(net, box).by_intervals(torch.stack([a, -a]).reshape(2, 2, 1), torch.tensor([0, 0]))
    wrong = 0
    for sides in itertools.product((box.lower, box.upper), repeat=2):
        value = _times(a, exact(net, torch.stack([side[0, i] for i, side in enumerate(sides)])))
        wrong += excluded(found, [value, -value])
    return wrong


ROWS: dict[str, tuple[str, Without]] = {
    **dict.fromkeys(
        ("values", "coefficients", "center", "radius"),
        ("interval_rows", lambda full: lambda *given: (0 * full(*given)[0], full(*given)[1])),
    ),
    "underflow": ("interval_rows", lambda full: lambda *given: (full(*given)[0], 0 * full(*given)[1])),
    "subnormal radius": ("concretise", lambda full: lambda radius, terms, dtype: radius),
}
"""For each situation that needs slack in rows by intervals, the function that gives the slack and one without."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", ROWS)
def test_each_slack_of_rows_by_intervals_is_needed(
    place: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, without = ROWS[place]
    assert not any(_by_intervals(seed, place, dtype) for seed in range(20))
    monkeypatch.setattr(rounding, name, without(getattr(rounding, name)))
    assert any(_by_intervals(seed, place, dtype) for seed in range(20))


def _linear_map(weight: Tensor, bias: Tensor) -> Network:
    build = Builder((weight.shape[1],))
    return build.network(build.linear(0, weight, bias, "fc"), name="map")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("merged", (False, True))
def test_rows_by_intervals_whose_sums_overflow_prove_nothing(merged: bool, dtype: torch.dtype) -> None:
    big = torch.finfo(dtype).max / 4
    box = Bounds(*(torch.full((1, 6), end, dtype=dtype) for end in (-1, 1))) if merged else None
    for signs, scale in itertools.product(((1, 1), (1, -1), (-1, 1)), (1.0, 1e3)):
        a = torch.tensor([[signs[0] * scale] * 3 + [signs[1] * scale] * 3], dtype=dtype)
        if box is None:
            center = torch.full((1, 6), big, dtype=dtype)
            net, mine = _linear_map(torch.eye(6, dtype=dtype), torch.zeros(6, dtype=dtype)), Bounds(center, center)
        else:
            net, mine = _linear_map(big * torch.ones(6, 6, dtype=dtype), torch.zeros(6, dtype=dtype)), box
        found = crown_relaxation(net, mine).by_intervals(a, torch.tensor([0]))
        for corner in (mine.lower, mine.upper):
            assert not excluded(found, [_times(a, exact(net, corner[0]))])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("off", (1, -1))
def test_an_activation_may_be_off_by_as_much_as_is_granted_to_its_library(
    dtype: torch.dtype, off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's σ is wrong in its last digits, and z is so small that the line is nearly all offset."""
    point = torch.full((1, 1), 2.0**-60, dtype=dtype)
    build = Builder((1,))
    one = torch.ones(1, 1, dtype=dtype)
    x = build.activation(build.linear(0, one, None, "fc"), Sigmoid, "act")
    net = build.network(build.linear(x, one, None, "out"), name="sigmoid")
    library, granted = torch.sigmoid, TABLE.find(Sigmoid).ulps * unit_roundoff(dtype)
    monkeypatch.setattr(torch, "sigmoid", lambda x: library(x) * (1 + off * granted))

    def wrong() -> int:
        found = crown_relaxation(net, Bounds(point, point)).lower(3, torch.cat([one, -one]), torch.tensor([0]))[0]
        value = Fraction(1, 2) + Fraction(2.0**-62)
        return excluded(found, [value, -value])

    assert not wrong()
    monkeypatch.setattr(rounding, "backward_activation", _none_of(rounding.backward_activation))
    assert wrong()


@pytest.mark.parametrize("kind", ("linear", "sparse weights", "convolution", "scale", "sum"))
def test_each_row_errs_by_its_own_numbers(kind: str) -> None:
    """Numbers of a layer are 60 decades apart: no exact value is excluded, and small ones keep their digits.

    At a point, what bounds are wide is rounding alone.
    """
    units = 1000 * unit_roundoff(torch.float64)
    for seed in range(12):
        numbers = Numbers(seed, 0)
        build, count = Builder((1, 4, 2)), 8
        sizes = 10.0 ** (60 * torch.rand(1, 4, 2, generator=numbers.generator, dtype=torch.float64) - 30)
        point = sizes * numbers.tensor(1, 1, 4, 2).sign()
        x = 0
        if kind == "convolution":
            x = build.reshape(build.conv2d(x, numbers.tensor(2, 1, 1, 2), numbers.tensor(2) * 1e-30, "conv"), (8,), "f")
        else:
            x = build.reshape(x, (count,), "f")
            weight = numbers.tensor(count, count).tril()
        if kind in ("linear", "sparse weights"):
            x = build.linear(x, weight, None, "fc")
        elif kind == "scale":
            x = build.scale(x, "scale", scale=numbers.tensor(count), shift=1e-30 * numbers.tensor(count))
        elif kind == "sum":
            x = build.add(build.scale(x, "scale", scale=numbers.tensor(count)), x, "sum")
        net = build.network(build.activation(x, Relu, "act"), name=kind)
        tuning = replace(TUNING, sparse_weights=1, sparse_share=0.6) if kind == "sparse weights" else TUNING
        box, y = Bounds(point, point), exact(Network(net.nodes[: x + 1], name="part"), point)
        intervals, relaxation = interval_bounds(net, box, tuning=tuning)[x], Relaxation(net, box, tuning=tuning)
        relaxation.advance(len(net.nodes) - 1)
        eye, one = torch.eye(count, dtype=torch.float64), torch.tensor([0])
        rows = [relaxation.lower(x, side * eye, one)[0] for side in (1, -1)]
        size = _sizes(net, x, point)
        for low, high in ((intervals.lower[0], intervals.upper[0]), (rows[0], -rows[1])):
            assert not excluded(low, y) and not excluded(-high, [-v for v in y])
            assert bool(((high - low) <= units * size).all())


def _sizes(net: Network, index: int, point: Tensor) -> Tensor:
    """|W|·|x| + |b| of the maps up to a node of a chain, or of a sum of two, neuron by neuron."""
    values = [point.abs()]
    for node in net.nodes[1 : index + 1]:
        if isinstance(node, Affine):
            values.append(node.absolute(values[node.inputs[0]]) + node.offset_magnitude())
        else:
            values.append(node.forward(*(values[i] for i in node.inputs)))
    return values[index].flatten()


def test_radii_may_be_summed_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Radii are summed one after the other; the first ones are large, and the others are lost beside them."""
    monkeypatch.setattr(sums, "dot", lambda a, values, before=None: in_order(a * values[:, None]))
    build, size = Builder((1, 64, 64)), unit_roundoff(torch.float64)
    # No float32 number, so that all is in float64.
    weight = torch.full((1, 1, 1, 64), 1 + 2.0**-30, dtype=torch.float64)
    net = build.network(build.conv2d(0, weight, None, "conv"), name="long")
    one, a = torch.ones(1, 1, 64, 64).double(), torch.full((1, 1, 64, 1), 63 * size, dtype=torch.float64)
    a[0, 0, 0] = 1
    assert not _outside(net, Bounds(-one, one), 1, a, -one)
    monkeypatch.setattr(rounding, "concretise", lambda radius, terms, dtype: radius)
    assert _outside(net, Bounds(-one, one), 1, a, -one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_that_overflow_prove_nothing(dtype: torch.dtype) -> None:
    big = 2.0**125 if dtype == torch.float32 else 2.0**1022
    build = Builder((6,))
    weight = torch.tensor([[-3.0, -3.0, -3.0, 3.5, 3.5, 3.5]], dtype=dtype) * big
    x = build.activation(build.linear(0, weight, None, "fc"), Relu, "act")
    net = build.network(build.linear(x, -torch.ones(1, 1, dtype=dtype) / big, None, "out"), name="big")
    one = torch.ones(1, 6, dtype=dtype)
    box = Bounds(one, one)
    assert not excluded(interval_bounds(net, box)[-1].lower[0], exact(net, one))
    relaxation = crown_relaxation(net, box)
    for intervals in (False, True):
        found = relaxation.outputs(torch.ones(1, 1), torch.tensor([0]), intervals=intervals)
        assert not excluded(found, exact(net, one))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_coefficients_that_underflow_exclude_nothing(dtype: torch.dtype) -> None:
    out, inner, value = (1e-30, 1e-14, 1e20) if dtype == torch.float32 else (1e-300, 1.1e-20, 1e22)
    build = Builder((1,))
    x = build.activation(build.linear(0, torch.tensor([[inner]], dtype=dtype), None, "fc"), Relu, "act")
    net = build.network(build.linear(x, torch.tensor([[out], [-out]], dtype=dtype), None, "out"), name="small")
    point = torch.tensor([[value]], dtype=dtype)
    found = crown_relaxation(net, Bounds(point, point)).outputs(torch.eye(2), torch.zeros(2, dtype=torch.long))
    assert not excluded(found, exact(net, point))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_subnormal_values_times_large_weights_are_enclosed(dtype: torch.dtype) -> None:
    size, large = (3.0e-41, 1e35) if dtype == torch.float32 else (1e-312, 1e200)
    build = Builder((3,))
    weight = torch.tensor([[1.1, 1.3, -0.7], [-1.1, -1.3, 0.7]], dtype=dtype) * large
    net = build.network(build.linear(0, weight, None, "fc"), name="tiny")
    point = torch.tensor([[1, 1.7, 0.9]], dtype=dtype) * size
    found, values = interval_bounds(net, Bounds(point, point))[-1], exact(net, point)
    assert not excluded(found.lower[0], values) and not excluded(-found.upper[0], [-v for v in values])


@pytest.mark.parametrize(("slope", "kept"), [(0.25, True), (0.1, False)])
def test_a_slope_that_float32_rounds_is_not_kept(slope: float, kept: bool) -> None:
    build = Builder((3,))
    x = build.activation(0, LeakyRelu, "act", slope=torch.tensor(slope, dtype=torch.float64))
    network = build.network(x, name="leaky")
    assert rounding.keeps_activations(network, network.to(torch.float32)) is kept
    assert rounding.keeps_activations(network, network.to(torch.float64))
