"""Evaluation of a network in float64, or in a wider format, with a running error bound.

It serves networks for which exact arithmetic is too slow, and those with irrational values (Sigmoid, Tanh, GELU, …).

How errors go from node to node, ``network.enclosure`` says. Here the values are computed by numpy, with the products of
``exact``, and a sum of n terms is off by at most

    c(n) = γ_{n+4},    γ_n = n·u / (1 − n·u), u = 2⁻⁵³ (2⁻⁶⁴ in the wide format),

of the sum of the absolute values (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002,
section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.enclosure import Arithmetic, Enclosed, whole
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Affine, Conv2d, Curve, Linear, Scale, Sparse
from verifiable_relu.rounding import ENCLOSE_TINY, ENCLOSE_UNITS
from verifiable_relu.spec.property import Property
from verifiable_relu.trust.exact import Array, Weighted, array, product

_erf, _erfc = (np.vectorize(function, otypes=[np.float64]) for function in (math.erf, math.erfc))
_Slope = Callable[[Array, Array, float], Any]


@dataclass(frozen=True)
class Checked:
    """A function f(x, α) on float64 arrays.

    Attributes:
        value: f, off by a few units in the last place and of what ``beside`` says.
        slope: of (low, high, α), or a number: ≥ |f′(x, α)| for low ≤ x ≤ high, up to a few units in the last place.
        beside: what the error of ``value`` is relative to, in addition to the value itself.
        wide: whether ``value`` is as accurate in wider formats than float64.
    """

    value: Callable[[Array, float], Any]
    slope: _Slope | float
    beside: Callable[[Array], Array | float] = lambda x: 1.0
    wide: bool = True

    def steepest(self, low: Array, high: Array, alpha: float) -> Any:
        """Return the largest slope between ``low`` and ``high``."""
        return self.slope(low, high, alpha) if callable(self.slope) else self.slope


def _sigmoid(x: Array) -> Any:
    # Of a negative x all digits count: SiLU and its like are multiples of this.
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _softplus(x: Array) -> Any:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _largest(low: Array, high: Array) -> Any:
    return np.maximum(np.abs(low), np.abs(high))


def _inside(slope: Callable[[Array], Any]) -> _Slope:
    """Return the largest slope of a function on (−1, 1) that is steepest at the ends: by 1 − x² there, inf beyond."""

    def steepest(low: Array, high: Array, _: float) -> Any:
        far = _largest(low, high)
        return np.where(far < 1, slope(np.maximum((1 - far) * (1 + far), 0)), np.inf)

    return steepest


def _falling(slope: Callable[[Array, float], Any], least: float = 0.0) -> _Slope:
    """Return the largest slope of a function that is steepest at the lower end: infinite from ``least`` down."""
    return lambda low, high, alpha: np.where(low > least, slope(np.maximum(low, least), alpha), np.inf)


def _reciprocal(low: Array, high: Array, _: float) -> Any:
    return np.where((low > 0) | (high < 0), np.minimum(np.abs(low), np.abs(high)), 0.0) ** -2.0


CHECKED: dict[str, Checked] = {
    # Of a sigmoid what is lost is bounded absolutely, which is enough here: tanh(x/2)/2 + 1/2 overflows nowhere.
    "Sigmoid": Checked(lambda x, _: 0.5 + 0.5 * np.tanh(x / 2), 0.25),
    "Tanh": Checked(lambda x, _: np.tanh(x), 1.0),
    # The slope of x·Φ(λx) lies in [−0.12890, 1.12890] for every λ (arXiv 2603.21991). The computed argument t of Φ has
    # a relative error of a few u, which changes Φ(t) by at most that relative error times |t·φ(t)| < 1/4. The
    # complementary error function keeps its relative accuracy in the tail.
    "GELU": Checked(lambda x, lam: x * (0.5 * _erfc(-lam * x / math.sqrt(2))), 1.1290, np.abs, False),
    "SiLU": Checked(lambda x, _: x * _sigmoid(x), 1.0999),
    "Mish": Checked(lambda x, _: x * np.tanh(_softplus(x)), 1.0889),
    "tanh-GELU": Checked(lambda x, _: x * _sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)), 1.1295, wide=False),
    "ELU": Checked(
        lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
        lambda low, high, alpha: max(1.0, alpha),
    ),
    "Softplus": Checked(lambda x, _: _softplus(x), 1.0),
    "Softsign": Checked(lambda x, _: x / (1 + np.abs(x)), 1.0),
    "HardSwish": Checked(lambda x, _: x * np.clip(x + 3, 0, 6) / 6, 1.5),
    "Erf": Checked(lambda x, _: _erf(x), 1.1284, wide=False),
    "Atan": Checked(lambda x, _: np.arctan(x), 1.0),
    "Asin": Checked(lambda x, _: np.arcsin(x), _inside(lambda rest: 1 / np.sqrt(rest))),
    "Acos": Checked(lambda x, _: np.arccos(x), _inside(lambda rest: 1 / np.sqrt(rest))),
    "Atanh": Checked(lambda x, _: np.arctanh(x), _inside(lambda rest: 1 / rest)),
    "Acosh": Checked(lambda x, _: np.arccosh(x), _falling(lambda low, _: 1 / np.sqrt((low - 1) * (low + 1)), 1.0)),
    "Asinh": Checked(lambda x, _: np.arcsinh(x), 1.0),
    "Sin": Checked(lambda x, _: np.sin(x), 1.0),
    "Cos": Checked(lambda x, _: np.cos(x), 1.0),
    "Exp": Checked(lambda x, _: np.exp(x), lambda low, high, _: np.exp(high)),
    "Square": Checked(lambda x, _: x * x, lambda low, high, _: 2 * _largest(low, high)),
    "Cube": Checked(lambda x, _: x**3, lambda low, high, _: 3 * _largest(low, high) ** 2),
    "Log": Checked(lambda x, _: np.log(x), _falling(lambda low, _: 1 / low)),
    "Reciprocal": Checked(lambda x, _: 1 / x, _reciprocal),
    "InverseRoot": Checked(lambda x, _: 1 / np.sqrt(x), _falling(lambda low, _: 0.5 * low**-1.5)),
    "Sqrt": Checked(lambda x, _: np.sqrt(x), _falling(lambda low, _: 0.5 / np.sqrt(low))),
    "Power": Checked(
        lambda x, p: x**p, lambda low, high, p: np.where(low >= 0, p * np.maximum(high, 0) ** (p - 1), np.inf)
    ),
    "Root": Checked(lambda x, p: x**p, _falling(lambda low, p: p * low ** (p - 1))),
}
"""By the names that nodes have for them; the parameter is α of ELU, λ of GELU, the exponent of a power, and any number
for the others.

