"""Rounding errors: all the constants and outward roundings that account for floating-point arithmetic.

Verdicts are about real arithmetic on the stored weights; most of what leads to them is computed in floating point. What
may be off by rounding is moved outward with what this module has, and each entry says why it is enough. Elsewhere in
the verifier there are no machine epsilons, neighbouring numbers or small factors, and a test refuses them.
``bounds.steps`` and ``bounds.neuron_bounds`` compose these entries to the errors of steps of bound propagation.

**The model.** The standard model of floating point, fl(a∘b) = (a∘b)·(1 + δ) with |δ| ≤ u, where u is half the distance
from 1 to the next number, and what follows from it for sums. For a sum of n products, in every order of summation, with
and without fused multiply-add,

    |fl(Σ a_i·b_i) − Σ a_i·b_i| ≤ γ_n · Σ |a_i|·|b_i|,   γ_n = n·u / (1 − n·u)

(N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002, section 3.1). Results below the
smallest normal number may lose all of their digits, or be taken for zero: the model then lacks an absolute term, which
``tiny`` bounds.

The module does not import torch before it is asked about a dtype: readers of properties do without it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Numbers = TypeVar("Numbers", "Tensor", np.ndarray, np.floating[Any], float)


@cache
def _finfo(dtype: torch.dtype) -> torch.finfo:
    import torch

    return torch.finfo(dtype)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff u of the standard model: half the distance from 1 to the next number."""
    return _finfo(dtype).eps / 2


def epsilon(dtype: torch.dtype) -> float:
    """Return the distance 2u from 1 to the next number."""
    return _finfo(dtype).eps


def tiny(dtype: torch.dtype) -> float:
    """Return the smallest normal number: smaller ones may be lost."""
    return _finfo(dtype).tiny


def largest(dtype: torch.dtype) -> float:
    """Return the largest finite number."""
    return _finfo(dtype).max


UNIT = Fraction(1, 2**53)
"""The unit roundoff of float64: a number of the normal range is off from the nearest float64 number by no more than
this part of that."""

LARGEST_ERROR = Fraction(1, 2**48)
"""The largest relative error of a number of a file that is stored rounded: 32 units of roundoff."""

TINY, LARGEST = sys.float_info.min, sys.float_info.max
"""The smallest normal number of float64, below which ``UNIT`` bounds no relative error, and the largest one."""

LEAST = math.ulp(0.0)
"""The smallest float64 number above 0, 2⁻¹⁰⁷⁴: an underflow loses half of it, at most."""

LARGEST_SINGLE = float(np.finfo(np.float32).max)
"""The largest number of float32."""

DECIMAL = Fraction(1, 10**50)
"""The relative error of an exponential or logarithm of 60 decimal digits, its argument of 60 digits included.

The argument is off by 10⁻⁵⁹ of itself, and at most 10⁴, so that an exponential is off by 10⁻⁵⁵ of itself, to which the
result's own 10⁻⁵⁹ are added. A logarithm is off by 10⁻⁵⁹ of 1: relative to itself that is more where it is small, which
the caller divides by; it refuses those below ``LEAST_LOGARITHM``, for which 10⁻³⁰ would be left.
"""

LEAST_LOGARITHM = Fraction(1, 10**20)
"""The smallest logarithm of a constant other than 1 that is stored (``DECIMAL``)."""


def above(x: Numbers) -> Numbers:
    """Return the next larger number of the same dtype.

    The true value of a result that was rounded once, to nearest, lies between the neighbours of the result.
    """
    return _neighbour(x, math.inf)


def below(x: Numbers) -> Numbers:
    """Return the next smaller number of the same dtype (``above``)."""
    return _neighbour(x, -math.inf)


def _neighbour(x: Numbers, end: float) -> Numbers:
    # A float64 scalar of numpy is a Python float, too.
    if isinstance(x, np.ndarray | np.generic):
        return np.nextafter(x, x.dtype.type(end))
    if isinstance(x, float):
        return math.nextafter(x, end)
    return x.nextafter(x.new_full((), end))


