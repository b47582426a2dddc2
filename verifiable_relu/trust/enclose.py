"""Evaluation of a network in float64 with a running error bound.

It serves networks for which exact arithmetic is too slow, and those with irrational values (Sigmoid, Tanh, GELU).

Each computed value v̂ comes with an error bound e ≥ |v̂ − v|, where v is the value in real arithmetic. For y = W·x + b
with sums of n terms,

    |ŷ − y| ≤ γ_{n+2}·(|W|·|x̂| + |b|) + |W|·e_x,    γ_n = n·u / (1 − n·u), u = 2⁻⁵³

(N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002, sections 3.1 and 3.3), plus
``weight_error`` times the same magnitudes. An activation multiplies e by its Lipschitz constant and adds the rounding
error of its own computation. The factor ``ENCLOSE_OWN`` covers the rounding of the error bounds themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from torch import Tensor

from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Add,
    Affine,
    Bilinear,
    Conv2d,
    Gelu,
    Hardened,
    Identity,
    LeakyRelu,
    Linear,
    MatMul,
    Permute,
    Product,
    Relu,
    Reshape,
    Scale,
    Sigmoid,
    Smooth,
    Sparse,
    Tanh,
)
from verifiable_relu.rounding import ENCLOSE_OWN, ENCLOSE_TINY, ENCLOSE_ULPS, ENCLOSE_UNIT
from verifiable_relu.spec.property import Property
from verifiable_relu.trust.affine import Weighted, array, bias, product
from verifiable_relu.trust.functions import FUNCTIONS

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


@dataclass(frozen=True, eq=False)
class Enclosed:
    """Values known to lie in [value − error, value + error], element by element.

    An error of inf or NaN stands for a value that is not known at all.
    """

    value: np.ndarray
    error: np.ndarray

    @property
    def magnitude(self) -> np.ndarray:
        """An upper bound of the true values' magnitudes, element by element."""
        size: np.ndarray = np.abs(self.value) + self.error
        return size


def _summed(node: Affine, value: np.ndarray, size: np.ndarray, spread: np.ndarray) -> Enclosed:
    """The enclosed value of an affine node.

    Args:
        node: its number of terms and ``weight_error`` set the relative error.
        value: the computed W·x̂ + b.
        size: |W|·|x| + |b|, with an upper bound of |x|.
        spread: |W|·e, with the error bound e of x̂.
    """
    terms = node.terms + 2
    relative = terms * ENCLOSE_UNIT / (1 - terms * ENCLOSE_UNIT) + 2 * node.weight_error
    return Enclosed(value, (spread + relative * size) * ENCLOSE_OWN + ENCLOSE_TINY)


def _weighted(node: Weighted, x: Enclosed) -> Enclosed:
    weights, offset = _wide(node.weight), bias(node).astype(np.float64)
    value = product(node, weights, x.value) + offset
    size = product(node, np.abs(weights), x.magnitude) + np.abs(offset)
    return _summed(node, value, size, product(node, np.abs(weights), x.error))


def _scale(node: Scale, x: Enclosed) -> Enclosed:
    center, scale, shift = (_wide(tensor) for tensor in (node.center, node.scale, node.shift))
    size = np.abs(scale) * (x.magnitude + np.abs(center)) + np.abs(shift)
    return _summed(node, scale * (x.value - center) + shift, size, np.abs(scale) * x.error)


def _add(node: Add, x: Enclosed, y: Enclosed) -> Enclosed:
    total = x.value + y.value
    return Enclosed(total, (x.error + y.error + ENCLOSE_UNIT * np.abs(total)) * ENCLOSE_OWN + ENCLOSE_TINY)


def _by_element(node: Product, x: Enclosed, y: Enclosed) -> Enclosed:
    return _product(node, np.multiply, x, y)


def _by_matrix(node: MatMul, x: Enclosed, y: Enclosed) -> Enclosed:
    return _product(node, np.matmul, x, y)


def _product(node: Bilinear, by: Callable[[np.ndarray, np.ndarray], np.ndarray], x: Enclosed, y: Enclosed) -> Enclosed:
    """x∘y, for which (x̂ + d)∘(ŷ + e) − x̂∘ŷ is at most |d|∘|ŷ| + (|x̂| + |d|)∘|e|."""
    gamma = (node.terms + 4) * ENCLOSE_UNIT / (1 - (node.terms + 4) * ENCLOSE_UNIT)
    spread = by(x.error, np.abs(y.value)) + by(x.magnitude, y.error)
    size = by(np.abs(x.value), np.abs(y.value))
    return Enclosed(
        by(x.value, y.value), (spread * (1 + gamma) + gamma * size) * ENCLOSE_OWN + node.terms * ENCLOSE_TINY
    )


def _relu(node: Relu, x: Enclosed) -> Enclosed:
    return Enclosed(np.maximum(x.value, 0), x.error)


