"""Bounds under any tuning: no tighter than the truth, and those without accelerations but for float32's errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.bounds import both_signs
from tests.support.draws import draws
from tests.support.families import Random, boxes, points
from tests.unit.test_bounds import ACTS, assert_inside, images, mlp
from verifiable_relu.bounds import PLAIN, TUNING, Bounds, Tuning, crown_relaxation, interval_bounds, sums
from verifiable_relu.bounds.operators import DenseOperator, needed, prepared
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Relu


def _narrowed(network: Network) -> Network:
    """A copy of a network with its weights rounded to float32 numbers."""
    return replace(network, nodes=tuple(node.map_tensors(lambda t: t.float().double()) for node in network.nodes))


def _pooled() -> Network:
    """Images that are averaged, channel by channel, and go through a convolution in groups; outputs are an image."""
    rng, build, relu = Random(3), Builder((2, 15, 14)), ACTS["relu"]
    x = relu(build, build.conv2d(0, rng.normal(4, 2, 3, 3) / 3, rng.normal(4) / 2, "conv1", padding=(1, 1, 1, 1)))
    mean = torch.full((4, 1, 2, 2), 0.25, dtype=torch.float64)
    x = build.conv2d(x, mean, None, "mean", stride=(2, 2), padding=(0, 1, 1, 0), groups=4)
    x = relu(build, build.conv2d(x, rng.normal(4, 4, 3, 3) / 4, rng.normal(4) / 2, "conv2", padding=(1, 0, 1, 1)))
    x = build.conv2d(x, rng.normal(6, 2, 2, 2) / 3, rng.normal(6) / 2, "groups", stride=(1, 2), groups=2)
    before = x = relu(build, x)
    x = relu(build, build.conv2d(x, rng.normal(6, 6, 3, 3) / 4, rng.normal(6) / 2, "conv3", padding=(1, 1, 1, 1)))
    x = build.add(x, before, "shortcut")
    return build.network(build.conv2d(x, rng.normal(2, 6, 1, 1), rng.normal(2), "conv4"), name="pooled")


def _turned() -> Network:
    """Images whose channels come last before an activation, so that its neurons are rows of whole images at first."""
    rng, build, relu = Random(4), Builder((2, 13, 12)), ACTS["relu"]
    x = relu(build, build.conv2d(0, rng.normal(3, 2, 3, 3) / 3, rng.normal(3) / 2, "conv1", padding=(1, 1, 1, 1)))
    x = build.conv2d(x, rng.normal(4, 3, 3, 3) / 3, rng.normal(4) / 2, "conv2", stride=(1, 2), padding=(1, 0, 1, 1))
    x = relu(build, build.permute(x, (1, 2, 0), "last"))
    x = build.reshape(x, (build.nodes[x].size,), "flatten")
    return build.network(build.linear(x, rng.normal(3, build.nodes[x].size) / 9, rng.normal(3), "fc"), name="turned")


def _padded() -> Network:
    """Windows of the last outputs begin after the end of the image, those of the first end before it begins."""
    rng, build = Random(5), Builder((1, 3, 4))
    x = build.conv2d(0, rng.normal(2, 1, 2, 2), rng.normal(2), "conv1", stride=(1, 2), padding=(3, 2, 4, 3))
    x = ACTS["relu"](build, x)
    x = build.conv2d(x, rng.normal(2, 2, 3, 2), rng.normal(2), "conv2", padding=(2, 3, 0, 4))
    x = build.reshape(x, (build.nodes[x].size,), "flatten")
    return build.network(build.linear(x, rng.normal(3, build.nodes[x].size) / 9, rng.normal(3), "fc"), name="padded")


NETWORKS: dict[str, Callable[[], Network]] = {
    "mlp": lambda: mlp(ACTS["relu"], sizes=(6, 24, 24, 24, 3)),
    "images": lambda: images(ACTS["relu"]),
    "smooth images": lambda: images(ACTS["gelu5"]),
    "narrow mlp": lambda: _narrowed(mlp(ACTS["relu"], sizes=(6, 24, 24, 24, 3))),
    "narrow images": lambda: _narrowed(images(ACTS["relu"])),
    "pooled images": _pooled,
    "turned images": _turned,
    "padded images": lambda: _narrowed(_padded()),
}

EAGER = Tuning(
    active_share=1.0,
    window_share=1.0,
    window_start=1.0,
    float32_inputs=1,
)
"""Whatever can be faster anywhere is used."""

TUNINGS = (
    TUNING,
    EAGER,
    replace(EAGER, float32=False),
    replace(PLAIN, windows=True, window_share=1.0, window_start=1.0),
    replace(PLAIN, restrict=True, active_share=1.0),
    replace(TUNING, chunk_bytes=1 << 14),
)


def _found(network: Network, box: Bounds, tuning: Tuning, float32: bool = False) -> tuple[dict[int, Bounds], Tensor]:
    """Interval bounds of all nodes with CROWN's of pre-activations (negative keys), and bounds of outputs' ends."""
    with torch.no_grad():
        relaxation = crown_relaxation(network, box, tuning=tuning, float32=float32)
        lower = relaxation.outputs(*both_signs(network.output_size, len(box.lower)))
        intervals = dict(enumerate(interval_bounds(network, box)))
        return intervals | {-i: bounds for i, bounds in relaxation.pre.items()}, lower


@pytest.mark.combined
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_any_tuning_is_between_plain_bounds_and_the_truth(name: str, batch: int) -> None:
    network = NETWORKS[name]()
    box = boxes(network, batch=batch)
    matrix, sample = both_signs(network.output_size, batch)
    plain, least = _found(network, box, PLAIN)
    x = points(box)
    values = [v.unflatten(0, x.shape[:2]) for v in network.values(x.flatten(0, 1))]
    reached = torch.einsum("ro,pro->pr", matrix, values[-1].flatten(2)[:, sample]).amin(0)
    for tuning in TUNINGS:
        bounds, lower = _found(network, box, tuning)
        # What float32 adds is a small part of the bounds' width, about 4 here.
        near = {"rtol": 1e-3, "atol": 1e-2} if tuning.float32 else {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(lower, least, **near)
        assert bool((lower <= reached).all())
        for index, found in bounds.items():
            torch.testing.assert_close(found.lower, plain[index].lower, **near)
            torch.testing.assert_close(found.upper, plain[index].upper, **near)
            assert_inside(found, values[index if index >= 0 else network.nodes[-index].inputs[0]])


@pytest.mark.parametrize("name", ["narrow mlp", "narrow images", "padded images"])
def test_coefficients_of_all_nodes_in_float32_widen_bounds_by_little(name: str) -> None:
    network = NETWORKS[name]()
    box = boxes(network, batch=3)
    bounds, lower = _found(network, box, TUNING, float32=True)
    plain, least = _found(network, box, PLAIN)
    assert not torch.equal(lower, least)
    for index, right in plain.items():
        width = 1e-3 * (right.upper - right.lower) + 1e-6
        assert bool((right.lower - bounds[index].lower <= width).all())
        assert bool((bounds[index].upper - right.upper <= width).all())
    least, lower = least.reshape(3, 2, -1), lower.reshape(3, 2, -1)
    assert bool((least - lower <= -1e-3 * least.sum(1, keepdim=True) + 1e-6).all())


def test_weights_in_compressed_rows_change_nothing() -> None:
    """Dense products are those of weights of which a gradient is wanted."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(120, 150, generator=generator) * (torch.rand(120, 150, generator=generator) < 0.02)
    first, last = torch.randn(150, 6, generator=generator), torch.randn(3, 120, generator=generator)

    def network(weight: Tensor) -> Network:
        build = Builder((6,))
        x = build.activation(build.linear(0, first.double(), None, "in"), Relu, "one")
        x = build.activation(build.linear(x, weight, None, "sparse"), Relu, "two")
        return build.network(build.linear(x, last.double(), None, "out"), name="sparse")

    sparse, dense = network(weight.double()), network(weight.double().requires_grad_())
    operators = [prepared(each)[3] for each in (sparse, dense)]
    assert [isinstance(each, DenseOperator) and each.sparse for each in operators] == [True, False]
    box = boxes(sparse, batch=3)
    (bounds, lower), (expected, least) = _found(sparse, box, TUNING), _found(dense, box, TUNING)
    torch.testing.assert_close(lower, least, rtol=1e-9, atol=1e-9)
    for index, found in bounds.items():
        torch.testing.assert_close(found.lower, expected[index].lower, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.upper, expected[index].upper, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(draws(20)))