Written from the functions' definitions, apart from the tables of nodes and bounds, whose claims they serve to check.
"""


def _as(x: Array, tensor: Tensor) -> Array:
    """Return the numbers of a float32 or float64 tensor in the format of ``x``, which represents all exactly."""
    return array(tensor).astype(x.dtype)


def _weighted_spread(node: Weighted, size: Array, part: float) -> Array:
    offset = np.abs(_as(size, node.offset())) + node.offset_terms
    return product(node, np.abs(_as(size, node.weight)), size) + part * offset


def _scaled(node: Scale, x: Array) -> Array:
    center, scale, shift = (_as(x, tensor) for tensor in (node.center, node.scale, node.shift))
    return scale * (x - center) + shift


def _scaled_spread(node: Scale, size: Array, part: float) -> Array:
    center, scale, shift = (np.abs(_as(size, tensor)) for tensor in (node.center, node.scale, node.shift))
    return scale * (size + part * center) + part * (shift + node.offset_terms)


MAPS: Table[tuple[Callable[..., Array], Callable[..., Array]]] = Table(
    "evaluation with error bounds",
    {
        **dict.fromkeys(
            (Linear, Conv2d, Sparse),
            (lambda node, x: product(node, _as(x, node.weight), x) + _as(x, node.offset()), _weighted_spread),
        ),
        Scale: (_scaled, _scaled_spread),
    },
    group=Affine,
)
"""W·x + b of one sample, and |W|·size + part·|b|, of each kind of affine map."""


class _Floats(Arithmetic):
    """A format of numpy, with the products and functions of this package."""

    tiny = ENCLOSE_TINY
    knows_zeros = True

    def __init__(self, dtype: type[np.floating[Any]]) -> None:
        self.unit = ENCLOSE_UNITS[dtype]

    def sums(self, terms: int) -> float:
        return (terms + 4) * self.unit / (1 - (terms + 4) * self.unit)

    def affine(self, node: Affine, x: Array) -> Array:
        return MAPS[node][0](node, x[0])[None]

    def spread(self, node: Affine, size: Array, part: float) -> Array:
        return MAPS[node][1](node, size[0], part)[None]

    def curve(self, node: Curve, x: Enclosed) -> tuple[Array, Array | float, Array | float]:
        known, alpha = CHECKED[node.function], float(node.parameter)
        steepest = known.steepest(x.value - x.error, x.value + x.error, alpha)
        return known.value(x.value, alpha), steepest, known.beside(x.value)


# An overflow or a division by zero leaves an error of inf or NaN, which ``margin_range`` recognises; numpy's warnings
# would add nothing.
@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def enclose(network: Network, x: Sequence[Fraction], dtype: type[np.floating[Any]] = np.float64) -> Enclosed:
    """Return the outputs of ``network`` at an exact point, each with a bound of its error.

    Args:
        network: any network without activations that stand for sets of functions.
        x: the input variables in row-major order.
        dtype: one of ``formats(network)``.

    Returns:
        The output variables, flat in row-major order.

    Raises:
        UnsupportedError: if the network has a node of a kind that is refused.
    """
    by, near = _Floats(dtype), [float(value) for value in x]
    rest = [
        float(value - Fraction(first)) if math.isfinite(first) else 0.0 for value, first in zip(x, near, strict=True)
    ]
    point = (np.array(near, dtype) + np.array(rest, dtype)).reshape(1, *network.input_shape)
    exact = np.array([math.isfinite(n) and Fraction(n) == v for v, n in zip(x, near, strict=True)]).reshape(point.shape)
    values = [Enclosed(point, np.where(exact, 0, 2 * by.unit * np.abs(point) + by.tiny))]
    for index, node in enumerate(network.nodes[1:], 1):
        found = by.enclosed(node, [values[i] for i in node.inputs])
        values.append(whole(found) if index in network.whole else found)
    last = values[-1]
    return Enclosed(last.value.flatten(), np.broadcast_to(last.error, last.value.shape).flatten())


def formats(network: Network) -> list[type[np.floating[Any]]]:
    """Return the formats in which a network can be enclosed, from narrow to wide."""
    curves = [node.function for node in network.nodes if isinstance(node, Curve)]
    return list(ENCLOSE_UNITS) if all(CHECKED[name].wide for name in curves if name in CHECKED) else [np.float64]


def margin_range(prop: Property, y: Enclosed) -> tuple[Fraction | float, Fraction | float]:
    """Return a lower and an upper bound of a property's margin at the true outputs that ``y`` encloses.

    The bounds are computed in rational arithmetic, so that the errors of ``y`` alone widen the range.

    Returns:
        (lower, upper); (−inf, inf) if an output or its error is not finite.
    """
    if not (np.isfinite(y.value).all() and np.isfinite(y.error).all()):
        return -math.inf, math.inf
    center, error = ([Fraction(*v.as_integer_ratio()) for v in part] for part in (y.value, y.error))
    low: Fraction | float = math.inf
    high: Fraction | float = math.inf
    for polytope in prop.unsafe:
        slacks = [
            (row.slack(center), sum((abs(c) * error[i] for i, c in row.coefficients), Fraction(0))) for row in polytope
        ]
        low = min(low, max((slack - spread for slack, spread in slacks), default=-math.inf))
        high = min(high, max((slack + spread for slack, spread in slacks), default=-math.inf))
    return low, high
