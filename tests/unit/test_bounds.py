"""Interval and CROWN bounds of whole networks: against samples, exact values, each other and results by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from weakref import ref

import pytest
import torch
from torch import Tensor

from tests.support.bounds import alpha_lower_bounds, alpha_preactivation_bounds, both_signs, linear_lower_bounds
from tests.support.exact import exact_outputs
from tests.support.families import Random, boxes, points
from verifiable_relu.bounds import (
    TUNING,
    Ascent,
    Bounds,
    Tuning,
    crown_relaxation,
    interval_bounds,
    preactivation_bounds,
)
from verifiable_relu.bounds.rounding import covers
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Gelu, LeakyRelu, Linear, Relu, Sigmoid, Tanh

Act = Callable[[Builder, int], int]


def _act(kind: type[Activation], **parameters: float) -> Act:
    def add(build: Builder, x: int) -> int:
        tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in parameters.items()}
        return build.activation(x, kind, f"act{x}", **tensors)

    return add


ACTS: dict[str, Act] = {
    "relu": _act(Relu),
    "leaky": _act(LeakyRelu, slope=0.1),
    "leaky1.5": _act(LeakyRelu, slope=1.5),
    "sigmoid": _act(Sigmoid),
    "tanh": _act(Tanh),
    "gelu1": _act(Gelu, lam=1.0),
    "gelu5": _act(Gelu, lam=5.0),
    "gelu160": _act(Gelu, lam=160.0),
    "gelu1e4": _act(Gelu, lam=1e4),
}
acts = pytest.mark.parametrize("act", ACTS.values(), ids=ACTS.keys())


def mlp(act: Act, seed: int = 0, sizes: tuple[int, ...] = (6, 9, 8, 3)) -> Network:
    rng, build = Random(seed), Builder(sizes[:1])
    x = 0
    for i, (width, out) in enumerate(pairwise(sizes)):
        x = build.linear(x, rng.normal(out, width) / width**0.5, rng.normal(out) / 2, f"fc{i}")
        x = act(build, x) if i < len(sizes) - 2 else x
    return build.network(x, name="mlp")


def mixed(act: Act, seed: int = 0) -> Network:
    """A network with every kind of node: grouped, strided, dilated and unevenly padded convolutions, a branch …"""
    rng, build = Random(seed), Builder((2, 5, 6))
    x = build.scale(0, "normalise", center=rng.normal(2, 1, 1), scale=0.5 + rng.uniform(2, 1, 1))
    x = build.conv2d(
        x, rng.normal(4, 1, 3, 3) / 3, rng.normal(4) / 2, "conv1", stride=(1, 1), padding=(1, 1, 1, 1), groups=2
    )
    before = x = act(build, x)
    x = build.conv2d(x, rng.normal(4, 4, 3, 3) / 6, rng.normal(4) / 2, "conv2", padding=(1, 1, 1, 1))
    x = build.add(act(build, x), before, "add")
    x = build.conv2d(x, rng.normal(3, 4, 2, 2) / 4, None, "conv3", stride=(2, 1), padding=(1, 0, 0, 2), dilation=(1, 2))
    x = build.permute(act(build, x), (2, 0, 1), "permute")
    x = build.reshape(x, (build.nodes[x].size,), "flatten")
    x = build.linear(x, rng.normal(5, build.nodes[x].size) / 6, rng.normal(5), "fc1")
    x = build.add(build.scale(act(build, x), "double", scale=rng.normal(5)), x, "shortcut")
    return build.network(build.linear(x, rng.normal(3, 5), rng.normal(3), "fc2"), name="mixed")


NETWORKS: dict[str, Callable[[Act], Network]] = {"mlp": mlp, "mixed": mixed}
networks = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS.keys())


def output_bounds(network: Network, box: Bounds, tuning: Tuning = TUNING, **options: object) -> Tensor:
    """CROWN's lower bounds (rows,) of every output and its negative."""
    matrix, sample = both_signs(network.output_size, len(box.lower))
    pre = preactivation_bounds(network, box, tuning=tuning)
    return linear_lower_bounds(network, box, pre, matrix, sample, tuning=tuning, **options)  # type: ignore[arg-type]