def test_products_of_rows_are_those_of_each_row(seed: int) -> None:
    """Products with one or several groups and rows are those of each row alone."""
    rng = np.random.default_rng(seed)
    groups, each, size = (int(n) for n in rng.integers(1, 5, 3))

    def whole(*shape: int) -> Tensor:
        return torch.from_numpy(rng.integers(-9, 10, shape)).double()

    a, other = whole(groups, each, size), whole(groups, each, size)
    for held in {1, groups}:
        values, more = whole(held, size), whole(held, size)
        expected = (a * values[:, None]).sum(2)
        assert torch.equal(sums.dot(a, values), expected)
        assert torch.equal(sums.dot(a, values, (other, more)), expected + (other * more[:, None]).sum(2))


@pytest.mark.parametrize("seed", range(draws(8)))
def test_neurons_that_outputs_do_not_depend_on_are_left_out_of_bounds(seed: int) -> None:
    """Neither numbers in their place nor bounds of them change anything."""
    network, generator = _pooled(), torch.Generator().manual_seed(seed)
    outputs = torch.zeros(network.output_size, dtype=torch.bool)
    outputs[torch.randperm(network.output_size, generator=generator)[: 1 + seed % 2]] = True
    only = needed(network, outputs, torch.float64)
    assert only is not None and list(only) == list(network.activations)
    assert any(not bool(part.all()) for part in only.values())
    x = torch.randn(1, *network.input_shape, generator=generator).double()
    for index, part in only.items():
        values: list[Tensor] = []
        for at, node in enumerate(network.nodes):
            value = node.forward(*(values[i] for i in node.inputs)) if node.inputs else x
            if at == index:
                noise = 1 + torch.rand(1, node.size, generator=generator).double()
                value = (value.flatten(1) + torch.where(part, 0.0, noise)).reshape(value.shape)
            values.append(value)
        torch.testing.assert_close(values[-1].flatten()[outputs], network(x).flatten()[outputs])
    several = boxes(network, batch=4)
    box = Bounds(several.lower[2:3], several.upper[2:3])
    matrix = torch.eye(network.output_size, dtype=torch.float64)[outputs]
    with torch.no_grad():
        every, mine = crown_relaxation(network, box), crown_relaxation(network, box, only=only)
        torch.testing.assert_close(mine.outputs(matrix), every.outputs(matrix), rtol=1e-9, atol=1e-9)
    assert any(bool((mine.pre[i].lower < every.pre[i].lower - 1e-3).any()) for i in only)
