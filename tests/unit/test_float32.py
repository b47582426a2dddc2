"""Coefficients in float32 within bounds in float64: no exact value is excluded, however sums round, at any size."""

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
from tests.support.summation import in_order
from verifiable_relu.bounds import TUNING, Bounds, Relaxation, Tuning, crown_relaxation, interval_bounds, rounding, sums
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Add, Conv2d, LeakyRelu, Linear, Relu
from verifiable_relu.rounding import unit_roundoff
from verifiable_relu.trust.exact import evaluate_exact

EVERY = replace(TUNING, window_matrix_entries=0, window_share=1.0, interval_products=1)
"""Windows and sums in float32 wherever they may be."""


class Draw:
    """A source of random tensors in float64 of very different magnitudes; weights are float32 numbers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        value = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        if self.random.random() < 0.3:
            value = value * 2.0 ** torch.randint(-6, 7, shape, generator=self.generator)
        return value * 10 ** self.random.uniform(-8, 8) if self.random.random() < 0.2 else value

    def opposed(self, first: bool, *shape: int) -> Tensor:
        """Weights of pairs of nearly equal outputs that the next map subtracts, so that large coefficients cancel."""
        weight, out, inputs = self(*shape).float().double(), 2 * (shape[0] // 2), 2 * (shape[1] // 2)
        weight[1:out:2] = weight[:out:2]
        if not first:
            weight[:, 1:inputs:2] = -weight[:, :inputs:2]
        noise = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return (weight * (1 + 2.0**-16 * noise)).float().double()


def _images(draw: Draw) -> Network:
    """Convolutions of any stride and padding with residual sums; without activations rounding alone shows."""
    rng, build, x = draw.random, Builder((2, 4, 3)), 0
    linear = rng.random() < 0.7
    for i in range(rng.randint(2, 3)):
        channels, height, width = build.shape(x)
        kernel = rng.randint(1, min(3, height)), rng.randint(1, min(3, width))
        # Up to three, so that outputs may see padding alone; with strides less, so that not all do.
        stride = (1, 1) if rng.random() < 0.5 else (rng.randint(1, 3), rng.randint(1, 3))
        top, left, bottom, right = (rng.randint(0, 3 if stride == (1, 1) else k - 1) for k in kernel * 2)
        out = rng.choice((2, 4))
        weight = draw.opposed(i == 0, out, channels, *kernel)
        x = build.conv2d(x, weight, draw(out), f"conv{i}", padding=(top, left, bottom, right), stride=stride)
        x = x if linear else build.activation(x, Relu, f"act{i}")
        if rng.random() < 0.3:
            inner = draw(out, out, 3, 3).float().double()
            x = build.add(build.conv2d(x, inner, draw(out), f"inner{i}", padding=(1, 1, 1, 1)), x, f"sum{i}")
    flat = math.prod(build.shape(x))
    return build.network(build.linear(build.reshape(x, (flat,), "flat"), draw(2, flat), draw(2), "out"), name="images")


def _dense(draw: Draw) -> Network:
    """Linear maps with residual sums; if there are activations, most neurons can be inactive."""
    rng, build, x = draw.random, Builder((5,)), 0
    linear = rng.random() < 0.5
    for i in range(rng.randint(2, 4)):
        inside, out = build.shape(x)[0], rng.choice((2, 8, 13, 30))
        weight = draw.opposed(i == 0, out, inside)
        x = build.linear(x, weight, draw(out) - rng.choice((0, 0.7)) * weight.abs().sum(1), f"fc{i}")
        x = x if linear else build.activation(x, Relu, f"act{i}")
        if rng.random() < 0.3:
            x = build.add(build.linear(x, draw(out, out).float().double(), draw(out), f"inner{i}"), x, f"sum{i}")
    last = draw(2, build.shape(x)[0]).float().double()
    return build.network(build.linear(x, last, draw(2), "out"), name="dense")


def exact(net: Network, index: int, x: Tensor) -> list[Fraction]:
    """The exact values of a node at a point."""
    return evaluate_exact(Network(net.nodes[: index + 1]), [Fraction(v) for v in x.flatten().tolist()])


def excluded(bound: Tensor, values: list[Fraction]) -> int:
    """The number of values below their lower bounds; a bound of NaN excludes none."""
    return sum(b > v for b, v in zip(bound.tolist(), values, strict=True) if not math.isnan(b))


def last_in_float32(net: Network, box: Bounds, every: bool = False) -> int:
    return Relaxation(net, box, float32=every).backward.float32.last_node


def _cases(make: Callable[[Draw], Network], count: int) -> Iterator[tuple[Network, Bounds]]:
    """Networks with a batch of two boxes, one that is a million times narrower, and one point."""
    for seed in range(count):
        draw = Draw(seed)
        net = make(draw)
        center = draw(4, *net.input_shape)
        width = draw.random.choice((0, 1e-6, 0.3, 1, 1, 30)) * center.abs().amax()
        width = width * torch.rand(center.shape, generator=draw.generator, dtype=torch.float64)
        width = width * torch.tensor([1, 1, 1e-6, 0]).double().reshape(-1, *[1] * len(net.input_shape))
        yield net, Bounds(center - width, center + width)


def _wrong(net: Network, box: Bounds, tuning: Tuning, every: bool) -> int:
    """The number of exact values that bounds of outputs and of neurons exclude, where linear bounds are attained."""
    wrong, relaxation, samples = 0, crown_relaxation(net, box, float32=every, tuning=tuning), torch.arange(4)

    def attained(target: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(4, rows) bounds of rows of every sample, and the points of the boxes at which they are attained."""
        rows = rows.repeat(4, *[1] * (rows.dim() - 1))
        found, reached = relaxation.lower(target, rows, samples, coefficients=True)
        assert reached is not None
        found = torch.fmax(found, relaxation.lower(target, rows, samples)[0])
        a = relaxation.of_input(reached).reshape(4, -1, *net.input_shape)
        return found.unflatten(0, (4, -1)), torch.where(a > 0, box.lower[:, None], box.upper[:, None])

    rows, last = torch.tensor([[1.0, 0], [0, -1], [1, -3]]).double(), len(net.nodes) - 1
    found, at = attained(last, rows)
    for sample, (i, row) in itertools.product((0, 3), enumerate(rows.tolist())):
        y = exact(net, last, at[sample, i])
        value = sum((Fraction(c) * v for c, v in zip(row, y, strict=True)), Fraction(0))
        wrong += excluded(found[sample, i : i + 1], [value])
    for index, node in enumerate(net.nodes):
        if not isinstance(node, Conv2d | Linear | Add) or index <= relaxation.nodes.start:
            continue
        neuron, sign = torch.tensor([0, node.size // 2, node.size - 1]), torch.tensor([1.0, -1.0, 1.0]).double()
        alone = relaxation.neurons(index, neuron.repeat(4), sign.repeat(4), samples).unflatten(0, (4, 3))
        whole, at = attained(index, (torch.eye(node.size).double()[neuron] * sign[:, None]).reshape(-1, *node.shape))
        for sample, i in itertools.product((1, 2), range(3)):
            value = int(sign[i]) * exact(net, index, at[sample, i])[neuron[i]]
            wrong += excluded(torch.stack([alone[sample, i], whole[sample, i]]), [value, value])
    return wrong


@pytest.mark.thorough
@pytest.mark.parametrize("every", (False, True), ids=("first layers", "all layers"))
@pytest.mark.parametrize("make", (_images, _dense))
def test_no_exact_value_is_excluded(make: Callable[[Draw], Network], every: bool) -> None:
    for seed, (net, box) in enumerate(_cases(make, draws(32))):
        assert not _wrong(net, box, EVERY, every), seed


@pytest.mark.thorough
@pytest.mark.parametrize("make", (_images, _dense))
def test_with_a_part_of_what_is_granted_to_float32_exact_values_are_excluded(
    make: Callable[[Draw], Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = rounding.backward_single
    monkeypatch.setattr(rounding, "backward_single", lambda *given: full(*given) / 64)
    assert any(_wrong(net, box, EVERY, True) for net, box in _cases(make, 32))


# ---------------------------------------------------------------- sums in any order


@pytest.mark.parametrize("place", ("concretise", "summed_single"))
def test_sums_in_float32_may_be_taken_in_any_order(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All coefficients but the first are lost beside it in sums of radii, or of lower lines in relu(x) + relu(−x)."""

    def summed(products: Tensor, axes: int, tuning: Tuning) -> Tensor:
        products = products.flatten(-axes)
        return in_order(in_order(products.unflatten(-1, sums.lines(products.shape[-1], tuning.sum_length))))

    monkeypatch.setattr(sums, "last_axes", summed)
    relu = place == "summed_single"
    small, length = 0.99 * unit_roundoff(torch.float32), sums.lines(64 * 64, TUNING.sum_length)[1]
    a = torch.full((64 * 64,), small / length, dtype=torch.float64)
    a[:length] = small
    a[0] = 1
    a = a.float().double() * (1 if relu else -1)
    build = Builder((1, 64, 64))
    x = build.conv2d(0, torch.tensor([1.0, -1.0][: 1 + relu]).double().reshape(-1, 1, 1, 1), None, "conv")
    net = build.network(build.activation(x, Relu, "act") if relu else x, name="image")
    box = Bounds(-torch.ones(1, 1, 64, 64).double(), torch.ones(1, 1, 64, 64).double())
    value = Fraction(0) if relu else sum((Fraction(c) for c in a.tolist()), Fraction(0))
    rows = a.reshape(1, 1, 64, 64).expand(1, 1 + relu, 64, 64)

    def wrong() -> int:
        return excluded(crown_relaxation(net, box).lower(len(net.nodes) - 1, rows, torch.tensor([0]))[0], [value])

    assert last_in_float32(net, box) == len(net.nodes) - 1 and not wrong()
    monkeypatch.setattr(rounding, place, lambda *given: given[:2] if relu else given[0])
    assert wrong()


@pytest.mark.parametrize("size", (5, 101, 784))
def test_intervals_of_a_batch_in_float32_are_rounded_outward(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact ends are attained, since no weight is negative; sums lose what they can lose in any order."""
    monkeypatch.setattr(torch, "bmm", lambda a, b: in_order(a[:, :, None] * b.mT[:, None]))
    small = torch.full((size,), 0.99 * unit_roundoff(torch.float32), dtype=torch.float64)
    small[:: sums.lines(size, EVERY.sum_length)[1]] = 1
    weight = torch.stack([small, torch.full((size,), 1 / 3).double()]).float().double()
    build = Builder((size,))
    net = build.network(build.linear(0, weight, None, "linear"), name="linear")
    reach = torch.rand(5, size, generator=Draw(1).generator, dtype=torch.float64)
    reach[0], reach[1] = 1, 1 + 0.99 * unit_roundoff(torch.float32)

    def wrong() -> int:
        bounds = interval_bounds(net, Bounds(-reach, reach), tuning=EVERY)[-1]
        pairs = zip(-bounds.upper, reach, strict=True)
        return sum(excluded(upper, [-v for v in exact(net, 1, end)]) for upper, end in pairs)

    assert not wrong()
    granted = rounding.gamma
    monkeypatch.setattr(rounding, "gamma", lambda n, dtype: granted(n, dtype) * (dtype != torch.float32))
    assert wrong()


# ---------------------------------------------------------------- the ends of float32's range


@pytest.mark.parametrize("flushing", (False, True))
def test_intervals_at_the_ends_of_float32_exclude_nothing(flushing: bool) -> None:
    """Radii, centres or their products underflow to zero in float32; others, or their sums, are infinite there."""
    tiny = torch.finfo(torch.float32).tiny
    cases = [(1e-42, 1.0), (1e-30, 1e-20), (1e-46, 1e38), (0.9 * tiny, 3e38), (1.1 * tiny, 0.5), (1e-300, 1e30)]
    cases += [(1e39, 1.0), (1e39, 0.0), (3e38, 2.0), (1e20, 1e20), (1e300, 1e10), (4e38, 1e-37), (4e37, 2.0)]
    # Where it is not supported, nothing is flushed.
    torch.set_flush_denormal(flushing)
    try:
        for (size, weight), shift in itertools.product(cases, (0, 1, -1)):
            build = Builder((7,))
            row = torch.full((1, 7), weight, dtype=torch.float64).float().double()
            net = build.network(build.linear(0, torch.cat([row, -row]), None, "linear"), name="linear")
            ends = [torch.full((4, 7), (8 * shift + side) * size, dtype=torch.float64) for side in (-1, 1)]
            bounds = interval_bounds(net, Bounds(*ends), tuning=EVERY)[-1]
            for end in ends:
                y = exact(net, 1, end[0])
                assert not excluded(bounds.lower[0], y) and not excluded(-bounds.upper[0], [-v for v in y])
    finally:
        torch.set_flush_denormal(False)


def test_a_slope_that_float32_takes_for_zero_excludes_nothing() -> None:
    for reach in (1.0, 1e9, 1e20):
        build, one = Builder((1,)), torch.ones(1, 1).double()
        x = build.activation(build.linear(0, one, None, "in"), LeakyRelu, "act", slope=6e-46 * one[0])
        net = build.network(build.linear(x, (1e20 * one).float().double(), None, "out"), name="slope")
        box = Bounds(-3 * reach * one, -reach * one)
        found = crown_relaxation(net, box, float32=True).lower(3, one, torch.tensor([0]))[0]
        assert last_in_float32(net, box, True) == 3 and bool(found.isfinite())
        assert not excluded(found, exact(net, 3, box.lower))


@pytest.mark.parametrize("large", (1e25, 1e30, 1e40))
def test_coefficients_that_overflow_prove_nothing(large: float) -> None:
    """Products of weights are finite in float64, but they, their sums or the inputs overflow in float32."""
    for middle, signs in itertools.product((-1.0, 0.0, 1.0), itertools.product((1, -1), repeat=2)):
        build = Builder((2, 2, 2))
        scale = min(large, 1e30)
        weight = torch.tensor([[1.0, -0.75], [0.5, 1.5]]).double() * scale
        x = build.conv2d(0, signs[0] * weight.float().double().reshape(2, 2, 1, 1), None, "conv1")
        x = build.conv2d(x, signs[1] * weight.float().double()[:, :, None, None].expand(2, 2, 2, 2), None, "conv2")
        net = build.network(build.linear(build.reshape(x, (2,), "flat"), weight, None, "out"), name="large")
        center = torch.full((1, 2, 2, 2), middle).double() * (large / scale)
        box = Bounds(center - large / scale / 2, center + large / scale / 2)
        rows = torch.cat([torch.eye(2), -torch.eye(2)]).double()
        found = crown_relaxation(net, box).lower(len(net.nodes) - 1, rows, torch.tensor([0]))[0]
        assert last_in_float32(net, box) > 0 and not bool(found.isposinf().any())
        for corner in (box.lower, box.upper):
            y = exact(net, len(net.nodes) - 1, corner)
            assert not excluded(found, [*y, *(-v for v in y)])


def test_coefficients_that_underflow_exclude_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of two float32 numbers underflows, and a coefficient is below float32's range."""

    def wrong() -> list[int]:
        found = []
        for outer, inner in ((1e-20, 1e-27), (1e-50, 1e3)):
            build = Builder((1, 1, 1))
            weight = torch.tensor([inner]).double().float().double().reshape(1, 1, 1, 1)
            x = build.reshape(build.conv2d(0, weight, None, "conv"), (1,), "flat")
            x = build.linear(x, torch.tensor([[outer]], dtype=torch.float64), None, "out")
            net, end = build.network(x, name="small"), torch.full((1, 1, 1, 1), 1e38, dtype=torch.float64)
            bound = crown_relaxation(net, Bounds(-end, end)).lower(3, torch.ones(1, 1).double(), torch.tensor([0]))[0]
            found.append(excluded(bound, exact(net, 3, -end)))
        return found

    assert wrong() == [0, 0]
    full = rounding.lost
    monkeypatch.setattr(rounding, "lost", lambda *given: 0 * full(*given))
    assert wrong() == [1, 1], "what underflow loses must show"


# ---------------------------------------------------------------- where float32 is none


@pytest.mark.parametrize(
    ("weight", "options"),
    [
        (lambda weight: weight.float().double(), {"dilation": (2, 1)}),
        (lambda weight: weight, {}),
        (lambda weight: weight.float().double() * 2.0**140, {}),
        (lambda weight: weight.float().double().requires_grad_(), {}),
    ],
    ids=("dilated", "no float32 numbers", "too large for float32", "trained"),
)
def test_coefficients_stay_in_float64_from_a_convolution_that_float32_does_not_fit(
    weight: Callable[[Tensor], Tensor], options: dict[str, Any]
) -> None:
    build, generator = Builder((2, 4, 4)), torch.Generator().manual_seed(0)
    plain = torch.randn(2, 2, 2, 2, generator=generator)
    first = build.conv2d(0, plain.double(), None, "plain", padding=(1, 1, 0, 0))
    other = torch.randn(2, 2, 2, 2, generator=generator).double() / 3
    net = build.network(build.conv2d(first, weight(other), None, "other", **options), name="mixed")
    box = Bounds(torch.zeros(1, 2, 4, 4).double(), torch.ones(1, 2, 4, 4).double())
    assert last_in_float32(net, box) == first


def test_coefficients_stay_in_float64_where_float32_has_fewer_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    build, one = Builder((1, 2, 2)), torch.ones(1, 1, 2, 2).double()
    net = build.network(build.conv2d(0, one, None, "conv"), name="conv")
    box = Bounds(one, one)
    assert last_in_float32(net, box) == 1
    assert last_in_float32(net.to(torch.float32), Bounds(one.float(), one.float())) == -1
    backend: Any = torch.backends.mkldnn
    before = backend.matmul.fp32_precision
    try:
        backend.matmul.fp32_precision = "bf16"
        assert last_in_float32(net, box) == -1
    finally:
        backend.matmul.fp32_precision = before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert last_in_float32(net, box) == -1
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    assert last_in_float32(net, box) == -1
