"""Smooth functions of one variable on numpy arrays, and bounds of their slopes, by the names that nodes have for them.

Written from the functions' definitions and apart from the tables of nodes and bounds, whose claims they serve to check.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray

_erf = np.vectorize(math.erf, otypes=[np.float64])


@dataclass(frozen=True)
class Function:
    """A function f(x, α) on float64 arrays.

    Attributes:
        value: f, off by a few units in the last place, or by as many unit roundoffs.
        steepest: (low, high, α) ≥ |f′(x, α)| for low ≤ x ≤ high, up to a few units in the last place.
    """

    value: Callable[[Array, float], Array]
    steepest: Callable[[Array, Array, float], Array | float]


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


def _least(low: Array, high: Array) -> Array:
    """The least |x| for low ≤ x ≤ high."""
    found: Array = np.where((low > 0) | (high < 0), np.minimum(np.abs(low), np.abs(high)), 0.0)
    return found


FUNCTIONS: dict[str, Function] = {
    "SiLU": Function(lambda x, _: x * _sigmoid(x), _at_most(1.0999)),
    "Mish": Function(lambda x, _: x * np.tanh(_softplus(x)), _at_most(1.0889)),
    "tanh-GELU": Function(lambda x, _: _tanh_gelu(x), _at_most(1.1295)),
    "ELU": Function(_elu, lambda low, high, alpha: max(1.0, alpha)),
    "Softplus": Function(lambda x, _: _softplus(x), _at_most(1.0)),
    "Softsign": Function(lambda x, _: x / (1 + np.abs(x)), _at_most(1.0)),
    "HardSwish": Function(lambda x, _: x * np.clip(x + 3, 0, 6) / 6, _at_most(1.5)),
    "Erf": Function(lambda x, _: _erf(x), _at_most(1.1284)),
    "Atan": Function(lambda x, _: np.arctan(x), _at_most(1.0)),
    "Sin": Function(lambda x, _: np.sin(x), _at_most(1.0)),
    "Cos": Function(lambda x, _: np.cos(x), _at_most(1.0)),
    "Exp": Function(lambda x, _: np.exp(x), lambda low, high, _: np.exp(high)),
    "Square": Function(lambda x, _: x * x, lambda low, high, _: 2 * _largest(low, high)),
    "Cube": Function(lambda x, _: x**3, lambda low, high, _: 3 * _largest(low, high) ** 2),
    "Log": Function(lambda x, _: np.log(x), lambda low, high, _: np.where(low > 0, 1 / low, np.inf)),
    "Reciprocal": Function(lambda x, _: 1 / x, lambda low, high, _: _least(low, high) ** -2.0),
    "InverseRoot": Function(
        lambda x, _: 1 / np.sqrt(x), lambda low, high, _: np.where(low > 0, 0.5 * np.maximum(low, 0) ** -1.5, np.inf)
    ),
    "Sqrt": Function(lambda x, _: np.sqrt(x), lambda low, high, _: _inverse_root(low)),
}
"""By name; the parameter α is that of ELU, and any number for the others."""