def assert_inside(bounds: Bounds, values: Tensor) -> None:
    assert bool((bounds.lower.double() <= values.amin(0)).all())
    assert bool((bounds.upper.double() >= values.amax(0)).all())


@pytest.mark.combined
@networks
@acts
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
def test_every_node_stays_within_its_bounds(make: Callable[[Act], Network], act: Act, dtype: torch.dtype) -> None:
    network = make(act).to(dtype)
    exact, box = network.to(torch.float64), boxes(network)
    box = Bounds(box.lower.to(dtype), box.upper.to(dtype))
    x = points(Bounds(box.lower.double(), box.upper.double()))
    values = [v.unflatten(0, x.shape[:2]) for v in exact.values(x.flatten(0, 1))]
    for bounds, value in zip(interval_bounds(network, box), values, strict=True):
        assert_inside(bounds, value)
    relaxation = crown_relaxation(network, box)
    for index, value in enumerate(values):
        bounds = relaxation.bounds(index)
        assert_inside(bounds, value)
    for index, bounds in relaxation.pre.items():
        assert_inside(bounds, values[network.nodes[index].inputs[0]])
    matrix, sample = both_signs(network.output_size, len(box.lower))
    reached = torch.einsum("ro,pro->pr", matrix, values[-1][:, sample])
    for intervals in (False, True):
        lower = output_bounds(network, box, intervals=intervals)
        assert bool((lower.double() <= reached.amin(0)).all())


@pytest.mark.combined
@networks
@acts
def test_samples_reach_close_to_the_bounds(make: Callable[[Act], Network], act: Act) -> None:
    """On small boxes, linear bounds are close to sampled values; bounds that are too wide would pass other tests."""
    network = make(act)
    box = boxes(network)
    small = Bounds(box.lower[:2], box.upper[:2])
    middle = (small.lower + small.upper) / 2
    small = Bounds(middle - 1e-6, middle + 1e-6)
    gradient = torch.autograd.functional.jacobian(lambda x: network(x).sum(0), middle)
    reach = 1e-6 * gradient.abs().flatten(2).sum(2).T
    at = network(middle)
    best = torch.cat([at - reach, -at - reach], 1).flatten()
    lower = output_bounds(network, small)
    # A neuron of 1e4-GELU is curved on 1e-4 and bends within this box.
    torch.testing.assert_close(lower, best, rtol=0, atol=3e-8)


@pytest.mark.combined
@networks
@acts
def test_crown_is_never_looser_than_intervals(make: Callable[[Act], Network], act: Act) -> None:
    network = make(act)
    box = boxes(network)
    interval, pre = interval_bounds(network, box), preactivation_bounds(network, box)
    tighter = 0
    for index, bounds in pre.items():
        wide = interval[network.nodes[index].inputs[0]]
        assert bool((bounds.lower >= wide.lower - 1e-13).all() and (bounds.upper <= wide.upper + 1e-13).all())
        tighter += int((bounds.upper - bounds.lower < 0.99 * (wide.upper - wide.lower)).sum())
    assert tighter > 0


@pytest.mark.combined
@networks
@acts
def test_a_batch_is_its_samples(make: Callable[[Act], Network], act: Act) -> None:
    network = make(act)
    box = boxes(network)
    together = output_bounds(network, box)
    alone = [output_bounds(network, Bounds(box.lower[i : i + 1], box.upper[i : i + 1])) for i in range(len(box.lower))]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-11, atol=1e-11)


