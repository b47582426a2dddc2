"""Arithmetic on dyadic rationals against Python's fractions, entry by entry."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from verifiable_relu.dyadic import Dyadic

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=64) | st.integers(-4, 4).map(float)
ARRAYS = arrays.arrays(np.float64, st.sampled_from([(), (1,), (3,), (2, 3), (0,)]), elements=FINITE)
PAIRS = st.sampled_from([((), ()), ((3,), (3,)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((), (3,))]).flatmap(
    lambda shapes: st.tuples(*(arrays.arrays(np.float64, shape, elements=FINITE) for shape in shapes))
)


def fractions(dyadic: Dyadic) -> np.ndarray:
    """The values, as fractions; the numbers have to be Python's own integers, which do not overflow."""
    numbers = np.asarray(dyadic.numbers, dtype=object)
    assert all(type(number) is int for number in numbers.flat)
    return np.array(
        [Fraction(number) * Fraction(2) ** dyadic.exponent for number in numbers.flat], dtype=object
    ).reshape(numbers.shape)


def exact(array: np.ndarray) -> np.ndarray:
    """The values of floats, as Python reads them."""
    return np.array([Fraction(float(value)) for value in array.flat], dtype=object).reshape(array.shape)


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.shape == right.shape and all(a == b for a, b in zip(left.flat, right.flat, strict=True))


@given(ARRAYS)
def test_a_float_array_has_its_own_value(array: np.ndarray) -> None:
    assert same(fractions(Dyadic.from_floats(array)), exact(array))


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 5e-324, -5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 2.0**52]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_ends_of_the_range_have_their_own_values(value: float, dtype: type) -> None:
    with np.errstate(over="ignore"):
        array = np.array([value, 1.0, 0.1]).astype(dtype)
    array = array[np.isfinite(array)]
    assert same(fractions(Dyadic.from_floats(array)), exact(array.astype(np.float64)))


@given(ARRAYS)
def test_the_exponent_is_the_largest_of_at_most_zero_that_leaves_integers(array: np.ndarray) -> None:
    dyadic = Dyadic.from_floats(array)
    odd = [number % 2 for number in dyadic.numbers.flat]
    assert any(odd) or dyadic.exponent == 0


@pytest.mark.thorough
@given(PAIRS)
def test_sums_differences_and_products_are_exact(pair: tuple[np.ndarray, np.ndarray]) -> None:
    left, right = pair
    a, b = Dyadic.from_floats(left), Dyadic.from_floats(right)
    assert same(fractions(a + b), np.asarray(exact(left) + exact(right), dtype=object))
    assert same(fractions(a - b), np.asarray(exact(left) - exact(right), dtype=object))
    assert same(fractions(a * b), np.asarray(exact(left) * exact(right), dtype=object))


@given(
    arrays.arrays(np.float64, (2, 3), elements=FINITE | st.floats(width=32, allow_nan=False, allow_infinity=False)),
    arrays.arrays(np.float64, (3,), elements=FINITE),
    st.integers(1, 10**40),
)
def test_products_with_a_matrix_are_exact(matrix: np.ndarray, vector: np.ndarray, factor: int) -> None:
    x = Dyadic.from_floats(vector)
    found = Dyadic(x.numbers * factor, x.exponent).weighed(matrix, 3, lambda a, b: b @ a.T)
    assert same(fractions(found), exact(matrix) @ (exact(vector) * factor))


@pytest.mark.parametrize("terms", [1, 3, 1_000, 100_000])
def test_the_largest_sums_of_digits_are_exact(terms: int) -> None:
    """Every digit is as large as it can be, of either sign, so that a sum of one bit more would be rounded."""
    bits = (53 - terms.bit_length()) // 2
    for weight, number in ((2.0**bits - 1, -(2**bits)), (-(2.0**53 - 1), 2 ** (3 * bits) - 1)):
        x = Dyadic(np.full(terms, number, dtype=object), 0)
        found = x.weighed(np.full((1, terms), weight), terms, lambda a, b: b @ a.T)
        assert fractions(found).tolist() == [terms * int(weight) * number]


@given(ARRAYS, st.integers(0, 2000))
def test_a_smaller_exponent_changes_no_value(array: np.ndarray, less: int) -> None:
    dyadic = Dyadic.from_floats(array)
    moved = Dyadic(np.asarray(dyadic.at(dyadic.exponent - less), dtype=object), dyadic.exponent - less)
    assert same(fractions(moved), exact(array))
