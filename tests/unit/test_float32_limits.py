"""The choice between float32 and float64 for coefficients, its effect on bounds, and the ends of float32's range."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.asking import claims
from tests.support.float32_cases import (
    GEOMETRIES,
    Draw,
    convolution,
    exact,
    excluded,
    last_in_float32,
    rounded,
)
from verifiable_relu.bounds import TUNING, Bounds, Tuning, crown_relaxation, rounding
from verifiable_relu.network import from_torch
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import LeakyRelu, Relu
from verifiable_relu.spec import Box, Property, Query, Row
from verifiable_relu.verifiers.base import Trust, Verdict
from verifiable_relu.verifiers.incomplete import AlphaCrown, Crown, CrownIbp, Ibp

FLOAT64 = replace(TUNING, float32_depth=0)
"""A tuning in which the coefficients of the first convolutions are in float64."""


def _lower(net: Network, box: Bounds, rows: Tensor, tuning: Tuning = TUNING) -> Tensor:
    return crown_relaxation(net, box, tuning=tuning).lower(len(net.nodes) - 1, rows, torch.tensor([0]))[0]


def test_float32_widens_bounds_by_a_part_of_the_radius_whatever_the_magnitude() -> None:
    draw, build = Draw(0), Builder((3, 6, 6))
    x = build.activation(build.conv2d(0, draw.weight(8, 3, 3, 3), draw(8), "conv1"), Relu, "act")
    x = build.conv2d(x, draw.weight(4, 8, 2, 2), draw(4), "conv2", stride=(2, 2))
    net = build.network(build.linear(build.reshape(x, (16,), "flat"), draw(3, 16), None, "out"), name="far")
    rows = torch.cat([torch.eye(3), -torch.eye(3)]).double()
    for magnitude, radius in ((1.0, 1e-3), (1e6, 1.0), (1e6, 1e-3)):
        center = magnitude + draw.integers(1, 3, 6, 6) / 8
        box = Bounds(center - radius, center + radius)
        found = _lower(net, box, rows)
        assert last_in_float32(net, box, tuning=FLOAT64) == -1 and last_in_float32(net, box) > 0
        plain = _lower(net, box, rows, FLOAT64)
        width = -(plain[:3] + plain[3:]).repeat(2)
        assert bool((width > 0).all() and (found < plain).all() and (plain - found < 1e-3 * width).all())


def _layers(images: bool) -> Network:
    """An untrained network: a dense one of six hidden layers, or a small convolutional one."""
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
def test_every_node_in_float32_widens_bounds_by_a_small_part_of_their_width(images: bool, eps: float) -> None:
    """The widths of neurons' and outputs' bounds are compared with those of float64 throughout."""
    with torch.no_grad():
        net = _layers(images).to(torch.float64)
        center = torch.rand(3, *net.input_shape, generator=Draw(0).generator, dtype=torch.float64)
        box = Bounds(center - eps, center + eps)
        rows, sample = torch.cat([torch.eye(10), -torch.eye(10)]).double().repeat(3, 1), torch.arange(3)
        every, plain = crown_relaxation(net, box, float32=True), crown_relaxation(net, box, tuning=FLOAT64)
        assert every.backward.float32.last_node == len(net.nodes) - 1 and plain.backward.float32.last_node == -1
        for index, right in plain.pre.items():
            found, width = every.pre[index], right.upper - right.lower
            assert bool((right.lower - found.lower <= 1e-3 * width).all())
            assert bool((found.upper - right.upper <= 1e-3 * width).all())
        last = len(net.nodes) - 1
        least, most = (of.lower(last, rows, sample)[0].reshape(3, 2, 10) for of in (every, plain))
        assert bool((most - least <= -1e-3 * most.sum(1, keepdim=True)).all()) and not torch.equal(least, most)


@pytest.mark.parametrize("make", (Crown, CrownIbp, AlphaCrown, Ibp), ids=lambda make: make.name)
def test_verifiers_prove_with_float32_on_a_cpu(make: type[Crown | Ibp]) -> None:
    """A convolutional network has one property that holds with a large margin, and one that a point violates."""
    net = _layers(True)
    center = torch.rand(3, 8, 8, generator=Draw(0).generator, dtype=torch.float64)
    label = int(net(center[None].float()).argmax())
    box = Box((center - 1e-3).flatten().numpy(), (center + 1e-3).flatten().numpy())
    rows = [Row(((label, Fraction(1)),), Fraction(bound)) for bound in (-100, 100)]
    queries = [Query(net, Property(box, ((row,),))) for row in rows]
    proven, other = claims(make(dtype="float32"), queries, 60)
    assert (proven.verdict, proven.trust) == (Verdict.UNSAT, Trust.ROUNDED)
    assert other.verdict is Verdict.UNKNOWN and other.margin is not None and other.margin < 0
    precise = claims(make(dtype="float64"), queries[:1], 60)[0]
    assert proven.margin is not None and precise.margin is not None
    assert proven.margin != precise.margin or make is Ibp
    assert abs(proven.margin - precise.margin) <= 1e-5 * precise.margin


def test_a_slope_that_float32_takes_for_zero_excludes_nothing() -> None:
    """The slack for a slope that underflows is proportional to the input's width, whatever the coefficients."""
    for reach in (1.0, 1e9, 1e20):
        build, one = Builder((1,)), torch.ones(1, 1).double()
        x = build.activation(build.linear(0, one, None, "in"), LeakyRelu, "act", slope=6e-46 * one[0])
        net = build.network(build.linear(x, rounded(1e20 * one), None, "out"), name="slope")
        box = Bounds(-3 * reach * one, -reach * one)
        found = crown_relaxation(net, box, float32=True).lower(3, one, torch.tensor([0]))[0]
        assert last_in_float32(net, box, True) == 3 and bool(found.isfinite())
        assert not excluded(found, exact(net, 3, box.lower))


