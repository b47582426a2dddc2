"""Functions against mpmath, against exact fractions, and against each other: what they claim holds, and tightly."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from verifiable_relu.dyadic import Dyadic
from verifiable_relu.ir.functions.function import Function
from verifiable_relu.ir.functions.kinked import Kinked
from verifiable_relu.ir.interval import Interval

KINKED = {slope: Kinked(torch.tensor(slope)) for slope in (0.0, 0.1, 0.5, 1.0, 1.7, -0.3, -4.0, 1e-30)}
kinked = pytest.mark.parametrize("slope", KINKED)


def intervals(seed: int, count: int = 200) -> Interval:
    """Return intervals (1, count) of all sizes and places, also about 0, points, and halves that begin at 0."""
    random = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-12, 9, (2, count), generator=random)
    first, second = torch.randn(2, count, generator=random, dtype=torch.float64) * size
    second = torch.where(torch.rand(count, generator=random) < 0.4, first + second * first.abs() * 1e-3, second)
    first[::17], second[::29], second[::31] = 0, 0, first[::31]
    return Interval(torch.minimum(first, second)[None], torch.maximum(first, second)[None])


def exact(function: Function, x: float) -> Fraction:
    """Return f(x) of a piecewise-linear function."""
    value = function.exact(Dyadic.of(np.array([x])), 1)
    assert value is not None
    return int(value.numbers.reshape(-1)[0]) * Fraction(2) ** value.exponent


def points(x: Interval) -> list[list[float]]:
    """Return both ends of each interval, 0 where it lies between them, and the middle."""
    lower, upper = x.lower[0].tolist(), x.upper[0].tolist()
    return [[a, b, min(max(0.0, a), b), a / 2 + b / 2] for a, b in zip(lower, upper, strict=True)]


@kinked
def test_lines_of_any_slope_hold_exactly(slope: float) -> None:
    function, x = KINKED[slope], intervals(1)
    random = torch.Generator().manual_seed(2)
    chosen = torch.stack(
        [
            *function.slopes(x),
            *vars(function.slope_range(x)).values(),
            torch.randn(x.lower.shape, generator=random).double() * 3,
            torch.full_like(x.lower, -1e-310),
            torch.full_like(x.lower, 1 + 2.0**-52),
            torch.full_like(x.lower, slope),
        ]
    )
    floor, top = function.floor(x, chosen), function.top(x, chosen)
    for place, numbers in enumerate(points(x)):
        values = [(Fraction(t), exact(function, t)) for t in numbers]
        for s, low, high in zip(*(part[:, 0, place].tolist() for part in (chosen, floor, top)), strict=True):
            assert all(Fraction(s) * t + Fraction(low) <= y <= Fraction(s) * t + Fraction(high) for t, y in values)


@kinked
def test_images_hold_exactly(slope: float) -> None:
    function, x = KINKED[slope], intervals(3)
    image = function.image(x)
    for place, numbers in enumerate(points(x)):
        low, high = float(image.lower[0, place]), float(image.upper[0, place])
        values = [exact(function, t) for t in numbers]
        assert low <= min(values) and max(values) <= high
        size = max(map(abs, values))
        assert float(min(values)) - low <= 1e-15 * size + 1e-200 and high - float(max(values)) <= 1e-15 * size + 1e-200


def test_relu_is_bounded_as_crown_does() -> None:
    relu, x = Kinked(), Interval(*torch.tensor([[[-1.0, -3.0, 2.0, -2.0, 0.0]], [[3.0, 1.0, 5.0, -1.0, 0.0]]]).double())
    low, high = relu.slopes(x)
    assert low.tolist() == [[1, 0, 1, 0, 0]]
    assert high.tolist() == [[0.75, 0.25, 1, 0, 0]]
    assert relu.floor(x, low).tolist() == [[0, 0, 0, 0, 0]]
    torch.testing.assert_close(relu.top(x, high), torch.tensor([[0.75, 0.75, 0, 0, 0]]).double())
    assert relu.unstable(x).tolist() == [[True, True, False, False, False]]
    other = Interval(torch.full_like(x.lower, -9), torch.ones_like(x.lower))
    assert relu.slopes(x, other)[0].tolist() == [[0, 0, 1, 0, 0]]


def test_each_element_has_its_own_slope() -> None:
    slopes = torch.tensor([0.25, 2.0, -1.0])
    function, x = Kinked(slopes), intervals(5, 3 * 100)
    x = Interval(x.lower.reshape(100, 3), x.upper.reshape(100, 3))
    together = function.relaxation(x, *function.slopes(x))
    for i in range(3):
        alone, mine = function.select(torch.tensor([i])), x.columns(torch.tensor([i]))
        for found, expected in zip(
            vars(together).values(), vars(alone.relaxation(mine, *alone.slopes(mine))).values(), strict=True
        ):
            assert torch.equal(found[:, i : i + 1], expected)


def test_the_derivative_of_offsets_of_lines_through_the_kink_is_zero() -> None:
    relu, x = Kinked(), Interval(torch.tensor([[-1.0, -2.0]]), torch.tensor([[2.0, 1.0]]))
    slope = torch.tensor([[[0.0, 1.0]], [[0.5, 2.0]]], requires_grad=True)
    relu.floor(x, slope).sum().backward()
    assert isinstance(slope.grad, Tensor) and slope.grad.round().tolist() == [[[0, 0]], [[0, -1]]]
