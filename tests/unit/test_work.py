"""The number of values that a neuron depends on, by which rows are divided into chunks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.support.draws import draws
from verifiable_relu.bounds.tuning import receptive
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Relu


def _positive(seed: int) -> Network:
    """A network with convolutions and residual sums whose weights are all positive, so that no dependence cancels."""
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.uniform(0.5, 1, shape)).double()

    build = Builder((2, 7, 6))
    x = build.scale(0, "scale", scale=weight(2, 1, 1)) if rng.random() < 0.5 else 0
    for i in range(rng.integers(1, 4)):
        channels, height, width = build.shape(x)
        stride, padding = tuple(rng.integers(1, 3, 2).tolist()), tuple(rng.integers(0, 2, 4).tolist())
        if rng.random() < 0.3:
            x = build.permute(x, (1, 2, 0), f"turned{i}")
            channels, height, width = build.shape(x)
        dilation = (2, 1) if height >= 5 and rng.random() < 0.5 else (1, 1)
        groups = channels if rng.random() < 0.2 else 1
        kernel = [int(rng.integers(1, 1 + min(3, n))) for n in (height, width)]
        out = channels * int(rng.integers(1, 3))
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        x = build.conv2d(x, weight(out, channels // groups, *kernel), None, f"conv{i}", **options)
        if rng.random() < 0.7:
            x = build.activation(x, Relu, f"act{i}")
        if rng.random() < 0.5:
            inner = build.conv2d(x, weight(out, out, 3, 3), None, f"inner{i}", padding=(1, 1, 1, 1))
            x = build.add(inner, x, f"sum{i}")
    if rng.random() < 0.3:
        x = build.permute(x, (0, 2, 1), "permute")
    x = build.reshape(x, (math.prod(build.shape(x)),), "flat")
    x = build.activation(build.linear(x, weight(3, *build.shape(x)), None, "fc1"), Relu, "last")
    return build.network(build.linear(x, weight(2, 3), None, "fc2"), name="positive")


def _dependent(network: Network, index: int) -> int:
    """The number of values of all earlier nodes on which a neuron depends, in the middle or at the ends of a node."""
    values: list[torch.Tensor] = []
    for node in network.nodes[: index + 1]:
        inputs = [values[i] for i in node.inputs]
        value = node.forward(*inputs) if inputs else torch.ones(1, *node.shape, dtype=torch.float64)
        # A copy, where a node hands on what it was given.
        values.append(value.clone() if value.requires_grad else value.requires_grad_())
    if not index:
        return 0
    most, last = 0, values[-1][0]
    for neuron in (last[tuple(n // 2 for n in last.shape)], last.flatten()[0], last.flatten()[-1]):
        found = torch.autograd.grad(neuron, values[:-1], retain_graph=True, allow_unused=True)
        most = max(most, sum(int(part.count_nonzero()) for part in found if part is not None))
    return most


@pytest.mark.parametrize("seed", range(draws(16)))
def test_a_neuron_depends_on_no_more_values_than_is_said(seed: int) -> None:
    network = _positive(seed)
    assert len(receptive(network)) == len(network.nodes) and receptive(network)[0] == 0
    for index, node in enumerate(network.nodes):
        every = sum(before.size for before in network.nodes[:index])
        assert _dependent(network, index) <= receptive(network)[index] <= every, node.name


def test_windows_in_large_images_are_counted_exactly() -> None:
    """The windows are squares of 3 pixels; of 2 with 4 below; of 3 with 6 and 8 below; all channels count."""
    build = Builder((2, 16, 16))
    one = torch.ones(4, 4, 3, 3).double()
    x = build.activation(build.conv2d(0, one[:, :2], None, "conv1", padding=(1, 1, 1, 1)), Relu, "act1")
    x = build.conv2d(x, one[:, :, :2, :2], None, "conv2", stride=(2, 2))
    x = build.add(build.conv2d(x, one, None, "conv3", padding=(1, 1, 1, 1)), x, "sum")
    network = build.network(x, name="windows")
    kept, pooled = 4 * 2 * 2, 2 * 4 * 4
    assert receptive(network)[:4] == (0, 2 * 9, 4 + 2 * 9, 2 * kept + pooled)
    below = 2 * 4 * 6 * 6 + 2 * 8 * 8
    assert receptive(network)[4:] == (4 * 9 + below, 4 + 4 * 9 + below)
    # ReLU, and a sum, are of one channel.
    own = (0, 0, 3, 0, 0, 3)
    found = (_dependent(network, index) for index in range(len(network.nodes)))
    assert receptive(network) == tuple(count + more for count, more in zip(found, own, strict=True))