@pytest.mark.parametrize("large", (1e25, 1e30))
def test_coefficients_that_overflow_prove_nothing(large: float) -> None:
    """Products of three weights are finite in float64, but they or their sums overflow in float32."""
    for middle, signs in itertools.product((-1.0, 0.0, 1.0), itertools.product((1, -1), repeat=2)):
        build = Builder((2, 2, 2))
        weight = torch.tensor([[1.0, -0.75], [0.5, 1.5]]).double() * large
        x = build.conv2d(0, signs[0] * weight.float().double().reshape(2, 2, 1, 1), None, "conv1")
        x = build.conv2d(x, signs[1] * weight.float().double()[:, :, None, None].expand(2, 2, 2, 2), None, "conv2")
        net = build.network(build.linear(build.reshape(x, (2,), "flat"), weight, None, "out"), name="large")
        box = Bounds(torch.full((1, 2, 2, 2), middle - 0.5).double(), torch.full((1, 2, 2, 2), middle + 0.5).double())
        rows = torch.cat([torch.eye(2), -torch.eye(2)]).double()
        found = _lower(net, box, rows)
        assert last_in_float32(net, box) > 0 and not bool(found.isposinf().any())
        for corner in (box.lower, box.upper):
            y = exact(net, len(net.nodes) - 1, corner)
            assert not excluded(found, [*y, *(-v for v in y)])


def test_coefficients_and_products_that_underflow_exclude_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of two float32 numbers underflows, and a coefficient is below float32's range."""

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
            found.append(excluded(bound, exact(net, 3, -end)))
        return found

    assert wrong() == [0, 0]
    full = rounding.lost
    monkeypatch.setattr(rounding, "lost", lambda *given: 0 * full(*given))
    assert wrong() == [1, 1], "what underflow loses must show"


def test_inputs_beyond_float32_prove_nothing() -> None:
    """The radius of such inputs is infinite in float32, so that nothing is proven, even with coefficients of zero."""
    build = Builder((1, 1, 2))
    x = build.conv2d(0, torch.tensor([[2.0, 0], [0, 0]]).double().reshape(2, 1, 1, 2), None, "conv")
    net = build.network(build.reshape(x, (2,), "flat"), name="far")
    end = torch.full((1, 1, 1, 2), 1e40, dtype=torch.float64)
    found = _lower(net, Bounds(-end, end), torch.eye(2).double())
    assert last_in_float32(net, Bounds(-end, end)) > 0 and not bool((found > torch.tensor([-2e40, 0])).any())


@pytest.mark.parametrize(
    ("why", "weight", "options"),
    [
        ("grouped", rounded, {"groups": 2}),
        ("dilated", rounded, {"dilation": (2, 1)}),
        ("no float32 numbers", lambda weight: weight, {}),
        ("too large for float32", lambda weight: rounded(weight) * 2.0**140, {}),
        ("trained", lambda weight: rounded(weight).requires_grad_(), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_coefficients_stay_in_float64_from_a_convolution_that_float32_does_not_fit(
    why: str, weight: Callable[[Tensor], Tensor], options: dict[str, Any]
) -> None:
    draw = Draw(0)
    build = Builder((2, 4, 4))
    plain = build.conv2d(0, draw.weight(2, 2, 2, 2), None, "plain", padding=(1, 1, 0, 0))
    other = torch.randn(2, 2 // options.get("groups", 1), 2, 2, generator=draw.generator).double() / 3
    x = build.conv2d(plain, weight(other), None, "other", **options)
    net = build.network(x, name="mixed")
    box = Bounds(torch.zeros(1, 2, 4, 4).double(), torch.ones(1, 2, 4, 4).double())
    assert last_in_float32(net, box) == plain


def test_networks_in_float32_take_no_coefficients_out_of_float64() -> None:
    net, _ = convolution(Draw(0), GEOMETRIES[0])
    one = torch.ones(1, *net.input_shape)
    assert last_in_float32(net, Bounds(one.double(), one.double())) == 1
    assert last_in_float32(net.to(torch.float32), Bounds(one, one)) == -1


def test_coefficients_stay_in_float64_where_float32_has_fewer_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    net, _ = convolution(Draw(0), GEOMETRIES[0])
    one = torch.ones(1, *net.input_shape).double()
    box = Bounds(one, one)
    assert last_in_float32(net, box) == 1
    backend: Any = torch.backends.mkldnn
    library = backend.matmul
    before = library.fp32_precision
    try:
        library.fp32_precision = "bf16"
        assert last_in_float32(net, box) == -1
    finally:
        library.fp32_precision = before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert last_in_float32(net, box) == -1
    with monkeypatch.context() as patch:
        patch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
        assert last_in_float32(net, box) == -1
