"""The package's bounds against auto_LiRPA's: the same relaxations must give the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.bounds import linear_lower_bounds
from verifiable_relu.bounds import Bounds, Relaxation, crown_relaxation, interval_bounds, preactivation_bounds
from verifiable_relu.errors import InputError
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.module import from_torch
from verifiable_relu.network.nodes import Activation, Relu, Sigmoid, Tanh
from verifiable_relu.verifiers.auto_lirpa import Graph, bounded_module, library, quiet

try:
    library()
except InputError as missing:
    pytest.skip(str(missing), allow_module_level=True)


class Layers:
    """A network under construction, layer by layer, with random float64 weights."""

    def __init__(self, *shape: int, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.build, self.last = Builder(shape), 0

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def linear(self, out: int) -> Layers:
        size = self.build.nodes[self.last].size
        self.last = self.build.linear(self.last, self.normal(out, size) / size**0.5, self.normal(out) / 4, "fc")
        return self

    def conv(self, out: int, stride: int = 1) -> Layers:
        channels = self.build.shape(self.last)[0]
        weight = self.normal(out, channels, 3, 3) / (3 * channels**0.5)
        self.last = self.build.conv2d(
            self.last, weight, self.normal(out) / 4, "conv", stride=(stride, stride), padding=(1, 1, 1, 1)
        )
        return self

    def act(self, kind: type[Activation]) -> Layers:
        self.last = self.build.activation(self.last, kind, "act")
        return self

    def flatten(self) -> Layers:
        self.last = self.build.reshape(self.last, (self.build.nodes[self.last].size,), "flatten")
        return self

    def add(self, other: int) -> Layers:
        self.last = self.build.add(self.last, other, "add")
        return self

    def done(self) -> Network:
        return self.build.network(self.last, name="layers")


def mlp(kind: type[Activation] = Relu) -> Network:
    return Layers(8).linear(16).act(kind).linear(14).act(kind).linear(12).act(kind).linear(4).done()


def cnn() -> Network:
    layers = Layers(2, 6, 6).conv(4).act(Relu).conv(6, stride=2).act(Relu)
    return layers.flatten().linear(10).act(Relu).linear(3).done()


def residual() -> Network:
    layers = Layers(8).linear(12).act(Relu)
    kept = layers.last
    return layers.linear(12).act(Relu).linear(12).add(kept).act(Relu).linear(4).done()


def boxes(network: Network) -> Bounds:
    generator = torch.Generator().manual_seed(5)
    center = torch.randn(4, *network.input_shape, generator=generator, dtype=torch.float64)
    eps = torch.tensor([0.01, 0.05, 0.1, 0.3], dtype=torch.float64).reshape(-1, *[1] * len(network.input_shape))
    return Bounds(center - eps, center + eps)


def theirs(network: Network, box: Bounds, method: str) -> tuple[Bounds, dict[int, Bounds]]:
    """auto_LiRPA's bounds of the outputs, and its bounds of every activation's input that these rest on."""
    package, middle = library(), (box.lower + box.upper) / 2
    with quiet(torch.float64), torch.no_grad():
        # The library's sparse form of convolutions ("patches") fails on residual connections of vectors.
        settings = {"conv_mode": "matrix"}
        module = bounded_module()(Graph(network), torch.zeros_like(middle[:1]), settings, device="cpu")
        x = package.BoundedTensor(middle, package.PerturbationLpNorm(norm=np.inf, x_L=box.lower, x_U=box.upper))
        lower, upper = module.compute_bounds(x=(x,), method=method)
        acts = [node for node in module._modules.values() if type(node).__name__ in OPERATORS]
        pre = [Bounds(node.inputs[0].lower.double(), node.inputs[0].upper.double()) for node in acts]
    assert len(pre) == len(network.activations)
    return Bounds(lower, upper), dict(zip(network.activations, pre, strict=True))


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
def test_intervals_can_only_help(make: Callable[[], Network]) -> None:
    """The package intersects linear bounds with intervals, which the library does not: its bounds are never looser."""
    network = make()
    box = boxes(network)
    reference, _ = theirs(network, box, "backward")
    pre = preactivation_bounds(network, box)
    ours = both_sides(lambda rows, sample: linear_lower_bounds(network, box, pre, rows, sample), network, 4)
    assert bool((ours.upper - ours.lower <= (1 + 1e-6) * (reference.upper - reference.lower)).all())


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
        assert float((found.lower - expected.lower)[unstable].abs().max()) < 1e-6
        assert float((found.upper - expected.upper)[unstable].abs().max()) < 1e-6
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
    assert bool((width <= expected * (1 + 1e-4)).all())
    assert float((width / expected).min()) > 0.5


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
    package, middle = library(), (box.lower + box.upper) / 2
    with quiet(torch.float64), torch.no_grad():
        bounded = bounded_module()(module, torch.zeros_like(middle[:1]), {"conv_mode": "matrix"}, device="cpu")
        x = package.BoundedTensor(middle, package.PerturbationLpNorm(norm=np.inf, x_L=box.lower, x_U=box.upper))
        reference = Bounds(*bounded.compute_bounds(x=(x,), method="backward"))
    ours = both_sides(crown_relaxation(network, box).outputs, network, 4)
    width, expected = ours.upper - ours.lower, reference.upper - reference.lower
    assert float((width / expected).mean()) < 1
    assert bool((width <= expected * (1 + 1e-6)).all()) or isinstance(module[1], nn.ReLU)
