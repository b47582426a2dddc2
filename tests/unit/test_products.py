"""Products of computed values, and what is written with them: bounds, evaluation, reading, refusals."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from onnx import helper
from torch import Tensor

from tests.support.asking import claims
from tests.support.bounds import linear_lower_bounds
from tests.support.onnx_files import onnx_file
from verifiable_relu.bounds import Relaxation, interval_bounds, preactivation_bounds
from verifiable_relu.bounds.tuning import Bounds
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network import Network, read_onnx, write_onnx
from verifiable_relu.network.build import Builder
from verifiable_relu.network.nodes import Relu, Smooth, Tanh
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.trust.enclose import enclose
from verifiable_relu.verifiers.base import Reason, Verdict
from verifiable_relu.verifiers.registry import make


def with_constant(op: str, shape: tuple[int, ...], constant: np.ndarray, **attributes: object) -> bytes:
    """A file of one operator of one input and a constant."""
    made = helper.make_node(op, ["x", "c"], ["y"], name="node", **attributes)
    return onnx_file([made], {"x": (1, *shape)}, {"y": (1, *shape)}, c=np.asarray(constant, np.float32))


def product() -> Network:
    """x₀·x₁."""
    build = Builder((2,))
    parts = [build.sparse(0, torch.tensor([[i]]), torch.ones(1, 1), None, (1,), f"x{i}") for i in range(2)]
    return build.network(build.product(*parts, "product"), name="product")


def boxes(count: int = 200) -> Bounds:
    """Boxes of two numbers at all signs and widths, some of them points."""
    generator = torch.Generator().manual_seed(0)
    center = torch.randn(count, 2, generator=generator, dtype=torch.float64) * 3
    radius = torch.rand(count, 2, generator=generator, dtype=torch.float64) * 4
    radius[::7, 0] = 0
    return Bounds(center - radius, center + radius)


def test_the_interval_of_a_product_is_that_of_its_corners() -> None:
    box = boxes()
    found = interval_bounds(product().to(torch.float64), box)[-1]
    corners = torch.stack(
        [x * y for x in (box.lower[:, 0], box.upper[:, 0]) for y in (box.lower[:, 1], box.upper[:, 1])]
    )
    torch.testing.assert_close(found.lower[:, 0], corners.amin(0), rtol=1e-12, atol=1e-300)
    torch.testing.assert_close(found.upper[:, 0], corners.amax(0), rtol=1e-12, atol=1e-300)
    assert bool((found.lower[:, 0] <= corners.amin(0)).all() and (found.upper[:, 0] >= corners.amax(0)).all())


def test_linear_bounds_of_a_product_are_halfway_between_mccormicks() -> None:
    box, network = boxes(), product().to(torch.float64)
    (x, y), (r, s) = ((box.lower + box.upper) / 2).unbind(1), ((box.upper - box.lower) / 2).unbind(1)
    for sign in (1.0, -1.0):
        matrix = torch.full((len(x), 1), sign, dtype=torch.float64)
        found = linear_lower_bounds(network, box, {}, matrix)
        # The mean of both planes over the box: x̂·ŷ + ŷ·(x − x̂) + x̂·(y − ŷ) − r·s.
        expected = sign * x * y - y.abs() * r - x.abs() * s - r * s
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        assert bool((found <= expected).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_value_of_a_product_of_matrices_is_below_any_of_its_planes(dtype: torch.dtype) -> None:
    """Exact values at corners and at points, with planes at random and at both ends."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    build = Builder((10,))
    left, right = (
        build.reshape(build.sparse(0, index[:, None], torch.ones(len(index), 1), None, (len(index),), name), shape, end)
        for index, shape, name, end in (
            (torch.arange(4), (2, 2), "l", "left"),
            (torch.arange(4, 10), (2, 3), "r", "right"),
        )
    )
    network = build.network(build.matmul(left, right, "product"), name="matrices").to(dtype)
    last, count = len(network.nodes) - 1, 40
    for width in (0.0, 1e-8, 1.0):
        center = draw(1, 10)
        box = Bounds(center - width, center + width)
        relaxation = Relaxation(network, box)
        relaxation.advance(last)
        tilt = (2 * torch.rand(count, 2, 2, 3, generator=generator) - 1).to(dtype)
        tilt[::3] = tilt[::3].sign()
        rows, one = draw(count, 2, 3), torch.zeros(count, dtype=torch.long)
        found = relaxation.lower(last, rows, one, tilts={last: tilt})[0]
        for _ in range(8):
            corner = torch.where(torch.rand(10, generator=generator) < 0.5, box.lower, box.upper)[0]
            x, y = ([Fraction(float(v)) for v in part] for part in (corner[:4], corner[4:]))
            values = [sum(x[2 * i + k] * y[3 * k + j] for k in range(2)) for i in range(2) for j in range(3)]
            for row, bound in zip(rows.flatten(1).tolist(), found.tolist(), strict=True):
                assert Fraction(bound) <= sum(Fraction(c) * v for c, v in zip(row, values, strict=True))


