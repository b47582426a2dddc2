"""Linear bounds of every node of many graphs, against CROWN implemented again with dense matrices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from verifiable_relu.bounds import TUNING, Bounds, Lines, Relaxation, Tuning, crown_relaxation
from verifiable_relu.network import nodes as node_kinds
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Add, Conv2d, LeakyRelu, Linear, Permute, Relu, Scale, Tanh

# ---------------------------------------------------------------- networks


class Draw:
    """The construction of networks with random weights, which are float32 numbers if ``float32`` is set."""

    def __init__(self, seed: int, float32: bool, *shape: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.float32 = float32
        self.build = Builder(shape)

    def __call__(self, *shape: int) -> Tensor:
        value = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return value.float().double() * (1 if self.float32 else 1 + 2.0**-30)

    def conv(self, x: int, out: int, kernel: tuple[int, int], **options: object) -> int:
        inside = self.build.shape(x)[0]
        weight = self(out, inside, *kernel) / 4
        return self.build.conv2d(x, weight, self(out) / 2, f"conv{len(self.build.nodes)}", **options)  # type: ignore[arg-type]

    def relu(self, x: int, kind: type[Activation] = Relu, **parameters: float) -> int:
        tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in parameters.items()}
        return self.build.activation(x, kind, f"act{len(self.build.nodes)}", **tensors)

    def add(self, x: int, y: int) -> int:
        return self.build.add(x, y, f"sum{len(self.build.nodes)}")

    def flat(self, x: int) -> int:
        return self.build.reshape(x, (math.prod(self.build.shape(x)),), f"flat{len(self.build.nodes)}")

    def permute(self, x: int, *axes: int) -> int:
        return self.build.permute(x, axes, f"permute{len(self.build.nodes)}")

    def scale(self, x: int) -> int:
        channels = (self.build.shape(x)[0], *[1] * (len(self.build.shape(x)) - 1))
        name = f"scale{len(self.build.nodes)}"
        return self.build.scale(x, name, scale=self(*channels), center=self(*channels), shift=self(*channels))

    def linear(self, x: int, out: int, bias: float = 0.0) -> int:
        inside = self.build.shape(x)[-1]
        weight = self(out, inside) / inside**0.5
        weight = weight.float().double() if self.float32 else weight
        return self.build.linear(x, weight, self(out) / 2 + bias, f"fc{len(self.build.nodes)}")

    def end(self, x: int) -> Network:
        return self.build.network(x, name="graph")


SAME = {"padding": (1, 1, 1, 1)}


def _chain(float32: bool) -> Network:
    """Convolutions with strides and uneven padding, up to three in a row."""
    draw = Draw(0, float32, 2, 8, 7)
    x = draw.relu(draw.conv(draw.scale(0), 3, (3, 2), padding=(1, 0, 1, 1)))
    x = draw.relu(draw.conv(x, 4, (2, 3), stride=(2, 1), padding=(0, 1, 0, 1)))
    x = draw.relu(draw.conv(x, 2, (2, 2), stride=(1, 2)))
    return draw.end(draw.linear(draw.relu(draw.linear(draw.flat(x), 6)), 3))


def _wide(float32: bool) -> Network:
    """Convolutions with so many channels that another layout is taken, the last one with a stride."""
    draw = Draw(1, float32, 1, 6, 6)
    x = draw.relu(draw.conv(0, 40, (2, 2), stride=(2, 2)))
    return draw.end(draw.linear(draw.flat(draw.relu(draw.conv(x, 3, (2, 2)))), 3))


def _blocks(float32: bool) -> Network:
    """Residual blocks with ReLU on their sums; the shortcut of the second has a convolution."""
    draw = Draw(2, float32, 2, 5, 5)
    x = draw.relu(draw.conv(0, 3, (3, 3), **SAME))
    x = draw.relu(
        draw.add(
            draw.conv(draw.relu(draw.conv(x, 3, (3, 1), padding=(1, 0, 1, 0))), 3, (1, 3), padding=(0, 1, 0, 1)), x
        )
    )
    x = draw.relu(draw.add(draw.conv(x, 3, (3, 3), stride=(2, 2), **SAME), draw.conv(x, 3, (1, 1), stride=(2, 2))))
    return draw.end(draw.linear(draw.flat(x), 3))


def _sums(float32: bool) -> Network:
    """Sums of activations, of a node with itself, of sums; the input is used twice."""
    draw = Draw(3, float32, 2, 4, 4)
    x = draw.add(draw.conv(0, 2, (3, 3), **SAME), 0)
    one, two = draw.relu(x), draw.relu(draw.conv(x, 2, (1, 1)))
    x = draw.add(draw.add(one, two), draw.add(one, one))
    x = draw.relu(draw.conv(x, 2, (2, 2)))
    return draw.end(draw.linear(draw.flat(draw.add(x, x)), 3))


def _many(float32: bool) -> Network:
    """A node that convolutions, an activation and a sum use five times."""
    draw = Draw(4, float32, 1, 4, 3)
    hub = draw.conv(0, 2, (2, 2), padding=(1, 0, 0, 1))
    parts = [draw.conv(hub, 2, (1, 1)), draw.relu(hub), draw.relu(draw.conv(hub, 2, (3, 3), **SAME)), draw.relu(hub)]
    x = hub
    for part in parts:
        x = draw.add(x, part)
    return draw.end(draw.linear(draw.flat(draw.relu(x)), 3))


def _reordered(float32: bool) -> Network:
    """ReLU after a reordering of axes and after a flattening, before a residual sum."""
    draw = Draw(5, float32, 2, 4, 3)
    x = draw.relu(draw.permute(draw.conv(0, 3, (2, 2)), 2, 0, 1))
    x = draw.flat(draw.permute(draw.conv(x, 2, (2, 1)), 1, 2, 0))
    y = draw.relu(x)
    x = draw.relu(draw.add(draw.linear(y, draw.build.shape(y)[0]), y))
    return draw.end(draw.linear(x, 3))


def _scaled(float32: bool) -> Network:
    """Scales between convolutions, before and after a ReLU."""
    draw = Draw(6, float32, 2, 5, 5)
    x = draw.scale(draw.relu(draw.scale(draw.conv(0, 3, (2, 2)))))
    x = draw.scale(draw.relu(draw.conv(x, 3, (2, 2))))
    return draw.end(draw.linear(draw.relu(draw.linear(draw.flat(x), 5)), 3))


def _smooth(float32: bool) -> Network:
    """Activations with lines that do not go through the origin, used twice."""
    draw = Draw(7, float32, 2, 4, 4)
    x = draw.relu(draw.conv(draw.relu(draw.conv(0, 3, (2, 2))), 3, (1, 2)), Tanh)
    x = draw.add(draw.relu(draw.conv(x, 3, (3, 3), **SAME), LeakyRelu, slope=1.5), x)
    x = draw.relu(draw.linear(draw.flat(x), 6), LeakyRelu, slope=0.1)
    return draw.end(draw.linear(draw.relu(draw.linear(x, 4), Tanh), 3))


def _image(float32: bool) -> Network:
    """A network whose output is the image of a ReLU, so that rows begin in float32."""
    draw = Draw(8, float32, 1, 5, 4)
    x = draw.relu(draw.conv(0, 2, (2, 2)))
    return draw.end(draw.relu(draw.add(draw.conv(x, 2, (3, 3), **SAME), x)))


def _inactive(float32: bool) -> Network:
    """Dense layers of which most neurons are inactive."""
    draw = Draw(9, float32, 2, 3, 3)
    x = draw.relu(draw.linear(draw.flat(draw.relu(draw.conv(0, 2, (2, 2)))), 12, -0.8))
    return draw.end(draw.linear(draw.relu(draw.linear(x, 10, -0.3)), 3))


def _dense(float32: bool) -> Network:
    """Linear maps alone, with a residual sum, a reordering and neurons of which about half are inactive."""
    draw = Draw(10, float32, 7)
    x = draw.relu(draw.linear(draw.relu(draw.linear(0, 12, -0.5)), 11, -0.6))
    x = draw.relu(draw.linear(draw.relu(draw.linear(x, 9, -0.2)), 6), LeakyRelu, slope=0.25)
    x = draw.relu(draw.add(draw.linear(draw.relu(draw.linear(x, 6), Tanh), 6), x), Tanh)
    x = draw.flat(draw.permute(draw.build.reshape(x, (3, 2), "rows"), 1, 0))
    return draw.end(draw.linear(draw.relu(draw.linear(x, 5)), 3))


def _dead(float32: bool) -> Network:
    """Two layers that no input reaches."""
    draw = Draw(11, float32, 4)
    x = draw.relu(draw.linear(draw.relu(draw.linear(0, 6)), 5, -20))
    x = draw.relu(draw.linear(draw.relu(draw.linear(x, 7, -4)), 4))
    return draw.end(draw.linear(x, 3))


GRAPHS: dict[str, Callable[[bool], Network]] = {
    "chain": _chain,
    "wide": _wide,
    "blocks": _blocks,
    "sums": _sums,
    "many": _many,
    "reordered": _reordered,
    "scaled": _scaled,
    "smooth": _smooth,
    "image": _image,
    "inactive": _inactive,
    "dense": _dense,
    "dead": _dead,
}
graphs = pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS.keys())
Zone = tuple[bool, bool]
"""Whether weights are float32 numbers, and whether coefficients of every node are to be in float32."""

ZONES: dict[str, Zone] = {"float64": (False, False), "float32": (True, False), "every": (True, True)}
zones = pytest.mark.parametrize("zone", ZONES.values(), ids=ZONES.keys())


def boxes(net: Network, batch: int) -> Bounds:
    """Boxes of different places and sizes, so that different neurons are unstable in each."""
    generator = torch.Generator().manual_seed(batch)
    center = torch.randn(batch, *net.input_shape, generator=generator, dtype=torch.float64)
    size = torch.logspace(0, -1.2, batch, dtype=torch.float64).reshape(-1, *[1] * len(net.input_shape))
    radius = size * torch.rand(center.shape, generator=generator, dtype=torch.float64)
    return Bounds(center - radius, center + radius)


# ---------------------------------------------------------------- the same by hand


def _matrix(node: node_kinds.Node, before: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The matrix W and the offset b of a node y = W·x + b on flattened tensors."""
    size = math.prod(before)
    match node:
        case Linear():
            return node.weight.numpy(), node.bias.numpy()
        case Scale():
            scale, shift, center = (
                t.expand(node.shape).flatten().numpy() for t in (node.scale, node.shift, node.center)
            )
            return np.diag(scale), shift - scale * center
        case Permute():
            return np.eye(size)[np.arange(size).reshape(before).transpose(node.axes).flatten()], np.zeros(size)
    if not isinstance(node, Conv2d):
        return np.eye(size), np.zeros(size)
    places = np.arange(size).reshape(before)
    weight, matrix = node.weight.numpy(), np.zeros((*node.shape, size))
    for (o, i, j), (c, u, v) in itertools.product(np.ndindex(*node.shape), np.ndindex(*weight.shape[1:])):
        y, x = i * node.stride[0] + u - node.padding[0], j * node.stride[1] + v - node.padding[1]
        if 0 <= y < before[1] and 0 <= x < before[2]:
            matrix[o, i, j, places[c, y, x]] += weight[o, c, u, v]
    bias = np.broadcast_to(node.bias.numpy()[:, None, None], node.shape)
    return matrix.reshape(-1, size), bias.flatten()


