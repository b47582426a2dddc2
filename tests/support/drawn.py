"""Networks, boxes and tunings at random for bound propagation, and what exact arithmetic says of bounds.

In most of the networks rounding is all that separates bounds from exact values.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from verifiable_relu.bounds import Bounds, Relaxation, Tuning, crown_relaxation, interval_bounds
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Affine, Conv2d, LeakyRelu, Relu
from verifiable_relu.trust.exact import evaluate_exact


class Draw:
    """A source of random tensors in float64, of any magnitude within ``decades``; weights are float32 numbers."""

    def __init__(self, seed: int, decades: float = 8) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.decades = decades

    def __call__(self, *shape: int) -> Tensor:
        value = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        if self.random.random() < 0.3:
            value = value * 2.0 ** torch.randint(-6, 7, shape, generator=self.generator)
        large = self.random.random() < 0.2
        return value * 10 ** self.random.uniform(-self.decades, self.decades) if large else value

    def weight(self, *shape: int) -> Tensor:
        return self(*shape).float().double()

    def integers(self, *shape: int) -> Tensor:
        """Random integers that are small enough for their sums in float32 to be exact."""
        return torch.randint(-9, 10, shape, generator=self.generator).double()


def opposed(draw: Draw, weight: Tensor, first: bool) -> Tensor:
    """Pairs of nearly equal channels that the next layer subtracts, so that large coefficients cancel."""
    out, channels = 2 * (len(weight) // 2), 2 * (weight.shape[1] // 2)
    weight[1:out:2] = weight[:out:2]
    if not first:
        weight[:, 1:channels:2] = -weight[:, :channels:2]
    noise = torch.rand(weight.shape, generator=draw.generator, dtype=torch.float64)
    return (weight * (1 + 2.0**-16 * noise)).float().double()


def affine(build: Builder, x: int, weight: Tensor, bias: Tensor | None) -> int:
    """A linear map of numbers, or of the channels of an image of one pixel."""
    name = f"affine{len(build.nodes)}"
    if len(build.shape(x)) == 1:
        return build.linear(x, weight, bias, name)
    return build.conv2d(x, weight[:, :, None, None], bias, name)


def images(draw: Draw) -> Network:
    """Convolutions of any stride and padding with residual sums, most often without activations."""
    rng, build = draw.random, Builder((2, 4, 3))
    linear, pairs = rng.random() < 0.7, rng.random() < 0.7
    x = build.scale(0, "scale", scale=draw(2, 1, 1), center=draw(2, 1, 1)) if rng.random() < 0.5 else 0
    for i in range(rng.randint(2, 3) if pairs else rng.randint(1, 3)):
        channels, height, width = build.shape(x)
        kernel = rng.randint(1, min(3, height)), rng.randint(1, min(3, width))
        # Up to three, so that outputs may see padding alone; with strides less, so that not all do.
        stride = (1, 1) if rng.random() < 0.5 else (rng.randint(1, 3), rng.randint(1, 3))
        padding = tuple(rng.randint(0, 3 if stride == (1, 1) else k - 1) for k in kernel * 2)
        out = rng.choice((2, 4) if pairs else (1, 2, 5))
        weight = draw.weight(out, channels, *kernel)
        weight = opposed(draw, weight, i == 0) if pairs else weight
        bias = draw(out) if rng.random() < 0.7 else None
        x = build.conv2d(x, weight, bias, f"conv{i}", padding=padding, stride=stride)
        x = x if linear else build.activation(x, Relu, f"act{i}")
        if rng.random() < 0.3:
            inner = build.conv2d(x, draw.weight(out, out, 3, 3), draw(out), f"inner{i}", padding=(1, 1, 1, 1))
            x = build.add(inner, x, f"sum{i}")
    flat = math.prod(build.shape(x))
    x = build.linear(build.reshape(x, (flat,), "flat"), draw(2, flat), draw(2), "out")
    return build.network(x, name="images")


def dense(draw: Draw) -> Network:
    """Linear maps, of which some are mostly zeros, with residual sums; most neurons can be inactive."""
    rng, build = draw.random, Builder((5,))
    linear, pairs, empty, x = rng.random() < 0.5, rng.random() < 0.7, rng.random() < 0.3, 0
    for i in range(rng.randint(2, 4)):
        inside, out = build.shape(x)[0], rng.choice((2, 8, 13, 30))
        weight = draw.weight(out, inside)
        weight = opposed(draw, weight, i == 0) if pairs else weight
        if empty:
            weight *= torch.rand(weight.shape, generator=draw.generator) < 0.3
        bias = draw(out) - (0.7 if rng.random() < 0.5 else 0) * weight.abs().sum(1)
        x = build.linear(x, weight, bias, f"fc{i}")
        x = x if linear else build.activation(x, Relu, f"act{i}")
        if rng.random() < 0.3:
            x = build.add(build.linear(x, draw.weight(out, out), draw(out), f"inner{i}"), x, f"sum{i}")
    return build.network(build.linear(x, draw.weight(2, build.shape(x)[0]), draw(2), "out"), name="dense")


def narrow(draw: Draw) -> Network:
    """A network in which each sum has two products, which nearly cancel, as does 3 times the second output."""
    rng = draw.random
    build = Builder((1, 1, 1) if rng.random() < 0.6 else (1,))
    x = affine(build, 0, opposed(draw, draw.weight(2, 1), True), None)
    x = affine(build, x, opposed(draw, draw.weight(1, 2), False), draw(1).abs() if rng.random() < 0.5 else None)
    if rng.random() < 0.5:
        kind, slope = rng.choice(((Relu, {}), (LeakyRelu, {"slope": draw(*build.shape(x))})))
        x = build.activation(x, kind, "act", **slope)
    x, out = build.reshape(x, (1,), "flat"), draw(2, 1)
    out[0] = 3 * out[1] if rng.random() < 0.5 else out[0]
    return build.network(build.linear(x, out, None, "out"), name="narrow")


def steep(draw: Draw) -> Network:
    """A normalisation, an activation after another and after sums, slopes of any sign, branches around each other."""
    rng, build = draw.random, Builder((2, 3, 2))
    x = build.scale(0, "scale", center=draw(2, 1, 1), scale=draw(2, 3, 2), shift=draw(1, 1, 2))
    x = build.permute(x, (2, 0, 1), "permute")

    def act(x: int) -> int:
        name = f"act{len(build.nodes)}"
        if rng.random() < 0.7:
            return build.activation(x, Relu, name)
        return build.activation(x, LeakyRelu, name, slope=2 * draw(*build.shape(x)))

    x = act(build.conv2d(x, draw.weight(3, 2, 2, 2), draw(3), "conv1", padding=(1, 0, 1, 2), stride=(1, 2)))
    y = build.conv2d(x, draw.weight(3, 3, 3, 3), draw(3), "conv2", padding=(1, 1, 1, 1))
    x = act(act(build.add(y, x, "add")))
    x = act(build.conv2d(x, draw.weight(3, 1, 1, 2), None, "conv3", groups=3))
    x = build.reshape(x, (math.prod(build.shape(x)),), "flatten")
    for i in range(rng.randint(1, 3)):
        x = build.linear(x, draw(6, build.shape(x)[0]), draw(6), f"fc{i}")
        kind, before = rng.random(), x
        x = act(x)
        if kind < 0.4:
            x = build.add(x if kind < 0.2 else before, x, f"sum{i}")
        elif kind < 0.6:
            x = build.scale(x, f"flip{i}", scale=draw(6), center=draw(6))
        elif kind < 0.8:
            x = build.add(act(build.linear(x, draw(6, 6), None, f"inner{i}")), x, f"block{i}")
    return build.network(build.linear(x, draw(2, build.shape(x)[0]), draw(2), "out"), name="steep")


def extreme(draw: Draw) -> Network:
    """Three maps whose weights, or their products, are beyond the ends of float32's range, or of float64's."""
    rng = draw.random
    build = Builder((2, 1, 1) if rng.random() < 0.6 else (2,))
    sizes = [10 ** rng.uniform(-50, 35) if rng.random() < 0.7 else 10.0 ** -rng.randint(100, 300) for _ in range(3)]
    first, second, out = (draw.weight(2, 2) * size for size in sizes)
    x = affine(build, affine(build, 0, first.float().double(), None), second.float().double(), None)
    x = build.reshape(x, (2,), "flat")
    x = build.activation(x, Relu, "act") if rng.random() < 0.3 else x
    return build.network(build.linear(x, out, None, "out"), name="extreme")


def boxes(draw: Draw, net: Network) -> Bounds:
    """Two boxes, one that is a million times narrower, and one point.

    The width of the first two is drawn: from zero to 30 times the distance from zero.
    """
    center = draw(4, *net.input_shape)
    if net.name == "extreme":
        center = center * 10 ** draw.random.uniform(-40, 40)
    share = draw.random.choice((0, 1e-6, 0.3, 1, 1, 30))
    width = share * center.abs().amax() * torch.rand(center.shape, generator=draw.generator, dtype=torch.float64)
    width = width * torch.tensor([1, 1, 1e-6, 0]).double().reshape(-1, *[1] * len(net.input_shape))
    return Bounds(center - width, center + width)


THRESHOLDS: Mapping[str, tuple[float, ...]] = {
    "float32": (True, True, False),
    "windows": (True, True, False),
    "restrict": (True, True, False),
    "chunk_bytes": (1 << 24, 1 << 10, 1),
    "copies": (6, 1),
    "windowed_copies": (2, 1),
    "row_multiple": (8, 3, 1),
    "row_digits": (5, 1),
    "waiting_coefficients": (1 << 18, 40, 0),
    "outputs_work": (64, 0, 1 << 60),
    "active_share": (0.75, 1.0, 0.0),
    "window_share": (1.0, 1.0, 0.5),
    "window_matrix_emptiness": (8, 0, 1000),
    "window_matrix_entries": (1 << 22, 0, 0),
    "window_table_rows": (4, 0),
    "float32_depth": (192, 192, 1 << 60, 0),
    "float32_inputs": (256, 1),
    "float32_neurons": (256, 8),
    "counted_terms": (64, 0),
    "interval_samples": (4, 1),
    "interval_products": (1, 1, 1 << 21),
    "interval_terms": (512, 4),
    "interval_inputs": (1 << 22, 4),
    "interval_widening": (8e-5, 1e30),
    "sparse_share": (1 / 32, 1.0, 0.6),
    "sparse_weights": (1 << 14, 1, 1),
    "sum_length": (96, 2, 1),
    "weight_sum_length": (48, 2, 1),
    "sum_steps": (16, 2),
    "channels_last": (32, 0, 1 << 10),
    "block_samples": (16, 1, 1),
    "block_terms": (8, 1),
    "block_count": (4, 1, 100),
    "block_bytes": (1 << 22, 0),
}
"""What is drawn for each threshold: often what takes the faster way, and seldom the default, which others test."""


def tuning(draw: Draw) -> Tuning:
    """Any tuning."""
    return Tuning(**{name: draw.random.choice(values) for name, values in THRESHOLDS.items()})  # type: ignore[arg-type]


def exact(net: Network, x: Tensor, index: int | None = None) -> list[Fraction]:
    """The exact values at a point of a node, by default of the outputs."""
    part = net if index is None else Network(net.nodes[: index + 1], name="part")
    return evaluate_exact(part, [Fraction(v) for v in x.flatten().tolist()])


def excluded(bound: Tensor, values: list[Fraction]) -> int:
    """The number of values below their lower bounds; a bound of NaN excludes none."""
    return sum(not math.isnan(b) and b > v for b, v in zip(bound.flatten().tolist(), values, strict=True))


def outside(bounds: Bounds, sample: int, values: list[Fraction]) -> int:
    """The number of values outside a sample's bounds."""
    return excluded(bounds.lower[sample], values) + excluded(-bounds.upper[sample], [-v for v in values])


