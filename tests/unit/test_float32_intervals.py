"""Sums in float32 for intervals of several boxes: radii and centres are rounded outward, or stay in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.float32_cases import Draw, exact, excluded, rounded
from tests.support.hooks import Hook
from tests.support.summation import in_order
from verifiable_relu.bounds import TUNING, Bounds, Tuning, interval_bounds, rounding, sums
from verifiable_relu.bounds.operators import ConvolutionOperator, DenseOperator, Operator, prepared
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Affine, Conv2d, Linear
from verifiable_relu.rounding import gamma, unit_roundoff

EVERY = replace(TUNING, interval_products=1)
"""Sums of dense layers of any size may be in float32."""


def share_of_float32(share: float) -> Hook:
    """Of what the standard model says of sums in float32 a part alone is accounted for."""
    return Hook(
        "bounds.rounding:gamma", lambda right, n, dtype: right(n, dtype) * (share if dtype == torch.float32 else 1)
    )


def test_radii_of_a_batch_are_rounded_outward() -> None:
    """Intervals of several boxes contain the exact upper ends, which are attained because no weight is negative."""

    def wrong() -> int:
        found = 0
        for seed in range(8):
            draw, build = Draw(seed), Builder((3, 3, 3))
            x = build.conv2d(0, draw.weight(2, 3, 3, 3).abs(), None, "conv", padding=(1, 1, 1, 1))
            net = build.network(x, name="positive")
            reach = torch.rand(4, 3, 3, 3, generator=draw.generator, dtype=torch.float64)
            box = Bounds(-reach, reach)
            bounds = interval_bounds(net, box)[-1]
            found += excluded(-bounds.upper[0].flatten(), [-v for v in exact(net, 1, reach[0])])
        return found

    assert not wrong()
    with share_of_float32(0.0).applied():
        assert wrong(), "without float32's part some end lies inside"


SIZES = (5, 96, 101, 509, 784, 1000)
"""Numbers of inputs: for products that are summed in one line (also a prime number of them) or in several."""


def _linear(weight: Tensor) -> Network:
    build = Builder((weight.shape[1],))
    return build.network(build.linear(0, weight, None, "linear"), name="linear")


def _float32_terms(net: Network, box: Bounds, tuning: Tuning) -> int:
    """In how many float32 additions a product of an affine map's |W|·radius takes part; 0 where sums are in float64."""
    found, full = [], rounding.interval_affine

    def recorded(
        operator: Operator[Affine], size: Tensor, radius: Tensor, middle: Tensor, terms: int = 0
    ) -> tuple[Tensor, float, Tensor]:
        found.append(terms)
        return full(operator, size, radius, middle, terms)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "interval_affine", recorded)
        interval_bounds(net, box, tuning=tuning)
    (terms,) = found
    return terms


def _line_by_line(a: Tensor, b: Tensor) -> Tensor:
    """``torch.bmm``, with products summed one after the other."""
    return in_order(a[:, :, None] * b.mT[:, None])


def _positive(size: int, least: int) -> Tensor:
    """Weights in float32: of every line all but the first are lost beside it; the others are any, or all the same.

    ``least``: the fewest numbers in a line.
    """
    small = torch.full((size,), 0.99 * unit_roundoff(torch.float32), dtype=torch.float64)
    small[:: sums.lines(size, least)[1]] = 1
    draw = Draw(size)
    return torch.stack([small, draw.weight(size).abs(), torch.full((size,), 1 / 3).double()]).float().double()


