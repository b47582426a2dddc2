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
from verifiable_relu.trust.exact import Array, Weighted, array, bias, product

_erf, _erfc = (np.vectorize(function, otypes=[np.float64]) for function in (math.erf, math.erfc))


@dataclass(frozen=True)
class Checked:
    """A function f(x, α) on float64 arrays.

    Attributes:
        value: f, off by a few units in the last place and of what ``beside`` says.
        steepest: (low, high, α) ≥ |f′(x, α)| for low ≤ x ≤ high, up to a few units in the last place.
        beside: what the error of ``value`` is relative to beside the value itself, by (x, α).
        wide: whether ``value`` is as accurate in wider formats than float64.
    """

    value: Callable[[Array, float], Array]
    steepest: Callable[[Array, Array, float], Array | float]
    beside: Callable[[Array, float], Array | float] = lambda x, alpha: 1.0
    wide: bool = True


def _at_most(slope: float) -> Callable[[Array, Array, float], float]:
    return lambda low, high, alpha: slope


def _largest(low: Array, high: Array) -> Array:
    found: Array = np.maximum(np.abs(low), np.abs(high))
    return found


def _sigmoid(x: Array) -> Array:
    # Of a negative x all digits count: SiLU and its like are multiples of this.
    small = np.exp(-np.abs(x))
    found: Array = np.where(x >= 0, 1 / (1 + small), small / (1 + small))
    return found


def _softplus(x: Array) -> Array:
    found: Array = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return found


def _tanh_gelu(x: Array) -> Array:
    return x * _sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


def _elu(x: Array, alpha: float) -> Array:
    found: Array = np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))
    return found


def _inverse_root(low: Array) -> Array:
    found: Array = np.where(low > 0, 0.5 / np.sqrt(np.maximum(low, 0)), np.inf)
    return found


def _inside(slope: Callable[[Array], Array]) -> Callable[[Array, Array, float], Array]:
    """The largest slope of a function on (−1, 1) that is steepest at the ends: by 1 − x² there, infinite beyond."""

    def steepest(low: Array, high: Array, _: float) -> Array:
        far = _largest(low, high)
        found: Array = np.where(far < 1, slope(np.maximum((1 - far) * (1 + far), 0)), np.inf)
        return found

    return steepest


def _least(low: Array, high: Array) -> Array:
    """The least |x| for low ≤ x ≤ high."""
    found: Array = np.where((low > 0) | (high < 0), np.minimum(np.abs(low), np.abs(high)), 0.0)
    return found


def _gelu(x: Array, lam: float) -> Array:
    # The complementary error function keeps its relative accuracy in the tail.
    found: Array = x * (0.5 * _erfc(-lam * x / math.sqrt(2)))
    return found