class ByHand:
    """Linear lower bounds of rows of any node, from the lines of a relaxation's activations."""

    def __init__(self, relaxation: Relaxation) -> None:
        self.relaxation, self.nodes = relaxation, relaxation.network.nodes
        self.maps = {i: _matrix(n, self.nodes[n.inputs[0]].shape) for i, n in enumerate(self.nodes) if n.inputs}

    def least(self, index: int, a: np.ndarray, sample: int) -> float:
        """The least value of rows over a node's interval."""
        lower, upper = (t[sample].flatten().numpy() for t in _ends(self.relaxation.bounds(index)))
        return float(np.minimum(a * lower, a * upper).sum())

    def lower(
        self,
        target: int,
        row: np.ndarray,
        sample: int,
        own: Mapping[int, tuple[np.ndarray, ...]] | None = None,
    ) -> tuple[float, np.ndarray]:
        """The lower bounds of rows of a node, and their coefficients of the input."""
        rows, constant = {target: row}, 0.0
        for index in range(target, 0, -1):
            if index not in rows:
                continue
            a, node = rows.pop(index), self.nodes[index]
            if isinstance(node, Activation):
                lines = own[index] if own else _of(self.relaxation.lines.of(index), sample)
                low, floor, up, top = lines
                positive, negative = np.maximum(a, 0), np.minimum(a, 0)
                constant += float(positive @ floor + negative @ top)
                given = [positive * low + negative * up]
            elif isinstance(node, Add):
                given = [a, a]
            else:
                weight, bias = self.maps[index]
                constant += float(a @ bias)
                given = [a @ weight]
            for source, value in zip(node.inputs, given, strict=True):
                rows[source] = rows.get(source, 0) + value
        a = rows.get(0, np.zeros(self.nodes[0].size))
        return constant + self.least(0, a, sample), a

    def by_intervals(self, row: np.ndarray, sample: int) -> float:
        """The lower bound of a row of the output by the interval of the last node, or of its input if it is linear."""
        last = len(self.nodes) - 1
        node = self.nodes[last]
        if not isinstance(node, Linear):
            return self.least(last, row, sample)
        weight, bias = self.maps[last]
        return float(row @ bias) + self.least(node.inputs[0], row @ weight, sample)