def excluded_by(relaxation: Relaxation, true: Network, tuning: Tuning) -> int:
    """How many exact values of a network the bounds of its outputs, of some neurons and of intervals exclude.

    They are taken where linear bounds are attained.

    Args:
        relaxation: of the network as it is stored.
        true: the network that is meant.
        tuning: that of the intervals.
    """
    net, box = relaxation.network, relaxation.box
    last, samples = len(net.nodes) - 1, len(box.lower)
    intervals = interval_bounds(net, box, tuning=tuning)

    def held(target: int, rows: Tensor, *bounds: Tensor) -> int:
        """Hold bounds of rows, equally many of each sample, against values at the points where theirs are attained."""
        each, wrong = len(rows) // samples, 0
        shaped = rows.reshape(-1, *net.nodes[target].shape)
        found, reached = relaxation.lower(target, shaped, torch.arange(samples), coefficients=True)
        assert reached is not None
        a = relaxation.of_input(reached).reshape(samples, each, *net.input_shape)
        every = torch.stack([found, relaxation.lower(target, shaped, torch.arange(samples))[0], *bounds])
        for number, (sample, row) in enumerate(itertools.product(range(samples), range(each))):
            point = torch.where(a[sample, row] > 0, box.lower[sample], box.upper[sample])
            y = exact(true, point, target)
            value = sum((Fraction(c) * v for c, v in zip(rows[number].tolist(), y, strict=True)), Fraction(0))
            wrong += excluded(every[:, number], [value] * len(every))
            if not row:
                wrong += outside(intervals[target], sample, y) + outside(relaxation.bounds(target), sample, y)
        return wrong

    rows = torch.tensor([[1.0, 0], [0, -1], [1, -3]]).to(box.lower).repeat(samples, 1)
    wrong = held(last, rows, relaxation.outputs(rows), relaxation.by_intervals(rows))
    for index in range(relaxation.nodes.start + 1, last, 2):
        size = net.nodes[index].size
        neuron, sign = (
            torch.tensor([0, size // 2, size - 1]).repeat(samples),
            torch.tensor([1.0, -1, 1]).repeat(samples),
        )
        sign = sign.to(box.lower)
        wrong += held(
            index, torch.eye(size).to(box.lower)[neuron] * sign[:, None], relaxation.neurons(index, neuron, sign)
        )
    return wrong


MAKES: tuple[Callable[[Draw], Network], ...] = (narrow, images, dense, steep, extreme)


def found(seed: int, make: Callable[[Draw], Network], known: Tuning | None = None) -> int:
    """How many exact values bounds exclude under a tuning, by default any; in float64 or, seldom, in float32."""
    draw = Draw(seed)
    rng, true = draw.random, make(draw)
    # A convolution in float32 may be computed in another way.
    single = rng.random() < 0.5 and not any(isinstance(node, Conv2d) for node in true.nodes)
    dtype = torch.float32 if single else torch.float64
    net, box = true.to(dtype), boxes(draw, true)
    if rng.random() < 0.5:
        # The rounded weights are the true ones.
        net = replace(net, nodes=tuple(replace(n, weight_error=0.0) if isinstance(n, Affine) else n for n in net.nodes))
        true = net
    used = known or tuning(draw)
    box = Bounds(box.lower.to(dtype), box.upper.to(dtype))
    relaxation = crown_relaxation(net, box, float32=rng.random() < 0.5, tuning=used)
    return excluded_by(relaxation, true, used)
