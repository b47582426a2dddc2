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
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from verifiable_relu.ir.enclosure import Enclosed
from verifiable_relu.ir.functions.curves import CHECKED
from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.enclosure import Arithmetic, whole
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Affine, Conv2d, Curve, Linear, Scale, Sparse
from verifiable_relu.rounding import ENCLOSE_TINY, ENCLOSE_UNITS
from verifiable_relu.trust.exact import Array, Weighted, array, product


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