def _ends(bounds: Bounds) -> tuple[Tensor, Tensor]:
    return bounds.lower, bounds.upper


def _of(lines: Lines, row: int) -> tuple[np.ndarray, ...]:
    return tuple(t[row].flatten().numpy() for t in lines.parts())


def assert_the_same(found: Tensor, right: list[float], float32: bool) -> None:
    """Bounds of rows, and of their negatives, are at most the expected ones, and lower by a fraction of the width."""
    expected = torch.tensor(right, dtype=torch.float64)
    half = len(expected) // 2
    width = -(expected[:half] + expected[half:]).repeat(2)
    assert bool((found <= expected + 1e-13 * (1 + expected.abs())).all())
    # Neurons of which nothing is left, too, have a share in rounding.
    assert bool((expected - found <= (1e-4 if float32 else 1e-9) * width + 1e-12).all())


def _opposed(net: Network) -> Tensor:
    """Two rows of the output and their negatives."""
    rows = torch.randn(2, net.output_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat([rows, -rows])


def _signs(count: int) -> Tensor:
    return torch.cat([torch.ones(count), -torch.ones(count)]).double()


# ---------------------------------------------------------------- tests


WINDOWS = {
    "windows": replace(TUNING, window_matrix_entries=0, window_share=1.0),
    "whole": replace(TUNING, window_matrix_entries=0, windows=False),
}
"""Windows up to whole images, without matrices; or no windows at all."""


def _relaxed(
    make: Callable[[bool], Network], zone: Zone, batch: int, tuning: Tuning = TUNING
) -> tuple[Network, Relaxation, bool]:
    """The relaxation of a network over boxes, and whether some of its coefficients are in float32."""
    weights, every = zone
    net = make(weights)
    relaxation = crown_relaxation(net, boxes(net, batch), float32=every, tuning=tuning)
    start, last = relaxation.nodes.start, relaxation.backward.float32.last_node
    if every:
        # No sums follow a scale in float32.
        scales = (i for i, node in enumerate(net.nodes) if isinstance(node, Scale) and i > start)
        assert last == next(scales, len(net.nodes)) - 1 > start
    elif weights and any(isinstance(node, Conv2d) for node in net.nodes):
        assert last > start
    else:
        assert last == -1
    return net, relaxation, last >= 0


@pytest.mark.combined
@graphs
@zones
@pytest.mark.parametrize("tuning", WINDOWS.values(), ids=WINDOWS.keys())
def test_bounds_of_neurons_of_every_node_are_those_by_hand(
    make: Callable[[bool], Network], zone: Zone, tuning: Tuning
) -> None:
    """Rows come in groups, one for each sample, with the samples in another order."""
    net, relaxation, float32 = _relaxed(make, zone, 3, tuning)
    hand = ByHand(relaxation)
    for index in range(relaxation.nodes.start + 1, len(net.nodes)):
        size = net.nodes[index].size
        neuron = torch.arange(0, size, max(1, size // 4))[:5]
        sign, samples = _signs(len(neuron)), torch.tensor([2, 0, 1])
        found = relaxation.neurons(index, neuron.repeat(6), sign.repeat(3), samples)
        for sample, mine in zip(samples.tolist(), found.unflatten(0, (3, -1)), strict=True):
            rows = np.eye(size)[neuron.repeat(2)] * sign.numpy()[:, None]
            assert_the_same(mine, [hand.lower(index, row, sample)[0] for row in rows], float32)


@pytest.mark.combined
@graphs
@zones
@pytest.mark.parametrize("batch", (1, 4))
def test_bounds_of_rows_of_the_output_are_those_by_hand(
    make: Callable[[bool], Network], zone: Zone, batch: int
) -> None:
    """Rows come in groups and one by one, with and without coefficients of the input, which are equal."""
    net, relaxation, float32 = _relaxed(make, zone, batch)
    hand, last = ByHand(relaxation), len(net.nodes) - 1
    rows, constant = _opposed(net), torch.tensor([1.0, 2.0, -1.0, -2.0]).double()
    samples = torch.arange(batch)
    right, coefficients = [], []
    for sample in samples.tolist():
        for row, offset in zip(rows.numpy(), constant.tolist(), strict=True):
            value, a = hand.lower(last, row, sample)
            right.append(value + offset)
            coefficients.append(a)
    for mine, wanted in itertools.product((samples, samples.repeat_interleave(4)), (False, True)):
        found, reached = relaxation.lower(
            last, rows.repeat(batch, 1), mine, constant=constant.repeat(batch), coefficients=wanted
        )
        for sample in range(batch):
            part = slice(4 * sample, 4 * sample + 4)
            assert_the_same(found[part], right[part], float32)
        if wanted:
            assert reached is not None
            expected = torch.from_numpy(np.stack(coefficients))
            off = (relaxation.of_input(reached) - expected).abs().amax()
            assert off <= (1e-5 if float32 else 1e-12) * expected.abs().amax()


@pytest.mark.combined
@graphs
@zones
@pytest.mark.parametrize("batch", (1, 4))
def test_interval_bounds_of_rows_of_the_output_are_those_by_hand(
    make: Callable[[bool], Network], zone: Zone, batch: int
) -> None:
    """Rows come in groups and one by one, with rounding accounted for and without."""
    net, relaxation, _ = _relaxed(make, zone, batch)
    hand, rows, samples = ByHand(relaxation), _opposed(net), torch.arange(batch)
    right = [hand.by_intervals(row, sample) for sample in samples.tolist() for row in rows.numpy()]
    for mine in (samples, samples.repeat_interleave(4)):
        found = relaxation.by_intervals(rows.repeat(batch, 1), mine)
        for sample in range(batch):
            part = slice(4 * sample, 4 * sample + 4)
            assert_the_same(found[part], right[part], float32=False)
        rough = relaxation.by_intervals(rows.repeat(batch, 1), mine, rounded=False)
        torch.testing.assert_close(rough, torch.tensor(right, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.combined
@graphs
@zones
def test_bounds_of_rows_with_lines_of_their_own_are_those_by_hand(make: Callable[[bool], Network], zone: Zone) -> None:
    """Rows have lines of their own for all activations or for some; the points are those of the shared lines."""
    net, relaxation, float32 = _relaxed(make, zone, 3)
    hand, last = ByHand(relaxation), len(net.nodes) - 1
    generator = torch.Generator().manual_seed(1)
    sample = torch.tensor([0, 1, 1, 2, 0, 1, 1, 2])
    one = torch.randn(4, net.output_size, generator=generator, dtype=torch.float64)
    rows = torch.cat([one, -one])
    for chosen in (net.activations, net.activations[:1], net.activations[1:]):
        own = {}
        for index in chosen:
            # A row and its negative choose alike.
            slope = torch.rand(4, *net.nodes[index].shape, generator=generator, dtype=torch.float64)
            own[index] = relaxation.lines.chosen(index, sample, torch.cat([slope, slope]))
        record: dict[int, Tensor] = {}
        found, _ = relaxation.lower(last, rows, sample, lines=own, record=record)
        assert set(record) == set(chosen)
        right = []
        for i, which in enumerate(sample.tolist()):
            lines = {
                index: _of(own[index], i) if index in own else _of(relaxation.lines.of(index), which)
                for index in net.activations
            }
            right.append(hand.lower(last, rows[i].numpy(), which, lines)[0])
        assert_the_same(found, right, float32)
        if not float32:
            rough, _ = relaxation.lower(last, rows, sample, lines=own, rounded=False)
            torch.testing.assert_close(rough, torch.tensor(right, dtype=torch.float64), rtol=1e-12, atol=1e-12)