def not_below(number: Fraction | int) -> float:
    """Return the smallest float64 not below an exact number; an OverflowError beyond the range of float64."""
    # Python's quotient of integers is the nearest float.
    nearest = number.numerator / number.denominator
    n, d = nearest.as_integer_ratio()
    return nearest if n * number.denominator >= number.numerator * d else above(nearest)


def not_above(number: Fraction | int) -> float:
    """Return the largest float64 not above an exact number; raises as ``not_below``."""
    # The difference of two zeros is 0.0, and not −0.0.
    return 0.0 - not_below(-number)


def varies(lower: Numbers, upper: Numbers) -> Any:
    """Return True where [l, u] is wider than two neighbours, to which outward rounding widens a single number."""
    return above(lower) < upper


def divisor(x: Tensor) -> Tensor:
    """Numbers x ≥ 0 to divide by: 0 and what may be taken for it become the smallest normal number."""
    return x.clamp(min=tiny(x.dtype))


def smooth_divisor(x: Tensor) -> Tensor:
    """Numbers x ≥ 0 to divide by where gradients flow: these have 1/x², which √tiny keeps finite."""
    return x.clamp(min=tiny(x.dtype) ** 0.5)


def coarse(dtype: torch.dtype) -> float:
    """Return the size (2u)^(−1/2) from which on numbers are further apart than √(2u), roughly.

    An extremum of a function of period 2π between two such neighbours may exceed both values by a half of its second
    derivative times the square of their distance, which is more than u.
    """
    return epsilon(dtype) ** -0.5


def gamma(terms: int, dtype: torch.dtype) -> float:
    """γ_n for a sum of n = ``terms`` products; an OverflowError if n·u reaches 1/2, where the analysis says nothing."""
    product = terms * unit_roundoff(dtype)
    if product >= 0.5:
        raise OverflowError(f"a sum of {terms} terms has no rounding bound in {dtype}")
    return product / (1 - product)


OWN = 1.01
"""A factor for bounds of errors, which covers the rounding of their own few operations.

A bound that is a sum of n products of numbers that are not negative is off by at most γ_n of itself; this is at most
0.01 for n·u ≤ 0.0099, that is for every n below 9·10¹³ in float64 and below 160,000 in float32.
"""


@cache
def sum_error(terms: int, dtype: torch.dtype) -> float:
    """Return γ_n for a sum of n = ``terms`` products (``gamma``), enlarged by ``OWN`` for the charge itself."""
    return OWN * gamma(terms, dtype)


def negligible(dtype: torch.dtype) -> float:
    """Return more than an operation loses where its result is below the smallest normal number.

    It is so much more that its products with ordinary coefficients are normal numbers: subnormal ones are slow.
    """
    return 2.0**-900 if _finfo(dtype).bits == 64 else 2.0**-100


FEW = 1 + 2.0**-50
"""A factor for a positive float64 number of at most six roundings: the product is no smaller than the true number.

With u = 2⁻⁵³, (1 − u)⁷·(1 + 8u) ≥ 1 + u − 35u² > 1; the seventh rounding is that of the product itself.
"""


COMMON_STEP = 2.0**-30
"""Sums of float64 multiples of it are exact while they are below 2²³: they are multiples of it of at most 53 bits."""

MODERATE = 2.0**-40, 2.0**40
"""Factors in this range neither overflow nor underflow with float32 numbers, nor with products of two of them."""

LEAST_WEIGHT = 2.0**-500
"""Products of two weights at least this large are at least 2⁻¹⁰⁰⁰, so that none underflows in float64."""

LONG_ROW = Fraction(1, 2**30)
"""The loosening of a row with coefficients longer than float64's, relative to the row's largest number.

It is a choice, not an error: it is far above what float64 numbers can be off by, and what is proved of the looser row
holds for the row.
"""

