from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from verifiable_relu.network.dyadic import Dyadic

EXTREMES = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    5e-324,
    -2.2250738585072014e-308,
    1.7976931348623157e308,
    0.1,
    2.0**-1000,
    -(2.0**900),
]


def fractions(values: Dyadic) -> list[Fraction]:
    """The numbers that an array stands for; each must be an integer of Python's."""
    flat = values.numbers.reshape(-1).tolist()
    assert all(type(number) is int for number in flat)
    return [number * Fraction(2) ** values.exponent for number in flat]


def drawn(seed: int) -> np.ndarray:
    """Twelve numbers of widely different sizes, in float64."""
    random = np.random.default_rng(seed)
    return np.ldexp(random.normal(size=12), random.integers(-1000, 1000, 12))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_array_is_the_numbers_it_is_made_of(dtype: type) -> None:
    with np.errstate(over="ignore"):
        values = np.array(EXTREMES).astype(dtype)
    values = values[np.isfinite(values)]
    assert fractions(Dyadic.of(values)) == [Fraction(float(v)) for v in values]


def test_an_array_without_axes_holds_a_python_integer() -> None:
    assert fractions(Dyadic.of(np.array(-0.375))) == [Fraction(-3, 8)]


@pytest.mark.parametrize("seed", range(5))
def test_sums_differences_and_products_are_those_of_fractions(seed: int) -> None:
    x, y = drawn(seed), drawn(seed + 100)
    pairs = [(Fraction(float(a)), Fraction(float(b))) for a, b in zip(x, y, strict=True)]
    left, right = Dyadic.of(x), Dyadic.of(y)
    assert fractions(left + right) == [a + b for a, b in pairs]
    assert fractions(left - right) == [a - b for a, b in pairs]
    assert fractions(left * right) == [a * b for a, b in pairs]


def test_numbers_over_a_smaller_exponent_are_the_same() -> None:
    values = Dyadic.of(np.array([3.0, -0.5]))
    assert [int(n) * Fraction(2) ** -7 for n in values.at(-7)] == [Fraction(3), Fraction(-1, 2)]
