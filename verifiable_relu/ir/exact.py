"""Exact evaluation of networks at rational points: of piecewise linear ones, of polynomials, and of those that jump.

Stored weights are binary floating-point numbers: each linear map is an integer matrix times a power of two. A rational
input is a vector of integers over one common denominator, d·2^k with an odd d > 0. ReLU and LeakyReLU are positively
homogeneous: they commute with multiplication by d. A step function gives whole numbers times d, and what a network
divides by is a factor of d. So a network is evaluated on d times the true values, behind a product of two values on d²
times these, and so on, in Python integers with one exponent of two for each vector. The outputs are divided at the end.
No step rounds, and torch computes nothing, because this checks what torch computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from verifiable_relu.dyadic import Dyadic, odd_parts
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.linear import Diagonal, Gather
from verifiable_relu.ir.network import Affine, Elementwise, Maximum, Network, Op, Product

MOST_FACTORS = 64
"""The largest degree of a network that is evaluated, which the length of its integers grows with."""


def evaluate_exact(network: Network, x: Sequence[Fraction]) -> list[Fraction]:
    """Return the outputs at a point, (output_size,), in exact arithmetic.

    Args:
        network: ``is_evaluable``.
        x: (input_size,).

    Raises:
        UnsupportedError: if the network is not ``is_evaluable``.
    """
    if not is_evaluable(network):
        raise UnsupportedError(f"the network '{network.name}' cannot be evaluated in rational arithmetic")
    divisors = (_divisor(op) for op in network.ops)
    parts = (math.lcm(*odd_parts(divisor)[0].tolist()) for divisor in divisors if divisor is not None)
    common = math.lcm(*(value.denominator for value in x)) * math.prod(parts)
    point = np.array([value.numerator * (common // value.denominator) for value in x], dtype=object)
    twos = (common & -common).bit_length() - 1
    odd, degrees = common >> twos, _degrees(network)
    values = [Dyadic(point, -twos)]
    for op in network.ops[1:]:
        degree = max(degrees[i] for i in op.inputs)
        inputs = [_times(values[i], odd ** (degree - degrees[i])) for i in op.inputs]
        values.append(_exact_value(op, odd**degree, *inputs))
    unit = Fraction(2) ** values[-1].exponent / odd ** degrees[-1]
    return [int(number) * unit for number in values[-1].numbers]


def _exact_value(op: Op, denominator: int, *inputs: Dyadic) -> Dyadic:
    """Return an op's value, (size,), scaled by a power of an odd denominator as its inputs' values are.

    The denominator is a multiple of the odd parts of what the op divides by. Raises UnsupportedError for irrational
    values.
    """
    x = inputs[0]
    if isinstance(op, Affine):
        weight, divisor = op.map.weight.detach().cpu().numpy(), _divisor(op)
        if divisor is not None:
            odd, shift, least = odd_parts(divisor)
            most = int(shift.max())
            # The denominator is a multiple of each odd part, so that nothing is left over.
            found = Dyadic(x.numbers // odd.astype(object) << (most - shift).astype(object), x.exponent - most - least)
        elif isinstance(op.map, Gather):
            found = Dyadic(op.map.product(np.ones(1, dtype=object), x.numbers), x.exponent)
        else:
            found = x.weighed(weight, op.map.terms, op.map.product)
        bias = None if op.bias is None else Dyadic.from_floats(op.bias.detach().cpu().numpy())
        return found if bias is None else found + _times(bias, denominator)
    if isinstance(op, Elementwise):
        value = op.function.exact(x, denominator)
        if value is None:
            raise UnsupportedError("has irrational values", place=op.place)
        return value
    if isinstance(op, Maximum):
        return Dyadic(np.maximum.reduce(x.numbers[op.candidates.numpy()]), x.exponent)
    for other in inputs[1:]:
        x = x * other if isinstance(op, Product) else x + other
    return x


def is_evaluable(network: Network) -> bool:
    """Return True if rational arithmetic can evaluate the network.

    It can if every function has exact values, and every stored number is the one that the file means, or the
    reciprocal of a divisor that is.
    """
    affine = all(op.is_exact or _divisor(op) is not None for op in network.ops if isinstance(op, Affine))
    functions = all(op.is_exact for op in network.ops if isinstance(op, Elementwise))
    return network.arithmetic == "real" and affine and functions and max(_degrees(network)) <= MOST_FACTORS


def multiplications(network: Network) -> int:
    """Return the number of multiplications in one exact evaluation, those of functions left out."""
    affine = sum(op.size * max(1, op.map.terms) for op in network.ops if isinstance(op, Affine))
    return affine + sum(op.size for op in network.ops if isinstance(op, Product))


def _degrees(network: Network) -> list[int]:
    """Return the power of the denominator by which each op's value is held."""
    degrees = [1]
    for op in network.ops[1:]:
        own = 2 if isinstance(op, Product) else op.function.degree if isinstance(op, Elementwise) else 1
        degrees.append(own * max(degrees[i] for i in op.inputs))
    return degrees


def _times(x: Dyadic, factor: int) -> Dyadic:
    return x if factor == 1 else Dyadic(x.numbers * factor, x.exponent)


def _divisor(op: Op) -> np.ndarray | None:
    """Return the exact divisors of an op whose weights are rounded reciprocals; None for other ops."""
    exact = isinstance(op, Affine) and op.weight_error and op.bias_error is None
    found = op.map.divisor if exact and isinstance(op, Affine) and isinstance(op.map, Diagonal) else None
    return None if found is None else found.detach().cpu().numpy()
