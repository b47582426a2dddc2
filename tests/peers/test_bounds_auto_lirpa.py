"""The package's bounds against auto_LiRPA's: the same relaxations must give the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.bounds import linear_lower_bounds
from tests.support.layers import Layers
from verifiable_relu.adapters.auto_lirpa import TracedNetwork
from verifiable_relu.bounds import Bounds, Relaxation, crown_relaxation, interval_bounds
from verifiable_relu.network.graph import Network
from verifiable_relu.network.module import from_torch
from verifiable_relu.network.nodes import Activation, Add, Relu, Sigmoid, Tanh

try:
    from verifiable_relu.search.solvers.auto_lirpa_import import library, library_settings
except ModuleNotFoundError as missing:
    pytest.skip(str(missing), allow_module_level=True)


def mlp(kind: type[Activation] = Relu) -> Network:
    layers = Layers(8, dtype=torch.float64).linear(16).add(kind).linear(14).add(kind).linear(12).add(kind)
    return layers.linear(4).network()


def cnn() -> Network:
    layers = Layers(2, 6, 6, dtype=torch.float64).conv(4, (3, 3), (1, 1, 1, 1)).add(Relu)
    layers.conv(6, (3, 3), (1, 1, 1, 1), stride=(2, 2)).add(Relu)
    return layers.flatten().linear(10).add(Relu).linear(3).network()


def residual() -> Network:
    layers = Layers(8, dtype=torch.float64).linear(12).add(Relu).linear(12).add(Relu).linear(12)
    return layers.add(Add, inputs=(2, 5)).add(Relu).linear(4).network()


def boxes(network: Network) -> Bounds:
    generator = torch.Generator().manual_seed(5)
    center = torch.randn(4, *network.input_shape, generator=generator, dtype=torch.float64)
    eps = torch.tensor([0.01, 0.05, 0.1, 0.3], dtype=torch.float64).reshape(-1, *[1] * len(network.input_shape))
    return Bounds(center - eps, center + eps)


def bounded(module: nn.Module, box: Bounds, method: str) -> tuple[Bounds, list[Any]]:
    """auto_LiRPA's bounds of the outputs, and its nodes."""
    middle = (box.lower + box.upper) / 2
    with library_settings(torch.float64), torch.no_grad():
        # The library's sparse form of convolutions ("patches") fails on residual connections of vectors.
        made = library.BoundedModule(module, torch.zeros_like(middle[:1]), {"conv_mode": "matrix"}, device="cpu")
        x = library.BoundedTensor(middle, library.PerturbationLpNorm(norm=np.inf, x_L=box.lower, x_U=box.upper))
        return Bounds(*made.compute_bounds(x=(x,), method=method)), list(made._modules.values())


def theirs(network: Network, box: Bounds, method: str) -> tuple[Bounds, dict[int, Bounds]]:
    """auto_LiRPA's bounds of the outputs, and its bounds of every activation's input that these rest on."""
    outputs, nodes = bounded(TracedNetwork(network), box, method)
    acts = [node.inputs[0] for node in nodes if type(node).__name__ in OPERATORS]
    pre = [Bounds(node.lower.double(), node.upper.double()) for node in acts]
    return outputs, dict(zip(network.activations, pre, strict=True))


OPERATORS = ("BoundRelu", "BoundSigmoid", "BoundTanh")


def both_sides(lower: Callable[[Tensor, Tensor], Tensor], network: Network, batch: int) -> Bounds:
    """Both bounds of every output, by a function that bounds rows (R, outputs) of samples (R,) from below."""
    eye = torch.eye(network.output_size, dtype=torch.float64).repeat(batch, 1)
    sample = torch.arange(batch).repeat_interleave(network.output_size)
    return Bounds(lower(eye, sample).reshape(batch, -1), -lower(-eye, sample).reshape(batch, -1))


def assert_equal(ours: Bounds, reference: Bounds) -> None:
    """Bounds are equal to within 1e-4 of the reference's width."""
    width = reference.upper - reference.lower
    assert float(((ours.lower - reference.lower).abs() / width).max()) < 1e-4
    assert float(((ours.upper - reference.upper).abs() / width).max()) < 1e-4


RELU = {"mlp": mlp, "cnn": cnn, "residual": residual}
relu = pytest.mark.parametrize("make", RELU.values(), ids=RELU.keys())