CHECKED: dict[str, Checked] = {
    # Of a sigmoid what is lost is bounded absolutely, which is enough here: tanh(x/2)/2 + 1/2 overflows nowhere.
    "Sigmoid": Checked(lambda x, _: 0.5 + 0.5 * np.tanh(x / 2), _at_most(0.25)),
    "Tanh": Checked(lambda x, _: np.tanh(x), _at_most(1.0)),
    # The slope of x·Φ(λx) lies in [−0.12890, 1.12890] for every λ (arXiv 2603.21991). The computed argument t of Φ has
    # a relative error of a few u, which changes Φ(t) by at most that relative error times |t·φ(t)| < 1/4.
    "GELU": Checked(_gelu, _at_most(1.1290), lambda x, _: np.abs(x), False),
    "SiLU": Checked(lambda x, _: x * _sigmoid(x), _at_most(1.0999)),
    "Mish": Checked(lambda x, _: x * np.tanh(_softplus(x)), _at_most(1.0889)),
    "tanh-GELU": Checked(lambda x, _: _tanh_gelu(x), _at_most(1.1295), wide=False),
    "ELU": Checked(_elu, lambda low, high, alpha: max(1.0, alpha)),
    "Softplus": Checked(lambda x, _: _softplus(x), _at_most(1.0)),
    "Softsign": Checked(lambda x, _: x / (1 + np.abs(x)), _at_most(1.0)),
    "HardSwish": Checked(lambda x, _: x * np.clip(x + 3, 0, 6) / 6, _at_most(1.5)),
    "Erf": Checked(lambda x, _: _erf(x), _at_most(1.1284), wide=False),
    "Atan": Checked(lambda x, _: np.arctan(x), _at_most(1.0)),
    "Asin": Checked(lambda x, _: np.arcsin(x), _inside(lambda rest: 1 / np.sqrt(rest))),
    "Acos": Checked(lambda x, _: np.arccos(x), _inside(lambda rest: 1 / np.sqrt(rest))),
    "Atanh": Checked(lambda x, _: np.arctanh(x), _inside(lambda rest: 1 / rest)),
    "Acosh": Checked(
        lambda x, _: np.arccosh(x),
        lambda low, high, _: np.where(low > 1, 1 / np.sqrt(np.maximum((low - 1) * (low + 1), 0)), np.inf),
    ),
    "Asinh": Checked(lambda x, _: np.arcsinh(x), _at_most(1.0)),
    "Sin": Checked(lambda x, _: np.sin(x), _at_most(1.0)),
    "Cos": Checked(lambda x, _: np.cos(x), _at_most(1.0)),
    "Exp": Checked(lambda x, _: np.exp(x), lambda low, high, _: np.exp(high)),
    "Square": Checked(lambda x, _: x * x, lambda low, high, _: 2 * _largest(low, high)),
    "Cube": Checked(lambda x, _: x**3, lambda low, high, _: 3 * _largest(low, high) ** 2),
    "Log": Checked(lambda x, _: np.log(x), lambda low, high, _: np.where(low > 0, 1 / low, np.inf)),
    "Reciprocal": Checked(lambda x, _: 1 / x, lambda low, high, _: _least(low, high) ** -2.0),
    "InverseRoot": Checked(
        lambda x, _: 1 / np.sqrt(x), lambda low, high, _: np.where(low > 0, 0.5 * np.maximum(low, 0) ** -1.5, np.inf)
    ),
    "Sqrt": Checked(lambda x, _: np.sqrt(x), lambda low, high, _: _inverse_root(low)),
    "Power": Checked(
        lambda x, p: x**p, lambda low, high, p: np.where(low >= 0, p * np.maximum(high, 0) ** (p - 1), np.inf)
    ),
    "Root": Checked(
        lambda x, p: x**p, lambda low, high, p: np.where(low > 0, p * np.maximum(low, 0) ** (p - 1), np.inf)
    ),
}
"""By the names that nodes have for them; the parameter is α of ELU, λ of GELU, the exponent of a
power, and any number for the others.

Written from the functions' definitions, apart from the tables of nodes and bounds, whose claims they serve to check.
"""


def _as(x: Array, tensor: Tensor) -> Array:
    """The numbers of a float32 or float64 tensor in the format of ``x``, which represents all of them exactly."""
    return array(tensor).astype(x.dtype)


def _weighted(node: Weighted, x: Array) -> Array:
    return product(node, _as(x, node.weight), x) + bias(node).astype(x.dtype)


def _weighted_spread(node: Weighted, size: Array, part: float) -> Array:
    offset = np.abs(bias(node).astype(size.dtype)) + node.offset_terms
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
        **dict.fromkeys((Linear, Conv2d, Sparse), (_weighted, _weighted_spread)),
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
        return known.value(x.value, alpha), steepest, known.beside(x.value, alpha)


# An overflow or a division by zero leaves an error of inf or NaN, which ``margin_range`` recognises; numpy's warnings
# would add nothing.
@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def enclose(network: Network, x: Sequence[Fraction], dtype: type[np.floating[Any]] = np.float64) -> Enclosed:
    """The outputs of ``network`` at an exact point, each with a bound of its error.

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
    """The formats in which a network can be enclosed, from narrow to wide."""
    curves = [node.function for node in network.nodes if isinstance(node, Curve)]
    return list(ENCLOSE_UNITS) if all(CHECKED[name].wide for name in curves if name in CHECKED) else [np.float64]


def margin_range(prop: Property, y: Enclosed) -> tuple[Fraction | float, Fraction | float]:
    """A lower and an upper bound of a property's margin at the true outputs that ``y`` encloses.

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