SOFTPLUS_SHARE = 1 - 2.0**-34, 2.0**-33
"""The factor, and its relative error, of softplus where it is taken for its argument x ≥ 20, as torch does.

x < softplus(x) = x + ln(1 + e⁻ˣ) ≤ x·(1 + e⁻²⁰/20), and e⁻²⁰/20 = 1.03·10⁻¹⁰ < 2⁻³³ = 1.16·10⁻¹⁰: x is softplus(x)
times a number from 1 − 2⁻³³ to 1, which is (1 − 2⁻³⁴)·(1 + δ) with |δ| < 2⁻³³.
"""


def mean_of_rows(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums (polytopes,) of weighted bounds and weighted scales of rows (polytopes, rows), rounded up.

    The products are rounded once and the sums of r terms r − 1 times: the values' sum is off by at most γ_r of the sum
    of absolute values, and 2·(r + 2)·2u times that is added; the scales' by γ_r of itself, and (r + 2)·2u times it is.
    """
    eps = epsilon(values.dtype)
    terms = values.shape[1] + 2
    lost = 2 * terms * eps * values.abs().sum(1)
    return above(values.sum(1) + lost), above(scales.sum(1) * (1 + terms * eps))


def quotient_below(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return a lower bound of a quotient q of normal size.

    2u·|q| is at least the distance from q to the next smaller number, below which the true quotient does not lie;
    rounding is monotone, so that the difference, too, is rounded to no more than that number.
    """
    quotient = numerator / denominator
    return quotient - epsilon(quotient.dtype) * quotient.abs()


MEAN = 1e-12
"""The least part of itself by which a mean is moved down: more than 2γ_n of float64 for every n below 4,500."""


def mean_below(lower: Tensor, parts: Tensor, terms: int) -> Tensor:
    """Lower bounds of lower/parts, (rows,); −inf where arithmetic broke down.

    Each of ``parts`` (rows,) is a sum of n = ``terms`` products that are not negative, as computed. It is off by at
    most γ_n of itself, and so is what is divided by it, but for a few operations more: by |lower/parts|·γ/(1 − γ), less
    than twice that of the quotient as computed.
    """
    quotient = lower / parts
    moved = quotient - max(MEAN, 2 * gamma(terms + 4, lower.dtype)) * quotient.abs()
    # Python's min would lose a NaN.
    return moved.masked_fill(~quotient.isfinite(), -math.inf)


SLOPE_STEP = 2.0**-20
"""Slopes of neurons that share a symbol of a zonotope are multiples of it, so that 1 − s is a float32 number, too."""

CUT = 2.0**-20
"""By this part of −v a row of value v is positive, at least, in what is cut off; rounding is to leave half of it."""


def reach_of_cut(values: Tensor, slope: Tensor, width: Tensor, share: float) -> Tensor:
    """Return the distance from the end of each input, (…, inputs), beyond which a row is positive by ``CUT``.

    The linear lower bound of the row is at least v = ``values`` (…) in the box of ``width`` (…, inputs). From the end
    at which it is least, it rises along input i by slope_i·|x_i − end|, ``slope`` (…, inputs) being the sizes of the
    coefficients, and is above 0 where this exceeds −v. Coefficients are off by the part ``share`` of themselves, which
    moves it by at most share·Σ_i slope_i·width_i; the sum's own rounding is a part of ``share``'s surplus, and what
    underflows is below the smallest normal number. The sum, the product and the quotient round a few times by u, for
    which 8u and the next number are enough.
    """
    unit = unit_roundoff(values.dtype)
    rounded = share * (slope * width).sum(-1) + tiny(values.dtype)
    reach = ((1 + CUT) * -values.clamp(max=0) + rounded)[..., None] / slope
    return above(reach * (1 + 8 * unit))


LEAST_WIDTH = 2.0**-60
"""A remainder's width is at least this part of its neuron's size, so that quotients by it do not overflow.

A width may be larger than needed: whatever lies within the narrower band lies within the wider one.
"""

SCALED_LOST = 1e-300
"""What a row of a linear program may be off by for numbers that are too small for float64 once they are scaled.

Columns are scaled such that variables lie in [−1, 1]: scaling loses at most 2⁻¹⁰⁷⁵ of each entry, and n·2⁻¹⁰⁷⁵ of a row
of n entries, which is less than 1e-300 for every n below 10²³.
"""

SAME_SCALE = 2.0**-23
"""The relative difference of a bias's scale from s_x·s_w, which may have been rounded to float32 by other means.

It is two of the roundings that are granted to the bias (``SPARE``).
"""

MOST_WHOLE = 2.0**31 - 1
"""The largest whole number that every integer type of a runtime holds that is read; beyond, 32 bits wrap around."""


@dataclass(frozen=True)
class RuntimeArithmetic:
    """Model of a runtime's computation of a sum of products Σ_k w_k·x_k + b, which verdicts about runtimes rest on.

    Operands may be rounded, the products are summed in float32, and the result may be rounded to a narrower format. The
    sum may be taken in any order and parenthesised in any way, products may be fused with additions, and any number
    below the smallest normal one may be taken for zero, at every step.

    **Derivation.** Let o and s bound the relative errors of rounding an operand and of one operation of the sum. By the
    standard model each product is multiplied by at most two factors 1 + δ with |δ| ≤ o, by at most one with |δ| ≤ s for
    the product itself and one for each of the K additions in which it takes part (N. J. Higham, Accuracy and Stability
    of Numerical Algorithms, 2nd ed., SIAM 2002, section 3.1): the sum is Σ_k w_k·x_k·(1 + θ_k) + b·(1 + θ_0) with

        |θ| ≤ (1 + o)²·(1 + s)ⁿ − 1 ≤ (1 + o)²/(1 − n·s) − 1,   n = K + 1 + ``SPARE``,

    and the result is that sum times 1 + δ with |δ| ≤ r, plus half of the least positive number of its format. ``SPARE``
    operations more are granted to what is not a sum of its own where a runtime fuses operators: the factor γ/√(σ² + ε)
    of a batch normalisation and its product with the weights, a division by a number as a product with its rounded
    reciprocal, a mean as a product with 1/K, and operands that a file has in more digits than float32.

    What is taken for zero, or loses its digits, below the smallest normal number t changes the sum by at most t for
    each product, for each partial sum and for the result, t·|w_k| for an operand x_k, and t·|x_k| for an operand w_k,
    which may be the product of weights of fused operators; all are multiplied by later factors 1 + δ, together less
    than 2. Operands are at most ``largest``.

    Attributes:
        name: of the arithmetic, as users write it.
        operand: o.
        sum: s.
        result: r. Where it is not 0, the network's input and its weights are numbers of the narrower format, too, to
            which they are rounded once.
        largest: of computed values and of the sums of their terms' absolute values, so that nothing overflows.
        lost_result: half of the least positive number of the result's format, where that is not float32.
    """

    name: str
    operand: Fraction
    sum: Fraction
    result: Fraction
    largest: float = 2.0**60
    lost_result: Fraction = Fraction(0)

    def relative(self, terms: int) -> float:
        """Return the bound of |θ| for a sum of K = ``terms`` products; an OverflowError if there is none."""
        spread = (terms + 1 + SPARE) * self.sum
        if spread >= Fraction(1, 2):
            raise OverflowError(f"a sum of {terms} terms has no rounding bound in {self.name}")
        return not_below((1 + self.operand) ** 2 / (1 - spread) - 1)

    def lost(self, terms: int, row: float, small: bool) -> float:
        """Return the most that a sum of K = ``terms`` products may lose to numbers below the smallest normal one.

        ``row`` ≥ Σ_k |w_k| is finite; ``small`` says whether a weight other than zero, or its product with those of
        fused operators, may be smaller than that number.
        """
        tiny_single, weights = Fraction(1, 2**126), terms * Fraction(self.largest) if small else 0
        return not_below(2 * tiny_single * (2 * (terms + 1 + SPARE) + 2 * Fraction(row) + weights) + self.lost_result)


SPARE = 16
"""Roundings that ``RuntimeArithmetic.relative`` grants beyond those of the sum itself."""

ARITHMETICS = {
    known.name: known
    for known in (
        RuntimeArithmetic("float32", Fraction(0), Fraction(1, 2**24), Fraction(0)),
        RuntimeArithmetic("tf32", Fraction(1, 2**10), Fraction(1, 2**23), Fraction(0)),
        RuntimeArithmetic("bfloat16", Fraction(0), Fraction(1, 2**23), Fraction(1, 2**8)),
        RuntimeArithmetic("float16", Fraction(0), Fraction(1, 2**23), Fraction(1, 2**11), 2.0**15, Fraction(1, 2**25)),
    )
}
"""By name. In float32 every operation is rounded to nearest. In TF32 operands are rounded to 10 bits, or cut off after
them; in bfloat16 and float16 inputs, weights and results are rounded to nearest. Sums of these may be cut off, as in
units that multiply matrices. Nothing overflows where values are at most ``largest``: in formats with the exponents of
float32, whose largest number is above 2¹²⁷, wherever in a sum of fewer than 2⁶⁰ terms it happens; in float16, whose
largest is above 2¹⁵·(1 + 2⁻¹), nowhere but in results, since sums are in float32."""

ELEMENTARY = 2.0**-18
"""The absolute error granted to Sigmoid, Tanh and Erf in float32, to both GELUs as a part of their argument, and to Exp
as a part of itself; to a Softmax in addition to the error of a sum of its numbers.

Runtimes compute them by polynomials or quotients of exponentials in float32 that are off by a few units of 2⁻²⁴; this
grants 64. It is a statement about runtimes, not a theorem: the page on soundness says so, and a test measures it. Of a
Softmax of n numbers, exp(x − m) has d = m − x off by d·2⁻²⁴, which changes p ≤ e⁻ᵈ by p·d·2⁻²⁴ < 2⁻²⁵, and the sum by
ln n times 2⁻²⁴ of itself, at most: of the 64 units 12 are more than enough for n ≤ 2¹⁶, and the others are exp's.
"""


def tie(numbers: int, operands: Fraction) -> float:
    """Return the error of a quotient by a scale s, besides its rounding, before it is rounded to a whole number.

    Kernels add the zero point of the result before they round, and take it off after. Those of quantised sums do not
    take off the operands' zero points first, either: of whole numbers a_i they sum a_i·ρ_i, −z_i·ρ_i and the result's
    zero point, ρ_i = s_i/s being rounded. With N_i numbers in a type, |a_i| and |z_i| are at most N_i, so that the
    terms' sizes are together at most M = N + Σ 2·N_i·ρ_i, N = ``numbers`` of the result's type and ``operands`` being
    the sum. A term is rounded by ρ_i, by its product and by each addition in which it takes part, fewer than ``SPARE``
    times for the two operands of such kernels: the sum is off by γ·M.
    """
    spread = SPARE * Fraction(1, 2**24)
    return not_below(spread / (1 - spread) * (numbers + operands))


# Evaluation with a running error (``ir.enclosure``)

ENCLOSE_UNITS: dict[type[np.floating[Any]], float] = {np.float64: 2.0**-53}
if np.longdouble(1) + np.longdouble(2.0**-63) != 1:
    ENCLOSE_UNITS[np.longdouble] = 2.0**-64
"""u of ``ir.enclosure`` by the precisions that there are here: an operation is off by this part of itself, at most.

The wide one is numpy's ``longdouble`` where its numbers have 64 bits or more, as on x86-64 (80387's double extended),
which is looked up by adding 2⁻⁶³ to 1.
"""

ENCLOSE_OWN = 1 + 2.0**-20
"""A factor for error bounds, which covers the rounding of their own operations: fewer than 2³² of them, each 2⁻⁵³."""

ENCLOSE_TINY = 2.0**-1000
"""What each operation in float64 may lose to underflow: 2²² terms of 2⁻¹⁰²² each."""

ULPS = 64
"""Relative error, in units of u, granted to exp, tanh and erfc and the few operations around them."""