def quotient(numerator: float = 1.0) -> Network:
    build = Builder((1,))
    node = Smooth(name="q", inputs=(0,), shape=(1,), function="Reciprocal", parameter=torch.ones(()))
    return build.network(build.scale(build.append(node), "n", scale=torch.tensor(numerator)), name="quotient")


def test_of_a_difference_and_its_negative_one_is_bounded_and_both_are_known() -> None:
    """A softmax has all differences of two numbers: rows of half of their sides say all, over several boxes at once."""
    generator = torch.Generator().manual_seed(0)
    build, count = Builder((3,)), 4
    dense = build.linear(0, torch.randn(5, 3, generator=generator), torch.randn(5, generator=generator), "fc")
    bent = build.activation(dense, Relu, "relu")
    mixed = build.linear(bent, torch.randn(count, 5, generator=generator), torch.randn(count), "mix")
    index = torch.cartesian_prod(torch.arange(count), torch.arange(count))
    weight = torch.tensor([[1.0, -1.0]]).expand(len(index), 2)
    apart = build.sparse(mixed, index, weight, None, (count, count), "apart")
    last = build.activation(apart, Tanh, "tanh")
    network = build.network(last, name="differences").to(torch.float64)
    center = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    eps = torch.tensor([[0.1], [0.5], [1.0]], dtype=torch.float64)
    box = Bounds(center - eps, center + eps)
    found = preactivation_bounds(network, box)[network.activations[-1]]
    assert torch.equal(found.lower, -found.upper.transpose(1, 2))
    x = torch.lerp(box.lower, box.upper, torch.rand(500, 3, 3, generator=generator, dtype=torch.float64))
    values = network.values(x.flatten(0, 1))[apart].reshape(500, 3, count, count)
    assert bool(((values >= found.lower) & (values <= found.upper)).all())
    assert float(found.upper.diagonal(0, 1, 2).max()) < 1e-12


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 1.0), (-1.0, 0.0), (0.0, 0.0), (-1e-300, 1e300)])
def test_of_a_quotient_nothing_is_known_where_the_divisor_may_be_zero(low: float, high: float) -> None:
    network = quotient().to(torch.float64)
    box = Bounds(*(torch.tensor([[end]], dtype=torch.float64) for end in (low, high)))
    interval = interval_bounds(network, box)[-1]
    assert not bool((interval.lower > -1e6).any() | (interval.upper < 1e6).any())
    pre = preactivation_bounds(network, box)
    bound = linear_lower_bounds(network, box, pre, torch.tensor([[1.0], [-1.0]], dtype=torch.float64))
    assert not bool((bound > -1e6).any())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_reciprocals_are_bounded_on_either_side_of_zero(sign: float) -> None:
    network = quotient(3.0).to(torch.float64)
    ends = sorted((sign * 0.25, sign * 4.0))
    box = Bounds(*(torch.tensor([[end]], dtype=torch.float64) for end in ends))
    interval = interval_bounds(network, box)[-1]
    assert float(interval.lower) == pytest.approx(3 / ends[1]) and float(interval.upper) == pytest.approx(3 / ends[0])
    eye = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    low, high = (linear_lower_bounds(network, box, preactivation_bounds(network, box), eye) * eye[:, 0]).tolist()
    assert low <= 3 / ends[1] and high >= 3 / ends[0]