@networks
@pytest.mark.parametrize("intervals", (False, True))
def test_rows_may_come_in_any_order(make: Callable[[Act], Network], intervals: bool) -> None:
    """Bounds do not depend on the order of the rows, on their number per sample, or on a stop function."""
    network = make(ACTS["relu"])
    box = boxes(network, batch=4)
    relaxation = crown_relaxation(network, box)
    matrix, sample = both_signs(network.output_size, 4)
    matrix = matrix * (1 + torch.arange(len(matrix)).double())[:, None]
    found = relaxation.outputs(matrix, sample, intervals=intervals)
    each = [relaxation.outputs(m[None], s[None], intervals=intervals) for m, s in zip(matrix, sample, strict=True)]
    torch.testing.assert_close(found, torch.cat(each), rtol=1e-11, atol=1e-11)
    for memory in (1, 1 << 30):
        torch.testing.assert_close(
            relaxation.outputs(matrix, intervals=intervals, memory=memory), found, rtol=1e-11, atol=1e-11
        )
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(len(matrix), generator=generator)
    backwards, turned = torch.arange(len(matrix) - 1, -1, -1), torch.arange(len(matrix)).reshape(4, -1).T.flatten()
    for order in (shuffled, backwards, turned, shuffled[:8], torch.arange(8), turned[:0], torch.arange(6).repeat(4)):
        for stop in (None, lambda: False):
            other = relaxation.outputs(matrix[order], sample[order], intervals=intervals, stop=stop)
            torch.testing.assert_close(other, found[order], rtol=1e-11, atol=1e-11)


@networks
def test_of_no_boxes_there_are_no_bounds(make: Callable[[Act], Network]) -> None:
    network = make(ACTS["relu"])
    box = Bounds(*(torch.zeros(0, *network.input_shape).double() for _ in range(2)))
    matrix, sample = torch.zeros(0, network.output_size).double(), torch.zeros(0, dtype=torch.long)
    for intervals in (False, True):
        assert linear_lower_bounds(network, box, {}, matrix, sample, intervals=intervals).shape == (0,)
    assert all(bounds.lower.shape[0] == 0 for bounds in preactivation_bounds(network, box).values())


def moved(act: Act) -> Network:
    """A network in which numbers of both signs are reshaped and permuted before an activation."""
    rng, build = Random(0), Builder((2, 3, 4))
    x = build.conv2d(0, rng.normal(3, 2, 2, 2), rng.normal(3) - 3, "conv")
    x = act(build, build.reshape(build.permute(x, (2, 0, 1), "permute"), (18,), "flatten"))
    return build.network(build.linear(x, rng.normal(2, 18), None, "out"), name="moved")


@networks
def test_a_relaxation_is_freed_at_once(make: Callable[[Act], Network]) -> None:
    """Nothing that a relaxation holds needs the garbage collector to be freed."""
    network = make(ACTS["relu"])
    box = boxes(network)
    matrix, sample = both_signs(network.output_size, len(box.lower))
    gc.collect()
    gc.disable()
    try:
        relaxation = crown_relaxation(network, box)
        for intervals in (False, True):
            relaxation.outputs(matrix, sample, intervals=intervals)
        kept = [ref(part) for part in (relaxation, relaxation.nodes, relaxation.nodes.point(1))]
        assert all(part() is not None for part in kept)
        del relaxation
        assert all(part() is None for part in kept)
    finally:
        gc.enable()


@acts
def test_points_are_enclosed_by_a_hair(act: Act) -> None:
    """Bounds over a point contain the exact value and are apart by the rounding slack only."""
    network = mlp(act)
    x = Random(3).normal(6, 6)
    box = Bounds(x, x)
    interval = interval_bounds(network, box)[-1]
    lower = output_bounds(network, box).reshape(6, 2, 3)
    for i in range(6):
        for j, exact in enumerate(exact_outputs(network, [Fraction(v) for v in x[i].tolist()])):
            assert Fraction(float(interval.lower[i, j])) < exact < Fraction(float(interval.upper[i, j]))
            assert Fraction(float(lower[i, 0, j])) < exact < -Fraction(float(lower[i, 1, j]))
    assert float((interval.upper - interval.lower).max()) < 1e-12
    assert float((-lower[:, 1] - lower[:, 0]).max()) < 2e-11