@pytest.mark.parametrize("make", [*RELU.values(), lambda: mlp(Sigmoid)], ids=[*RELU.keys(), "sigmoid"])
def test_interval_bounds_are_equal(make: Callable[[], Network]) -> None:
    network = make()
    box = boxes(network)
    reference, pre = theirs(network, box, "IBP")
    bounds = interval_bounds(network, box)
    assert_equal(bounds[-1], reference)
    for index, expected in pre.items():
        assert_equal(bounds[network.nodes[index].inputs[0]], expected)


@relu
def test_crown_is_equal_from_equal_preactivations(make: Callable[[], Network]) -> None:
    """The backward pass alone: from the library's bounds of the activations' inputs, both give the same bounds."""
    network = make()
    box = boxes(network)
    reference, pre = theirs(network, box, "backward")
    relaxation, last = Relaxation(network, box), len(network.nodes) - 1
    relaxation.advance(last, lambda index, _: pre[index])
    assert_equal(both_sides(lambda rows, sample: relaxation.lower(last, rows, sample)[0], network, 4), reference)


@relu
def test_crown_is_equal_all_the_way(make: Callable[[], Network]) -> None:
    """Without the package's intersection with intervals, the bounds of pre-activations are equal as well."""
    network = make()
    box = boxes(network)
    reference, pre = theirs(network, box, "backward")
    relaxation = Relaxation(network, box)

    def tighten(index: int, _: Bounds) -> Bounds:
        source = network.nodes[index].inputs[0]
        shape = network.nodes[source].shape
        size = network.nodes[source].size
        eye = torch.eye(size, dtype=torch.float64).repeat(4, 1).reshape(-1, *shape)
        sample = torch.arange(4).repeat_interleave(size)
        lower, upper = (relaxation.lower(source, rows, sample)[0].reshape(4, *shape) for rows in (eye, -eye))
        return Bounds(lower, -upper)

    relaxation.advance(len(network.nodes) - 1, tighten)
    for index, expected in pre.items():
        unstable = (expected.lower < 0) & (expected.upper > 0)
        found = relaxation.pre[index]
        width = (expected.upper - expected.lower)[unstable]
        assert float(((found.lower - expected.lower)[unstable].abs() / width).max()) < 1e-4
        assert float(((found.upper - expected.upper)[unstable].abs() / width).max()) < 1e-4
    last = len(network.nodes) - 1
    assert_equal(both_sides(lambda rows, sample: relaxation.lower(last, rows, sample)[0], network, 4), reference)


@pytest.mark.parametrize("kind", [Sigmoid, Tanh])
def test_smooth_crown_is_as_tight(kind: type[Activation]) -> None:
    """From the same pre-activations, bounds are as tight on average.

    The package's lines at the midpoint have the least area for each neuron, which is not always best for the output.
    """
    network = mlp(kind)
    box = boxes(network)
    reference, pre = theirs(network, box, "backward")
    ours = both_sides(lambda rows, sample: linear_lower_bounds(network, box, pre, rows, sample), network, 4)
    width, expected = ours.upper - ours.lower, reference.upper - reference.lower
    assert 0.5 < float((width / expected).mean()) < 1 + 1e-4


POOLS = {
    "pool": lambda: [nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)],
    "pool, relu": lambda: [nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)],
    "relu, pool": lambda: [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)],
    "pool within": lambda: [
        nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 6, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3)
    ],
}  # fmt: skip


@pytest.mark.parametrize("layers", POOLS.values(), ids=POOLS.keys())
def test_maxima_are_bounded_as_tightly(layers: Callable[[], list[nn.Module]]) -> None:
    """By CROWN: of every output where no ReLU makes ties of lower bounds, of which the library takes the first."""
    torch.manual_seed(3)
    module = nn.Sequential(*layers()).double()
    network = from_torch(module, (2, 6, 6)).to(torch.float64)
    box = boxes(network)
    reference, _ = bounded(module, box, "backward")
    ours = both_sides(crown_relaxation(network, box).outputs, network, 4)
    width, expected = ours.upper - ours.lower, reference.upper - reference.lower
    assert float((width / expected).mean()) < 1
    assert bool((width <= expected * (1 + 1e-6)).all()) or isinstance(module[1], nn.ReLU)