def _leaky_relu(node: LeakyRelu, x: Enclosed) -> Enclosed:
    slope = _wide(node.slope)
    image = np.where(x.value >= 0, x.value, slope * x.value)
    spread = np.maximum(np.abs(slope), 1) * x.error
    return Enclosed(image, (spread + ENCLOSE_UNIT * np.abs(image)) * ENCLOSE_OWN + ENCLOSE_TINY)


def _sigmoid(node: Sigmoid, x: Enclosed) -> Enclosed:
    # tanh(x/2)/2 + 1/2 overflows nowhere. Its error is bounded absolutely, not relatively, which is enough here.
    return Enclosed(0.5 + 0.5 * np.tanh(x.value / 2), (x.error + ENCLOSE_ULPS * ENCLOSE_UNIT) * ENCLOSE_OWN)


def _tanh(node: Tanh, x: Enclosed) -> Enclosed:
    return Enclosed(np.tanh(x.value), (x.error + ENCLOSE_ULPS * ENCLOSE_UNIT) * ENCLOSE_OWN)


def _gelu(node: Gelu, x: Enclosed) -> Enclosed:
    """x·Φ(λx) by the complementary error function, which keeps its relative accuracy in the tail.

    The slope of x·Φ(λx) lies in [−0.12890, 1.12890] for every λ (arXiv 2603.21991). The computed argument t of Φ has a
    relative error of a few u, which changes Φ(t) by at most that relative error times |t·φ(t)| < 1/4.
    """
    image = x.value * (0.5 * _erfc(-float(node.lam) * x.value / math.sqrt(2)))
    error = (1.1290 * x.error + ENCLOSE_ULPS * ENCLOSE_UNIT * np.abs(x.value)) * ENCLOSE_OWN + ENCLOSE_TINY
    return Enclosed(image, error)


def _function(node: Smooth, x: Enclosed) -> Enclosed:
    function, alpha = FUNCTIONS[node.function], float(node.parameter)
    image = function.value(x.value, alpha)
    spread = function.steepest(x.value - x.error, x.value + x.error, alpha) * x.error
    return Enclosed(image, (spread + ENCLOSE_ULPS * ENCLOSE_UNIT * (1 + np.abs(image))) * ENCLOSE_OWN + ENCLOSE_TINY)


def _reshape(node: Reshape, x: Enclosed) -> Enclosed:
    return Enclosed(x.value.reshape(node.shape), x.error.reshape(node.shape))


def _permute(node: Permute, x: Enclosed) -> Enclosed:
    return Enclosed(x.value.transpose(node.axes), x.error.transpose(node.axes))


def _wide(tensor: Tensor) -> np.ndarray:
    """The numbers of a float32 or float64 tensor as float64, which represents all of them exactly."""
    return array(tensor).astype(np.float64)


ENCLOSURES: Table[Callable[..., Enclosed]] = Table(
    "evaluation with error bounds",
    {
        Linear: _weighted,
        Conv2d: _weighted,
        Sparse: _weighted,
        Scale: _scale,
        Add: _add,
        Product: _by_element,
        MatMul: _by_matrix,
        Identity: lambda node, x: x,
        Relu: _relu,
        LeakyRelu: _leaky_relu,
        Sigmoid: _sigmoid,
        Tanh: _tanh,
        Gelu: _gelu,
        Smooth: _function,
        Reshape: _reshape,
        Permute: _permute,
        Hardened: Refusal("stands for a set of activations, not for one value"),
    },
)
"""The enclosed value of each kind of node: a function of the node and the enclosed values of its inputs."""


# An overflow or a division by zero leaves an error of inf or NaN, which ``margin_range`` recognises; numpy's warnings
# would add nothing.
@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def enclose(network: Network, x: Sequence[Fraction]) -> Enclosed:
    """The outputs of ``network`` at an exact point, each with a bound of its error.

    Args:
        network: any network without activations that stand for sets of functions.
        x: the input variables in row-major order.

    Returns:
        The output variables, flat in row-major order.

    Raises:
        UnsupportedError: if the network has a node of a kind that ``ENCLOSURES`` refuses.
    """
    point = np.array([float(value) for value in x]).reshape(network.input_shape)
    values = [Enclosed(point, ENCLOSE_UNIT * np.abs(point) + ENCLOSE_TINY)]
    for node in network.nodes[1:]:
        values.append(ENCLOSURES[node](node, *(values[i] for i in node.inputs)))
    last = values[-1]
    shape = last.value.shape
    return Enclosed(last.value.flatten(), np.broadcast_to(last.error, shape).flatten())


def margin_range(prop: Property, y: Enclosed) -> tuple[Fraction | float, Fraction | float]:
    """A lower and an upper bound of a property's margin at the true outputs that ``y`` encloses.

    The bounds are computed in rational arithmetic, so that the errors of ``y`` alone widen the range.

    Returns:
        (lower, upper); (−inf, inf) if an output or its error is not finite.
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