def attention(tokens: int) -> bytes:
    """softmax(x·xᵀ)·x."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "t"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "x"], ["y"]),
    ]
    return onnx_file(nodes, {"x": (1, tokens, 2)}, {"y": (1, tokens, 2)})


@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_attention_is_evaluated_bounded_and_enclosed(tokens: int) -> None:
    network = read_onnx(attention(tokens))
    x = torch.randn(20, tokens, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.softmax(x @ x.transpose(1, 2), -1) @ x
    torch.testing.assert_close(network(x), expected)
    point = [Fraction(float(v)) for v in x[0].flatten()]
    found = enclose(network, point)
    assert bool((np.abs(found.value - expected[0].flatten().numpy()) <= found.error + 1e-12).all())
    assert float(found.error.max()) < 1e-9
    wide = network.to(torch.float64)
    box = Bounds(x[:1] - 0.1, x[:1] + 0.1)
    pre = preactivation_bounds(wide, box)
    eye = torch.eye(2 * tokens, dtype=torch.float64)
    low = linear_lower_bounds(wide, box, pre, eye)
    samples = x[:1] + 0.2 * torch.rand(2000, tokens, 2, dtype=torch.float64) - 0.1
    values = (torch.softmax(samples @ samples.transpose(1, 2), -1) @ samples).flatten(1)
    assert bool((values >= low).all())
    assert bool((low > values.amin(0) - 0.5).all())


def test_a_file_that_is_written_for_products_is_read_as_the_same_function() -> None:
    network = read_onnx(attention(3))
    again = read_onnx(write_onnx(network))
    x = torch.randn(5, 3, 2)
    torch.testing.assert_close(again(x), network(x))


def test_a_normalised_value_is_never_larger_than_it_can_be() -> None:
    network = read_onnx(with_constant("LayerNormalization", (5,), np.ones(5))).to(torch.float64)
    box = Bounds(torch.full((1, 5), -1.0, dtype=torch.float64), torch.full((1, 5), 1.0, dtype=torch.float64))
    found = interval_bounds(network, box)[-1]
    assert float(found.upper.max()) < 2.001 and float(found.lower.min()) > -2.001
    x = torch.zeros(1, 5, dtype=torch.float64)
    x[0, 0] = 1
    assert float(network(x)[0, 0]) == pytest.approx(2, abs=1e-3)


@pytest.mark.parametrize("method", ["bab", "milp", "smt", "smt-exact"])
def test_methods_of_phases_refuse_products_by_name(method: str) -> None:
    query = Query(product(), Property(Box(np.zeros(2), np.ones(2)), ((Row(((0, Fraction(1)),), Fraction(-1)),),)))
    (outcome,) = claims(make(method), [query], 10.0)
    assert outcome.verdict is Verdict.UNKNOWN and outcome.reason is Reason.UNSUPPORTED
    assert "'product' (Product)" in outcome.detail and "piecewise-linear" in outcome.detail


@pytest.mark.parametrize("method", ["auto", "crown", "split"])
def test_methods_of_bounds_decide_products(method: str) -> None:
    def asked(bound: Fraction) -> Query:
        box = Box(np.array([1.0, 2.0]), np.array([1.5, 3.0]))
        return Query(product(), Property(box, ((Row(((0, Fraction(1)),), bound),),)))

    high, low = claims(make(method), [asked(Fraction(5, 2)), asked(Fraction(3, 2))], [10.0, 10.0])
    assert low.verdict is Verdict.UNSAT
    assert high.verdict is (Verdict.UNKNOWN if method == "crown" else Verdict.SAT)


def test_powers_that_are_read_are_powers() -> None:
    x = torch.rand(6, 3, dtype=torch.float64) + 0.5
    for exponent in (-3.0, -2.7, -1.0, -0.5, 0.3, 1.5, 4.0, 5.0, 7.0):
        network = read_onnx(with_constant("Pow", (3,), np.array(exponent)))
        torch.testing.assert_close(network(x), x**exponent)
    with pytest.raises(UnsupportedError, match="the exponent 99"):
        read_onnx(with_constant("Pow", (3,), np.array(99.0)))


def masked(x: Tensor) -> bytes:
    nodes = [helper.make_node("Add", ["x", "c"], ["s"]), helper.make_node("Softmax", ["s"], ["y"], axis=-1)]
    return onnx_file(nodes, {"x": (1, *x.shape)}, {"y": (1, *x.shape)}, c=x)


def test_what_a_mask_of_infinities_leaves_is_a_softmax() -> None:
    mask = torch.full((4, 4), -torch.inf).triu(1)
    network = read_onnx(masked(mask))
    x = torch.randn(7, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(network(x), torch.softmax(x + mask, -1))
    with pytest.raises(UnsupportedError, match="nothing but −inf"):
        read_onnx(masked(torch.full((2, 3), -torch.inf)))


def windows(mask: float, image: bool) -> bytes:
    """softmax(x·xᵀ + mask)·x of four tokens, two and two of which see each other; of an image if x is a convolution."""
    apart = torch.full((1, 4, 4), mask)
    apart[:, :2, :2] = apart[:, 2:, 2:] = 0
    shapes = {"image": [1, 1, 4, 2], "tokens": [1, 4, 2]}
    front = [
        helper.make_node("Reshape", ["x", "image"], ["i"]),
        helper.make_node("Conv", ["i", "one"], ["c"]),
        helper.make_node("Reshape", ["c", "tokens"], ["v"]),
    ]
    nodes = [
        *(front if image else [helper.make_node("Identity", ["x"], ["v"])]),
        helper.make_node("Transpose", ["v"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["v", "t"], ["s"]),
        helper.make_node("Add", ["s", "mask"], ["m"]),
        helper.make_node("Softmax", ["m"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    stored = {**shapes, "one": np.ones((1, 1, 1, 1)), "mask": apart}
    return onnx_file(nodes, {"x": (1, 4, 2)}, {"y": (1, 4, 2)}, **stored)


@pytest.mark.parametrize("image", [False, True])
def test_a_mask_of_minus_100_leaves_bounds_as_one_of_infinities_does(image: bool) -> None:
    """Sums of exponentials of e¹⁰⁰ stand beside others, whose rounding errors are their own.

    Behind a convolution, coefficients are in float32, which e¹⁰⁰ is beyond.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 2, dtype=torch.float64, generator=generator)
    samples = x + 0.02 * torch.rand(500, 4, 2, dtype=torch.float64, generator=generator) - 0.01
    box, eye, found = Bounds(x - 0.01, x + 0.01), torch.eye(8, dtype=torch.float64), []
    rows = torch.cat([eye, -eye])
    for mask in (-torch.inf, -100.0):
        network = read_onnx(windows(mask, image)).to(torch.float64)
        lower = linear_lower_bounds(network, box, preactivation_bounds(network, box), rows)
        values = network(samples).flatten(1) @ rows.T
        assert bool((values >= lower).all()) and bool((lower > values.amin(0) - 0.05).all())
        found.append(lower)
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_normalisations_with_a_negative_epsilon_are_refused() -> None:
    # With it a quotient may be of any size, however many numbers are normalised.
    data = with_constant("LayerNormalization", (5,), np.ones(5), epsilon=-0.5)
    with pytest.raises(UnsupportedError, match=r"epsilon = -0\.5"):
        read_onnx(data)
