"""Numbers derived from a network's own, with bounds of their errors; all of them are computed here.

Verdicts are about real arithmetic on the numbers that a network's file stores. Where an operator needs other numbers
(constants computed from constants, 1/c of a division, γ/√(σ² + ε) of a batch normalisation, √2·k of a spelled GELU),
they are computed here in rational arithmetic, roots and exponentials to at least 160 bits, and rounded once, to the
nearest float64 number. A node then stores a number that is exact, or has a proven relative error, the node's
``weight_error``. A relative error says nothing about a number that vanishes or overflows, so that a number that is not
exact must lie in float64's normal range; any other is refused.
"""

from __future__ import annotations

import decimal
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu import rounding
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.rounding import DECIMAL, UNIT, above, below, not_below

LAMBDA_ERROR = 4 * UNIT
"""The largest relative error that one of two steps adds to the λ of a λ-GELU (``hardness``, ``readers.simplify``).

Both move x·Φ(λx) by no more than their own part of 0.294/λ, and of |x|/4: much less than what bounds and evaluation
grant to the computation of λ-GELU, 64 units of roundoff of 1/λ and of |x|.
"""

_BITS = 160
_DIGITS = decimal.Context(prec=60, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX, traps=[decimal.InvalidOperation])
_MAX_EXPONENT = 10_000
_FLOAT64 = np.dtype(np.float64)
_INFINITE = 2**1024 - 2**970
"""Half a step above the largest float64 number: from here on the nearest one is infinite."""


@dataclass(frozen=True, eq=False)
class Derived:
    """Array of numbers, each known up to a relative error.

    Attributes:
        values: of dtype object: fractions, and ±inf as floats where a number is infinite.
        error: |true − value| ≤ error·|value| for each of them; 0 means that they are exact.
    """

    values: np.ndarray
    error: Fraction = Fraction(0)

    @staticmethod
    def from_numbers(numbers: np.ndarray | Derived) -> Derived:
        """Return the exact numbers of an array of floats or integers; NaN is refused."""
        if isinstance(numbers, Derived):
            return numbers
        if np.issubdtype(numbers.dtype, np.floating) and bool(np.isnan(numbers).any()):
            raise InputError("a constant is NaN")
        exact = int if np.issubdtype(numbers.dtype, np.integer) or numbers.dtype == np.bool_ else float
        return Derived(_each(lambda x: Fraction(exact(x)) if math.isfinite(x) else float(x), numbers))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def moved(self, move: Callable[[np.ndarray], Any]) -> Derived:
        """Return the numbers after a move that computes nothing, or one that is exact for each number by itself."""
        return Derived(_array(move(self.values)), self.error)


def _array(values: Any) -> np.ndarray:
    """Return an array; arithmetic on arrays without axes gives bare numbers, which are packed again."""
    if isinstance(values, np.ndarray):
        return values
    packed = np.empty((), dtype=object)
    packed[()] = values
    return packed