def _outside(net: Network, reach: Tensor) -> int:
    """The number of exact ends of intervals around zero, attained because no weight is negative, that are excluded."""
    bounds, found = interval_bounds(net, Bounds(-reach, reach), tuning=EVERY)[-1], 0
    for lower, upper, end in zip(bounds.lower, bounds.upper, reach, strict=True):
        y = [-v for v in exact(net, 1, end)]
        found += excluded(-upper, y) + sum(a > v for a, v in zip(lower.tolist(), y, strict=True) if not math.isnan(a))
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("in_turn", (False, True))
def test_radii_of_a_batch_through_a_dense_layer_are_rounded_outward(
    size: int, in_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The radii are random, or such that float32 rounds them down as far as possible; sums take any order."""
    if in_turn:
        monkeypatch.setattr(torch, "bmm", _line_by_line)
    net = _linear(_positive(size, EVERY.sum_length))
    operator = prepared(net, EVERY)[1]
    reach = torch.rand(5, size, generator=Draw(1).generator, dtype=torch.float64)
    reach[0], reach[1] = 1, 1 + 0.99 * unit_roundoff(torch.float32)
    reach[2] *= 2.0 ** torch.arange(size).remainder(40)
    terms = _float32_terms(net, Bounds(-reach, reach), EVERY)
    assert 0 < terms == operator.terms32[1] <= EVERY.interval_terms
    found = operator.absolute32(reach)
    allowed = gamma(terms + 1, torch.float32)
    for got, end in zip(found.tolist(), reach, strict=True):
        for value, right in zip(got, exact(net, 1, end), strict=True):
            assert abs(Fraction(value) - right) <= Fraction(allowed) * right
    assert not _outside(net, reach)
    with share_of_float32(0.0).applied():
        assert _outside(net, reach), "without float32's part some end lies inside"
    if in_turn and size > 5:
        # Lines lose what they can, their sums do not.
        with share_of_float32(0.85).applied():
            assert _outside(net, reach), "no more is granted than is needed"


def _underflow_left_out(full: Callable[..., tuple[Tensor, float, Tensor]]) -> Callable[..., Any]:
    """``rounding.interval_affine`` without what underflow in float32 may change."""
    return lambda *given: (*full(*given)[:2], full(*given[:4])[2])


@pytest.mark.parametrize("flushing", (False, True))
def test_radii_at_the_ends_of_float32_exclude_nothing(flushing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some radii, or their products, underflow to zero in float32; others, or their sums, are infinite there."""
    tiny = torch.finfo(torch.float32).tiny
    small = [(1e-42, 1.0), (1e-30, 1e-20), (1e-46, 1e38), (0.9 * tiny, 3e38), (1.1 * tiny, 0.5), (1e-300, 1e30)]
    large = [(1e39, 1.0), (1e39, 0.0), (3e38, 2.0), (3e38, 1.0), (1e20, 1e20), (1e300, 1e10)]

    def wrong(cases: list[tuple[float, float]]) -> list[int]:
        found = []
        for radius, weight in cases:
            net = _linear(torch.full((1, 7), weight, dtype=torch.float64).float().double())
            reach = torch.full((4, 7), radius, dtype=torch.float64)
            assert _float32_terms(net, Bounds(-reach, reach), EVERY) == 7
            found.append(_outside(net, reach))
        return found

    # Where it is not supported, nothing is flushed.
    torch.set_flush_denormal(flushing)
    try:
        assert wrong(small) == [0] * len(small) and wrong(large) == [0] * len(large)
        monkeypatch.setattr(rounding, "interval_affine", _underflow_left_out(rounding.interval_affine))
        assert any(wrong(small)), "what underflow loses must show"
    finally:
        torch.set_flush_denormal(False)


def test_radii_stay_in_float64_where_float32_does_not_hold_or_saves_little() -> None:
    products = replace(TUNING, interval_products=7 * 3 * 3)
    radius, weight = torch.ones(4, 7).double(), rounded(torch.rand(3, 7).double())

    def terms(weight: Tensor, radius: Tensor = radius, tuning: Tuning = products) -> int:
        return _float32_terms(_linear(weight), Bounds(-radius, radius), tuning)

    assert terms(weight) == 7
    assert not terms(weight, radius[:3]), "few samples"
    assert not terms(weight[:2]), "few products"
    assert not terms(weight / 3), "no float32 numbers"
    assert not terms(weight * 2.0**140), "too large for float32"
    assert not terms(rounded(weight * 2.0**-140)), "not normal in float32"
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
    eye, ones = torch.eye(70).double(), torch.ones(4, 70).double()
    assert terms(eye, ones)
    assert not terms(eye, ones, replace(products, sparse_weights=1)), "sparse"


def _ends_outside(net: Network, box: Bounds) -> tuple[int, int]:
    """The number of exact ends, lower and upper, that the intervals of an affine map exclude."""
    bounds, (node,) = interval_bounds(net, box, tuning=EVERY)[-1].flat(), net.nodes[1:]
    assert isinstance(node, Linear | Conv2d)
    weight, box = node.weight.flatten(1), box.flat()
    ends = _whole(torch.cat([weight.clamp(min=0), weight.clamp(max=0)], 1), node.bias, False)
    below = above = 0
    for low, high, lower, upper in zip(box.lower, box.upper, bounds.lower, bounds.upper, strict=True):
        below += excluded(lower, exact(ends, 1, torch.cat([low, high])))
        above += excluded(-upper, [-v for v in exact(ends, 1, torch.cat([high, low]))])
    return below, above


def _whole(weight: Tensor, bias: Tensor, convolution: bool) -> Network:
    """An affine map: linear, or a convolution that sees one pixel of many channels."""
    build = Builder((weight.shape[1], *([1, 1] if convolution else [])))
    if convolution:
        return build.network(build.conv2d(0, weight[:, :, None, None], bias, "conv"), name="conv")
    return build.network(build.linear(0, weight, bias, "linear"), name="linear")


def _around(net: Network, center: Tensor, radius: Tensor) -> Bounds:
    return Bounds(*(t.reshape(-1, *net.input_shape) for t in (center - radius, center + radius)))


def _in_float32(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The list of centres whose products are taken in float32, which grows with every further call."""
    found: list[Tensor] = []

    def spied(full: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def linear32(self: Operator[Affine], x: Tensor) -> Tensor:
            found.append(x)
            return full(self, x)

        return linear32

    for kind in (DenseOperator, ConvolutionOperator):
        monkeypatch.setattr(kind, "linear32", spied(kind.linear32))
    return found


def _center_case(size: int, convolution: bool) -> tuple[Network, Bounds]:
    """Centres as far from zero as float32 is allowed for, whose sums in float32 lose as much as possible.

    The weights are positive, negative, of both signs, or random.
    """
    positive, draw = _positive(size, EVERY.weight_sum_length), Draw(size)
    if convolution:
        # Direct convolutions sum in lines of their own.
        positive[0], positive[0, 0] = positive[0, -1], 1
    weight = torch.cat([positive, -positive, draw.weight(2, size)])
    net = _whole(weight, draw(len(weight)) / 3, convolution)
    far = EVERY.interval_widening / rounding.share_single(prepared(net, EVERY)[1].terms32[0])
    # A power of two: radii, too, lose what can be lost.
    far = 2.0 ** math.floor(math.log2(far))
    center = torch.rand(5, size, generator=draw.generator, dtype=torch.float64)
    # Just above what float32 rounds down, and down again in every product.
    center[0], center[1] = 1, 1 + 0.99 * unit_roundoff(torch.float32)
    center[2] *= 2.0 ** torch.arange(size).remainder(40)
    return net, _around(net, center, center / far)


@pytest.mark.parametrize(
    ("how", "size"),
    [*itertools.product(("as they are", "in turn"), SIZES), *(("convolution", size) for size in (5, 96, 509))],
)
def test_centers_of_a_batch_are_rounded_outward(how: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products, with biases, are summed by the library, one after the other, or in a convolution."""
    if how == "in turn":
        monkeypatch.setattr(torch, "bmm", _line_by_line)
    seen = _in_float32(monkeypatch)
    net, box = _center_case(size, how == "convolution")
    assert _ends_outside(net, box) == (0, 0) and len(seen) == 1
    monkeypatch.setattr(rounding, "interval_single", lambda size, radius, terms: radius.clone())
    below, above = _ends_outside(net, box)
    # Some processors' kernels sum long convolutions in several parts, and lose less than their bound.
    assert len(seen) == 2
    assert (below and above) or (how, size) == ("convolution", 509), "without the centres' part some end lies inside"
    if how == "in turn" and size > 5:
        monkeypatch.undo()
        monkeypatch.setattr(torch, "bmm", _line_by_line)
        # Lines lose what they can, their sums do not.
        with share_of_float32(0.75).applied():
            assert all(_ends_outside(net, box)), "no more is granted than is needed"


@pytest.mark.parametrize("flushing", (False, True))
@pytest.mark.parametrize("convolution", (False, True))
def test_centers_at_the_ends_of_float32_exclude_nothing(
    convolution: bool, flushing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some centres, or their products, underflow to zero in float32; others, or their sums, overflow."""
    # Sums of up to 1e37 are far enough from float32's end.
    tiny, huge = torch.finfo(torch.float32).tiny, 1e37
    small = [(1e-42, 1.0), (1e-30, 1e-20), (1e-46, 1e38), (0.9 * tiny, 3e38), (16 * tiny, 0.05), (1e-300, 1e30)]
    large = [
        (4e38, 1e-10),
        (4e38, 0.0),
        (3e38, 2.0),
        (3e38, 1.0),
        (1e20, 1e20),
        (1e300, 1e10),
        (4e38, 1e-37),
        (4e37, 2.0),
    ]
    seen = _in_float32(monkeypatch)

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
        with monkeypatch.context() as patched:
            # Sums of any finite size are allowed where they are said to widen nothing.
            share = rounding.share_single
            patched.setattr(rounding, "share_single", lambda terms: 0.0)
            patched.setattr(rounding, "interval_single", lambda size, radius, terms: radius + share(terms) * size)
            plain = rounding.interval_affine
            # Otherwise what is added is infinite where a centre is.
            patched.setattr(
                rounding,
                "interval_affine",
                lambda operator, size, radius, middle, terms: plain(
                    operator, size, radius, torch.zeros_like(middle), terms
                ),
            )
            assert any(wrong(large)), "sums that overflow must show"
        monkeypatch.setattr(rounding, "interval_affine", _underflow_left_out(rounding.interval_affine))
        assert any(wrong(small)), "what underflow loses must show"
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("convolution", (False, True))
def test_centers_stay_in_float64_where_one_sample_would_lose_too_much(
    convolution: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They also stay in float64 if one sample might overflow or is a point."""
    seen = _in_float32(monkeypatch)
    net = _whole(torch.full((2, 6), 3.0).double(), torch.tensor([1.0, -1.0]).double(), convolution)
    ones = torch.ones(4, 6).double()
    share = rounding.share_single(6) / EVERY.interval_widening

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
def test_a_batch_in_float32_widens_intervals_by_a_small_share(
    convolution: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The widths are compared with those of each sample alone in float64."""
    draw, seen = Draw(4), _in_float32(monkeypatch)
    net = _whole(torch.randn(9, 96, generator=draw.generator).double(), torch.ones(9).double(), convolution)
    radius = torch.rand(5, 96, generator=draw.generator, dtype=torch.float64)
    box = _around(net, 10 * (radius - 0.5), radius)
    found = interval_bounds(net, box, tuning=EVERY)[-1].flat()
    assert len(seen) == 1
    for i in range(5):
        one = Bounds(box.lower[i : i + 1], box.upper[i : i + 1])
        alone = interval_bounds(net, one, tuning=EVERY)[-1].flat()
        width = alone.upper[0] - alone.lower[0]
        for more in (alone.lower[0] - found.lower[i], found.upper[i] - alone.upper[0]):
            assert bool((more <= 1e-4 * width).all() and (more > 0).any())
    assert len(seen) == 1