def test_by_hand() -> None:
    """The network on [−1, 1]² is a = relu(x₁ + x₂ + 1), b = relu(x₁ − x₂ − ½), v = a + b − 2, y = relu(v).

    a's input is in [−1, 3], so a ≥ x₁ + x₂ + 1 and a ≤ ¾·(x₁ + x₂ + 1) + ¾; b's in [−5/2, 3/2], so b ≥ 0 and
    b ≤ ⅜·(x₁ − x₂ − ½) + 15/16. So x₁ + x₂ − 1 ≤ v ≤ 9/8·x₁ + 3/8·x₂ + ¼, that is −3 ≤ v ≤ 7/4; intervals have
    −2 ≤ v ≤ 5/2. With both, v is in [−2, 7/4], and 0 ≤ y ≤ 7/15·(v + 2) ≤ 7/4.
    """
    build, relu = Builder((2,)), ACTS["relu"]
    x = relu(build, build.linear(0, torch.tensor([[1.0, 1], [1, -1]]), torch.tensor([1.0, -0.5]), "hidden"))
    v = build.linear(x, torch.tensor([[1.0, 1.0]]), torch.tensor([-2.0]), "v")
    shallow = build.network(v, name="shallow").to(torch.float64)
    deep = build.network(relu(build, v), name="deep").to(torch.float64)
    box = Bounds(torch.full((1, 2), -1.0).double(), torch.ones(1, 2).double())

    interval = interval_bounds(shallow, box)
    assert interval[1].lower[0].tolist() == pytest.approx([-1, -2.5], abs=2e-13)
    assert interval[1].upper[0].tolist() == pytest.approx([3, 1.5], abs=2e-13)
    assert [float(interval[-1].lower), float(interval[-1].upper)] == pytest.approx([-2, 2.5], abs=2e-13)
    assert output_bounds(shallow, box).tolist() == pytest.approx([-3, -1.75], abs=2e-13)
    pre = preactivation_bounds(deep, box)[4]
    assert [float(pre.lower), float(pre.upper)] == pytest.approx([-2, 1.75], abs=2e-13)
    assert output_bounds(deep, box).tolist() == pytest.approx([0, -1.75], abs=2e-13)


@networks
@pytest.mark.parametrize("name", ["relu", "gelu160", "tanh"])
def test_bounds_can_be_trained_on(make: Callable[[Act], Network], name: str) -> None:
    network = make(ACTS[name])
    weights = [node.weight.requires_grad_() for node in network.nodes if isinstance(node, Linear)]
    for intervals in (False, True):
        total = output_bounds(network, boxes(network, batch=3), intervals=intervals).sum()
        for gradient in torch.autograd.grad(total, weights):
            assert bool(torch.isfinite(gradient).all()) and bool((gradient != 0).any())


def test_nan_proves_nothing() -> None:
    network = mlp(ACTS["relu"])
    lower, upper = torch.zeros(1, 6).double(), torch.ones(1, 6).double()
    upper[0, 2] = float("nan")
    assert bool(torch.isnan(output_bounds(network, Bounds(lower, upper))).all())


