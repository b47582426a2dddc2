"""Coefficients in float32 within bounds in float64: those of the first convolutions, about a point of every node."""

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

from tests.unit.test_bounds_rounding import in_order
from verifiable_relu.bounds import Bounds, Relaxation, interval, interval_bounds, reference, relaxed, rounding
from verifiable_relu.bounds import linear as crown
from verifiable_relu.bounds import window as patches
from verifiable_relu.bounds.window import Window, windows
from verifiable_relu.network import from_torch, graph
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Conv2d, LeakyRelu, Linear, Relu
from verifiable_relu.spec import Box, Property, Query, Row
from verifiable_relu.trust.exact import evaluate_exact
from verifiable_relu.verifiers.base import Budget, Trust, Verdict
from verifiable_relu.verifiers.incomplete import AlphaCrown, Crown, CrownIbp, Ibp

WAYS = {"channels first": 1 << 10, "channels last": 0}
"""The ways in which a convolution is pulled back in float32, as graph._WIDE; without strides they are one."""

SEEDS = range(32)


def _force(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(graph, "_WIDE", WAYS[way])


def _windows_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """No windows by matrices in float64, which small networks get otherwise; windows up to whole images."""
    monkeypatch.setattr(patches, "_LARGEST", 0)
    monkeypatch.setattr(crown, "_FULL", 1)


class Draw:
    """Random tensors in float64; those of weights are float32 numbers."""

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
        """Small enough for sums in float32 to be exact."""
        return torch.randint(-9, 10, shape, generator=self.generator).double()


def _opposed(draw: Draw, weight: Tensor, first: bool) -> Tensor:
    """Neighbouring channels nearly the same, and counted with opposite signs by the next convolution: what is left of
    the coefficients is small beside those that were summed."""
    out, channels = 2 * (len(weight) // 2), 2 * (weight.shape[1] // 2)
    weight[1:out:2] = weight[:out:2]
    if not first:
        weight[:, 1:channels:2] = -weight[:, :channels:2]
    noise = torch.rand(weight.shape, generator=draw.generator, dtype=torch.float64)
    return (weight * (1 + 2.0**-16 * noise)).float().double()


def _network(draw: Draw) -> Network:
    """Convolutions of any stride and padding with residual sums; without activations, bounds are nothing but exact
    values and rounding."""
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
    """Linear maps with residual sums; where there are activations, most neurons may be inactive."""
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
    """Two products alone are summed, and nearly cancel."""
    build = Builder((1, 1, 1))
    x = build.conv2d(0, _opposed(draw, draw.weight(2, 1, 1, 1), True), None, "conv1")
    x = build.conv2d(x, _opposed(draw, draw.weight(1, 2, 1, 1), False), None, "conv2")
    return build.network(build.linear(build.reshape(x, (1,), "flat"), draw(2, 1), None, "out"), name="narrow")


def _box(draw: Draw, net: Network) -> Bounds:
    """A batch of four points, or boxes: small ones, ones about as large as their distance from zero, larger ones; some
    much smaller than others."""
    center = draw(4, *net.input_shape)
    share = draw.random.choice((0, 1e-6, 0.3, 1, 1, 30))
    width = share * center.abs().amax() * torch.rand(center.shape, generator=draw.generator, dtype=torch.float64)
    width = width * torch.tensor([1, 1, 1e-6, 0]).double().reshape(-1, *[1] * len(net.input_shape))
    return Bounds(center - width, center + width)


def _exact(net: Network, index: int, x: Tensor) -> list[Fraction]:
    """The values of a node at a point."""
    part = Network(net.nodes[: index + 1], name="part")
    return evaluate_exact(part, [Fraction(v) for v in x.flatten().tolist()])


def _excluded(bound: Tensor, values: list[Fraction]) -> int:
    return sum(b > v for b, v in zip(bound.tolist(), values, strict=True) if not math.isnan(b))


def _wrong(net: Network, box: Bounds, every: bool = False, none: bool = False) -> int:
    """How many exact values are excluded, of outputs and of neurons of maps and sums, where their bounds are least.

    ``every``, ``none``: coefficients in float32."""
    wrong, relaxation, last = 0, relaxed(net, box, single=every), len(net.nodes) - 1
    relaxation = relaxation.double() if none else relaxation
    samples = torch.arange(len(box.lower))

    def lower(target: int, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """The higher bounds of those with and without the coefficients of the input, and these."""
        found, reached = relaxation.lower(target, rows, samples, coefficients=True)
        return torch.fmax(found, relaxation.lower(target, rows, samples)[0]).unflatten(0, (len(samples), -1)), reached

    def least(reached: Tensor | None, sample: int, row: int) -> Tensor:
        """Where the linear lower bound of a row is least in a sample's box."""
        assert reached is not None
        a = relaxation.of_input(reached).reshape(len(samples), -1, *net.input_shape)[sample, row]
        return torch.where(a > 0, box.lower[sample], box.upper[sample])

    rows = torch.tensor([[1.0, 0], [0, -1], [1, -3]]).double()
    found, reached = lower(last, rows.repeat(len(samples), 1))
    for sample, (i, row) in itertools.product((0, 3), enumerate(rows.tolist())):
        y = _exact(net, last, least(reached, sample, i))
        value = sum((Fraction(c) * v for c, v in zip(row, y, strict=True)), Fraction(0))
        wrong += _excluded(found[sample, i : i + 1], [value])
    kinds = Conv2d | Linear | graph.Add if every else Conv2d | graph.Add
    for index in (i for i, node in enumerate(net.nodes) if isinstance(node, kinds) and i > relaxation.entry):
        size = net.nodes[index].size
        neuron, sign = torch.tensor([0, size // 2, size - 1]), torch.tensor([1.0, -1.0, 1.0]).double()
        places = neuron.repeat(len(samples)), sign.repeat(len(samples))
        found = relaxation.neurons(index, *places, samples).unflatten(0, (len(samples), 3))
        rows = torch.eye(size).double()[places[0]] * places[1][:, None]
        whole, reached = lower(index, rows.reshape(-1, *net.nodes[index].shape))
        for sample, i in itertools.product((1, 2), range(3)):
            value = int(sign[i]) * _exact(net, index, least(reached, sample, i))[neuron[i]]
            wrong += _excluded(torch.stack([found[sample, i], whole[sample, i]]), [value, value])
    return wrong


def _border(net: Network, box: Bounds, every: bool = False) -> int:
    """The last node with coefficients in float32."""
    return Relaxation(net, box, single=every).border


def _cases(*makes: Callable[[Draw], Network]) -> Iterator[tuple[Network, Bounds]]:
    for seed, make in itertools.product(SEEDS, makes):
        draw = Draw(seed)
        net = make(draw)
        yield net, _box(draw, net)


@pytest.mark.parametrize("way", WAYS)
def test_no_exact_value_is_excluded(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _force(monkeypatch, way)
    _windows_always(monkeypatch)
    if way == "channels last":
        monkeypatch.setattr(reference, "_FEW", 0)
        monkeypatch.setattr(patches, "_TABLE", 0)
    for seed, (net, box) in enumerate(_cases(_network, _narrow)):
        assert _border(net, box) > 0
        assert not _wrong(net, box), seed


@pytest.mark.parametrize("make", (_network, _dense))
def test_nor_is_one_with_every_node_in_float32(
    make: Callable[[Draw], Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    _windows_always(monkeypatch)
    deepest = 0
    for seed, (net, box) in enumerate(_cases(make)):
        deepest += _border(net, box, True) == len(net.nodes) - 1
        assert not _wrong(net, box, True), seed
    assert deepest == (len(SEEDS) if make is _dense else 0)


@pytest.mark.parametrize("make", (_network, _dense))
def test_nor_is_one_with_bounds_of_float32_and_rows_in_float64(
    make: Callable[[Draw], Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    _windows_always(monkeypatch)
    for seed, (net, box) in enumerate(_cases(make)):
        assert not _wrong(net, box, none=True), seed


def test_few_outputs_are_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which makes bounds tighter, by what sums in float32 of their own rows alone may be off by."""
    draw, build = Draw(0), Builder((2, 8, 8))
    x = build.activation(build.conv2d(0, draw.weight(6, 2, 3, 3), draw(6), "conv1"), Relu, "act1")
    x = build.activation(build.conv2d(x, draw.weight(6, 6, 3, 3), draw(6), "conv2"), Relu, "act2")
    net = build.network(build.linear(build.reshape(x, (96,), "flat"), draw(3, 96), None, "out"), name="net")
    center = draw(2, *net.input_shape)
    box = Bounds(center - 0.1, center + 0.1)
    rows, found = torch.eye(3).double().repeat(2, 1), {}
    for little in (0, math.inf):
        monkeypatch.setattr(crown, "_LITTLE", little)
        relaxation = relaxed(net, box)
        assert relaxation.border > 0
        found[little] = relaxation.outputs(rows)
        plain = (relaxation.double() if little == 0 else relaxation).lower(len(net.nodes) - 1, rows)[0]
        assert torch.equal(found[little], plain)
        if little == 0:
            assert relaxation.double().border == -1
        single = relaxed(net, box, single=True)
        assert torch.equal(single.outputs(rows), single.lower(len(net.nodes) - 1, rows)[0])
    assert bool((found[0] > found[math.inf]).all())
    assert bool((found[0] - found[math.inf] < 1e-3 * found[0].abs()).all())


@pytest.mark.parametrize("share", (0.0, 1 / 64))
@pytest.mark.parametrize("makes", ((_network, _narrow), (_dense,)), ids=("images", "dense"))
def test_without_its_slack_many_are(
    makes: tuple[Callable[[Draw], Network], ...], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above are worth."""
    full = rounding.backward_single
    monkeypatch.setattr(rounding, "backward_single", lambda *given: share * full(*given))
    _windows_always(monkeypatch)
    wrong = sum(bool(_wrong(net, box, makes == (_dense,))) for net, box in _cases(*makes))
    assert wrong > (len(SEEDS) // 6 if share == 0 else 0)


Geometry = tuple[tuple[int, int], tuple[int, int], tuple[int, int, int, int], tuple[int, int]]
"""Kernel, stride and padding of a convolution, height and width of its input."""

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


def _convolution(draw: Draw, geometry: Geometry, channels: int = 3, out: int = 4) -> tuple[Network, Conv2d]:
    """A convolution of small integers."""
    kernel, stride, padding, size = geometry
    build = Builder((channels, *size))
    weight = draw.integers(out, channels, *kernel)
    net = build.network(build.conv2d(0, weight, None, "conv", padding=padding, stride=stride), name="conv")
    node = net.nodes[1]
    assert isinstance(node, Conv2d)
    return net, node


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("channels", (3, 17))
def test_the_adjoint_in_float32_is_the_adjoint(
    way: str, geometry: Geometry, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of small integers the two are the same, entry by entry."""
    _force(monkeypatch, way)
    draw = Draw(0)
    net, node = _convolution(draw, geometry, channels)
    a = draw.integers(5, *node.shape)
    found = node.adjoint(a.float(), net.input_shape)
    assert found.dtype == torch.float32 and torch.equal(found.double(), node.adjoint(a, net.input_shape))
    x = draw.integers(1, *net.input_shape)
    assert torch.equal((found * x).flatten(1).sum(1), (a * node.linear(x)).flatten(1).sum(1))


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_images_in_cells_meet_their_coefficients(way: str, geometry: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small integers again: a·(W·x) cell by cell, whole images or the windows of single outputs."""
    _force(monkeypatch, way)
    draw = Draw(2)
    net, node = _convolution(draw, geometry)
    a, x = draw.integers(5, *node.shape), draw.integers(1, *net.input_shape)
    right = (a * node.linear(x)).flatten(1).sum(1)
    size = node.shape[1:]
    cells, image = node.cells(a.float()), node.in_cells(x)
    assert cells.shape[1:] == image.shape[1:] == node.cells_shape(size)
    assert torch.equal((cells * image).flatten(1).sum(1), right)
    neuron = torch.arange(node.size)
    outputs = windows(node.shape, neuron, a[0].flatten())
    seen = replace(outputs.grid, size=node.cells_shape(outputs.grid.size)[1:]).table(image)
    found = (node.cells(outputs.values.float()) * seen[outputs.point]).flatten(1).sum(1)
    assert torch.equal(found, (a[0] * node.linear(x)[0]).flatten())


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("after", GEOMETRIES[:5], ids=str)
def test_windows_of_a_later_convolution_meet_their_cells(
    after: Geometry, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger ones, with strides of their own, partly or all beyond the edges: what |A| leaves of the radii."""
    build, draw = Builder((2, *geometry[3])), Draw(3)
    kernel, stride, padding, _ = geometry
    x = build.conv2d(0, draw.integers(3, 2, *kernel), None, "conv", padding=padding, stride=stride)
    _, height, width = build.shape(x)
    kernel, stride, (top, left, bottom, right), _ = after
    top, left = max(top, kernel[0] - height), max(left, kernel[1] - width)
    y = build.conv2d(x, draw.integers(2, 3, *kernel), None, "after", padding=(top, left, bottom, right), stride=stride)
    net = build.network(y, name="two")
    first, second = net.nodes[1:]
    assert isinstance(first, Conv2d) and isinstance(second, Conv2d)
    radius = draw.integers(3, *net.input_shape).abs()
    relaxation = Relaxation(net, Bounds(-radius, radius))
    assert relaxation.last_step(1)
    # What is added to radii is less than can be seen in sums of whole numbers.
    monkeypatch.setattr(rounding, "concretise", lambda radius, *given: radius)
    neuron = torch.arange(second.size)
    rows = torch.eye(second.size, dtype=torch.float64).reshape(-1, *second.shape)
    whole = first.adjoint(second.adjoint(rows, first.shape), net.input_shape).abs().flatten(1)
    monkeypatch.setattr(crown, "_FULL", 0)
    for sample in range(3):
        start = patches.kernels(second, neuron, torch.ones(second.size))
        added, before = relaxation.windowed(start, 1, torch.full((second.size,), sample)) or (None, None)
        assert added is not None and before is None
        torch.testing.assert_close(added.double(), -(whole @ radius[sample].flatten()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_an_entry_sums_no_more_terms_than_are_accounted_for(
    way: str, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ones are counted; and one infinite coefficient spoils no other row."""
    _force(monkeypatch, way)
    net, node = _convolution(Draw(0), geometry)
    node.weight.fill_(1)
    a = torch.ones(3, *node.shape)
    counted = node.adjoint(a, net.input_shape)
    assert counted.dtype == torch.float32 and 1 <= counted.amax() <= node.adjoint_terms
    a[1] = math.inf
    spoilt = node.adjoint(a, net.input_shape)
    assert torch.equal(spoilt[::2], counted[::2])
    assert not bool(spoilt[1][counted[1] > 0].isfinite().any())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("channels", (3, 9))
def test_a_product_is_rounded_no_more_often_than_is_accounted_for(
    way: str, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries are off by γ of their products, of as many roundings; and not by far less."""
    _force(monkeypatch, way)
    share = 0.0
    for seed, geometry in enumerate(GEOMETRIES):
        draw = Draw(seed)
        net, node = _convolution(draw, geometry, channels)
        node.weight.copy_(draw(*node.weight.shape).float())
        a = draw(200, *node.shape).float()
        off = (node.adjoint(a, net.input_shape) - node.adjoint(a.double(), net.input_shape)).abs()
        size = replace(node, weight=node.weight.abs()).adjoint(a.double().abs(), net.input_shape)
        allowed = size * rounding.gamma(node.adjoint_terms, torch.float32)
        assert bool((off <= allowed).all()), geometry
        share = max(share, float((off / allowed).nan_to_num().amax()))
    assert share > 0.1


@pytest.mark.parametrize(("least", "units"), ((0.0, 4), (-1.0, 7)), ids=("relu", "any"))
def test_nor_is_a_slope(least: float, units: int) -> None:
    """A step through an activation of slopes in [0, 1], or of any signs, is off by so many units of |A|."""
    generator, share = torch.Generator().manual_seed(0), 0.0
    near = torch.rand(4, 1 << 19, generator=generator, dtype=torch.float64)
    for width in (1, 1e-3):
        # Lines that differ by as much as they may, in the second round.
        (up, low), a = least + (1 - least) * width * near[:2], -1 - near[2:3].float()
        low, a = 1 + least - low, torch.where(near[3:] < 0.25, -a, a)
        none = torch.zeros_like(near[:1])
        before = crown._Step(low[None], (up - low)[None], none, none).single(4).back(a[None].clone(), True)[0]
        off = (before - torch.where(a < 0, up, low) * a).abs() / a.abs()
        share = max(share, float(off.amax()) / (units * rounding.unit_roundoff(torch.float32)))
    assert 0.4 < share <= 1


def test_nor_is_a_slope_less_where_no_map_comes_before() -> None:
    """An activation's input may be a sum with another one's output, or that itself."""
    checked = set()
    for seed in SEEDS:
        draw, build = Draw(seed), Builder((2, 4, 4))
        x = build.activation(build.conv2d(0, draw.weight(2, 2, 3, 3), draw(2), "in", padding=(1, 1, 1, 1)), Relu, "act")
        x = build.add(build.conv2d(x, draw.weight(2, 2, 1, 1), draw(2), "inner"), x, "sum")
        x = build.activation(x, Relu, "after a sum")
        x = build.activation(build.reshape(x, (4, 2, 4), "shaped"), Relu, "after a reshape")
        x = build.activation(x, Relu, "after an activation")
        flat = build.reshape(x, (32,), "flat")
        net = build.network(build.linear(flat, draw(2, 32), draw(2), "out"), name="bare")
        relaxation = relaxed(net, _box(draw, net))
        for index in range(relaxation.border + 1):
            if isinstance(net.nodes[index], Relu):
                source = net.nodes[index].inputs[0]
                radius, unit = relaxation.reference.radius(source).flatten(1), relaxation.reference.unit(source)
                assert bool((unit >= 4 * rounding.unit_roundoff(torch.float32) * radius).all()), (seed, index)
                checked.add(net.nodes[source].op)
    assert checked == {"Conv2d", "Add", "Reshape", "Relu"}


def test_slopes_of_any_sign_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what is granted for those of a ReLU, after the same map, and in the lines of float32 alone."""
    lines, slope = {}, torch.tensor(-1.0).double()
    for most in (7, 4):
        if most == 4:
            monkeypatch.setattr(rounding, "_ANY_SLOPES", most)
        draw, build = Draw(0), Builder((2, 4, 4))
        x = build.conv2d(0, draw.weight(2, 2, 3, 3), draw(2), "in")
        x = build.reshape(build.activation(x, LeakyRelu, "act", slope=slope), (8,), "flat")
        x = build.activation(build.linear(x, draw(3, 8), draw(3), "more"), LeakyRelu, "last", slope=slope)
        net = build.network(build.linear(x, draw(2, 3), draw(2), "out"), name="signs")
        one = torch.ones(1, 2, 4, 4).double()
        relaxation = relaxed(net, Bounds(-one, one))
        first, last = (i for i, node in enumerate(net.nodes) if isinstance(node, LeakyRelu))
        assert first <= relaxation.border < last
        lines[most] = [relaxation.step(first, True), relaxation.step(last, True)]
        radius, shared = relaxation.reference.radius(1).flatten(1), relaxation.lines(first)
    (mine, last), (more, same) = lines[4], lines[7]
    assert mine.floor is not None and more.floor is not None
    steepest = torch.maximum(shared.lower_slope.abs(), shared.upper_slope.abs()).flatten(1)
    needed = 3 * rounding.unit_roundoff(torch.float32) * steepest * radius
    assert bool((mine.floor - more.floor >= needed).all()) and bool((more.lift - mine.lift >= 2 * needed).all())
    assert torch.equal(last.lift, same.lift)


@pytest.mark.parametrize("size", (1, 96, 97, 1009, 4096, 10007))
@pytest.mark.parametrize("kind", ("rows", "windows"))
def test_what_rounding_takes_away_is_not_lost_in_its_own_sum(kind: str, size: int) -> None:
    draw, build, rows = Draw(size), Builder((1, 1, size)), 64
    net = build.network(build.conv2d(0, draw.weight(1, 1, 1, 1), None, "one"), name="wide")
    one = torch.ones(1, 1, 1, size).double()
    relaxation = Relaxation(net, Bounds(-one, one))
    assert relaxation.border == 1
    a = torch.randn(rows, 1, 1, size, generator=draw.generator)
    values = torch.rand(1, size, generator=draw.generator, dtype=torch.float64)
    walk = crown._Walk(relaxation, None, (1, rows))
    if kind == "windows":
        grid = patches.Grid((1, 1), (1, size), (1, 1), (0, 0))
        found = walk._weighed(Window(a, torch.zeros(rows, dtype=torch.long), grid), 1, "unit", values)
    else:
        found = walk._weighed(a.reshape(1, rows, size), 1, "unit", values)
    exact = a.flatten(1).double().abs() @ values[0]
    few = crown._sum(a.flatten(1).abs() * values.float(), 1)
    assert bool((found[0].double() >= exact).all()) and bool((few.double() < exact).any())
    assert bool((found[0].double() <= exact * (1 + 2e-5 * (1 + size / 96))).all())


@pytest.mark.parametrize("batch", (1, 3))
def test_rows_that_are_no_float32_numbers_pay_for_becoming_such(batch: int) -> None:
    """Where they begin: bounds fall by what is gone of them."""
    draw, build = Draw(batch), Builder((6,))
    x = build.activation(build.linear(0, draw.weight(20, 6), draw(20), "in"), Relu, "act")
    x = build.linear(x, draw.weight(9, 20), draw(9), "more")
    net = build.network(build.linear(x, draw.weight(2, 9), draw(2), "out"), name="dense")
    box = _box(draw, net)
    center = box.lower[:batch]
    relaxation = relaxed(net, Bounds(center - 1, center + 1), single=True)
    assert relaxation.border > x
    gone = 0.49 * torch.finfo(torch.float32).eps
    rows = torch.eye(9).double().repeat(batch, 1)
    plain, changed = (relaxation.lower(x, rows * (1 + share))[0].unflatten(0, (batch, 9)) for share in (0.0, gone))
    # The same coefficients, but for their values at the point.
    point, radius = (of(x).flatten(1) for of in (relaxation.reference.point, relaxation.reference.radius))
    moved = gone * point - (changed - plain)
    assert bool((moved >= gone * radius - 1e-12 * (radius + point.abs())).all()) and bool((radius > 0).all())


@pytest.mark.parametrize("share", (0.0, 1e-6, 1.0))
@pytest.mark.parametrize("batch", (1, 5))
def test_what_float32_changes_in_rows_of_the_first_linear_map(
    batch: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as |W|·|x − x̂| has it, of as many products as neurons are alive after it; intervals know the former."""
    monkeypatch.setattr(interval, "_LARGE", 1)
    draw, build = Draw(batch), Builder((300,))
    weight = draw.weight(40, 300)
    x = build.activation(build.linear(0, weight, draw(40) * weight.abs().sum(1), "in"), Relu, "act")
    net = build.network(build.linear(x, draw.weight(3, 40), draw(3), "out"), name="wide")
    center = torch.randn(batch, 300, generator=draw.generator, dtype=torch.float64)
    radius = share * torch.rand(batch, 300, generator=draw.generator, dtype=torch.float64)
    relaxation = relaxed(net, Bounds(center - radius, center + radius))
    assert relaxation.border == relaxation.entry == 0
    mine, node = relaxation.reference, net.nodes[1]
    assert isinstance(node, Linear)
    apart = rounding.backward_affine(node, mine.reach(0), mine.sums)
    living = relaxation.living(2).sum(1, keepdim=True)
    for after, terms in ((2, living), (None, 40)):
        needed = node.absolute(mine.radius(0)) * rounding.gamma(1, torch.float32) * (terms + 4)
        found = mine.unit(1, after) - apart
        assert bool((found >= needed).all()) and bool((found <= 1.02 * needed + 1e-2 * apart).all())


@pytest.mark.parametrize("kind", ("convolution", "linear"))
@pytest.mark.parametrize("batch", (1, 5))
def test_what_float32_changes_in_rows_of_a_later_map(batch: int, kind: str) -> None:
    """|W|·|x − x̂| is what intervals had made of it, before rows made the bounds of two activations after it tighter."""
    draw, build = Draw(batch), Builder((2, 6, 6))
    x = build.activation(build.conv2d(0, draw.weight(4, 2, 3, 3), draw(4), "first"), Relu, "act")
    if kind == "convolution":
        y = build.conv2d(x, draw.weight(3, 4, 2, 2), draw(3), "second")
    else:
        y = build.linear(build.reshape(x, (64,), "flat"), draw.weight(9, 64), draw(9), "second")
    both = build.add(build.activation(y, Relu, "one"), build.activation(y, Relu, "other"), "both")
    net = build.network(both, name="two")
    center = torch.randn(batch, 2, 6, 6, generator=draw.generator, dtype=torch.float64)
    radius = 0.3 * torch.rand(batch, 2, 6, 6, generator=draw.generator, dtype=torch.float64)
    relaxation = relaxed(net, Bounds(center - radius, center + radius), single=True)
    assert relaxation.border >= x
    mine, node = relaxation.reference, net.nodes[y]
    assert isinstance(node, Conv2d | Linear)
    source = node.inputs[0]
    tightened, before = relaxation.bounds(y), relaxation.interval(y)
    assert bool((tightened.upper < before.upper - 1e-3 * (before.upper - before.lower)).any())
    fresh = Relaxation(net, Bounds(center - radius, center + radius), relaxation.pre)
    assert bool((fresh.bounds(y).upper <= before.upper).all())
    apart = rounding.backward_affine(node, mine.reach(source), mine.sums).expand(batch, *node.shape).flatten(1)
    terms = node.size if isinstance(node, Linear) else node.adjoint_terms
    reach = node.absolute(mine.radius(source)).flatten(1)
    needed = reach * rounding.gamma(1, torch.float32) * (terms + 4)
    found = mine.unit(y) - apart
    assert bool((found >= needed).all()) and bool((found <= 1.02 * needed + 1e-2 * apart).all())


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_windows_are_pulled_back_as_whole_images_are(
    way: str, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two convolutions, the windows of every neuron: those at the edges lie partly in the padding."""
    _force(monkeypatch, way)
    draw = Draw(1)
    net, node = _convolution(draw, geometry)
    _, after = _convolution(draw, ((3, 3), (1, 1), (1, 1, 1, 1), (node.shape[1], node.shape[2])), channels=4)
    neuron = torch.arange(after.size)
    image = windows(after.shape, neuron, 1 - 2.0 * (neuron % 2).double())
    middle = image.before(after)
    inside = middle.dense(node.shape)
    clean = middle.of(torch.ones(1, *node.shape, dtype=torch.float64))
    middle = Window(middle.values * clean, middle.point, middle.grid, clean=True)
    plain, found = middle.before(node), middle.float().before(node)
    assert found.grid == plain.grid and found.values.dtype == torch.float32 != plain.values.dtype
    for pulled in (plain, found):
        assert torch.equal(pulled.dense(net.input_shape).double(), node.adjoint(inside, net.input_shape))


def _lower(net: Network, box: Bounds, rows: Tensor) -> Tensor:
    return relaxed(net, box).lower(len(net.nodes) - 1, rows, torch.tensor([0]))[0]


def test_the_cost_goes_with_the_radius_not_with_the_magnitude(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, build = Draw(0), Builder((3, 6, 6))
    x = build.activation(build.conv2d(0, draw.weight(8, 3, 3, 3), draw(8), "conv1"), Relu, "act")
    x = build.conv2d(x, draw.weight(4, 8, 2, 2), draw(4), "conv2", stride=(2, 2))
    net = build.network(build.linear(build.reshape(x, (16,), "flat"), draw(3, 16), None, "out"), name="far")
    rows = torch.cat([torch.eye(3), -torch.eye(3)]).double()
    for magnitude, radius in ((1.0, 1e-3), (1e6, 1.0), (1e6, 1e-3)):
        center = magnitude + draw.integers(1, 3, 6, 6) / 8
        box = Bounds(center - radius, center + radius)
        found = _lower(net, box, rows)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_SINGLE", 0)
            assert _border(net, box) == -1
            plain = _lower(net, box, rows)
        assert _border(net, box) > 0
        width = -(plain[:3] + plain[3:]).repeat(2)
        assert bool((width > 0).all() and (found < plain).all() and (plain - found < 1e-3 * width).all())


def _layers(images: bool) -> Network:
    """Weights as they are before training, of a dense network of six hidden layers or of a small convolutional one."""
    torch.manual_seed(0)
    convolutions = [torch.nn.Conv2d(3, 8, 4, 2, 1), torch.nn.Conv2d(8, 16, 4, 2, 1), torch.nn.Flatten()]
    sizes = (64, 50, 10) if images else (20, 50, 50, 50, 50, 50, 50, 10)
    dense = [torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    layers: list[torch.nn.Module] = []
    for layer in [*(convolutions if images else []), *dense]:
        layers += [layer] if isinstance(layer, torch.nn.Flatten) else [layer, torch.nn.ReLU()]
    return from_torch(torch.nn.Sequential(*layers[:-1]).requires_grad_(False), (3, 8, 8) if images else (20,))


@pytest.mark.parametrize("images", (True, False), ids=("convolutions", "dense"))
@pytest.mark.parametrize("eps", (0.1, 0.3))
def test_every_node_in_float32_costs_a_small_part_of_the_width(images: bool, eps: float) -> None:
    """Of neurons' bounds and of the outputs', against float64 throughout."""
    with torch.no_grad():
        net = _layers(images).to(torch.float64)
        center = torch.rand(3, *net.input_shape, generator=Draw(0).generator, dtype=torch.float64)
        box = Bounds(center - eps, center + eps)
        rows, sample = torch.cat([torch.eye(10), -torch.eye(10)]).double().repeat(3, 1), torch.arange(3)
        single = relaxed(net, box, single=True)
        assert single.border == len(net.nodes) - 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "_SINGLE", 0)
            plain = relaxed(net, box)
            assert plain.border == -1
        for index, right in plain.pre.items():
            found, width = single.pre[index], right.upper - right.lower
            assert bool((right.lower - found.lower <= 1e-3 * width).all())
            assert bool((found.upper - right.upper <= 1e-3 * width).all())
        last = len(net.nodes) - 1
        least, most = (of.lower(last, rows, sample)[0].reshape(3, 2, 10) for of in (single, plain))
        assert bool((most - least <= -1e-3 * most.sum(1, keepdim=True)).all()) and not torch.equal(least, most)


def test_a_slope_that_float32_takes_for_zero() -> None:
    """What is lost of it goes with the width of its input, and with coefficients however large."""
    for reach in (1.0, 1e9, 1e20):
        build, one = Builder((1,)), torch.ones(1, 1).double()
        x = build.activation(build.linear(0, one, None, "in"), LeakyRelu, "act", slope=6e-46 * one[0])
        net = build.network(build.linear(x, _rounded(1e20 * one), None, "out"), name="slope")
        box = Bounds(-3 * reach * one, -reach * one)
        found = relaxed(net, box, single=True).lower(3, one, torch.tensor([0]))[0]
        assert _border(net, box, True) == 3 and bool(found.isfinite())
        assert not _excluded(found, _exact(net, 3, box.lower))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("large", (1e25, 1e30))
def test_coefficients_that_overflow_prove_nothing(way: str, large: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of three weights, fine in float64: the coefficients, or sums of them, are none in float32."""
    _force(monkeypatch, way)
    for middle, signs in itertools.product((-1.0, 0.0, 1.0), itertools.product((1, -1), repeat=2)):
        build = Builder((2, 2, 2))
        weight = torch.tensor([[1.0, -0.75], [0.5, 1.5]]).double() * large
        x = build.conv2d(0, signs[0] * weight.float().double().reshape(2, 2, 1, 1), None, "conv1")
        x = build.conv2d(x, signs[1] * weight.float().double()[:, :, None, None].expand(2, 2, 2, 2), None, "conv2")
        net = build.network(build.linear(build.reshape(x, (2,), "flat"), weight, None, "out"), name="large")
        box = Bounds(torch.full((1, 2, 2, 2), middle - 0.5).double(), torch.full((1, 2, 2, 2), middle + 0.5).double())
        rows = torch.cat([torch.eye(2), -torch.eye(2)]).double()
        found = _lower(net, box, rows)
        assert _border(net, box) > 0 and not bool(found.isposinf().any())
        for corner in (box.lower, box.upper):
            y = _exact(net, len(net.nodes) - 1, corner)
            assert not _excluded(found, [*y, *(-v for v in y)])


def test_coefficients_and_products_that_underflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two factors of float32 whose product is none; a coefficient below float32's range: inputs at the end of it."""

    def wrong() -> list[int]:
        found = []
        for outer, inner in ((1e-20, 1e-27), (1e-50, 1e3)):
            build = Builder((1, 1, 1))
            weight = torch.tensor([inner]).double().float().double().reshape(1, 1, 1, 1)
            x = build.reshape(build.conv2d(0, weight, None, "conv"), (1,), "flat")
            net = build.network(
                build.linear(x, torch.tensor([[outer]], dtype=torch.float64), None, "out"), name="small"
            )
            end = torch.full((1, 1, 1, 1), 1e38, dtype=torch.float64)
            bound = _lower(net, Bounds(-end, end), torch.ones(1, 1).double())
            assert bool(bound.isfinite())
            found.append(_excluded(bound, _exact(net, 3, -end)))
        return found

    assert wrong() == [0, 0]
    full = rounding.lost
    monkeypatch.setattr(rounding, "lost", lambda *given: 0 * full(*given))
    assert wrong() == [1, 1], "what underflow loses must show"


def test_inputs_beyond_float32_prove_nothing() -> None:
    """Their radius is infinite there: about them nothing is known, be coefficients zero or not."""
    build = Builder((1, 1, 2))
    x = build.conv2d(0, torch.tensor([[2.0, 0], [0, 0]]).double().reshape(2, 1, 1, 2), None, "conv")
    net = build.network(build.reshape(x, (2,), "flat"), name="far")
    end = torch.full((1, 1, 1, 2), 1e40, dtype=torch.float64)
    found = _lower(net, Bounds(-end, end), torch.eye(2).double())
    assert _border(net, Bounds(-end, end)) > 0 and not bool((found > torch.tensor([-2e40, 0])).any())


def _disappearing(channels: int) -> Tensor:
    """(1, channels, 64, 64) coefficients, the same in every channel, of which all but the first are lost beside it,
    in the first line that is summed, and all but that line's sum."""
    small, length = 0.99 * rounding.unit_roundoff(torch.float32), graph.folded(64 * 64)[1]
    a = torch.full((64 * 64,), small / length, dtype=torch.float64)
    a[:length] = small
    a[0] = 1
    return a.float().double().reshape(64, 64).expand(1, channels, 64, 64)


def _image(channels: int, relu: bool) -> Network:
    """Every pixel, with alternating sign in each channel."""
    build = Builder((1, 64, 64))
    signs = torch.tensor([(-1.0) ** i for i in range(channels)], dtype=torch.float64)
    x = build.conv2d(0, signs.reshape(-1, 1, 1, 1), None, "conv")
    return build.network(build.activation(x, Relu, "act") if relu else x, name="image")


@pytest.mark.parametrize("place", ("concretise", "summed_single"))
def test_sums_in_float32_may_be_taken_in_any_order(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, the first ones large and the others lost beside them: the radii of the input, and how far
    lower lines lie below the points where that is all that there is, in relu(x) + relu(−x) = |x|."""

    def summed(products: Tensor, axes: int) -> Tensor:
        products = products.flatten(-axes)
        return in_order(in_order(products.unflatten(-1, graph.folded(products.shape[-1]))))

    monkeypatch.setattr(crown, "_sum", summed)
    relu = place == "summed_single"
    net, a = _image(1 + relu, relu), (1 if relu else -1) * _disappearing(1 + relu)
    box = Bounds(-torch.ones(1, 1, 64, 64).double(), torch.ones(1, 1, 64, 64).double())
    last = len(net.nodes) - 1
    value = Fraction(0) if relu else sum((Fraction(c) for c in a[0, 0].flatten().tolist()), Fraction(0))

    def wrong() -> int:
        return _excluded(relaxed(net, box).lower(last, a, torch.tensor([0]))[0], [value])

    assert _border(net, box) == last and not wrong()
    monkeypatch.setattr(rounding, place, lambda *given: given[:2] if relu else given[0])
    assert wrong()


@pytest.mark.parametrize("above", (True, False), ids=("upper", "lower"))
def test_offsets_summed_in_float32_are_on_the_safe_side(above: bool) -> None:
    """A⁻·top, and A·floor, where all but the first products are lost in every sum."""
    a = -_disappearing(1).flatten().float()
    ones, zeros = torch.ones(len(a), dtype=torch.float64), torch.zeros(len(a), dtype=torch.float64)
    top, floor = (ones, zeros) if above else (zeros, ones)
    value = sum((Fraction(c) for c in a.tolist()), Fraction(0))

    def excess(top: Tensor, floor: Tensor) -> Fraction:
        products = a * top.float() + a * floor.float()
        return Fraction(float(in_order(in_order(products.unflatten(0, graph.folded(len(a))))))) - value

    assert excess(top, floor) > 0
    outward = rounding.summed_single(top, floor, crown._depth(len(a)))
    assert -1e-2 < excess(*outward) <= 0


@pytest.mark.parametrize("first", (1.0, -1.0))
def test_many_rows_added_in_float32(first: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the first, each too small to be seen in the sum; little is left of it where the last is opposed."""
    build, uses = Builder((1, 1, 1)), 100
    weight = torch.full((uses, 1, 1, 1, 1), 0.99 * rounding.unit_roundoff(torch.float32), dtype=torch.float64)
    # Rows come in the opposite order.
    weight[0], weight[-1] = first, 1
    parts = [build.conv2d(0, w, None, f"part{i}") for i, w in enumerate(weight.float().double())]
    x = parts[0]
    for i, part in enumerate(parts[1:]):
        x = build.add(x, part, f"sum{i}")
    net = build.network(x, name="shared")
    one = torch.ones(1, 1, 1, 1).double()

    def wrong() -> int:
        found = relaxed(net, Bounds(-one, one)).lower(x, one, torch.tensor([0]))[0]
        return _excluded(found, _exact(net, x, -one))

    assert _border(net, Bounds(-one, one)) == x and not wrong()
    full = rounding.accumulate
    monkeypatch.setattr(rounding, "accumulate", lambda *given: 0 * full(*given))
    assert wrong()


def _rounded(weight: Tensor) -> Tensor:
    return weight.float().double()


@pytest.mark.parametrize(
    ("why", "weight", "options"),
    [
        ("grouped", _rounded, {"groups": 2}),
        ("dilated", _rounded, {"dilation": (2, 1)}),
        ("no float32 numbers", lambda weight: weight, {}),
        ("too large for float32", lambda weight: _rounded(weight) * 2.0**140, {}),
        ("trained", lambda weight: _rounded(weight).requires_grad_(), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_convolutions_stay_in_float64(
    why: str, weight: Callable[[Tensor], Tensor], options: dict[str, Any]
) -> None:
    draw = Draw(0)
    build = Builder((2, 4, 4))
    plain = build.conv2d(0, draw.weight(2, 2, 2, 2), None, "plain", padding=(1, 1, 0, 0))
    other = torch.randn(2, 2 // options.get("groups", 1), 2, 2, generator=draw.generator).double() / 3
    x = build.conv2d(plain, weight(other), None, "other", **options)
    net = build.network(x, name="mixed")
    box = Bounds(torch.zeros(1, 2, 4, 4).double(), torch.ones(1, 2, 4, 4).double())
    assert _border(net, box) == plain


def test_other_bounds_do_too() -> None:
    net, _ = _convolution(Draw(0), GEOMETRIES[0])
    one = torch.ones(1, *net.input_shape)
    assert _border(net, Bounds(one.double(), one.double())) == 1
    assert _border(net.to(torch.float32), Bounds(one, one)) == -1


def test_so_do_all_where_float32_is_told_to_be_less(monkeypatch: pytest.MonkeyPatch) -> None:
    net, _ = _convolution(Draw(0), GEOMETRIES[0])
    one = torch.ones(1, *net.input_shape).double()
    box = Bounds(one, one)
    assert _border(net, box) == 1
    backend: Any = torch.backends.mkldnn
    library = backend.matmul
    before = library.fp32_precision
    try:
        library.fp32_precision = "bf16"
        assert _border(net, box) == -1
    finally:
        library.fp32_precision = before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _border(net, box) == -1
    with monkeypatch.context() as patch:
        patch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
        assert _border(net, box) == -1


def test_radii_of_a_batch_are_rounded_outward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals of several boxes at once, whose upper ends are attained where no weight is negative."""

    def wrong() -> int:
        found = 0
        for seed in range(8):
            draw, build = Draw(seed), Builder((3, 3, 3))
            x = build.conv2d(0, draw.weight(2, 3, 3, 3).abs(), None, "conv", padding=(1, 1, 1, 1))
            net = build.network(x, name="positive")
            reach = torch.rand(4, 3, 3, 3, generator=draw.generator, dtype=torch.float64)
            box = Bounds(-reach, reach)
            bounds = interval_bounds(net, box)[-1]
            found += _excluded(-bounds.upper[0].flatten(), [-v for v in _exact(net, 1, reach[0])])
        return found

    assert not wrong()
    gamma = rounding.gamma
    monkeypatch.setattr(rounding, "gamma", lambda n, dtype: 0.0 if dtype == torch.float32 else gamma(n, dtype))
    assert wrong(), "without float32's part some end lies inside"


SIZES = (5, 96, 101, 509, 784, 1000)
"""Numbers of inputs whose products are summed in one line, one of a prime number of them, or in several."""


def _linear(weight: Tensor) -> Network:
    build = Builder((weight.shape[1],))
    return build.network(build.linear(0, weight, None, "linear"), name="linear")


def _line_by_line(a: Tensor, b: Tensor) -> Tensor:
    """``torch.bmm``, with products summed one after the other."""
    return in_order(a[:, :, None] * b.mT[:, None])


def _positive(size: int, short: bool = False) -> Tensor:
    """Weights in float32: of every line all but the first are lost beside it; the others are any, or all the same."""
    small = torch.full((size,), 0.99 * rounding.unit_roundoff(torch.float32), dtype=torch.float64)
    small[:: graph.folded(size, short)[1]] = 1
    draw = Draw(size)
    return torch.stack([small, draw.weight(size).abs(), torch.full((size,), 1 / 3).double()]).float().double()


def _outside(net: Network, reach: Tensor) -> int:
    """How many ends of intervals about zero, attained where no weight is negative, are excluded."""
    bounds, found = interval_bounds(net, Bounds(-reach, reach))[-1], 0
    for lower, upper, end in zip(bounds.lower, bounds.upper, reach, strict=True):
        y = [-v for v in _exact(net, 1, end)]
        found += _excluded(-upper, y) + sum(a > v for a, v in zip(lower.tolist(), y, strict=True) if not math.isnan(a))
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("in_turn", (False, True))
def test_radii_of_a_linear_map_are_too(size: int, in_turn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that float32 rounds down as far as can be, and any; summed as they are, or one after the other."""
    monkeypatch.setattr(interval, "_LARGE", 1)
    if in_turn:
        monkeypatch.setattr(torch, "bmm", _line_by_line)
    net = _linear(_positive(size))
    node = net.nodes[1]
    assert isinstance(node, Linear)
    reach = torch.rand(5, size, generator=Draw(1).generator, dtype=torch.float64)
    reach[0], reach[1] = 1, 1 + 0.99 * rounding.unit_roundoff(torch.float32)
    reach[2] *= 2.0 ** torch.arange(size).remainder(40)
    terms = interval._single_terms(node, reach)
    assert 0 < terms == node.single_terms[1] <= interval._SINGLE
    found = node.absolute(reach, single=True)
    allowed = rounding.gamma(terms + 1, torch.float32)
    for got, end in zip(found.tolist(), reach, strict=True):
        for value, right in zip(got, _exact(net, 1, end), strict=True):
            assert abs(Fraction(value) - right) <= Fraction(allowed) * right
    assert not _outside(net, reach)
    gamma = rounding.gamma
    monkeypatch.setattr(rounding, "gamma", lambda n, dtype: 0.0 if dtype == torch.float32 else gamma(n, dtype))
    assert _outside(net, reach), "without float32's part some end lies inside"
    if in_turn and size > 5:
        # Lines lose what they can, their sums do not.
        monkeypatch.setattr(
            rounding, "gamma", lambda n, dtype: gamma(n, dtype) * (0.85 if dtype == torch.float32 else 1)
        )
        assert _outside(net, reach), "no more is granted than is needed"


@pytest.mark.parametrize("flushing", (False, True))
def test_radii_at_the_ends_of_float32(flushing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some that float32 takes for zero, or whose products it does; some that are infinite there, or whose sums are."""
    monkeypatch.setattr(interval, "_LARGE", 1)
    tiny = rounding._tiny(torch.float32)
    small = [(1e-42, 1.0), (1e-30, 1e-20), (1e-46, 1e38), (0.9 * tiny, 3e38), (1.1 * tiny, 0.5), (1e-300, 1e30)]
    large = [(1e39, 1.0), (1e39, 0.0), (3e38, 2.0), (3e38, 1.0), (1e20, 1e20), (1e300, 1e10)]

    def wrong(cases: list[tuple[float, float]]) -> list[int]:
        found = []
        for radius, weight in cases:
            net = _linear(torch.full((1, 7), weight, dtype=torch.float64).float().double())
            reach = torch.full((4, 7), radius, dtype=torch.float64)
            node = net.nodes[1]
            assert isinstance(node, Linear) and interval._single_terms(node, reach) == 7
            found.append(_outside(net, reach))
        return found

    # Where it is not supported, nothing is flushed.
    torch.set_flush_denormal(flushing)
    try:
        assert wrong(small) == [0] * len(small) and wrong(large) == [0] * len(large)
        plain = rounding.interval_affine
        monkeypatch.setattr(rounding, "interval_affine", lambda *given: (plain(*given)[0], plain(*given[:2])[1]))
        assert any(wrong(small)), "what underflow loses must show"
    finally:
        torch.set_flush_denormal(False)


def test_radii_of_others_stay_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interval, "_LARGE", 7 * 3 * 3)
    radius, weight = torch.ones(4, 7).double(), _rounded(torch.rand(3, 7).double())

    def terms(weight: Tensor, radius: Tensor = radius) -> int:
        node = _linear(weight).nodes[1]
        assert isinstance(node, Linear)
        return interval._single_terms(node, radius)

    assert terms(weight) == 7
    assert not terms(weight, radius[:3]), "few samples"
    assert not terms(weight[:2]), "few products"
    assert not terms(weight / 3), "no float32 numbers"
    assert not terms(weight * 2.0**140), "too large for float32"
    assert not terms(_rounded(weight * 2.0**-140)), "not normal in float32"
    assert not terms(weight.clone().requires_grad_()), "trained"
    assert not terms(weight.float(), radius.float()), "all in float32"
    assert not terms(torch.ones(3, 521).double(), torch.ones(4, 521).double()), "one long line"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not terms(weight)
    library: Any = torch.backends.mkldnn
    before = library.matmul.fp32_precision
    try:
        library.matmul.fp32_precision = "bf16"
        assert not terms(weight)
    finally:
        library.matmul.fp32_precision = before
    monkeypatch.setattr(graph, "_SMALL", 1)
    assert not terms(torch.eye(70).double(), torch.ones(4, 70).double()), "sparse"


def _ends_outside(net: Network, box: Bounds) -> tuple[int, int]:
    """How many ends, lower and upper, of the intervals of an affine map are excluded, each where it is attained."""
    bounds, (node,) = interval_bounds(net, box)[-1].flat(), net.nodes[1:]
    assert isinstance(node, Linear | Conv2d)
    weight, box = node.weight.flatten(1), box.flat()
    ends = _whole(torch.cat([weight.clamp(min=0), weight.clamp(max=0)], 1), node.bias, False)
    below = above = 0
    for low, high, lower, upper in zip(box.lower, box.upper, bounds.lower, bounds.upper, strict=True):
        below += _excluded(lower, _exact(ends, 1, torch.cat([low, high])))
        above += _excluded(-upper, [-v for v in _exact(ends, 1, torch.cat([high, low]))])
    return below, above


def _whole(weight: Tensor, bias: Tensor, convolution: bool) -> Network:
    """An affine map: linear, or a convolution that sees one pixel of many channels."""
    build = Builder((weight.shape[1], *([1, 1] if convolution else [])))
    if convolution:
        return build.network(build.conv2d(0, weight[:, :, None, None], bias, "conv"), name="conv")
    return build.network(build.linear(0, weight, bias, "linear"), name="linear")


def _around(net: Network, center: Tensor, radius: Tensor) -> Bounds:
    return Bounds(*(t.reshape(-1, *net.input_shape) for t in (center - radius, center + radius)))


def _in_single(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Of what centres products are taken in float32."""
    found: list[Tensor] = []

    def spied(full: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def linear(self: Linear | Conv2d, x: Tensor, single: bool = False) -> Tensor:
            found.extend([x] * single)
            return full(self, x, single)

        return linear

    for kind in (Linear, Conv2d):
        monkeypatch.setattr(kind, "linear", spied(kind.linear))
    return found


def _center_case(size: int, convolution: bool) -> tuple[Network, Bounds]:
    """Centres as far from zero as their share allows, whose sums in float32 lose what can be lost; weights of both
    signs, of either, or any."""
    positive, draw = _positive(size, short=True), Draw(size)
    if convolution:
        # Direct convolutions sum in lines of their own.
        positive[0], positive[0, 0] = positive[0, -1], 1
    weight = torch.cat([positive, -positive, draw.weight(2, size)])
    net = _whole(weight, draw(len(weight)) / 3, convolution)
    node = net.nodes[1]
    assert isinstance(node, Linear | Conv2d)
    far = interval._SHARE / rounding.share_single(node.single_terms[0])
    # A power of two: radii, too, lose what can be lost.
    far = 2.0 ** math.floor(math.log2(far))
    center = torch.rand(5, size, generator=draw.generator, dtype=torch.float64)
    # Just above what float32 rounds down, and down again in every product.
    center[0], center[1] = 1, 1 + 0.99 * rounding.unit_roundoff(torch.float32)
    center[2] *= 2.0 ** torch.arange(size).remainder(40)
    return net, _around(net, center, center / far)


@pytest.mark.parametrize(
    ("how", "size"),
    [*itertools.product(("as they are", "in turn"), SIZES), *(("convolution", size) for size in (5, 96, 509))],
)
def test_centers_of_a_batch_are_rounded_outward(how: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed as they are, one after the other, or in a convolution; biases count."""
    monkeypatch.setattr(interval, "_LARGE", 1)
    if how == "in turn":
        monkeypatch.setattr(torch, "bmm", _line_by_line)
    seen = _in_single(monkeypatch)
    net, box = _center_case(size, how == "convolution")
    assert _ends_outside(net, box) == (0, 0) and len(seen) == 1
    monkeypatch.setattr(rounding, "interval_single", lambda size, radius, terms: radius.clone())
    below, above = _ends_outside(net, box)
    assert len(seen) == 2 and below and above, "without the centres' part some end lies inside"
    if how == "in turn" and size > 5:
        monkeypatch.undo()
        monkeypatch.setattr(interval, "_LARGE", 1)
        monkeypatch.setattr(torch, "bmm", _line_by_line)
        full = rounding.gamma
        # Lines lose what they can, their sums do not.
        monkeypatch.setattr(
            rounding, "gamma", lambda n, dtype: full(n, dtype) * (0.75 if dtype == torch.float32 else 1)
        )
        assert all(_ends_outside(net, box)), "no more is granted than is needed"


@pytest.mark.parametrize("size", (1, 2, 97, 5000))
def test_sums_tell_how_large_inputs_may_be(size: int) -> None:
    """However they were rounded: the largest last, lost but for a half beside it what came before."""
    up = 1 + 0.99 * rounding.unit_roundoff(torch.float32)
    center = torch.full((3, size), up * 2.0**-24, dtype=torch.float64)
    center[:, -1] = -up
    radius = center.abs() * torch.tensor([[0.0], [1.0], [1e-6]])
    sums = (in_order(t.abs().float()) for t in (center, radius))
    found = rounding.reach_single(*sums, size)
    assert found.dtype == torch.float64
    assert bool((found >= (center.abs() + radius).amax(1)).all())
    assert bool((found <= 1.01 * (center.abs() + radius).sum(1)).all())


@pytest.mark.parametrize("flushing", (False, True))
@pytest.mark.parametrize("convolution", (False, True))
def test_centers_at_the_ends_of_float32(convolution: bool, flushing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some that float32 takes for zero, or whose products it does; some that it does not hold, or whose sums."""
    monkeypatch.setattr(interval, "_LARGE", 1)
    tiny, huge = rounding._tiny(torch.float32), interval._HUGE
    small = [(1e-42, 1.0), (1e-30, 1e-20), (1e-46, 1e38), (0.9 * tiny, 3e38), (16 * tiny, 0.05), (1e-300, 1e30)]
    large = [(4e38, 1e-10), (4e38, 0.0), (3e38, 2.0), (3e38, 1.0), (1e20, 1e20), (1e300, 1e10), (4e38, 1e-37)]
    seen = _in_single(monkeypatch)

    def wrong(cases: list[tuple[float, float]]) -> list[int]:
        found = []
        for (center, weight), sign in itertools.product(cases, (1, -1)):
            weights = torch.full((2, 7), weight, dtype=torch.float64).float().double()
            net = _whole(weights * torch.tensor([[1.0], [-1.0]]), torch.zeros(2).double(), convolution)
            middle = torch.full((4, 7), sign * center, dtype=torch.float64)
            found.append(sum(_ends_outside(net, _around(net, middle, middle.abs() / 8))))
        return found

    # Where it is not supported, nothing is flushed.
    torch.set_flush_denormal(flushing)
    try:
        assert not any(wrong(large)) and not seen
        allowed = [(huge / 8, 1e-10), (1.0, huge / 60)]
        assert not any(wrong(small + allowed)) and len(seen) == 2 * len(small + allowed)
        monkeypatch.setattr(interval, "_bearable", lambda *given: True)
        with monkeypatch.context() as patched:
            # Which would be infinite.
            patched.setattr(rounding, "reach_single", lambda size, *given: torch.ones_like(size).double())
            assert any(wrong(large)), "sums that overflow must show"
        plain = rounding.interval_affine
        monkeypatch.setattr(rounding, "interval_affine", lambda *given: (plain(*given)[0], plain(*given[:2])[1]))
        assert any(wrong(small)), "what underflow loses must show"
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("convolution", (False, True))
def test_centers_of_others_stay_in_float64(convolution: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one sample alone would lose too much, or might overflow; and points."""
    monkeypatch.setattr(interval, "_LARGE", 1)
    seen = _in_single(monkeypatch)
    net = _whole(torch.full((2, 6), 3.0).double(), torch.tensor([1.0, -1.0]).double(), convolution)
    ones = torch.ones(4, 6).double()
    share = rounding.share_single(6) / interval._SHARE

    def single(center: Tensor, radius: Tensor, net: Network = net) -> bool:
        seen.clear()
        assert _ends_outside(net, _around(net, center, radius)) == (0, 0)
        return len(seen) == 1

    assert single(ones, ones) and single(ones, 1.01 * share * ones)
    assert not single(ones, 0.99 * share * ones)
    assert not single(ones[:3], ones[:3]), "few samples"
    for sample in range(4):
        other, large = ones.clone(), ones.clone()
        other[sample] = 0.99 * share
        assert not single(ones, other), "one of them too narrow"
        other[sample] = 1 + 0.1 * share
        assert single(ones, other)
        other[sample] = 0
        assert not single(ones, other), "one of them a point"
        large[sample, 0] = 1e36
        assert not single(large, large), "a sum that may overflow"
        assert not single(1e36 * ones - large, 1e36 * ones - large), "some that may"
        other[sample], large[sample, 0] = 1, 1e35
        assert single(large, large)
    # On average over a sample's inputs.
    uneven = ones * torch.tensor([0.0, 0, 0, 1, 2, 3]).double()
    assert single(ones, uneven) and not single(ones, 0.99 * share * uneven)
    assert not single(
        ones, ones, _whole(torch.full((2, 6), 1 / 3, dtype=torch.float64), torch.zeros(2).double(), convolution)
    )


@pytest.mark.parametrize("convolution", (False, True))
def test_a_batch_costs_no_more_than_a_small_share(convolution: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against each of its samples, alone in float64."""
    monkeypatch.setattr(interval, "_LARGE", 1)
    draw, seen = Draw(4), _in_single(monkeypatch)
    net = _whole(torch.randn(9, 96, generator=draw.generator).double(), torch.ones(9).double(), convolution)
    radius = torch.rand(5, 96, generator=draw.generator, dtype=torch.float64)
    box = _around(net, 10 * (radius - 0.5), radius)
    found = interval_bounds(net, box)[-1].flat()
    assert len(seen) == 1
    for i in range(5):
        alone = interval_bounds(net, Bounds(box.lower[i : i + 1], box.upper[i : i + 1]))[-1].flat()
        width = alone.upper[0] - alone.lower[0]
        for more in (alone.lower[0] - found.lower[i], found.upper[i] - alone.upper[0]):
            assert bool((more <= 1e-4 * width).all() and (more > 0).any())
    assert len(seen) == 1


@pytest.mark.parametrize("make", (Crown, CrownIbp, AlphaCrown, Ibp), ids=lambda make: make.name)
def test_verifiers_prove_with_float32_on_a_cpu(make: type[Crown | Ibp]) -> None:
    """A row of a convolutional network that holds with room to spare, and one that a point of the box violates."""
    net = _layers(True)
    center = torch.rand(3, 8, 8, generator=Draw(0).generator, dtype=torch.float64)
    label = int(net(center[None].float()).argmax())
    box = Box((center - 1e-3).flatten().numpy(), (center + 1e-3).flatten().numpy())
    rows = [Row(((label, Fraction(1)),), Fraction(bound)) for bound in (-100, 100)]
    queries = [Query(net, Property(box, ((row,),))) for row in rows]
    proven, other = make(dtype="float32").verify(queries, Budget.each(60, 2))
    assert (proven.verdict, proven.trust) == (Verdict.UNSAT, Trust.ROUNDED)
    assert other.verdict is Verdict.UNKNOWN and other.margin is not None and other.margin < 0
    exact = make(dtype="float64").verify(queries[:1], Budget.each(60, 1))[0]
    assert proven.margin is not None and exact.margin is not None
    assert proven.margin != exact.margin or make is Ibp
    assert abs(proven.margin - exact.margin) <= 1e-5 * exact.margin