def _each(function: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray:
    return _array(np.frompyfunc(function, len(arrays), 1)(*arrays))


def both(first: float, second: float) -> float:
    """Return the relative error of a product of two numbers with relative errors."""
    return first or second if not (first and second) else not_below((1 + Fraction(first)) * (1 + Fraction(second)) - 1)


# Arithmetic


def linear(function: Callable[..., Any], *operands: Derived) -> Derived:
    """Return a sum of products of numbers of the operands, at most one of each in a product.

    The ``function`` takes an object array for each operand; it adds and multiplies, and subtracts nothing. With
    relative errors e_i, the sum's error is (Π(1 + e_i) − 1) times the sum of the products' sizes; it is refused if
    cancellation leaves no digit certain.
    """
    found = _array(function(*(one.values for one in operands)))
    if any(isinstance(x, float) and math.isnan(x) for x in found.flat):
        raise UnsupportedError("computes a constant that is no number from infinite ones")
    if not any(one.error for one in operands):
        return Derived(found)
    part = math.prod((1 + one.error for one in operands), start=Fraction(1)) - 1
    sizes = _array(function(*(_each(abs, one.values) for one in operands)))
    shares: list[Any] = [s / abs(x) if x else math.inf for x, s in zip(found.flat, sizes.flat, strict=True) if s]
    if any(isinstance(share, float) for share in shares):
        raise UnsupportedError("computes a constant that rounding may have lost")
    return Derived(found, max(shares, default=Fraction(1)) * part)


def selected(function: Callable[..., Any], *operands: Derived) -> Derived:
    """Return a function of exact numbers, element by element; others are refused."""
    if any(one.error for one in operands):
        raise UnsupportedError("computes with a constant that is known up to rounding only")
    return Derived(_each(function, *(one.values for one in operands)))


def reciprocal(x: Derived) -> Derived:
    """Return 1/x; a division by zero is refused."""
    if not all(x.values.flat):
        raise InputError("divides by zero")
    return Derived(_each(lambda v: 1 / v, x.values), x.error / (1 - x.error))


def root(x: Derived) -> Derived:
    """Return √x, off by at most 2⁻¹⁶⁰ of itself where it is irrational; a negative number is refused."""
    if any(v < 0 for v in x.values.flat):
        raise InputError("takes the root of a negative number")

    def one(value: Fraction) -> Fraction:
        top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if top * top == value.numerator and bottom * bottom == value.denominator:
            return Fraction(top, bottom)
        # √(n/d) = √(n·d)/d, with enough binary places that the root's whole part has more than 160 bits.
        product = value.numerator * value.denominator
        places = max(0, _BITS + 1 - product.bit_length() // 2)
        return Fraction(math.isqrt(product << 2 * places), value.denominator << places)

    values = _each(one, x.values)
    exact = all(r * r == v for r, v in zip(values.flat, x.values.flat, strict=True))
    # √(1 + e) is at most 1 + e/2, and √(1 − e) at least 1 − (e + e²)/2.
    error = Fraction(0) if exact else Fraction(1, 2**_BITS)
    return Derived(values, (1 + error) * (1 + (x.error + x.error**2) / 2) - 1)


def exponential(x: Derived) -> Derived:
    """Return eˣ, to about 50 digits; large exponents are refused."""
    most = max((abs(v) for v in x.values.flat), default=Fraction(0))
    if most > _MAX_EXPONENT:
        raise UnsupportedError("the exponential of a large constant")
    values = _each(lambda v: Fraction(_decimal(v).exp(_DIGITS)), x.values)
    return Derived(values, DECIMAL + 2 * x.error * most)


def logarithm(x: Derived) -> Derived:
    """Return the natural logarithm of exact numbers > 0, to about 50 digits of 1; numbers next to 1 are refused."""
    if not all(v > 0 for v in x.values.flat):
        raise InputError("takes the logarithm of a number that is not positive")
    values = selected(lambda v: Fraction(_decimal(v).ln(_DIGITS)), x).values
    # The logarithm of 1 is exact.
    least = min((abs(v) for v in values.flat if v), default=Fraction(1))
    if least < rounding.LEAST_LOGARITHM:
        raise UnsupportedError("the logarithm of a constant next to 1")
    return Derived(values, DECIMAL / min(least, Fraction(1)))


def _decimal(value: Fraction) -> decimal.Decimal:
    return _DIGITS.divide(decimal.Decimal(value.numerator), decimal.Decimal(value.denominator))


def exact_sum(first: np.ndarray, second: np.ndarray) -> np.ndarray | None:
    """Return the sum of two arrays in float64 where it is exact, whatever their sizes; else None.

    What a sum rounds off is a float64 number (D. E. Knuth, The Art of Computer Programming 2, 4.2.2, theorem B).
    """
    a, b = first.astype(np.float64), second.astype(np.float64)
    with np.errstate(all="ignore"):
        total = a + b
        part = total - a
        rest = (a - (total - part)) + (b - part)
    return np.asarray(total) if bool((rest == 0).all()) else None


def exact_product(first: np.ndarray, second: np.ndarray) -> np.ndarray | None:
    """Return the product of two arrays in float64 where their types say that it is exact; else None."""
    short = (np.float16, np.float32, np.int8, np.uint8, np.int16, np.uint16)
    if first.dtype not in short or second.dtype not in short:
        return None
    return np.asarray(first.astype(np.float64) * second.astype(np.float64))


# Numbers as they are stored


def settled(x: Derived, like: np.dtype) -> np.ndarray | Derived:
    """Return an array of the type ``like``, or of float64, where that holds the numbers exactly; else the numbers."""
    for kind in () if x.error else (like, _FLOAT64):
        with np.errstate(over="ignore"):
            narrow = _nearest(x.values).astype(kind)
        # A fraction compares with a float exactly.
        if all(v == float(n) for v, n in zip(x.values.flat, narrow.flat, strict=True)):
            return narrow
    return x


def _nearest(values: np.ndarray) -> np.ndarray:
    # The division of Python's integers rounds to nearest, denormal results too.
    found = _each(lambda v: float(v) if abs(v) < _INFINITE else math.inf if v > 0 else -math.inf, values)
    return np.asarray(found, dtype=np.float64)


def cast(x: Derived, kind: np.dtype) -> np.ndarray:
    """Return the numbers in another type, rounded: to nearest for floats, towards 0 for integers.

    Refused if a number's error leaves the result open, or the type cannot hold it.
    """
    made = [{_cast(v * (1 + sign * x.error), kind) for sign in (-1, 1)} for v in x.values.flat]
    if any(len(found) > 1 for found in made):
        raise UnsupportedError("casts a constant that is known up to rounding only")
    return np.array([value for found in made for value in found], dtype=kind).reshape(x.shape)


def _cast(value: Fraction | float, kind: np.dtype) -> Any:
    if np.issubdtype(kind, np.integer):
        info = np.iinfo(kind)
        if not info.min - 1 < value < info.max + 1:
            raise UnsupportedError("casts a constant to whole numbers that cannot hold it")
        return math.trunc(value)
    if kind == np.bool_:
        return value != 0
    with np.errstate(over="ignore"):
        near = _nearest(_array(value)).astype(kind)[()]
        # Rounded twice, it may be the neighbour of the nearest number.
        finite = [n for n in (near, below(near), above(near)) if np.isfinite(n)]
    if not np.isfinite(near) or not finite:
        return near
    # Of two that are as near, the one with an even last digit.
    return min(finite, key=lambda n: (abs(Fraction(float(n)) - value), int(n.view(f"u{kind.itemsize}")) & 1))


def rounded(x: Derived) -> tuple[Tensor, float]:
    """Return the nearest float64 numbers, and their relative error.

    A number that is not exact is refused if it is beyond float64's normal range, or not known well.
    """
    exact = settled(x, _FLOAT64)
    if isinstance(exact, np.ndarray):
        return torch.from_numpy(exact), 0.0
    nearest = _nearest(x.values)
    _require_normal(nearest, x.values != 0)
    error = (1 + x.error) * (1 + UNIT) - 1
    if error > rounding.LARGEST_ERROR:
        raise UnsupportedError("a number with too few known digits")
    return torch.from_numpy(nearest), not_below(error)


def _require_normal(found: np.ndarray, there: np.ndarray) -> None:
    """Refuse numbers that are infinite, or too small though the exact number is not 0 (``there``)."""
    if not bool(np.isfinite(found).all()):
        raise UnsupportedError("a factor or constant beyond the range of float64")
    if bool((there & (np.abs(found) < rounding.TINY)).any()):
        raise UnsupportedError("a factor or constant below the range of float64")


def quotient(numerator: Tensor | float, divisor: Tensor) -> tuple[Tensor, float]:
    """Return the nearest float64 numbers to numerator/divisor, element by element, and their relative error.

    It is 0 where all divisors are powers of two. A division by zero is refused, and a quotient beyond the normal range.
    """
    top = torch.as_tensor(numerator, dtype=torch.float64).detach().cpu().numpy()
    bottom = divisor.detach().cpu().double().numpy()
    if not bool((bottom != 0).all()):
        raise InputError("divides by zero")
    with np.errstate(all="ignore"):
        found = np.array(top / bottom)
    _require_normal(found, top != 0)
    return torch.from_numpy(found), 0.0 if (np.abs(np.frexp(bottom)[0]) == 0.5).all() else float(UNIT)


def scaled(numbers: Tensor, factor: float) -> tuple[Tensor, float]:
    """Return numbers·factor in float64, for a float32 number ``factor``, and its relative error.

    It is 0 for float32 numbers, whose products float64 holds, and where the factor is a power of two. A product of
    float64 numbers beyond float64's normal range is refused.
    """
    if factor == 1.0:
        return numbers, 0.0
    found = numbers.double() * factor
    if numbers.dtype == torch.float32:
        return found, 0.0
    _require_normal(found.numpy(), (numbers != 0).numpy() & (factor != 0))
    return found, 0.0 if abs(math.frexp(factor)[0]) == 0.5 else float(UNIT)


def share(count: int) -> tuple[Tensor, float]:
    """Return 1/count, and its relative error: in float32 where it is a power of two, else in float64."""
    number, error = quotient(1.0, torch.tensor(float(count), dtype=torch.float64))
    return (number if error else number.float()), error


def deviations(gamma: Tensor, variance: Tensor, epsilon: float) -> tuple[Tensor, float]:
    """Return the nearest float64 numbers to γ/√(σ² + ε), and their relative error; σ² + ε ≤ 0 is refused."""
    spread = Derived.from_numbers(variance.detach().cpu().numpy()).moved(lambda values: values + Fraction(epsilon))
    if not all(value > 0 for value in spread.values.flat):
        raise InputError("its variance plus epsilon is not positive")
    factor = Derived.from_numbers(gamma.detach().cpu().numpy())
    found, error = rounded(linear(operator.mul, factor, reciprocal(root(spread))))
    return found.to(gamma.device), error


def multiple(factor: Fraction | Derived, error: Fraction = Fraction(0)) -> tuple[Tensor, float] | None:
    """Return a factor as one number, in float32 if that holds it, and its relative error; None if it is refused."""
    try:
        number, off = rounded(factor if isinstance(factor, Derived) else Derived(_array(factor), error))
    except UnsupportedError:
        return None
    single = number.reshape(()).float()
    return (single if single.double() == number else number.reshape(())), off


def hardness(factor: Fraction, error: Fraction) -> Tensor | None:
    """Return √2·factor, the λ of a GELU spelled with erf(factor·x), factor > 0; None if it is too far off."""
    found = multiple(root(Derived(_array(2 * factor * factor), 2 * error + error * error)))
    return None if found is None or found[1] > LAMBDA_ERROR else found[0]