@pytest.mark.combined
@networks
@acts
def test_every_choice_of_lines_is_sound(make: Callable[[Act], Network], act: Act) -> None:
    network, box = make(act), boxes(make(act))
    x = points(box)
    values = network(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    matrix, sample = both_signs(network.output_size, len(box.lower))
    reached = torch.einsum("ro,pro->pr", matrix, values[:, sample]).amin(0)
    relaxation = crown_relaxation(network, box)
    last, rng = len(network.nodes) - 1, Random(5)
    for slope in (0.0, 1.0, None, None):
        lines = {}
        for index in network.activations:
            shape = (len(sample), *network.nodes[index].shape)
            chosen = rng.uniform(*shape) if slope is None else torch.full(shape, slope, dtype=torch.float64)
            lines[index] = relaxation.lines.chosen(index, sample, chosen)
        lower, _ = relaxation.lower(last, matrix, sample, lines=lines)
        assert bool((lower <= reached).all())
        rough, _ = relaxation.lower(last, matrix, sample, lines=lines, rounded=False)
        assert bool((lower < rough).all())
        torch.testing.assert_close(lower, rough, rtol=1e-9, atol=1e-9)


@pytest.mark.combined
@networks
@pytest.mark.parametrize("act", [ACTS[name] for name in ("relu", "leaky1.5", "tanh", "gelu5")])
def test_alpha_is_sound_and_never_looser_than_crown(make: Callable[[Act], Network], act: Act) -> None:
    network, box = make(act), boxes(make(act))
    x = points(box)
    values = [v.unflatten(0, x.shape[:2]) for v in network.values(x.flatten(0, 1))]
    matrix, sample = both_signs(network.output_size, len(box.lower))
    reached = torch.einsum("ro,pro->pr", matrix, values[-1][:, sample]).amin(0)
    pre, tight = preactivation_bounds(network, box), alpha_preactivation_bounds(network, box, Ascent(steps=4))
    for index, bounds in tight.items():
        assert_inside(bounds, values[network.nodes[index].inputs[0]])
        # Not neuron by neuron: tighter bounds of one layer can change the lines of the next for the worse.
        width, before = bounds.upper - bounds.lower, pre[index].upper - pre[index].lower
        assert float(width.mean()) <= float(before.mean()) * (1 + 1e-12)
    crown = linear_lower_bounds(network, box, pre, matrix, sample)
    alpha = alpha_lower_bounds(network, box, pre, matrix, sample, Ascent(steps=10))
    best = alpha_lower_bounds(network, box, tight, matrix, sample, Ascent(steps=10))
    assert bool((alpha <= reached).all()) and bool((best <= reached).all())
    # float32 can take one choice for the better one that is worse by its rounding.
    slack = 1e-5 * (1 + crown.abs())
    assert bool((alpha >= crown - slack).all())
    assert float((alpha - crown).mean()) > 1e-3
    assert float((best - crown).mean()) > 1e-3


def test_an_activation_of_an_activation_that_others_use() -> None:
    """Rows tighten the box of the first activation after its centre was taken, and another map's intervals use it."""
    smaller = 0
    for seed in range(30):
        rng, build = Random(seed), Builder((4,))
        x = build.activation(build.linear(0, rng.normal(6, 4), rng.normal(6), "first"), Relu, "one")
        x = build.activation(build.linear(x, rng.normal(6, 6), rng.normal(6), "second"), Relu, "two")
        y = build.linear(build.activation(x, Sigmoid, "three"), rng.normal(3, 6), rng.normal(3), "same")
        z = build.linear(x, rng.normal(3, 6), rng.normal(3), "other")
        network = build.network(build.activation(build.add(y, z, "sum"), Relu, "four"), name="shared")
        box = boxes(network)
        relaxation = crown_relaxation(network, box)
        smaller += relaxation.nodes.interval(x) is not relaxation.bounds(x)
        relaxation.advance(len(network.nodes) - 1)
        inside = points(box)
        values = network.values(inside.flatten(0, 1))
        for value, bounds in zip(values, relaxation.nodes.values, strict=True):
            assert_inside(bounds, value.unflatten(0, inside.shape[:2]))
    assert smaller


def test_alpha_reaches_the_exact_bound_where_slopes_can() -> None:
    """The minimum of relu(x) − relu(x) + x/2 over [−1, 1] is −½; CROWN's adaptive slopes lose up to 1."""
    build = Builder((1,))
    x = build.linear(0, torch.ones(2, 1, dtype=torch.float64), None, "copy")
    x = ACTS["relu"](build, x)
    out = build.linear(x, torch.tensor([[1.0, 1.0]], dtype=torch.float64), None, "sum")
    out = build.add(out, build.scale(0, "shift", scale=torch.tensor(-1.0).double()), "out")
    network = build.network(out, name="by hand")
    box = Bounds(torch.tensor([[-1.0]]).double(), torch.tensor([[1.5]]).double())
    matrix, sample = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    pre = preactivation_bounds(network, box)
    crown = linear_lower_bounds(network, box, pre, matrix, sample)
    alpha = alpha_lower_bounds(network, box, pre, matrix, sample, Ascent(steps=60))
    # relu(x) + relu(x) − x = |x| ≥ 0: slopes (½, ½) or (0, 1) prove it; CROWN's (1, 1) leave x, which is −1 at worst.
    assert float(crown) < -0.99
    assert -1e-3 < float(alpha) <= 0


def test_alpha_stops_where_it_is_told_to() -> None:
    network, box = mlp(ACTS["relu"]), boxes(mlp(ACTS["relu"]))
    matrix, sample = both_signs(network.output_size, len(box.lower))
    pre = preactivation_bounds(network, box)
    crown = linear_lower_bounds(network, box, pre, matrix, sample)
    asked: list[Tensor] = []

    def settled(number: Tensor, best: Tensor) -> Tensor:
        asked.append(number)
        return number % 2 == 0

    with torch.no_grad():
        some = alpha_lower_bounds(network, box, pre, matrix, sample, Ascent(steps=10), settled=settled)
    every = alpha_lower_bounds(network, box, pre, matrix, sample, Ascent(steps=10))
    torch.testing.assert_close(some[1::2], every[1::2], rtol=0, atol=1e-5)
    torch.testing.assert_close(some[::2], crown[::2], rtol=0, atol=1e-5)
    assert len(asked[0]) == len(matrix) and all(bool((n % 2 == 1).all()) for n in asked[1:])
    stopped = alpha_lower_bounds(network, box, pre, matrix, sample, stop=lambda: True)
    torch.testing.assert_close(stopped, crown, rtol=0, atol=1e-12)


def images(act: Act, seed: int = 0) -> Network:
    """Convolutions of images that are large enough for windows; windows reach beyond every edge."""
    rng, build = Random(seed), Builder((2, 13, 12))
    x = build.scale(
        0, "normalise", center=rng.normal(2, 1, 1), scale=0.5 + rng.uniform(2, 1, 12), shift=rng.normal(2, 1, 1)
    )
    x = build.conv2d(x, rng.normal(3, 2, 2, 3) / 3, rng.normal(3) / 2, "conv1", padding=(1, 2, 0, 1))
    x = act(build, x)
    x = build.conv2d(x, rng.normal(4, 3, 3, 2) / 4, rng.normal(4) / 2, "conv2", stride=(2, 1), padding=(0, 1, 2, 1))
    x = build.conv2d(x, rng.normal(3, 4, 2, 2) / 4, rng.normal(3) / 2, "conv3", stride=(1, 2), padding=(1, 1, 1, 1))
    x = build.scale(x, "scale", scale=rng.normal(3, 1, 1), shift=rng.normal(3, 1, 1))
    before = x = act(build, x)
    x = build.conv2d(x, rng.normal(3, 3, 2, 3) / 3, rng.normal(3) / 2, "conv4", padding=(1, 1, 0, 1))
    x = act(build, build.add(x, before, "shortcut"))
    x = build.reshape(x, (build.nodes[x].size,), "flatten")
    x = act(build, build.linear(x, rng.normal(4, build.nodes[x].size) / 9, rng.normal(4), "fc1"))
    return build.network(build.linear(x, rng.normal(3, 4), rng.normal(3), "fc2"), name="images")


def test_gradients_reach_rows_past_a_shortcut_from_the_input() -> None:
    """There coefficients in float32 are those of two nodes at once."""
    rng, build = Random(0), Builder((1, 4, 4))
    x = ACTS["relu"](build, build.conv2d(0, rng.normal(1, 1, 3, 3).float().double(), None, "conv1", padding=(1,) * 4))
    x = build.conv2d(build.add(x, 0, "sum"), rng.normal(2, 1, 2, 2).float().double(), None, "conv2")
    network = build.network(build.reshape(x, (18,), "flat"), name="shortcut")
    relaxation = crown_relaxation(network, boxes(network, batch=2))
    assert relaxation.backward.float32.last_node > 0
    matrix = rng.normal(2, 18).requires_grad_()
    found = relaxation.lower(len(network.nodes) - 1, matrix, torch.arange(2))[0]
    (gradient,) = torch.autograd.grad(found.sum(), matrix)
    # Bounds grow with their rows: they are what their gradient makes of these.
    torch.testing.assert_close((gradient * matrix).sum(1), found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("memory", (1, 1 << 30))
def test_bounds_of_neurons_have_gradients_however_they_are_chunked(memory: int) -> None:
    """In chunks they are the same, and those of the weights are what differences say."""
    rng = Random(0)
    first, second = rng.normal(8, 6), rng.normal(8, 8)
    box = Bounds(-torch.ones(3, 6).double(), torch.ones(3, 6).double())

    def spread(weight: Tensor) -> Tensor:
        build = Builder((6,))
        x = ACTS["relu"](build, build.linear(0, weight, None, "in"))
        x = ACTS["relu"](build, build.linear(x, second, None, "hidden"))
        network = build.network(build.linear(x, torch.ones(1, 8).double(), None, "out"), name="mlp")
        bounds = preactivation_bounds(network, box, memory=memory)
        last = bounds[max(bounds)]
        return (last.upper - last.lower).sum()

    weight = first.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(spread(weight), weight)
    step = 1e-6 * rng.normal(8, 6)
    change = spread(first + step) - spread(first - step)
    torch.testing.assert_close(2 * (gradient * step).sum(), change, rtol=1e-4, atol=0)


def test_rounding_is_claimed_only_where_it_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert covers(mixed(ACTS["relu"]), torch.float64, "cpu") and covers(mixed(ACTS["relu"]), torch.float64, "cuda")
    assert not covers(mixed(ACTS["relu"]), torch.float32, "cpu")
    assert not covers(mixed(ACTS["relu"]), torch.float32, "cuda")
    assert covers(mlp(ACTS["relu"]), torch.float32, "cuda")
    for library, kind in ((torch.backends.mkldnn.matmul, "cpu"), (torch.backends.cuda.matmul, "cuda")):
        before = library.fp32_precision
        try:
            library.fp32_precision = "tf32"
            assert not covers(mlp(ACTS["relu"]), torch.float32, kind)
            assert covers(mlp(ACTS["relu"]), torch.float64, kind)
        finally:
            library.fp32_precision = before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not covers(mlp(ACTS["relu"]), torch.float32, "cpu")
    monkeypatch.setenv("CUBLAS_EMULATE_DOUBLE_PRECISION", "1")
    assert not covers(mlp(ACTS["relu"]), torch.float64, "cuda") and covers(mlp(ACTS["relu"]), torch.float64, "cpu")


@pytest.mark.parametrize("name", ["relu", "leaky1.5"])
def test_known_bounds_are_tightened_further(name: str) -> None:
    """Known bounds of one activation's input are used, and the inputs of the others are still bounded by rows."""
    network = mlp(ACTS[name], sizes=(6, 16, 16, 16, 3))
    box = boxes(network, batch=3)
    plain = crown_relaxation(network, box)
    first, second = network.activations[:2]
    middle = (plain.pre[first].lower + plain.pre[first].upper) / 2
    known = {first: Bounds(middle - 0.1, middle + 0.1)}
    found = crown_relaxation(network, box, known=known)
    assert bool((found.pre[first].lower >= known[first].lower).all())
    assert bool((found.pre[first].upper <= known[first].upper).all())
    width = [(r.pre[second].upper - r.pre[second].lower).mean() for r in (plain, found)]
    assert float(width[1]) < 0.9 * float(width[0])
    again = crown_relaxation(network, box, known=plain.pre)
    for index, bounds in again.pre.items():
        assert bool((bounds.lower >= plain.pre[index].lower).all() and (bounds.upper <= plain.pre[index].upper).all())
