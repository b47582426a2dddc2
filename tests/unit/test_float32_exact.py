"""Bounds with coefficients in float32 against exact rational values, in random networks where rounding dominates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.support.float32_cases import SEEDS, Draw, box_of, exact, excluded, last_in_float32
from verifiable_relu.bounds import TUNING, Bounds, Tuning, crown_relaxation, rounding
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Add, Conv2d, Linear, Relu

MANY = 1 << 62
"""A number of values that is larger than that of any network here."""


def _opposed(draw: Draw, weight: Tensor, first: bool) -> Tensor:
    """Pairs of nearly equal channels that the next convolution subtracts, so that large coefficients cancel."""
    out, channels = 2 * (len(weight) // 2), 2 * (weight.shape[1] // 2)
    weight[1:out:2] = weight[:out:2]
    if not first:
        weight[:, 1:channels:2] = -weight[:, :channels:2]
    noise = torch.rand(weight.shape, generator=draw.generator, dtype=torch.float64)
    return (weight * (1 + 2.0**-16 * noise)).float().double()


def _network(draw: Draw) -> Network:
    """Convolutions of any stride and padding with residual sums.

    Without activations, bounds differ from exact values by rounding alone.
    """
    rng, build = draw.random, Builder((2, 4, 3))
    linear, opposed = rng.random() < 0.7, rng.random() < 0.7
    x = build.scale(0, "scale", scale=draw(2, 1, 1), center=draw(2, 1, 1)) if rng.random() < 0.5 else 0
    for i in range(rng.randint(2, 3) if opposed else rng.randint(1, 3)):
        channels, height, width = build.shape(x)
        kernel = rng.randint(1, min(3, height)), rng.randint(1, min(3, width))
        # Up to three, so that outputs may see padding alone; with strides less, so that not all do.
        stride = (1, 1) if rng.random() < 0.5 else (rng.randint(1, 3), rng.randint(1, 3))
        top, left, bottom, right = (rng.randint(0, 3 if stride == (1, 1) else k - 1) for k in kernel * 2)
        out = rng.choice((2, 4) if opposed else (1, 2, 5))
        bias = draw(out) if rng.random() < 0.7 else None
        weight = draw.weight(out, channels, *kernel)
        if opposed:
            weight = _opposed(draw, weight, i == 0)
        x = build.conv2d(x, weight, bias, f"conv{i}", padding=(top, left, bottom, right), stride=stride)
        if not linear:
            x = build.activation(x, Relu, f"act{i}")
        if rng.random() < 0.3:
            inner = build.conv2d(x, draw.weight(out, out, 3, 3), draw(out), f"inner{i}", padding=(1, 1, 1, 1))
            x = build.add(inner, x, f"sum{i}")
    flat = math.prod(build.shape(x))
    x = build.linear(build.reshape(x, (flat,), "flat"), draw(2, flat), draw(2), "out")
    return build.network(x, name="images")


def _dense(draw: Draw) -> Network:
    """Linear maps with residual sums; if there are activations, most neurons can be inactive."""
    rng, build = draw.random, Builder((5,))
    linear, opposed, x = rng.random() < 0.5, rng.random() < 0.7, 0
    for i in range(rng.randint(2, 4)):
        inside, out = build.shape(x)[0], rng.choice((2, 8, 13, 30))
        weight = draw.weight(out, inside)
        if opposed:
            weight = _opposed(draw, weight[:, :, None, None], i == 0)[:, :, 0, 0]
        bias = draw(out) - (0.7 if rng.random() < 0.5 else 0) * weight.abs().sum(1)
        x = build.linear(x, weight, bias, f"fc{i}")
        if not linear:
            x = build.activation(x, Relu, f"act{i}")
        if rng.random() < 0.3:
            x = build.add(build.linear(x, draw.weight(out, out), draw(out), f"inner{i}"), x, f"sum{i}")
    return build.network(build.linear(x, draw.weight(2, build.shape(x)[0]), draw(2), "out"), name="dense")


def _narrow(draw: Draw) -> Network:
    """A network in which each sum has two products, which nearly cancel."""
    build = Builder((1, 1, 1))
    x = build.conv2d(0, _opposed(draw, draw.weight(2, 1, 1, 1), True), None, "conv1")
    x = build.conv2d(x, _opposed(draw, draw.weight(1, 2, 1, 1), False), None, "conv2")
    return build.network(build.linear(build.reshape(x, (1,), "flat"), draw(2, 1), None, "out"), name="narrow")


def _wrong(net: Network, box: Bounds, tuning: Tuning, every: bool = False) -> int:
    """The number of exact values that bounds of outputs and of neurons exclude, where linear bounds are attained.

    With ``every``, all coefficients are in float32.
    """
    wrong, relaxation, last = 0, crown_relaxation(net, box, float32=every, tuning=tuning), len(net.nodes) - 1
    samples = torch.arange(len(box.lower))

    def lower(target: int, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """The coefficients of the input, and the higher of the bounds computed with and without returning them."""
        found, reached = relaxation.lower(target, rows, samples, coefficients=True)
        return torch.fmax(found, relaxation.lower(target, rows, samples)[0]).unflatten(0, (len(samples), -1)), reached

    def least(reached: Tensor | None, sample: int, row: int) -> Tensor:
        """The point of a sample's box at which the linear lower bound of a row is attained."""
        assert reached is not None
        a = relaxation.of_input(reached).reshape(len(samples), -1, *net.input_shape)[sample, row]
        return torch.where(a > 0, box.lower[sample], box.upper[sample])

    rows = torch.tensor([[1.0, 0], [0, -1], [1, -3]]).double()
    found, reached = lower(last, rows.repeat(len(samples), 1))
    for sample, (i, row) in itertools.product((0, 3), enumerate(rows.tolist())):
        y = exact(net, last, least(reached, sample, i))
        value = sum((Fraction(c) * v for c, v in zip(row, y, strict=True)), Fraction(0))
        wrong += excluded(found[sample, i : i + 1], [value])
    kinds = Conv2d | Linear | Add if every else Conv2d | Add
    for index in (i for i, node in enumerate(net.nodes) if isinstance(node, kinds) and i > relaxation.nodes.start):
        size = net.nodes[index].size
        neuron, sign = torch.tensor([0, size // 2, size - 1]), torch.tensor([1.0, -1.0, 1.0]).double()
        places = neuron.repeat(len(samples)), sign.repeat(len(samples))
        found = relaxation.neurons(index, *places, samples).unflatten(0, (len(samples), 3))
        rows = torch.eye(size).double()[places[0]] * places[1][:, None]
        whole, reached = lower(index, rows.reshape(-1, *net.nodes[index].shape))
        for sample, i in itertools.product((1, 2), range(3)):
            value = int(sign[i]) * exact(net, index, least(reached, sample, i))[neuron[i]]
            wrong += excluded(torch.stack([found[sample, i], whole[sample, i]]), [value, value])
    return wrong


def _cases(*makes: Callable[[Draw], Network], seeds: range = SEEDS) -> Iterator[tuple[Network, Bounds]]:
    for seed, make in itertools.product(seeds, makes):
        draw = Draw(seed)
        net = make(draw)
        yield net, box_of(draw, net)


WINDOWS = {"window_matrix_entries": 0, "window_share": 1.0}
"""No windows by matrices in float64, which small networks get otherwise; windows up to whole images."""


@pytest.mark.thorough
@pytest.mark.parametrize("rows", (4, 0), ids=("windows copied", "windows viewed"))
def test_no_exact_value_is_excluded_with_the_first_convolutions_in_float32(rows: int) -> None:
    tuning = replace(TUNING, **WINDOWS, window_table_rows=rows)
    for seed, (net, box) in enumerate(_cases(_network, _narrow)):
        assert last_in_float32(net, box, tuning=tuning) > 0
        assert not _wrong(net, box, tuning), seed


@pytest.mark.thorough
@pytest.mark.parametrize("make", (_network, _dense))
def test_no_exact_value_is_excluded_with_every_node_in_float32(make: Callable[[Draw], Network]) -> None:
    tuning, deepest = replace(TUNING, **WINDOWS), 0
    for seed, (net, box) in enumerate(_cases(make)):
        deepest += last_in_float32(net, box, True, tuning) == len(net.nodes) - 1
        assert not _wrong(net, box, tuning, every=True), seed
    assert deepest == (len(SEEDS) if make is _dense else 0)


@pytest.mark.combined
@pytest.mark.thorough
@pytest.mark.parametrize("share", (0.0, 1 / 64))
@pytest.mark.parametrize("makes", ((_network, _narrow), (_dense,)), ids=("images", "dense"))
def test_without_slack_for_float32_exact_values_are_excluded(
    makes: tuple[Callable[[Draw], Network], ...], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: without slack, bounds exclude exact values."""
    full = rounding.backward_single
    monkeypatch.setattr(rounding, "backward_single", lambda *given: share * full(*given))
    tuning = replace(TUNING, **WINDOWS)
    wanted = 6 if share == 0 else 1
    wrong = (None for net, box in _cases(*makes, seeds=range(32)) if _wrong(net, box, tuning, every=makes == (_dense,)))
    assert len(list(itertools.islice(wrong, wanted))) == wanted
