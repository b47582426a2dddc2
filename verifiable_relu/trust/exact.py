"""Exact evaluation of networks at rational points: of piecewise linear ones, and of those that multiply.

Stored weights are binary floating-point numbers, so that each affine layer is an integer matrix times a power of two.
A rational input is a vector of integers divided by one common denominator: an odd d > 0, beside a power of two. ReLU
and LeakyReLU are positively homogeneous: they commute with multiplication by d; functions that jump give whole numbers
times d, and what a network divides by is a factor of d. A network is therefore evaluated on d times the true values,
behind a product of two values on d² times these, and so on, in Python integers with one exponent of two for each array,
and the outputs are divided at the end. No step rounds. The products follow the operators' definitions, and torch
computes nothing, because all this checks what torch computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network import nodes
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.graph import Network

Array = np.ndarray
Weighted = nodes.Linear | nodes.Conv2d | nodes.Sparse


def array(tensor: Tensor) -> Array:
    """Return the numbers of a tensor, bit for bit, in the tensor's own dtype."""
    return tensor.detach().cpu().numpy()


def _windows(node: nodes.Conv2d, weights: Array, x: Array) -> Array:
    top, left, bottom, right = node.padding
    channels, height, width = x.shape
    # np.pad would fill an object array with 64-bit zeros, which overflow when they meet a long integer.
    padded = np.zeros((channels, top + height + bottom, left + width + right), dtype=x.dtype)
    padded[:, top : top + height, left : left + width] = x
    (rows, columns), (down, across), (stride_down, stride_across) = weights.shape[2:], node.dilation, node.stride
    windows = sliding_window_view(padded, (down * (rows - 1) + 1, across * (columns - 1) + 1), axis=(1, 2))
    windows = windows[:, ::stride_down, ::stride_across, ::down, ::across]
    grouped = windows.reshape(node.groups, -1, *windows.shape[1:])
    kernels = weights.reshape(node.groups, -1, *weights.shape[1:])
    parts = [
        np.moveaxis(patch, 0, 2).reshape(patch.shape[1] * patch.shape[2], -1) @ kernel.reshape(len(kernel), -1).T
        for patch, kernel in zip(grouped, kernels, strict=True)
    ]
    return np.concatenate(parts, axis=1).T.reshape(node.shape)


_PRODUCTS: Table[Callable[[Any, Array, Array], Array]] = Table(
    "the product of weights and values",
    {
        nodes.Linear: lambda node, weights, x: x @ weights.T,
        nodes.Conv2d: _windows,
        nodes.Sparse: lambda node, weights, x: (
            (weights * x.reshape(-1)[array(node.index)]).sum(axis=1).reshape(node.shape)
        ),
        nodes.Scale: Refusal("has no weight matrix"),
    },
    group=nodes.Affine,
)


def product(node: Weighted, weights: Array, x: Array) -> Array:
    """Return the product W·x of weights in a node's layout and one sample; the bias is not added.

    Args:
        node: its kind, stride, padding and groups define the product.
        weights: W in place of ``node.weight`` and of its shape: the weights as integers, say, or their absolute values.
        x: one sample of the node's input shape, in the same kind of number as ``weights``.

    Returns:
        An array of the node's shape, in the same kind of number.
    """
    return _PRODUCTS[node](node, weights, x)


def _constant(stored: Tensor, denominator: int) -> Dyadic:
    """Return a stored constant times the common denominator, as the values are to which it is added."""
    exact = Dyadic.of(array(stored))
    return Dyadic(exact.numbers * denominator, exact.exponent)


def _weighted(node: Weighted, denominator: int, x: Dyadic) -> Dyadic:
    linear = x.weighed(array(node.weight), node.weight[0].numel(), partial(product, node))
    return linear + _constant(node.offset(), denominator)


