"""Evaluation in float64 with a running error bound: what exact arithmetic is too slow for, or cannot express.

Each value v̂ carries e ≥ |v̂ − v|, v being the value in real arithmetic. For y = W·x + b, n terms each,

    |ŷ − y| ≤ γ_{n+2}·(|W|·|x̂| + |b|) + |W|·e_x,    γ_n = n·u / (1 − n·u), u = 2⁻⁵³

(N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002, sections 3.1 and 3.3), plus
``weight_error`` times the same magnitudes. An activation multiplies e by its Lipschitz constant and adds what
its own computation may be off by. ``_GENEROUS`` covers the rounding of the error bounds themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Add,
    Affine,
    Conv2d,
    Gelu,
    LeakyRelu,
    Linear,
    Permute,
    Relu,
    Reshape,
    Scale,
    Sigmoid,
    Tanh,
)
from verifiable_relu.spec.property import Property
from verifiable_relu.trust.affine import bias, product, weight

_UNIT = 2.0**-53
_GENEROUS = 1 + 2.0**-20
_TINY = 2.0**-1000
"""Covers underflow, with room for the largest sums."""
_SMOOTH_ULPS = 64
"""Relative error, in units of u, granted to exp, tanh and erfc and the few operations around them."""

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


@dataclass(frozen=True, eq=False)
class Enclosed:
    """Values known to lie in [value − error, value + error], element by element; an error may be inf or NaN."""

    value: np.ndarray
    error: np.ndarray

    @property
    def magnitude(self) -> np.ndarray:
        """An upper bound of |v|."""
        size: np.ndarray = np.abs(self.value) + self.error
        return size


def _affine(x: Enclosed, node: Affine) -> Enclosed:
    """A Linear, Conv2d or Scale node applied."""
    match node:
        case Linear() | Conv2d():
            weights, offset = weight(node).astype(np.float64), bias(node).astype(np.float64)
            value = product(node, weights, x.value) + offset
            size = product(node, np.abs(weights), x.magnitude) + np.abs(offset)
            spread = product(node, np.abs(weights), x.error)
        case Scale():
            center, scale, shift = (_array(t) for t in (node.center, node.scale, node.shift))
            value = scale * (x.value - center) + shift
            size = np.abs(scale) * (x.magnitude + np.abs(center)) + np.abs(shift)
            spread = np.abs(scale) * x.error
        case _:
            raise UnsupportedError("cannot be evaluated", place=f"node '{node.name}' ({node.op})")
    terms = node.terms + 2
    relative = terms * _UNIT / (1 - terms * _UNIT) + 2 * node.weight_error
    return Enclosed(value, (spread + relative * size) * _GENEROUS + _TINY)


def _gelu(x: np.ndarray, lam: float) -> np.ndarray:
    """x·Φ(λx) by the complementary error function, which keeps its relative accuracy in the tail."""
    image: np.ndarray = x * (0.5 * _erfc(-lam * x / math.sqrt(2)))
    return image


def _array(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().cpu().numpy().astype(np.float64)
    return array


# What overflows has an infinite error, or NaN for one.
@np.errstate(over="ignore", invalid="ignore")
def enclose(network: Network, x: Sequence[Fraction]) -> Enclosed:
    """The outputs of ``network`` at the exact point x, flat in row-major order, each with its error bound.

    Raises:
        UnsupportedError: if a node is unknown.
    """
    point = np.array([float(value) for value in x]).reshape(network.input_shape)
    values = [Enclosed(point, _UNIT * np.abs(point) + _TINY)]
    for node in network.nodes[1:]:
        at = values[node.inputs[0]]
        match node:
            case Affine():
                value = _affine(at, node)
            case Add():
                other = values[node.inputs[1]]
                total = at.value + other.value
                value = Enclosed(total, (at.error + other.error + _UNIT * np.abs(total)) * _GENEROUS + _TINY)
            case Relu():
                value = Enclosed(np.maximum(at.value, 0), at.error)
            case LeakyRelu():
                slope = _array(node.slope)
                image = np.where(at.value >= 0, at.value, slope * at.value)
                spread = np.maximum(np.abs(slope), 1) * at.error
                value = Enclosed(image, (spread + _UNIT * np.abs(image)) * _GENEROUS + _TINY)
            case Sigmoid() | Tanh():
                # tanh(x/2)/2 + 1/2 overflows nowhere, and its error is absolute, which is all that is asked.
                half = isinstance(node, Sigmoid)
                image = 0.5 + 0.5 * np.tanh(at.value / 2) if half else np.tanh(at.value)
                value = Enclosed(image, (at.error + _SMOOTH_ULPS * _UNIT) * _GENEROUS)
            case Gelu():
                # The slope of x·Φ(λx) lies in [−0.12890, 1.12890] for every λ (arXiv 2603.21991). The argument of Φ
                # is off by a few u relative, and |t·φ(t)| < 1/4.
                image = _gelu(at.value, float(node.lam))
                value = Enclosed(
                    image, (1.1290 * at.error + _SMOOTH_ULPS * _UNIT * np.abs(at.value)) * _GENEROUS + _TINY
                )
            case Reshape():
                value = Enclosed(at.value.reshape(node.shape), at.error.reshape(node.shape))
            case Permute():
                value = Enclosed(at.value.transpose(node.axes), at.error.transpose(node.axes))
            case _:
                raise UnsupportedError("cannot be evaluated", place=f"node '{node.name}' ({node.op})")
        values.append(value)
    last = values[-1]
    shape = last.value.shape
    return Enclosed(last.value.flatten(), np.broadcast_to(last.error, shape).flatten())


def margin_range(prop: Property, y: Enclosed) -> tuple[Fraction | float, Fraction | float]:
    """A range that holds the margin of the true outputs: exact in all but y's own errors.

    Returns (−inf, inf) if an output or its error is not finite.
    """
    if not (np.isfinite(y.value).all() and np.isfinite(y.error).all()):
        return -math.inf, math.inf
    center = [Fraction(v) for v in y.value.tolist()]
    error = [Fraction(e) for e in y.error.tolist()]
    low: Fraction | float = math.inf
    high: Fraction | float = math.inf
    for polytope in prop.unsafe:
        slacks = [
            (row.slack(center), sum((abs(c) * error[i] for i, c in row.coefficients), Fraction(0))) for row in polytope
        ]
        low = min(low, max((slack - spread for slack, spread in slacks), default=-math.inf))
        high = min(high, max((slack + spread for slack, spread in slacks), default=-math.inf))
    return low, high
