"""Exact evaluation of piecewise-linear networks at rational points.

Stored weights are binary floating-point numbers, so each layer is an integer matrix times a power of two. A
rational input is an integer vector over one common denominator, and ReLU and LeakyReLU, being positively
homogeneous, commute with it: the whole network is evaluated in integers, with one exponent per layer and the
denominator's odd part carried along. Nothing is rounded anywhere, and torch computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from torch import Tensor

from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Add, Conv2d, LeakyRelu, Linear, Permute, Relu, Reshape, Scale
from verifiable_relu.trust.affine import bias, product, weight


def evaluable(network: Network) -> bool:
    """Whether the network has an exact value: piecewise linear, every weight stored as it is meant."""
    return network.piecewise_linear and network.weight_error == 0


def evaluate_exact(network: Network, x: Sequence[Fraction]) -> list[Fraction]:
    """The outputs of ``network`` at the exact point x, in exact arithmetic.

    Args:
        network: piecewise linear, with ``weight_error`` 0.
        x: the input variables in row-major order.

    Returns:
        The output variables in row-major order.

    Raises:
        UnsupportedError: if the network has no exact rational value.
    """
    if not evaluable(network):
        raise UnsupportedError(f"the network '{network.name}' cannot be evaluated in rational arithmetic")
    denominator = math.lcm(*(value.denominator for value in x))
    # Every value below is the true one times the denominator: constants are multiplied by it, weights are not.
    point = np.array([value.numerator * (denominator // value.denominator) for value in x], dtype=object)
    values = [Dyadic(point.reshape(network.input_shape), 0)]

    def constant(tensor: Tensor | np.ndarray) -> Dyadic:
        array = tensor.detach().cpu().numpy() if isinstance(tensor, Tensor) else tensor
        plain = Dyadic.of(array)
        return Dyadic(plain.numbers * denominator, plain.exponent)

    def factor(tensor: Tensor) -> Dyadic:
        return Dyadic.of(tensor.detach().cpu().numpy())

    for node in network.nodes[1:]:
        at = values[node.inputs[0]]
        match node:
            case Linear() | Conv2d():
                weights = Dyadic.of(weight(node))
                linear = Dyadic(product(node, weights.numbers, at.numbers), weights.exponent + at.exponent)
                value = linear + constant(bias(node))
            case Scale():
                value = factor(node.scale) * (at - constant(node.center)) + constant(node.shift)
            case Add():
                value = at + values[node.inputs[1]]
            case Relu():
                value = Dyadic(np.maximum(at.numbers, 0), at.exponent)
            case LeakyRelu():
                positive, negative = np.maximum(at.numbers, 0), np.minimum(at.numbers, 0)
                value = Dyadic(positive, at.exponent) + factor(node.slope) * Dyadic(negative, at.exponent)
            case Reshape():
                value = Dyadic(at.numbers.reshape(node.shape), at.exponent)
            case Permute():
                value = Dyadic(at.numbers.transpose(node.axes), at.exponent)
            case _:
                raise UnsupportedError("cannot be evaluated exactly", place=f"node '{node.name}' ({node.op})")
        values.append(value)
    last = values[-1]
    unit = Fraction(2) ** last.exponent / denominator
    return [int(number) * unit for number in last.numbers.flatten()]