def _scale(node: nodes.Scale, denominator: int, x: Dyadic) -> Dyadic:
    center, shift = _constant(node.center, denominator), _constant(node.shift, denominator)
    if not node.weight_error:
        return Dyadic.of(array(node.scale)) * (x - center) + shift
    assert node.divisor is not None
    odd, twos = _divisor(node.divisor)
    moved, most = x - center, max(twos.flat)
    # The common denominator has the odd part of each node's divisors for a factor, so that nothing is left over.
    return Dyadic(moved.numbers // odd << (most - twos), moved.exponent - most) + shift


def _divisor(stored: Tensor) -> tuple[Array, Array]:
    """Return the odd integers m and the exponents e of numbers m·2^e, which are not 0, as object arrays."""
    exact = Dyadic.of(array(stored))
    twos = np.asarray(np.frompyfunc(lambda n: (n & -n).bit_length() - 1, 1, 1)(exact.numbers), dtype=object)
    return np.asarray(exact.numbers >> twos, dtype=object), np.asarray(twos + exact.exponent, dtype=object)


_POWERS = {"Square": 2, "Cube": 3}
"""The curves that are polynomials."""


def _power(node: nodes.Curve, denominator: int, x: Dyadic) -> Dyadic:
    if node.function not in _POWERS:
        raise UnsupportedError("has irrational values", place=node.place)
    return Dyadic(x.numbers ** _POWERS[node.function], x.exponent * _POWERS[node.function])


def _kinked(node: nodes.Kinked, denominator: int, x: Dyadic) -> Dyadic:
    positive, negative = (Dyadic(part(x.numbers, 0), x.exponent) for part in (np.maximum, np.minimum))
    return positive + Dyadic.of(array(node.below)) * negative


def _sign(n: Array, d: int) -> Array:
    return (n > 0).astype(object) - (n < 0).astype(object)


def _nearest(n: Array, d: int) -> Array:
    whole, rest = (2 * n + d) // (2 * d), (2 * n + d) % (2 * d)
    return whole - ((rest == 0) & (whole % 2 == 1)).astype(object)


STEPPED: dict[str, Callable[[Array, int], Array]] = {
    "Sign": _sign,
    "Floor": lambda n, d: n // d,
    "Ceil": lambda n, d: -(-n // d),
    "Round": _nearest,
    "Truncate": lambda n, d: _sign(n, d) * (abs(n) // d),
}
"""The functions that jump at n/d, for arrays of integers n and an integer d > 0."""


def _step(node: nodes.Step, denominator: int, x: Dyadic) -> Dyadic:
    up, down = max(x.exponent, 0), max(-x.exponent, 0)
    whole = STEPPED[node.function](x.numbers << up, denominator << down)
    return Dyadic(np.asarray(whole, dtype=object) * denominator, 0)


VALUES: Table[Callable[..., Dyadic]] = Table(
    "exact evaluation",
    {
        **dict.fromkeys((nodes.Linear, nodes.Conv2d, nodes.Sparse), _weighted),
        nodes.Scale: _scale,
        nodes.Add: lambda node, denominator, x, y: x + y,
        nodes.Kinked: _kinked,
        nodes.Step: _step,
        nodes.Identity: lambda node, denominator, x: x,
        nodes.Product: lambda node, denominator, x, y: x * y,
        nodes.MatMul: lambda node, denominator, x, y: Dyadic(np.matmul(x.numbers, y.numbers), x.exponent + y.exponent),
        nodes.Seen: lambda node, denominator, *xs: xs[-1],
        nodes.Reshape: lambda node, denominator, x: Dyadic(x.numbers.reshape(node.shape), x.exponent),
        nodes.Permute: lambda node, denominator, x: Dyadic(x.numbers.transpose(node.axes), x.exponent),
        nodes.Curve: _power,
        nodes.Hardened: Refusal("stands for a set of activations, not for one value"),
    },
)
"""The value of each kind of node: a function of the node, a denominator and the values of the node's inputs.

All arguments are the true ones times the denominator; so is the result, but that of a product, which is the true one
times as high a power of the denominator as the number of its factors.
"""

_DEGREE = 64
"""The largest degree of a network that is evaluated, which numbers' lengths grow with."""


def _degrees(network: Network) -> list[int]:
    """Return the power of the inputs' denominator that each node's values are held with: their degree in the inputs."""
    degrees = [1]
    for node in network.nodes[1:]:
        factors = 2 if isinstance(node, nodes.Bilinear) else _POWERS.get(getattr(node, "function", ""), 1)
        degrees.append(factors * max(degrees[i] for i in node.inputs))
    return degrees


def evaluable(network: Network) -> bool:
    """Return True if rational arithmetic can evaluate the network.

    It can where every node is piecewise linear, a polynomial, or jumps between whole numbers, and every stored weight
    is the true one (``weight_error`` is 0), or the reciprocal of a divisor that is.
    """
    known = network.arithmetic == "real" and all(
        node in VALUES and (not isinstance(node, nodes.Curve) or node.function in _POWERS) for node in network.nodes[1:]
    )
    exact = all(not node.weight_error or node.divisor is not None for node in network.affine)
    return known and exact and max(_degrees(network)) <= _DEGREE


def evaluate_exact(network: Network, x: Sequence[Fraction]) -> list[Fraction]:
    """Return the outputs of ``network`` at the exact point x, in exact arithmetic.

    Args:
        network: ``evaluable``.
        x: the input variables in row-major order.

    Returns:
        The output variables in row-major order.

    Raises:
        UnsupportedError: if the network is not ``evaluable``.
    """
    if not evaluable(network):
        raise UnsupportedError(f"the network '{network.name}' cannot be evaluated in rational arithmetic")
    parts = (math.lcm(*_divisor(n.divisor)[0].flat) for n in network.affine if n.divisor is not None)
    common = math.lcm(*(value.denominator for value in x)) * math.prod(parts)
    point = np.array([value.numerator * (common // value.denominator) for value in x], dtype=object)
    twos = (common & -common).bit_length() - 1
    odd, degrees = common >> twos, _degrees(network)
    values = [Dyadic(point.reshape(network.input_shape), -twos)]
    for node in network.nodes[1:]:
        degree = max(degrees[i] for i in node.inputs)
        factors = (odd ** (degree - degrees[i]) for i in node.inputs)
        inputs = (values[i] for i in node.inputs)
        raised = (v if f == 1 else Dyadic(v.numbers * f, v.exponent) for v, f in zip(inputs, factors, strict=True))
        values.append(VALUES[node](node, odd**degree, *raised))
    last = values[-1]
    unit = Fraction(2) ** last.exponent / odd ** degrees[-1]
    return [int(number) * unit for number in last.numbers.flatten()]


def multiplications(network: Network) -> int:
    """Return the number of multiplications in one exact evaluation, those of activations left out."""
    weights = ((node, getattr(node, "weight", None)) for node in network.affine)
    linear = sum(node.size * (1 if weight is None else weight[0].numel()) for node, weight in weights)
    return linear + sum(node.size * node.terms for node in network.nodes if isinstance(node, nodes.Bilinear))
